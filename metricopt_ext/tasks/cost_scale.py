"""What the values of a black box mean as costs."""

import math
from collections.abc import Mapping, Set
from typing import Any

from metricopt_ext.errors import MetricError
from metricopt_ext.tasks.evaluation import Pairs, Unit
from metricopt_ext.tasks.ledger import Ledger
from metricopt_ext.utils.numbers import number_of, within
from metricopt_ext.utils.words import brief


class CostScale:
    """What the values of a black box mean as costs, and the ledger that counts them.

    Args:
        maximize: Whether higher is better.
        bounds: Lowest and highest possible value; mapped to the cost's [0, 1]. None for values without known bounds:
            the cost is the value itself, negated if higher is better.
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
    def unit(self) -> Unit:
        """What its values mean."""
        return Unit(self.maximize, self.bounds)

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

    def to_cost(self, value: float) -> float:
        """Turn the metric's value into a cost (`Unit`)."""
        return self.unit.cost(value)

    def to_value(self, cost: float) -> float:
        """Turn a cost back into the metric's own units and direction."""
        return self.unit.value(cost)

    @property
    def scale(self) -> float:
        """How much the value changes when the cost changes by 1, ignoring the sign."""
        return self.unit.size


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
