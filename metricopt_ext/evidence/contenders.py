"""The methods of a comparison at several budgets: each asks the metric alone, from one start, and says where it stood.

A contender gets a task, a start phi, budgets and a seed. Every call of the metric is one query, whoever makes it: what
was spent on choosing the start has been taken off the budgets before. What a query costs the model is another matter,
and is counted besides (`passes`).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from metricopt_ext.adapters.adapter import Adapter
from metricopt_ext.errors import MetricError
from metricopt_ext.evidence.method import METHODS, Meter, Reached, now
from metricopt_ext.evidence.method_config import FinetuneConfig
from metricopt_ext.evidence.run_config import RunConfig
from metricopt_ext.methods.guard import CONFIDENCE, decide
from metricopt_ext.methods.tuning import finetune
from metricopt_ext.search.optimizer import LossStep
from metricopt_ext.search.strategy import SearchResult, SearchStrategy
from metricopt_ext.search.trust_region import GuidedTrustRegion
from metricopt_ext.tasks.metric import Ledger, Query
from metricopt_ext.tasks.task import FinetuneTask
from metricopt_ext.utils.progress import Watcher

# (task, start phi ``d``, budgets in ascending order, seed) -> where it stood at each budget, in that order.
Run = Callable[[FinetuneTask, Tensor, Sequence[int], int], Iterator[Reached]]


@dataclass(frozen=True)
class Contender:
    """One method of a comparison.

    Attributes:
        run: Runs it.
        least: The smallest budget that it can do with in d dimensions.
        anytime: Whether its queries are the same whatever the budget, so that one run serves all budgets.
    """

    run: Run
    least: Callable[[int], int]
    anytime: bool = False


def usual_contenders(config: RunConfig) -> dict[str, Contender]:
    """Return what every task's comparison can run, by name.

    Args:
        config: The task's settings.
    """
    search = config.build_strategy()

    def best_step(task: FinetuneTask, start: Tensor, queries: int, seed: int) -> Tensor:
        return best_of_loss_finetune(task, loss_path(task, config.finetune, seed, start), queries)

    return {
        "loss_finetune_best": at_each_budget(best_step, least=lambda dim: 2),
        **{
            name: searching(each.factory(config.finetune)) for name, each in METHODS.items() if each.factory is not None
        },
        "ours": ours(config.guard.confidence, search if isinstance(search, GuidedTrustRegion) else None),
    }


def loss_path(task: FinetuneTask, settings: FinetuneConfig, seed: int, start: Tensor | None = None) -> Tensor:
    """Finetune for the loss alone from a start, by default phi = 0; returns the visited phi, ``(T + 1) x d``."""
    return finetune(task, LossStep(settings.lr), settings.steps, seed, start)


def best_of_loss_finetune(task: FinetuneTask, points: Tensor, evals: int) -> Tensor:
    """Evaluate the metric at evenly spaced points of a loss-only finetune and return the best, ``d`` (paper, Table 1).

    Args:
        task: The task.
        points: The visited phi, ``(T + 1) x d``.
        evals: Number of queries, both ends included; all points if that is T + 1 or more.
    """
    chosen = torch.linspace(0, len(points) - 1, min(evals, len(points))).round().long()
    costs = task.costs_at(points[chosen], "loss_finetune_best")
    return points[chosen[costs.argmin()]]


def ours(confidence: float = CONFIDENCE, search: GuidedTrustRegion | None = None) -> Contender:
    """Make a contender of the guided search, its guard included: what the guard refuses ends at the start.

    A comparison that knows the start's rivals too, the model as it was trained among them, decides anew (`guarded`).

    Args:
        confidence: How sure the guard must be, at least 0.5 and below 1.
        search: The search.
    """
    engine = search or GuidedTrustRegion()

    def run(task: FinetuneTask, start: Tensor, budgets: Sequence[int], seed: int) -> Iterator[Reached]:
        limited = with_budget(task, max(budgets) + len(budgets) - 1)
        meter = Meter(limited)
        for end in engine.ends(limited, start, budgets, seed=seed):
            reached = now()
            yield replace(meter.reached(_kept(start, end, confidence)), search=end)
            meter.forget_since(reached)  # what was reached is judged meanwhile
            if end.f is not None:
                meter.forget_last_query()  # that of its end, which a run of a larger budget has elsewhere

    return Contender(run, engine.least_queries, anytime=True)


def _kept(start: Tensor, end: SearchResult, confidence: float) -> Tensor:
    """Return the end of a search, ``d``, or the start, its first query, if that is what the guard keeps."""
    asked = {"start": end.evaluations[0], "search": end.evaluation}
    decision = decide(asked, end.evaluations, confidence, lambda kept: end.gain_over(start), end.climbed)
    return end.phi if decision.kept == "search" else start


def searching(search: SearchStrategy) -> Contender:
    """Make a contender of a search on the metric.

    Args:
        search: The search.
    """
    if not search.anytime:
        return at_each_budget(
            lambda task, start, queries, seed: search(task, start, queries, seed=seed).phi, search.least_queries
        )

    def run(task: FinetuneTask, start: Tensor, budgets: Sequence[int], seed: int) -> Iterator[Reached]:
        limited, stopped = with_budget(task, max(budgets)), None
        trace = Trace(limited)
        try:
            with limited.metric.observed_by(trace):
                search(limited, start, max(budgets), seed=seed)
        except MetricError as error:
            stopped = error  # what was reached before counts
        for queries in budgets:
            if stopped is not None and queries > len(trace.points):
                raise stopped
            yield trace.best(queries)

    return Contender(run, search.least_queries, anytime=True)


def at_each_budget(
    run: Callable[[FinetuneTask, Tensor, int, int], Tensor | nn.Module | None],
    least: Callable[[int], int] = lambda dim: 0,
) -> Contender:
    """Make a contender of a function that is run once for each budget.

    Args:
        run: ``run(task, start, queries, seed)`` returns the end, or None if it does not apply.
        least: See `Contender`.
    """

    def each(task: FinetuneTask, start: Tensor, budgets: Sequence[int], seed: int) -> Iterator[Reached]:
        for queries in budgets:
            limited = with_budget(task, queries)
            meter, end = Meter(limited), run(limited, start, queries, seed)
            if end is not None:
                yield meter.reached(end)

    return Contender(each, least)


@dataclass(frozen=True)
class Point:
    """A query: the cost of phi, and what was spent when it was answered, with phi, ``d``, as its end."""

    cost: float
    reached: Reached


class Trace:
    """An observer that keeps the points at which a metric was evaluated.

    Args:
        task: What it spends is counted from now on.

    Attributes:
        points: One for each query that was answered.
    """

    def __init__(self, task: FinetuneTask) -> None:
        self.meter = Meter(task)
        self.points: list[Point] = []

    def __call__(self, query: Query) -> None:
        """Keep a query."""
        phi = Adapter(query.item).phi if isinstance(query.item, nn.Module) else query.item
        assert phi is not None
        self.points.append(Point(query.evaluation.cost, self.meter.reached(phi.detach().clone())))

    def best(self, queries: int) -> Reached:
        """Return what was reached by the first so many queries: the best phi, ``d``, the first of equals."""
        best = min(self.points[:queries], key=lambda point: point.cost)
        return replace(self.points[queries - 1].reached, end=best.reached.end)


class Spent:
    """An observer that tells a watcher of the queries of several metrics, whatever their ledgers.

    Args:
        watcher: Notified of each query.
        queries: Those that were spent before.
    """

    def __init__(self, watcher: Watcher, queries: int = 0) -> None:
        self.watcher, self.queries = watcher, queries

    def __call__(self, query: Query) -> None:
        """Count a query."""
        self.queries += 1
        self.watcher.query(self.queries, query.value)


def with_budget(task: FinetuneTask, queries: int) -> FinetuneTask:
    """Return the task with a ledger of its own that refuses any query beyond so many."""
    metric = task.metric.with_new_ledger()
    metric.ledger = Ledger(queries)
    return task.judged_by(metric)
