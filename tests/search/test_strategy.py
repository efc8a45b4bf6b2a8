"""Searches asked and told by hand: stand-ins, other points than asked, what is known, and constraints."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from helpers.refusals import assert_refused
from metricopt_ext.search.direct import CMAES, GuidedES
from metricopt_ext.search.random_search import RandomSearch
from metricopt_ext.search.strategy import Answer, Answers, Batches, DirectState, SearchStrategy
from metricopt_ext.search.trust_region import GuidedTrustRegion
from metricopt_ext.tasks.constraints import parse_constraints
from metricopt_ext.tasks.evaluation import Evaluation

each_search = pytest.mark.parametrize(
    "search", [GuidedTrustRegion(), CMAES(), GuidedES(), RandomSearch()], ids=lambda search: type(search).__name__
)


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
