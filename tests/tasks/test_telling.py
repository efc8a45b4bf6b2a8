"""What a watcher is told of a query."""

from collections.abc import Callable
from typing import Any

from metricopt_ext.runtime.progress import Watcher
from metricopt_ext.tasks.telling import Telling, telling


class Listening(Watcher):
    """Keeps what it is told of queries."""

    def __init__(self) -> None:
        self.heard: list[tuple[int, float]] = []

    def query(self, spent: int, value: float) -> None:
        self.heard.append((spent, value))


def test_a_watcher_is_told_of_each_query_as_numbers_and_once(quadratic: Callable[..., Any]) -> None:
    task, watcher = quadratic(), Listening()
    with telling(task, watcher), telling(task, watcher):  # as where a run tells, and a part of it
        task.cost(task.origin(), "x")
    task.cost(task.origin(), "x")
    assert watcher.heard == [(1, task.true_cost(task.origin()))]


def test_no_watcher_is_told_nothing(quadratic: Callable[..., Any]) -> None:
    task = quadratic()
    with telling(task, None):
        assert task.metric.observers == []


def test_queries_under_an_earlier_ledger_count(quadratic: Callable[..., Any]) -> None:
    task, watcher = quadratic(), Listening()
    with task.metric.observed_by(Telling(watcher, before=5)):
        task.cost(task.origin(), "x")
    assert [spent for spent, _ in watcher.heard] == [6]
