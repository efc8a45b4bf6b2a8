"""What the values of a black box mean as costs."""

import math
from collections.abc import Mapping, Set
from typing import Any, TypeVar

from torch import Tensor

from metricopt_ext.errors import MetricError
from metricopt_ext.tasks.combine import Combination
from metricopt_ext.tasks.evaluation import Outcome, Pairs
from metricopt_ext.tasks.ledger import Ledger
from metricopt_ext.utils.checks import check_bool
from metricopt_ext.utils.numbers import number_of, within
from metricopt_ext.utils.words import shortened

Number = TypeVar("Number", float, Tensor)


class CostScale:
    """What the values of a black box mean as costs, and the ledger that counts them.

    Args:
        maximize: Whether higher is better.
        bounds: Lowest and highest possible value; None for values without known bounds.
        name: Its name in tables and messages.
        ledger: Counts the queries; give several black boxes one ledger to share a budget.
        combination: How outcomes make the value; None for values that are told as such.

    Raises:
        ValueError: The bounds are not two finite numbers in order, or ``maximize`` is something else than a bool.
    """

    def __init__(
        self,
        *,
        maximize: bool,
        bounds: tuple[float, float] | None,
        name: str,
        ledger: Ledger | None = None,
        combination: Combination | None = None,
    ) -> None:
        check_bool(maximize=maximize)
        self.maximize: bool = bool(maximize)
        self.bounds: tuple[float, float] | None = None if bounds is None else _checked(bounds)
        self.name: str = name
        self.ledger: Ledger = ledger or Ledger()
        self.combination: Combination | None = combination
        self._combined: tuple[str, ...] = ()  # what is, once it is known

    @property
    def sign(self) -> int:
        """What turns a value into a cost, which is minimised, and a cost into a value."""
        return -1 if self.maximize else 1

    @property
    def worst(self) -> float | None:
        """The worst value that there can be; None without bounds."""
        return None if self.bounds is None else self.bounds[not self.maximize]

    def checked(self, value: float, where: str = "") -> float:
        """Return a value, or the bound itself where rounding overshot it.

        Raises:
            MetricError: The value is not finite, or outside the bounds.
        """
        low, high = self.bounds or (-math.inf, math.inf)
        value = within(value, low, high)
        if not (low <= value <= high and math.isfinite(value)):
            raise MetricError(
                f"metric {self.name!r} returned {value}{where}, which is no finite number within its bounds"
                f" {self.bounds}; set the right bounds, or bounds=None for a metric without any"
            )
        return value

    def checked_pairs(self, pairs: Pairs) -> Pairs:
        """Return values on pairs of halves; see `checked`."""
        where = " on a half of its data"
        return tuple((self.checked(a, where), self.checked(b, where)) for a, b in pairs)

    def combined_of(self, outcomes: Mapping[str, Outcome]) -> Outcome:
        """Return the value that outcomes make, and on pairs of halves if all that are combined have these.

        Raises:
            MetricError: Their names or their order are others than before, or they can't be combined (`Combination`).
        """
        assert self.combination is not None
        if self.name in outcomes:
            raise MetricError(f"an outcome is {self.name!r}, as the metric that combine makes of all; rename one")
        names = self.combination.names(outcomes)
        if not self._combined:
            self.combination.check(outcomes)
        elif names != self._combined or not {*names} <= outcomes.keys():
            raise MetricError(
                f"metric {self.name!r} is made of {shortened(list(self._combined))}, and now told"
                f" {shortened(list(outcomes))}; tell the same names in the same order each time"
            )
        for name in () if callable(self.combination.combine) else names:  # each is as the metric
            self.checked(outcomes[name].value, f" of {name!r}")
        value, pairs = self.combination.value_of(outcomes)
        return Outcome(self.checked(value), self.checked_pairs(pairs))

    def remember(self, outcomes: Mapping[str, Outcome]) -> None:
        """Take the names that were told: those of what is combined stay the same from now on."""
        if self.combination is not None:
            self._combined = self.combination.names(outcomes)

    def normalised(self, cost: Number) -> Number:
        """Return a cost, or a tensor of them, scaled from the bounds to [0, 1] (paper, section 3), or as it is."""
        if self.bounds is None:
            return cost
        low, high = sorted(self.sign * bound for bound in self.bounds)
        return (cost - low) / (high - low)

    def value_of(self, normalised: float) -> float:
        """Return the value of a cost that is `normalised`."""
        low, high = (0.0, 1.0) if self.bounds is None else sorted(self.sign * bound for bound in self.bounds)
        return self.sign * (low + normalised * (high - low))


def _checked(bounds: Any) -> tuple[float, float]:
    """Return bounds as two finite floats in order.

    Raises:
        ValueError: They are none.
    """
    try:
        if isinstance(bounds, str | Set | Mapping):  # of text, or without an order
            raise TypeError
        low, high = (number_of(bound) for bound in bounds if not isinstance(bound, str))
    except (TypeError, ValueError):
        low = high = math.nan
    if not (low < high and math.isfinite(high - low)):
        raise ValueError(f"bounds are {bounds!r}; they must be two finite numbers in order, or bounds=None for none")
    return low, high
