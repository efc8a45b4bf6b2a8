"""The search along a line: its Gaussian process in closed form, what it asks, and that it finds a known optimum."""

import math
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch

from metricopt_ext.search.lines import (
    CANDIDATES,
    FIRST,
    NEAR,
    LineState,
    first_times,
    fit,
    next_time,
)
from metricopt_ext.tasks.evaluation import Evaluation

INTERVAL = (-2.5, 2.5)
Cost = Callable[[float], float]


def known(cost: Cost, *times: float, noise: float | None = None) -> list[tuple[float, Evaluation]]:
    return [(t, Evaluation(cost(t), None, noise)) for t in times]


def searched(cost: Cost, queries: int, *times: float, interval: tuple[float, float] = INTERVAL) -> LineState:
    times = times or (0.0,)
    line = LineState(interval, queries, known(cost, *times), start=times[0])
    while len(asked := line.ask()):
        for index, t in reversed(list(enumerate(asked[:, 0].tolist()))):  # any order will do
            line.tell(index, Evaluation(cost(t)))
    return line


def wavy(t: float) -> float:
    return math.sin(2 * t) + 0.3 * t


def test_next_is_where_mean_less_deviation_is_least() -> None:
    told = known(wavy, -2.0, -0.5, 0.0, 0.7, 1.9)
    f, grid = fit(INTERVAL, told), torch.linspace(*INTERVAL, CANDIDATES, dtype=torch.float64)
    assert f is not None
    bound = {float(t): float(f.members(t[None, None]) - f.std(t[None, None])) for t in grid}
    free = {t: b for t, b in bound.items() if all(abs(t - other) >= NEAR * 5 for other, _ in told)}
    assert next_time(INTERVAL, told) == min(free, key=lambda t: free[t])


def test_what_is_known_is_not_asked_again() -> None:
    """Next to the optimum of a bowl, whose neighbours all look good."""
    line = searched(lambda t: (t - 0.3) ** 2, 20)
    times = sorted(float(t) for t in line.points)
    assert min(b - a for a, b in pairwise(times)) >= NEAR * 5 - 1e-12
    assert len(times) == 21


@pytest.mark.parametrize("optimum", [-2.0, -0.8, 0.1, 1.2, 2.2])
def test_the_optimum_of_a_bowl_is_found_within_six_queries(optimum: float) -> None:
    """Within a tenth of an adjustment; the grid's own step is half of that."""
    line = searched(lambda t: (t - optimum) ** 2, 6)
    assert abs(float(line.end().phi) - optimum) < 0.1
    assert line.end().queries == 7


def test_both_sides_come_first_unless_they_are_known_or_outside() -> None:
    step = FIRST * 5
    assert first_times(INTERVAL, 0.0, known(wavy, 0.0)) == [step, -step]
    assert first_times(INTERVAL, 0.0, known(wavy, 0.0, step + 0.09)) == [-step]
    assert first_times((0.0, 5.0), 0.0, known(wavy, 0.0)) == [step]
    assert first_times((0.0, 5.0), 0.0, known(wavy, 0.0), first=(2.5, 2.5, 4.0)) == [2.5, 4.0]
    assert LineState(INTERVAL, 0).ask().tolist() == []
    line = LineState(INTERVAL, 3)
    assert line.ask().tolist() == [[0.0]]
    line.tell(0, Evaluation(1.0))
    assert line.ask().tolist() == [[step], [-step]]


def test_a_flat_metric_is_asked_far_from_what_is_known() -> None:
    line = searched(lambda t: 0.25, 4)
    assert fit(INTERVAL, line.known) is None
    assert [abs(float(t)) for t in line.points[3:]] == [2.5, 2.5]
    assert line.end().phi.tolist() == [0.0]


def test_noise_that_repeats_show_is_the_least_of_f() -> None:
    """A single lucky evaluation far from a bowl's optimum is not its end."""
    cost: Cost = lambda t: (t - 0.5) ** 2 - (2.0 if t == -1.5 else 0.0)  # noqa: E731
    times = (0.0, -2.5, -2.0, -1.5, -1.0, -0.5, 0.5, 1.0, 1.5, 2.0)
    told = known(cost, *times, noise=1.5)
    f = fit(INTERVAL, told)
    assert f is not None
    assert f.noise_std >= 1.5
    assert f.noise_std > 2 * fit(INTERVAL, known(lambda t: (t - 0.5) ** 2, *times)).noise_std  # type: ignore[union-attr]
