"""Telling a watcher of a task's queries."""

from collections.abc import Callable

from metricopt_ext.tasks.task import FinetuneTask
from metricopt_ext.utils.progress import Watcher


def query_callback(task: FinetuneTask, watcher: Watcher) -> Callable[[float], None]:
    """Return a function that notifies a watcher of an observed cost and of the queries spent."""

    def told(cost: float) -> None:
        value = task.metric.to_value(cost)
        watcher.query(task.metric.ledger.spent, f"{task.metric.name} {value:.4f}")
        watcher.observed(value)

    return told
