"""Checks of hyper-parameters."""

import math
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from metricopt_ext.utils.checks import (
    check_above,
    check_at_least,
    check_bool,
    check_finite,
    check_instance,
    check_integer,
)


def test_values_on_the_bound_are_told_apart() -> None:
    check_integer(1, steps=1, history=np.int64(2))
    check_at_least(1, steps=1, history=2, seeds=None)
    check_above(0, lr=1e-300, scale=np.float32(0.1), weight=torch.tensor(0.1), rate=None)
    check_finite(mean=-1e300, none=None)
    for check in (check_integer, check_at_least):
        with pytest.raises(ValueError, match=r"^steps is 0; it must be at least 1$"):
            check(1, history=3, steps=0)
    with pytest.raises(ValueError, match=r"^lr is 0\.0; it must be above 0$"):
        check_above(0, scale=0.5, lr=0.0)


@pytest.mark.parametrize("check", [check_at_least, check_above])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, True, "0.1", [1.0]])
def test_what_is_no_finite_number_is_refused(check: Callable[..., None], value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(f'weight is {value!r}; it must be a finite number')}$"):
        check(0, lr=0.5, weight=value)


@pytest.mark.parametrize("value", [30.0, 1.5, math.nan, True, "3", None, torch.tensor(3)])
def test_what_is_no_integer_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(f'queries is {value!r}; it must be an integer')}$"):
        check_integer(0, steps=3, queries=value)


@pytest.mark.parametrize("value", ["no", 2, None])
def test_what_is_no_bool_is_refused(value: Any) -> None:
    check_bool(first=True, second=False)
    with pytest.raises(ValueError, match=f"^{re.escape(f'grows is {value!r}; it must be True or False')}$"):
        check_bool(first=True, grows=value)


def test_what_is_not_optional_is_no_none() -> None:
    check_instance("len", optional=False, labels=len)
    with pytest.raises(ValueError, match=r"labels is None; it must be an instance, e\.g\. len"):
        check_instance("len", optional=False, labels=None)


def test_a_class_is_no_instance() -> None:
    check_instance("len", labels=len, refine=None)
    with pytest.raises(ValueError, match=r"instance, Fraction\(\.\.\.\)"):
        check_instance("len", strategy=Fraction)
    with pytest.raises(ValueError, match=r"'gp'; it must be an instance, e\.g\."):
        check_instance("len", labels="gp")
