"""Searches asked and told by hand: order, stand-ins, other points than asked, and what is known."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from helpers.refusals import assert_refused
from metricopt_ext.errors import BudgetError
from metricopt_ext.search.direct import CMAES, GuidedES
from metricopt_ext.search.ngopt import NGOpt
from metricopt_ext.search.noisy_ei import NoisyEI
from metricopt_ext.search.optuna_sampler import OptunaSampler
from metricopt_ext.search.random_search import RandomSearch
from metricopt_ext.search.strategy import Answer, Answers, Batches, DirectState, SearchStrategy, falls
from metricopt_ext.search.trust_region import GuidedTrustRegion
from metricopt_ext.tasks.constraints import parse_constraints
from metricopt_ext.tasks.evaluation import Evaluation

SEARCHES = [
    GuidedTrustRegion(),
    CMAES(),
    GuidedES(),
    RandomSearch(),
    NGOpt(),
    NoisyEI(batch=8, initial=23, samples=8, restarts=1, raw=4),
    OptunaSampler(),
]
each_search = pytest.mark.parametrize("search", SEARCHES, ids=lambda search: type(search).__name__)
PACKAGES = {"NGOpt": "nevergrad", "NoisyEI": "botorch", "OptunaSampler": "optuna"}


@pytest.fixture(autouse=True)
def _packages(request: pytest.FixtureRequest) -> None:
    search = request.node.callspec.params.get("search") if hasattr(request.node, "callspec") else None
    if type(search).__name__ in PACKAGES:
        pytest.importorskip(PACKAGES[type(search).__name__])


@each_search
def test_answers_in_any_order_are_the_loop(quadratic: Callable[..., Any], search: SearchStrategy) -> None:
    task, asked, rng = quadratic(), quadratic(), random.Random(5)
    expected = search(task, task.origin(), 31, seed=2)
    state = search.begin(asked, asked.origin(), 31, seed=2)
    assert asked.problem.queries == 0
    while len(points := state.ask()):
        assert torch.equal(state.ask(), points)  # the same until it is answered
        order = list(range(len(points)))
        rng.shuffle(order)
        for index in order:
            state.tell(index, Evaluation(asked.true_cost(points[index])))
    end = state.end()
    assert end.evaluations == expected.evaluations
    assert torch.equal(end.points, expected.points)
    assert torch.equal(end.phi, expected.phi)
    assert (end.queries, end.curve) == (31, expected.curve)


@each_search
def test_other_points_than_asked_are_taken_as_told(quadratic: Callable[..., Any], search: SearchStrategy) -> None:
    """As of an earlier sitting on another processor: costs stay with the points that have them."""
    task = quadratic()
    state = search.begin(task, task.origin(), 31)
    while len(points := state.ask()):
        for index, point in enumerate(points):
            moved = point if len(state.points) == 0 else point + 0.01
            state.tell(index, Evaluation(task.true_cost(moved)), moved)
    end = state.end()
    costs = [each.cost for each in end.evaluations]
    assert [task.true_cost(point) for point in end.points] == costs
    assert end.cost == task.true_cost(end.phi)


@each_search
def test_points_that_are_given_up_cost_nothing(quadratic: Callable[..., Any], search: SearchStrategy) -> None:
    task = quadratic()
    state, given = search.begin(task, task.origin(), 31), 0
    while len(points := state.ask()):
        for index, point in enumerate(points):
            if given < 8 and state.points and index % 2:
                state.give_up(index)
                given += 1
            else:
                state.tell(index, Evaluation(task.true_cost(point)))
    assert state.end().queries == 31
    assert all(task.true_cost(p) == e.cost for p, e in zip(state.points, state.evaluations, strict=True))


@each_search
def test_what_is_known_is_not_asked(quadratic: Callable[..., Any], search: SearchStrategy) -> None:
    task = quadratic()
    start, other = task.origin(), task.origin() + 0.1
    known = [(point, Evaluation(task.true_cost(point))) for point in (other, start)]
    state, asked = search.begin(task, start, 31, known=known), 0
    while len(points := state.ask()):
        again = any(torch.equal(point, start) for point in points)
        assert not again or isinstance(search, NGOpt)  # nevergrad may ask for its best again
        for index, point in enumerate(points):
            state.tell(index, Evaluation(task.true_cost(point)))
            asked += 1
    assert asked == 29
    assert_refused(lambda: search.begin(task, start, 31, known=known[:1]), ValueError, "known", "1")


def test_a_search_that_broke_does_not_look_like_one_that_is_over(quadratic: Callable[..., Any]) -> None:
    task = quadratic()

    def batches(state: DirectState) -> Batches:
        yield state.start[None] + 1
        raise FloatingPointError("the loss is not finite")

    state = DirectState(task.origin(), 31, batches)
    for _ in range(2):
        state.ask()
        state.tell(0, Evaluation(1.0))
    with pytest.raises(FloatingPointError):
        state.ask()
    assert_refused(state.ask, RuntimeError)


def test_answers() -> None:
    told = Answers(Answer(torch.tensor([float(i)]), e) for i, e in enumerate((Evaluation(0.5), None, Evaluation(0.7))))
    assert told.costs.tolist() == [0.5, 0.7, 0.7]
    assert told.known.tolist() == [True, False, True]
    own = torch.tensor([[0.0 + 1e-12], [1.0], [2.5]], dtype=torch.float64)
    assert told.points_as(own).tolist() == [[0.0], [1.0], [2.0]]
    close = torch.tensor([[1e-60], [1.0 + 1e-12], [2.0]], dtype=torch.float64)
    assert told.points_as(close).tolist() == close.tolist()


def test_falls_are_new_minima() -> None:
    assert falls([3.0, 4.0, 2.0, 2.0, 1.0]) == ((1, 3.0), (3, 2.0), (5, 1.0))


def test_a_search_in_few_words_and_what_a_budget_makes_of_it() -> None:
    search = CMAES()
    least = search.least_queries(4)
    assert search.size(least, 4) == {"queries": least}
    names = (least - 1, "queries", "CMAES", "4", "phi", least)
    assert_refused(lambda: search.size(least - 1, 4), BudgetError, *names)
    assert search.identity() == {"search": repr(search)}
    assert CMAES(sigma0=0.7).identity() != search.identity()


def test_the_end_counts_what_was_told_of_the_open_batch(quadratic: Callable[..., Any]) -> None:
    task = quadratic()
    state = RandomSearch().begin(task, task.origin(), 31)
    state.ask()
    state.tell(0, Evaluation(2.0))
    points = state.ask()
    assert len(points) > 2
    state.tell(2, Evaluation(1.0))
    state.give_up(0)
    end = state.end()
    assert torch.equal(end.phi, points[2])
    assert (end.queries, end.curve) == (2, ((1, 2.0), (2, 1.0)))
    assert torch.equal(end.points, torch.stack([task.origin(), points[2]]))
    assert torch.equal(state.ask(), points)
    assert state.quality() is None  # a direct search predicts nothing


def test_constraints_are_relative_to_the_start_and_known_once_it_is(quadratic: Callable[..., Any]) -> None:
    task = quadratic()
    start, other = task.origin(), task.origin() + 0.1

    def told(cost: float, size: float) -> Evaluation:
        return Evaluation(cost, also={"size": size})

    constraints = parse_constraints({"size": "<= start + 1"}, "distance")
    state = RandomSearch().begin(task, start, 31)
    state.subject_to(constraints)
    assert state.limits is None
    state = RandomSearch().begin(task, start, 31, known=[(other, told(0.1, 9.0)), (start, told(0.5, 4.0))])
    state.subject_to(())
    assert state.limits is None
    state.subject_to(constraints)
    assert state.limits is not None
    assert state.limits.texts() == {"size": "<= 5.0"}
    assert torch.equal(state.end().phi, start)  # the other is better, but too large
    state.subject_to(parse_constraints({"size": "<= 99"}, "distance"))
    assert state.limits.texts() == {"size": "<= 5.0"}
