"""Loaders of image sets for retrieval, and parts that share no class."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from helpers.refusals import assert_refused
from metricopt_ext.data.labelled import Labelled, Split
from metricopt_ext.data.splits import Splits
from metricopt_ext.errors import DataError
from metricopt_ext.retrieval.data import (
    disjoint,
    hold_out_classes,
    load_digits,
    load_omniglot,
    load_stanford_online_products,
    split_classes,
)
from metricopt_ext.retrieval.recall import nearest


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


# --- Parts without a common class ------------------------------------------------------------------------------


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


def test_the_last_classes_may_be_the_test_part() -> None:
    for seed in range(3):
        splits = split_classes(labelled([2] * 9), [0.45, 0.22, 0.33], seed, last_test=True)
        assert splits.test.y.unique().tolist() == [6, 7, 8]
        assert len(splits.validation.y.unique()) == 2


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


def test_a_part_without_a_pair_is_refused() -> None:
    assert_refused(lambda: split_classes(labelled([2] * 6 + [1] * 3), [0.45, 0.22, 0.33], last_test=True), DataError)


def test_validation_classes_are_held_out_of_a_given_train_part() -> None:
    train, test = labelled([2] * 10, prefix="a"), labelled([3] * 4, prefix="b")
    splits = hold_out_classes(train, test, 0.3, seed=1)
    assert len(splits.validation.y.unique()) == 3
    assert len(splits.train) + len(splits.validation) == len(train)
    assert [splits.class_names[label] for label in splits.test.y.unique().tolist()] == ["b0", "b1", "b2", "b3"]
    assert_refused(lambda: hold_out_classes(train, labelled([2, 2], prefix="a"), 0.3), DataError, "'a0'")
    assert_refused(lambda: hold_out_classes(train, test, 1.0), ValueError, "validation_share", "(0, 1)")
    assert_refused(lambda: hold_out_classes(train, test, 0.1), DataError, "1")


def test_impossible_parts_are_refused() -> None:
    assert_refused(
        lambda: split_classes(labelled([2] * 5), [0.5, 0.25, 0.25]), DataError, "(0.5, 0.25, 0.25)", "3", "1"
    )
    assert_refused(lambda: split_classes(labelled([2] * 5), [0.5, 0.6]), ValueError, "(0.5, 0.6)")
    x, names = torch.zeros(4, 1, 2, 2), tuple("abcdef")
    a, b, c = (Split(x, torch.tensor([i, i, i + 1, i + 1])) for i in (0, 2, 4))
    assert_refused(lambda: disjoint(Splits(a, b, Split(x, torch.full((4,), 5)), names)), DataError, "1")
    assert_refused(lambda: disjoint(Splits(a, Split(x, torch.tensor([1, 1, 2, 2])), c, names)), DataError, "'b'")


# --- Loaders ---------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("kind", ["alphabets", "below a folder"])
def test_omniglot(tmp_path: Path, kind: str) -> None:
    root = write(tmp_path / "set", {"README.md": b"about"})
    write(root if kind == "alphabets" else root / "images_background", OMNIGLOT)
    data = load_omniglot(root)
    assert data.x.shape == (12, 1, 28, 28)
    assert data.class_names == ("Greek/character01", "Greek/character02", "Latin/character01", "Latin/character02")
    assert data.y.tolist() == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3
    assert int(data.x[0, 0, 0, 0]) == 0  # paper
    assert int(data.x[0, 0, 7, 5]) == 255  # ink
    assert load_omniglot(root, None).x.shape[2:] == (105, 105)


def test_omniglot_that_is_not_there(tmp_path: Path) -> None:
    assert_refused(lambda: load_omniglot(tmp_path / "nowhere"), DataError, "nowhere", "data.root=DIR")
    assert_refused(lambda: load_omniglot(tmp_path), DataError, "<group>/<class>/<file>")
    write(tmp_path, {"cat/1.png": drawing(1)})
    assert_refused(lambda: load_omniglot(tmp_path), DataError, "cat/1.png")
    assert_refused(
        lambda: load_omniglot(write(tmp_path / "a", OMNIGLOT | {"Greek/character02/0002_02.png": b"no picture"})),
        DataError,
    )


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
    "change", [lambda text: text + b"\n\n", lambda text: b"\xef\xbb\xbf" + text.replace(b"\n", b"\r\n \r\n")]
)
def test_blank_lines_of_the_products_lists_are_skipped(tmp_path: Path, change: Any) -> None:
    folder = products(tmp_path)
    for name in ("Ebay_train.txt", "Ebay_test.txt"):
        (folder / name).write_bytes(change((folder / name).read_bytes()))
    for part in load_stanford_online_products(folder, 8):
        assert part.y.tolist() == [0, 0, 1, 1, 2, 2]
    (folder / "Ebay_test.txt").write_bytes((folder / "Ebay_test.txt").read_bytes() + b"\n\nno 1")
    lines = len((folder / "Ebay_test.txt").read_bytes().splitlines())
    # blank lines count
    assert_refused(lambda: load_stanford_online_products(folder, 8), DataError, lines)


@pytest.mark.parametrize(
    ("files", "names"),
    [
        ({"Ebay_test.txt": b""}, ("Ebay_test.txt", "0")),
        ({"Ebay_test.txt": b"\n \n"}, ("Ebay_test.txt", "0")),
        ({"Ebay_test.txt": b"class path\n1 a"}, ("image_id", "class path")),
        ({"Ebay_test.txt": b"image_id class_id super_class_id path\n1 x 1 a"}, ("2", "image_id", "'x'")),
        (
            {"Ebay_test.txt": b"image_id class_id super_class_id path\n1 1 1 gone.JPG"},
            ("gone.JPG",),
        ),
        ({"chair_final/5_0.JPG": b"no picture"}, ("chair_final/5_0.JPG",)),
    ],
)
def test_products_that_cannot_be_read(tmp_path: Path, files: dict[str, bytes], names: tuple[str, ...]) -> None:
    assert_refused(lambda: load_stanford_online_products(write(products(tmp_path), files), 8), DataError, *names)


@pytest.mark.parametrize(
    ("name", "line", "where"),
    [
        ("Ebay_test.txt", "8 4 1 chair_final/5_0.JPG", "line 4 of Ebay_test.txt and in line 8 of Ebay_test.txt"),
        ("Ebay_train.txt", "8 3 1 ./chair_final/5_0.JPG", "line 8 of Ebay_train.txt and in line 4 of Ebay_test.txt"),
    ],
)
def test_a_product_s_image_is_listed_once(tmp_path: Path, name: str, line: str, where: str) -> None:
    folder = products(tmp_path)
    (folder / name).write_text((folder / name).read_text() + f"\n{line}")
    assert_refused(lambda: load_stanford_online_products(folder, 8), DataError, "chair_final/5_0.JPG")


def test_products_that_are_not_there(tmp_path: Path) -> None:
    assert_refused(lambda: load_stanford_online_products(tmp_path), DataError, "Ebay_train.txt", "data.root=DIR")


def test_digits() -> None:
    data = load_digits()
    assert data.x.shape == (1797, 1, 8, 8)
    assert (float(data.x.min()), float(data.x.max())) == (0, 1)
    assert data.class_names == tuple("0123456789")


# --- Neighbours ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("distance", ["l2", "ip"])
def test_neighbours_against_a_naive_search(distance: str) -> None:
    x = np.random.default_rng(0).standard_normal((40, 5)).astype(np.float32)
    far = -x @ x.T if distance == "ip" else ((x[:, None] - x) ** 2).sum(2)
    np.fill_diagonal(far, np.inf)
    assert np.array_equal(nearest(x, 6, distance=distance), far.argsort(1)[:, :6])
