"""Search along a line: t in an interval, asked where a Gaussian process of one variable may have its least cost.

What lies at t is the caller's: phi = start + t v, the strength of an adjustment, or a setting of inference.
"""

import math
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from metricopt_ext.adapters.start import Start, StartLine
from metricopt_ext.tasks.evaluation import Evaluation, noise_of
from metricopt_ext.value.gp import GPLearner, GPValueFunction, Spectrum

# The first two are asked a tenth of the interval to each side of the start: half of an adjustment of [-2.5, 2.5].
# Further out a metric is often ruined, and tells nothing of where it is best.
FIRST = 1 / 10

# The GP's typical distance, a tenth of the interval: its prior length scale is then a fifth, as of a metric that bends
# a few times at most.
TYPICAL = 1 / 10

# Candidates for the next t, evenly spaced: a step is 1% of the interval, less than what a few queries can tell apart.
CANDIDATES = 101

# What is nearer to a known t than this share of the interval is known already.
NEAR = 1 / 250


class OnLine(NamedTuple):
    """A start that lies on a line, and what the metric is there."""

    t: float
    start: Start
    evaluation: Evaluation


# What yields starts that the metric is asked for, and returns its evaluations: None of those that were given up.
Asked = Generator[list[Start], Any, list[Evaluation | None]]


def line_search(
    line: StartLine, queries: int, known: list[OnLine], ask: Callable[[list[Start]], Asked]
) -> Generator[list[Start], Any, None]:
    """Search along a line.

    1. Ask for its ``first`` t, unless something is known nearby.
    2. Fit f, a Gaussian process, to all that is known. Ask where its mean less its standard deviation is least (the
       lower confidence bound; Srinivas et al., 2010). Go on with 2, until nothing that was asked for is answered.

    Args:
        line: The line.
        queries: How many may be answered besides those that are known, at least 0.
        known: What is known on it, the start of the search first; what is answered is added.
        ask: Asks for starts.
    """
    most = len(known) + queries
    times = first_times(line, known)[:queries]
    while len(known) < most:
        times = times or [next_time(line, known)]
        starts = [line.at(t) for t in times]
        found = yield from ask(starts)
        told = zip(times, starts, found, strict=True)
        answered = [OnLine(t, start, evaluation) for t, start, evaluation in told if evaluation is not None]
        if not answered:
            return
        known += answered
        times = []


def first_times(line: StartLine, known: Sequence[OnLine]) -> list[float]:
    """Return which t are asked first: the line's, where nothing is known yet."""
    apart, chosen = FIRST * (line.high - line.low) / 5, [each.t for each in known]
    for t in line.first:
        if all(abs(t - other) > apart for other in chosen):
            chosen.append(t)
    return chosen[len(known) :]


def beside(low: float, high: float, t: float) -> tuple[float, ...]:
    """Return what is asked first on both sides of a t, as far as it is in an interval."""
    step = FIRST * (high - low)
    return tuple(side for side in (t + step, t - step) if low <= side <= high)


def next_time(line: StartLine, known: Sequence[OnLine]) -> float:
    """Return the t on a line at which f's mean less its standard deviation is least, and nothing is known yet.

    While the metric does not vary, that is the t that is furthest from all that is known.

    Args:
        line: The line.
        known: What is known, one at least.
    """
    grid = torch.linspace(line.low, line.high, CANDIDATES, dtype=torch.float64)[:, None]
    apart = (grid - _column(known).T).abs().amin(1)
    f = fit(line, known)
    bound = -apart if f is None else f.members(grid)[:, 0] - f.std(grid)
    bound[apart < NEAR * (line.high - line.low)] = math.inf
    return float(grid[bound.argmin()])


def best_known(line: StartLine, known: Sequence[OnLine]) -> int:
    """Return the index of what is known with the least f, which smooths luck over neighbours; the first of equals."""
    f = fit(line, known)
    return 0 if f is None else int(f.members(_column(known)).argmin())


def fit(line: StartLine, known: Sequence[OnLine]) -> GPValueFunction | None:
    """Return a Gaussian process of t, ``n x 1``, conditioned on what is known; None if the metric does not vary there.

    Mean and amplitude are in closed form, length scale and noise are those of the highest marginal likelihood times
    prior (`GPLearner`), the noise no less than repeats of an evaluation show.
    """
    cost = torch.tensor([each.evaluation.cost for each in known], dtype=torch.float64)
    if cost.min() == cost.max():
        return None
    typical = TYPICAL * (line.high - line.low)
    learner = GPLearner(typical / math.sqrt(2), Spectrum.flat(1), exponents=(0.0,))  # all directions are this one
    noise = noise_of([each.evaluation for each in known])
    return learner(_column(known), cost, least_noise=noise)


def _column(known: Sequence[OnLine]) -> Tensor:
    return torch.tensor([each.t for each in known], dtype=torch.float64)[:, None]
