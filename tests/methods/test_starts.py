"""The choice among free candidates: one query each, on copies of the model."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from metricopt_ext.adapters.attach import attach_film
from metricopt_ext.errors import ConfigError
from metricopt_ext.methods.starts import Start, best_start, with_start
from metricopt_ext.tasks.metric import Metric
from metricopt_ext.tasks.task import FinetuneTask


def test_the_best_candidate_costs_one_query_each(quadratic: Callable[..., Any]) -> None:
    task = quadratic(budget=3)
    starts = {"pretrained": Start(task.origin()), "half": Start(task.goal / 2), "near": Start(task.goal * 0.9)}
    name, evaluations = best_start(task, starts)
    assert name == "near"
    assert {key: each.cost for key, each in evaluations.items()} == {
        key: task.true_cost(start.phi) for key, start in starts.items()
    }
    assert task.metric.ledger.spent_on == {"starts": 3}
    with pytest.raises(ConfigError, match="no start"):
        best_start(task, {})


def test_buffers_replace_those_of_a_copy() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).double().eval()
    metric = Metric(lambda m: float(m[1].running_mean.sum()), maximize=False, bounds=None)
    adapter = attach_film(model, ["1"], dim=2)
    task = FinetuneTask(adapter, loss=lambda m, b: m(b).sum(), batches=lambda *_: torch.ones(2, 3), metric=metric)
    start = Start(torch.ones(2), {"1.running_mean": torch.full((4,), -1.0)})
    copied = with_start(task, start)
    assert copied.cost(start.phi, "judge") == -4
    assert task.cost(task.origin(), "judge") == 0
    assert copied.adapter.model is not model
    assert best_start(task, {"pretrained": Start(task.origin()), "other": start})[0] == "other"
    with pytest.raises(ConfigError, match=r"no buffer '1\.mean'"):
        with_start(task, Start(torch.ones(2), {"1.mean": torch.ones(4)}))
