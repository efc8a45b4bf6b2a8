"""A metric named as MODULE:FUNCTION: what is imported, which settings are its own, and what values it may have."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.refusals import assert_named, assert_refused
from metricopt_ext.errors import ConfigError, MetricError
from metricopt_ext.experiment.besides import BesidesConfig, class_number, of_class, own_function
from metricopt_ext.experiment.own_metric import OwnMetricConfig, number_within, own_metric


def test_further_arguments_are_bound_and_objects_made_of_classes() -> None:
    found = own_metric("statistics:quantiles", OwnMetricConfig(kwargs={"n": 2}))
    assert found is not None
    assert isinstance(found.function, functools.partial)
    assert found.function([1, 2, 3]) == [2]
    made = own_metric("torch.nn:CrossEntropyLoss", OwnMetricConfig(kwargs={"label_smoothing": 0.5}))
    assert made is not None
    assert made.function.label_smoothing == 0.5  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "change", "names"),
    [
        ("statistics:nothing", {}, ("statistics", "nothing")),
        ("statistics:mean", {"bounds": [1.0, 1.0]}, ("metric.bounds",)),
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


def test_each_name_is_there_once_with_its_key() -> None:
    config = BesidesConfig(also=["a", "b", "a"], subject_to={"c": ">= 0", "b": "<= 1"})
    assert config.besides == {"a": "metric.also", "b": "metric.subject_to", "c": "metric.subject_to"}
    assert list(config.besides) == ["a", "b", "c"]
    config.check_besides("m")
    assert_refused(lambda: config.check_besides("a"), ConfigError, "metric.also")
    assert_refused(lambda: config.check_besides("c"), ConfigError, "metric.subject_to")
    assert_refused(
        lambda: BesidesConfig(subject_to={"c": "above 3"}).check_besides("m"), ConfigError, "metric.subject_to"
    )


def test_functions_are_imported_from_the_folder_alone_that_is_named(tmp_path: Path) -> None:
    (tmp_path / "besides_own_scores.py").write_text("def score(x):\n    return x + 1\n")
    name = "besides_own_scores:score"
    assert own_function("accuracy", BesidesConfig(), "metric.also") is None
    assert_refused(lambda: own_function(name, BesidesConfig(), "metric.also"), ConfigError, "besides_own_scores")
    own = own_function(name, OwnMetricConfig(folder=str(tmp_path)), "metric.also")
    assert own is not None
    assert own(1) == 2


def test_a_class_stands_in_brackets_and_is_found_in_any_case_unless_that_is_two() -> None:
    assert of_class("ap50[a [b]: c]") == ("ap50", "a [b]: c")
    assert [of_class(name) for name in ("recall", "recall[]", "recall[person", "module:function[x]")] == [None] * 4
    assert class_number("CAT", ("dog", "cat"), "key") == class_number("Cat", ("cat", "Cat"), "key") == 1
    for label in ("CAT", "cow"):
        assert_refused(lambda name=label: class_number(name, ("cat", "Cat"), "key"), ConfigError, "key", label)


@pytest.mark.parametrize(("name", "higher"), [("roc_auc_score", True), ("log_loss", False), ("max_error", False)])
def test_which_way_is_better_is_as_a_function_s_name_says(name: str, higher: bool) -> None:
    found = own_metric(f"sklearn.metrics:{name}", OwnMetricConfig())
    assert found is not None
    assert found.maximize is higher
    told = own_metric(f"sklearn.metrics:{name}", OwnMetricConfig(maximize=not higher))
    assert told is not None
    assert told.maximize is not higher
