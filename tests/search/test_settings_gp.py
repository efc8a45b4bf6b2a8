"""The baseline of the stage over settings: what it asks stays within its bounds, and it learns from what it is told."""

from collections.abc import Callable
from contextlib import nullcontext
from statistics import mean
from typing import Any

import pytest

from metricopt_ext.search.settings_gp import SettingsGPState
from metricopt_ext.search.settings_stage import SettingsEnd
from metricopt_ext.tasks.evaluation import Evaluation
from metricopt_ext.tasks.settings import Setting, Settings

pytest.importorskip("optuna", reason="needs the extra compare")

Values = dict[str, Any]
SIZE = Setting("size", values=(200, 300, 400, 500), default=300)
FLIP = Setting("flip", values=(False, True), default=False, inference=2.0)
SIGMA = Setting("sigma", 0.01, 1.0, scale="log", default=0.1)


def run(settings: Settings, cost: Callable[[Values], float], queries: int = 10, seed: int = 0) -> SettingsEnd:
    state = SettingsGPState(settings, Evaluation(cost(settings.first)), queries, seed)
    while batch := state.ask():
        assert len(batch) == 1
        state.tell(0, Evaluation(cost(batch[0])))
    return state.end()


def bowl(values: Values) -> float:
    return abs(values["size"] - 500) / 1000 + (values["sigma"] - 0.4) ** 2


def test_it_asks_each_once_within_its_queries_and_what_inference_may_take() -> None:
    settings = Settings([SIZE, FLIP, SIGMA], nullcontext, queries=7)
    end = run(settings, bowl)
    tried = [each.values for each in end.tried]
    assert len(tried) == 1 + 7 == 1 + end.queries
    assert tried[0] == settings.defaults
    assert all(tried.count(each) == 1 for each in tried)
    assert not any(each["flip"] for each in tried)
    for each in tried:
        settings.check(each)


def test_what_takes_too_long_together_is_not_asked() -> None:
    slow = Setting("slow", values=(False, True), default=False, inference=2.0)
    end = run(Settings([FLIP, slow], nullcontext, inference=2.0), lambda values: 1 - values["flip"] - values["slow"])
    assert [tuple(each.values.values()) for each in end.tried[:1]] == [(False, False)]
    assert {tuple(each.values.values()) for each in end.tried[1:]} == {(False, True), (True, False)}


def test_it_ends_once_all_was_asked() -> None:
    end = run(Settings([SIZE, FLIP], nullcontext), lambda values: values["size"] / 1000)
    assert sorted(each.values["size"] for each in end.tried) == [200, 300, 400, 500]
    assert end.values == {"size": 200, "flip": False}


def test_what_is_free_is_where_it_begins() -> None:
    settings = Settings([SIZE, SIGMA], nullcontext, free={"sigma": 0.5})
    assert run(settings, bowl, 2).tried[0].values == {"size": 300, "sigma": 0.5}


def test_the_same_seed_asks_the_same() -> None:
    settings = Settings([SIZE, SIGMA], nullcontext)
    assert run(settings, bowl, seed=3) == run(settings, bowl, seed=3) != run(settings, bowl, seed=4)


@pytest.mark.slow
def test_it_learns_where_the_least_cost_is() -> None:
    """Of ten queries the last three cost less than the first three, which are drawn; over 12 seeds."""
    settings = Settings([Setting("x", 0.0, 1.0, default=0.5), Setting("y", 0.0, 1.0, default=0.5)], nullcontext)

    def cost(values: Values) -> float:
        return (values["x"] - 0.8) ** 2 + (values["y"] - 0.3) ** 2

    ends = [run(settings, cost, seed=seed) for seed in range(12)]
    costs = [[cost(each.values) for each in end.tried[1:]] for end in ends]
    assert mean(mean(each[-3:]) for each in costs) < 0.6 * mean(mean(each[:3]) for each in costs)
    assert mean(min(each) for each in costs) < 0.01  # of ten points at random 0.03 are expected, 1 / (10 pi)
