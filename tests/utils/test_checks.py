"""Checks of hyper-parameters."""

import math

import pytest

from metricopt_ext.utils.checks import check_above, check_at_least


def test_values_on_the_bound_are_told_apart() -> None:
    check_at_least(1, steps=1, history=2, seeds=None)
    check_above(0, lr=1e-300, sigma=math.inf, rate=None)
    with pytest.raises(ValueError, match=r"^steps is 0; it must be at least 1$"):
        check_at_least(1, history=3, steps=0)
    with pytest.raises(ValueError, match=r"^lr is 0\.0; it must be above 0$"):
        check_above(0, scale=0.5, lr=0.0)


@pytest.mark.parametrize("check", [check_at_least, check_above])
def test_nan_is_refused(check: object) -> None:
    with pytest.raises(ValueError, match="weight is nan"):
        check(0, weight=math.nan)  # type: ignore[operator]
