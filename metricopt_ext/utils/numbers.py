"""Numbers as others return them: in arrays with one entry, or beyond a bound by rounding."""

from typing import Any

ROUNDING = 1e-6  # of a range: how far single precision may overshoot its ends


def number_of(value: Any) -> float:
    """Return the number that a value is, of whatever type, or that an array with one entry holds.

    Raises:
        TypeError: It is no number, or one that no float can hold.

    Examples:
        >>> import numpy as np
        >>> number_of(np.array([0.5]))
        0.5
    """
    try:
        held = value.detach() if hasattr(value, "detach") else value  # torch warns of a number with a gradient
        return float(held.item() if getattr(held, "ndim", 0) else held)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise TypeError(f"a {type(value).__name__} that is no number") from error


def within(value: float, low: float, high: float) -> float:
    """Return a value, or the end of its range that it overshoots by rounding alone; others stay as they are.

    Examples:
        >>> within(1 + 1e-7, 0, 1), within(1.01, 0, 1)
        (1, 1.01)
    """
    slack = ROUNDING * (high - low)
    return min(max(value, low), high) if low - slack <= value <= high + slack else value
