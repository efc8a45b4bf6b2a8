"""What a metric is made of that is the worst of its values in groups of rows: of classes, or by a column's values."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class Ratio:
    """A metric that is a ratio of sums over rows, and so has a value in any group of them.

    Attributes:
        terms: ``(logits, labels)`` to each row's numerator and denominator, ``n`` float64 each.
        positives: What the examples of class 1 are to it: nothing of their own; ``"needed"``, as it is 0 without any
            whatever is predicted; or ``"alone"``, as no other row counts.
    """

    terms: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    positives: Literal["", "needed", "alone"] = ""


@dataclass(frozen=True)
class Outcomes:
    """A metric's values in groups of rows, by the groups' names.

    Attributes:
        ratio: The metric.
        groups: ``(labels, *columns)`` to the number of each row's group, ``n`` int64; below 0 for a row of none.
        names: The groups' names; empty where they go by their numbers.
    """

    ratio: Ratio
    groups: Callable[..., Tensor]
    names: tuple[str, ...] = ()

    def values(self, logits: Tensor, labels: Tensor, *columns: object) -> dict[str, float]:
        """Return the value in each group, in order, but for those that lack the rows that it needs.

        Args:
            logits: ``n x c`` or ``n``.
            labels: ``n``.
            columns: Further arrays of the same rows, ``n`` each.
        """
        terms, groups = self.ratio.terms(logits, labels), self.groups(labels, *columns).cpu()
        numerator, denominator = (self._sums(groups, each.cpu()) for each in terms)
        found = (numerator / denominator.clamp(min=1)).tolist()
        return {self._name(i): found[i] for i, size in enumerate(self._sizes(groups, labels)) if size}

    def sizes(self, labels: Tensor, *columns: object) -> dict[str, int]:
        """Return how many rows each group has of those that it needs, in order."""
        sizes = self._sizes(self.groups(labels, *columns).cpu(), labels)
        return {self._name(i): size for i, size in enumerate(sizes)}

    def rows(self, labels: Tensor, *columns: object) -> dict[str, Tensor]:
        """Return the places of each group's rows that count, of the groups that have any."""
        groups = self.groups(labels, *columns).to(labels.device)
        counts = labels == 1 if self.ratio.positives == "alone" else torch.ones_like(labels, dtype=torch.bool)
        found = {number: (counts & (groups == number)).nonzero().flatten() for number in groups.unique().tolist()}
        return {self._name(number): rows for number, rows in found.items() if number >= 0 and len(rows)}

    def _sizes(self, groups: Tensor, labels: Tensor) -> list[int]:
        needed = (labels == 1).cpu() if self.ratio.positives else torch.ones_like(groups, dtype=torch.bool)
        return self._sums(groups, needed.double()).long().tolist()

    def _sums(self, groups: Tensor, of_rows: Tensor) -> Tensor:
        known = groups >= 0
        return torch.bincount(groups[known], weights=of_rows[known], minlength=len(self.names))

    def _name(self, number: int) -> str:
        return self.names[number] if self.names else str(number)
