"""Constraints on other quantities than the metric: ``>= 0.9``, ``<= start + 0.01``, and what they come to in a run."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from metricopt_ext.errors import MetricError
from metricopt_ext.tasks.evaluation import Evaluation
from metricopt_ext.utils.words import brief

_NUMBER = r"(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?"
_LANGUAGE = re.compile(
    rf"\s*(?P<side>>=|<=)\s*(?:(?P<number>[+-]?{_NUMBER})|start\s*(?P<offset>[+-]\s*{_NUMBER})?)\s*",
    re.ASCII | re.IGNORECASE,
)
REMEDY = "write '>= 0.9', '<= 0.1', '>= start', '>= start - 0.005' or '<= start + 0.01'"

# A value on its limit holds it, also where a difference of two decimal numbers was rounded.
ROUNDING = 1e-12


@dataclass(frozen=True)
class Constraint:
    """A bound on a quantity.

    Attributes:
        name: The quantity's.
        at_least: Whether the bound is the least value that is allowed, or the largest.
        from_start: Whether it is relative to the value of the model as it was trained.
        number: The bound, or its difference from that value.
    """

    name: str
    at_least: bool
    from_start: bool
    number: float

    @classmethod
    def parse(cls, name: str, text: Any) -> "Constraint":
        """Read ``>=`` or ``<=`` and a number, ``start``, ``start + c`` or ``start - c``.

        Raises:
            ValueError: The text is anything else.
        """
        found = _LANGUAGE.fullmatch(text) if isinstance(text, str) else None
        number = math.nan if found is None else float(re.sub(r"\s", "", found["number"] or found["offset"] or "0"))
        if found is None or not math.isfinite(number):
            raise ValueError(f"subject_to has {brief(name)}: {brief(text)}, which is no constraint; {REMEDY}")
        return cls(name, found["side"] == ">=", found["number"] is None, number)

    def __str__(self) -> str:
        """Return the constraint as it is written."""
        side = ">=" if self.at_least else "<="
        if not self.from_start:
            return f"{self.name} {side} {self.number:g}"
        offset = f" {'-' if self.number < 0 else '+'} {abs(self.number):g}" if self.number else ""
        return f"{self.name} {side} start{offset}"


def parse_constraints(subject_to: Mapping[str, str] | None, metric: str) -> tuple[Constraint, ...]:
    """Read the constraints of a metric, by the quantities that they bound.

    Args:
        subject_to: The texts by name.
        metric: The metric's own name, which can't be among them.

    Raises:
        ValueError: One can't be read, or bounds the metric itself.
    """
    if subject_to is not None and not isinstance(subject_to, Mapping):
        raise ValueError(f"subject_to is {brief(subject_to)}; it must map names to constraints: {REMEDY}")
    if metric in (subject_to or {}):
        raise ValueError(f"subject_to bounds {metric!r}, which is the metric itself; the search improves it anyway")
    return tuple(Constraint.parse(name, text) for name, text in (subject_to or {}).items())


@dataclass(frozen=True)
class Limits:
    """Constraints whose bounds are numbers, as the model as it was trained is known.

    Attributes:
        constraints: The k constraints, at least one.
        numbers: Their bounds, in the quantities' own units.
    """

    constraints: tuple[Constraint, ...]
    numbers: tuple[float, ...]

    @classmethod
    def of(cls, constraints: Sequence[Constraint], start: Evaluation) -> "Limits | None":
        """Return the limits that follow from the start's evaluation; None without constraints.

        Raises:
            MetricError: It lacks a quantity that is bounded.
        """
        if not constraints:
            return None
        numbers = (each.number + (value_of(start, each.name) if each.from_start else 0.0) for each in constraints)
        return cls(tuple(constraints), tuple(numbers))

    def texts(self) -> dict[str, str]:
        """Return the constraints as they are written once their bounds are numbers, by name."""
        pairs = zip(self.constraints, self.numbers, strict=True)
        return {each.name: f"{'>=' if each.at_least else '<='} {number!r}" for each, number in pairs}

    def excesses(self, evaluation: Evaluation) -> tuple[float, ...]:
        """Return by how much an evaluation is beyond each limit, ``k``; at most 0 where it holds."""
        pairs = zip(self.constraints, self.numbers, strict=True)
        return tuple(
            (1 if each.at_least else -1) * (number - value_of(evaluation, each.name)) for each, number in pairs
        )

    def violated(self, evaluation: Evaluation) -> dict[str, float]:
        """Return by how much an evaluation is beyond each limit that it does not satisfy, by the constraint's text."""
        found = zip(self.constraints, self.numbers, self.excesses(evaluation), strict=True)
        return {str(each): excess for each, number, excess in found if excess > ROUNDING * max(1.0, abs(number))}

    def hold(self, evaluation: Evaluation) -> bool:
        """Whether an evaluation satisfies all; one that failed, whose values are another's, does not."""
        return not evaluation.failed and not self.violated(evaluation)


def value_of(evaluation: Evaluation, name: str) -> float:
    """Return a quantity that an evaluation has besides the metric.

    Raises:
        MetricError: It lacks it.
    """
    if name not in evaluation.also:
        raise MetricError(f"an evaluation has no {name!r}, which subject_to names; tell it at every point")
    return evaluation.also[name]
