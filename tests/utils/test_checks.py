"""Checks of hyper-parameters."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from helpers.refusals import assert_refused, having
from metricopt_ext.utils.checks import (
    check_above,
    check_at_least,
    check_finite,
    check_integer,
)


def test_values_on_the_bound_are_told_apart() -> None:
    check_integer(1, steps=1, history=np.int64(2))
    check_integer(1, 9, steps=9)
    assert_refused(lambda: check_integer(1, 9, steps=10), ValueError, "steps", "10", "9")
    check_at_least(1, steps=1, history=2, seeds=None)
    check_above(0, lr=1e-300, scale=np.float32(0.1), weight=torch.tensor(0.1), rate=None)
    check_finite(mean=-1e300, none=None)
    for check in (check_integer, check_at_least):
        with pytest.raises(ValueError, match=having("steps", "0", "1")):
            check(1, history=3, steps=0)
    assert_refused(lambda: check_above(0, scale=0.5, lr=0.0), ValueError, "lr", "0.0")


@pytest.mark.parametrize("check", [check_at_least, check_above])
@pytest.mark.parametrize("value", [math.nan, -math.inf, True, "0.1"])
def test_what_is_no_finite_number_is_refused(check: Callable[..., None], value: Any) -> None:
    assert_refused(lambda: check(0, lr=0.5, weight=value), ValueError, "weight", repr(value))


@pytest.mark.parametrize("value", [30.0, True, "3", None])
def test_what_is_no_integer_is_refused(value: Any) -> None:
    assert_refused(lambda: check_integer(0, steps=3, queries=value), ValueError, "queries", repr(value))
