"""NGOpt of nevergrad, where that package is installed."""

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from helpers.refusals import assert_refused
from metricopt_ext.search.ngopt import NGOpt
from metricopt_ext.tasks.evaluation import Evaluation


@pytest.fixture
def nevergrad() -> None:
    pytest.importorskip("nevergrad", reason="needs the extra compare")


@pytest.mark.usefixtures("nevergrad")
def test_it_keeps_to_the_protocol(keeps_to_protocol: Callable[..., None]) -> None:
    keeps_to_protocol(NGOpt(), 80)


@pytest.mark.usefixtures("nevergrad")
@pytest.mark.outcome
def test_a_quadratic_is_nearly_solved(quadratic: Callable[..., Any]) -> None:
    """With 150 queries for 5 coordinates its model of the metric, a quadratic, is exact."""
    for seed in range(3):
        task = quadratic(dim=5)
        result = NGOpt(0.3)(task, task.origin(), 150, seed=seed)
        assert result.cost < 0.1 * task.true_cost(task.origin())  # at worst 2e-18


@pytest.mark.usefixtures("nevergrad")
def test_a_point_that_is_given_up_is_not_told_and_others_are_asked(quadratic: Callable[..., Any]) -> None:
    task = quadratic()
    state = NGOpt().begin(task, task.origin(), 6)
    state.ask()
    state.tell(0, Evaluation(1.0))
    left = state.ask()
    state.give_up(0)
    assert state.left == 5
    asked = []
    while len(points := state.ask()):
        asked.append(points)
        state.tell(0, Evaluation(task.true_cost(points[0])))
    assert len(asked) == 5
    assert not any(torch.equal(points, left) for points in asked)


@pytest.mark.parametrize("sigma", [0.0, float("nan")])
def test_an_impossible_spread_is_refused(sigma: float) -> None:
    assert_refused(lambda: NGOpt(sigma), ValueError, "sigma", sigma)


def test_a_missing_package_says_what_to_install(quadratic: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nevergrad", None)
    task = quadratic()
    assert_refused(lambda: NGOpt()(task, task.origin(), 50), ImportError, "pip install 'nevergrad")
    assert task.queries == 0
