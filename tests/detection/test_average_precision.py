"""AP50 and F1 against pycocotools, Detectron2's evaluation of VOC, naive loops, and cases known in closed form."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor, nn

pytest.importorskip("PIL")
pytest.importorskip("torchvision")

from helpers.boxes import naive_iou
from helpers.refusals import assert_refused, assert_warned
from metricopt_ext.data.halves import random_halves
from metricopt_ext.detection.ap50 import METRICS, average_precision, beyond_limit, match, match_for, mean_over_ious
from metricopt_ext.detection.box_kinds import check_detected
from metricopt_ext.detection.matching import DEFINITIONS
from metricopt_ext.detection.metric import MeanAveragePrecision, MeanF1, detector_metric
from metricopt_ext.detection.records import Annotated, Detections, DetectionSet
from metricopt_ext.detection.toolkit import Example
from metricopt_ext.detection.voc import read_voc, write_voc
from metricopt_ext.errors import DataError, MetricError
from testers.metric import HalvedMetricTester, Rows, Told

SIZE = 100
VOC = ("voc_11_point", "voc")
CLASSES = ("a", "b", "c", "not found", "absent")


def annotated(boxes: Any, labels: Any, difficult: Any = None, crowd: Any = None, name: str | int = 1) -> Annotated:
    labels = torch.as_tensor(labels, dtype=torch.int64)
    boxes = torch.as_tensor(boxes, dtype=torch.float32).reshape(-1, 4)
    flags = [
        torch.zeros(len(labels), dtype=torch.bool) if f is None else torch.as_tensor(f) for f in (difficult, crowd)
    ]
    return Annotated(name, Path(f"{name}.png"), SIZE, SIZE, boxes, labels, *flags)


def detections(boxes: Any, scores: Any, labels: Any) -> Detections:
    boxes = torch.as_tensor(boxes, dtype=torch.float32).reshape(-1, 4)
    return Detections(boxes, torch.as_tensor(scores, dtype=torch.float32), torch.as_tensor(labels, dtype=torch.int64))


def drawn(seed: int, kind: str = "ties", *, images: int = 8, most: int = 25, flags: float = 0.2) -> Rows:
    """Detections near and far from objects, with ties in scores and IoUs, images without either, crowds and difficult.

    Of a kind of `MetricTester`. The last class has no objects, the one before no detections.
    """
    rng = np.random.default_rng(seed)
    images = int(rng.integers(1, 5)) if kind == "few rows" else images
    present = {"one class": [0], "absent class": [0, 3]}.get(kind, [0, 1, 2, 3])
    truth, found = [], []
    for i in range(images):
        count = int(rng.integers(0, 7)) * (i % 7 != 3)
        corner = rng.integers(0, 60, (count, 2))
        boxes, labels = (
            np.concatenate([corner, corner + rng.integers(4, 40, (count, 2))], 1),
            rng.choice(present, count),
        )
        if count > 1:
            boxes[1], labels[1] = boxes[0], labels[0]  # two objects that no overlap tells apart
        truth.append(annotated(boxes, labels, *(rng.random(count) < flags for _ in range(2)), name=i))

        guesses = int(rng.integers(1, most))
        corner = rng.integers(0, 60, (guesses, 2))
        places = np.concatenate([corner, corner + rng.integers(4, 40, (guesses, 2))], 1).astype(float)
        guessed = rng.choice([0, 1, 2, 4], guesses)
        if count:
            near, good = rng.integers(0, count, guesses), rng.random(guesses) < 0.6
            moved = boxes[near] + rng.integers(-6, 7, (guesses, 4)) * rng.choice([0, 0.25, 1], (guesses, 1))
            places[good], guessed[good] = moved[good], np.where(labels[near][good] == 3, 0, labels[near][good])
            places[:, 2:] = np.maximum(places[:, 2:], places[:, :2] + 1)
        places[:, 2] -= 80 * (rng.random(guesses) < 0.05)  # of negative width
        scores = (
            rng.permutation(1000)[:guesses] / 1024 + i / 2**20 if kind == "apart" else rng.integers(0, 25, guesses) / 24
        )
        found.append(detections(places, scores, guessed))
    return found, truth


def random_set(seed: int, **options: Any) -> tuple[list[Detections], DetectionSet]:
    found, truth = drawn(seed, **options)
    return found, DetectionSet(CLASSES, truth)


class OfImages(HalvedMetricTester):
    """Rows are images: what is found in each, and its objects."""

    metric: Any
    ties_by_row = True
    named_empty = ("0",)

    def inputs(self, kind: str) -> st.SearchStrategy[Rows]:
        return st.integers(0, 2**32 - 1).map(lambda seed: drawn(seed, kind, images=20 if kind == "apart" else 8))

    def ours(self, found: Any, truth: Any) -> float:
        return self.metric.judge(found, DetectionSet(CLASSES, truth))(None)  # type: ignore[no-any-return]

    def of_type(self, rows: Rows, scores: torch.dtype, labels: torch.dtype) -> Rows:
        found = [Detections(f.boxes.to(scores), f.scores.to(scores), f.labels.to(labels)) for f in rows[0]]
        return found, [replace(each, labels=each.labels.to(labels)) for each in rows[1]]

    def with_nan(self, rows: Rows) -> Rows:
        found, truth = rows
        return [*found[:-1], replace(found[-1], scores=torch.full_like(found[-1].scores, torch.nan))], truth

    def laid_otherwise(self, rows: Rows) -> Rows:
        strided = [torch.stack([f.boxes, 7 * f.boxes], dim=-1)[..., 0].requires_grad_() for f in rows[0]]
        return [replace(f, boxes=boxes) for f, boxes in zip(rows[0], strided, strict=True)], rows[1]

    def told(self, found: Any, truth: Any) -> Told:
        examples = [Example(torch.zeros(3, SIZE, SIZE, dtype=torch.uint8), each) for each in truth]
        metric = detector_metric(self.metric, Finding(found), examples, CLASSES)  # type: ignore[arg-type]
        answer = metric.evaluate(nn.Identity(), "drawn")
        halves = zip(random_halves(len(truth), 0), answer.halves or (), strict=False)
        told = [(half.tolist(), metric.sign * cost) for half, cost in halves]
        return Told(answer.value, [told] if told else [], metric.ledger.spent)


class Finding:
    """A toolkit of a detector that finds what it is told, in the images of a set by their ids."""

    def __init__(self, found: Sequence[Detections]) -> None:
        self.found = found

    def detect(self, model: nn.Module, batch: Sequence[Example]) -> list[Detections]:
        return [self.found[int(each.truth.image_id)] for each in batch]


class TestCoco(OfImages):
    metric = MeanAveragePrecision("AP", "coco")

    def reference(self, found: Any, truth: Any) -> float:
        coco = pytest.importorskip("helpers.coco_reference")
        content, results = coco.contents(found, truth, len(CLASSES))
        if not results or not truth:
            return math.nan
        return coco.average_precision(coco.evaluated(content, results), self.metric.name)  # type: ignore[no-any-return]


class TestVoc(OfImages):
    metric = MeanAveragePrecision("AP50", "voc")

    def reference(self, found: Any, truth: Any) -> float:
        values = [naive_voc(found, truth, label, self.metric.definition != "voc") for label in range(len(CLASSES))]
        known = [value for value in values if not math.isnan(value)]
        return float(np.mean(known)) if known else math.nan


class TestVocWith11Points(TestVoc):
    metric = MeanAveragePrecision("AP50", "voc_11_point")


class TestF1(OfImages):
    metric = MeanF1("voc")

    def inputs(self, kind: str) -> st.SearchStrategy[Rows]:
        return st.integers(0, 2**32 - 1).map(lambda seed: drawn(seed, kind, images=20, flags=0.0))

    def reference(self, found: Any, truth: Any) -> float:
        values = [naive_f1(found, truth, label) for label in range(len(CLASSES))]
        known = [value for value in values if not math.isnan(value)]
        return float(np.mean(known)) if known else math.nan


def naive_voc(found: Sequence[Detections], truth: Sequence[Annotated], label: int, eleven: bool) -> float:
    """VOC's evaluation of one class as its development kit describes it, one detection after the other."""
    objects = []
    for i, image in enumerate(truth):
        for box, own, difficult, crowd in zip(image.boxes, image.labels, image.difficult, image.crowd, strict=True):
            if own == label:
                objects.append({"image": i, "box": box.tolist(), "ignored": bool(difficult | crowd), "found": False})
    guesses = [
        (-float(score), i, k, box.tolist())
        for i, each in enumerate(found)
        for k, (box, score, own) in enumerate(zip(each.boxes, each.scores, each.labels, strict=True))
        if own == label
    ]
    positives = sum(not thing["ignored"] for thing in objects)
    if not positives:
        return math.nan
    true, false, curve = 0, 0, []
    for _, i, _, box in sorted(guesses):
        best, thing = 0.0, None
        for candidate in (other for other in objects if other["image"] == i):
            common = naive_iou(box, candidate["box"])
            if common > best:
                best, thing = common, candidate
        if best > 0.5 and thing["ignored"]:
            continue
        if best > 0.5 and not thing["found"]:
            thing["found"] = True
            true += 1
        else:
            false += 1
        curve.append((true / positives, true / (true + false)))
    if eleven:
        levels = [i * 0.1 for i in range(11)]
        return sum(max((p for r, p in curve if r >= level), default=0.0) for level in levels) / 11
    area, before = 0.0, 0.0
    for k, (recall, _) in enumerate(curve):
        area += (recall - before) * max(p for _, p in curve[k:])
        before = recall
    return area


def naive_f1(found: Sequence[Detections], truth: Sequence[Annotated], label: int) -> float:
    """F1 of one class, one object after the other; no object is difficult."""
    true = total = objects = 0
    for image, each in zip(truth, found, strict=True):
        own = image.boxes[image.labels == label].tolist()
        guesses = each.boxes[each.labels == label].tolist()
        nearest = [max(range(len(own)), key=lambda k: naive_iou(box, own[k])) for box in guesses] if own else []
        hit = {k for box, k in zip(guesses, nearest, strict=False) if naive_iou(box, own[k]) > 0.5}
        true, total, objects = true + len(hit), total + len(guesses), objects + len(own)
    precision, recall = true / max(total, 1), true / objects if objects else math.nan
    return 2 * precision * recall / (precision + recall) if true else 0.0 * recall


@pytest.mark.parametrize("definition", DEFINITIONS)
def test_ap_is_the_share_of_ious_at_which_a_box_still_hits(definition: Any) -> None:
    """A box that overlaps its object by 72 % hits at 0.5, ..., 0.7: at 5 of 10 IoUs."""
    truth = DetectionSet(("a",), [annotated([[0, 0, 100, 100]], [0])])
    found = [detections([[0, 0, 100, 72]], [0.9], [0])]
    assert mean_over_ious(match_for("AP", found, truth, definition)) == pytest.approx(0.5)
    assert METRICS["AP50"] == (0.5,)


def by_detectron2(truth: DetectionSet, found: Sequence[Detections], tree: Path, year: int) -> float:
    """AP50 by Detectron2's evaluation of VOC, of images that were written to a tree."""
    pytest.importorskip("detectron2")
    from detectron2.data import MetadataCatalog
    from detectron2.evaluation import PascalVOCDetectionEvaluator
    from detectron2.structures import Boxes, Instances

    name = f"metricopt_ext {tree}"
    MetadataCatalog.get(name).set(dirname=str(tree), split="all", year=year, thing_classes=list(truth.classes))
    evaluator = PascalVOCDetectionEvaluator(name)
    evaluator.reset()
    for image, each in zip(truth.images, found, strict=True):
        instances = Instances((SIZE, SIZE))
        instances.pred_boxes, instances.scores, instances.pred_classes = Boxes(each.boxes), each.scores, each.labels
        evaluator.process([{"image_id": image.image_id}], [{"instances": instances}])
    return float(evaluator.evaluate()["bbox"]["AP50"]) / 100


def written(truth: DetectionSet, tree: Path) -> Path:
    blank = torch.zeros(3, SIZE, SIZE, dtype=torch.uint8)
    return write_voc(tree, [Example(blank, image) for image in truth.images], truth.classes, "all")


@pytest.mark.detectron2
@pytest.mark.parametrize(("definition", "year"), [("voc_11_point", 2007), ("voc", 2012)])
@pytest.mark.parametrize("seed", range(3))
def test_voc_equals_detectron2_s_evaluation(seed: int, definition: Any, year: int, tmp_path: Path) -> None:
    found, truth = random_set(seed, images=60, most=40, flags=0.0)
    marked = [replace(each, difficult=torch.rand(len(each.labels)) < 0.2) for each in truth.images]
    truth = DetectionSet(CLASSES[:-1], marked)  # of a class without objects Detectron2 makes NaN
    found = as_detectron2_rounds(found, torch.Generator().manual_seed(seed))
    theirs = by_detectron2(truth, found, written(truth, tmp_path), year)
    assert average_precision(found, truth, definition).mean == pytest.approx(theirs, abs=1e-12)
    assert 0.05 < theirs < 0.95


@pytest.mark.detectron2
@pytest.mark.parametrize(("definition", "year"), [("voc_11_point", 2007), ("voc", 2012)])
def test_voc_s_boxes_outside_and_of_one_pixel_count_as_in_detectron2(
    definition: Any, year: int, tmp_path: Path
) -> None:
    # Boxes reach beyond all edges, one is wholly outside, and two have equal ends, one of them found.
    boxes = [[-4, 0, 20, 20], [70, 70, 130, 110], [120, 120, 150, 130], [5, 5, 6, 9], [30, 30, 31, 31]]
    truth = one_image(boxes)
    read = assert_warned(lambda: read_voc(written(truth, tmp_path), "all"), "1", "2")
    assert torch.equal(read.images[0].boxes, truth.images[0].boxes)
    found = [detections(truth.images[0].boxes[[0, 1, 3]] + 1, [0.9, 0.8, 0.7], [0, 0, 0])]
    theirs = by_detectron2(truth, found, tmp_path, year)
    assert 0.3 < theirs < 0.7
    assert average_precision(found, read, definition).mean == pytest.approx(theirs, abs=1e-12)


def as_detectron2_rounds(found: Sequence[Detections], rng: torch.Generator) -> list[Detections]:
    """Boxes of one decimal, and scores of three, which differ within a class; of the classes that have objects."""
    labels = torch.cat([each.labels for each in found])
    scores = torch.zeros(len(labels))
    for label in range(4):
        (rows,) = torch.where(labels == label)
        scores[rows] = torch.randperm(1000, generator=rng)[: len(rows)] / 1000
    rounded = []
    for each, own in zip(found, scores.split([len(each) for each in found]), strict=True):
        kept = each.labels < 4
        boxes = each.boxes + torch.randint(0, 2, each.boxes.shape, generator=rng) / 2
        rounded.append(Detections(boxes[kept], own[kept], each.labels[kept]))
    return rounded


A, B, FAR = [10, 10, 30, 30], [50, 50, 80, 80], [0, 80, 9, 99]


def one_image(boxes: Any, **flags: Any) -> DetectionSet:
    return DetectionSet(("thing",), [annotated(boxes, [0] * len(boxes), **flags)])


def value(definition: Any, boxes: Any, truth: DetectionSet, scores: Any = None) -> float:
    scores = [1 - i / 10 for i in range(len(boxes))] if scores is None else scores
    return average_precision([detections(boxes, scores, [0] * len(boxes))], truth, definition).mean


@pytest.mark.parametrize("definition", DEFINITIONS)
def test_closed_forms(definition: Any) -> None:
    truth = one_image([A, B])
    at_half = {"voc_11_point": 6 / 11, "voc": 0.5, "coco": 51 / 101}[definition]  # recalls up to a half
    assert value(definition, [A, B], truth) == pytest.approx(1)
    assert value(definition, [FAR, FAR], truth) == 0
    assert value(definition, [], truth) == 0
    assert value(definition, [A], truth) == pytest.approx(at_half)
    assert value(definition, [A, A, B], truth) == pytest.approx(at_half + (1 - at_half) * 2 / 3)  # a duplicate is false
    assert value(definition, [FAR, A, B], truth) == pytest.approx(2 / 3)


@pytest.mark.parametrize("definition", VOC)
@pytest.mark.parametrize("flag", ["difficult", "crowd"])
def test_difficult_objects_neither_count_nor_punish(definition: Any, flag: str) -> None:
    truth = one_image([A, B], **{flag: [False, True]})
    assert value(definition, [A], truth) == pytest.approx(1)
    assert value(definition, [B, B, A], truth) == pytest.approx(1)


def test_coco_knows_crowds_and_no_difficult_objects() -> None:
    assert value("coco", [A], one_image([A, B], difficult=[False, True])) == pytest.approx(51 / 101)
    region = one_image([A, [0, 0, 99, 99]], crowd=[False, True])
    assert value("coco", [B, FAR, A, A], region) == pytest.approx(1)


def test_an_overlap_of_just_a_half_hits_for_coco_alone() -> None:
    truth = one_image([[0, 0, 10, 10]])
    half = [[0, 0, 10, 5]]
    assert value("coco", half, truth) == pytest.approx(1)
    assert [value(definition, half, truth) for definition in VOC] == [0, 0]


def test_of_equal_overlaps_coco_takes_the_last_and_voc_the_first() -> None:
    first, last, between = [0, 0, 10, 10], [4, 0, 14, 10], [2, 0, 12, 10]
    assert value("coco", [between, first], one_image([first, last])) == pytest.approx(1)
    assert value("voc", [between, first], one_image([first, last])) == pytest.approx(0.5)


@pytest.mark.parametrize("definition", DEFINITIONS)
def test_equal_scores_stay_in_order(definition: Any) -> None:
    truth = one_image([A])
    assert value(definition, [A, FAR], truth, [0.5, 0.5]) == pytest.approx(1)
    assert value(definition, [FAR, A], truth, [0.5, 0.5]) == pytest.approx(0.5)


@pytest.mark.parametrize("definition", DEFINITIONS)
def test_an_image_counts_as_often_as_it_is_given(definition: Any) -> None:
    """Scores differ between images: of equal ones, those of an image that is given again follow at once."""
    found, truth = random_set(6, images=30)
    found = [replace(each, scores=torch.arange(len(each)) + i / 64) for i, each in enumerate(found)]
    chosen = [7, 7, 0, 12, 3, 7, 12, 29]
    again = average_precision([found[i] for i in chosen], truth.subset(chosen), definition)
    matches = match(found, truth, definition)
    assert matches.average_precision(chosen) == again
    present = match([found[i] for i in chosen], truth.subset(chosen), definition)
    assert matches.f1(chosen) == pytest.approx(present.f1(), abs=1e-12)


@pytest.mark.parametrize("definition", DEFINITIONS)
def test_no_object_at_all_is_refused(definition: Any) -> None:
    assert_refused(lambda: value(definition, [A], one_image([])), DataError, "1")
    assert_refused(lambda: match([detections([A], [0.5], [0])], one_image([]), definition).f1(), DataError, "1", "F1")


def test_coco_counts_a_hundred_detections_of_a_class_in_an_image() -> None:
    coco = pytest.importorskip("helpers.coco_reference")
    found, truth = random_set(9, images=4, most=600)
    counts = [int((each.labels == label).sum()) for each in found for label in range(5)]
    assert beyond_limit(found) == sum(max(0, count - 100) for count in counts) > 0
    assert beyond_limit([detections([], [], [])]) == 0
    evaluation = coco.evaluated(*coco.contents(found, truth.images, 5), maxDets=[1, 10, 100])
    expected = coco.average_precision(evaluation, "AP50")
    assert average_precision(found, truth, "coco").mean == pytest.approx(expected, abs=1e-12)


BOXES, LABELS, SCORES = torch.zeros(4, 4), torch.zeros(4).long(), torch.ones(4)


@pytest.mark.parametrize(
    ("bad", "names"),
    [
        (Detections(BOXES * math.nan, SCORES, LABELS), ("NaN", "1")),
        (Detections(BOXES, SCORES, LABELS + 7), ("labels", "7", "5", "0..4")),
        (Detections(torch.zeros(4, 5), SCORES, LABELS), ("4",)),  # rotated
        (Detections(BOXES[:3], SCORES, LABELS), ("4",)),
    ],
)
def test_detections_of_another_kind_are_refused(bad: Detections, names: tuple[str, ...]) -> None:
    found, truth = random_set(1)
    found[1] = bad
    for definition in DEFINITIONS:
        assert_refused(lambda definition=definition: match(found, truth, definition), MetricError, *names)
    assert_refused(lambda: match(found, truth, "ap"), DataError, "definition", "voc_11_point", "'ap'")


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"boxes": torch.full((2, 4), math.nan)}, ("1", "nan")),
        ({"boxes": torch.zeros(2, 5)}, ("1", "2")),
        ({"labels": torch.tensor([1, 2])}, ("objects", "1", "2", "0")),
    ],
)
def test_records_that_contradict_themselves_are_refused(change: Any, names: tuple[str, ...]) -> None:
    truth = DetectionSet(("x", "y"), [replace(annotated([A, B], [0, 1]), **change)])
    assert_refused(lambda: average_precision([detections([], [], [])], truth, "coco"), DataError, *names)


def test_a_detector_s_boxes_by_their_sides_or_normalised_are_refused() -> None:
    _, truth = random_set(1)
    edges = [image.boxes for image in truth.images]
    sides = [torch.cat([each[:, :2], each[:, 2:] - each[:, :2]], 1) for each in edges]

    def found(boxes: list[Tensor]) -> list[Detections]:
        pairs = zip(boxes, truth.images, strict=True)
        return [Detections(each, torch.ones(len(each)), image.labels[: len(each)]) for each, image in pairs]

    check_detected(found(edges), truth)
    check_detected(found([each[:0] for each in edges]), truth)
    check_detected(found([each + 1000 for each in edges]), truth)
    assert_refused(lambda: check_detected(found(sides), truth), MetricError, "left, top, width")
    assert_refused(lambda: check_detected(found([each / 1000 for each in edges]), truth), MetricError, "0", "1")
