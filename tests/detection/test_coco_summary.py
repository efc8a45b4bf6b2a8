"""COCO's numbers are pycocotools', on random sets and in closed form."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.refusals import assert_refused

pytest.importorskip("pycocotools")

import torch
from pycocotools import mask

from coco_files import read_detections
from helpers.coco_reference import average_precision, evaluated
from helpers.coco_reference import summary as by_pycocotools
from metricopt_ext.detection.coco import read_coco
from metricopt_ext.detection.coco_summary import Summary, summarize
from metricopt_ext.detection.coco_tables import read_found, read_truth
from metricopt_ext.detection.metric import PRECISIONS, MeanAveragePrecision
from metricopt_ext.detection.records import Annotated, Detections, DetectionSet
from metricopt_ext.detection.tables import Kind
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


def summarized(folder: Path, truth: dict[str, Any], found: list[dict[str, Any]], **options: Any) -> Summary:
    """Ours, from files."""
    (folder / "truth.json").write_text(json.dumps(truth))
    (folder / "found.json").write_text(json.dumps(found))
    kind = options.get("kind", "bbox")
    data = read_coco(folder / "truth.json", dtype=torch.float64, kind=kind)
    return summarize(read_detections(folder / "found.json", data, kind=kind), data, **options)


def known(numbers: dict[str, float | None]) -> list[float]:
    return [-1 if value is None else value for value in numbers.values()]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:boxes in:UserWarning")
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


@pytest.mark.filterwarnings("ignore:boxes in:UserWarning")
@pytest.mark.filterwarnings("ignore:.* left out :UserWarning")
@pytest.mark.parametrize(("kind", "seed"), [("bbox", 0), ("bbox", 1), ("bbox", 2), ("segm", 0)])
def test_a_strict_count_has_pycocotools_s_faults(tmp_path: Path, kind: Kind, seed: int) -> None:
    """Ids from 0, repeated ids, boxes without area and unknown classes, each of which pycocotools counts its way."""
    truth, found = with_masks(seed, "encodings") if kind == "segm" else drawn(seed)
    for place, each in enumerate(truth["annotations"]):
        each["id"] = place if place % 9 else place // 2
        if kind == "bbox" and place % 7 == 0:
            each.update(bbox=[*each["bbox"][:2], [0, -5, 30][place % 3], [20, -5, 0][place % 3]], area=0.0)
    found += [{**each, "category_id": 999} for each in found[:5]]
    expected, _ = by_pycocotools(truth, found, kind)
    ours = strictly(tmp_path, truth, found, kind)
    assert known(ours.numbers) == pytest.approx(expected, abs=1e-9)
    if kind == "segm":
        found = found[:-5]
        usual = summarized(tmp_path, truth, found, kind=kind)
        assert known(usual.numbers) != pytest.approx(expected, abs=1e-3)


def strictly(folder: Path, truth: Any, found: Any, kind: Kind = "bbox") -> Summary:
    (folder / "truth.json").write_text(json.dumps(truth))
    (folder / "found.json").write_text(json.dumps(found))
    table = read_truth(folder / "truth.json", kind=kind, strict=True)
    read = read_found(folder / "found.json", table, kind=kind, strict=True)
    return summarize(read, table, kind)


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
    assert_refused(lambda: summarize([], one_image()), DataError, "0", "1")


# --- Masks ---------------------------------------------------------------------------------------------------------


def with_masks(seed: int, drawn_by: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The random set with masks: discs in their boxes, as encodings or polygons."""
    truth, found = drawn(seed, 6, 12)
    rng = np.random.default_rng(100 + seed)
    y, x = np.mgrid[:480, :640]

    def disc(box: list[float]) -> Any:
        left, top, width, height = box
        centre = left + width / 2, top + height / 2
        if drawn_by == "polygons":
            turns = np.linspace(0, 2 * np.pi, 9)[:-1]
            corners = np.stack([centre[0] + width / 2 * np.cos(turns), centre[1] + height / 2 * np.sin(turns)], 1)
            half = [left, top, left + width / 2, top, left, top + height / 2]  # a second part
            return [corners.flatten().round(2).tolist(), half]
        inside = ((x - centre[0]) / (width / 2)) ** 2 + ((y - centre[1]) / (height / 2)) ** 2 <= rng.choice([1, 0.5])
        encoded = mask.encode(np.asfortranarray(inside.astype(np.uint8)))
        return {"size": [480, 640], "counts": encoded["counts"].decode()}

    for entry in [*truth["annotations"], *found]:
        entry["segmentation"] = disc(entry["bbox"])
    return truth, found


@pytest.mark.parametrize("drawn_by", ["encodings", "polygons"])
@pytest.mark.parametrize("seed", range(2))
def test_masks_give_pycocotools_s_numbers(tmp_path: Path, seed: int, drawn_by: str) -> None:
    truth, found = with_masks(seed, drawn_by)
    if drawn_by != "encodings":  # pycocotools' results are encodings
        _, encoded = with_masks(seed, "encodings")
        for entry, other in zip(found, encoded, strict=True):
            entry["segmentation"] = other["segmentation"]
    ours = summarized(tmp_path, truth, found, kind="segm")
    stats, lines = by_pycocotools(truth, found, "segm")
    assert known(ours.numbers) == pytest.approx(stats, abs=1e-9)
    assert ours.lines == lines
    assert 0.02 < stats[0] < 0.9
    assert stats != by_pycocotools(truth, found, "bbox")[0]


@pytest.mark.parametrize("name", [each for each in PRECISIONS if "/" in each])
def test_a_search_s_metric_is_pycocotools_s_on_all_images_and_on_some(tmp_path: Path, name: str) -> None:
    kind, _, measure = name.partition("/")
    truth, found = with_masks(0, "encodings")
    for path, content in (("truth", truth), ("found", found)):
        (tmp_path / f"{path}.json").write_text(json.dumps(content))
    data = read_coco(tmp_path / "truth.json", dtype=torch.float64, kind=kind)  # type: ignore[arg-type]
    metric = MeanAveragePrecision(name, "coco")
    value_on = metric.judge(read_detections(tmp_path / "found.json", data, kind=metric.kind), data)
    ids = [each["id"] for each in truth["images"]]
    values = []
    for places in (None, range(0, len(ids), 2), range(1, len(ids), 2)):
        chosen = ids if places is None else [ids[i] for i in places]
        values.append(value_on(places))
        expected = average_precision(evaluated(truth, found, kind, imgIds=chosen), measure)
        assert values[-1] == pytest.approx(expected, abs=1e-9)
    assert len(set(values)) == 3
    judged = {each["image_id"] for each in truth["annotations"] if not each["iscrowd"]}
    assert metric.with_objects(data).tolist() == [key in judged for key in ids]
