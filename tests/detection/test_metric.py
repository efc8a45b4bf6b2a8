"""A detector's metric as a black box: what counts besides, constraints, functions of one's own, and data it lacks."""

import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("torchvision")

from helpers.boxes import blank_examples
from helpers.refusals import assert_named, assert_refused, assert_warned
from metricopt_ext.data.halves import random_halves
from metricopt_ext.detection.ap50 import average_precision
from metricopt_ext.detection.build import besides, build_metric, build_toolkit
from metricopt_ext.detection.config import DetectionConfig, MetricConfig
from metricopt_ext.detection.metric import (
    MeanAveragePrecision,
    OwnDetectionMetric,
    ap50_metric,
    detector_metric,
    truth_of,
)
from metricopt_ext.detection.records import Annotated, Detections, DetectionSet
from metricopt_ext.detection.toolkit import Example
from metricopt_ext.errors import ConfigError, DataError, MetricError

CLASSES = ("RBC", "Platelets", "rbc")


def annotated(number: int) -> Annotated:
    """One object of each of the first two classes, side by side."""
    boxes = torch.tensor([[0.0, 0.0, 10.0, 10.0], [20.0, 20.0, 30.0, 30.0]])
    nothing = torch.zeros(2, dtype=torch.bool)
    return Annotated(number, None, 40, 40, boxes, torch.tensor([0, 1]), nothing, nothing)  # type: ignore[arg-type]


TRUTH = DetectionSet(CLASSES, [annotated(number) for number in range(4)])
# All red cells, and every second platelet.
FOUND = [
    Detections(each.boxes[: 1 + number % 2], torch.tensor([0.9, 0.8])[: 1 + number % 2], each.labels[: 1 + number % 2])
    for number, each in enumerate(TRUTH.images)
]


def test_the_average_precision_of_a_class_is_its_share_of_the_mean() -> None:
    for definition in ("voc_11_point", "voc", "coco"):
        config = MetricConfig(definition=definition, also=["ap50[platelets]", "AP50[RBC]", "AP[Platelets]", "ap"])
        values = {name: each.judge(FOUND, TRUTH)(None) for name, each in besides(config, CLASSES).items()}
        each = average_precision(FOUND, TRUTH, definition).per_class
        assert values["ap50[platelets]"] == each["Platelets"]
        assert values["AP50[RBC]"] == each["RBC"] == 1
        assert 0.4 < each["Platelets"] < 0.6
        assert values["AP[Platelets]"] == pytest.approx(each["Platelets"]), "each hit is exact"
        assert values["ap"] == pytest.approx((1 + each["Platelets"]) / 2)


def test_names_that_there_are_not_are_refused() -> None:
    for name, names in (
        ("AP90", ("metric.also", "AP90", "F1", "AP", "AP75", "segm/AP50", "AP50")),
        ("AP50[WBC]", ("metric.also", "WBC")),
        ("AP50[Rbc]", ("metric.also", "Rbc")),
    ):
        with pytest.raises(ConfigError) as caught:
            besides(MetricConfig(also=[name]), CLASSES)
        assert_named(caught, *names)
    assert besides(MetricConfig(also=["AP50[Rbc]"]))["AP50[Rbc]"], "classes are not known yet"
    none = besides(MetricConfig(subject_to={"AP50[rbc]": ">= 0"}), CLASSES)["AP50[rbc]"]
    assert_refused(lambda: none.try_on(TRUTH), ConfigError, "rbc", "AP50")
    assert_refused(lambda: none.judge(FOUND, TRUTH)(None), DataError, "rbc")


def test_masks_are_by_coco_s_definition() -> None:
    config = MetricConfig("segm/AP", "coco", also=["AP50", "SEGM/AP75[rbc]"])
    assert build_metric(config) == MeanAveragePrecision("segm/AP", "coco")
    assert [(each.name, each.kind) for each in besides(config, CLASSES).values()] == [  # type: ignore[attr-defined]
        ("AP50", "bbox"),
        ("segm/AP75", "segm"),
    ]
    assert DetectionConfig(metric=config).kind == "segm"
    assert DetectionConfig(metric=MetricConfig("AP50", also=["segm/AP"])).kind == "segm"
    assert_refused(lambda: build_metric(MetricConfig("segm/AP", "voc")), ConfigError, "metric.name=segm/AP")
    detr = DetectionConfig(toolkit="transformers", metric=config)
    assert_refused(lambda: build_toolkit(detr), ConfigError, "segm", "toolkit=torchvision")


def test_what_is_constrained_is_told_by_the_same_detections() -> None:
    calls = []

    class Toolkit:
        def detect(self, model: nn.Module, batch: Any) -> list[Detections]:
            calls.append(len(batch))
            return [FOUND[int(example.truth.image_id)] for example in batch]

    examples = [Example(torch.zeros(3, 40, 40, dtype=torch.uint8), each) for each in TRUTH.images]
    assert truth_of(examples, CLASSES).classes == CLASSES
    subject_to = {"ap50[platelets]": ">= start"}
    also = besides(MetricConfig(definition="voc", also=["AP"], subject_to=subject_to), CLASSES)
    mean = MeanAveragePrecision("AP50", "voc")
    metric = detector_metric(mean, Toolkit(), examples, CLASSES, also=also, subject_to=subject_to)  # type: ignore[arg-type]
    evaluation = metric.evaluate(nn.Identity(), "x")
    per_class = average_precision(FOUND, TRUTH, "voc").per_class
    assert calls == [1] * 4
    assert evaluation.also == {"ap50[platelets]": per_class["Platelets"]}
    assert evaluation.value == pytest.approx((1 + per_class["Platelets"]) / 2)
    assert evaluation.halves is not None
    assert metric.look(nn.Identity()) == {"AP": pytest.approx((1 + per_class["Platelets"]) / 2)}
    test = detector_metric(mean, Toolkit(), examples, CLASSES, (), also=also)  # type: ignore[arg-type]
    assert set(test.look(nn.Identity())) == {"AP", "ap50[platelets]"}


PETS = ("cat", "dog")


class Finding:
    """A toolkit whose detector finds every object, some with an error too large, at random scores."""

    def detect(self, model: nn.Module, batch: Sequence[Example]) -> list[Detections]:
        found = []
        for example in batch:
            rng = torch.Generator().manual_seed(int(example.image[0, 0, 0]))
            error = torch.randint(-4, 5, (2, 4), generator=rng)
            scores = torch.rand(2, generator=rng)
            found.append(Detections(example.truth.boxes + error, scores, example.truth.labels))
        return found


@pytest.mark.parametrize(("definition", "told"), [("voc", False), ("coco", True)])
def test_a_half_whose_objects_are_all_difficult_is_told_only_where_they_count(definition: Any, told: bool) -> None:
    images = blank_examples(4)
    for example in images[2:]:
        example.truth.difficult[:] = True
    metric = ap50_metric(Finding(), images, PETS, definition, list(torch.arange(4).view(2, 2)))
    if told:
        assert metric.evaluate(nn.Identity(), "test").halves is not None
    else:
        with pytest.warns(UserWarning, match=r"one.*images has no object that counts"):
            assert metric.evaluate(nn.Identity(), "test").halves is None


def counted(truth: list[dict[str, Any]], found: list[dict[str, Any]]) -> float:
    """The share of images in which as many detections have a score above 0.5 as there are objects."""
    right = [(seen["scores"] > 0.5).sum() == len(known["labels"]) for known, seen in zip(truth, found, strict=True)]
    return sum(right) / len(right)


def test_a_function_of_one_s_own_judges_all_images_and_each_half() -> None:
    images, toolkit, halves = blank_examples(19), Finding(), [half.tolist() for half in random_halves(19, 0)]
    given: list[tuple[Any, Any]] = []

    def function(truth: list[dict[str, Any]], found: list[dict[str, Any]]) -> float:
        given.append((truth, found))
        return counted(truth, found)

    own = OwnDetectionMetric(function, "counted", bounds=(0.0, 2.0))
    metric = detector_metric(own, toolkit, images, PETS)
    answer = metric.evaluate(nn.Identity(), "test")
    detections = toolkit.detect(nn.Identity(), images)
    right = [int((each.scores > 0.5).sum()) == 2 for each in detections]
    values = [sum(right[i] for i in rows) / len(rows) for rows in (range(19), *halves)]
    assert 0 < values[0] < 1
    assert [metric.sign * cost for cost in (answer.cost, *answer.halves)] == pytest.approx(values)
    (truth, found), half = given[0], given[1]
    assert [len(each) for each in (truth, found, *half)] == [19, 19, 10, 10]
    assert set(truth[0]) == {"boxes", "labels", "difficult", "crowd"}
    assert set(found[0]) == {"boxes", "labels", "scores"}
    for i, example in enumerate(images):
        assert truth[i]["boxes"].tolist() == example.truth.boxes.tolist()
        assert found[i]["boxes"].tolist() == detections[i].boxes.tolist()
        assert found[i]["scores"].tolist() == detections[i].scores.tolist()
        assert truth[i]["labels"].tolist() == found[i]["labels"].tolist() == [0, 1]


def test_a_function_of_one_s_own_may_work_in_place_and_is_given_bfloat16_as_float32() -> None:
    class Half(Finding):
        def detect(self, model: nn.Module, batch: Any) -> list[Detections]:
            found = super().detect(model, batch)
            return [Detections(each.boxes.bfloat16(), each.scores.bfloat16(), each.labels) for each in found]

    def function(truth: list[dict[str, Any]], found: list[dict[str, Any]]) -> float:
        value = float(sum(known["boxes"].sum() for known in truth) + sum(seen["scores"].sum() for seen in found))
        for each in (*truth, *found):
            for array in each.values():
                array[:] = 0
        return value

    images = blank_examples(6)
    own = OwnDetectionMetric(function, "own", bounds=(0.0, 1e6))
    own.try_on(truth_of(images, PETS))
    metric = detector_metric(own, Half(), images, PETS, list(torch.arange(6).view(2, 3)))
    first, second = (metric.evaluate(nn.Identity(), "test") for _ in range(2))
    assert first == second
    whole, *halves = (metric.sign * cost for cost in (first.cost, *first.halves))
    assert whole == pytest.approx(sum(halves))
    scores = sum(float(each.scores.float().sum()) for each in Half().detect(nn.Identity(), images))
    assert whole == pytest.approx(sum(float(each.truth.boxes.sum()) for each in images) + scores, abs=1e-3)


def test_a_function_of_one_s_own_is_tried_and_its_values_are_checked() -> None:
    truth = truth_of(blank_examples(3), PETS)
    OwnDetectionMetric(counted, "counted").try_on(truth)
    for function, names in (
        (lambda truth, found: 2.0, ("bounds", "(0, 1)", "2", "metric.kwargs")),
        (lambda truth, found: found[0]["masks"], ("masks",)),
        (lambda truth: 1.0, ("1", "2")),
    ):
        with pytest.raises(ConfigError) as caught:
            OwnDetectionMetric(function, "own").try_on(truth)
        assert_named(caught, "own", "3", *names)
    metric = detector_metric(OwnDetectionMetric(lambda *given: -1, "own"), Finding(), blank_examples(3), PETS)
    assert_refused(lambda: metric.evaluate(nn.Identity(), "test"), MetricError, "own", "(0, 1)", "-1")


def test_detections_beyond_coco_s_limit_are_counted_once() -> None:
    class Crowding(Finding):
        def detect(self, model: nn.Module, batch: Any) -> list[Detections]:
            found = super().detect(model, batch)
            return [Detections(*(torch.cat([each] * 60) for each in (f.boxes, f.scores, f.labels * 0))) for f in found]

    images = blank_examples(3)
    metric = ap50_metric(Crowding(), images, PETS, "coco")
    assert_warned(lambda: metric.evaluate(nn.Identity(), "test"), "60", "100")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        metric.evaluate(nn.Identity(), "test")
        ap50_metric(Crowding(), images, PETS, "voc").evaluate(nn.Identity(), "test")
