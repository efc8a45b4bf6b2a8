"""Standard errors of a test metric's difference: bootstrap, jackknife (Efron and Tibshirani, 1993, ch. 6 and 11)."""

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

# `scipy.stats.bootstrap` refuses a group of one example, which a rare class may be, and has no jackknife.
RESAMPLES = 200


def within_groups(groups: Sequence[Tensor], rng: torch.Generator) -> Iterator[Tensor]:
    """Yield `RESAMPLES` resamples in which each group keeps its size.

    Args:
        groups: Rows of each group of independent examples, e.g. of each class; none is empty.
        rng: Source of the draws.
    """
    for _ in range(RESAMPLES):
        yield torch.cat([own[torch.randint(len(own), (len(own),), generator=rng).to(own)] for own in groups])


def of_groups(groups: Sequence[Tensor], rng: torch.Generator) -> Iterator[Tensor]:
    """Yield `RESAMPLES` resamples of whole groups, for examples that depend on each other within their group.

    Args:
        groups: Rows of each group; none is empty.
        rng: Source of the draws.
    """
    for _ in range(RESAMPLES):
        yield torch.cat([groups[i] for i in torch.randint(len(groups), (len(groups),), generator=rng).tolist()])


def jackknife_error(difference: Callable[[Tensor], float], groups: Sequence[Tensor]) -> float:
    """Return a statistic's standard error by leaving out each group once (Eq. 11.5): no row repeats.

    A row that does is its own nearest neighbour where each searches the others.

    Args:
        difference: The statistic on some rows.
        groups: Rows of each group, for examples that depend on each other within their group; two at least.
    """
    n = len(groups)
    rest = [torch.cat([*groups[:out], *groups[out + 1 :]]).sort().values for out in range(n)]
    values = torch.tensor([difference(rows) for rows in rest], dtype=torch.float64)
    return math.sqrt((n - 1) ** 2 / n) * float(values.std())


def error_of(difference: Callable[[Tensor], float], resamples: Iterator[Tensor]) -> float:
    """Return the standard deviation of a statistic over the resamples on which it is defined.

    Args:
        difference: The statistic on some rows, which may repeat; NaN where it is not defined.
        resamples: The rows of each.

    Returns:
        NaN if it is defined on fewer than two.
    """
    values = torch.tensor([difference(rows) for rows in resamples], dtype=torch.float64)
    defined = values[~values.isnan()]
    return float(defined.std()) if len(defined) > 1 else math.nan
