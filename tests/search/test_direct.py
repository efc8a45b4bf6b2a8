"""Direct search: quadratics with a known optimum, budgets to the query, and nothing changed that is not its own."""

import random
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from helpers.refusals import assert_refused, having
from metricopt_ext.errors import AdapterError, BudgetError, MetricError
from metricopt_ext.search.direct import CMAES, GuidedES
from metricopt_ext.search.guided_es import es_direction
from metricopt_ext.search.strategy import SearchResult
from metricopt_ext.search.strategy import SearchStrategy as Search
from metricopt_ext.tasks.evaluation import Evaluation
from metricopt_ext.tasks.ledger import Ledger
from metricopt_ext.tasks.metric import Metric
from metricopt_ext.utils.seeding import generator

Make = Callable[..., Any]

SEARCHES = {
    "guided": GuidedES(),
    "one pair": GuidedES(pairs=1),
    "all directions": GuidedES(history=0, loss_weight=0.0),
    "cma": CMAES(),
}
each_search = pytest.mark.parametrize("search", SEARCHES.values(), ids=SEARCHES)


def state_of_global_generators() -> list[Any]:
    kind, keys, *rest = np.random.get_state()
    return [random.getstate(), kind, keys.tolist(), rest, torch.get_rng_state().tolist()]


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
        result = search(task, start, queries, seed=seed)
        assert result.cost == task.true_cost(result.phi)
        farthest.append(float((result.phi - task.goal).abs().max()))
    assert mean(farthest) < 0.05  # at worst 0.005 ± 0.001


def test_loss_alone_leads_to_its_own_optimum(quadratic: Make) -> None:
    """With the metric step off and its weight at 1, Guided ES is gradient descent on the loss."""
    task = quadratic(noise=0.0)
    asked: list[float] = []
    search = GuidedES(pairs=1, step=0.0, loss_weight=1.0, lr=0.2)
    with task.metric.calling(lambda query: asked.append(query.evaluation.cost)):
        search(task, task.origin(), 1 + 3 * 20)
    phi = task.origin()
    for step in range(20):
        phi = phi - 0.2 * (1 - step / 20) * task.curvature * (phi - task.centre)
        assert asked[3 * step + 3] == pytest.approx(task.true_cost(phi), rel=1e-12)


def test_steps_follow_the_pseudocode(quadratic: Make) -> None:
    task, d, k = quadratic(dim=6), 6, 2
    search = GuidedES(pairs=3, scale=0.1, step=0.2, loss_weight=0.5, lr=0.3, history=k)
    asked: list[float] = []
    with task.metric.calling(lambda query: asked.append(query.evaluation.cost)):
        search(task, task.origin(), 1 + 5 * 7, seed=4)

    phi, rng, past = task.origin(), generator(4, "guided_es"), []
    for step in range(5):
        gradient = task.loss_and_gradient(phi[None], 4, [0], step)[1][0]
        past.append(gradient)

        def metric(points: Tensor) -> Tensor:
            return torch.tensor([task.true_cost(point) for point in points], dtype=torch.float64)

        u = es_direction(metric, phi, torch.stack(past[::-1][:k]), generator=rng, count=3, variance=0.1**2 * d)
        phi = phi - (1 - step / 5) * (0.5 * 0.3 * gradient + 0.2 * d**0.5 * u / u.norm())
        assert asked[7 * step + 7] == pytest.approx(task.true_cost(phi), rel=1e-9)


@each_search
def test_maximised_metric(quadratic: Make, search: Search) -> None:
    task = quadratic(dim=8)
    up = task.judged_by(Metric(lambda model: -task.true_cost(model.metricopt.phi), maximize=True, bounds=None))
    expected, result = (search(t, task.origin(), 90, seed=1) for t in (task, up))
    assert torch.equal(result.phi, expected.phi)
    assert result.curve == expected.curve
    assert up.metric.to_value(result.cost) == -task.true_cost(result.phi)


# --- Budgets -------------------------------------------------------------------------------------------------


@each_search
@pytest.mark.parametrize("dim", [2, 8, 33])
def test_budget_is_spent_to_the_query(quadratic: Make, search: Search, dim: int) -> None:
    least = search.least_queries(dim)
    for queries in [*range(least, least + 20), 100, 151]:
        task = quadratic(dim=dim, budget=queries)
        seen: list[float] = []
        with task.metric.calling(lambda query, seen=seen: seen.append(query.evaluation.cost)):
            result = search(task, task.origin(), queries)
        assert task.metric.ledger.spent_on == {"search": queries}
        assert task.queries == len(seen) == queries
        assert_follows(result, seen)
        assert result.cost <= seen[0] == task.true_cost(task.origin())
        assert result.cost == task.true_cost(result.phi)


def assert_follows(result: SearchResult, seen: list[float]) -> None:
    """The curve has one point for each new minimum."""
    falls = [(i + 1, cost) for i, cost in enumerate(seen) if i == 0 or cost < min(seen[:i])]
    assert result.curve == tuple(falls)
    assert result.cost == min(seen)


@each_search
def test_no_query_asks_twice(quadratic: Make, search: Search) -> None:
    """Whatever a budget leaves over after whole steps is spent on points not seen before."""
    for queries in range(search.least_queries(4), search.least_queries(4) + 30):
        task = quadratic()
        seen: list[float] = []
        with task.metric.calling(lambda query, seen=seen: seen.append(query.evaluation.cost)):
            search(task, task.origin(), queries)
        assert len(set(seen)) == queries


@each_search
def test_too_small_a_budget_is_refused(quadratic: Make, search: Search) -> None:
    task = quadratic()
    least = search.least_queries(task.dim)
    for queries in (0, 1, least - 1):
        with pytest.raises(ValueError, match=having("queries", queries, least)):
            search(task, task.origin(), queries)
    for wrong in (-1, 30.0, True):
        with pytest.raises(ValueError, match=having("queries", wrong)):
            search(task, task.origin(), wrong)
    assert task.metric.ledger.spent == 0


def test_a_loss_without_a_gradient_is_refused_before_any_query(quadratic: Make) -> None:
    task = replace(quadratic(), loss=lambda model, batch: batch.sum())
    assert_refused(lambda: GuidedES()(task, task.origin(), 100), AdapterError, "phi")
    assert task.queries == task.metric.ledger.spent == 0


def test_a_task_without_a_loss_is_refused_at_once_by_what_needs_one(quadratic: Make) -> None:
    task, without = quadratic(), replace(quadratic(), loss=None, batches=None)
    assert_refused(lambda: GuidedES().check(without), AdapterError, "FinetuneTask")
    CMAES().check(without)
    GuidedES().check(task)
    assert task.queries == without.queries == 0


@each_search
def test_ledger_without_the_budget_is_refused_before_any_query(quadratic: Make, search: Search) -> None:
    task = quadratic(budget=100)
    task.metric.ledger.spend("collect", 30)
    assert_refused(lambda: search(task, task.origin(), 71), BudgetError, "71", "queries", "70")
    assert task.queries == 0
    search(task, task.origin(), 70)
    assert task.metric.ledger.spent_on == {"collect": 30, "search": 70}


@each_search
def test_failing_metric_says_where(quadratic: Make, search: Search) -> None:
    task = quadratic(budget=60)
    before = task.adapter.phi.detach().clone()
    task.problem.fail_after = 24
    assert_refused(lambda: search(task, task.origin(), 60), MetricError, "server", "25", "60")
    assert task.metric.ledger.spent == 25
    assert torch.equal(task.adapter.phi, before)


# --- Repeatable, and nothing else touched --------------------------------------------------------------------


@each_search
def test_seed_decides(quadratic: Make, search: Search) -> None:
    def run(seed: int, global_seed: int) -> SearchResult:
        torch.manual_seed(global_seed)
        np.random.seed(global_seed)
        task = quadratic(dim=8)
        return search(task, task.origin(), 80, seed=seed)

    first, again, other = run(3, 0), run(3, 1), run(4, 0)
    assert torch.equal(first.phi, again.phi)
    assert first.curve == again.curve
    assert not torch.equal(first.phi, other.phi)


@each_search
def test_nothing_else_changes(
    quadratic: Make, search: Search, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    task = quadratic(dim=8)
    start = task.starts(0.3, 0, [0])[0]
    task.adapter.set_phi(torch.full((8,), 0.25))
    task.adapter.model.train()
    model = {name: value.clone() for name, value in task.adapter.model.state_dict().items()}
    given, before = start.clone(), state_of_global_generators()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = search(task, start, 80)
    assert state_of_global_generators() == before
    assert torch.equal(start, given)
    for name, value in task.adapter.model.state_dict().items():
        assert torch.equal(value, model[name])
    assert task.adapter.model.training
    assert not result.phi.requires_grad
    assert capfd.readouterr() == ("", "")
    assert list(tmp_path.iterdir()) == []


@each_search
@pytest.mark.parametrize("value", [0.0, 3.5])
def test_flat_metric_returns_the_start(quadratic: Make, search: Search, value: float) -> None:
    task = quadratic(dim=8).judged_by(Metric(lambda: value, maximize=False, bounds=None, ledger=Ledger(300)))
    start = task.starts(0.3, 0, [0])[0]
    result = search(task, start, 300)
    assert torch.equal(result.phi, start)
    assert result.curve == ((1, value),)
    assert task.metric.ledger.left == 0


@each_search
def test_start_is_kept_if_it_is_best(quadratic: Make, search: Search) -> None:
    task = quadratic(dim=8)
    result = search(task, task.goal, 60)
    assert torch.equal(result.phi, task.goal)
    assert result.cost == 0


@pytest.mark.outcome
@each_search
def test_single_precision(quadratic: Make, search: Search) -> None:
    left = []
    for seed in range(5):
        task = quadratic(dim=8, dtype=torch.float32)
        result = search(task, task.origin(), 120, seed=seed)
        assert result.phi.dtype == torch.float32
        left.append(result.cost / task.true_cost(task.origin()))
    assert mean(left) < 0.8  # at worst 0.32 ± 0.03


# --- Settings ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("search", "change"),
    [
        (GuidedES(), {"pairs": 0}),
        (GuidedES(), {"scale": 0.0}),
        (GuidedES(), {"step": -0.1}),
        (GuidedES(), {"loss_weight": float("nan")}),
        (GuidedES(), {"lr": -1.0}),
        (GuidedES(), {"history": -1}),
        (CMAES(), {"sigma0": 0.0}),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_impossible_settings_are_refused(search: Any, change: dict[str, Any]) -> None:
    ((name, value),) = change.items()
    assert_refused(lambda: replace(search, **change), ValueError, name, value)


@pytest.mark.parametrize(("dim", "population"), [(2, 6), (16, 12), (32, 14), (128, 18)])
def test_population_is_the_usual_one(dim: int, population: int) -> None:
    cma = pytest.importorskip("cma")
    own = cma.CMAEvolutionStrategy(np.zeros(dim), 0.1, {"seed": float("nan"), "verbose": -10}).popsize
    assert CMAES().population(dim) == population == own


def test_missing_cma_says_what_to_install(quadratic: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cma", None)
    task = quadratic()
    assert_refused(lambda: CMAES()(task, task.origin(), 50), ImportError, "cma")
    assert task.queries == 0
    GuidedES()(task, task.origin(), 50)


def test_a_population_of_which_nothing_is_known_moves_no_mean(quadratic: Make) -> None:
    pytest.importorskip("cma")
    task = quadratic()
    state = CMAES().begin(task, task.origin(), 31)
    state.ask()
    state.tell(0, Evaluation(1.0))
    population = state.ask()
    assert len(population) == CMAES().population(4)
    for index in range(len(population)):
        state.give_up(index)
    assert torch.equal(state.ask(), task.origin()[None])  # the mean, which is judged too
    assert state.left == 30
