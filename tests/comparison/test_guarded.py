"""What a guarded run came to on test, by hand: the search's step, and the whole run."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from metricopt_ext.adapters.start import Start
from metricopt_ext.comparison.guarded import TRAINED, Change, record_of
from metricopt_ext.methods.ending import guarded
from metricopt_ext.methods.guard import Began
from metricopt_ext.search.stages import Point
from metricopt_ext.search.strategy import SearchResult
from metricopt_ext.tasks.evaluation import Evaluation

# Less than about 1 may be chance: the halves of each visited point are so far away from it.
VISITED = tuple(Evaluation(10.0 * i, pairs=((10.0 * i + 1, 10.0 * i - 1),)) for i in range(11))
HEIGHTS = {"start": 0.0, "prior": 3.0, "search": 7.0}  # on test, as phi


def at(name: str) -> torch.Tensor:
    return torch.tensor([HEIGHTS[name], 0, 0, 0], dtype=torch.float64)


def run(task: Any, started: float, ended: float, *, elsewhere: bool) -> dict[str, Any]:
    """Record a run from 100 over a start, with other buffers or without, to an end."""
    task.adapter.model.register_buffer("seen", torch.zeros(1))
    other = Start(at("prior"), {"seen": torch.ones(1)} if elsewhere else {})
    evaluation = Evaluation(ended, pairs=((ended, ended),))
    end = SearchResult(
        phi=at("search"),
        queries=12,
        evaluation=evaluation,
        points=torch.zeros(11, 4),
        evaluations=VISITED,
        predicted=torch.zeros(0, 2),
        widened=1.0,
    )
    starts = {"start": Start(task.origin()), "prior": other}
    asked = {name: Evaluation(cost, pairs=((cost, cost),)) for name, cost in (("start", 100.0), ("prior", started))}
    best = min(asked, key=lambda name: asked[name].cost)
    points = [Point(name, start, asked[name]) for name, start in starts.items()]
    result = guarded(Began(task, starts, asked, best, "start", points, 0.84), end)

    def change(before: str, after: str) -> Change:
        """What is tested is phi's first coordinate; the error is 1, and 10 more between two models."""
        buffers = [result.start_of(name).tensors.keys() for name in (before, after)]
        return Change(HEIGHTS[after] - HEIGHTS[before], 1.0 + 10 * (buffers[0] != buffers[1]))

    record = record_of(result, maximize=False, change=change)
    verdict = result.verdict
    assert [record[name] for name in ("gain", "chance", "optimism")] == [
        verdict.gain,
        verdict.chance,
        verdict.optimism,
    ]
    return record


@pytest.mark.parametrize("elsewhere", [True, False])
@pytest.mark.parametrize(
    ("started", "ended", "kept", "whole", "best"),
    [
        (50.0, 0.0, "search", 7.0, 7.0),
        (50.0, 49.9, "search", 7.0, 7.0),
        (50.0, 50.1, "prior", 3.0, 3.0),
        (99.9, 99.8, "prior", 3.0, 7.0),
        (99.9, 0.0, "search", 7.0, 7.0),
        (99.9, 120.0, "prior", 3.0, 3.0),
    ],
)
def test_a_whole_run_goes_from_the_model_as_it_was_trained(
    quadratic: Callable[..., Any], started: float, ended: float, kept: str, whole: float, best: float, elsewhere: bool
) -> None:
    record = run(quadratic(), started, ended, elsewhere=elsewhere)
    between = 11.0 if elsewhere else 1.0
    assert record["kept"] == kept
    assert (record["accepted"], record["change"], record["error"]) == (kept == "search", 4.0, 1.0)
    assert record["end"] == 7.0
    assert record["whole"] == {
        "accepted": kept != TRAINED,
        "change": whole,
        "error": 1.0 if kept == TRAINED else between,
        "best": best,
        "best_error": between,
    }
