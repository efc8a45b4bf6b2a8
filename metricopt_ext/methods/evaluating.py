"""The loop that answers a run by the task's own metric: the only place that knows ranks."""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor

from metricopt_ext.adapters.start import Start, StartLine
from metricopt_ext.errors import RankError
from metricopt_ext.methods.agreement import alike
from metricopt_ext.methods.assessment import QUERIES, Assessment
from metricopt_ext.methods.guard import CONFIDENCE
from metricopt_ext.methods.new_classes import held_back
from metricopt_ext.methods.result import Result, kept
from metricopt_ext.methods.run import Held, SearchRun
from metricopt_ext.methods.starts import all_starts
from metricopt_ext.methods.strategy import Context, LearningStrategy, check_strategy
from metricopt_ext.runtime import distributed
from metricopt_ext.runtime.progress import Callback
from metricopt_ext.search.asking import Asking, Trial, labelled
from metricopt_ext.search.strategy import SearchResult, SearchStrategy
from metricopt_ext.search.trust_region import GuidedTrustRegion
from metricopt_ext.tasks.constraints import Limits
from metricopt_ext.tasks.evaluation import Evaluation
from metricopt_ext.tasks.log import Log
from metricopt_ext.tasks.metric import Metric
from metricopt_ext.tasks.task import FinetuneTask
from metricopt_ext.utils.checks import check_integer
from metricopt_ext.utils.words import counted

# A budget that the first trials of a search do not come near.
OUT_OF_SIGHT = 1000


class SearchLoop(LearningStrategy):
    """Runs a search on a task's own metric, for `optimize_metric`.

    Args:
        search: The search.
    """

    takes_starts: ClassVar[bool] = True
    takes_constraints: ClassVar[bool] = True
    takes_settings: ClassVar[bool] = True

    def __init__(self, search: SearchStrategy) -> None:
        self.search, self.grows = search, search.anytime

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
        task, folder, callback, repeats = context.task, context.folder, context.callback, context.task.metric.repeats
        log = folder.log(task.metric)
        callback.on_file(log.answered * repeats)
        *earlier, _ = log.sit(context.queries // repeats)
        besides = len(earlier) * (1 + self.held_back(task.metric)) * repeats
        if earlier:
            callback.say(f"it goes on from {counted(earlier[-1] * repeats, 'query')}, whose end is a query besides")
        with folder.own_ledger(task.metric, context.queries + besides):
            (result,) = search_results(
                task,
                [context.queries],
                self.search,
                starts=context.starts,
                confidence=context.confidence,
                seed=context.seed,
                callback=callback,
                kept=log,
                earlier=earlier,
                planned=log.sittings[0].budget,
            )
        return result


def runner_of(strategy: SearchStrategy | LearningStrategy | None) -> LearningStrategy:
    """Return what runs a strategy: a learner itself, or the loop that asks and tells a search; by default a guided one.

    Raises:
        ValueError: It is no strategy.
    """
    strategy = GuidedTrustRegion() if strategy is None else strategy
    check_strategy(strategy)
    return SearchLoop(strategy) if isinstance(strategy, SearchStrategy) else strategy


class Evaluating:
    """Answers what a run asks for, until there is nothing more to ask.

    Ranks that share the work run the search in step and share the evaluations; the first one's points count.

    Args:
        task: Model, loss, batches and metric; its model is left at the last of the starts (`Adapter.applied`).
        asking: Drives the run; what is on file is told and booked, and not asked again.
        callback: Notified of progress.
        run: The run, if that is all of one.
    """

    def __init__(
        self, task: FinetuneTask, asking: Asking[Any], callback: Callback, run: SearchRun | None = None
    ) -> None:
        self.task, self.asking, self.callback, self.run = task, asking, callback, run
        self._stage, self._of_queries, self._seconds, self._new = "", 0, 0.0, 0
        self._alike = distributed.world() == 1  # whether all ranks were seen to find the same value
        self._held = Held(task.adapter)
        if run is not None:
            run.held = self._held

    @property
    def seconds(self) -> float:
        """Seconds that a query took; NaN if all were on file."""
        return self._seconds / (self._new * self.task.metric.repeats) if self._new else math.nan

    def trials(self, most: int | None = None) -> Iterator[Trial]:
        """Yield what the run asks for, each once it is answered.

        Args:
            most: How many trials are answered at most, those on file among them; None for all.
        """
        while True:
            batch = self._next_batch(most)
            quality = None if self.run is None else self.run.quality()
            if quality is not None and quality[0] > self._of_queries:
                self._of_queries = quality[0]
                self.callback.quality(self.task.metric.ledger.spent, quality[1])
            if not batch:
                return
            if self._stage != (stage := batch[0].stage):
                self._stage = stage
                self.callback.stage(stage)
            yield from self._answered(batch)

    def _next_batch(self, most: int | None) -> list[Trial]:
        if most is not None and len(self.asking.trials) >= most:
            return []
        batch = self.asking.next_batch()
        if distributed.world() > 1:
            wanted = [(each.id, each.stage, each.name, dict(each.at.settings)) for each in batch]
            of_first, points = distributed.on_first(lambda: (wanted, [each.at.phi for each in batch]))
            if wanted != of_first:
                raise RankError(
                    f"rank {distributed.rank()} would ask for {wanted}, and rank 0 for {of_first}: the loss must be the"
                    " same on all"
                )
            batch = self.asking.placed(points)
        return batch if most is None else [trial for trial in batch if trial.id < most]

    def _answered(self, trials: Sequence[Trial]) -> Iterator[Trial]:
        """Answer the trials of a batch: first those on file, then the others."""
        metric, stage = self.task.metric, trials[0].stage
        for trial in trials:
            if (known := self.asking.answer(trial.id)) is not None:
                metric.ledger.spend(stage, metric.repeats)
                yield trial
                metric.tell(known, stage, trial.at.phi, on_file=True)
        new = [trial for trial in trials if self.asking.log.told(trial.id) is None]
        began, spent = time.perf_counter(), metric.ledger.spent
        for trial, evaluation in zip(new, self._evaluations(new), strict=True):
            self._seconds, self._new = self._seconds + time.perf_counter() - began, self._new + 1
            self.asking.tell(trial.id, evaluation)
            yield trial
            spent += metric.repeats  # the ledger has all that were evaluated at once already
            metric.tell(evaluation, stage, trial.at.phi, spent)
            began = time.perf_counter()

    def _evaluations(self, trials: Sequence[Trial]) -> Iterator[Evaluation]:
        """Yield the metric's evaluations of trials, as many at once as there are ranks, each of which books all.

        The first of a run is made by each of them, as one query: what they find must be the same.

        Raises:
            MetricError: The metric failed.
            BudgetError: The budget is spent.
            RankError: Ranks find different values of the first.
        """
        metric = self.task.metric

        def judged(trial: Trial) -> Evaluation:
            self._held.at(trial.at)
            return self.task.judge(trial.at, self._where(trial))

        while trials:
            possible = int(min(distributed.world() if self._alike else 1, metric.ledger.left / metric.repeats))
            wave, trials = trials[: max(1, possible)], trials[max(1, possible) :]
            metric.ledger.spend(wave[0].stage, len(wave) * metric.repeats)
            if self._alike:
                yield from distributed.each(judged, wave)
            else:
                self._alike = True
                yield alike(metric, list(distributed.each(judged, [*wave] * distributed.world())))

    def _where(self, trial: Trial) -> str:
        """Return what an error says of where it came."""
        if trial.stage == "starts":
            return f"at {kept(trial.name)}"
        return f"query {trial.id + 1}" + ("" if self.run is None else f" of {self.run.queries}")


def search_results(
    task: FinetuneTask,
    checkpoints: Sequence[int],
    search: SearchStrategy | None = None,
    *,
    starts: Mapping[str, Start | StartLine] | None = None,
    confidence: float = CONFIDENCE,
    seed: int = 0,
    callback: Callback | None = None,
    kept: Log | None = None,
    earlier: Sequence[int] = (),
    planned: int | None = None,
) -> Iterator[Result]:
    """Run a search once, and yield the guarded result that each number of queries would have had.

    Each checkpoint before the last costs a guided search a query more, that of its own end, and another where classes
    are new (`kept_share`). Settings of inference are tuned once, by as many queries as the first checkpoint alone would
    have for them. The model is left unchanged.

    Args:
        task: Model, loss, batches and metric.
        checkpoints: Numbers of queries, ascending; those of the starts count among them.
        search: The search.
        starts: What it may begin from besides phi = 0, by name; each costs a query. Lines of starts get theirs by the
            first checkpoint (`line_queries`).
        confidence: How sure the guard must be, at least 0.5 and below 1.
        seed: Seed of all draws.
        callback: Notified of progress.
        kept: Keeps the evaluations; those on file are told and booked, and not made again.
        earlier: Evaluations of earlier sittings, to whose ends the run comes first.
        planned: Evaluations by which lines and settings get theirs; by default those of the first checkpoint.

    Raises:
        WeightsError: As from `FinetuneTask.keeping_weights`.
        ValueError, BudgetError, AdapterError, MetricError: As from `optimize_metric` and `all_starts`.
    """
    search, callback = search or GuidedTrustRegion(), callback or Callback()
    candidates = all_starts(task, starts or {})
    numbers = [queries // task.metric.repeats for queries in checkpoints]
    fixed = sum(isinstance(each, Start) for each in candidates.values())
    check_checkpoints(search, task, numbers, fixed)
    run = SearchRun(task, search, candidates, [*earlier, numbers[0]], seed, confidence, planned)
    with _begun(task, run, kept, callback) as loop:
        said, of_settings = False, 0
        for queries in numbers:
            if queries != numbers[0]:
                run.queries = queries
            for trial in loop.trials():
                of_settings += trial.stage == "settings"
                of_phi = trial.id + 1 - of_settings
                if not said and trial.stage != "settings" and of_phi >= min(QUERIES, run.queries - of_settings):
                    said = True
                    for line in run.assessment(loop.asking, trial.id + 1, loop.seconds).brief():
                        callback.say(line)
            yield distributed.on_first(lambda: run.outcome(loop.asking))
        if moved := loop.asking.moved():
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
    kept: Log | None = None,
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
    # No end is asked for within the first trials, and no batch cut, if the budget is out of sight.
    run = SearchRun(task, search, all_starts(task, starts), OUT_OF_SIGHT + most, seed, confidence)
    with _begun(task, run, kept, callback) as loop:
        for _ in loop.trials(most):
            pass
        return distributed.on_first(lambda: run.assessment(loop.asking, most, loop.seconds))


@contextmanager
def _begun(task: FinetuneTask, run: SearchRun, kept: Log | None, callback: Callback) -> Iterator[Evaluating]:
    run.strategy.check(task)
    task.check_loss(run.seed, 2)
    with task.metric.calling(callback.answered), task.keeping_weights():
        asking = run.asking(kept or Log(None, task.metric))
        try:
            yield Evaluating(task, asking, callback, run)
        finally:
            run.held = None


def searched(task: FinetuneTask, search: SearchStrategy, start: Tensor, queries: int, *, seed: int = 0) -> SearchResult:
    """Search on a task's own metric from a start, whose cost is the first query; returns where the search ends.

    The model is left unchanged, and nothing is guarded. The metric's log, if it has one, is of this search alone.

    Args:
        task: Model, loss, batches and metric.
        search: The search.
        start: phi_0, ``d``, of the model as it stands.
        queries: Budget; exactly this many evaluations are made, and booked under "search".
        seed: Seed of all draws.

    Raises:
        ValueError: The budget is below `least_queries`; nothing was evaluated.
        BudgetError: The metric's ledger has fewer queries left; nothing was evaluated.
        AdapterError: As from `SearchStrategy.begin`; nothing was evaluated.
        MetricError: The metric failed; the message says at which query.
    """
    check_checkpoints(search, task, [queries], 1)
    search.check(task)
    there = replace(task.adapter.as_start(), phi=start)
    begun = search.begin(task, there, lambda: queries, seed=seed)
    kept = task.metric.log or Log(None, task.metric)
    asking = Asking(labelled(begun.batches(), "search", "start"), kept, task.metric.repeats)
    with task.adapter.applied(there):
        for trial in Evaluating(task, asking, Callback()).trials():
            if trial.id == 0 and (evaluation := asking.answer(0)) is not None:
                begun.limits = Limits.of(task.metric.constraints, evaluation)
        return distributed.on_first(begun.end)


def check_checkpoints(search: SearchStrategy, task: FinetuneTask, checkpoints: Sequence[int], starts: int) -> None:
    """Refuse numbers of evaluations at which a search can't be looked at.

    Args:
        search: The search.
        task: Its metric's ledger must have the queries.
        checkpoints: The numbers.
        starts: How many starts are asked for first.

    Raises:
        ValueError: They don't ascend, or one is below the least.
        BudgetError: The metric's ledger has fewer queries left.
    """
    if list(checkpoints) != sorted(set(checkpoints)) or not checkpoints:
        raise ValueError(f"checkpoints are {list(checkpoints)}; they must be one or more numbers that ascend")
    kept = held_back(search, task.metric)
    least = search.least_queries(task.dim, starts) + kept
    for queries in checkpoints:
        check_integer(0, queries=queries)
        if queries < least:
            raise ValueError(f"queries is {queries}; this search in {task.dim} dimensions needs at least {least}")
    needed = (checkpoints[-1] + (len(checkpoints) - 1) * (1 + kept)) * task.metric.repeats
    task.metric.ledger.require(needed)
