"""Joining comparisons of different seeds: lists by seed, gaps, and what can't be joined."""

from typing import Any

import pytest

from helpers.refusals import assert_named, assert_refused
from metricopt_ext.comparison.joined import joined
from metricopt_ext.errors import DataError


def content(seeds: list[int], methods: dict[str, dict[str, list[float]]], machine: str = "A") -> dict[str, Any]:
    """What comparison.json holds: a seed is its test metric as trained, and ten times that at the best start."""

    def cells(tests: dict[str, list[float]]) -> dict[str, Any]:
        return {
            budget: dict.fromkeys(("queries", "validation", "test", "seconds", "passes"), values)
            for budget, values in tests.items()
        }

    tens = [10.0 * seed for seed in seeds]
    return {
        "task": "toy",
        "metric": {"name": "f1", "maximize": True},
        "budgets": [20, 60],
        "seeds": seeds,
        "starts": {"pretrained": {"validation": tens, "test": [float(seed) for seed in seeds]}},
        "best_start": {"queries": 2, "chosen": [f"start {seed}" for seed in seeds], "seconds": tens, "test": tens},
        "methods": {name: {"least": 5, "cells": cells(tests), "errors": {}} for name, tests in methods.items()},
        "guards": [{"seed": seed, "method": "metricopt"} for seed in seeds],
        "machines": [machine],
    }


def test_seeds_are_put_in_order_and_gaps_are_none() -> None:
    first = content([3, 1], {"metricopt": {"20": [0.3, 0.1], "60": [0.33, 0.11]}})
    second = content([2], {"metricopt": {"20": [0.2]}, "noisy_ei": {"60": [0.9]}}, machine="B")
    second["methods"]["noisy_ei"]["least"] = 19
    second["methods"]["metricopt"]["errors"] = {"60": ["seed 2: MetricError: down"]}
    both = joined([first, second], ["first", "second"])
    assert both["seeds"] == [1, 2, 3]
    assert both["starts"]["pretrained"] == {"validation": [10.0, 20.0, 30.0], "test": [1.0, 2.0, 3.0]}
    assert both["best_start"]["chosen"] == ["start 1", "start 2", "start 3"]
    assert both["best_start"]["queries"] == 2
    ours, noisy_ei = both["methods"]["metricopt"], both["methods"]["noisy_ei"]
    assert ours["cells"]["20"]["test"] == [0.1, 0.2, 0.3]
    assert ours["cells"]["60"]["seconds"] == [0.11, None, 0.33]
    assert ours["errors"] == {"60": ["seed 2: MetricError: down"]}
    assert list(noisy_ei["cells"]) == ["60"]
    assert noisy_ei["cells"]["60"]["test"] == [None, 0.9, None]
    assert noisy_ei["least"] == 19
    assert [guard["seed"] for guard in both["guards"]] == [1, 2, 3]
    assert both["machines"] == ["A", "B"]


def test_what_is_no_more_of_the_same_is_refused() -> None:
    first, second = content([1, 2], {}), content([2, 3], {})
    assert_refused(lambda: joined([first, second], ["first", "second"]), DataError, "seeds", "2")
    for key, value in (("task", "another"), ("budgets", [5]), ("metric", {"name": "f1", "maximize": False})):
        with pytest.raises(DataError) as caught:
            joined([first, content([3], {}) | {key: value}], ["first", "third"])
        assert_named(caught, "third", key)


def test_settings_must_be_the_same_but_for_seeds_machines_and_methods() -> None:
    config = {
        "budgets": [20, 60],
        "seed": 1,
        "of_task": {"guard": {"confidence": 0.93}, "data": {"root": "a"}},
    }
    first = content([1], {}) | {"config": config}
    other = {"seed": 2, "workers": 2, "methods": ["metricopt"], "budgets": [20, 60]}
    same = content([2], {}) | {"config": {**other, "of_task": {"guard": {"confidence": 0.93}, "data": {}}}}
    assert joined([first, same], ["first", "same"])["seeds"] == [1, 2]
    unlike = content([2], {}) | {
        "config": {**other, "of_task": {"guard": {"confidence": 0.5}, "data": {"name": "a9a"}}}
    }
    assert_refused(lambda: joined([first, unlike], ["first", "unlike"]), DataError, "unlike", "first", "0.93")
