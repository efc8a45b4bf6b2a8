"""YOLO's text files: what they mean in pixels, and what is wrong in them by line."""

from pathlib import Path

import pytest
from PIL import Image

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
    with pytest.warns(UserWarning, match=r"1.*file of labels.*\(b\.png\)"):
        first, second = read_yolo(images, ("cat", "dog")).images
    assert [len(first.boxes), len(second.boxes)] == [2, 0]
    (images.parent / "labels/a.txt").rename(images / "a.txt")  # beside the image
    with pytest.warns(UserWarning, match="1 image without"):
        assert len(read_yolo(images, ("cat", "dog")).images[0].boxes) == 2
    (images / "a.txt").unlink()
    with pytest.raises(DataError, match=r"2 images, first .*labels.a\.txt"):
        read_yolo(images, ("cat", "dog"))


def test_classes_may_be_written_as_numpy_writes_them(images: Path) -> None:
    (images.parent / "labels/a.txt").write_text("1.0 0.5 0.5 0.25 0.5\n1.000e+00 0.5 0.5 0.25 0.5\n")
    assert read_yolo(images, ("cat", "dog")).images[0].labels.tolist() == [1, 1]


def test_boxes_without_area_are_told(images: Path) -> None:
    """They count as objects that nothing finds, as in COCO's evaluation."""
    (images.parent / "labels/a.txt").write_text("0 0.5 0.5 0 0.5\n")
    with pytest.warns(UserWarning, match=r"1.*evaluation counts them"):
        assert read_yolo(images, ("cat", "dog")).images[0].boxes.tolist() == [[20, 5, 20, 15]]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("2 0.5 0.5 0.2 0.2", r"line 1.*'2'.*number from 0 to 1"),
        ("cat 0.5 0.5 0.2 0.2", "has the class 'cat'"),
        ("0.5 0.5 0.5 0.2 0.2", "has the class '0.5'"),
        ("0 20 10 8 4", "has '20'; it must be a share"),
        ("0 0.5 0.5 nan 0.2", "has 'nan'; it must be a share"),
        ("0 0.5 0.5 0.2", "has 3 numbers after the class"),
        ("0 0.5 0.5 0.2 0.2 0.9", "has 5 numbers after the class"),
        ("0 0.5 -0.2 0.2 0.2", "has '-0.2'"),
    ],
)
def test_what_is_wrong_is_named_by_its_line(images: Path, line: str, message: str) -> None:
    (images.parent / "labels/a.txt").write_text(line)
    with pytest.raises(DataError, match=message):
        read_yolo(images, ("cat", "dog"))


def test_a_list_names_images_relative_to_itself(images: Path) -> None:
    (images.parent / "train.txt").write_text("./images/a.png\n")
    assert len(read_yolo(images.parent / "train.txt", ("cat", "dog"))) == 1
    (images.parent / "train.txt").write_text("images/a.png\nimages/c.png\n")
    with pytest.raises(DataError, match="names 1 of 2 images that are not there"):
        read_yolo(images.parent / "train.txt", ("cat", "dog"))
    (images.parent / "train.txt").write_text("images/a.png\nimages/a.png\n")
    with pytest.raises(DataError, match="twice"):
        read_yolo(images.parent / "train.txt", ("cat", "dog"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("names: [cat, cat]\n", "several classes of one name"),
        ("nc: 3\nnames: [cat, dog]\n", "says nc: 3, but names 2 classes"),
        ("nc: 3\n", "must name the classes"),
        ("names: {1: cat, 2: dog}\n", "must name the classes"),
        ("names: [cat\n", "can't be read as YOLO's data.yaml"),
        ("just text", "must name the classes"),
    ],
)
def test_a_file_of_classes_that_says_too_little_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "data.yaml").write_text(text)
    with pytest.raises(DataError, match=message):
        read_yolo_file(tmp_path / "data.yaml")


def test_parts_are_those_of_the_file(images: Path) -> None:
    file = images.parent / "data.yaml"
    file.write_text("path: elsewhere\ntrain: [images, more]\nvalid: ../images\nnames: [cat, dog]\n")
    assert yolo_file(images) == file.resolve()
    read = read_yolo_file(file)
    assert read.part("train")[0] == images
    assert read.part("val") == (images,)
    with pytest.raises(DataError, match="has no part 'test'; it has train, valid"):
        read.part("test")
