"""A metric on a part of the data and on halves of it."""

import torch
from torch import nn

from metricopt_ext.classification.config import OwnClassifierMetricConfig
from metricopt_ext.classification.metrics import METRICS, expected_cost
from metricopt_ext.classification.named_metric import build_metric
from metricopt_ext.classification.split_metric import batch_metric, model_metric
from metricopt_ext.data.halves import stratified_halves
from metricopt_ext.data.labelled import Split
from metricopt_ext.tasks.evaluation import Evaluation


def test_metrics_tell_their_values_on_halves() -> None:
    y = torch.tensor([0] * 7 + [1] * 4 + [2] * 2)[torch.randperm(13, generator=torch.Generator().manual_seed(0))]
    a, b = stratified_halves(y, seed=3)
    part = Split(torch.randn(13, 5), y)
    model = nn.Linear(5, 3)
    told = model_metric(METRICS["accuracy"], part, (a, b)).evaluate(model, "test")
    assert told.halves is not None
    for half, cost in zip((a, b), told.halves, strict=True):
        assert cost == model_metric(METRICS["accuracy"], Split(part.x[half], y[half])).cost(model, "test")
    assert model_metric(METRICS["accuracy"], part).evaluate(model, "test") == Evaluation(told.cost)


def test_a_batch_metric_tells_what_makes_it_this_metric() -> None:
    costs, turned = [[0.0, 1.0], [10.0, 0.0]], [[0.0, 10.0], [1.0, 0.0]]
    one, other = (batch_metric(expected_cost(each)).identity for each in (costs, turned))
    assert one == {
        "name": "expected_cost",
        "maximize": False,
        "bounds": [0.0, 10.0],
        "arguments": {"costs": costs},
    }
    assert other["arguments"]["costs"] == turned
    own = OwnClassifierMetricConfig("sklearn.metrics:fbeta_score", kwargs={"beta": 2})
    assert batch_metric(build_metric(own)).identity["arguments"] == {
        "function": "sklearn.metrics:fbeta_score",
        "kwargs": {"beta": 2},
        "scores": "labels",
    }
