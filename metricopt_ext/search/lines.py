"""Search along a line: t in an interval, asked where a Gaussian process of one variable may have its least cost.

What lies at t is the caller's: phi = start + t v, the strength of an adjustment, or a setting of inference.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from metricopt_ext.search.strategy import Batches, SearchResult, SearchState, falls
from metricopt_ext.tasks.evaluation import Evaluation, noise_of
from metricopt_ext.utils.checks import check_integer
from metricopt_ext.value.gp import GPLearner, GPValueFunction, Spectrum

# What is known on a line: t, and the metric's evaluation there.
Known = Sequence[tuple[float, Evaluation]]

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


class LineState(SearchState):
    """A search along a line that has begun; its points are t, ``1`` each, float64.

    1. Ask the first t, by default a tenth of the interval to each side of the start, unless something is known there.
    2. Fit f, a Gaussian process, to all that is known. Ask where its mean less its standard deviation is least (the
       lower confidence bound; Srinivas et al., 2010). Go on with 2.

    Args:
        interval: Least and largest t.
        queries: Evaluations that it may ask for besides those that are known, at least 0.
        known: What is known, in any order, the start among it; without any, the start is asked first.
        start: Where the line begins, in the interval.
        first: The t that are asked first; None for both sides of the start.

    Raises:
        ValueError: The interval is empty or infinite, the start or what is known is not in it, what is known lacks the
            start, or ``queries`` is no integer of at least 0.

    Examples:
        >>> line = LineState((0.0, 2.0), queries=6)
        >>> while len(asked := line.ask()):
        ...     for index, t in enumerate(asked[:, 0].tolist()):
        ...         line.tell(index, Evaluation((t - 1.3) ** 2))
        >>> abs(float(line.end().phi) - 1.3) < 0.1
        True
    """

    def __init__(
        self,
        interval: tuple[float, float],
        queries: int,
        known: Known = (),
        *,
        start: float = 0.0,
        first: Sequence[float] | None = None,
    ) -> None:
        check_integer(0, queries=queries)
        self.interval, self._first = _checked(interval, [start, *(first or ()), *(t for t, _ in known)]), first
        known = sorted(known, key=lambda each: each[0] != start)  # the start first, as in any search
        points = [(torch.tensor([t], dtype=torch.float64), evaluation) for t, evaluation in known]
        super().__init__(torch.tensor([start], dtype=torch.float64), len(known) + queries, points)

    @property
    def known(self) -> Known:
        """What is known by now."""
        return [(float(t), evaluation) for t, evaluation in zip(self.points, self.evaluations, strict=True)]

    def batches(self) -> Batches:
        """Ask for the start unless it is known, for the first t, and then where f may be least."""
        if not self.points and self.left:
            yield self.start[None]
        first = first_times(self.interval, float(self.start), self.known, self._first)
        if self.left and first:
            yield _column(first[: self.left])
        while self.left:
            yield _column([next_time(self.interval, self.known)])

    def end(self) -> SearchResult:
        """Return the best of what is known, by f; see `best_known`."""
        known = [*self.known, *((float(t), evaluation) for t, evaluation in self.answered())]
        at = best_known(self.interval, known)
        evaluations = tuple(evaluation for _, evaluation in known)
        points = _column([t for t, _ in known])
        return SearchResult(
            points[at], evaluations[at], evaluations, falls([e.cost for e in evaluations]), points, len(points)
        )


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


def _checked(interval: tuple[float, float], times: Sequence[float]) -> tuple[float, float]:
    low, high = interval
    if not -math.inf < low < high < math.inf:
        raise ValueError(f"the interval is {interval}; it must be two finite numbers, the least first")
    for t in times:
        if not low <= t <= high:
            raise ValueError(f"t is {t}, outside the line's interval {interval}; widen it, or leave that t out")
    return low, high
