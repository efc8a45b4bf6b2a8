"""Folders of images of classes, of queries and of a gallery."""

from pathlib import Path

from PIL import Image

from helpers.refusals import assert_refused
from metricopt_ext.errors import DataError
from metricopt_ext.retrieval.layouts import load_class_folders, queries_and_gallery


def picture(path: Path, grey: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (6, 6), (grey, grey, grey)).save(path, format="PNG")


def test_cub_has_its_classes_in_images(tmp_path: Path) -> None:
    for name in ("images.txt", "image_class_labels.txt", "classes.txt", "attributes/names.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("1 a\n")
    for name in ("001.Albatross", "002.Auklet"):
        picture(tmp_path / "images" / name / "a.jpg", 3)
    data, said = load_class_folders(tmp_path, None)
    assert data.class_names == ("001.Albatross", "002.Auklet")
    assert said.startswith("CUB-200-2011")


def test_queries_and_gallery_go_together(tmp_path: Path) -> None:
    assert queries_and_gallery(tmp_path) is None
    (tmp_path / "Query").mkdir()
    assert_refused(lambda: queries_and_gallery(tmp_path), DataError, "queries", "gallery")
    (tmp_path / "gallery").mkdir()
    assert queries_and_gallery(tmp_path) == (tmp_path / "Query", tmp_path / "gallery")
