"""A metric's verdict on a model, in its own unit, and what several tell together, as costs."""

import math
from collections.abc import Sequence
from itertools import chain
from statistics import mean, stdev
from typing import NamedTuple

import torch
from torch import Tensor

# On two halves of the data each, by several divisions of them.
Pairs = tuple[tuple[float, float], ...]


class Outcome(NamedTuple):
    """A quantity that a metric tells of a model besides its value, or that this is made of, in its own unit.

    Attributes:
        value: What it is.
        pairs: Its values on pairs of halves of the metric's data; empty where none are known.
        noise: Standard error of the value, from repeats of the evaluation; None without repeats.
    """

    value: float
    pairs: Pairs = ()
    noise: float | None = None


class Evaluation(NamedTuple):
    """A metric's verdict on a model.

    Attributes:
        value: The metric's value.
        outcomes: Quantities that it told of the model besides, and those that the value is made of, by name, in order.
        pairs: Its values on pairs of halves of its data, by several divisions; empty where it reports none. Where one
            pair is needed, the first counts.
        noise: Standard error of the value, from repeats of the evaluation; None without repeats.
        failed: Whether the metric failed, and the worst evaluation so far stands in for it.
        sign: 1 if lower is better, -1 if higher is.
    """

    value: float
    outcomes: dict[str, Outcome] = {}  # noqa: RUF012 (which nobody changes)
    pairs: Pairs = ()
    noise: float | None = None
    failed: bool = False
    sign: int = 1

    @property
    def cost(self) -> float:
        """What a search minimises: the value, or its negative if higher is better."""
        return self.sign * self.value

    @property
    def costs_on_pairs(self) -> Pairs:
        """The costs on pairs of halves."""
        return tuple((self.sign * first, self.sign * second) for first, second in self.pairs)

    @property
    def halves(self) -> tuple[float, float] | None:
        """The costs on the first pair of halves; None without any."""
        return self.costs_on_pairs[0] if self.pairs else None

    @property
    def also(self) -> dict[str, float]:
        """The values of the outcomes, by name."""
        return {name: each.value for name, each in self.outcomes.items()}

    def check(self) -> None:
        """Refuse numbers that no evaluation has.

        Raises:
            ValueError: One is not finite, or a standard error is negative.
        """
        for each in (Outcome(self.value, self.pairs, self.noise), *self.outcomes.values()):
            noise = each.noise or 0.0
            if noise < 0 or not all(map(math.isfinite, (each.value, noise, *chain(*each.pairs)))):
                raise ValueError(f"{each} has a number that is not finite, or noise below 0")


def stacked_halves(evaluations: Sequence[Evaluation]) -> Tensor | None:
    """Return the costs on two halves of the data, ``n x 2``, or None if an evaluation lacks them."""
    halves = [each.halves for each in evaluations]
    return None if None in halves else torch.tensor(halves, dtype=torch.float64)


def stacked_pairs(evaluations: Sequence[Evaluation]) -> Tensor | None:
    """Return the costs on p pairs of halves, ``n x p x 2``, p the least of them, or None if one lacks them."""
    if not all(each.pairs for each in evaluations):
        return None
    least = min((len(each.pairs) for each in evaluations), default=0)
    return torch.tensor([each.costs_on_pairs[:least] for each in evaluations], dtype=torch.float64)


def noise_of(evaluations: Sequence[Evaluation | Outcome]) -> float:
    """Return the standard deviation of the noise in a value, as repeats of evaluations show it; 0 without any."""
    variances = [each.noise**2 for each in evaluations if each.noise is not None]
    return math.sqrt(mean(variances)) if variances else 0.0


def mean_of(calls: Sequence[Outcome]) -> Outcome:
    """Return the means of calls, with the standard error of the value's; of pairs, if all have them."""
    if len(calls) == 1:
        return calls[0]
    pairs = [zip(*each, strict=True) for each in zip(*(call.pairs for call in calls), strict=False)]
    means = tuple((mean(firsts), mean(seconds)) for firsts, seconds in pairs)
    values = [each.value for each in calls]
    return Outcome(mean(values), means, stdev(values) / math.sqrt(len(values)))
