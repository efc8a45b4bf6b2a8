"""A search on a task's own metric: ask, evaluate, tell, until the budget is spent."""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import groupby
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from metricopt_ext.adapters.start import Start
from metricopt_ext.methods.assessment import QUERIES, Assessment
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
from metricopt_ext.tasks.settings import Value
from metricopt_ext.tasks.task import FinetuneTask
from metricopt_ext.tasks.telling import telling
from metricopt_ext.utils import ranks
from metricopt_ext.utils.progress import Watcher

# A budget that the first trials of a search do not come near.
OUT_OF_SIGHT = 1000


class SearchLoop(LearningStrategy[SearchDetails]):
    """Runs a search on a task's own metric, for `optimize_metric`.

    Args:
        search: The search.
    """

    takes_starts: ClassVar[bool] = True
    takes_constraints: ClassVar[bool] = True
    takes_settings: ClassVar[bool] = True

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


class Asked(NamedTuple):
    """What all ranks need of a trial.

    Attributes:
        id: Its number.
        start: Name of its start.
        phi: ``d``.
        kept: What is on file of it.
        stage: What it is for.
        settings: The settings of inference to be judged with, by name.
    """

    id: int
    start: str
    phi: Tensor
    kept: KeptEvaluation | None
    stage: str
    settings: dict[str, Value]


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
    are new (`kept_share`). Settings of inference are tuned once, by as many queries as the first checkpoint alone would
    have for them. The model is left unchanged. Of ranks that share the work the first alone goes on with the search;
    all evaluate.

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
    with _begun(task, search, candidates, numbers[0], confidence, seed, watcher, kept) as (tasks, trials):
        first = FirstLines(trials, watcher)
        for queries in numbers:
            if trials is not None:
                trials.extend(queries)
            for asked, evaluation in first.timed(_evaluated(tasks, trials, queries, watcher)):
                if trials is not None and asked.kept is None:
                    trials.tell_evaluation(asked.id, evaluation)
                first.told(asked)
            yield ranks.on_first(lambda: None if trials is None else trials.outcome())  # type: ignore[arg-type, return-value]
        if trials is not None and (moved := trials.moved()):
            watcher.say(moved)


def first_answers(
    task: FinetuneTask,
    most: int,
    search: SearchStrategy,
    *,
    starts: Mapping[str, Start],
    confidence: float = CONFIDENCE,
    seed: int = 0,
    watcher: Watcher,
    kept: KeptEvaluations | None = None,
) -> Assessment:
    """Ask the first trials of a search, as `search_results` asks them, and return what they say.

    Args:
        task: Model, loss, batches and metric.
        most: How many evaluations are made, more than there are starts, phi = 0 among them.
        search: The search; what it asks first must not depend on its budget (`SearchStrategy.anytime`).
        starts: As of `search_results`, as for the rest.
        confidence: The guard's.
        seed: Seed of all draws.
        watcher: Notified of progress.
        kept: Keeps the evaluations, for the search that goes on.
    """
    candidates = all_starts(task, starts)
    # No end is asked for within the first trials, and no batch cut, if the budget is out of sight.
    queries = OUT_OF_SIGHT + most
    with _begun(task, search, candidates, queries, confidence, seed, watcher, kept) as (tasks, trials):
        first = FirstLines(trials, Watcher())
        for asked, evaluation in first.timed(_evaluated(tasks, trials, most, watcher, most)):
            if trials is not None and asked.kept is None:
                trials.tell_evaluation(asked.id, evaluation)
        return ranks.on_first(lambda: trials.assessment(most, first.seconds))  # type: ignore[union-attr]


@contextmanager
def _begun(
    task: FinetuneTask,
    search: SearchStrategy,
    candidates: Mapping[str, Start],
    queries: int,
    confidence: float,
    seed: int,
    watcher: Watcher,
    kept: KeptEvaluations | None,
) -> Iterator[tuple[dict[str, FinetuneTask], Trials | None]]:
    """Yield the task of each start, on its own model, and the search's trials, which the first rank alone has."""
    search.check(task)
    task.check_loss(seed, 2)
    tasks = {name: with_start(task, start) for name, start in candidates.items()}
    evaluations = kept or KeptEvaluations(None, task.metric)
    trials = ranks.only_first(
        lambda: Trials(task, search, candidates, queries, evaluations, seed, confidence)  # the others only evaluate
    )
    with ExitStack() as held:
        held.enter_context(telling(task, watcher))
        for model_task in {id(each.adapter.model): each for each in tasks.values()}.values():
            held.enter_context(model_task.keeping_weights())
        yield tasks, trials


class FirstLines:
    """Says once, by the first trials of a run, whether it is worth its queries; it asks nothing itself.

    Args:
        trials: The run's; None on ranks that only evaluate.
        watcher: What is said goes there.
    """

    def __init__(self, trials: Trials | None, watcher: Watcher) -> None:
        self._trials, self._watcher = trials, watcher
        self._said, self._spent, self._new, self._told, self._of_settings = trials is None, 0.0, 0, 0, 0

    @property
    def seconds(self) -> float:
        """Seconds that a query took; NaN if all were on file."""
        assert self._trials is not None
        return self._spent / (self._new * self._trials.task.metric.repeats) if self._new else math.nan

    def timed(self, answers: Iterator[tuple[Asked, Evaluation]]) -> Iterator[tuple[Asked, Evaluation]]:
        """Yield the answers, and count the time that new ones took."""
        while True:
            began = time.perf_counter()
            found = next(answers, None)
            if found is None:
                return
            if found[0].kept is None:
                self._spent, self._new = self._spent + time.perf_counter() - began, self._new + 1
            yield found

    def told(self, asked: Asked) -> None:
        """Say it once enough trials of phi have been told."""
        self._told += asked.stage != "settings"
        self._of_settings += asked.stage == "settings"
        if self._said or asked.stage == "settings":
            return
        if self._told >= min(QUERIES, self._trials.queries - self._of_settings):  # type: ignore[union-attr]
            self._said = True
            for line in self._trials.assessment(asked.id + 1, self.seconds).brief():  # type: ignore[union-attr]
                self._watcher.say(line)


def _evaluated(
    tasks: Mapping[str, FinetuneTask], trials: Trials | None, queries: int, watcher: Watcher, most: int | None = None
) -> Iterator[tuple[Asked, Evaluation]]:
    """Yield what the search asks for with its evaluation, until there is nothing more to ask, or so many were asked."""

    def next_batch() -> list[Asked]:
        batch = [] if trials is None else trials.next_batch(most)
        if trials is None:
            return []
        return [
            Asked(trial.id, trial.start, trial.phi, kept, trials.stage_of(trial.id), trial.settings)
            for trial, kept in batch
        ]

    metric, stage, of_queries = tasks["start"].metric, "", 0
    while batch := ranks.on_first(next_batch):
        for (name, settings), group in groupby(batch, lambda asked: (asked.start, asked.settings)):
            same = list(group)
            starting = same[0].stage == "starts"
            if stage != (stage := same[0].stage):
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
                task = tasks[name].with_values(settings)
                yield from zip(new, task.evaluate_each(points, stage, where), strict=True)
        if trials is not None and (quality := trials.quality()) is not None and quality[0] > of_queries:
            of_queries = quality[0]
            watcher.quality(metric.ledger.spent, quality[1])
