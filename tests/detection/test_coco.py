"""COCO's formats: what is read is what was written, pycocotools agrees, and what is wrong is named."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("PIL")

from PIL import Image

from metricopt_ext.detection.coco import CocoSet, read_coco, read_detections, write_coco, write_detections
from metricopt_ext.detection.records import Annotated, Detections, DetectionSet
from metricopt_ext.errors import DataError

# Ids with gaps, neither images nor categories in their order; a crowd region; an image without objects.
CONTENT = {
    "images": [
        {"id": 70, "file_name": "b.png", "width": 40, "height": 30},
        {"id": 7, "file_name": "a.png", "width": 20, "height": 10},
        {"id": 71, "file_name": "c.png", "width": 20, "height": 10},
    ],
    "annotations": [
        {"id": 5, "image_id": 70, "category_id": 90, "bbox": [1.5, 2, 10.1, 20], "area": 3, "iscrowd": 1},
        {"id": 3, "image_id": 7, "category_id": 90, "bbox": [0, 0, 20, 10], "area": 200, "iscrowd": 0},
        {"id": 4, "image_id": 70, "category_id": 13, "bbox": [3, 4, 5, 6]},
    ],
    "categories": [{"id": 90, "name": "toothbrush"}, {"id": 13, "name": "stop sign"}],
}
RESULTS = [
    {"image_id": 70, "category_id": 13, "bbox": [3, 4, 5.25, 6], "score": 0.125},
    {"image_id": 7, "category_id": 90, "bbox": [0, 1, 2, 3], "score": 0.3},
    {"image_id": 70, "category_id": 90, "bbox": [0.1, 0.2, 0.3, 0.4], "score": 0.9},
]


def written(path: Path, content: Any) -> Path:
    path.write_text(json.dumps(content))
    return path


@pytest.fixture
def annotations(tmp_path: Path) -> Path:
    return written(tmp_path / "annotations.json", CONTENT)


@pytest.fixture
def data(annotations: Path) -> CocoSet:
    return read_coco(annotations, dtype=torch.float64)


def test_images_and_classes_come_in_the_order_of_their_ids(data: CocoSet) -> None:
    assert data.classes == ("stop sign", "toothbrush")
    assert data.category_ids == (13, 90)
    first, second, third = data.images
    assert [image.image_id for image in data.images] == [7, 70, 71]
    assert (second.path, second.width, second.height) == (Path("b.png"), 40, 30)
    assert second.boxes.tolist() == [[1.5, 2, 1.5 + 10.1, 22], [3, 4, 8, 10]]
    assert (second.labels.tolist(), second.crowd.tolist()) == ([1, 0], [True, False])
    assert first.boxes.tolist() == [[0, 0, 20, 10]]
    assert third.boxes.shape == (0, 4)
    assert not any(image.difficult.any() for image in data.images)


def test_images_are_loaded_from_their_folder(annotations: Path, tmp_path: Path) -> None:
    for image in CONTENT["images"]:
        Image.new("RGB", (image["width"], image["height"]), (1, 2, 3)).save(tmp_path / image["file_name"])
    assert read_coco(annotations, tmp_path).images[1].load().shape == (3, 30, 40)
    (tmp_path / "c.png").unlink()
    with pytest.raises(DataError, match=r"lacks 1 of 3 images, first c.png"):
        read_coco(annotations, tmp_path)


def test_boxes_without_area_are_left_out_with_a_warning(tmp_path: Path) -> None:
    content = {**CONTENT, "annotations": [{**CONTENT["annotations"][0], "bbox": [1, 1, 0, 5]}]}
    with pytest.warns(UserWarning, match=r"1 without area left out \(b.png\)"):
        data = read_coco(written(tmp_path / "flat.json", content))
    assert sum(len(image.boxes) for image in data.images) == 0


def test_a_written_set_is_read_as_it_was(data: CocoSet, tmp_path: Path) -> None:
    again = read_coco(write_coco(tmp_path / "out" / "again.json", data), dtype=torch.float64)
    assert (again.classes, again.category_ids) == (data.classes, data.category_ids)
    for ours, theirs in zip(again.images, data.images, strict=True):
        assert (ours.image_id, ours.path, ours.width, ours.height) == (
            theirs.image_id,
            theirs.path,
            theirs.width,
            theirs.height,
        )
        assert torch.allclose(ours.boxes, theirs.boxes, rtol=0, atol=1e-12)
        assert torch.equal(ours.labels, theirs.labels)
        assert torch.equal(ours.crowd, theirs.crowd)


def test_detections_are_read_by_image_and_written_back(data: CocoSet, tmp_path: Path) -> None:
    found = read_detections(written(tmp_path / "results.json", RESULTS), data)
    assert [len(each) for each in found] == [1, 2, 0]
    assert found[1].labels.tolist() == [0, 1]
    assert found[1].scores.tolist() == [0.125, 0.9]
    assert found[1].boxes[0].tolist() == [3, 4, 8.25, 10]
    again = read_detections(write_detections(tmp_path / "again.json", found, data), data)
    for ours, theirs in zip(again, found, strict=True):
        assert torch.allclose(ours.boxes, theirs.boxes, rtol=0, atol=1e-12)
        assert torch.equal(ours.scores, theirs.scores)
        assert torch.equal(ours.labels, theirs.labels)


def test_a_subset_remembers_the_ids(data: CocoSet, tmp_path: Path) -> None:
    (found,) = read_detections(written(tmp_path / "results.json", [RESULTS[1]]), data.subset([0]))
    assert found.labels.tolist() == [1]


def voc_set() -> DetectionSet:
    images = [
        Annotated(
            image_id=name,
            path=Path("JPEGImages") / f"{name}.jpg",
            width=30,
            height=20,
            boxes=torch.tensor([[1.0, 2.0, 11.0, 12.0]]),
            labels=torch.tensor([1]),
            difficult=torch.tensor([name == "000003"]),
            crowd=torch.tensor([False]),
        )
        for name in ("000007", "000003")
    ]
    return DetectionSet(("bird", "cat"), images)


def test_voc_images_are_known_by_their_names_and_classes_by_number_or_name(tmp_path: Path) -> None:
    box = {"bbox": [1, 2, 3, 4], "score": 0.5}
    results = [
        {"image_id": "000003", "category_id": 2, **box},
        {"image_id": "000007", "category_name": "bird", "category_id": 77, **box},
    ]
    found = read_detections(written(tmp_path / "results.json", results), voc_set())
    assert [each.labels.tolist() for each in found] == [[0], [1]]
    results[0]["image_id"] = 3  # numbers are no names
    with pytest.raises(DataError, match="detection 0 has the unknown image_id 3; known: '000007', '000003'"):
        read_detections(written(tmp_path / "results.json", results), voc_set())


def test_pycocotools_evaluates_what_was_written_for_a_voc_set(tmp_path: Path) -> None:
    coco_module, cocoeval = pytest.importorskip("pycocotools.coco"), pytest.importorskip("pycocotools.cocoeval")
    path = write_coco(tmp_path / "voc.json", voc_set())
    data = read_coco(path)
    assert [(image.image_id, image.path.name) for image in data.images] == [(1, "000007.jpg"), (2, "000003.jpg")]
    boxes = torch.tensor([[1.0, 2.0, 11.0, 12.0]])
    found = [Detections(boxes, torch.tensor([0.5]), torch.tensor([label])) for label in (1, 0)]
    theirs = coco_module.COCO(path)
    results = theirs.loadRes(str(write_detections(tmp_path / "results.json", found, data)))
    evaluation = cocoeval.COCOeval(theirs, results, "bbox")
    evaluation.evaluate()
    evaluation.accumulate()
    evaluation.summarize()
    assert evaluation.stats[1] == pytest.approx(51 / 101)  # one of two cats; birds have no object


def changed(key: str, place: int, **fields: Any) -> Any:
    content = json.loads(json.dumps(CONTENT))
    content[key][place].update(fields)
    return content


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([], "has no list 'images'"),
        ({**CONTENT, "categories": None}, "has no list 'categories'"),
        ({**CONTENT, "images": [], "annotations": []}, "annotations.json has an empty list 'images'"),
        (changed("images", 0, id=7), "an image's id occurs twice: 7"),
        (changed("images", 0, id="x"), "an image has the id 'x'; it must be an integer"),
        (changed("images", 0, width=None), "an image has no 'width'"),
        (changed("images", 0, width=1.5), "an image has the width 1.5"),
        (changed("categories", 0, name="stop sign"), "several categories named 'stop sign'"),
        (changed("annotations", 1, image_id=8), "annotation 1 has the unknown image_id 8; known: 7, 70, 71"),
        (changed("annotations", 1, category_id=1), "annotation 1 has the unknown category_id 1; known: 13, 90"),
        (changed("annotations", 1, bbox=[1, 2, 3]), r"annotation 1 has the bbox \[1, 2, 3\]; it must be 4 finite"),
    ],
)
def test_wrong_annotations_are_named(tmp_path: Path, content: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_coco(written(tmp_path / "annotations.json", content))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"annotations": []}, "holds a dict; COCO's results are a list"),
        ([RESULTS[0], 5], "detection 1 has no 'image_id'"),
        ([{**RESULTS[0], "image_id": 8}], "detection 0 has the unknown image_id 8"),
        ([{**RESULTS[0], "category_id": 1}], "detection 0 has the unknown category_id 1; known: 13, 90"),
        ([{**RESULTS[0], "category_name": "dog"}], "unknown category_name 'dog'; known: 'stop sign', 'toothbrush'"),
        ([{**RESULTS[0], "category_id": [1]}], r"unknown category_id \[1\]"),
        ([{**RESULTS[0], "score": float("nan")}], "has the score nan; it must be a finite number"),
        ([{**RESULTS[0], "bbox": [1, 2, 3, float("inf")]}], "it must be 4 finite numbers"),
        ([{"image_id": 7, "category_id": 13, "score": 0.5}], "has the bbox None"),
    ],
)
def test_wrong_detections_are_named(data: CocoSet, tmp_path: Path, content: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_detections(written(tmp_path / "results.json", content), data)


@pytest.mark.parametrize("read", [read_coco, lambda path: read_detections(path, voc_set())])
def test_what_is_no_json_or_missing_is_named(tmp_path: Path, read: Callable[[Path], Any]) -> None:
    (tmp_path / "torn.json").write_text('{"images": [')
    with pytest.raises(DataError, match=r"torn.json is truncated or not JSON"):
        read(tmp_path / "torn.json")
    with pytest.raises(DataError, match=r"missing.json does not exist"):
        read(tmp_path / "missing.json")
