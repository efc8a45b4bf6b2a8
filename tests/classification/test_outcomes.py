"""Metrics that are the worst of their values in groups of rows: of classes, and by the values of a column."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from helpers.refusals import assert_refused, assert_warned
from metricopt_ext.classification.besides import besides
from metricopt_ext.classification.config import MetricConfig
from metricopt_ext.classification.metrics import METRICS
from metricopt_ext.classification.named_metric import build_metric
from metricopt_ext.classification.split_metric import model_metric
from metricopt_ext.data.halves import stratified_halves
from metricopt_ext.data.labelled import Split
from metricopt_ext.errors import ConfigError

CLASSES = ("ant", "bee", "cow", "doe")
MODEL = nn.Identity()  # whose outputs are the inputs


def rows(count: int = 200, classes: int = 4, seed: int = 0) -> Split:
    """Outputs with ties, and labels of all classes but the last."""
    rng = torch.Generator().manual_seed(seed)
    outputs = torch.randint(3, (count, classes), generator=rng).float()
    return Split(outputs, torch.randint(classes - 1, (count,), generator=rng))


def recalls(part: Split, these: Tensor | None = None) -> dict[str, float]:
    """Return each class's recall, of the classes that have examples."""
    these = torch.arange(len(part)) if these is None else these
    right, labels = (part.x.argmax(1) == part.y).numpy()[these], part.y.numpy()[these]
    return {CLASSES[each]: right[labels == each].sum() / (labels == each).sum() for each in np.unique(labels)}


def test_worst_recall_is_made_of_the_classes_recalls() -> None:
    part = rows()
    halves = stratified_halves(part.y, seed=1)
    metric = model_metric(build_metric(MetricConfig("worst_recall"), classes=CLASSES), part, halves)
    told = metric.evaluate(MODEL, "test")
    expected, on_halves = recalls(part), [recalls(part, half) for half in halves]  # type: ignore[arg-type]
    assert list(told.outcomes) == [*CLASSES[:3]]
    for name, outcome in told.outcomes.items():
        assert outcome.value == expected[name]
        assert outcome.pairs == (tuple(half[name] for half in on_halves),)
    assert told.value == min(expected.values()) == METRICS["worst_recall"].function(part.x, part.y)
    assert told.pairs == (tuple(min(half.values()) for half in on_halves),)
    assert metric.outcome_sign("ant") == -1


def test_a_half_without_a_class_leaves_no_halves() -> None:
    part, spec = rows(), build_metric(MetricConfig("worst_recall"), classes=CLASSES)
    first, second = ((part.y > 0) & (torch.arange(200) % 2 == side) for side in (0, 1))
    unlucky = first.nonzero().flatten(), (second | (part.y == 0)).nonzero().flatten()
    told = assert_warned(lambda: model_metric(spec, part, unlucky).evaluate(MODEL, "test"), "ant")
    assert told.halves is None
    single = Split(torch.eye(4)[[0, 0, 1]], torch.tensor([0, 0, 1]))
    why = stratified_halves(single.y, seed=0)
    assert isinstance(why, str)
    told = assert_warned(lambda: model_metric(spec, single, why).evaluate(MODEL, "test"), why)
    assert (told.halves, told.value) == (None, 1)


def test_what_is_bounded_is_told_beside_the_outcomes() -> None:
    part = rows()
    config = MetricConfig("worst_recall", also=["mcr"], subject_to={"precision[ant]": ">= 0", "accuracy": ">= start"})
    spec, also = build_metric(config, classes=CLASSES), besides(config, "classes", CLASSES)
    metric = model_metric(spec, part, stratified_halves(part.y, 0), also=also, subject_to=config.subject_to)
    told = metric.evaluate(MODEL, "test")
    assert list(told.outcomes) == [*CLASSES[:3], "precision[ant]", "accuracy"]
    assert told.also["accuracy"] == pytest.approx(float((part.x.argmax(1) == part.y).double().mean()))
    assert told.value == min(recalls(part).values())
    assert told.halves is not None
    assert metric.look(MODEL) == {"mcr": pytest.approx(1 - told.also["accuracy"])}
    doubled = build_metric(config, classes=("accuracy", *CLASSES[1:]))
    assert_refused(
        lambda: model_metric(doubled, part, also=also, subject_to=config.subject_to),
        ConfigError,
        "accuracy",
        "metric.subject_to",
    )
