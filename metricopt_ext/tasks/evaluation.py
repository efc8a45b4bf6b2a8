"""A metric's verdict on a model, as costs, and what several tell together."""

import math
from collections.abc import Sequence
from itertools import chain
from statistics import mean
from typing import NamedTuple

import torch
from torch import Tensor

# On two halves of the data each, by several divisions of them.
Pairs = tuple[tuple[float, float], ...]


class Evaluation(NamedTuple):
    """A metric's verdict on a model, as costs.

    Attributes:
        cost: The metric's cost.
        halves: Its costs on two halves of its data, None from a metric that does not report them.
        noise: Standard error of the cost, from repeats of the evaluation; None without repeats.
        failed: Whether the metric failed, and the worst evaluation so far stands in for it.
        pairs: Its costs on several pairs of halves, ``halves`` the first; empty where one pair at most is reported.
        also: Other quantities that it told of the model, by name and in their own units; None without any.
    """

    cost: float
    halves: tuple[float, float] | None = None
    noise: float | None = None
    failed: bool = False
    pairs: Pairs = ()
    also: dict[str, float] | None = None

    @classmethod
    def of(cls, cost: float, pairs: Sequence[Sequence[float]] | None, noise: float | None = None) -> "Evaluation":
        """Make one of a cost and those on pairs of halves, of which one alone is not kept twice."""
        costs = tuple((first, second) for first, second in pairs or ())
        return cls(cost, costs[0] if costs else None, noise, pairs=costs if len(costs) > 1 else ())

    @property
    def numbers(self) -> list[float]:
        """All numbers of it."""
        more = () if self.noise is None else (self.noise,)
        return [self.cost, *more, *(self.halves or ()), *chain(*self.pairs), *(self.also or {}).values()]

    def without_halves(self) -> "Evaluation":
        """Return the same as of a metric that reports no halves."""
        return self._replace(halves=None, pairs=())


def stacked_halves(evaluations: Sequence[Evaluation]) -> Tensor | None:
    """Return the costs on two halves of the data, ``n x 2``, or None if an evaluation lacks them."""
    halves = [each.halves for each in evaluations]
    return None if None in halves else torch.tensor(halves, dtype=torch.float64)


def stacked_noise(evaluations: Sequence[Evaluation]) -> Tensor | None:
    """Return the standard errors of the costs, ``n``, or None if an evaluation lacks one."""
    noise = [each.noise for each in evaluations]
    return None if None in noise else torch.tensor(noise, dtype=torch.float64)


def stacked_pairs(evaluations: Sequence[Evaluation]) -> Tensor | None:
    """Return the costs on p pairs of halves, ``n x p x 2``, or None if an evaluation lacks them; p may be 1."""
    if any(each.halves is None for each in evaluations):
        return None
    return torch.tensor([each.pairs or (each.halves,) for each in evaluations], dtype=torch.float64)


def noise_of(evaluations: Sequence[Evaluation]) -> float:
    """Return the standard deviation of the noise in a cost, as repeats of the evaluations show it; 0 without any."""
    variances = [each.noise**2 for each in evaluations if each.noise is not None]
    return math.sqrt(mean(variances)) if variances else 0.0
