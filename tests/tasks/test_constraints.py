"""The language of constraints, and what they come to: against their definition."""

import math
from typing import Any

import pytest

from helpers.refusals import assert_refused
from metricopt_ext.errors import MetricError
from metricopt_ext.tasks.constraints import Constraint, Limits, parse_constraints
from metricopt_ext.tasks.evaluation import Evaluation, Outcome


def told(failed: bool = False, **also: float) -> Evaluation:
    return Evaluation(0.5, outcomes={name: Outcome(value) for name, value in also.items()}, failed=failed)


@pytest.mark.parametrize(
    ("text", "limit", "shown"),
    [
        (">= 0.9", 0.9, "a >= 0.9"),
        ("<=1", 1.0, "a <= 1"),
        (" >=  -2.5e-3 ", -0.0025, "a >= -0.0025"),
        (">= +.5", 0.5, "a >= 0.5"),
        (">= start", 0.8, "a >= start"),
        (">= start - 0.005", 0.8 - 0.005, "a >= start - 0.005"),
        ("<= start+1", 1.8, "a <= start + 1"),
        ("<=start-1E1", 0.8 - 10, "a <= start - 10"),
    ],
)
def test_a_constraint_is_a_bound_or_relative_to_the_start(text: str, limit: float, shown: str) -> None:
    constraint = Constraint.parse("a", text)
    limits = Limits.of([constraint], told(a=0.8))
    assert limits is not None
    assert limits.numbers == (limit,)
    assert str(constraint) == shown
    assert Constraint.parse("a", shown.removeprefix("a ")) == constraint
    inside, outside = (limit + 0.1, limit - 0.1) if constraint.at_least else (limit - 0.1, limit + 0.1)
    assert limits.hold(told(a=inside))
    assert not limits.hold(told(a=outside))
    assert list(limits.violated(told(a=outside))) == [str(constraint)]
    assert limits.excesses(told(a=outside)) == pytest.approx((0.1,))
    assert limits.hold(told(a=limit))


@pytest.mark.parametrize(
    "text",
    [
        *("", "0.9", "> 0.9", "= 1", ">= ", ">= nan", ">= inf", "=> 1", ">= 0,9", ">= 1_0", ">= \u0661", ">= 0x1"),
        *("start", ">= start * 0.9", ">= start - ", ">= start - -0.1", ">= 0.9%", ">= 1e999", ">= 0.9 <= 1"),
        *(0.9, None, [">= 0.9"]),
    ],
)
def test_anything_else_is_refused_with_the_remedy(text: Any) -> None:
    assert_refused(lambda: Constraint.parse("accuracy", text), ValueError, "subject_to", ">= 0.9", "0.1", ">= start")


def test_several_hold_if_each_does() -> None:
    limits = Limits.of(parse_constraints({"a": ">= start", "b": "<= start + 1"}, "m"), told(a=1.0, b=2.0, c=math.pi))
    assert limits is not None
    assert limits.numbers == (1.0, 3.0)
    assert limits.hold(told(a=1.0, b=3.0))
    assert limits.violated(told(a=0.5, b=3.5)) == {"a >= start": 0.5, "b <= start + 1": 0.5}
    assert list(limits.violated(told(a=0.5, b=2.5))) == ["a >= start"]
    assert not limits.hold(told(failed=True, a=1.0, b=3.0)), "its values are another evaluation's"
    assert_refused(lambda: limits.hold(told(a=1.0)), MetricError, "'b'", "subject_to")
    assert_refused(lambda: limits.hold(Evaluation(0.5)), MetricError, "'a'")
    assert Limits.of((), told()) is None
    assert_refused(lambda: parse_constraints({"f1": ">= 0.5"}, "f1"), ValueError, "'f1'")  # the metric's own name
    assert_refused(lambda: parse_constraints([">= 0.5"], "f1"), ValueError, "constraints")  # type: ignore[arg-type]


def test_a_difference_of_decimals_is_no_violation() -> None:
    """0.855 - 0.005 is 0.85 and a rounding more."""
    limits = Limits.of([Constraint.parse("a", ">= start - 0.005")], told(a=0.855))
    assert limits is not None
    assert limits.numbers[0] > 0.85 or limits.numbers[0] == 0.85
    assert limits.hold(told(a=0.85))
    assert not limits.hold(told(a=0.85 - 1e-9))


def test_limits_can_be_written_without_a_start() -> None:
    """The same numbers are read again, to the last bit."""
    start = Evaluation(0.5, outcomes={"a": Outcome(0.1 + 0.2), "b": Outcome(-1e-7)})
    limits = Limits.of(parse_constraints({"a": ">= start - 0.1", "b": "<= start"}, "m"), start)
    assert limits is not None
    again = Limits.of(parse_constraints(limits.texts(), "m"), Evaluation(0.0))
    assert again is not None
    assert again.numbers == limits.numbers == (0.1 + 0.2 - 0.1, -1e-7)
    assert not any(each.from_start for each in again.constraints)
