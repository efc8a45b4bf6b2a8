"""A metric's value that knows what it is on two halves of the data."""

from collections.abc import Callable, Mapping, Sequence, Set
from itertools import chain
from typing import Any, cast, overload

import torch
from torch import Tensor

from metricopt_ext.errors import MetricError
from metricopt_ext.tasks.evaluation import Pairs
from metricopt_ext.utils.numbers import number_of
from metricopt_ext.utils.words import brief, shortened


class Halved(float):
    """A metric's value that knows what it is on two halves of the data: a number for whoever calls the function.

    Args:
        value: The value on all of the data.
        halves: The values on both halves, or on several pairs of halves, or why there are none; None where nothing is
            to be said of them.
    """

    halves: tuple[float, float] | Pairs | str | None

    def __new__(cls, value: float, halves: tuple[float, float] | Pairs | str | None) -> "Halved":
        """Make the number."""
        made = super().__new__(cls, value)
        made.halves = halves
        return made

    def __getnewargs__(self) -> tuple[Any, ...]:
        """Return what it is made of, by which it is sent to other processes."""
        return float(self), self.halves


@overload
def with_halves(
    value_on: Callable[[Tensor | None], float], halves: Sequence[Tensor] | Sequence[tuple[Tensor, Tensor]] | str
) -> Halved: ...


@overload
def with_halves(
    value_on: Callable[[Tensor | None], float | Mapping[str, float]],
    halves: Sequence[Tensor] | Sequence[tuple[Tensor, Tensor]] | str,
) -> Halved | tuple[Mapping[str, float], Any]: ...


def with_halves(
    value_on: Callable[[Tensor | None], Any], halves: Sequence[Tensor] | Sequence[tuple[Tensor, Tensor]] | str
) -> Any:
    """Return a metric's value, or its outcomes by name, with those on two halves of the data, if there are halves.

    Args:
        value_on: Returns the value or outcomes on the examples at some indices, ``m``, or on all of them for None.
            Where it refuses a half, as one on which the metric is not defined, there are none.
        halves: Indices of two halves of the data, or several such pairs, by as many divisions of them; or why there are
            none, or nothing.

    Raises:
        ValueError: The halves of a pair share examples.
    """
    if isinstance(halves, str) or not len(halves):
        return _made(value_on(None), (halves or None) if isinstance(halves, str) else None)
    alone = isinstance(halves[0], Tensor)
    pairs = cast(Sequence[tuple[Tensor, Tensor]], [halves] if alone else halves)
    for first, second in pairs:
        if shared := int(torch.isin(first, second).sum()):
            raise ValueError(f"halves share {shared} of {len(first)} examples; divide the data, each into one half")
    value = value_on(None)
    try:
        values = tuple((value_on(first), value_on(second)) for first, second in pairs)
    except (ArithmeticError, MetricError, ValueError) as error:
        return _made(value, f"on a half of its data it raised {type(error).__name__}: {brief(error)}")
    return _made(value, values[0] if alone else values)


def _made(value: Any, halves: Any) -> Any:
    return (value, halves) if isinstance(value, Mapping) else Halved(value, halves)


def pairs_of(halves: Any) -> Pairs:
    """Return the pairs that are meant by two numbers, or by a sequence of pairs of numbers.

    Raises:
        TypeError, ValueError: It is neither; or there is no pair, or one of another number of halves, or no order.
    """
    if isinstance(halves, Mapping | Set | str | bytes) or hasattr(halves, "columns"):
        raise TypeError(f"halves in a {type(halves).__name__}")
    parts = list(halves)
    several = [isinstance(part, tuple | list) or (getattr(part, "ndim", 0) > 0 and len(part) > 1) for part in parts]
    pairs = parts if parts and all(several) else [parts]
    return tuple((number_of(first), number_of(second)) for first, second in pairs)


def by_name(values: Mapping[Any, Any], halves: Any) -> dict[Any, Any]:
    """Return what several quantities are, by name, each with its own halves, as of one alone.

    Args:
        values: Each a number, or already with halves; then ``halves`` are None.
        halves: Two dicts of values by name, or several pairs of two; or why there are none, or None.

    Raises:
        TypeError, ValueError: They are something else, or a half lacks a name.
    """
    if halves is None:
        return dict(values)
    if isinstance(halves, str):
        return {name: (each, halves) for name, each in values.items()}
    try:
        pairs = [(a, b) for a, b in ([halves] if all(isinstance(each, Mapping) for each in halves) else halves)]
        if not pairs or any(half.keys() != values.keys() for half in chain(*pairs)):
            raise ValueError("other names than of the values")
        return {name: (each, [(a[name], b[name]) for a, b in pairs]) for name, each in values.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(
            f"halves are {brief(halves)}; give two dicts, or several pairs of two, each with"
            f" {shortened(list(map(str, values)))}, nan where it is not defined"
        ) from error
