"""Queries are counted by purpose, and those beyond the budget are refused before the metric is asked."""

import math
from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from helpers.refusals import assert_named, assert_refused
from metricopt_ext.errors import BudgetError
from metricopt_ext.tasks.ledger import Ledger
from metricopt_ext.tasks.metric import Metric


def constant(value: Any) -> Callable[[], Any]:
    return lambda: value


@pytest.mark.parametrize("budget", [-1, 30.0, math.inf, True])
def test_a_budget_is_an_integer(budget: Any) -> None:
    assert_refused(lambda: Ledger(budget), ValueError, "budget", budget)


def test_queries_are_counted_by_purpose() -> None:
    metric = Metric(constant(0.5), maximize=True)
    for purpose in ("collect", "guard", "collect"):
        metric.cost(nn.Identity(), purpose)
    assert metric.ledger.spent_on == {"collect": 2, "guard": 1}
    assert metric.ledger.spent == 3
    assert metric.ledger.left == math.inf


def test_the_budget_is_refused_before_asking() -> None:
    calls: list[int] = []
    ledger = Ledger(3)
    metrics = [Metric(lambda: calls.append(1) or 0.5, maximize=True, ledger=ledger) for _ in range(2)]
    for i in range(3):
        metrics[i % 2].cost(nn.Identity(), "collect")
    assert (ledger.left, len(calls)) == (0, 3)
    for metric in metrics:
        with pytest.raises(BudgetError) as caught:
            metric.cost(nn.Identity(), "guard")
        assert_named(caught, "guard", "0", "3", "collect")
    assert (ledger.spent, len(calls)) == (3, 3)


@pytest.mark.parametrize(("asked", "fits"), [(0, True), (4, True), (5, False)])
def test_several_queries_at_once(asked: int, fits: bool) -> None:
    ledger = Ledger(6)
    ledger.spend("early", 2)
    if fits:
        ledger.spend("late", asked)
        assert ledger.left == 4 - asked
    else:
        assert_refused(lambda: ledger.spend("late", asked), BudgetError, asked, "queries")
        assert ledger.spent_on == {"early": 2}
