"""95% intervals of means over queries, which are taken as independent."""

import math

import numpy as np
import numpy.typing as npt

NORMAL = 1.959963984540054  # deviations on either side of the mean that hold 95% of a normal distribution


def interval(values: npt.NDArray[np.float64]) -> tuple[float, float]:
    """Return the 95% interval of a mean over queries, within [0, 1]; queries are taken as independent.

    Of zeros and ones, such as Recall@k's, it is Wilson's (1927), which has a width at 0 and 1 too; else it is the
    mean's normal interval, by the standard deviation of the values.

    Args:
        values: One for each query, ``n``, in [0, 1].
    """
    from scipy.stats import binomtest  # takes a second

    n, mean = len(values), float(np.mean(values))
    if np.isin(values, (0, 1)).all():
        low, high = binomtest(np.count_nonzero(values), n).proportion_ci(method="wilson")
        return float(low), float(high)
    half = NORMAL * float(np.std(values, ddof=1)) / math.sqrt(n) if n > 1 else 1.0
    return max(0.0, mean - half), min(1.0, mean + half)
