"""What a metric was asked, kept and counted query by query, and a task with a ledger of its own."""

from dataclasses import dataclass, replace

from torch import nn

from metricopt_ext.adapters.adapter import Adapter
from metricopt_ext.experiment.method import Meter, Reached
from metricopt_ext.runtime.progress import Callback
from metricopt_ext.search.visited import ranked
from metricopt_ext.tasks.constraints import Limits
from metricopt_ext.tasks.evaluation import Evaluation
from metricopt_ext.tasks.ledger import Ledger
from metricopt_ext.tasks.metric import Query
from metricopt_ext.tasks.task import FinetuneTask


@dataclass(frozen=True)
class Point:
    """A query: the evaluation of phi, and what was spent when it was answered, with phi, ``d``, as its end."""

    evaluation: Evaluation
    reached: Reached


class Trace:
    """A callback that keeps the points at which a metric was evaluated.

    Args:
        task: What it spends is counted from now on. Its metric's constraints are respected; their bounds are numbers.

    Attributes:
        points: One for each query that was answered.
    """

    def __init__(self, task: FinetuneTask) -> None:
        self.meter, self.constraints = Meter(task), task.metric.constraints
        self.points: list[Point] = []

    def __call__(self, query: Query) -> None:
        """Keep a query."""
        phi = Adapter(query.item).phi if isinstance(query.item, nn.Module) else query.item
        assert phi is not None
        self.points.append(Point(query.evaluation, self.meter.reached(phi.detach().clone())))

    def best(self, queries: int) -> Reached:
        """Return what was reached by the first so many queries: the best phi, ``d``, as of `DirectState.end`."""
        limits = Limits.of(self.constraints, self.points[0].evaluation)
        best = min(self.points[:queries], key=lambda point: ranked(point.evaluation, limits))
        return replace(self.points[queries - 1].reached, end=best.reached.end)


class Spent:
    """Tells a callback of the queries of several metrics, whatever their ledgers.

    Args:
        callback: Notified of each query.
        queries: Those that were spent before.
    """

    def __init__(self, callback: Callback, queries: int = 0) -> None:
        self.callback, self.queries = callback, queries

    def __call__(self, query: Query) -> None:
        """Count a query, unless it was asked before."""
        if not query.on_file:
            self.queries += 1
            self.callback.query(self.queries, query.value)


def with_budget(task: FinetuneTask, queries: int) -> FinetuneTask:
    """Return the task with a ledger of its own that refuses any query beyond so many; its metric may keep a file."""
    metric = task.metric.with_settings()
    metric.ledger, metric.log = Ledger(queries), task.metric.log
    return task.judged_by(metric)
