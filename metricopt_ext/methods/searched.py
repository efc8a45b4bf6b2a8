"""A search on a task's own metric: ask, evaluate, tell, until the budget is spent."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import groupby
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from metricopt_ext.adapters.start import Start
from metricopt_ext.methods.guard import CONFIDENCE
from metricopt_ext.methods.new_classes import held_back
from metricopt_ext.methods.result import Own, Result, SearchDetails
from metricopt_ext.methods.starts import all_starts, with_start
from metricopt_ext.methods.strategy import Context, LearningStrategy, check_strategy
from metricopt_ext.methods.trials import Trials
from metricopt_ext.search.strategy import SearchStrategy, check_checkpoints
from metricopt_ext.search.trust_region import GuidedTrustRegion
from metricopt_ext.tasks.kept_evaluations import KeptEvaluation, KeptEvaluations
from metricopt_ext.tasks.metric import Evaluation, Metric
from metricopt_ext.tasks.task import FinetuneTask
from metricopt_ext.tasks.telling import telling
from metricopt_ext.utils import ranks
from metricopt_ext.utils.progress import Watcher


class SearchLoop(LearningStrategy[SearchDetails]):
    """Runs a search on a task's own metric, for `optimize_metric`.

    Args:
        search: The search.
    """

    takes_starts: ClassVar[bool] = True
    takes_constraints: ClassVar[bool] = True

    def __init__(self, search: SearchStrategy) -> None:
        self.search = search

    def size(self, evaluations: int, dim: int, starts: int = 1) -> dict[str, int]:
        """Return the search's (see `LearningStrategy`)."""
        return self.search.size(evaluations, dim, starts)

    def held_back(self, metric: Metric) -> int:
        """Return the search's (see `LearningStrategy`)."""
        return held_back(self.search, metric)

    def identity(self) -> dict[str, Any]:
        """Return the search's (see `LearningStrategy`)."""
        return self.search.identity()

    def run(self, context: Context) -> Result:
        """Search, and tell what is on file again (see `LearningStrategy`)."""
        task, folder, watcher = context.task, context.folder, context.watcher
        kept = ranks.only_first(lambda: folder.kept_evaluations(task.metric))
        watcher.on_file(0 if kept is None else kept.answered * task.metric.repeats)
        with folder.own_ledger(task.metric, context.queries):
            (result,) = search_results(
                task,
                [context.queries],
                self.search,
                starts=context.starts,
                confidence=context.confidence,
                seed=context.seed,
                watcher=watcher,
                kept=kept,
            )
        return result


def runner_of(strategy: SearchStrategy | LearningStrategy[Own] | None) -> LearningStrategy[Own]:
    """Return what runs a strategy: a learner itself, or the loop that asks and tells a search; by default a guided one.

    Raises:
        ValueError: It is no strategy.
    """
    strategy = GuidedTrustRegion() if strategy is None else strategy
    check_strategy(strategy)
    return SearchLoop(strategy) if isinstance(strategy, SearchStrategy) else strategy  # type: ignore[return-value]


def search_results(
    task: FinetuneTask,
    checkpoints: Sequence[int],
    search: SearchStrategy | None = None,
    *,
    starts: Mapping[str, Start] | None = None,
    confidence: float = CONFIDENCE,
    seed: int = 0,
    watcher: Watcher | None = None,
    kept: KeptEvaluations | None = None,
) -> Iterator[Result]:
    """Run a search once, and yield the guarded result that each number of queries would have had.

    Each checkpoint before the last costs a guided search a query more, that of its own end, and another where classes
    are new (`kept_share`). The model is left
    unchanged. Of ranks that share the work the first alone goes on with the search; all evaluate.

    Args:
        task: Model, loss, batches and metric.
        checkpoints: Numbers of queries, ascending; those of the starts count among them.
        search: The search.
        starts: What it may begin from besides phi = 0, by name; each costs a query.
        confidence: How sure the guard must be, at least 0.5 and below 1.
        seed: Seed of all draws.
        watcher: Notified of progress.
        kept: Keeps the evaluations, on the first rank; those on file are told and booked, and not made again.

    Raises:
        WeightsError: As from `FinetuneTask.keeping_weights`.
        ValueError, BudgetError, AdapterError, MetricError: As from `optimize_metric` and `all_starts`.
    """
    search, watcher = search or GuidedTrustRegion(), watcher or Watcher()
    candidates = all_starts(task, starts or {})
    numbers = [queries // task.metric.repeats for queries in checkpoints]
    check_checkpoints(search, task, numbers, starts=len(candidates), held_back=held_back(search, task.metric))
    search.check(task)
    task.check_loss(seed, 2)
    tasks = {name: with_start(task, start) for name, start in candidates.items()}
    evaluations = kept or KeptEvaluations(None, task.metric)
    trials = ranks.only_first(
        lambda: Trials(task, search, candidates, numbers[0], evaluations, seed, confidence)  # the others only evaluate
    )
    with ExitStack() as held:
        held.enter_context(telling(task, watcher))
        for model_task in {id(each.adapter.model): each for each in tasks.values()}.values():
            held.enter_context(model_task.keeping_weights())
        for queries in numbers:
            if trials is not None:
                trials.extend(queries)
            for asked, evaluation in _evaluated(tasks, trials, queries, watcher):
                if trials is not None and asked.kept is None:
                    trials.tell_evaluation(asked.id, evaluation)
            yield ranks.on_first(lambda: None if trials is None else trials.outcome())  # type: ignore[arg-type, return-value]
        if trials is not None and (moved := trials.moved()):
            watcher.say(moved)


class Asked(NamedTuple):
    """What all ranks need of a trial.

    Attributes:
        id: Its number.
        start: Name of its start.
        phi: ``d``.
        kept: What is on file of it.
    """

    id: int
    start: str
    phi: Tensor
    kept: KeptEvaluation | None


def _evaluated(
    tasks: Mapping[str, FinetuneTask], trials: Trials | None, queries: int, watcher: Watcher
) -> Iterator[tuple[Asked, Evaluation]]:
    """Yield what the search asks for with its evaluation, until there is nothing more to ask."""

    def next_batch() -> list[Asked]:
        batch = [] if trials is None else trials.next_batch()
        return [Asked(trial.id, trial.start, trial.phi, kept) for trial, kept in batch]

    metric, stage, of_queries = tasks["start"].metric, "", 0
    while batch := ranks.on_first(next_batch):
        for name, group in groupby(batch, lambda asked: asked.start):
            same = list(group)
            starting = same[0].id < len(tasks)
            if stage != (stage := "starts" if starting else "search"):
                watcher.stage(stage)
            for asked in same:
                if asked.kept is not None and not asked.kept.given_up:
                    known = asked.kept.evaluation or metric.stand_in()
                    yield from ((asked, each) for each in metric.repeat(known, stage, asked.phi))
            new = [asked for asked in same if asked.kept is None]

            def where(index: int, start: str = name if starting else "", new: list[Asked] = new) -> str:
                return f"start {start!r}; point 1 of 1" if start else f"query {new[index].id + 1} of {queries}"

            if new:
                points = torch.stack([asked.phi for asked in new])
                yield from zip(new, tasks[name].evaluate_each(points, stage, where), strict=True)
        if trials is not None and (quality := trials.quality()) is not None and quality[0] > of_queries:
            of_queries = quality[0]
            watcher.quality(metric.ledger.spent, quality[1])
