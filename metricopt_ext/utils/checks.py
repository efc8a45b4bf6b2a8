"""Checks of hyper-parameters: a value of the wrong kind or out of range raises a ValueError with its name and value.

None, meaning no value, passes all but `check_integer`, `check_bool`, and `check_instance` of what is not optional.
"""

import math
from numbers import Integral
from typing import Any, SupportsFloat

from metricopt_ext.utils.words import brief

# The largest sizes that are meant: of phi, whose search needs matrices of d x d, of a picture's side, or a layer's
# width; of a batch; and threads or processes.
MOST_SIZE, MOST_BATCH, MOST_THREADS = 10_000, 1_000_000, 1_000


def check_integer(least: int, most: float = math.inf, /, **values: Any) -> None:
    """Reject what is no integer, of Python's or NumPy's, as a bool, or is below ``least`` or above ``most``.

    Raises:
        ValueError: A value is rejected; the message gives the first such name and value.
    """
    for name, value in values.items():
        if not isinstance(value, Integral) or isinstance(value, bool):
            raise ValueError(f"{name} is {brief(value)}; it must be an integer")
        if int(value) > most:
            raise ValueError(f"{name} is {brief(value)}; it must be at most {most}")
    check_at_least(least, **values)


def check_finite(**values: Any) -> None:
    """Reject what is not a finite number.

    Raises:
        ValueError: A value is rejected; the message gives the first such name and value.
    """
    for name, value in values.items():
        number = isinstance(value, SupportsFloat) and not isinstance(value, bool)
        try:
            finite = number and math.isfinite(value)
        except OverflowError:  # an integer that no float can hold
            finite = False
        if value is not None and not finite:
            raise ValueError(f"{name} is {brief(value)}; it must be a finite number")


def check_at_least(least: float, **values: Any) -> None:
    """Reject what is not a finite number of at least ``least``.

    Raises:
        ValueError: A value is rejected; the message gives the first such name and value.
    """
    check_finite(**values)
    for name, value in values.items():
        if value is not None and value < least:
            raise ValueError(f"{name} is {value}; it must be at least {least}")


def check_above(bound: float, **values: Any) -> None:
    """Reject what is not a finite number above ``bound``.

    Raises:
        ValueError: A value is rejected; the message gives the first such name and value.
    """
    check_finite(**values)
    for name, value in values.items():
        if value is not None and value <= bound:
            raise ValueError(f"{name} is {value}; it must be above {bound}")


def check_bool(**values: Any) -> None:
    """Reject what is neither true nor false; a text such as ``"no"`` would count as true.

    Raises:
        ValueError: A value is rejected; the message gives the first such name and value.
    """
    for name, value in values.items():
        if value not in (True, False):
            raise ValueError(f"{name} is {brief(value)}; it must be True or False")


def check_instance(example: str, *, optional: bool = True, **values: Any) -> None:
    """Reject a class where an instance of it is meant, and what can't be called.

    Args:
        example: What would do, for the message.
        optional: Whether None, meaning no value, passes.
        values: Callable objects by name.

    Raises:
        ValueError: A value is rejected; the message gives the first such name and value.
    """
    for name, value in values.items():
        if isinstance(value, type):
            raise ValueError(f"{name} is the class {value.__name__}; it must be an instance, {value.__name__}(...)")
        if not callable(value) and not (optional and value is None):
            raise ValueError(f"{name} is {brief(value)}; it must be an instance, e.g. {example}")
