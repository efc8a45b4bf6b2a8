"""What the values of a black box mean as costs."""

import math
from collections.abc import Mapping, Set
from typing import Any, TypeVar

from torch import Tensor

from metricopt_ext.errors import MetricError
from metricopt_ext.tasks.evaluation import Pairs
from metricopt_ext.tasks.ledger import Ledger
from metricopt_ext.utils.numbers import number_of, within
from metricopt_ext.utils.words import brief

Number = TypeVar("Number", float, Tensor)


class CostScale:
    """What the values of a black box mean as costs, and the ledger that counts them.

    Args:
        maximize: Whether higher is better.
        bounds: Lowest and highest possible value; None for values without known bounds.
        name: Its name in tables and messages.
        ledger: Counts the queries; give several black boxes one ledger to share a budget.

    Raises:
        ValueError: The bounds are not two finite numbers in order, ``maximize`` is something else than a bool, or the
            name no text.
    """

    maximize: bool
    bounds: tuple[float, float] | None
    name: str
    ledger: Ledger

    def __init__(
        self, *, maximize: bool, bounds: tuple[float, float] | None, name: str, ledger: Ledger | None = None
    ) -> None:
        if maximize not in (True, False):
            raise ValueError(f"maximize is {maximize!r}; it must be True if higher is better, else False")
        if not isinstance(name, str):
            raise ValueError(f"name is {brief(name)}; it must be a text")
        self.maximize, self.bounds, self.name = bool(maximize), None if bounds is None else _checked(bounds), name
        self.ledger = ledger or Ledger()

    @property
    def identity(self) -> dict[str, Any]:
        """What its values mean, as JSON: two black boxes that differ in it are not the same, whatever their names."""
        bounds = None if self.bounds is None else list(self.bounds)
        return {"name": self.name, "maximize": self.maximize, "bounds": bounds}

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
        if not math.isfinite(value):
            raise MetricError(f"metric {self.name!r} returned {value}{where}; it must be a finite number")
        if self.bounds is None:
            return value
        low, high = self.bounds
        value = within(value, low, high)
        if not low <= value <= high:
            raise MetricError(
                f"metric {self.name!r} returned {value}{where}, outside its bounds {self.bounds}; set the right"
                " bounds, or bounds=None for a metric without any"
            )
        return value

    def checked_pairs(self, pairs: Pairs) -> Pairs:
        """Return values on pairs of halves; see `checked`."""
        where = " on a half of its data"
        return tuple((self.checked(a, where), self.checked(b, where)) for a, b in pairs)

    def normalised(self, cost: Number) -> Number:
        """Return a cost, or a tensor of them, scaled from the bounds to [0, 1] (paper, section 3), or as it is."""
        if self.bounds is None:
            return cost
        low, high = sorted(self.sign * bound for bound in self.bounds)
        return (cost - low) / (high - low)


def _checked(bounds: Any) -> tuple[float, float]:
    """Return bounds as two finite floats in order.

    Raises:
        ValueError: They are none.
    """
    try:
        if isinstance(bounds, str | Set | Mapping):  # of text, or without an order
            raise TypeError(f"bounds in a {type(bounds).__name__}")
        low, high = (number_of(bound) for bound in bounds if not isinstance(bound, str))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"bounds are {bounds!r}; they must be two numbers, or None for a metric without any"
        ) from error
    if not low < high:
        raise ValueError(f"bounds are {bounds}; the lower must be below the upper")
    if not math.isfinite(high - low):
        raise ValueError(f"bounds are {bounds}; both must be finite, or give bounds=None for a metric without any")
    return low, high
