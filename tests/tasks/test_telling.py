"""What a watcher is told of a query."""

from collections.abc import Callable
from typing import Any

from metricopt_ext.tasks.telling import query_callback
from metricopt_ext.utils.progress import Watcher


def test_a_query_is_told_in_words_and_as_a_number(quadratic: Callable[..., Any]) -> None:
    heard: list[Any] = []

    class Listening(Watcher):
        def query(self, spent: int, seen: str) -> None:
            heard.append((spent, seen))

        def observed(self, value: float) -> None:
            heard.append(value)

    task = quadratic()
    told = query_callback(task, Listening())
    told(task.cost(task.origin(), "x"))
    value = task.true_cost(task.origin())
    assert heard == [(1, f"distance {value:.4f}"), value]
