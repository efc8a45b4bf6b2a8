"""A watcher of a run as an observer of its metric."""

from contextlib import AbstractContextManager
from dataclasses import dataclass

from metricopt_ext.runtime.progress import Watcher
from metricopt_ext.tasks.metric import Query
from metricopt_ext.tasks.task import FinetuneTask


@dataclass(frozen=True)
class Telling:
    """Tells a watcher of each query.

    Attributes:
        watcher: Gets the number of queries that have been spent, and the metric's value.
        before: Queries that were spent before, under another ledger.
    """

    watcher: Watcher
    before: int = 0

    def __call__(self, query: Query) -> None:
        """Tell of a query."""
        self.watcher.query(self.before + query.spent, query.value)


def telling(task: FinetuneTask, watcher: Watcher | None) -> AbstractContextManager[None]:
    """Have a watcher told of a task's queries inside the ``with`` block, once even where it is told already."""
    return task.metric.observed_by(*([] if watcher is None else [Telling(watcher)]))
