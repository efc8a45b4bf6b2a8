"""The driver of searches, and what it sends them: stand-ins, other points than asked, batches that are still open."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from helpers.asked import asking_of
from helpers.refusals import assert_refused
from metricopt_ext.adapters.start import Start
from metricopt_ext.search.asking import FAILED
from metricopt_ext.search.direct import CMAES, GuidedES, RandomSearch
from metricopt_ext.search.strategy import Answer, Answers, Batches, Begun, SearchStrategy
from metricopt_ext.search.trust_region import GuidedTrustRegion
from metricopt_ext.tasks.constraints import Limits, parse_constraints
from metricopt_ext.tasks.evaluation import Evaluation, Outcome

each_search = pytest.mark.parametrize(
    "search", [GuidedTrustRegion(), CMAES(), GuidedES(), RandomSearch()], ids=lambda search: type(search).__name__
)


@each_search
def test_other_points_than_asked_are_taken_as_told(quadratic: Callable[..., Any], search: SearchStrategy) -> None:
    """As of an earlier sitting on another processor: costs stay with the points that have them."""
    task = quadratic()
    begun = search.begin(task, Start(task.origin()), lambda: 31)
    asking = asking_of(begun.batches())
    while batch := asking.next_batch():
        batch = asking.placed([each.at.phi + (0.01 if each.id else 0) for each in batch])
        for trial in batch:
            asking.tell(trial.id, Evaluation(task.true_cost(trial.at.phi)))
    end = begun.end()
    costs = [each.cost for each in end.evaluations]
    assert [task.true_cost(point) for point in end.points] == costs
    assert end.cost == task.true_cost(end.phi)


def test_a_search_that_broke_does_not_look_like_one_that_is_over(quadratic: Callable[..., Any]) -> None:
    def algorithm(search: Begun) -> Batches:
        yield from search.ask(search.start[None] + 1)
        raise FloatingPointError("the loss is not finite")

    asking = asking_of(Begun(Start(quadratic().origin()), lambda: 31, (), algorithm).batches())
    for _ in range(2):
        (trial,) = asking.ask()
        asking.tell(trial.id, Evaluation(1.0))
    with pytest.raises(FloatingPointError):
        asking.ask()
    assert_refused(asking.ask, RuntimeError)


def test_what_is_told_again_must_be_the_same(quadratic: Callable[..., Any]) -> None:
    asking = asking_of(RandomSearch().begin(quadratic(), Start(quadratic().origin()), lambda: 9).batches())
    assert_refused(lambda: asking.tell(0, Evaluation(1.0)), ValueError, "0")  # nobody was asked yet
    for trial in (*asking.ask(), *asking.open()):
        assert_refused(lambda: asking.tell(0, None), ValueError, "0")  # the start's value is needed
        asking.tell(trial.id, Evaluation(1.0))
    first, second, third = asking.ask(3)
    for id, evaluation, others in (
        (first.id, Evaluation(0.5), (Evaluation(0.6), FAILED, None)),
        (second.id, FAILED, (Evaluation(0.6), None)),
        (third.id, None, (Evaluation(0.6), FAILED)),
    ):
        asking.tell(id, evaluation)
        asking.tell(id, evaluation)
        for other in others:
            assert_refused(lambda id=id, other=other: asking.tell(id, other), ValueError, str(id))
    assert asking.answer(second.id) == Evaluation(1.0, failed=True)  # the worst so far
    assert (asking.log.answered, asking.answer(third.id)) == (3, None)


def test_answers() -> None:
    evaluations = (Evaluation(0.5), None, Evaluation(0.7))
    told = Answers(Answer(Start(torch.tensor([float(i)])), each) for i, each in enumerate(evaluations))
    assert told.evaluations == [Evaluation(0.5), Evaluation(0.7), Evaluation(0.7)]
    assert Answers(told[1:2]).evaluations == []
    assert [evaluation for _, evaluation in told.evaluated] == [Evaluation(0.5), Evaluation(0.7)]
    own = torch.tensor([[0.0 + 1e-12], [1.0], [2.5]], dtype=torch.float64)
    assert told.points_as(own).tolist() == [[0.0], [1.0], [2.0]]
    close = torch.tensor([[1e-60], [1.0 + 1e-12], [2.0]], dtype=torch.float64)
    assert told.points_as(close).tolist() == close.tolist()


def test_the_end_counts_what_was_told_of_the_open_batch(quadratic: Callable[..., Any]) -> None:
    task = quadratic()
    begun = RandomSearch().begin(task, Start(task.origin()), lambda: 31)
    asking = asking_of(begun.batches())
    asking.tell(asking.ask()[0].id, Evaluation(2.0))
    trials = asking.ask(9)
    asking.tell(trials[2].id, Evaluation(1.0))
    asking.tell(trials[0].id, None)
    end = begun.end(asking.told())
    assert torch.equal(end.phi, trials[2].at.phi)
    assert (end.queries, [each.cost for each in end.evaluations]) == (2, [2.0, 1.0])
    assert torch.equal(end.points, torch.stack([task.origin(), trials[2].at.phi]))
    assert [each.id for each in asking.batch[:9]] == [each.id for each in trials]
    assert begun.quality() is None  # a direct search predicts nothing


def test_the_end_respects_the_constraints(quadratic: Callable[..., Any]) -> None:
    task = quadratic()
    start, other = task.origin(), task.origin() + 0.1

    def told(cost: float, size: float) -> Evaluation:
        return Evaluation(cost, outcomes={"size": Outcome(size)})

    known = [(other, told(0.1, 9.0)), (start, told(0.5, 4.0))]
    begun = RandomSearch().begin(task, Start(start), lambda: 31, known=known)
    assert torch.equal(begun.end().phi, other)
    begun.limits = Limits.of(parse_constraints({"size": "<= start + 1"}, "distance"), known[1][1])
    assert torch.equal(begun.end().phi, start)  # the other is better, but too large
