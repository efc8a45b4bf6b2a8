"""Constraints through a whole run: a quadratic with a linear constraint, whose constrained optimum is known."""

import math
import re
from collections.abc import Callable
from dataclasses import replace
from statistics import mean
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.refusals import assert_refused, assert_warned, having
from metricopt_ext import Callback, Metric, Result, Search, Start, optimize_metric
from metricopt_ext.adapters.attach import attach_input_bias
from metricopt_ext.errors import MetricError
from metricopt_ext.methods.guard import CONFIDENCE, Decision, decide
from metricopt_ext.search.direct import CMAES, GuidedES, RandomSearch
from metricopt_ext.search.trust_region import GuidedTrustRegion
from metricopt_ext.tasks.constraints import Limits, parse_constraints
from metricopt_ext.tasks.evaluation import Evaluation, Outcome

Make = Callable[..., Any]


class Toy:
    """distance = |phi - goal|^2 is to be least where along = normal . phi is at most half of what it is at the goal."""

    def __init__(self, make: Make, dim: int = 8) -> None:
        self.task = make(dim)
        goal: Tensor = self.task.problem.goal
        aside = torch.randn(dim, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        self.normal = 0.8 * goal / goal.norm() + 0.6 * aside / aside.norm()
        self.normal /= self.normal.norm()
        self.beyond = 0.5 * float(self.normal @ goal)  # by how much the goal is
        self.limit = float(self.normal @ goal) - self.beyond
        self.least = self.beyond**2  # of the constrained optimum, goal - beyond * normal
        assert self.beyond > 1, "the unconstrained optimum is infeasible"

    def along(self, phi: Tensor) -> float:
        return float(self.normal @ phi)

    def both(self, model: Any) -> dict[str, float]:
        phi = model.metricopt.phi.detach()
        return {"distance": self.task.distance(model), "along": self.along(phi)}

    def judged(self, function: Any = None, subject_to: Any = None, **settings: Any) -> Any:
        """The task with a metric of both quantities, constrained by the limit unless told otherwise."""
        bounds = {"along": f"<= {self.limit!r}"} if subject_to is None else subject_to
        metric = Metric(
            function or self.both, maximize=False, bounds=None, name="distance", subject_to=bounds, **settings
        )
        return replace(self.task, metric=metric)

    def share_left(self, distance: float) -> float:
        """Of the way from the start to the constrained optimum, the share that is left."""
        start = self.task.true_cost(torch.zeros_like(self.normal))
        return (distance - self.least) / (start - self.least)


@pytest.fixture
def toy(quadratic: Make) -> Toy:
    return Toy(quadratic)


def go(task: Any, queries: int = 40, **arguments: Any) -> Result:
    return optimize_metric(task, queries=queries, **{"callback": Callback(), **arguments})


# --- What it achieves --------------------------------------------------------------------------------------------


@pytest.mark.outcome
def test_the_end_is_feasible_and_near_the_constrained_optimum(quadratic: Make) -> None:
    """Of the way to it about 3% are left, over four seeds at most 5%; without the constraint the end violates it."""
    left = []
    for seed in range(4):
        toy = Toy(quadratic)
        run = go(toy.judged(), seed=seed)
        assert run.chosen == "search"
        assert toy.along(run.ends["search"]) <= toy.limit + 1e-9
        assert run.also["along"] == (0.0, pytest.approx(toy.along(run.ends["search"])))
        left.append(toy.share_left(run.after))
    assert mean(left) < 0.15
    free = go(Toy(quadratic).judged(subject_to={}), seed=0)
    assert toy.along(free.ends["search"]) > toy.limit + 0.3
    assert toy.share_left(free.after) < -0.1


def test_a_constraint_that_binds_nowhere_changes_nothing(quadratic: Make) -> None:
    """The same points are asked, to the last digit but those that a probability of 1 takes."""
    toy = Toy(quadratic)
    alone = go(toy.judged(toy.task.distance, {}), 24)
    several, bound = (go(Toy(quadratic).judged(subject_to=each), 24) for each in ({}, {"along": "<= 1e9"}))
    assert torch.equal(several.points, alone.points)
    assert torch.allclose(bound.points, alone.points, atol=1e-9)
    assert bound.constrained is not None
    assert bound.constrained.holding == bound.constrained.evaluated == 24


@pytest.mark.parametrize("strategy", [CMAES(), GuidedES(), RandomSearch()], ids=["cma", "guided_es", "random"])
def test_a_direct_search_ends_at_the_best_that_satisfies_them(toy: Toy, strategy: Any) -> None:
    told = []
    task = toy.judged(subject_to={"along": "<= start + 0.02"})
    with task.metric.calling(lambda query: told.append(query.evaluation)):
        run = go(task, 40, strategy=strategy)
    holding = [each.cost for each in told if (each.also or {})["along"] <= 0.02]
    assert min(each.cost for each in told) < min(holding)
    assert run.verdict.gain == pytest.approx(told[0].cost - min(holding))
    assert run.after == min(holding)


# --- Nothing feasible, and starts --------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", [GuidedTrustRegion(), CMAES()], ids=["guided", "cma"])
def test_where_nothing_satisfies_them_the_model_stays_and_it_is_said_once(toy: Toy, strategy: Any) -> None:
    task = toy.judged(subject_to={"along": ">= 1000", "far": "<= 1"}, also={"far": lambda: 0.5})
    run = go(task, strategy=strategy)
    assert run.chosen == "start"
    assert run.after == run.before == run.best
    assert not task.adapter.phi.any()
    assert run.constrained is not None
    assert (run.constrained.holding, run.constrained.evaluated) == (0, 40)
    assert run.broken == {"along >= 1000": 1000.0}
    assert re.search(having("40", "along >= 1000", "1000.0000"), str(run))


def test_where_the_end_alone_satisfies_them_it_is_kept_whole(toy: Toy) -> None:
    """Classes are new, and no share of the way to it: the start, and what is nearer to it, violates the limit."""
    goal = toy.task.problem.goal
    side = torch.nn.functional.normalize(torch.randn(8, generator=torch.Generator().manual_seed(5)).double(), dim=0)

    def halved(model: Any) -> dict[str, Any]:
        phi, value = model.metricopt.phi.detach(), toy.task.distance(model)
        off = 4 * float((phi - goal) @ side)
        return {"along": toy.along(phi), "distance": (value, (value + off, value - off))}

    run = go(toy.judged(halved, {"along": ">= 0.8"}, new_classes=True), 40)
    assert run.chosen == "search"
    assert run.also["along"][1] >= 0.8
    assert run.broken == {}


def test_a_search_looks_for_where_they_hold(toy: Toy) -> None:
    """The start violates the constraint; what satisfies it is found, and kept as it gains."""
    run = go(toy.judged(subject_to={"along": ">= 0.8"}), 40)
    assert run.constrained is not None
    assert [each.name for each in run.constrained.violated["start"]] == ["along"]
    assert run.chosen == "search"
    assert run.also["along"][1] >= 0.8


def test_the_search_begins_from_the_best_start_that_satisfies_them(toy: Toy) -> None:
    goal, normal = toy.task.problem.goal, toy.normal
    starts = {"beyond": Start(goal.clone()), "within": Start(0.2 * (goal - (normal @ goal) * normal))}
    run = go(toy.judged(subject_to={"along": "<= start + 0.1"}), 30, starts=starts)
    assert run.started_at == "within"
    assert run.also["along"][1] <= 0.1
    plain = go(toy.judged(subject_to={}), 30, starts=starts)
    assert plain.started_at == "beyond"


# --- The guard ---------------------------------------------------------------------------------------------------

LIMITS = Limits.of(parse_constraints({"a": ">= 0.5"}, "m"), Evaluation(0.9, outcomes={"a": Outcome(0.6)}))


def at(cost: float, a: float) -> Evaluation:
    return Evaluation(cost, outcomes={"a": Outcome(a)})


def test_the_guard_decides_among_what_is_allowed() -> None:
    def decided(limits: Limits | None = LIMITS, **candidates: Evaluation) -> Decision:
        started = "prior" if "prior" in candidates else "start"
        return decide(candidates, [*candidates.values()], CONFIDENCE, started=started, limits=limits)

    def kept(**candidates: Evaluation) -> str:
        return decided(**candidates).kept

    assert kept(start=at(0.9, 0.6), search=at(0.1, 0.6)) == "search"
    assert kept(start=at(0.9, 0.6), search=at(0.1, 0.4)) == "start"
    assert kept(start=at(0.9, 0.6), prior=at(0.5, 0.6), search=at(0.1, 0.4)) == "prior"
    assert kept(start=at(0.9, 0.6), prior=at(0.5, 0.4), search=at(0.6, 0.6)) == "search"
    assert kept(start=at(0.9, 0.6), prior=at(0.5, 0.4), search=at(0.1, 0.4)) == "start"
    assert kept(start=at(0.9, 0.4), search=at(0.1, 0.6)) == "search"
    assert kept(start=at(0.9, 0.4), search=at(0.95, 0.6)) == "search"  # what satisfies all comes before any gain
    assert kept(start=at(0.9, 0.4), prior=at(0.5, 0.6), search=at(0.1, 0.4)) == "prior"
    assert kept(start=at(0.9, 0.4), search=at(0.1, 0.3)) == "start"
    assert kept(start=at(0.9, 0.6), search=at(0.1, 0.6)._replace(failed=True)) == "start"
    assert decided(None, start=at(0.9, 0.6), prior=at(0.5, 0.4), search=at(0.1, 0.4)).kept == "search"


def test_a_start_is_judged_as_ever_where_the_end_is_not_allowed() -> None:
    """By f beside the best along a line, and without halves that are the value itself."""
    candidates = {"start": at(90, 0.6), "prior": at(50, 0.6), "line": at(49, 0.6), "search": at(10, 0.4)}
    by_f = {"start": 80.0, "prior": 30.0, "line": 40.0}.__getitem__
    options: Any = {"started": "prior", "lines": {"line"}, "limits": LIMITS}
    assert decide(candidates, [*candidates.values()], **options).kept == "line"
    assert decide(candidates, [*candidates.values()], CONFIDENCE, by_f, **options).kept == "prior"
    repeated = {name: each._replace(noise=30.0) for name, each in candidates.items()}
    halved = {name: each._replace(pairs=((each.value, each.value),)) for name, each in repeated.items()}
    expected = decide(repeated, [*repeated.values()], **options)
    assert assert_warned(lambda: decide(halved, [*halved.values()], **options), "halves") == expected
    assert expected.kept == "prior"


@pytest.mark.slow
def test_a_part_of_the_way_is_kept_only_if_it_is_known_to_satisfy_them(toy: Toy) -> None:
    """Classes are new: halves pull to both sides of the goal, and what is kept is between start and end, or either."""
    goal = toy.task.problem.goal
    side = torch.nn.functional.normalize(torch.randn(8, generator=torch.Generator().manual_seed(5)).double(), dim=0)

    def halved(model: Any) -> dict[str, Any]:
        phi = model.metricopt.phi.detach()
        value = toy.task.distance(model)
        off = 2 * float((phi - goal) @ side)
        return {"along": toy.along(phi), "distance": (value, (value + off, value - off))}

    run = go(toy.judged(halved, new_classes=True), 40)
    assert run.chosen == "part"
    assert run.also["along"][1] == pytest.approx(toy.along(run.ends["part"]))
    assert run.also["along"][1] <= toy.limit
    calls = []

    def last_is_far(model: Any) -> dict[str, Any]:  # what is kept of the way is asked last
        calls.append(1)
        return {**halved(model), "near": float(len(calls) < 40)}

    bounds = {"along": f"<= {toy.limit!r}", "near": ">= 1"}
    again = go(toy.judged(last_is_far, bounds, new_classes=True), 40)
    assert len(calls) == 40
    assert again.constrained is not None
    assert [each.name for each in again.constrained.violated["part"]] == ["near"]
    assert again.chosen == "start"


def test_held_out_data_do_not_bring_back_a_start_that_violates(toy: Toy) -> None:
    aside = Metric(lambda model: -toy.along(model.metricopt.phi.detach()), maximize=False, bounds=None, name="aside")
    starts = {"bad": Start(0.5 * toy.task.problem.goal)}
    run = go(toy.judged(subject_to={"along": "<= -0.2"}), 40, starts=starts, holdout=aside)
    assert "bad" not in run.holdout


# --- Several values, from one function or several ------------------------------------------------------------------


def test_other_quantities_cost_no_query_and_are_asked_at_start_and_end_alone(toy: Toy) -> None:
    calls = []

    def norm(model: Any) -> tuple[float, tuple[float, float]]:
        calls.append(model.metricopt.phi.detach().clone())
        return float(calls[-1].norm()), (0.0, 0.0)

    task = toy.judged(toy.task.distance, {}, also={"norm": norm, "constant": lambda: 3})
    run = go(task, 24)
    assert task.metric.ledger.spent == toy.task.problem.queries == 24
    assert len(calls) == 2
    assert torch.equal(calls[0], task.origin())
    assert torch.equal(calls[1], run.ends[run.chosen])
    assert run.also == {"norm": (0.0, float(calls[1].norm())), "constant": (3.0, 3.0)}


def test_what_fails_at_the_start_costs_no_query_and_at_the_end_no_run(toy: Toy) -> None:
    def fails(model: Any) -> float:
        if bool(model.metricopt.phi.any()) or strict:
            raise OSError("no such server")
        return 1.0

    strict = True
    task = toy.judged(subject_to={}, also={"far": fails})
    assert_refused(lambda: go(task, 24), MetricError, "distance", "also['far']", "OSError")
    assert task.metric.ledger.spent == 0
    strict = False
    run = assert_warned(lambda: go(task, 24), "OSError")
    assert run.chosen == "search"
    assert "far" not in run.also
    assert bool(task.adapter.phi.any())


# --- Ask and tell, and resuming ------------------------------------------------------------------------------------


def test_an_adapter_alone_may_be_subject_to_something(toy: Toy) -> None:
    adapter = attach_input_bias(torch.nn.Linear(2, 3).double(), dim=8)
    search = Search(adapter, 24, maximize=False, subject_to={"along": "<= start + 0.2"})
    (start,) = search.ask()
    assert_refused(lambda: search.tell(start.id, 1.0), ValueError, "subject", "along")
    assert_refused(lambda: search.tell(start.id, 1.0, outcomes={"longa": 1.0}), ValueError, "longa")
    for outcomes in ({"along": math.inf}, {"along": "much"}, {3: 1.0}, [0.5]):
        assert_refused(lambda told=outcomes: search.tell(start.id, 1.0, outcomes=told), ValueError)
    assert search.spent == 0
    search.tell(start.id, 9.0, outcomes={"along": 0.0, "more": (7.0, (6.0, 8.0))})
    while trials := search.ask(8):
        for trial in trials:
            cost = float((trial.phi - toy.task.problem.goal).square().sum())
            search.tell(trial.id, cost, outcomes={"along": toy.along(trial.phi)})
    run = search.result()
    assert run.also["along"][1] <= 0.2
    assert run.broken == {}
    assert "more" not in run.also, "it was told of the start alone"
    assert_refused(lambda: go(toy.judged(subject_to={"recall": ">= 0.5"}), 24), MetricError, "subject_to", "along")
