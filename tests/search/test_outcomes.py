"""A search that learns what a metric is made of, on quadratics of which the largest counts: it ends lower, sooner."""

import math
from collections.abc import Callable
from dataclasses import replace
from statistics import mean, stdev
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.tensors import rand
from metricopt_ext.experiment.baselines import searched
from metricopt_ext.search.strategy import SearchResult
from metricopt_ext.search.trust_region import GuidedTrustRegion
from metricopt_ext.tasks.metric import Metric

DIM, OUTCOMES = 8, 6
NAMES = [f"goal {at}" for at in range(OUTCOMES)]


def loss(model: Any, batch: Tensor) -> Tensor:
    """The mean squared distance of phi from rows, ``n x d``."""
    return (model.metricopt.value() - batch).square().sum(1).mean()


def largest(task: Any, seed: int, *, outcomes: bool = True, promised: bool = False) -> Any:
    """Let a task's metric be the largest squared distance from six goals, or tell all of them.

    Args:
        promised: Whether each has a loss of its own, the squared distance itself.
    """
    goals = task.goal + 0.7 * rand(OUTCOMES, task.dim, seed=seed + 500)

    def metric(model: Any) -> Any:
        costs = (model.metricopt.phi.detach() - goals).square().sum(1)
        return dict(zip(NAMES, costs.tolist(), strict=True)) if outcomes else float(costs.max())

    return replace(
        task,
        loss=loss,
        batches=lambda seed, task, step: goals + 0.3 * rand(OUTCOMES, len(goals[0]), seed=1000 * step + task),
        batches_of={name: [goal[None]] for name, goal in zip(NAMES, goals, strict=True)} if promised else None,
        metric=Metric(metric, maximize=False, bounds=None, name="largest", combine="worst" if outcomes else None),
    )


def run(task: Any, queries: int, seed: int) -> SearchResult:
    return searched(task, GuidedTrustRegion(), task.origin(), queries, seed=seed)


def lead(better: list[float], worse: list[float]) -> float:
    """By how many standard errors the one is lower on average, in pairs."""
    apart = [b - a for a, b in zip(better, worse, strict=True)]
    return mean(apart) / (stdev(apart) / math.sqrt(len(apart)))


def test_what_is_neither_combined_nor_bounded_is_not_learned(quadratic: Callable[..., Any]) -> None:
    """The search asks the same, whatever else the metric tells."""
    found = []
    for besides in (None, 0.0, 1e6):
        task = largest(quadratic(DIM), 0)
        told = task.metric.function

        def metric(model: Any, besides: float | None = besides, told: Any = told) -> dict[str, float]:
            more = {} if besides is None else {"besides": besides * math.sin(1e4 * float(model.metricopt.phi.sum()))}
            return {**more, **told(model)}

        made = Metric(metric, maximize=False, bounds=None, name="largest", combine="worst", combined=NAMES[:3])
        found.append(run(replace(task, metric=made), 16, 0))
    for end in found:
        assert torch.equal(end.points, found[0].points)
        assert end.f is not None
        assert len(end.f.outcome_mean) == 3
        assert end.f.combination is not None
        assert end.f.combination.combined == (*NAMES[:3],)


@pytest.mark.outcome
def test_a_worst_of_outcomes_ends_lower_and_with_promises_sooner(quadratic: Callable[..., Any]) -> None:
    """On 8 seeds, each of other goals: than by f of the worst, and at 14 queries than without promises."""

    def ends(queries: int, **options: bool) -> list[float]:
        return [run(largest(quadratic(DIM), seed, **options), queries, seed).cost for seed in range(8)]

    assert lead(ends(40), ends(40, outcomes=False)) > 3
    assert lead(ends(14, promised=True), ends(14)) > 3
