"""A run's callback, told of the queries of its metric."""

from contextlib import AbstractContextManager
from dataclasses import dataclass

from metricopt_ext.runtime.progress import Callback
from metricopt_ext.tasks.metric import Query
from metricopt_ext.tasks.task import FinetuneTask


@dataclass(frozen=True)
class Notifying:
    """Tells a callback of each query.

    Attributes:
        callback: Gets the number of queries that have been spent, and the metric's value.
    """

    callback: Callback

    def __call__(self, query: Query) -> None:
        """Tell of a query."""
        self.callback.query(query.spent, query.value)


def notifying(task: FinetuneTask, callback: Callback | None) -> AbstractContextManager[None]:
    """Have a callback told of a task's queries inside the ``with`` block, once even where it is told already."""
    return task.metric.calling(*([] if callback is None else [Notifying(callback)]))
