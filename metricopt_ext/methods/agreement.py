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
                f"metric {metric.name!r} is {_shown(first)} on rank 0, but {_shown(other)} on rank"
                f" {number}, for the same model: each rank's metric must see all the data (no shard of it, no"
                " DistributedSampler), and draw the same at random"
            )
    return first


def _agree(metric: Metric, a: Evaluation, b: Evaluation) -> bool:
    """Whether evaluations of one model are the same but for rounding, and for the noise that repeats show."""

    def close(value: float, other: float) -> bool:
        smallest = (
            1e-9 if metric.bounds is None else 1e-6 * (metric.bounds[1] - metric.bounds[0])
        )  # single precision, of what is close to 0
        return math.isclose(value, other, rel_tol=ROUNDING, abs_tol=smallest)

    if metric.repeats == 1:
        values, others = ((each.value, *chain(*each.pairs)) for each in (a, b))
        also, of_other = a.also, b.also
        same = len(values) == len(others) and also.keys() == of_other.keys() and all(map(close, values, others))
        return same and all(math.isclose(also[n], of_other[n], rel_tol=ROUNDING, abs_tol=1e-9) for n in also)
    spread = math.hypot(a.noise or 0.0, b.noise or 0.0)
    if close(a.value, b.value) or not spread:
        return close(a.value, b.value)
    from scipy.special import stdtr  # of Student's t distribution

    return bool(2 * stdtr(2 * (metric.repeats - 1), -abs(a.value - b.value) / spread) > CHANCE)


def _shown(evaluation: Evaluation) -> str:
    halves = [f"{half:.6g}" for half in chain(*evaluation.pairs[:1])]
    return f"{evaluation.value:.6g}" + (f" (halves {', '.join(halves)})" if halves else "")
