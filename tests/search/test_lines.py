"""The search along a line: its Gaussian process in closed form, what it asks, and that it finds a known optimum."""

import math
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch

from metricopt_ext.adapters.start import Start, StartLine
from metricopt_ext.search.stages import (
    CANDIDATES,
    FIRST,
    NEAR,
    Asked,
    OnLine,
    Point,
    beside,
    best_known,
    first_times,
    fit,
    line_search,
    next_time,
)
from metricopt_ext.tasks.evaluation import Evaluation

Cost = Callable[[float], float]


def line(*first: float, low: float = -2.5, high: float = 2.5) -> StartLine:
    return StartLine(
        lambda t: Start(torch.tensor([t], dtype=torch.float64)), low, high, first or beside(low, high, 0.0)
    )


def known(cost: Cost, *times: float, noise: float | None = None) -> list[OnLine]:
    return [OnLine(t, Point("line", line().at(t), Evaluation(cost(t), noise=noise))) for t in times]


def searched(cost: Cost, queries: int) -> list[OnLine]:
    """Search from 0, where the cost is known; returns what is known then."""

    def ask(starts: list[Start]) -> Asked:
        asked.extend(starts)
        yield starts
        return [Point("line", each, Evaluation(cost(float(each.phi)))) for each in starts]

    found, asked = known(cost, 0.0), list[Start]()
    assert sum(map(len, line_search(line(), queries, found, ask))) == queries == len(asked)
    return found


def wavy(t: float) -> float:
    return math.sin(2 * t) + 0.3 * t


def test_next_is_where_mean_less_deviation_is_least() -> None:
    told = known(wavy, -2.0, -0.5, 0.0, 0.7, 1.9)
    f, grid = fit(line(), told), torch.linspace(-2.5, 2.5, CANDIDATES, dtype=torch.float64)
    assert f is not None
    bound = {float(t): float(f.members(t[None, None]) - f.std(t[None, None])) for t in grid}
    free = {t: b for t, b in bound.items() if all(abs(t - other) >= NEAR * 5 for other in (each.t for each in told))}
    assert next_time(line(), told) == min(free, key=lambda t: free[t])


def test_what_is_known_is_not_asked_again() -> None:
    """Next to the optimum of a bowl, whose neighbours all look good."""
    times = sorted(each.t for each in searched(lambda t: (t - 0.3) ** 2, 20))
    assert min(b - a for a, b in pairwise(times)) >= NEAR * 5 - 1e-12
    assert len(times) == 21


@pytest.mark.parametrize("optimum", [-2.0, -0.8, 0.1, 1.2, 2.2])
def test_the_optimum_of_a_bowl_is_found_within_six_queries(optimum: float) -> None:
    """Within a tenth of an adjustment; the grid's own step is half of that."""
    found = searched(lambda t: (t - optimum) ** 2, 6)
    assert abs(found[best_known(line(), found)].t - optimum) < 0.1
    assert len(found) == 7


def test_both_sides_come_first_unless_they_are_known_or_outside() -> None:
    step = FIRST * 5
    assert first_times(line(), known(wavy, 0.0)) == [step, -step]
    assert first_times(line(), known(wavy, 0.0, step + 0.09)) == [-step]
    assert first_times(line(low=0.0, high=5.0), known(wavy, 0.0)) == [step]
    assert first_times(line(2.5, 2.5, 4.0, low=0.0, high=5.0), known(wavy, 0.0)) == [2.5, 4.0]
    assert list(line_search(line(), 0, [], lambda starts: pytest.fail("asked"))) == []


def test_what_nobody_answers_ends_it() -> None:
    def ask(starts: list[Start]) -> Asked:
        yield starts
        return [None] * len(starts)

    assert len(list(line_search(line(), 5, known(wavy, 0.0), ask))) == 1


def test_a_flat_metric_is_asked_far_from_what_is_known() -> None:
    found = searched(lambda t: 0.25, 4)
    assert fit(line(), found) is None
    assert [abs(each.t) for each in found[3:]] == [2.5, 2.5]
    assert best_known(line(), found) == 0


def test_noise_that_repeats_show_is_the_least_of_f() -> None:
    """A single lucky evaluation far from a bowl's optimum is not its end."""
    cost: Cost = lambda t: (t - 0.5) ** 2 - (2.0 if t == -1.5 else 0.0)  # noqa: E731
    times = (0.0, -2.5, -2.0, -1.5, -1.0, -0.5, 0.5, 1.0, 1.5, 2.0)
    told = known(cost, *times, noise=1.5)
    f = fit(line(), told)
    assert f is not None
    plain = fit(line(), known(lambda t: (t - 0.5) ** 2, *times))
    assert plain is not None
    assert f.noise_std(f.points[0]) >= 1.5
    assert f.noise_std(f.points[0]) > 2 * plain.noise_std(f.points[0])
