"""What a callback is told of a query."""

from collections.abc import Callable
from typing import Any

from metricopt_ext.runtime.progress import Callback
from metricopt_ext.tasks.notifying import Notifying, notifying


class Listening(Callback):
    """Keeps what it is told of queries."""

    def __init__(self) -> None:
        self.heard: list[tuple[int, float]] = []

    def query(self, spent: int, value: float) -> None:
        self.heard.append((spent, value))


def test_a_callback_is_told_of_each_query_as_numbers_and_once(quadratic: Callable[..., Any]) -> None:
    task, callback = quadratic(), Listening()
    with notifying(task, callback), notifying(task, callback):  # as where a run tells, and a part of it
        task.cost(task.origin(), "x")
    task.cost(task.origin(), "x")
    assert callback.heard == [(1, task.true_cost(task.origin()))]


def test_no_callback_is_told_nothing(quadratic: Callable[..., Any]) -> None:
    task = quadratic()
    with notifying(task, None):
        assert task.metric.callbacks == []


def test_queries_under_an_earlier_ledger_count(quadratic: Callable[..., Any]) -> None:
    task, callback = quadratic(), Listening()
    with task.metric.calling(Notifying(callback, before=5)):
        task.cost(task.origin(), "x")
    assert [spent for spent, _ in callback.heard] == [6]
