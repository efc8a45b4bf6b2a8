"""A search on a task's own metric: ask, evaluate, tell, until the budget is spent."""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import groupby
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from metricopt_ext.adapters.start import Start, StartLine
from metricopt_ext.methods.assessment import QUERIES, Assessment
from metricopt_ext.methods.guard import CONFIDENCE
from metricopt_ext.methods.new_classes import held_back
from metricopt_ext.methods.result import KEPT, Own, Result, SearchDetails
from metricopt_ext.methods.starts import all_starts, with_start
from metricopt_ext.methods.strategy import Context, LearningStrategy, check_strategy
from metricopt_ext.methods.trials import Trials
from metricopt_ext.runtime import distributed
from metricopt_ext.runtime.progress import Callback
from metricopt_ext.search.strategy import SearchStrategy, check_checkpoints
from metricopt_ext.search.trust_region import GuidedTrustRegion
from metricopt_ext.tasks.evaluation import Evaluation
from metricopt_ext.tasks.kept_evaluations import KeptEvaluations
from metricopt_ext.tasks.metric import Metric
from metricopt_ext.tasks.notifying import notifying
from metricopt_ext.tasks.settings import Value
from metricopt_ext.tasks.task import FinetuneTask

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
        task, folder, callback = context.task, context.folder, context.callback
        kept = distributed.only_first(lambda: folder.kept_evaluations(task.metric))
        callback.on_file(0 if kept is None else kept.answered * task.metric.repeats)
        with folder.own_ledger(task.metric, context.queries):
            (result,) = search_results(
                task,
                [context.queries],
                self.search,
                starts=context.starts,
                confidence=context.confidence,
                seed=context.seed,
                callback=callback,
                kept=kept,
            )
        return result


class Proposed(NamedTuple):
    """What all ranks need of a trial.

    Attributes:
        id: Its number.
        start: Name of its start.
        phi: ``d``.
        on_file: Whether it was asked before, by a run that goes on.
        known: Its answer then; None if it was given up.
        stage: What it is for.
        settings: The settings of inference to be judged with, by name.
        state: Its start, where that is on a line, which the other ranks do not follow; None for a fixed one.
    """

    id: int
    start: str
    phi: Tensor
    on_file: bool
    known: Evaluation | None
    stage: str
    settings: dict[str, Value]
    state: Start | None = None

    @property
    def group(self) -> tuple[str, dict[str, Value], int]:
        """What is the same of trials that are judged together, on one model."""
        return self.start, self.settings, self.id if self.state is not None and self.stage == "starts" else -1


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
    starts: Mapping[str, Start | StartLine] | None = None,
    confidence: float = CONFIDENCE,
    seed: int = 0,
    callback: Callback | None = None,
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
        starts: What it may begin from besides phi = 0, by name; each costs a query. Lines of starts get theirs by the
            first checkpoint (`line_queries`).
        confidence: How sure the guard must be, at least 0.5 and below 1.
        seed: Seed of all draws.
        callback: Notified of progress.
        kept: Keeps the evaluations, on the first rank; those on file are told and booked, and not made again.

    Raises:
        WeightsError: As from `FinetuneTask.keeping_weights`.
        ValueError, BudgetError, AdapterError, MetricError: As from `optimize_metric` and `all_starts`.
    """
    search, callback = search or GuidedTrustRegion(), callback or Callback()
    candidates = all_starts(task, starts or {})
    numbers = [queries // task.metric.repeats for queries in checkpoints]
    fixed = sum(isinstance(each, Start) for each in candidates.values())
    check_checkpoints(search, task, numbers, starts=fixed, held_back=held_back(search, task.metric))
    with _started(task, search, candidates, numbers[0], confidence, seed, callback, kept) as (models, trials):
        first = FirstLines(trials, callback)
        for queries in numbers:
            if trials is not None:
                trials.extend(queries)
            for proposed, evaluation in first.timed(_evaluated(models, trials, queries, callback)):
                if trials is not None and not proposed.on_file:
                    trials.tell_evaluation(proposed.id, evaluation)
                first.evaluated(proposed)
            yield distributed.on_first(lambda: None if trials is None else trials.outcome())  # type: ignore[arg-type, return-value]
        if trials is not None and (moved := trials.moved()):
            callback.say(moved)


def first_answers(
    task: FinetuneTask,
    most: int,
    search: SearchStrategy,
    *,
    starts: Mapping[str, Start | StartLine],
    confidence: float = CONFIDENCE,
    seed: int = 0,
    callback: Callback,
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
        callback: Notified of progress.
        kept: Keeps the evaluations, for the search that goes on.
    """
    candidates = all_starts(task, starts)
    # No end is asked for within the first trials, and no batch cut, if the budget is out of sight.
    queries = OUT_OF_SIGHT + most
    with _started(task, search, candidates, queries, confidence, seed, callback, kept) as (models, trials):
        first = FirstLines(trials, Callback())
        for proposed, evaluation in first.timed(_evaluated(models, trials, most, callback, most)):
            if trials is not None and not proposed.on_file:
                trials.tell_evaluation(proposed.id, evaluation)
        return distributed.on_first(lambda: trials.assessment(most, first.seconds))  # type: ignore[union-attr]


@contextmanager
def _started(
    task: FinetuneTask,
    search: SearchStrategy,
    candidates: Mapping[str, Start | StartLine],
    queries: int,
    confidence: float,
    seed: int,
    callback: Callback,
    kept: KeptEvaluations | None,
) -> Iterator[tuple["_Models", Trials | None]]:
    """Yield the task of each start, on its own model, and the search's trials, which the first rank alone has."""
    search.check(task)
    task.check_loss(seed, 2)
    evaluations = kept or KeptEvaluations(None, task.metric)
    trials = distributed.only_first(
        lambda: Trials(task, search, candidates, queries, evaluations, seed, confidence)  # the others only evaluate
    )
    with ExitStack() as held:
        held.enter_context(notifying(task, callback))
        yield _Models(task, candidates, held), trials


class _Models:
    """The task of each start, on a model of its own, whose weights stay as they are.

    Args:
        task: The task of the model as it was trained.
        starts: The starts; the models of lines are made as they are asked for.
        held: Holds the weights.
    """

    def __init__(self, task: FinetuneTask, starts: Mapping[str, Start | StartLine], held: ExitStack) -> None:
        self._task, self._held = task, held
        fixed = {name: start for name, start in starts.items() if isinstance(start, Start)}
        self._tasks = {name: with_start(task, start) for name, start in fixed.items()}
        for each in {id(each.adapter.model): each for each in self._tasks.values()}.values():
            held.enter_context(each.keeping_weights())

    @property
    def metric(self) -> Metric:
        """The run's metric."""
        return self._task.metric

    @contextmanager
    def at(self, proposed: Proposed) -> Iterator[FinetuneTask]:
        """Yield the task of a trial, for a while if that is a start on a line: each such has another model."""
        if proposed.state is None:
            yield self._tasks[proposed.start]
        elif proposed.stage == "starts":
            task = with_start(self._task, proposed.state)
            with nullcontext() if task.adapter.model is self._task.adapter.model else task.keeping_weights():
                yield task
        else:
            if proposed.start not in self._tasks:
                self._tasks[proposed.start] = task = with_start(self._task, proposed.state)
                if task.adapter.model is not self._task.adapter.model:
                    self._held.enter_context(task.keeping_weights())
            yield self._tasks[proposed.start]


class FirstLines:
    """Says once, by the first trials of a run, whether it is worth its queries; it asks nothing itself.

    Args:
        trials: The run's; None on ranks that only evaluate.
        callback: What is said goes there.
    """

    def __init__(self, trials: Trials | None, callback: Callback) -> None:
        self._trials, self._callback = trials, callback
        self._said, self._spent, self._new, self._evaluated, self._of_settings = trials is None, 0.0, 0, 0, 0

    @property
    def seconds(self) -> float:
        """Seconds that a query took; NaN if all were on file."""
        assert self._trials is not None
        return self._spent / (self._new * self._trials.task.metric.repeats) if self._new else math.nan

    def timed(self, answers: Iterator[tuple[Proposed, Evaluation]]) -> Iterator[tuple[Proposed, Evaluation]]:
        """Yield the answers, and count the time that new ones took."""
        while True:
            began = time.perf_counter()
            found = next(answers, None)
            if found is None:
                return
            if not found[0].on_file:
                self._spent, self._new = self._spent + time.perf_counter() - began, self._new + 1
            yield found

    def evaluated(self, proposed: Proposed) -> None:
        """Say it once enough trials of phi have been told."""
        self._evaluated += proposed.stage != "settings"
        self._of_settings += proposed.stage == "settings"
        if self._said or proposed.stage == "settings":
            return
        if self._evaluated >= min(QUERIES, self._trials.queries - self._of_settings):  # type: ignore[union-attr]
            self._said = True
            for line in self._trials.assessment(proposed.id + 1, self.seconds).brief():  # type: ignore[union-attr]
                self._callback.say(line)


def _evaluated(
    models: _Models, trials: Trials | None, queries: int, callback: Callback, most: int | None = None
) -> Iterator[tuple[Proposed, Evaluation]]:
    """Yield what the search asks for with its evaluation, until there is nothing more to ask, or so many were asked."""

    def next_batch() -> list[Proposed]:
        batch = [] if trials is None else trials.next_batch(most)
        if trials is None:
            return []
        return [
            Proposed(
                trial.id,
                trial.start,
                trial.phi,
                on_file,
                known,
                trials.stage_of(trial.id),
                trial.settings,
                trials.state_on_line(trial),
            )
            for trial, on_file, known in batch
        ]

    metric, stage, of_queries = models.metric, "", 0
    while batch := distributed.on_first(next_batch):
        for (name, settings, _), group in groupby(batch, lambda proposed: proposed.group):
            same = list(group)
            starting = same[0].stage == "starts"
            if stage != (stage := same[0].stage):
                callback.stage(stage)
            for proposed in same:
                if proposed.known is not None:
                    yield from ((proposed, each) for each in metric.repeat(proposed.known, stage, proposed.phi))
            new = [proposed for proposed in same if not proposed.on_file]

            def where(index: int, start: str = name if starting else "", new: list[Proposed] = new) -> str:
                if start:
                    return f"at {KEPT.get(start, f'the start {start!r}')}"
                return f"query {new[index].id + 1} of {queries}"

            if new:
                points = torch.stack([proposed.phi for proposed in new])
                with models.at(new[0]) as task:
                    yield from zip(new, task.with_values(settings).evaluate_each(points, stage, where), strict=True)
        if trials is not None and (quality := trials.quality()) is not None and quality[0] > of_queries:
            of_queries = quality[0]
            callback.quality(metric.ledger.spent, quality[1])
