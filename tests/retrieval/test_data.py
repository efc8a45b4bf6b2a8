"""Retrieval's data: parts that share no class, class folders with queries and galleries, known sets, own functions."""

import io
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from PIL import Image
from torch import nn

from helpers.modules import forgotten
from helpers.refusals import assert_refused, assert_warned
from testers.loader import InFolders, Picture, Truth, class_names, paint, painted

pytest.importorskip("torchvision")
pytest.importorskip("faiss")
pytest.importorskip("pytorch_metric_learning")

from pytorch_metric_learning.losses import ContrastiveLoss

from metricopt_ext.data.labelled import Labelled
from metricopt_ext.data.splits import Splits
from metricopt_ext.errors import ConfigError, DataError
from metricopt_ext.retrieval.config import LossConfig, MetricConfig, RetrievalConfig
from metricopt_ext.retrieval.data import (
    load_digits,
    load_omniglot,
    load_stanford_online_products,
    queries_of,
    split_classes,
)
from metricopt_ext.retrieval.layouts import load_class_folders
from metricopt_ext.retrieval.models import build_model
from metricopt_ext.retrieval.named_loss import build_loss
from metricopt_ext.retrieval.named_metric import build_metric
from metricopt_ext.retrieval.splits import load_splits
from metricopt_ext.tasks.batches import ClassBatches
from metricopt_ext.utils.config import load_config

# --- Class folders -------------------------------------------------------------------------------------------------


@st.composite
def pictures_of_other_classes(draw: st.DrawFn, parts: dict[str, int]) -> Truth:
    """Draw pictures by their numbers, of as many classes as each part has; a class has two or three of them."""
    count = sum(parts.values())
    names = draw(
        st.lists(
            class_names("words").map(lambda found: found[0]), min_size=count, max_size=count, unique_by=str.casefold
        )
    )
    rng = draw(st.randoms(use_true_random=False))
    numbers, left, found = rng.sample(range(256), 256), sorted(names), dict[str, list[Picture]]()
    for part, wanted in parts.items():
        labels = [left.pop(rng.randrange(len(left))) for _ in range(wanted)]
        found[part] = [Picture(numbers.pop(), label) for label in labels for _ in range(rng.randint(2, 3))]
    return Truth(tuple(sorted(names)), found)


def read_folders(*overrides: str) -> tuple[Splits, dict[str, list[Picture]]]:
    """Read as the tool does."""
    config = load_config(RetrievalConfig, None, ["data.name=class_folders", "model.name=conv4", *overrides])
    config.check()
    assert all(file.exists() for file in config.data_files())
    splits = load_splits(config, 0)
    parts = {}
    for name in ("train", "validation", "test"):
        part = getattr(splits, name)
        images = [part.x[i] for i in range(len(part))]
        parts[name] = [
            Picture(painted(image), splits.class_names[label])
            for image, label in zip(images, part.y.tolist(), strict=True)
        ]
    return splits, parts


def of_another_part(folder: Path, truth: Truth) -> list[str]:
    """Put a picture of a class of train into the last part."""
    label = truth.parts["train"][0].label
    paint(folder / [*truth.parts][-1] / label / "again.png", 255)
    return [repr(label)]


def no_picture(folder: Path, truth: Truth) -> None:
    (folder / "train" / truth.parts["train"][0].label / "0.png").write_bytes(b"no picture")


class TestClassFolders(InFolders):
    """Each part has classes of its own, by a folder for each part or a root of them; from memory or from disk."""

    in_order = False
    ways = ({}, {"data.stream": "true"}, {"root": True})
    edits = (("a class in two parts", of_another_part, ["train", "test"]), ("no picture", no_picture, ["0.png"]))

    def truths(self, *, given: bool = True) -> Any:
        return pictures_of_other_classes({"train": 3, "validation": 2, "test": 2})

    def write(self, folder: Path, truth: Truth, rng: random.Random) -> None:
        for part, rows in truth.parts.items():
            for row in rng.sample(rows, len(rows)):
                own = folder / part / row.label
                paint(own / f"{len([*own.iterdir()]) if own.exists() else 0}.png", row.number)

    def read(self, folder: Path, root: bool = False, **keys: Any) -> Truth:
        names = {"train": "train", "validation": "val", "test": "test"}
        where = [f"data.root={folder}"] if root else [f"data.{key}={folder / part}" for part, key in names.items()]
        splits, parts = read_folders(*where, *(f"{key}={value}" for key, value in keys.items()))
        return Truth(tuple(sorted(splits.class_names)), parts)


class TestQueriesAndGallery(TestClassFolders):
    """Of a test part in two folders, the queries come first; validation classes are held out of train."""

    ways = ({}, {"data.stream": "true"})
    edits = (("no gallery", lambda folder, _: (folder / "gallery").rename(folder / "other") and None, ["gallery"]),)

    def truths(self, *, given: bool = True) -> Any:
        return pictures_of_other_classes({"train": 5, "query": 3}).map(self.with_gallery)

    @staticmethod
    def with_gallery(truth: Truth) -> Truth:
        """Other pictures of the queries' classes."""
        numbers = iter(sorted({*range(256)} - {row.number for rows in truth.parts.values() for row in rows}))
        gallery = [Picture(next(numbers), row.label) for row in truth.parts["query"]]
        return Truth(truth.classes, {**truth.parts, "gallery": gallery})

    def read(self, folder: Path, root: bool = False, **keys: Any) -> Truth:
        where = [f"data.root={folder}", "data.validation_share=0.4"]
        splits, parts = read_folders(*where, *(f"{key}={value}" for key, value in keys.items()))
        queries = queries_of(splits)
        assert queries is not None
        count = int(queries.sum())
        assert queries.tolist() == [True] * count + [False] * (len(queries) - count)
        assert queries_of(splits.to(torch.device("cpu"))) is queries  # it stays with the splits
        assert not {row.label for row in parts["train"]} & {row.label for row in parts["validation"]}
        assert len({row.label for row in parts["validation"]}) == 2
        read = {
            "train": parts["train"] + parts["validation"],
            "query": parts["test"][:count],
            "gallery": parts["test"][count:],
        }
        return Truth(tuple(sorted(splits.class_names)), read)


def test_what_is_not_given_is_held_out_by_class(tmp_path: Path) -> None:
    for part, own in (("train", range(4)), ("val", range(4, 9))):
        for number in own:
            for i in range(3):
                paint(tmp_path / part / f"c{number}" / f"{i}.png", 9 * number + i)
    _, parts = read_folders(f"data.train={tmp_path / 'train'}", f"data.val={tmp_path / 'val'}")
    classes = {name: {row.label for row in rows} for name, rows in parts.items()}
    assert (len(classes["validation"]), len(classes["test"])) == (3, 2)  # half of validation's
    assert classes["train"] == {f"c{number}" for number in range(4)}
    assert not classes["validation"] & classes["test"]
    (tmp_path / "val/c6/again.png").write_bytes((tmp_path / "train/c2/0.png").read_bytes())
    both = [f"data.train={tmp_path / 'train'}", f"data.test={tmp_path / 'val'}", "data.validation_share=0.5"]
    assert_warned(lambda: read_folders(*both), "1", "test", "0.png", "train")  # an image in two parts, by content


@pytest.mark.parametrize("name", ["val", "valid", "validation", "dev", "Dev"])
def test_validation_beside_queries_and_a_gallery(tmp_path: Path, name: str) -> None:
    for place, (part, classes) in enumerate({"Training": "abc", name: "de", "query": "fg", "gallery": "fg"}.items()):
        for each in classes:
            for i in range(2):
                paint(tmp_path / part / each / f"{i}.png", 60 * place + 10 * ord(each) % 60 + i)
    splits, _ = read_folders(f"data.root={tmp_path}")
    assert splits.classes_of("validation") == ["d", "e"]
    (tmp_path / "strange" / "h").mkdir(parents=True)
    assert_refused(lambda: read_folders(f"data.root={tmp_path}"), DataError, "strange")


@pytest.mark.parametrize("stream", ["false", "true"])
def test_images_of_two_parts_are_counted_in_whatever_is_divided(tmp_path: Path, stream: str) -> None:
    for i in range(12):
        for place in range(2):
            paint(tmp_path / "all" / f"c{i:02}" / f"{place}.png", 2 * (i % 6) + place)
    settings = [f"data.root={tmp_path / 'all'}", "data.fractions=[0.4,0.3,0.3]", f"data.stream={stream}"]
    with pytest.warns(UserWarning, match="in another part") as told:
        splits, parts = read_folders(*settings)
    seen, said = {row.number for row in parts["train"]}, str(told[0].message)
    for name in ("validation", "test"):
        count = sum(row.number in seen for row in parts[name])
        assert (f"{count} of {len(parts[name])} images of {name}" in said) == (count > 0)
        seen |= {row.number for row in parts[name]}
    assert len(splits.class_names) == 12


@pytest.mark.parametrize("names", [("Cat", "cat"), ("01", "1"), ("a b", "a  b")])
def test_classes_of_nearly_one_name_are_named(tmp_path: Path, names: tuple[str, str]) -> None:
    for number, name in enumerate((*names, *"defghijk")):
        for place in range(2):
            paint(tmp_path / "all" / name / f"{place}.png", 2 * number + place)
    assert_warned(
        lambda: read_folders(f"data.root={tmp_path / 'all'}", "data.fractions=[0.4,0.3,0.3]"), *map(repr, names)
    )


def test_cub_has_its_classes_in_images(tmp_path: Path) -> None:
    for name in ("images.txt", "image_class_labels.txt", "classes.txt"):
        (tmp_path / name).write_text("1 a\n")
    for name in ("001.Albatross", "002.Auklet"):
        paint(tmp_path / "images" / name / "a.jpg", 3)
    data, said = load_class_folders(tmp_path, None)
    assert data.class_names == ("001.Albatross", "002.Auklet")
    assert said.startswith("CUB-200-2011")


@pytest.mark.parametrize(
    ("more", "names"),
    [
        ("data.last_test=true", ("data.last_test=true", "data.root")),
        ("data.test_classes=[a]", ("data.test_classes",)),
    ],
)
def test_settings_that_do_not_go_together_are_refused(tmp_path: Path, more: str, names: tuple[str, ...]) -> None:
    parts = [f"data.train={tmp_path}", f"data.test={tmp_path}"]
    assert_refused(lambda: read_folders(*parts, more), ConfigError, *names)


def test_the_metric_and_the_batches_are_the_same_from_disk(tmp_path: Path) -> None:
    for part, own in (("train", range(6)), ("query", range(6, 9)), ("gallery", range(6, 10))):
        for number in own:
            for i in range(3):
                paint(tmp_path / part / f"c{number}" / f"{i}.png", 9 * number + i + 100 * (part == "gallery"), (5, 5))
    settings = [f"data.root={tmp_path}", "data.validation_share=0.4", "data.image_size=8"]
    settings += ["shift.kind=image", "shift.contrast=0.6", "shift.noise_std=0.05", "shift.rotation_degrees=9"]
    memory, disk = (read_folders(*settings, f"data.stream={each}")[0] for each in ("false", "true"))
    torch.manual_seed(0)
    model = build_model("conv4", disk.train.x.shape[1:], 4, 3).eval()
    for name in ("validation", "test"):
        both = [(getattr(each, name), queries_of(each, name)) for each in (memory, disk)]
        assert torch.equal(both[0][0].x, both[1][0].x[:])
        with torch.no_grad():
            first, second = (
                build_metric(MetricConfig(ks=[1]), part, queries=own).cost(model, "") for part, own in both
            )
        assert first == second
    batches = (ClassBatches(each.train.x, each.train.y, 2, 2)(0, 1, 2) for each in (memory, disk))
    assert all(torch.equal(one, other) for one, other in zip(*batches, strict=True))


# --- Parts without a common class ----------------------------------------------------------------------------------


def labelled(counts: list[int], side: int = 2, prefix: str = "") -> Labelled:
    """Images that hold their own number; class i has ``counts[i]`` of them."""
    y = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    x = torch.arange(len(y), dtype=torch.float32).view(-1, 1, 1, 1).expand(-1, 1, side, side)
    return Labelled(x, y, tuple(f"{prefix}{i}" for i in range(len(counts))))


def png(pixels: np.ndarray, mode: str = "L") -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(file, "PNG")
    return file.getvalue()


def write(folder: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def test_parts_share_no_class_and_hold_everything() -> None:
    whole = labelled([3, 1, 4, 2, 5, 2, 3, 3])
    splits = split_classes(whole, [0.5, 0.25, 0.25], seed=3)
    parts = [splits.train, splits.validation, splits.test]
    classes = [set(part.y.tolist()) for part in parts]
    assert [len(found) for found in classes] == [4, 2, 2]
    assert set.union(*classes) == set(range(8))
    assert sorted(int(x[0, 0, 0]) for part in parts for x in part.x) == list(range(len(whole)))
    for part in parts:
        assert torch.equal(whole.y[part.x[:, 0, 0, 0].long()], part.y)
    again, other = (split_classes(whole, [0.5, 0.25, 0.25], seed=seed) for seed in (3, 4))
    assert torch.equal(again.train.x, splits.train.x)
    assert {*other.train.y.tolist()} != classes[0] or {*other.test.y.tolist()} != classes[2]


def test_the_test_classes_may_be_named() -> None:
    whole, seen = labelled([2] * 9, prefix="c"), set()
    for seed in range(5):
        splits = split_classes(whole, [0.45, 0.22, 0.33], seed, test_classes=["c8", "c1", "c4", "c1"])
        assert splits.classes_of("test") == ["c1", "c4", "c8"]
        assert len(splits.classes_of("validation")) == 2  # of six others, in the proportion of 45 to 22
        assert len(splits.classes_of("train")) == 4
        seen.add(tuple(splits.classes_of("validation")))
    assert len(seen) > 1
    assert_refused(lambda: split_classes(whole, [0.45, 0.22, 0.33], test_classes=["c1", "c11"]), DataError, "9", "'c1'")
    assert_refused(
        lambda: split_classes(whole, [0.45, 0.22, 0.33], test_classes=[f"c{i}" for i in range(6)]),
        DataError,
        "2",
        "1",
        "6",
    )


# --- Known sets ----------------------------------------------------------------------------------------------------


def drawing(stroke: int) -> bytes:
    """A 1-bit image of 105 x 105, white with a black row band."""
    pixels = np.full((105, 105), 255, dtype=np.uint8)
    pixels[stroke * 20 : stroke * 20 + 15] = 0
    return png(pixels, "1")


OMNIGLOT = {
    f"{alphabet}/character{c:02d}/{c:04d}_{i:02d}.png": drawing(c + 2 * (alphabet == "Latin"))
    for alphabet in ("Greek", "Latin")
    for c in (1, 2)
    for i in (1, 2, 3)
}


def test_omniglot(tmp_path: Path) -> None:
    root = write(tmp_path / "set", {"README.md": b"about"})
    write(root / "images_background", OMNIGLOT)
    data = load_omniglot(root)
    assert data.x.shape == (12, 1, 28, 28)
    assert data.class_names == ("Greek/character01", "Greek/character02", "Latin/character01", "Latin/character02")
    assert data.y.tolist() == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3
    assert int(data.x[0, 0, 0, 0]) == 0  # paper
    assert int(data.x[0, 0, 7, 5]) == 255  # ink
    assert load_omniglot(root, None).x.shape[2:] == (105, 105)


def test_omniglot_that_is_not_there(tmp_path: Path) -> None:
    assert_refused(lambda: load_omniglot(tmp_path / "nowhere"), DataError, "nowhere", "data.root=DIR")
    write(tmp_path, {"cat/1.png": drawing(1)})
    assert_refused(lambda: load_omniglot(tmp_path), DataError, "cat/1.png")


def products(folder: Path) -> Path:
    """Write lists and images as Stanford Online Products has them: three classes each, two images of each."""
    files = {}
    for part, first in (("train", 1), ("test", 4)):
        lines = ["image_id class_id super_class_id path"]
        for label in range(first, first + 3):
            for i in (0, 1):
                name = f"chair_final/{label}_{i}.JPG"
                files[name] = png(np.full((9, 7, 3), 20 * label, dtype=np.uint8), "RGB")
                lines.append(f"{len(lines)} {label} 1 {name}")
        files[f"Ebay_{part}.txt"] = "\n".join(lines).encode()
    return write(folder, files)


def test_stanford_online_products(tmp_path: Path) -> None:
    train, test = load_stanford_online_products(products(tmp_path), 8)
    assert train.x.shape == test.x.shape == (6, 3, 8, 8)
    assert train.class_names == ("1", "2", "3")
    assert test.class_names == ("4", "5", "6")
    assert test.y.tolist() == [0, 0, 1, 1, 2, 2]
    assert test.x[:, 0, 0, 0].tolist() == [80, 80, 100, 100, 120, 120]


@pytest.mark.parametrize(
    ("files", "names"),
    [
        ({"Ebay_test.txt": b"image_id class_id super_class_id path\n1 x 1 a"}, ("2", "image_id", "'x'")),
        ({"Ebay_test.txt": b"image_id class_id super_class_id path\n1 1 1 gone.JPG"}, ("gone.JPG",)),
        ({"Ebay_test.txt": b"image_id class_id super_class_id path\n1 5 1 chair_final/1_0.JPG"}, ("Ebay_train.txt",)),
    ],
)
def test_products_that_cannot_be_read(tmp_path: Path, files: dict[str, bytes], names: tuple[str, ...]) -> None:
    assert_refused(lambda: load_stanford_online_products(write(products(tmp_path), files), 8), DataError, *names)
    assert_refused(lambda: load_stanford_online_products(tmp_path / "no"), DataError, "Ebay_train.txt", "data.root=DIR")


def test_digits() -> None:
    data = load_digits()
    assert data.x.shape == (1797, 1, 8, 8)
    assert (float(data.x.min()), float(data.x.max())) == (0, 1)
    assert data.class_names == tuple("0123456789")


# --- Functions of one's own ----------------------------------------------------------------------------------------

CODE = """
import numpy as np
import torch
from pytorch_metric_learning.losses import ContrastiveLoss

def images(first, last, of_each=6):
    labels = np.repeat(np.arange(first, last), of_each)
    drawn = np.random.default_rng(first)
    return (10 * labels[:, None, None, None] + drawn.integers(0, 60, (len(labels), 1, 8, 8))).astype(np.uint8), labels

def parts(names=("train", "validation", "test")):
    return {name: images(4 * place, 4 * place + 4) for place, name in enumerate(names)}

def alone(): return {"train": images(0, 12)}

def words():
    x, y = images(0, 12)
    return {"train": (torch.from_numpy(x).float() / 255, [f"word {label}" for label in y])}

def searched():
    return {"train": images(0, 8), "test": {"query": images(8, 12, 2), "gallery": images(8, 12, 5)}}

def shared(): return {"train": images(0, 8), "test": images(7, 12)}
def strange(): return {"train": images(0, 8), "dev": images(8, 12)}
def gallery(): return {"train": images(0, 8), "test": {"gallery": images(8, 12)}}

def pulled(embeddings, labels, power=2):
    same = labels[:, None] == labels
    return ((embeddings[:, None] - embeddings).norm(dim=2) ** power)[same].mean()

def each(embeddings, labels): return embeddings.sum(1)
def constant(embeddings, labels): return torch.tensor(1.0)
class Weighted(torch.nn.Linear):
    def __init__(self): super().__init__(2, 2)
"""
SMALL = [
    *("model.name=conv4", "model.width=4", "model.embedding=4", "model.epochs=1", "adapter.dim=2", "queries=14"),
    *("finetune.steps=2", "seeds=1", "metric.ks=[1,2]", "device=cpu"),
    *("loss.classes=2", "loss.samples=2", "starts=[loss_finetune]"),
]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[str]:
    (tmp_path / "of_a_searcher.py").write_text(CODE)
    with forgotten("of_a_searcher"):
        yield str(tmp_path)


def config_of(folder: str, *overrides: str) -> RetrievalConfig:
    sections = {each.split("=")[0].split(".")[0] for each in overrides if ":" in each}
    folders = [f"{section}.folder={folder}" for section in sorted(sections)]
    config = load_config(RetrievalConfig, None, [*SMALL, *overrides, *folders])
    config.check()
    return config


@pytest.mark.parametrize(
    ("name", "counts"), [("alone", (6, 3, 3)), ("words", (6, 3, 3)), ("parts", (4, 2, 2)), ("searched", (4, 4, 4))]
)
def test_whole_classes_are_held_out_of_what_is_given(folder: str, name: str, counts: tuple[int, ...]) -> None:
    kwargs = ["data.kwargs={names: [train, validation]}"] if name == "parts" else []
    settings = [f"data.name=of_a_searcher:{name}", "data.validation_share=0.5", *kwargs]
    splits = load_splits(config_of(folder, *settings), seed=0)
    found = {part: splits.classes_of(part) for part in ("train", "validation", "test")}
    assert tuple(len(each) for each in found.values()) == counts
    assert len({name for each in found.values() for name in each}) == sum(counts)
    queries = queries_of(splits)
    assert (queries is None) == (name != "searched")
    if queries is not None:
        assert (int(queries.sum()), int((~queries).sum())) == (8, 20)


@pytest.mark.parametrize(
    ("name", "error", "names"),
    [
        ("shared", DataError, ("'7'", "train", "test")),
        ("strange", DataError, ("dev", "validation")),
        ("gallery", DataError, ("test", "images")),
    ],
)
def test_what_gives_no_parts_is_refused(folder: str, name: str, error: Any, names: tuple[str, ...]) -> None:
    config = config_of(folder, f"data.name=of_a_searcher:{name}")
    assert_refused(lambda: load_splits(config, seed=0), error, *names)


def test_a_loss_is_called_with_embeddings_and_labels(folder: str) -> None:
    x, y = torch.randn(6, 4), torch.tensor([0, 0, 1, 1, 2, 2])
    own = config_of(folder, "data.name=digits", "loss.name=of_a_searcher:pulled", "loss.params={power: 1}")
    expected = (x[:, None] - x).norm(dim=2)[y[:, None] == y].mean()
    torch.testing.assert_close(build_loss(own.loss)(nn.Identity(), (x, y)), expected)
    made = config_of(
        folder, "data.name=digits", "loss.name=of_a_searcher:ContrastiveLoss", "loss.params={neg_margin: 2.0}"
    )
    assert build_loss(made.loss)(nn.Identity(), (x, y)) == ContrastiveLoss(neg_margin=2.0)(x, y)


@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("each", ("4", "one finite number")),
        ("constant", ("gradient",)),
        ("Weighted", ("weights",)),
    ],
)
def test_a_loss_is_tried_before_anything_is_trained(folder: str, name: str, names: tuple[str, ...]) -> None:
    config = config_of(folder, "data.name=digits", f"loss.name=of_a_searcher:{name}")
    assert_refused(lambda: build_loss(config.loss), ConfigError, f"of_a_searcher:{name}", *names)


@pytest.mark.parametrize(
    ("name", "params", "names"),
    [
        ("smooth_ap", {}, ("loss.name", "smooth_ap", "MODULE:FUNCTION")),
        ("triplet_margin", {"margin": [0.1]}, ("loss.params", "triplet_margin", "0.1")),
    ],
)
def test_a_known_loss_is_tried_before_anything_is_trained(
    name: str, params: dict[str, Any], names: tuple[str, ...]
) -> None:
    assert_refused(lambda: build_loss(LossConfig(name, params)), ConfigError, *names)
