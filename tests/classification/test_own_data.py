"""A classifier's data in parts of one's own: folders of images, and tables."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from helpers.refusals import assert_warned

pytest.importorskip("torchvision")

from metricopt_ext.classification.config import ClassificationConfig, MetricConfig
from metricopt_ext.classification.models import build_model
from metricopt_ext.classification.named_metric import build_metric
from metricopt_ext.classification.predictions import predict
from metricopt_ext.classification.split_metric import model_metric
from metricopt_ext.classification.splits import load_splits
from metricopt_ext.data.streamed import is_streamed
from metricopt_ext.tasks.batches import TensorBatches
from metricopt_ext.utils.config import load_config

NAMES = ("cat", "dog")


def config_of(*overrides: str) -> ClassificationConfig:
    model = "small_cnn" if "data.name=image_folder" in overrides else "tabular_mlp"
    config = load_config(ClassificationConfig, None, [f"model.name={model}", *overrides])
    config.check()
    return config


def write_images(folder: Path, classes: dict[str, int], grey: int) -> None:
    """Write six images of each class; the first pixel is the class's own number, the second the image's."""
    for name, number in classes.items():
        (folder / name).mkdir(parents=True)
        for i in range(6):
            pixels = np.full((8, 8, 3), grey, np.uint8)
            pixels[0, 0], pixels[0, 1] = number, i
            Image.fromarray(pixels).save(folder / name / f"{i}.png")


def assert_counted(settings: list[str]) -> None:
    """Check that a warning counts what of validation is in train, too."""
    with pytest.warns(UserWarning, match="of validation") as told:
        splits = load_splits(config_of(*settings), 0)
    train, validation = (
        {part.x[i].numpy().tobytes() for i in range(len(part))} for part in (splits.train, splits.validation)
    )
    count = len(train & validation)
    assert count
    (said,) = [str(each.message) for each in told if "of validation" in str(each.message)]
    assert f"{count} of {len(splits.validation)} " in said


@pytest.fixture
def folders(tmp_path: Path) -> Callable[..., list[str]]:
    """Write parts, each of its own grey, and return the settings that name them."""

    def write(**classes: dict[str, int]) -> list[str]:
        for grey, (name, own) in enumerate(classes.items()):
            write_images(tmp_path / name, own, 100 + grey)
        return ["data.name=image_folder", *(f"data.{name}={tmp_path / name}" for name in classes)]

    return write


@pytest.mark.parametrize("stream", ["false", "true"])
def test_a_file_in_two_parts_is_found_by_content(
    folders: Callable[..., list[str]], stream: str, tmp_path: Path
) -> None:
    settings = [*folders(train={"cat": 1, "dog": 2}, test={"cat": 1, "dog": 2}), f"data.stream={stream}"]
    read = lambda: load_splits(config_of(*settings), 0)  # noqa: E731
    (tmp_path / "test" / "dog" / "other.png").write_bytes((tmp_path / "train" / "cat" / "0.png").read_bytes())
    assert_warned(read, "1 of 13 images of test", "other.png", "0.png")
    for file in (tmp_path / "test" / "cat").iterdir():
        file.unlink()
        file.symlink_to(tmp_path / "train" / "cat" / file.name)
    assert_warned(read, "7 of 13 images of test")


def test_a_picture_that_was_saved_in_another_form_is_found(folders: Callable[..., list[str]], tmp_path: Path) -> None:
    settings = folders(train={"cat": 1, "dog": 2}, test={"cat": 1, "dog": 2})
    for file in (tmp_path / "train").rglob("*.png"):
        Image.open(file).save(tmp_path / "test" / file.parent.name / f"again-{file.stem}.bmp")
    assert_warned(lambda: load_splits(config_of(*settings), 0), "12 of 24 images of test", "again-0.bmp")


@pytest.mark.parametrize("stream", ["false", "true"])
def test_pictures_that_a_division_parts_from_their_copies_are_counted(
    folders: Callable[..., list[str]], stream: str, tmp_path: Path
) -> None:
    folders(all={"cat": 1, "dog": 2})
    for file in (*(tmp_path / "all").rglob("*.png"),):
        (file.parent / f"copy-{file.name}").write_bytes(file.read_bytes())
    settings = ["data.name=image_folder", f"data.root={tmp_path / 'all'}", f"data.stream={stream}"]
    assert_counted(settings)


@pytest.mark.parametrize(
    "names", [("Cat", "cat"), ("caf\u00e9", "cafe\u0301"), ("a b", "a  b"), ("01", "1"), ("1E2", "100")]
)
def test_classes_of_nearly_one_name_are_named(
    folders: Callable[..., list[str]], names: tuple[str, str], tmp_path: Path
) -> None:
    classes = {name: i for i, name in enumerate((*names, "dog"))}
    settings = folders(train=classes, val=classes, test=classes)
    shown = [each if each.isascii() else ascii(each).strip("'") for each in names]
    assert_warned(lambda: load_splits(config_of(*settings), 0), *shown)


def test_a_root_of_parts_is_read_as_such(folders: Callable[..., list[str]], tmp_path: Path) -> None:
    own = {"cat": 1, "dog": 2}
    folders(train=own, val=own)
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "unknown.png").write_bytes((tmp_path / "val" / "cat" / "0.png").read_bytes())
    splits = load_splits(config_of("data.name=image_folder", f"data.root={tmp_path}"), 0)
    assert splits.class_names == NAMES
    assert splits.reading is not None
    assert "not read, as it has no classes: test" in splits.reading.found
    assert (splits.train.x[:, :, 2:] * 255).round().unique().tolist() == [100]


# --- Tables ----------------------------------------------------------------------------------------------------


X = np.random.default_rng(0).normal(size=(60, 3)).astype(np.float32)
OTHERS, Y, ORDER = X + 1, np.arange(60) % 2, np.random.default_rng(1).permutation(60)
Form = Callable[[Path, dict[str, Any]], list[str]]


def as_csv(folder: Path, parts: dict[str, Any]) -> list[str]:
    for name, (x, y) in parts.items():
        rows = [
            "a,b,c,y",
            *(",".join(map(repr, [*map(float, row), int(label)])) for row, label in zip(x, y, strict=True)),
        ]
        (folder / f"{name}.csv").write_text("\n".join(rows))
    return ["data.name=csv", "data.target=y", *(f"data.{name}={folder / name}.csv" for name in parts)]


def as_libsvm(folder: Path, parts: dict[str, Any]) -> list[str]:
    for name, (x, y) in parts.items():
        rows = (
            f"{label} " + " ".join(f"{i + 1}:{float(cell)!r}" for i, cell in enumerate(row))
            for row, label in zip(x, y, strict=True)
        )
        (folder / name).write_text("\n".join(rows))
    return ["data.name=libsvm", *(f"data.{name}={folder / name}" for name in parts)]


def as_npz(folder: Path, parts: dict[str, Any]) -> list[str]:
    for name, (x, y) in parts.items():
        np.savez(folder / f"{name}.npz", x=x, y=y)
    return ["data.name=arrays", *(f"data.{name}={folder / name}.npz" for name in parts)]


def as_one_npz(folder: Path, parts: dict[str, Any]) -> list[str]:
    named = {"root": ("x", "y"), **{name: (f"x_{name}", f"y_{name}") for name in ("train", "val", "test")}}
    np.savez(
        folder / "all.npz",
        **{key: each for name, pair in parts.items() for key, each in zip(named[name], pair, strict=True)},
    )
    return ["data.name=arrays", f"data.root={folder / 'all.npz'}"]


def as_pt(folder: Path, parts: dict[str, Any]) -> list[str]:
    for name, (x, y) in parts.items():
        torch.save({"x": torch.from_numpy(x), "y": torch.from_numpy(y)}, folder / f"{name}.pt")
    return ["data.name=arrays", *(f"data.{name}={folder / name}.pt" for name in parts)]


FORMS = pytest.mark.parametrize("form", [as_csv, as_libsvm, as_npz, as_one_npz, as_pt])


@FORMS
@pytest.mark.parametrize(
    ("judged", "count"),
    [
        ((X, Y), "60 of 60"),
        ((X[ORDER], Y[ORDER]), "60 of 60"),
        ((X[ORDER], 1 - Y[ORDER]), "60 of 60"),
        ((np.r_[X[:36], OTHERS[:24]], Y), "36 of 60"),
        ((np.r_[OTHERS[:59], X[:1]], Y), "1 of 60"),
    ],
    ids=["itself", "shuffled", "other labels", "most", "one"],
)
def test_rows_of_another_part_are_counted(form: Form, judged: Any, count: str, tmp_path: Path) -> None:
    settings = form(tmp_path, {"train": (X, Y), "val": judged, "test": (X + 2, Y)})
    assert_warned(lambda: load_splits(config_of(*settings), 0), f"{count} rows", "validation")


@FORMS
@pytest.mark.parametrize(
    "parts", [{"root": (np.r_[X, X], np.r_[Y, Y])}, {"train": (np.r_[X, X], np.r_[Y, Y]), "test": (OTHERS, Y)}]
)
def test_rows_that_a_division_parts_from_their_copies_are_counted(
    form: Form, parts: dict[str, Any], tmp_path: Path
) -> None:
    assert_counted(form(tmp_path, parts))


@FORMS
def test_copies_within_a_part_are_no_fault(form: Form, tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    settings = form(tmp_path, {"train": (np.r_[X, X], np.r_[Y, Y]), "val": (OTHERS, Y), "test": (X + 2, Y)})
    load_splits(config_of(*settings), 0)
    assert not list(recwarn)


@pytest.mark.parametrize("form", [as_one_npz])
def test_train_alone_becomes_three_parts(form: Form, tmp_path: Path) -> None:
    splits = load_splits(config_of(*form(tmp_path, {"train": (X, Y)})), 0)
    rows = [{tuple(row) for row in part.x.tolist()} for part in (splits.train, splits.validation, splits.test)]
    assert [len(each) for each in rows] == [42, 6, 12]
    assert len(set().union(*rows)) == 60


# --- Images on disk --------------------------------------------------------------------------------------------


def test_the_metric_and_the_batches_are_the_same_from_disk(folders: Callable[..., list[str]]) -> None:
    classes = {"cat": 1, "dog": 2, "emu": 3}
    settings = folders(train=classes, val=classes, test=classes)
    settings += ["shift.kind=image", "shift.contrast=0.6", "shift.noise_std=0.05", "shift.rotation_degrees=9"]
    settings += ["data.image_size=12", "data.mean=[0.5,0.4,0.3]", "data.std=[0.2,0.3,0.2]"]
    memory, disk = (load_splits(config_of(*settings, f"data.stream={each}"), 0) for each in ("false", "true"))
    assert is_streamed(disk.train.x)
    assert is_streamed(disk.test.x)
    torch.manual_seed(0)
    model = build_model("small_cnn", disk.train.x.shape[1:], 3).eval()
    spec = build_metric(MetricConfig("aucpr"))
    for name in ("validation", "test"):
        with torch.no_grad():
            costs = [model_metric(spec, getattr(each, name)).cost(model, "test") for each in (memory, disk)]
            logits = [predict(model, getattr(each, name).x) for each in (memory, disk)]
        assert torch.equal(*logits)
        assert costs[0] == costs[1]
    batches = (TensorBatches(each.train.x, each.train.y, 6, balanced=True)(3, 1, 2) for each in (memory, disk))
    for one, other in zip(*batches, strict=True):
        assert torch.equal(one, other)
