"""YOLO's text files: what they mean in pixels, and what is wrong in them by line."""

from pathlib import Path

import pytest
from PIL import Image

from helpers.refusals import assert_refused, having
from metricopt_ext.detection.yolo import read_yolo, read_yolo_file, yolo_file
from metricopt_ext.errors import DataError


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """A folder with an image of 40 x 20 pixels, and its labels beside that folder."""
    (tmp_path / "images").mkdir()
    (tmp_path / "labels").mkdir()
    Image.new("RGB", (40, 20)).save(tmp_path / "images/a.png")
    (tmp_path / "labels/a.txt").write_text("1 0.5 0.5 0.25 0.5\n\n0 0.1 0.2 0.3 0.2 0.3 0.9\n")
    return tmp_path / "images"


def test_shares_of_the_image_are_pixels_and_polygons_have_a_box(images: Path) -> None:
    (image,) = read_yolo(images, ("cat", "dog")).images
    assert (image.image_id, image.width, image.height) == ("a", 40, 20)
    assert image.boxes.tolist() == [[15, 5, 25, 15], [4, 4, 12, 18]]
    assert image.labels.tolist() == [1, 0]
    assert not (image.difficult | image.crowd).any()


def test_an_image_without_labels_has_no_objects_and_is_counted(images: Path) -> None:
    Image.new("RGB", (8, 8)).save(images / "b.png")
    with pytest.warns(UserWarning, match=having("1", "b.png")):
        first, second = read_yolo(images, ("cat", "dog")).images
    assert [len(first.boxes), len(second.boxes)] == [2, 0]
    (images.parent / "labels/a.txt").rename(images / "a.txt")  # beside the image
    with pytest.warns(UserWarning, match=having("1")):
        assert len(read_yolo(images, ("cat", "dog")).images[0].boxes) == 2
    (images / "a.txt").unlink()
    assert_refused(lambda: read_yolo(images, ("cat", "dog")), DataError, "2", "labels/a.txt")


def test_classes_may_be_written_as_numpy_writes_them(images: Path) -> None:
    (images.parent / "labels/a.txt").write_text("1.0 0.5 0.5 0.25 0.5\n1.000e+00 0.5 0.5 0.25 0.5\n")
    assert read_yolo(images, ("cat", "dog")).images[0].labels.tolist() == [1, 1]


def test_boxes_without_area_are_told(images: Path) -> None:
    """They count as objects that nothing finds, as in COCO's evaluation."""
    (images.parent / "labels/a.txt").write_text("0 0.5 0.5 0 0.5\n")
    with pytest.warns(UserWarning, match=having("1")):
        assert read_yolo(images, ("cat", "dog")).images[0].boxes.tolist() == [[20, 5, 20, 15]]


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("2 0.5 0.5 0.2 0.2", ("1", "'2'", "0")),
        ("cat 0.5 0.5 0.2 0.2", ("cat",)),
        ("0.5 0.5 0.5 0.2 0.2", ("0.5",)),
        ("0 20 10 8 4", ("'20'",)),
        ("0 0.5 0.5 nan 0.2", ("nan",)),
        ("0 0.5 0.5 0.2", ("3",)),
        ("0 0.5 0.5 0.2 0.2 0.9", ("5",)),
        ("0 0.5 -0.2 0.2 0.2", ("-0.2",)),
    ],
)
def test_what_is_wrong_is_named_by_its_line(images: Path, line: str, names: tuple[str, ...]) -> None:
    (images.parent / "labels/a.txt").write_text(line)
    assert_refused(lambda: read_yolo(images, ("cat", "dog")), DataError, *names)


def test_a_list_of_images_is_refused(images: Path) -> None:
    (images.parent / "train.txt").write_text("./images/a.png\n")
    assert_refused(lambda: read_yolo(images.parent / "train.txt", ("cat", "dog")), DataError, "train.txt", "folder")


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("names: [cat, cat]\n", ()),
        ("nc: 3\nnames: [cat, dog]\n", ("3", "2")),
        ("nc: 3\n", ()),
        ("names: {1: cat, 2: dog}\n", ()),
        ("names: [cat\n", ("YOLO", "data.yaml")),
        ("just text", ()),
        ("kpt_shape: [17, 3]\nnames: [person]\n", ("kpt_shape", "keypoints")),
    ],
)
def test_a_file_of_classes_that_says_too_little_is_refused(tmp_path: Path, text: str, names: tuple[str, ...]) -> None:
    (tmp_path / "data.yaml").write_text(text)
    assert_refused(lambda: read_yolo_file(tmp_path / "data.yaml"), DataError, *names)


def test_parts_are_those_of_the_file(images: Path) -> None:
    file = images.parent / "data.yaml"
    file.write_text("path: elsewhere\ntrain: [images, more]\nvalid: ../images\nnames: [cat, dog]\n")
    assert yolo_file(images) == file.resolve()
    read = read_yolo_file(file)
    assert read.part("train")[0] == images
    assert read.part("val") == (images,)
    assert_refused(lambda: read.part("test"), DataError, "test")
