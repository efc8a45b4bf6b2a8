"""A guarded search: what is kept of a whole run, from the model as it was trained, and what that changes on test."""

import math
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple

from metricopt_ext.evidence.experiment import State
from metricopt_ext.methods.guard import LINE, decide
from metricopt_ext.search.strategy import SearchResult
from metricopt_ext.tasks.metric import Evaluation

TRAINED = "pretrained"


class Candidate(NamedTuple):
    """A state that may be kept, with its evaluation on the data that the metric sees."""

    state: State
    evaluation: Evaluation


class Change(NamedTuple):
    """A difference of the test metric, positive if better, and its standard error, None if unknown."""

    value: float
    error: float | None


def guarded(
    starts: Mapping[str, Candidate],
    end: SearchResult,
    *,
    confidence: float,
    scale: float,
    change: Callable[[State, State], Change],
) -> tuple[State, dict[str, Any]]:
    """Return what the guard keeps, as `optimize_metric` does, and a record of its decision.

    Args:
        starts: The model as it was trained, `TRAINED`, if it was asked, and the start that the search began from.
        end: Where the search ended.
        confidence: How sure the guard must be, at least 0.5 and below 1.
        scale: How much the metric changes when the cost changes by 1.
        change: What going from one state to another changes on test.

    Returns:
        The state that was kept, and a record of plain data: ``kept``, its name; ``gain`` and the other terms of the
        guard's `Verdict` on the end (see `Decision`), in the metric's units; of the search's step, from its start to
        its end, whether it was ``accepted``, and its ``change`` on test with its ``error``; and ``whole``, of the whole
        run from `TRAINED` on: whether anything else was ``accepted``, the ``change`` on test of what was kept with its
        ``error``, and that of the ``best`` by the metric of start and end, kept or not. It is None if `TRAINED` is not
        among the starts.
    """
    *_, begun = starts
    task = starts[begun].state.task
    found = {"search": Candidate(State(task, end.phi), end.evaluation)}
    if end.line is not None:
        found = {LINE: Candidate(State(task, end.line.point), end.line.evaluation), **found}
    candidates = {**starts, **found}
    asked = {name: each.evaluation for name, each in candidates.items()}

    def gain_by_f(name: str) -> float:
        state = candidates[name].state
        known = state.task.adapter.model is starts[begun].state.task.adapter.model  # f is of this one
        return end.gain_over(state.phi) if known else math.inf

    decision = decide(asked, end.evaluations, confidence, gain_by_f, end.climbed)
    kept, verdict = decision.kept, decision.verdict

    @cache
    def between(before: str, after: str) -> Change:
        return change(candidates[before].state, candidates[after].state)

    step = between(begun, "search")
    record = {
        "kept": kept,
        "accepted": kept == "search",
        "gain": scale * verdict.gain,
        "chance": None if verdict.chance is None else scale * verdict.chance,
        "optimism": scale * verdict.optimism,
        "reliability": verdict.reliability,
        "candidates": verdict.candidates,
        "change": step.value,
        "error": step.error,
        "whole": None,
    }
    if TRAINED in starts:
        best = min((begun, "search"), key=lambda name: asked[name].cost)
        run, possible = between(TRAINED, kept), between(TRAINED, best)
        record["whole"] = {
            "accepted": kept != TRAINED,
            "change": run.value,
            "error": run.error,
            "best": possible.value,
            "best_error": possible.error,
        }
    return candidates[kept].state, record
