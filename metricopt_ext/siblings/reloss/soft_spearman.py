"""Spearman's rank correlation with a gradient, through the soft ranks of a differentiable sorting network."""

import math
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

STEEPNESS = 5.0
LEAST_NORM = 1e-12  # of what is centred; below it all values are equal and correlate with nothing


@lru_cache(maxsize=8)
def _network(size: int, steepness: float, device: str) -> Any:
    from diffsort import DiffSortNet  # the extra `siblings` brings it

    return DiffSortNet("bitonic", size, device=device, steepness=steepness, distribution="logistic_phi")


def soft_ranks(values: Tensor, steepness: float = STEEPNESS) -> Tensor:
    """Return ranks of 0 (lowest) to ``n - 1`` with a gradient, ``n``, by a bitonic sorting network.

    Each pair that the network compares is swapped in part, by a logistic function of its difference whose slope is
    raised for close pairs (Petersen et al., 2021, "Differentiable Sorting Networks for Scalable Sorting and Ranking
    Supervision"). Time and memory grow with ``n^2``.

    Args:
        values: ``n``, at least 2.
        steepness: Of the swaps, above 0: larger is closer to the true ranks, and flatter away from ties.
    """
    _, places = _network(len(values), steepness, str(values.device))(values.unsqueeze(0))
    ranks: Tensor = places[0] @ torch.arange(len(values), dtype=values.dtype, device=values.device)
    return ranks


def soft_spearman(values: Tensor, target: Tensor, steepness: float = STEEPNESS) -> Tensor:
    """Return Spearman's correlation (ReLoss, Eq. 6) of the soft ranks of values with the true ranks of a target.

    The values are ranked at mean 0 and variance 1. As they are, a sorting network hardly swaps values that differ by
    less than its steepness tells apart: with a spread of 0.1 the correlation would be near 0, of either sign.

    Args:
        values: ``n``, at least 2; the gradient is theirs alone.
        target: ``n``; equal entries share the mean of their ranks.
        steepness: See `soft_ranks`.

    Returns:
        A scalar in [-1, 1]; 0 if either has a single value throughout.
    """
    values = values.to(torch.promote_types(values.dtype, torch.float32))  # half precision counts to 256 alone
    standard = _unit(values) * math.sqrt(len(values))
    return _unit(soft_ranks(standard, steepness)) @ _unit(_ranks(target).to(values))


def spearman(values: Tensor, target: Tensor) -> float:
    """Return Spearman's correlation (ReLoss, Eq. 6) of two vectors, ``n``; equal entries share the mean of their ranks.

    Returns:
        A number in [-1, 1]; 0 if either has a single value throughout.
    """
    return float(_unit(_ranks(values)) @ _unit(_ranks(target)))


def _ranks(values: Tensor) -> Tensor:
    from scipy.stats import rankdata  # takes a second

    return torch.from_numpy(np.asarray(rankdata(values.detach().double().numpy(force=True))))


def _unit(values: Tensor) -> Tensor:
    centred = values - values.mean()
    unit: Tensor = centred / centred.norm().clamp(min=LEAST_NORM)
    return unit
