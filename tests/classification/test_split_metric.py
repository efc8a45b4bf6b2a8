"""A metric on a part of the data and on halves of it."""

import torch
from torch import nn

from metricopt_ext.classification.metrics import METRICS
from metricopt_ext.classification.split_metric import model_metric
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
