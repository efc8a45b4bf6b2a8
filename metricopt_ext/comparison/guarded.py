"""What a guarded run came to on test: the step of its search, and the whole of it from the model as it was trained."""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

from metricopt_ext.methods.result import Result

TRAINED = "pretrained"  # what files and tables call the model as it was trained, a result's "start"


class Change(NamedTuple):
    """A difference of the test metric, positive if better, and its standard error, None if unknown."""

    value: float
    error: float | None


def record_of(result: Result, *, maximize: bool, change: Callable[[str, str], Change]) -> dict[str, Any]:
    """Return a record of what the guard decided.

    Args:
        result: The run's.
        maximize: Whether higher is better.
        change: What going from one of the candidates to another changes on test, by their names.

    Returns:
        Plain data: ``kept``, the name of what was kept, and by how much it breaks each constraint that it breaks
        (``broken``); ``gain`` and the other terms of the guard's `Verdict` on the
        end, in the metric's units; of the search's step, from its start to its end, whether it, or a part of it, was
        ``accepted``, and its ``change`` on test with its ``error``; ``end``, the change on test from the model as it
        was trained to the search's end; and ``whole``, of the whole run from that model: whether anything else was
        ``accepted``, the ``change`` on test of what was kept with its ``error``, and that of the ``best`` by the
        metric of start and end, kept or not.
    """
    verdict, started = result.verdict, result.started_at

    better = max if maximize else min
    known = [name for name in (started, "search") if name in result.evaluations]  # not what violates a constraint
    best = better(known or ["start"], key=lambda name: result.evaluations[name].value)
    between = cache(change)
    step, run, possible = between(started, "search"), between("start", result.chosen), between("start", best)
    return {
        "kept": TRAINED if result.chosen == "start" else result.chosen,
        "accepted": result.chosen in ("search", "part"),
        "broken": result.broken,
        "gain": verdict.gain,
        "chance": verdict.chance,
        "optimism": verdict.optimism,
        "reliability": verdict.reliability,
        "change": step.value,
        "error": step.error,
        "end": between("start", "search").value,
        "whole": {
            "accepted": result.chosen != "start",
            "change": run.value,
            "error": run.error,
            "best": possible.value,
            "best_error": possible.error,
        },
    }
