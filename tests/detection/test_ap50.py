"""AP50 against pycocotools, Detectron2's evaluation of VOC, a naive loop, and cases known in closed form."""

import contextlib
import io
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("PIL")

from helpers.boxes import naive_iou
from helpers.refusals import assert_refused, assert_warned
from metricopt_ext.detection.ap50 import (
    METRICS,
    average_precision,
    beyond_limit,
    match,
    match_for,
    mean_over_ious,
)
from metricopt_ext.detection.box_kinds import check_detected
from metricopt_ext.detection.matching import DEFINITIONS
from metricopt_ext.detection.records import Annotated, Detections, DetectionSet
from metricopt_ext.detection.toolkit import Example
from metricopt_ext.detection.voc import read_voc, write_voc
from metricopt_ext.errors import DataError, MetricError

SIZE = 100
VOC = ("voc_11_point", "voc")


def annotated(
    name: str | int, boxes: Any, labels: Any, difficult: Any = None, crowd: Any = None, size: int = SIZE
) -> Annotated:
    labels = torch.as_tensor(labels, dtype=torch.int64)
    none = torch.zeros(len(labels), dtype=torch.bool)
    return Annotated(
        image_id=name,
        path=Path(f"{name}.png"),
        width=size,
        height=size,
        boxes=torch.as_tensor(boxes, dtype=torch.float32).reshape(-1, 4),
        labels=labels,
        difficult=none if difficult is None else torch.as_tensor(difficult),
        crowd=none if crowd is None else torch.as_tensor(crowd),
    )


def detections(boxes: Any, scores: Any, labels: Any) -> Detections:
    return Detections(
        torch.as_tensor(boxes, dtype=torch.float32).reshape(-1, 4),
        torch.as_tensor(scores, dtype=torch.float32),
        torch.as_tensor(labels, dtype=torch.int64),
    )


def random_set(
    seed: int, *, images: int = 30, classes: int = 5, per_image: int = 40, crowds: float = 0.0, difficult: float = 0.0
) -> tuple[list[Detections], DetectionSet]:
    """Detections near and far from the ground truth, with ties in scores and IoUs, images without either.

    The last class has no objects, the one before no detections.
    """
    rng = np.random.default_rng(seed)
    truth, found = [], []
    for i in range(images):
        n = int(rng.integers(0, 7)) * (i % 7 != 3)
        corner = rng.integers(0, 60, (n, 2))
        boxes = np.concatenate([corner, corner + rng.integers(4, 40, (n, 2))], 1)
        labels = rng.integers(0, classes - 1, n)
        if n > 1:
            boxes[1], labels[1] = boxes[0], labels[0]  # two objects that no overlap tells apart
        truth.append(annotated(i + 1, boxes, labels, rng.random(n) < difficult, rng.random(n) < crowds))

        m = int(rng.integers(1, per_image)) * (i % 5 != 2)
        corner = rng.integers(0, 60, (m, 2))
        guesses = np.concatenate([corner, corner + rng.integers(4, 40, (m, 2))], 1).astype(float)
        guessed = rng.integers(0, classes, m)
        if n:
            near = rng.integers(0, n, m)
            good = rng.random(m) < 0.6
            moved = boxes[near] + rng.integers(-6, 7, (m, 4)) * rng.choice([0, 0.25, 1], (m, 1))
            guesses[good], guessed[good] = moved[good], labels[near][good]
            guesses[:, 2:] = np.maximum(guesses[:, 2:], guesses[:, :2] + 1)
        guessed[guessed == classes - 2] = 0
        guesses[:, 2] -= 80 * (rng.random(m) < 0.05)  # of negative width
        found.append(detections(guesses, rng.integers(0, 25, m) / 24, guessed))
    return found, DetectionSet(tuple(f"class {i}" for i in range(classes)), truth)


def by_pycocotools(
    found: Sequence[Detections], truth: DetectionSet, metric: str = "AP50"
) -> tuple[float, dict[str, float]]:
    coco_module = pytest.importorskip("pycocotools.coco")
    cocoeval = pytest.importorskip("pycocotools.cocoeval")

    def xywh(box: list[float]) -> list[float]:
        return [box[0], box[1], box[2] - box[0], box[3] - box[1]]

    annotations = [
        {"image_id": image.image_id, "category_id": label, "bbox": xywh(box), "iscrowd": int(crowd)}
        for image in truth.images
        for box, label, crowd in zip(image.boxes.tolist(), image.labels.tolist(), image.crowd.tolist(), strict=True)
    ]
    results = [
        {"image_id": image.image_id, "category_id": label, "bbox": xywh(box), "score": score}
        for image, each in zip(truth.images, found, strict=True)
        for box, score, label in zip(each.boxes.tolist(), each.scores.tolist(), each.labels.tolist(), strict=True)
    ]
    with contextlib.redirect_stdout(io.StringIO()):
        coco = coco_module.COCO()
        coco.dataset = {
            "images": [{"id": image.image_id, "width": SIZE, "height": SIZE} for image in truth.images],
            "annotations": [
                {"id": i + 1, "area": each["bbox"][2] * each["bbox"][3], **each} for i, each in enumerate(annotations)
            ],
            "categories": [{"id": i, "name": name} for i, name in enumerate(truth.classes)],
        }
        coco.createIndex()
        evaluation = cocoeval.COCOeval(coco, coco.loadRes(results), "bbox")
        evaluation.params.maxDets = [1, 10, 100]
        if metric != "AP":
            evaluation.params.iouThrs = np.array(METRICS[metric])
        evaluation.evaluate()
        evaluation.accumulate()
    # (IoU and recall) x class, any area, 100 detections
    precision = evaluation.eval["precision"][..., 0, -1].reshape(-1, len(truth.classes))
    known = precision[:, (precision > -1).all(0)]
    per_class = {
        name: float(column.mean()) for name, column in zip(truth.classes, precision.T, strict=True) if column[0] > -1
    }
    return float(known.mean()), per_class


@pytest.mark.parametrize("seed", range(6))
def test_coco_equals_pycocotools(seed: int) -> None:
    found, truth = random_set(seed, crowds=0.2, difficult=0.2)
    ours = average_precision(found, truth, "coco")
    mean, per_class = by_pycocotools(found, truth)
    assert ours.per_class == pytest.approx(per_class, abs=1e-12)
    assert ours.mean == pytest.approx(mean, abs=1e-12)
    assert 0.05 < mean < 0.95


@pytest.mark.parametrize("seed", range(3))
def test_ap_equals_pycocotools_also_on_some_of_the_images(seed: int) -> None:
    found, truth = random_set(seed, crowds=0.2, difficult=0.2)
    matches = match_for("AP", found, truth, "coco")
    assert len(matches) == 10
    mean, _ = by_pycocotools(found, truth, "AP")
    assert mean_over_ious(matches) == pytest.approx(mean, abs=1e-12)
    half = list(range(0, len(truth), 2))
    mean, _ = by_pycocotools([found[i] for i in half], truth.subset(half), "AP")
    assert mean_over_ious(matches, half) == pytest.approx(mean, abs=1e-12)
    assert mean < mean_over_ious(match_for("AP50", found, truth, "coco"), half)
    strict, _ = by_pycocotools(found, truth, "AP75")
    assert mean_over_ious(match_for("AP75", found, truth, "coco")) == pytest.approx(strict, abs=1e-12)


@pytest.mark.parametrize("definition", DEFINITIONS)
def test_ap_is_the_share_of_ious_at_which_a_box_still_hits(definition: Any) -> None:
    """A box that overlaps its object by 72 % hits at 0.5, ..., 0.7: at 5 of 10 IoUs."""
    truth = DetectionSet(("a",), [annotated(1, [[0, 0, 100, 100]], [0])])
    found = [detections([[0, 0, 100, 72]], [0.9], [0])]
    assert mean_over_ious(match_for("AP", found, truth, definition)) == pytest.approx(0.5)
    assert METRICS["AP50"] == (0.5,)


def test_coco_counts_a_hundred_detections_of_a_class_in_an_image() -> None:
    found, truth = random_set(9, images=4, classes=3, per_image=400)
    assert max(int((each.labels == 0).sum()) for each in found) > 150
    _, per_class = by_pycocotools(found, truth)
    assert average_precision(found, truth, "coco").per_class == pytest.approx(per_class, abs=1e-12)


def naive_voc(found: Sequence[Detections], truth: DetectionSet, label: int, eleven: bool) -> float:
    """VOC's evaluation of one class as its development kit describes it, one detection after the other."""
    objects = []
    for i, image in enumerate(truth.images):
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


def naive_f1(found: Sequence[Detections], truth: DetectionSet, label: int) -> float:
    """F1 of one class, one object after the other; no object is difficult."""
    true = total = objects = 0
    for image, each in zip(truth.images, found, strict=True):
        own = image.boxes[image.labels == label].tolist()
        guesses = each.boxes[each.labels == label].tolist()
        nearest = [max(range(len(own)), key=lambda k: naive_iou(box, own[k])) for box in guesses] if own else []
        hit = {k for box, k in zip(guesses, nearest, strict=False) if naive_iou(box, own[k]) > 0.5}
        true, total, objects = true + len(hit), total + len(guesses), objects + len(own)
    precision, recall = true / max(total, 1), true / objects
    return 2 * precision * recall / (precision + recall) if true else 0.0


@pytest.mark.parametrize("definition", VOC)
@pytest.mark.parametrize("seed", range(4))
def test_voc_equals_a_naive_loop(seed: int, definition: Any) -> None:
    found, truth = random_set(seed, crowds=0.1, difficult=0.2)
    ours = average_precision(found, truth, definition)
    assert list(ours.per_class) == list(truth.classes[:-1])
    expected = [naive_voc(found, truth, label, definition == "voc_11_point") for label in range(4)]
    assert list(ours.per_class.values()) == pytest.approx(expected, abs=1e-12)
    assert ours.mean == pytest.approx(np.mean(expected), abs=1e-12)
    assert expected[-1] == 0  # objects, no detections


@pytest.mark.parametrize("seed", range(4))
def test_f1_equals_a_naive_loop(seed: int) -> None:
    found, truth = random_set(seed)
    expected = [naive_f1(found, truth, label) for label in range(4)]
    assert 0 < min(expected[:3]) < max(expected) < 1
    assert match(found, truth, "voc").f1() == pytest.approx(np.mean(expected), abs=1e-12)
    chosen = [7, 7, 0, 12, 3, 7, 12, 29]
    present = sorted({label for i in chosen for label in truth.images[i].labels.tolist()})
    again = [naive_f1([found[i] for i in chosen], truth.subset(chosen), label) for label in present]
    assert match(found, truth, "voc").f1(chosen) == pytest.approx(np.mean(again), abs=1e-12)


@pytest.mark.detectron2
@pytest.mark.parametrize(("definition", "year"), [("voc_11_point", 2007), ("voc", 2012)])
@pytest.mark.parametrize("seed", range(3))
def test_voc_equals_detectron2_s_evaluation(seed: int, definition: Any, year: int, tmp_path: Path) -> None:
    pytest.importorskip("detectron2")
    from detectron2.data import MetadataCatalog
    from detectron2.evaluation import PascalVOCDetectionEvaluator
    from detectron2.structures import Boxes, Instances

    found, truth = random_set(seed, images=60, difficult=0.2)
    truth = DetectionSet(truth.classes[:-1], truth.images)  # of a class without objects Detectron2 makes NaN
    rng = torch.Generator().manual_seed(seed)
    found = as_detectron2_rounds(found, rng)
    blank = torch.zeros(3, SIZE, SIZE, dtype=torch.uint8)
    write_voc(tmp_path, [Example(blank, image) for image in truth.images], truth.classes, "all")
    name = f"metricopt_ext {tmp_path}"
    MetadataCatalog.get(name).set(dirname=str(tmp_path), split="all", year=year, thing_classes=list(truth.classes))
    evaluator = PascalVOCDetectionEvaluator(name)
    evaluator.reset()
    for image, each in zip(truth.images, found, strict=True):
        instances = Instances((SIZE, SIZE))
        instances.pred_boxes, instances.scores, instances.pred_classes = Boxes(each.boxes), each.scores, each.labels
        evaluator.process([{"image_id": image.image_id}], [{"instances": instances}])
    theirs = evaluator.evaluate()["bbox"]["AP50"] / 100
    assert average_precision(found, truth, definition).mean == pytest.approx(theirs, abs=1e-12)
    assert 0.05 < theirs < 0.95


@pytest.mark.detectron2
@pytest.mark.parametrize(("definition", "year"), [("voc_11_point", 2007), ("voc", 2012)])
def test_voc_s_boxes_outside_and_of_one_pixel_count_as_in_detectron2(
    definition: Any, year: int, tmp_path: Path
) -> None:
    pytest.importorskip("detectron2")
    from detectron2.data import MetadataCatalog
    from detectron2.evaluation import PascalVOCDetectionEvaluator
    from detectron2.structures import Boxes, Instances

    # Boxes reach beyond all edges, one is wholly outside, and two have equal ends, one of them found.
    boxes = [[-4, 0, 20, 20], [70, 70, 130, 110], [120, 120, 150, 130], [5, 5, 6, 9], [30, 30, 31, 31]]
    places = torch.tensor(boxes, dtype=torch.float32)
    no = torch.zeros(5, dtype=torch.bool)
    truth = Annotated("a", Path("none"), SIZE, SIZE, places, torch.zeros(5, dtype=torch.int64), no, no)
    write_voc(tmp_path, [Example(torch.zeros(3, SIZE, SIZE, dtype=torch.uint8), truth)], ("thing",), "all")
    read = assert_warned(lambda: read_voc(tmp_path, "all"), "1", "2")
    assert torch.equal(read.images[0].boxes, places)
    found = Detections(places[[0, 1, 3]] + 1, torch.tensor([0.9, 0.8, 0.7]), torch.zeros(3, dtype=torch.int64))
    name = f"metricopt_ext outside {tmp_path}"
    MetadataCatalog.get(name).set(dirname=str(tmp_path), split="all", year=year, thing_classes=["thing"])
    evaluator = PascalVOCDetectionEvaluator(name)
    evaluator.reset()
    instances = Instances((SIZE, SIZE))
    instances.pred_boxes, instances.scores, instances.pred_classes = Boxes(found.boxes), found.scores, found.labels
    evaluator.process([{"image_id": "a"}], [{"instances": instances}])
    theirs = evaluator.evaluate()["bbox"]["AP50"] / 100
    assert 0.3 < theirs < 0.7
    assert average_precision([found], read, definition).mean == pytest.approx(theirs, abs=1e-12)


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
ONE_CLASS = ("thing",)


def one_image(boxes: Any, **flags: Any) -> DetectionSet:
    return DetectionSet(ONE_CLASS, [annotated(1, boxes, [0] * len(boxes), **flags)])


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


@pytest.mark.parametrize("definition", DEFINITIONS)
def test_equal_scores_stay_in_order(definition: Any) -> None:
    truth = one_image([A])
    assert value(definition, [A, FAR], truth, [0.5, 0.5]) == pytest.approx(1)
    assert value(definition, [FAR, A], truth, [0.5, 0.5]) == pytest.approx(0.5)


@pytest.mark.parametrize("definition", DEFINITIONS)
def test_scores_are_not_rounded(definition: Any) -> None:
    truth = one_image([A])
    assert value(definition, [FAR, A], truth, [0.50001, 0.50002]) == pytest.approx(1)


@pytest.mark.parametrize("definition", DEFINITIONS)
def test_a_subset_is_as_if_matched_alone(definition: Any) -> None:
    found, truth = random_set(5, crowds=0.1, difficult=0.1)
    matches = match(found, truth, definition)
    for chosen in ([0, 4, 5, 9, 20], list(range(1, 30, 2))):
        alone = average_precision([found[i] for i in chosen], truth.subset(chosen), definition)
        assert matches.average_precision(chosen) == alone
    assert matches.average_precision() == matches.average_precision(range(30))


@pytest.mark.parametrize("definition", DEFINITIONS)
def test_an_image_counts_as_often_as_it_is_given(definition: Any) -> None:
    """Scores differ between images: of equal ones, those of an image that is given again follow at once."""
    found, truth = random_set(6, crowds=0.1, difficult=0.1)
    found = [replace(each, scores=torch.arange(len(each)) + i / 64) for i, each in enumerate(found)]
    chosen = [7, 7, 0, 12, 3, 7, 12, 29]
    again = average_precision([found[i] for i in chosen], truth.subset(chosen), definition)
    assert match(found, truth, definition).average_precision(chosen) == again


@pytest.mark.parametrize("definition", DEFINITIONS)
def test_no_object_at_all_is_refused(definition: Any) -> None:
    assert_refused(lambda: value(definition, [A], one_image([])), DataError, "1")
    assert_refused(lambda: match([detections([A], [0.5], [0])], one_image([]), definition).f1(), DataError, "1", "F1")
    assert_refused(lambda: average_precision([], DetectionSet(ONE_CLASS, []), definition), DataError, "0")


@pytest.mark.parametrize(
    ("damage", "names"),
    [
        (lambda found: found.boxes[3].fill_(torch.nan), ("NaN", "1")),
        (lambda found: found.scores[2:].fill_(torch.inf), ("1",)),
        (lambda found: found.labels.fill_(7), ("labels", "7", "5", "0..4")),
    ],
)
def test_impossible_detections_are_refused(damage: Callable[[Detections], Tensor], names: tuple[str, ...]) -> None:
    found, truth = random_set(1)
    damage(found[1])
    assert_refused(lambda: match(found, truth, "coco"), MetricError, *names)


def test_impossible_arguments_are_named() -> None:
    found, truth = random_set(1)
    assert_refused(lambda: match(found[1:], truth, "voc"), DataError, "29", "30")
    assert_refused(lambda: match(found, truth, "ap"), DataError, "definition", "voc_11_point", "'ap'")


@pytest.mark.parametrize(
    ("boxes", "labels", "scores"),
    [
        (torch.zeros(4, 5), torch.zeros(4), torch.ones(4)),  # rotated
        (torch.zeros(2, 8), torch.zeros(4), torch.ones(4)),  # as many numbers as four boxes have
        (torch.zeros(4, 4), torch.zeros(4, 1), torch.ones(4)),
        (torch.zeros(4, 4), torch.zeros(4), torch.ones(4, 1)),
        (torch.zeros(3, 4), torch.zeros(4), torch.ones(4)),
        (torch.zeros(0, 4), torch.zeros(4), torch.ones(0)),
    ],
)
@pytest.mark.parametrize("definition", DEFINITIONS)
def test_boxes_of_another_kind_are_refused(definition: Any, boxes: Tensor, labels: Tensor, scores: Tensor) -> None:
    found, truth = random_set(1)
    found[2] = Detections(boxes, scores, labels.long())
    assert_refused(lambda: match(found, truth, definition), MetricError, "4")


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("definition", DEFINITIONS)
def test_half_precision_is_judged_as_the_numbers_that_it_holds(definition: Any, dtype: torch.dtype) -> None:
    found, truth = random_set(2)
    half = [Detections(each.boxes.to(dtype), each.scores.to(dtype), each.labels) for each in found]
    exact = [Detections(each.boxes.double(), each.scores.double(), each.labels) for each in half]
    assert average_precision(half, truth, definition) == average_precision(exact, truth, definition)
    mixed = [*half[:9], *found[9:]]
    exact = [Detections(each.boxes.double(), each.scores.double(), each.labels) for each in mixed]
    assert average_precision(mixed, truth, definition) == average_precision(exact, truth, definition)


def test_the_limit_of_detections_is_pycocotools_s() -> None:
    found, truth = random_set(9, images=4, classes=3, per_image=600)
    _, per_class = by_pycocotools(found, truth)
    assert average_precision(found, truth, "coco").per_class == pytest.approx(per_class, abs=1e-12)
    counts = [int((each.labels == label).sum()) for each in found for label in range(3)]
    assert beyond_limit(found) == sum(max(0, count - 100) for count in counts) > 0
    assert beyond_limit([detections([], [], [])]) == 0
