"""What a metric's values mean as costs, and what bounds are none."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from helpers.refusals import assert_named, assert_refused
from metricopt_ext.errors import MetricError
from metricopt_ext.tasks.metric import Metric


def constant(value: Any) -> Callable[[], Any]:
    return lambda: value


@pytest.mark.parametrize(
    ("maximize", "bounds", "value", "cost"),
    [
        (True, (0.0, 1.0), 0.75, 0.25),
        (False, (0.0, 1.0), 0.75, 0.75),
        (True, (-1.0, 3.0), 0.0, 0.75),
        (False, (-1.0, 3.0), 0.0, 0.25),
        (True, (0.0, 1.0), 1.0, 0.0),
        (True, (0.0, 1.0), 0.0, 1.0),
        (False, (10.0, 20.0), 20.0, 1.0),
        (True, None, 37.5, -37.5),
        (False, None, 37.5, 37.5),
        (False, None, -2.0, -2.0),
    ],
)
def test_cost(maximize: bool, bounds: tuple[float, float] | None, value: float, cost: float) -> None:
    metric = Metric(constant(value), maximize=maximize, bounds=bounds)
    assert metric.cost(nn.Identity(), "test") == pytest.approx(cost, abs=1e-15)
    assert metric.to_cost(value) == pytest.approx(cost, abs=1e-15)
    assert metric.to_value(cost) == pytest.approx(value, abs=1e-15)


@pytest.mark.parametrize("maximize", [True, False])
@pytest.mark.parametrize("bounds", [None, (0.0, 1.0), (-3.0, 7.0)])
def test_lower_cost_is_better(maximize: bool, bounds: tuple[float, float] | None) -> None:
    metric = Metric(constant(0), maximize=maximize, bounds=bounds)
    values = [0.0, 0.25, 1.0]
    costs = [metric.to_cost(value) for value in values]
    assert costs == sorted(costs, reverse=maximize)
    assert len(set(costs)) == 3
    assert [metric.to_value(cost) for cost in costs] == pytest.approx(values, abs=1e-15)


def test_default_bounds_are_the_unit_interval() -> None:
    assert Metric(constant(0.75), maximize=True).cost(nn.Identity(), "test") == 0.25
    with pytest.raises(MetricError):
        Metric(constant(1.5), maximize=True).cost(nn.Identity(), "test")


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"maximize": "min"}, ("maximize", "min", "False")),
        ({"maximize": None}, ("maximize", "None")),
        ({"bounds": (0,)}, ("bounds", "(0,)", "None")),
        ({"bounds": ("0", "1")}, ("bounds",)),
        ({"bounds": 1.0}, ("bounds", "1.0")),
        ({"bounds": {0, 1}}, ("bounds", "0", "1")),
        ({"name": 3}, ("name", "3")),
        ({"bounds": (1, 0)}, ()),
        ({"bounds": (0, math.inf)}, ()),
    ],
)
def test_a_direction_and_bounds_that_are_none(settings: dict[str, Any], names: tuple[str, ...]) -> None:
    assert_refused(lambda: Metric(constant(0.5), **{"maximize": True, **settings}), ValueError, *names)


def test_rounding_beyond_a_bound_is_the_bound() -> None:
    scale = Metric(constant(0), maximize=True, bounds=torch.tensor([-1.0, 3.0]))  # type: ignore[arg-type]
    assert [scale.checked_cost(value) for value in (-1 - 3e-6, 3 + 3e-6)] == [1, 0]
    assert scale.bounds == (-1, 3)
    for value in (-1 - 5e-6, 3 + 5e-6):
        with pytest.raises(MetricError) as caught:
            scale.checked_cost(value)
        assert_named(caught, "bounds")


@pytest.mark.parametrize("bounds", [(0.0, math.inf), (-math.inf, 0.0)])
def test_infinite_bounds(bounds: tuple[float, float]) -> None:
    assert_refused(lambda: Metric(constant(0), maximize=True, bounds=bounds), ValueError, "both", "bounds=None")


@pytest.mark.parametrize("bounds", [(1.0, 0.0), (1.0, 1.0), (math.nan, 1.0)])
def test_bad_bounds(bounds: tuple[float, float]) -> None:
    assert_refused(lambda: Metric(constant(0), maximize=True, bounds=bounds), ValueError)
