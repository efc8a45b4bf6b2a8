"""Contenders on a quadratic: where each stood at each budget, and that no query goes uncounted."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from metricopt_ext.errors import BudgetError, MetricError
from metricopt_ext.evidence.contenders import (
    Contender,
    Trace,
    at_each_budget,
    ours,
    searching,
    usual_contenders,
    with_budget,
)
from metricopt_ext.evidence.method import METHODS, Entry
from metricopt_ext.evidence.passes import Passes, noticing
from metricopt_ext.evidence.run_config import RunConfig
from metricopt_ext.methods.pipeline import optimize_metric
from metricopt_ext.search.direct import CMAES
from metricopt_ext.search.random_search import RandomSearch
from metricopt_ext.search.strategy import Batches, DirectState, SearchStrategy
from metricopt_ext.search.trust_region import GuidedTrustRegion
from metricopt_ext.tasks.metric import Metric
from metricopt_ext.tasks.task import FinetuneTask
from metricopt_ext.utils.progress import Watcher

BUDGETS = [20, 35, 60]


def run(contender: Contender, task: Any, seed: int = 3) -> list[Any]:
    return list(contender.run(task, task.starts(0.3, 0, [0])[0], BUDGETS, seed))


def test_one_run_of_an_anytime_search_serves_all_budgets(quadratic: Callable[..., Any]) -> None:
    once = quadratic()
    reached = run(searching(RandomSearch()), once)
    assert once.queries == 60
    anew = at_each_budget(lambda task, start, queries, seed: RandomSearch()(task, start, queries, seed=seed).phi)
    each = run(anew, quadratic())
    for a, b, budget in zip(reached, each, BUDGETS, strict=True):
        assert torch.equal(a.end, b.end)
        assert a.queries == b.queries == budget
    assert [a.seconds for a in reached] == sorted(a.seconds for a in reached)
    assert once.metric.ledger.spent == 0  # each contender counts in a ledger of its own


def test_an_anytime_search_keeps_what_it_reached_before_the_metric_failed(quadratic: Callable[..., Any]) -> None:
    task = quadratic()
    task.problem.fail_after = 40
    reached = searching(RandomSearch()).run(task, task.origin(), BUDGETS, 0)
    assert [next(reached).queries, next(reached).queries] == [20, 35]
    with pytest.raises(MetricError, match="query 41 of 60"):
        next(reached)


def test_other_searches_are_told_each_budget(quadratic: Callable[..., Any]) -> None:
    task = quadratic()
    reached = run(searching(CMAES()), task)
    start = task.starts(0.3, 0, [0])[0]
    for each, budget in zip(reached, BUDGETS, strict=True):
        fresh = quadratic()
        assert torch.equal(each.end, CMAES()(fresh, start, budget, seed=3).phi)
    assert task.queries == sum(BUDGETS)


@pytest.mark.parametrize("accepted", [True, False])
def test_ours_starts_where_told_and_keeps_what_its_guard_accepts(quadratic: Callable[..., Any], accepted: bool) -> None:
    task = quadratic()
    start = task.starts(0.3, 0, [0])[0] if accepted else task.goal
    for each, budget in zip(ours().run(task, start, BUDGETS, 3), BUDGETS, strict=True):
        found = GuidedTrustRegion()(quadratic(), start, budget, seed=3)
        assert each.queries == budget
        assert each.search.evaluations == found.evaluations
        assert torch.equal(each.end, found.phi if accepted else start)
        assert torch.equal(each.search.phi, found.phi)


def test_passes_are_those_of_the_queries_and_of_the_losses(quadratic: Callable[..., Any]) -> None:
    """The metric runs the model; the probe takes 64 batches, Guided ES one for a check and one for each step."""
    config = RunConfig()
    config.finetune.steps = 30
    contenders = usual_contenders(config)
    expected = {
        "ours": [(20, 64), (35, 64), (60, 64)],
        "random_search": [(20, 0), (35, 0), (60, 0)],
        "cma_es": [(20, 0), (35, 0), (60, 0)],
        "guided_es": [(20, 1 + 1), (35, 1 + 2), (60, 1 + 4)],
        "loss_finetune_best": [(20, 30), (31, 30), (31, 30)],
    }
    for name, passes in expected.items():
        task = quadratic()
        x = torch.zeros(1, 2, dtype=torch.float64)
        metric = Metric(lambda model, task=task, x=x: (model(x), task.distance(model))[1], maximize=False, bounds=None)
        reached = run(contenders[name], noticing(task.judged_by(metric)))
        assert [(each.passes.metric, each.passes.loss) for each in reached] == passes, name
        assert [each.queries for each in reached] == [metric for metric, _ in passes]


def test_a_metric_that_runs_no_model_takes_no_passes(quadratic: Callable[..., Any]) -> None:
    (*_, last) = run(ours(), noticing(quadratic()))
    assert (last.queries, last.passes) == (60, Passes(0, 64))
    assert run(ours(), quadratic())[-1].passes is None  # not counted


def test_a_method_that_does_not_apply_reaches_nothing(quadratic: Callable[..., Any]) -> None:
    assert run(at_each_budget(lambda *_: None, least=lambda dim: 1), quadratic()) == []


def test_best_step_of_the_loss_is_tried_at_no_more_points_than_queries(quadratic: Callable[..., Any]) -> None:
    config = RunConfig()
    config.finetune.steps = 30
    task = quadratic(noise=0.0)
    reached = run(usual_contenders(config)["loss_finetune_best"], task)
    assert [each.queries for each in reached] == [20, 31, 31]


def test_contenders_are_in_the_methods_table_and_say_what_they_need() -> None:
    contenders = usual_contenders(RunConfig())
    assert set(contenders) <= set(METHODS)
    assert {name for name, each in contenders.items() if each.anytime} == {"random_search", "turbo", "ours"}
    assert {name: each.least(32) for name, each in contenders.items()} == {
        "loss_finetune_best": 2,
        "guided_es": 14,
        "cma_es": 16,
        "random_search": 2,
        "ngopt": 2,
        "turbo": 17,
        "ours": 9,
    }


def test_what_was_reached_is_traced(quadratic: Callable[..., Any]) -> None:
    task, told = quadratic(), []
    observed = task.metric.with_observers(lambda query: told.append(query.value))
    limited = with_budget(task.judged_by(observed), 3)
    trace = Trace(limited)
    points = [task.goal + 1, task.goal, task.goal]
    with limited.metric.observed_by(trace):
        costs = limited.costs_at(torch.stack(points), "search")
    assert told == costs.tolist() == [point.cost for point in trace.points] == [task.true_cost(p) for p in points]
    best = [trace.best(queries) for queries in (1, 2, 3)]
    ends: list[Tensor] = [each.end for each in best]
    assert torch.equal(torch.stack(ends), torch.stack([points[0], points[1], points[1]]))
    assert [each.queries for each in best] == [1, 2, 3]
    with pytest.raises(BudgetError):
        limited.cost(task.goal, "search")
    assert task.metric.ledger.spent == 0


@dataclass(frozen=True)
class Nearby(SearchStrategy):
    """A baseline in a few lines: one batch of small steps along the axes."""

    def least_queries(self, dim: int, starts: int = 1) -> int:
        return starts + 1

    def begin(self, task: FinetuneTask, start: Tensor, queries: int, *, known: Any = (), seed: int = 0) -> DirectState:
        def batches(state: DirectState) -> Batches:
            yield start + 0.1 * torch.eye(len(start)).to(start).repeat(queries, 1)[: state.left]

        return DirectState(start, queries, batches, known)


def test_a_new_baseline_is_one_entry(quadratic: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    entry = Entry("small steps", "#123456", "queries", factory=lambda settings: Nearby())
    monkeypatch.setitem(METHODS, "nearby", entry)
    task = quadratic()
    reached = run(usual_contenders(RunConfig())["nearby"], task)
    assert [each.queries for each in reached] == BUDGETS
    assert optimize_metric(quadratic(), queries=20, strategy=Nearby(), watcher=Watcher()).queries_per_start == 20
