"""What a metric is made of: outcomes, as each class's recall, and how they make its value.

The lowest of 26 recalls is a kinked function of phi, but each recall is smooth: a value function of the outcomes knows
more than one of their combination (Astudillo & Frazier, 2019, "Bayesian Optimization of Composite Functions").
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from metricopt_ext.tasks.evaluation import Evaluation, Outcome, Pairs

# "worst": the least outcome if higher is better, else the largest. A function takes a tensor, ``... x m``, in the order
# of the names, to ``...``, differentiable by torch.
Combine = Literal["worst", "mean"] | Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Combination:
    """How a metric's outcomes make its value.

    Attributes:
        combine: "worst", "mean", or a function.
        sign: What turns a value into a cost: 1 if lower is better, -1 if higher is.
        combined: The names of what is combined, in order; None for all outcomes but those in ``bounded``.
        bounded: What ``subject_to`` names.
    """

    combine: Combine
    sign: int
    combined: tuple[str, ...] | None = None
    bounded: tuple[str, ...] = ()

    def names(self, outcomes: Mapping[str, Outcome]) -> tuple[str, ...]:
        """Return the names of the m outcomes that are combined, in order."""
        return self.combined or tuple(name for name in outcomes if name not in self.bounded)

    def value(self, outcomes: Tensor) -> Tensor:
        """Return values, ``...``, of outcomes, ``... x m``, all in their own units."""
        if self.combine == "mean":
            return outcomes.mean(-1)
        if self.combine == "worst":
            return outcomes.amax(-1) if self.sign > 0 else outcomes.amin(-1)
        return self.combine(outcomes)

    def cost(self, costs: Tensor) -> Tensor:
        """Return costs, ``...``, of the outcomes' costs, ``... x m``: both times the sign."""
        return self.sign * self.value(self.sign * costs)

    def value_of(self, outcomes: Mapping[str, Outcome]) -> tuple[float, Pairs]:
        """Return the value of named outcomes, and on pairs of halves if all of them have these."""
        parts = [outcomes[name] for name in self.names(outcomes)]
        pairs = zip(*(each.pairs for each in parts), strict=True) if all(each.pairs for each in parts) else ()
        of_pairs = tuple((self._of([a for a, _ in each]), self._of([b for _, b in each])) for each in pairs)
        return self._of([each.value for each in parts]), of_pairs

    def _of(self, numbers: Sequence[float]) -> float:
        return float(self.value(torch.tensor(numbers, dtype=torch.float64)))

    def costs(self, evaluations: Sequence[Evaluation]) -> Tensor:
        """Return the outcomes' costs, ``n x m``, of evaluations, the first of which says what is combined."""
        names = self.names(evaluations[0].outcomes)
        rows = [[each.outcomes[name].value for name in names] for each in evaluations]
        return self.sign * torch.tensor(rows, dtype=torch.float64)
