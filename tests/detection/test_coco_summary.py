"""COCO's numbers are pycocotools', on random sets and in closed form."""

import contextlib
import copy
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pycocotools")

import torch
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from metricopt_ext.detection.coco import read_coco, read_detections
from metricopt_ext.detection.coco_summary import Summary, summarize
from metricopt_ext.detection.records import Annotated, Detections, DetectionSet
from metricopt_ext.errors import DataError

CLASSES = 4  # the last of which has no object, and the one before it no detection
NAMES = ("AP", "AP50", "AP75", "APs", "APm", "APl", "AR1", "AR10", "AR100", "ARs", "ARm", "ARl")


def drawn(seed: int, images: int = 12, most: int = 25) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A COCO file's content and results: crowds, areas unlike the boxes' and at the sizes' ends, equal scores."""
    rng = np.random.default_rng(seed)
    truth: dict[str, Any] = {
        "images": [{"id": 3 * i + 1, "width": 640, "height": 480} for i in range(images)],
        "categories": [{"id": 7 * i + 2, "name": f"class {i}"} for i in range(CLASSES)],
        "annotations": [],
    }
    found = []
    for image in truth["images"]:
        boxes = np.concatenate(
            [rng.integers(0, 400, (most, 2)), rng.choice([9, 32, 50, 96, 130], (most, 2)) + 0.25 * (seed % 2)], axis=1
        ).astype(float)
        for place in range(rng.integers(0, most + 1)):
            area = boxes[place, 2] * boxes[place, 3] * rng.choice([1, 1, 0.6])
            truth["annotations"].append(
                {
                    "id": len(truth["annotations"]) + 1,
                    "image_id": image["id"],
                    "category_id": int(7 * rng.integers(0, CLASSES - 1) + 2),
                    "bbox": boxes[place].tolist(),
                    "area": float(rng.choice([area, area, 1024.0, 9216.0])),
                    "iscrowd": int(rng.random() < 0.15),
                }
            )
        own = [each for each in truth["annotations"] if each["image_id"] == image["id"]]
        for _ in range(rng.integers(0, 2 * most + 1)):
            box, label = boxes[rng.integers(0, most)].copy(), 7 * int(rng.choice([0, 1, 3])) + 2
            if own and rng.random() < 0.7:
                near = own[rng.integers(0, len(own))]
                box = np.array(near["bbox"])
                label = 2 if near["category_id"] == 16 else near["category_id"]
            box += rng.integers(-4, 5, 4) * rng.choice([0, 0.5, 1, 4])
            box[2:] = np.maximum(box[2:], 1)
            score = float(rng.integers(0, 20)) / 19
            found.append({"image_id": image["id"], "category_id": label, "bbox": box.tolist(), "score": score})
    return truth, found


def by_pycocotools(
    truth: dict[str, Any], found: list[dict[str, Any]], kind: str = "bbox", **params: Any
) -> tuple[list[float], tuple[str, ...]]:
    """What it computes, and what it prints."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        coco = COCO()
        coco.dataset = copy.deepcopy(truth)
        coco.createIndex()
        evaluation = COCOeval(coco, coco.loadRes(copy.deepcopy(found)), kind)
        for name, value in params.items():
            setattr(evaluation.params, name, value)
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return evaluation.stats.tolist(), tuple(
        line for line in said.getvalue().splitlines() if line.startswith(" Average")
    )


def summarized(folder: Path, truth: dict[str, Any], found: list[dict[str, Any]], **options: Any) -> Summary:
    """Ours, from files."""
    (folder / "truth.json").write_text(json.dumps(truth))
    (folder / "found.json").write_text(json.dumps(found))
    data = read_coco(folder / "truth.json", dtype=torch.float64)
    return summarize(read_detections(folder / "found.json", data), data, **options)


def known(numbers: dict[str, float | None]) -> list[float]:
    return [-1 if value is None else value for value in numbers.values()]


@pytest.mark.filterwarnings("ignore:boxes in:UserWarning", "ignore:.*would hit an object:UserWarning")
@pytest.mark.parametrize(
    ("seed", "images", "most"), [*((seed, 12, 25) for seed in range(8)), (8, 3, 300), (9, 1, 1), (10, 2, 300)]
)
def test_all_numbers_and_lines_are_pycocotools_s(tmp_path: Path, seed: int, images: int, most: int) -> None:
    truth, found = drawn(seed, images, most)
    ours = summarized(tmp_path, truth, found)
    stats, lines = by_pycocotools(truth, found)
    assert tuple(ours.numbers) == NAMES
    assert known(ours.numbers) == pytest.approx(stats, abs=1e-9)
    assert ours.lines == lines
    assert len(lines) == 12
    for category in truth["categories"]:
        stats, _ = by_pycocotools(truth, found, catIds=[category["id"]])
        if category["name"] in ours.per_class:
            assert known(ours.per_class[category["name"]]) == pytest.approx(stats, abs=1e-9)
        else:
            assert stats == [-1] * 12
    if images > 2:
        assert list(ours.per_class) == ["class 0", "class 1", "class 2"]
        assert ours.per_class["class 2"]["AP"] == ours.per_class["class 2"]["AR100"] == 0
        values = known(ours.numbers)
        assert min(values) > 0.001
        assert len(set(values)) == 12


@pytest.mark.filterwarnings("ignore:boxes in:UserWarning", "ignore:.*would hit an object:UserWarning")
@pytest.mark.parametrize("most", [11, 300])
def test_another_number_of_detections_may_count(tmp_path: Path, most: int) -> None:
    truth, found = drawn(8, 3, 300)
    ours = summarized(tmp_path, truth, found, max_detections=most)
    stats, lines = by_pycocotools(truth, found, maxDets=[1, 10, most])
    assert known(ours.numbers)[1:] == pytest.approx(stats[1:], abs=1e-9)  # its AP is of 100 detections, or -1
    assert ours.lines[1:] == lines[1:]
    assert f"maxDets={most:>3d}" in ours.lines[0]
    assert list(ours.numbers)[6:9] == ["AR1", "AR10", f"AR{most}"]
    assert list(summarized(tmp_path, truth, found, max_detections=5).numbers)[6:8] == ["AR1", "AR5"]


def one_image(areas: list[float] | None = None) -> DetectionSet:
    """Two objects of 10 x 10 and 100 x 100 pixels."""
    boxes = torch.tensor([[0.0, 0, 10, 10], [100, 100, 200, 200]])
    none = torch.zeros(2, dtype=torch.bool)
    told = None if areas is None else torch.tensor(areas)
    return DetectionSet(("a",), [Annotated(1, Path("1"), 300, 300, boxes, none.long(), none, none, areas=told)])


def test_an_object_is_found_by_size_and_by_how_many_may_count() -> None:
    truth = one_image()
    (image,) = truth.images
    found = [Detections(image.boxes, torch.tensor([0.8, 0.9]), image.labels)]
    numbers = summarize(found, truth).numbers
    assert numbers["APm"] is numbers["ARm"] is None
    assert {name for name, value in numbers.items() if value == pytest.approx(1)} == {*NAMES} - {"AR1", "APm", "ARm"}
    assert numbers["AR1"] == pytest.approx(0.5)
    half = [Detections(image.boxes[1:], torch.tensor([0.9]), image.labels[1:])]
    numbers = summarize(half, truth).numbers
    assert numbers["APl"] == numbers["ARl"] == pytest.approx(1)
    assert numbers["APs"] == numbers["ARs"] == 0
    assert numbers["AP"] == pytest.approx(51 / 101)


def test_an_area_that_is_not_told_is_the_box_s() -> None:
    found = [Detections(torch.zeros(0, 4), torch.zeros(0), torch.zeros(0, dtype=torch.int64))]
    whole = summarize(found, one_image())
    assert summarize(found, one_image([float("nan")] * 2)) == whole
    assert summarize(found, one_image([2000.0, 100.0])).numbers["APm"] == 0
    assert whole.numbers["APm"] is None


def test_detections_of_other_images_are_refused() -> None:
    with pytest.raises(DataError, match="there are detections for 0 images, but 1 images"):
        summarize([], one_image())
