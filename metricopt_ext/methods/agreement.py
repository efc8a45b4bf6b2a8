"""Whether ranks that share a search find the same value of the same model."""

import math
from collections.abc import Sequence
from itertools import chain

from metricopt_ext.errors import RankError
from metricopt_ext.runtime.identity import ROUNDING
from metricopt_ext.tasks.evaluation import Evaluation
from metricopt_ext.tasks.metric import Metric

CHANCE = 1e-6  # how unlikely a difference of noisy values must be to be one of data


def alike(metric: Metric, found: Sequence[Evaluation]) -> Evaluation:
    """Return the first rank's evaluation of a model, if all ranks found the same.

    Raises:
        RankError: One did not.
    """
    first, *others = found
    for number, other in enumerate(others, 1):
        if not _agree(metric, first, other):
            raise RankError(
                f"metric {metric.name!r} is {_shown(metric, first)} on rank 0, but {_shown(metric, other)} on rank"
                f" {number}, for the same model: each rank's metric must see all the data (no shard of it, no"
                " DistributedSampler), and draw the same at random"
            )
    return first


def _agree(metric: Metric, a: Evaluation, b: Evaluation) -> bool:
    """Whether evaluations of one model are the same but for rounding, and for the noise that repeats show."""

    def close(cost: float, other: float) -> bool:
        smallest = 1e-9 if metric.bounds is None else 1e-6 * metric.scale  # single precision, of what is close to 0
        return math.isclose(metric.to_value(cost), metric.to_value(other), rel_tol=ROUNDING, abs_tol=smallest)

    if metric.repeats == 1:
        values, others = ((each.cost, *(each.halves or ()), *chain(*each.pairs)) for each in (a, b))
        also, of_other = a.also or {}, b.also or {}
        same = len(values) == len(others) and also.keys() == of_other.keys() and all(map(close, values, others))
        return same and all(math.isclose(also[n], of_other[n], rel_tol=ROUNDING, abs_tol=1e-9) for n in also)
    spread = math.hypot(a.noise or 0.0, b.noise or 0.0)
    if close(a.cost, b.cost) or not spread:
        return close(a.cost, b.cost)
    from scipy.special import stdtr  # of Student's t distribution

    return bool(2 * stdtr(2 * (metric.repeats - 1), -abs(a.cost - b.cost) / spread) > CHANCE)


def _shown(metric: Metric, evaluation: Evaluation) -> str:
    """Return an evaluation in the metric's own units."""
    halves = [f"{metric.to_value(half):.6g}" for half in evaluation.halves or ()]
    return f"{metric.to_value(evaluation.cost):.6g}" + (f" (halves {', '.join(halves)})" if halves else "")
