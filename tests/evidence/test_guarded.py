"""A guarded run by hand: what is kept, and what its record says of the search's step and of the whole run."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from metricopt_ext.evidence.experiment import State
from metricopt_ext.evidence.guarded import TRAINED, Candidate, Change, guarded
from metricopt_ext.methods.guard import judge
from metricopt_ext.search.strategy import SearchResult
from metricopt_ext.tasks.metric import Evaluation

# Less than about 1 may be chance: the halves of each visited point are so far away from it.
VISITED = tuple(Evaluation(10.0 * i, (10.0 * i + 1, 10.0 * i - 1)) for i in range(11))
HEIGHTS = {TRAINED: 0.0, "prior": 3.0, "search": 7.0}  # on test, as phi


def candidate(task: Any, name: str, cost: float) -> Candidate:
    return Candidate(State(task, torch.tensor([HEIGHTS[name]])), Evaluation(cost, (cost, cost)))


def change(before: State, after: State) -> Change:
    """What is tested is phi; the error is 1, and 10 more between two models."""
    return Change(float(after.phi - before.phi), 1.0 + 10 * (before.task is not after.task))


def end(cost: float, promise: float = 100.0) -> SearchResult:
    """f's gain over another point is twice this promise, times the distance."""
    found = candidate(None, "search", cost)
    return SearchResult(
        phi=found.state.phi,
        curve=(),
        queries=12,
        evaluation=found.evaluation,
        f=SimpleNamespace(mean=lambda phi: -promise * phi[:, 0], cost_std=torch.tensor(2.0)),
        points=torch.zeros(11, 1),
        evaluations=VISITED,
        predicted=torch.zeros(0, 2),
        widened=1.0,
    )


@pytest.mark.parametrize(
    ("begun", "ended", "kept", "run", "best"),
    [
        (50.0, 0.0, "search", 7.0, 7.0),
        (50.0, 49.9, "search", 7.0, 7.0),
        (50.0, 50.1, "search", 7.0, 3.0),  # f, which decides between start and end, has no objection
        (99.9, 99.8, TRAINED, 0.0, 7.0),
        (99.9, 0.0, "search", 7.0, 7.0),
        (50.0, 60.0, "prior", 3.0, 3.0),  # unless the loss is beyond chance
        (99.9, 120.0, TRAINED, 0.0, 3.0),
    ],
)
def test_a_whole_run_goes_from_the_model_as_it_was_trained(
    quadratic: Callable[..., Any], begun: float, ended: float, kept: str, run: float, best: float
) -> None:
    trained, started = quadratic(), quadratic()  # two models: the start has other buffers
    starts = {TRAINED: candidate(trained, TRAINED, 100.0), "prior": candidate(started, "prior", begun)}
    state, record = guarded(starts, end(ended), confidence=0.84, scale=2.0, change=change)
    assert record["kept"] == kept
    assert state.task is (trained if kept == TRAINED else started)
    assert float(state.phi) == HEIGHTS[kept]
    before = starts[TRAINED if kept == TRAINED or begun > 99 else "prior"].evaluation
    verdict = judge(before, end(ended).evaluation, VISITED)  # f has no objection
    assert [record[name] for name in ("gain", "chance", "optimism")] == [
        2 * verdict.gain,
        2 * verdict.chance,
        2 * verdict.optimism,
    ]
    assert (record["accepted"], record["change"], record["error"]) == (kept == "search", 4.0, 1.0)
    assert record["whole"] == {
        "accepted": kept != TRAINED,
        "change": run,
        "error": 1.0 if kept == TRAINED else 11.0,
        "best": best,
        "best_error": 11.0,
    }


@pytest.mark.parametrize(("promise", "accepted"), [(-0.1, False), (10.0, True)])
def test_f_is_asked_about_points_of_its_own_model(
    quadratic: Callable[..., Any], promise: float, accepted: bool
) -> None:
    """The gain over the start, 50, counts as no more than 8 times the promise; of another model f knows nothing."""
    other = candidate(quadratic(), TRAINED, 100.0)
    for begun, kept in ((50.0, "search" if accepted else "prior"), (99.9, "search")):
        starts = {TRAINED: other, "prior": candidate(quadratic(), "prior", begun)}
        _, record = guarded(starts, end(0.0, promise), confidence=0.84, scale=1.0, change=change)
        assert record["kept"] == kept
    task = quadratic()
    starts = {TRAINED: candidate(task, TRAINED, 100.0), "prior": candidate(task, "prior", 99.9)}
    _, record = guarded(starts, end(0.0, promise), confidence=0.84, scale=1.0, change=change)
    assert record["kept"] == ("search" if accepted else TRAINED)


def test_a_search_from_the_model_as_it_was_trained_is_a_whole_run(quadratic: Callable[..., Any]) -> None:
    starts = {TRAINED: candidate(quadratic(), TRAINED, 50.0)}
    for ended, accepted in ((0.0, True), (49.9, False)):
        _, record = guarded(starts, end(ended), confidence=0.84, scale=1.0, change=change)
        assert record["kept"] == ("search" if accepted else TRAINED)
        assert record["accepted"] == record["whole"]["accepted"] == accepted
        assert record["change"] == record["whole"]["best"] == 7.0
        assert record["whole"]["change"] == (7.0 if accepted else 0.0)


def test_without_the_trained_model_among_the_starts_there_is_no_whole_run(quadratic: Callable[..., Any]) -> None:
    starts = {"prior": candidate(quadratic(), "prior", 50.0)}
    state, record = guarded(starts, end(49.9), confidence=0.84, scale=1.0, change=change)
    assert (record["kept"], record["whole"]) == ("prior", None)
    assert float(state.phi) == HEIGHTS["prior"]
