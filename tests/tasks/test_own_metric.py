"""A metric named as MODULE:FUNCTION: what is imported, which settings are its own, and what values it may have."""

import functools
import statistics
from typing import Any

import pytest
import torch

from helpers.refusals import assert_named, assert_refused
from metricopt_ext.errors import ConfigError, MetricError
from metricopt_ext.tasks.own_metric import OwnMetric, OwnMetricConfig, number_within, own_metric, why


def test_a_function_comes_with_what_is_known_of_it() -> None:
    found = own_metric("statistics:mean", OwnMetricConfig(maximize=False, bounds=[-1.0, 3.0]))
    assert found == OwnMetric(statistics.mean, "mean", False, (-1.0, 3.0))


def test_further_arguments_are_bound_and_objects_made_of_classes() -> None:
    found = own_metric("statistics:quantiles", OwnMetricConfig(kwargs={"n": 2}))
    assert found is not None
    assert isinstance(found.function, functools.partial)
    assert found.function([1, 2, 3]) == [2]
    made = own_metric("torch.nn:CrossEntropyLoss", OwnMetricConfig(kwargs={"label_smoothing": 0.5}))
    assert made is not None
    assert made.function.label_smoothing == 0.5  # type: ignore[attr-defined]


def test_another_name_has_none() -> None:
    assert own_metric("accuracy", OwnMetricConfig()) is None


@pytest.mark.parametrize("bounds", [[], [0.0], [1.0, 0.0], [1.0, 1.0], [0.0, float("inf")], [float("nan"), 1.0]])
def test_bounds_are_two_finite_numbers(bounds: list[float]) -> None:
    config = OwnMetricConfig(bounds=bounds)
    assert_refused(config.check, ConfigError, "metric.bounds")
    assert_refused(lambda: own_metric("statistics:mean", config), ConfigError, "metric.bounds")


@pytest.mark.parametrize(
    ("name", "change", "names"),
    [
        ("statistics:nothing", {}, ("statistics", "nothing")),
        ("no_such_module:f", {}, ("no_such_module",)),
        ("statistics.nothing:f", {}, ("modules", "metric.folder")),
        ("fractions:Fraction", {"kwargs": {"half": 1}}, ("metric.name=fractions:Fraction",)),
    ],
)
def test_what_cannot_be_imported_or_made_is_named(name: str, change: dict[str, Any], names: tuple[str, ...]) -> None:
    assert_refused(lambda: own_metric(name, OwnMetricConfig(**change)), ConfigError, *names)


def test_values_are_numbers_within_the_bounds_but_for_rounding() -> None:
    assert number_within(torch.tensor(0.25), (0.0, 1.0), "own") == 0.25
    assert number_within(1 + 1e-7, (0.0, 1.0), "own") == 1
    assert number_within(-2e-6, (0.0, 4.0), "own") == 0
    for result, names in (
        (1.01, ("own", "bounds", "(0, 1)", "1.01")),
        (float("nan"), ("bounds", "(0, 1)", "nan")),
        ([0.5, 0.5], ("own", "0.5")),
        (None, ("None",)),
    ):
        with pytest.raises(MetricError) as caught:
            number_within(result, (0.0, 1.0), "own")
        assert_named(caught, *names)


def test_why_a_metric_failed() -> None:
    assert why(ValueError("no positives.")) == "no positives"
    assert (why(SystemExit(0)), why(SystemExit())) == ("it calls sys.exit(0)", "it calls sys.exit()")
