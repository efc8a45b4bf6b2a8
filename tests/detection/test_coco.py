"""COCO's formats: what is read is what was written, pycocotools agrees, and what is wrong is named."""

import contextlib
import io
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers.refusals import assert_named, assert_refused, assert_warned, having

pytest.importorskip("PIL")

from PIL import Image

from metricopt_ext.detection.ap50 import average_precision
from metricopt_ext.detection.coco import CocoSet, read_coco, read_detections, write_coco, write_detections
from metricopt_ext.detection.coco_tables import read_truth
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
    assert_refused(lambda: read_coco(annotations, tmp_path), DataError, "1", "3", "c.png")


def test_boxes_without_area_are_left_out_with_a_warning(tmp_path: Path) -> None:
    content = {**CONTENT, "annotations": [{**CONTENT["annotations"][0], "bbox": [1, 1, 0, 5]}]}
    data = assert_warned(lambda: read_coco(written(tmp_path / "flat.json", content)), "1", "b.png")
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


def test_voc_images_are_known_by_their_names_and_classes_by_number(tmp_path: Path) -> None:
    box = {"bbox": [1, 2, 3, 4], "score": 0.5}
    results = [
        {"image_id": "000003", "category_id": 2, **box},
        {"image_id": "000007", "category_id": 1, **box},
    ]
    found = read_detections(written(tmp_path / "results.json", results), voc_set())
    assert [each.labels.tolist() for each in found] == [[0], [1]]
    results[0]["image_id"] = 4
    assert_refused(
        lambda: read_detections(written(tmp_path / "results.json", results), voc_set()),
        DataError,
        "0",
        "000007",
        "000003",
    )


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
    ("content", "names"),
    [
        ([], ("images",)),
        ({**CONTENT, "categories": None}, ("categories",)),
        ({**CONTENT, "images": [], "annotations": []}, ("annotations.json", "images")),
        (changed("images", 0, id=7), ("id", "7")),
        (changed("images", 0, id=1.5), ("id", "1.5")),
        (changed("images", 0, id=True), ("unknown",)),
        (changed("images", 0, id=None), ("'id'",)),
        (changed("categories", 0, id=13), ("13", "stop sign")),
        (changed("categories", 0, name=[1]), ("1",)),
        (changed("annotations", 1, category_id="x"), ("1", "category_id", "'x'")),
        (changed("annotations", 1, iscrowd="no"), ("1", "'no'", "0")),
        (changed("annotations", 1, bbox_mode=0), ("1", "bbox_mode", "0", "bbox")),
        (changed("annotations", 1, bbox=[1, 2, 3, 4, 5]), ()),
        (changed("annotations", 1, bbox=None, segmentation=[[1, 2, 3, 2, 3, 4]]), ("bbox", "None")),
        (changed("categories", 0, name="stop sign"), ("categories", "stop sign")),
        (
            {**CONTENT, "annotations": [{**CONTENT["annotations"][1], "image_id": 8}]},
            ("0", "image_id", "8", "7", "70", "71"),
        ),
        (changed("annotations", 1, category_id=1), ("1", "13", "90")),
        (changed("annotations", 1, bbox=[1, 2, 3]), ("1", "3", "4")),
    ],
)
def test_wrong_annotations_are_named(tmp_path: Path, content: Any, names: tuple[str, ...]) -> None:
    assert_refused(lambda: read_coco(written(tmp_path / "annotations.json", content)), DataError, *names)


@pytest.mark.parametrize(
    ("content", "names"),
    [
        ({"annotations": []}, ("COCO", "results")),
        ([RESULTS[0], 5], ("1", "image_id")),
        ([{**RESULTS[0], "image_id": 8}], ("0", "image_id", "8")),
        ([{**RESULTS[0], "category_id": 1}], ("0", "category_id", "13", "90")),
        ([{**RESULTS[0], "category_id": [1]}], ("category_id", "1")),
        ([{**RESULTS[0], "score": float("nan")}], ("score", "nan")),
        ([{**RESULTS[0], "bbox": [1, 2, 3, float("inf")]}], ("4",)),
        ([{"image_id": 7, "category_id": 13, "score": 0.5}], ("bbox", "None")),
    ],
)
def test_wrong_detections_are_named(data: CocoSet, tmp_path: Path, content: Any, names: tuple[str, ...]) -> None:
    assert_refused(lambda: read_detections(written(tmp_path / "results.json", content), data), DataError, *names)


@pytest.mark.parametrize("read", [read_coco, lambda path: read_detections(path, voc_set())])
def test_what_is_no_json_or_missing_is_named(tmp_path: Path, read: Callable[[Path], Any]) -> None:
    (tmp_path / "torn.json").write_text('{"images": [')
    assert_refused(lambda: read(tmp_path / "torn.json"), DataError, "torn.json", "JSON")
    assert_refused(lambda: read(tmp_path / "missing.json"), DataError, "missing.json")


# --- The same in other words: each way of writing gives the value of pycocotools ----------------------------------

OBJECTS = ((1, 1, [10, 10, 40, 40]), (1, 2, [100, 10, 50, 50]), (2, 1, [20, 20, 30, 30]), (3, 2, [5, 5, 60, 60]))
FOUND = (
    (1, 1, [11, 11, 40, 40], 0.9),
    (1, 2, [102, 12, 50, 50], 0.8),
    (2, 1, [60, 60, 20, 20], 0.85),
    (2, 1, [21, 21, 30, 30], 0.5),
    (3, 2, [6, 6, 60, 60], 0.7),
    (3, 2, [100, 60, 20, 20], 0.75),
)


def truth() -> dict[str, Any]:
    return {
        "images": [{"id": i, "file_name": f"part/{i:06}.jpg", "width": 200, "height": 100} for i in (1, 2, 3)],
        "categories": [{"id": 1, "name": "cat"}, {"id": 2, "name": "dog"}],
        "annotations": [
            {"id": i, "image_id": image, "category_id": label, "bbox": box, "area": box[2] * box[3], "iscrowd": 0}
            for i, (image, label, box) in enumerate(OBJECTS, 1)
        ],
    }


def results() -> list[dict[str, Any]]:
    return [{"image_id": image, "category_id": label, "bbox": box, "score": s} for image, label, box, s in FOUND]


def value(folder: Path, gt: Any, dt: Any, **settings: Any) -> float:
    data = read_coco(written(folder / "gt.json", gt), dtype=torch.float64)
    return average_precision(read_detections(written(folder / "dt.json", dt), data, **settings), data, "coco").mean


@pytest.fixture(scope="module")
def expected() -> float:
    """What pycocotools says, of ids that are integers from 1."""
    coco_module, cocoeval = pytest.importorskip("pycocotools.coco"), pytest.importorskip("pycocotools.cocoeval")
    with contextlib.redirect_stdout(io.StringIO()):
        theirs = coco_module.COCO()
        theirs.dataset = truth()
        theirs.createIndex()
        evaluation = cocoeval.COCOeval(theirs, theirs.loadRes(results()), "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return float(evaluation.stats[1])


def each(entries: Any, **changes: Callable[[Any], Any]) -> None:
    """Change fields of all entries; None takes a field away."""
    for entry in entries:
        for key, change in changes.items():
            entry[key] = change(entry.get(key))


def without(entries: Any, *keys: str) -> None:
    for entry in entries:
        for key in keys:
            entry.pop(key, None)


def ids_of(**changes: Callable[[Any], Any]) -> Callable[[Any, Any], None]:
    """Change ids in the annotations: of images or categories, and where they are named."""

    def change(gt: Any, dt: Any) -> None:
        for key, entries in (("image_id", gt["images"]), ("category_id", gt["categories"])):
            if key in changes:
                each(entries, id=changes[key])
                each(gt["annotations"], **{key: changes[key]})

    return change


LESS = {"image_id": lambda i: i - 1, "category_id": lambda i: i - 1}
FROM_0, ZEROS = ids_of(**LESS), "{:04}".format

WRITTEN = {
    "annotation ids from 0": lambda gt, dt: each(gt["annotations"], id=lambda i: i - 1),
    "annotation ids repeated": lambda gt, dt: each(gt["annotations"], id=lambda _: 7),
    "annotation ids null": lambda gt, dt: each(gt["annotations"], id=lambda _: None),
    "bare annotations": lambda gt, dt: without(gt["annotations"], "id", "area", "iscrowd"),
    "iscrowd null": lambda gt, dt: each(gt["annotations"], iscrowd=lambda _: None, area=lambda _: None),
    "iscrowd false": lambda gt, dt: each(gt["annotations"], iscrowd=lambda _: False),
    "only ids": lambda gt, dt: without(gt["images"], "file_name", "width", "height"),
    "names null": lambda gt, dt: each(gt["images"], file_name=lambda _: None),
    "float sizes": lambda gt, dt: each(gt["images"], width=float, height=float),
    "sizes null": lambda gt, dt: each(gt["images"], width=lambda _: None, height=lambda _: None),
    "sizes of 0": lambda gt, dt: each(gt["images"], width=lambda _: 0, height=lambda _: -1.5),
    "an image twice": lambda gt, dt: gt["images"].append(dict(gt["images"][0])),
    "a category twice": lambda gt, dt: gt["categories"].append(dict(gt["categories"][0])),
    "names as numbers": lambda gt, dt: each(gt["categories"], name=lambda name: len(name + name[:1] * (name == "dog"))),
    "no names": lambda gt, dt: without(gt["categories"], "name"),
    "annotations by float": lambda gt, dt: each(gt["annotations"], image_id=float, category_id=float),
    "images by text": lambda gt, dt: ids_of(image_id=str)(gt, dt) or each(dt, image_id=str),
    "images by zeros": lambda gt, dt: ids_of(image_id=ZEROS)(gt, dt) or each(dt, image_id=ZEROS),
    "categories by text": lambda gt, dt: ids_of(category_id=str)(gt, dt) or each(dt, category_id=str),
    "images and categories from 0": lambda gt, dt: FROM_0(gt, dt) or each(dt, **LESS),
    "large ids": lambda gt, dt: ids_of(image_id=lambda i: i + 2**60)(gt, dt) or each(dt, image_id=lambda i: i + 2**60),
    "results by float": lambda gt, dt: each(dt, image_id=float, category_id=float),
}


@pytest.mark.parametrize("change", WRITTEN.values(), ids=WRITTEN)
def test_what_is_written_otherwise_has_the_value_of_pycocotools(
    tmp_path: Path, expected: float, change: Callable[[Any, Any], None]
) -> None:
    gt, dt = truth(), results()
    change(gt, dt)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert value(tmp_path, gt, dt) == pytest.approx(expected, abs=1e-12)


def test_masks_and_boxes_of_other_areas_are_no_corners(tmp_path: Path, expected: float) -> None:
    gt = truth()
    for area in (lambda area: 0.7 * area, lambda _: None, lambda _: "12"):
        each(gt["annotations"], area=area)
        assert value(tmp_path, gt, results()) == pytest.approx(expected, abs=1e-12)
        gt = truth()


def test_annotations_of_images_that_are_not_listed_are_left_out(tmp_path: Path, expected: float) -> None:
    """As by pycocotools, and said: a list of images is cut more often than their annotations are."""
    gt = truth()
    gt["annotations"] += [{**gt["annotations"][0], "id": 90 + i, "image_id": 77 + i} for i in range(2)]
    with pytest.warns(UserWarning, match=having("2", "6", "annotations", "77")):
        assert value(tmp_path, gt, results()) == pytest.approx(expected, abs=1e-12)


def test_an_object_of_an_area_below_0_counts(tmp_path: Path, expected: float) -> None:
    """The area of its box is its own; pycocotools leaves the object out, without a word."""
    gt = truth()
    gt["annotations"][0]["area"] = -5
    assert value(tmp_path, gt, results()) == pytest.approx(expected, abs=1e-12)
    path = written(tmp_path / "annotations.json", gt)
    assert np.isnan(read_truth(path).areas).tolist() == [True, False, False, False]
    assert read_truth(path, strict=True).areas[0] == -5


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (lambda gt, dt: each(dt, image_id=lambda i: f"{i:06}.jpg"), ("image_id", "000001.jpg", "1, 2, 3")),
        (lambda gt, dt: each(dt, image_id=str), ("image_id", "'1'", "1, 2, 3")),
        (lambda gt, dt: each(dt, category_id=lambda i: i - 1), ("category_id", "0", "1, 2")),
        (lambda gt, dt: each(dt, category_id=lambda i: ("cat", "dog")[i - 1]), ("category_id", "'cat'", "1, 2")),
        (lambda gt, dt: gt["images"].append({**gt["images"][0], "height": 9}), ("1",)),
        (lambda gt, dt: each(dt, image_id=lambda i: True), ("image_id",)),
        (lambda gt, dt: each(dt, image_id=lambda i: i + 0.5), ("image_id", "1.5", "2", "3")),
        (lambda gt, dt: each(dt, category_id=lambda i: i + 1), ("category_id", "1", "2")),
        (lambda gt, dt: each(dt, bbox=lambda b: [*b, 30]), ()),
        (lambda gt, dt: each(dt, bbox_mode=lambda _: 0), ("bbox_mode", "0", "bbox")),
        (lambda gt, dt: each(dt, bbox=lambda b: [b[0], b[1], b[0] + b[2], b[1] + b[3]]),
         ("2", "4")),
        (lambda gt, dt: each(dt, bbox=lambda b: [b[0] / 200, b[1] / 100, b[2] / 200, b[3] / 100]),
         ("bbox",)),
        (lambda gt, dt: each(gt["annotations"], bbox=lambda b: [b[0] / 200, b[1] / 100, b[2] / 200, b[3] / 100]),
         ("bbox",)),
        (lambda gt, dt: each(gt["annotations"], bbox=lambda b: [b[0], b[1], b[0] + b[2], b[1] + b[3]]),
         ("4",)),
        (lambda gt, dt: each(gt["annotations"], bbox=lambda b: [b[0] + 90, b[1] + 30, b[0] + 100, b[1] + 80])
         or without(gt["annotations"], "area"),
         ()),
    ],
)  # fmt: skip
def test_what_could_mean_two_things_is_refused(
    tmp_path: Path, change: Callable[[Any, Any], None], names: tuple[str, ...]
) -> None:
    gt, dt = truth(), results()
    change(gt, dt)
    assert_refused(lambda: value(tmp_path, gt, dt), DataError, *names)


def test_detections_of_unknown_classes_are_refused(tmp_path: Path) -> None:
    dt = [*results(), {**results()[0], "category_id": 3}]
    assert_refused(lambda: value(tmp_path, truth(), dt), DataError, "detection", "3")


def test_an_image_without_a_size_has_its_own_by_which_boxes_are_told_of(tmp_path: Path) -> None:
    Image.new("RGB", (20, 10)).save(tmp_path / "a.png")
    (tmp_path / "torn.png").write_bytes(b"no image")
    gt = {
        "images": [{"id": 1, "file_name": "a.png"}, {"id": 2, "file_name": "torn.png"}],
        "categories": [{"id": 1, "name": "cat"}],
        "annotations": [{"image_id": 1, "category_id": 1, "bbox": box} for box in ([1, 1, 5, 5], [30, 30, 5, 5])],
    }
    images = assert_warned(lambda: read_coco(written(tmp_path / "gt.json", gt), tmp_path).images, "1", "a.png")
    assert [(image.width, image.height) for image in images] == [(20, 10), (0, 0)]
    assert_refused(lambda: images[1].load(), DataError, "torn.png")


def test_sizes_and_names_are_needed_where_images_are(annotations: Path, tmp_path: Path) -> None:
    Image.new("RGB", (20, 10)).save(tmp_path / "a.png")
    for change, names in (
        ({"width": 1.5}, ("width", "1.5")),
        ({"height": 0}, ("height", "0")),
        ({"file_name": None}, ("file_name",)),
        ({"file_name": 5}, ("file_name", "5")),
    ):
        path = written(tmp_path / "changed.json", changed("images", 1, **change))
        with pytest.raises(DataError) as caught:
            read_coco(path, tmp_path)
        assert_named(caught, *names)
        assert len(read_coco(path)) == 3
