"""Sets for retrieval as they are distributed."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from scipy.io import savemat

from helpers.refusals import assert_refused
from metricopt_ext.data.decoding import MAX_PIXELS
from metricopt_ext.data.images import Limits
from metricopt_ext.data.labelled import MAX_BYTES
from metricopt_ext.errors import DataError
from metricopt_ext.retrieval.layouts import (
    load_cars196,
    load_class_folders,
    load_in_shop,
    queries_and_gallery,
)

LIMITS = Limits(max_bytes=MAX_BYTES, max_pixels=MAX_PIXELS)


def picture(path: Path, grey: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (6, 6), (grey, grey, grey)).save(path, format="PNG")


# --- In-Shop ----------------------------------------------------------------------------------------------------------


def in_shop(root: Path, images: str = "", lists: str = "") -> Path:
    """Write six items of three pictures, three of them for training, whose grey is 10 times the item's number."""
    lines = []
    for item in range(6):
        for i in range(3):
            path = f"img/WOMEN/Tees/id_{item:08d}/0{i}_front.jpg"
            picture(root / images / path, 10 * item + i)
            status = "train" if item < 3 else "query" if i == 0 else "gallery"
            lines.append(f"{path}   id_{item:08d}   {status}")
    file = root / lists / "list_eval_partition.txt"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join([str(len(lines)), "image_name item_id evaluation_status", *lines]) + "\n")
    return file


@pytest.mark.parametrize(("images", "lists"), [("", ""), ("Img", "Eval"), ("", "Eval")])
def test_in_shop_is_divided_by_its_partition(tmp_path: Path, images: str, lists: str) -> None:
    in_shop(tmp_path, images, lists)
    parts = load_in_shop(tmp_path, None, LIMITS)
    assert {name: len(part) for name, part in parts.items()} == {"train": 9, "query": 3, "gallery": 6}
    assert parts["query"].class_names == parts["gallery"].class_names == ("id_00000003", "id_00000004", "id_00000005")
    assert parts["gallery"].x[:, 0, 0, 0].tolist() == [31, 32, 41, 42, 51, 52]
    assert parts["gallery"].y.tolist() == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize(
    ("old", "new", "names"),
    [
        ("query", "probe", ("12", "gallery", "probe")),
        ("18\n", "19\n", ("19", "18")),
        ("18\n", "", ()),
        ("01_front.jpg   id_00000000", "00_front.jpg   id_00000000", ("3", "4")),
        ("query", "gallery", ("query",)),
    ],
)
def test_a_partition_that_is_wrong_is_named(tmp_path: Path, old: str, new: str, names: tuple[str, ...]) -> None:
    file = in_shop(tmp_path)
    file.write_text(file.read_text().replace(old, new))
    assert_refused(lambda: load_in_shop(tmp_path, None, LIMITS), DataError, *names)


def test_a_partition_or_its_images_that_are_missing_are_named(tmp_path: Path) -> None:
    file = in_shop(tmp_path)
    file.write_text(file.read_text().replace("img/", "pictures/"))
    assert_refused(lambda: load_in_shop(tmp_path, None, LIMITS), DataError, "pictures/WOMEN")
    file.unlink()
    assert_refused(lambda: load_in_shop(tmp_path, None, LIMITS), DataError, "list_eval_partition.txt")


# --- Cars196 ----------------------------------------------------------------------------------------------------------


def mat(file: Path, fields: list[str], rows: list[tuple[Any, ...]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    savemat(file, {"annotations": np.array(rows, dtype=[(name, "O") for name in fields])})


def cars(root: Path) -> None:
    """Write eleven classes of two pictures, in another order than their numbers'."""
    rows: list[tuple[Any, ...]] = []
    for i in range(22):
        number = 11 - i // 2
        picture(root / f"car_ims/{i:06d}.jpg", number)
        rows.append((f"car_ims/{i:06d}.jpg", 1, 1, 6, 6, number, i % 2))
    mat(root / "cars_annos.mat", ["relative_im_path", "x1", "y1", "x2", "y2", "class", "test"], rows)


def test_cars_have_the_classes_of_their_annotations_in_order(tmp_path: Path) -> None:
    cars(tmp_path)
    data, said = load_class_folders(tmp_path, None, LIMITS)
    assert data.class_names == tuple(f"{number:02d}" for number in range(1, 12))  # last by name are last by number
    assert ((data.y + 1) == data.x[:, 0, 0, 0]).all()
    assert said == "Cars196: 22 images of 11 classes by cars_annos.mat"


def test_cars_may_come_in_two_folders(tmp_path: Path) -> None:
    for name, file in (("train", "devkit/cars_train_annos.mat"), ("test", "cars_test_annos_withlabels.mat")):
        for i in range(4):
            picture(tmp_path / f"cars_{name}/{i:05d}.jpg", i // 2 + 1)
        mat(tmp_path / file, ["fname", "class"], [(f"{i:05d}.jpg", i // 2 + 1) for i in range(4)])
    data = load_cars196(tmp_path, None, LIMITS)
    assert ((data.y + 1) == data.x[:, 0, 0, 0]).all()
    assert len(data) == 8
    (tmp_path / "cars_test_annos_withlabels.mat").unlink()
    assert_refused(lambda: load_cars196(tmp_path, None, LIMITS), DataError, "cars_test_annos_withlabels.mat")


def test_annotations_that_say_too_little_are_refused(tmp_path: Path) -> None:
    cars(tmp_path)
    mat(tmp_path / "cars_annos.mat", ["relative_im_path"], [("car_ims/000000.jpg",)])
    assert_refused(lambda: load_cars196(tmp_path, None, LIMITS), DataError, "relative_im_path")
    mat(tmp_path / "cars_annos.mat", ["relative_im_path", "class"], [("car_ims/000000.jpg", 1.5)])
    assert_refused(lambda: load_cars196(tmp_path, None, LIMITS), DataError, "1.5")
    (tmp_path / "cars_annos.mat").write_bytes(b"MATLAB 5.0 MAT-file, but no more")
    assert_refused(lambda: load_cars196(tmp_path, None, LIMITS), DataError, "cars_annos.mat")


# --- Folders ----------------------------------------------------------------------------------------------------------


def test_cub_has_its_classes_in_images(tmp_path: Path) -> None:
    for name in ("images.txt", "image_class_labels.txt", "classes.txt", "attributes/names.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("1 a\n")
    for name in ("001.Albatross", "002.Auklet"):
        picture(tmp_path / "images" / name / "a.jpg", 3)
    data, said = load_class_folders(tmp_path, None, LIMITS)
    assert data.class_names == ("001.Albatross", "002.Auklet")
    assert said.startswith("CUB-200-2011")


def test_queries_and_gallery_go_together(tmp_path: Path) -> None:
    assert queries_and_gallery(tmp_path) is None
    (tmp_path / "Query").mkdir()
    assert_refused(lambda: queries_and_gallery(tmp_path), DataError, "queries", "gallery")
    (tmp_path / "gallery").mkdir()
    assert queries_and_gallery(tmp_path) == (tmp_path / "Query", tmp_path / "gallery")
