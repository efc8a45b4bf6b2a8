"""Statistics over seeds: the mean of paired differences with its interval, in numbers and in words."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np


class Interval(NamedTuple):
    """A mean with the ends of its confidence interval."""

    mean: float
    low: float
    high: float


def paired_interval(differences: Any, level: float = 0.95) -> Interval:
    """Return the mean of paired differences and the ends of its Student-t interval (NaN for a single pair).

    Args:
        differences: One number per seed, ``n``.
        level: Confidence level.
    """
    from scipy.stats import ttest_1samp  # takes a second

    values = np.asarray(differences, dtype=float)
    mean = float(values.mean())
    if len(values) < 2:
        return Interval(mean, math.nan, math.nan)
    if np.ptp(values) == 0:  # of which SciPy warns
        return Interval(mean, mean, mean)
    low, high = ttest_1samp(values, 0).confidence_interval(level)
    return Interval(mean, float(low), float(high))


def chance_in_words(interval: Interval) -> str:
    """Say of a gain's 95% interval over seeds whether it is significant."""
    if math.isnan(interval.low):
        return "from one seed, so its significance is unknown"
    return (
        "significant at 5%"
        if interval.low > 0
        else "a loss, significant at 5%"
        if interval.high < 0
        else "not significant at 5%"
    )


def spread(values: Sequence[float]) -> str:
    """Format mean and standard deviation over seeds."""
    mean = f"{np.mean(values):.4f}"
    return mean if len(values) < 2 else f"{mean} ±{np.std(values, ddof=1):.4f}"


def standard_error(values: Sequence[float]) -> float:
    """Return the standard error of a mean over seeds, 0 for a single seed."""
    return float(np.std(values, ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else 0.0
