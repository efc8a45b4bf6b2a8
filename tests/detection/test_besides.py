"""What counts besides a detector's metric: AP50 of one class, against the definition, and what is refused by name."""

from typing import Any

import pytest
import torch
from torch import nn

from helpers.refusals import assert_named, assert_refused

pytest.importorskip("torchvision")

from metricopt_ext.detection.ap50 import average_precision, match_for
from metricopt_ext.detection.build import besides, build_metric, build_toolkit
from metricopt_ext.detection.config import DetectionConfig, MetricConfig
from metricopt_ext.detection.metric import MeanAveragePrecision, detector_metric, truth_of
from metricopt_ext.detection.records import Annotated, Detections, DetectionSet
from metricopt_ext.detection.toolkit import Example
from metricopt_ext.errors import ConfigError, DataError

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
        assert len(match_for("AP", FOUND, TRUTH, definition)) == 10


def test_names_that_there_are_not_are_refused() -> None:
    for name, names in (
        (
            "AP90",
            ("metric.also", "AP90", "F1", "AP", "AP75", "segm/AP50", "AP50"),
        ),
        ("AP90[RBC]", ("metric.also", "AP90[RBC]")),
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
    assert_refused(lambda: build_metric(MetricConfig("keypoints/AP", "coco")), ConfigError, "keypoints/AP", "segm/AP")
    assert_refused(lambda: build_metric(MetricConfig("segm/AP", "voc")), ConfigError, "metric.name=segm/AP")
    for toolkit, name in (("transformers", "toolkit"), ("detectron2", "tools/train_detector")):
        with pytest.raises(ConfigError) as caught:
            build_toolkit(DetectionConfig(toolkit=toolkit, metric=config))
        assert_named(caught, "segm", "toolkit=torchvision", name)


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
    assert calls == [4]
    assert evaluation.also == {"ap50[platelets]": per_class["Platelets"]}
    assert evaluation.cost == pytest.approx(1 - (1 + per_class["Platelets"]) / 2)
    assert evaluation.halves is not None
    assert metric.look(nn.Identity()) == {"AP": pytest.approx((1 + per_class["Platelets"]) / 2)}
    test = detector_metric(mean, Toolkit(), examples, CLASSES, (), also=also)  # type: ignore[arg-type]
    assert set(test.look(nn.Identity())) == {"AP", "ap50[platelets]"}
