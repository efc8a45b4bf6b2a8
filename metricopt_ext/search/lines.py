"""Search along a line: t in an interval, asked where a Gaussian process of one variable may have its least cost.

What lies at t is the caller's: phi = start + t v, the strength of an adjustment, or a setting of inference.
"""

import math
from collections.abc import Generator, Sequence

import torch
from torch import Tensor

from metricopt_ext.tasks.evaluation import Evaluation, noise_of
from metricopt_ext.utils.checks import check_integer
from metricopt_ext.value.gp import GPLearner, GPValueFunction, Spectrum

# What is known on a line: t, and the metric's evaluation there.
Known = list[tuple[float, Evaluation]]

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


def line_search(
    interval: tuple[float, float],
    queries: int,
    known: Known,
    *,
    start: float = 0.0,
    first: Sequence[float] | None = None,
) -> Generator[list[float], Known, None]:
    """Search along a line: yield t to ask for, and be sent those that were answered, with the metric's evaluations.

    1. Ask the first t, by default a tenth of the interval to each side of the start, unless something is known there.
    2. Fit f, a Gaussian process, to all that is known. Ask where its mean less its standard deviation is least (the
       lower confidence bound; Srinivas et al., 2010). Go on with 2.

    Args:
        interval: Least and largest t.
        queries: How many may be answered besides those that are known, at least 0.
        known: What is known, in any order; without any, the start is asked first. What is answered is added.
        start: Where the line begins, in the interval.
        first: The t that are asked first; None for both sides of the start.

    Raises:
        ValueError: The interval is empty or infinite, a t is not in it, or ``queries`` is no integer of at least 0.

    Examples:
        >>> known = []
        >>> asking = line_search((0.0, 2.0), 20, known)
        >>> asked = next(asking)
        >>> while len(known) < 6:
        ...     asked = asking.send([(t, Evaluation((t - 1.3) ** 2)) for t in asked])
        >>> abs(known[best_known((0.0, 2.0), known)][0] - 1.3) < 0.2
        True
    """
    check_integer(0, queries=queries)
    _check(interval, [start, *(first or ()), *(t for t, _ in known)])
    known.sort(key=lambda each: each[0] != start)  # the start first, as in any search
    most = len(known) + queries
    if not known and queries:
        known += yield [start]
    times = first_times(interval, start, known, first)
    if len(known) < most and times:
        known += yield times[: most - len(known)]
    while len(known) < most:
        known += yield [next_time(interval, known)]


def first_times(
    interval: tuple[float, float], start: float, known: Known, first: Sequence[float] | None = None
) -> list[float]:
    """Return which t to ask first, in the interval, where nothing is known yet: by default both sides of the start."""
    low, high = interval
    step = FIRST * (high - low)
    sides = (start + step, start - step) if first is None else first
    there, chosen = [t for t, _ in known], list[float]()
    for t in sides:
        if low <= t <= high and all(abs(t - other) > step / 5 for other in (*there, *chosen)):
            chosen.append(t)
    return chosen


def next_time(interval: tuple[float, float], known: Known) -> float:
    """Return the t in an interval at which f's mean less its standard deviation is least, and nothing is known yet.

    While the metric does not vary, that is the t that is furthest from all that is known.

    Args:
        interval: Least and largest t.
        known: What is known, one at least.
    """
    grid = torch.linspace(*interval, CANDIDATES, dtype=torch.float64)
    apart = (grid[:, None] - torch.tensor([t for t, _ in known], dtype=torch.float64)).abs().amin(1)
    f = fit(interval, known)
    bound = -apart if f is None else f.members(grid[:, None])[:, 0] - f.std(grid[:, None])
    bound[apart < NEAR * (interval[1] - interval[0])] = math.inf
    return float(grid[bound.argmin()])


def best_known(interval: tuple[float, float], known: Known) -> int:
    """Return the index of what is known with the least f, which smooths luck over neighbours; the first of equals."""
    f = fit(interval, known)
    return 0 if f is None else int(f.members(_column([t for t, _ in known])).argmin())


def fit(interval: tuple[float, float], known: Known) -> GPValueFunction | None:
    """Return a Gaussian process of t, ``n x 1``, conditioned on what is known; None if the metric does not vary there.

    Mean and amplitude are in closed form, length scale and noise are those of the highest marginal likelihood times
    prior (`GPLearner`), the noise no less than repeats of an evaluation show.
    """
    cost = torch.tensor([evaluation.cost for _, evaluation in known], dtype=torch.float64)
    if cost.min() == cost.max():
        return None
    typical = TYPICAL * (interval[1] - interval[0])
    learner = GPLearner(typical / math.sqrt(2), Spectrum.flat(1), exponents=(0.0,))  # all directions are this one
    noise = noise_of([evaluation for _, evaluation in known])
    return learner(_column([t for t, _ in known]), cost, least_noise=noise)


def _column(times: Sequence[float]) -> Tensor:
    return torch.tensor(times, dtype=torch.float64)[:, None]


def _check(interval: tuple[float, float], times: Sequence[float]) -> None:
    low, high = interval
    if not -math.inf < low < high < math.inf:
        raise ValueError(f"the interval is {interval}; it must be two finite numbers, the least first")
    for t in times:
        if not low <= t <= high:
            raise ValueError(f"t is {t}, outside the line's interval {interval}; widen it, or leave that t out")
