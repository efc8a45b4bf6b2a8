"""Direct search: quadratics with a known optimum, budgets to the query, and nothing changed that is not its own."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from statistics import mean
from typing import Any

import cma
import numpy as np
import pytest
import torch
from torch import Tensor

import metricopt_ext as mo
from helpers.refusals import assert_refused
from metricopt_ext.errors import AdapterError
from metricopt_ext.experiment.baselines import searched
from metricopt_ext.search.direct import CMAES, GuidedES, RandomSearch
from metricopt_ext.search.guided_es import es_direction
from metricopt_ext.search.strategy import SearchStrategy as Search
from metricopt_ext.search.trust_region import GuidedTrustRegion
from metricopt_ext.utils.seeding import generator

Make = Callable[..., Any]


# --- Optima --------------------------------------------------------------------------------------------------


@pytest.mark.outcome
@pytest.mark.parametrize(
    ("search", "queries"), [(GuidedES(scale=0.01, step=0.3), 2000), (CMAES(sigma0=0.3), 800)], ids=["guided", "cma"]
)
def test_quadratic_is_solved(quadratic: Make, search: Search, queries: int) -> None:
    farthest = []
    for seed in range(3):
        task = quadratic(dim=5)
        start = task.origin()
        assert task.true_cost(start) > 1
        result = searched(task, search, start, queries, seed=seed)
        assert result.cost == task.true_cost(result.phi)
        farthest.append(float((result.phi - task.goal).abs().max()))
    assert mean(farthest) < 0.05  # at worst 0.005 ± 0.001


def test_steps_follow_the_pseudocode(quadratic: Make) -> None:
    task, d, k = quadratic(dim=6), 6, 2
    search = GuidedES(pairs=3, scale=0.1, step=0.2, loss_weight=0.5, lr=0.3, history=k)
    asked: list[float] = []
    with task.metric.calling(lambda query: asked.append(query.evaluation.cost)):
        searched(task, search, task.origin(), 1 + 5 * 7, seed=4)

    phi, rng, past = task.origin(), generator(4, "guided_es"), []
    for step in range(5):
        gradient = task.loss_and_gradient(phi[None], 4, [0], step)[1][0]
        past.append(gradient)

        def metric(points: Tensor) -> Tensor:
            return torch.tensor([task.true_cost(point) for point in points], dtype=torch.float64)

        u = es_direction(metric, phi, torch.stack(past[::-1][:k]), generator=rng, count=3, variance=0.1**2 * d)
        phi = phi - (1 - step / 5) * (0.5 * 0.3 * gradient + 0.2 * d**0.5 * u / u.norm())
        assert asked[7 * step + 7] == pytest.approx(task.true_cost(phi), rel=1e-9)


# --- Budgets -------------------------------------------------------------------------------------------------


def test_a_task_without_a_loss_is_refused_at_once_by_what_needs_one(quadratic: Make) -> None:
    task, without = quadratic(), replace(quadratic(), loss=None, batches=None)
    assert_refused(lambda: GuidedES().check(without), AdapterError, "FinetuneTask")
    CMAES().check(without)
    GuidedES().check(task)
    assert task.queries == without.queries == 0


def test_without_its_package_it_is_refused_before_a_query(quadratic: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    task = quadratic()
    monkeypatch.setattr("metricopt_ext.utils.extras.find_spec", lambda name: None)
    search = partial(mo.optimize_metric, task, queries=30, strategy=CMAES())
    assert_refused(search, ModuleNotFoundError, "cma", "pip install")
    assert task.queries == 0


# --- Settings ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("search", "change"),
    [
        (GuidedES(), {"pairs": 0}),
        (GuidedES(), {"step": -0.1}),
        (GuidedES(), {"history": -1}),
        (CMAES(), {"sigma0": 0.0}),
        (GuidedTrustRegion(), {"batch": 0}),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_impossible_settings_are_refused(search: Any, change: dict[str, Any]) -> None:
    ((name, value),) = change.items()
    assert_refused(lambda: replace(search, **change), ValueError, name, value)


@pytest.mark.parametrize(("dim", "population"), [(2, 6), (16, 12), (32, 14), (128, 18)])
def test_the_least_is_the_starts_and_a_population(dim: int, population: int) -> None:
    own = cma.CMAEvolutionStrategy(np.zeros(dim), 0.1, {"seed": float("nan"), "verbose": -10}).popsize
    assert CMAES().least_queries(dim, starts=2) - 2 == population == own


def test_random_points_are_those_of_the_definition_and_a_longer_run_goes_on(quadratic: Make) -> None:
    task, rng = quadratic(dim=8), generator(2, "random_search")
    start = task.starts(0.3, 0, [0])[0]
    expected = [start] + [start + 0.2 * torch.randn(8, generator=rng, dtype=torch.float64) for _ in range(39)]
    for queries in (20, 40):
        points = searched(quadratic(dim=8), RandomSearch(0.2), start, queries, seed=2).points
        assert torch.equal(points, torch.stack(expected[:queries]))
