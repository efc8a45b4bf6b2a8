"""The loop that answers a run by the task's own metric: the only place that knows ranks."""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

from torch import Tensor

from metricopt_ext.errors import RankError
from metricopt_ext.methods.assessment import QUERIES
from metricopt_ext.methods.guard import held_back
from metricopt_ext.methods.result import Result, kept
from metricopt_ext.methods.run import Held, SearchRun
from metricopt_ext.methods.strategy import Plan
from metricopt_ext.runtime import distributed
from metricopt_ext.runtime.identity import ROUNDING
from metricopt_ext.runtime.progress import Callback
from metricopt_ext.search.asking import Asking, Trial, labelled
from metricopt_ext.search.strategy import SearchResult, SearchStrategy
from metricopt_ext.tasks.constraints import Limits
from metricopt_ext.tasks.evaluation import Evaluation
from metricopt_ext.tasks.log import Log
from metricopt_ext.tasks.metric import Metric
from metricopt_ext.tasks.task import FinetuneTask

CHANCE = 1e-6  # how unlikely a difference of two ranks' noisy values must be to be one of data


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


@contextmanager
def begun(run: SearchRun, callback: Callback) -> Iterator[Evaluating]:
    """Begin what answers a run, once its loss was checked, and refuse one that changed the model's weights."""
    task = run.task
    run.strategy.check(task)
    task.check_loss(run.seed, 2)
    with task.metric.calling(callback.answered), task.keeping_weights():
        try:
            yield Evaluating(task, run.asking, callback, run)
        finally:
            run.held = None


def search_results(plan: Plan, later: Sequence[int] = (), kept: Log | None = None) -> Iterator[Result]:
    """Run a search once, and yield the guarded result at its queries, and at each of further numbers of them.

    Each number but the last costs a guided search a query more, that of its own end, and another where classes are new
    (`kept_share`). Settings of inference are tuned, and lines of starts looked along, once, by as many queries as the
    first number alone would have for them. The model is left unchanged.

    Args:
        plan: What is searched, and for how many queries at first; those of the starts count among them.
        later: Further numbers of queries, ascending.
        kept: Keeps the evaluations; those on file are told and booked, and not made again. The run comes to the ends of
            its earlier sittings first.

    Raises:
        WeightsError: As from `FinetuneTask.keeping_weights`.
        ValueError: The numbers do not ascend.
        BudgetError, AdapterError, MetricError: As from `optimize_metric`.
    """
    metric, numbers = plan.task.metric, [each // plan.task.metric.repeats for each in (plan.queries, *later)]
    if numbers != sorted(set(numbers)):
        raise ValueError(f"queries are {[plan.queries, *later]}; they must ascend, by the metric's repeats at least")
    metric.ledger.require((numbers[-1] + len(later) * (1 + held_back(plan.strategy, metric))) * metric.repeats)
    run = SearchRun(plan, kept or Log(None, metric))
    with begun(run, plan.callback) as loop:
        said, of_settings = False, 0
        for number in numbers:
            if number != numbers[0]:
                run.queries = number
            for trial in loop.trials():
                of_settings += trial.stage == "settings"
                of_phi = trial.id + 1 - of_settings
                if not said and trial.stage != "settings" and of_phi >= min(QUERIES, run.queries - of_settings):
                    said = True
                    for line in run.assessment(trial.id + 1, loop.seconds).lines():
                        plan.callback.say(line)
            yield distributed.on_first(run.outcome)
        if moved := run.asking.moved():
            plan.callback.say(moved)


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
        BudgetError: The budget is below `least_queries`, or the metric's ledger has fewer queries left.
        AdapterError: As from `SearchStrategy.begin`.
        MetricError: The metric failed; the message says at which query.
    """
    search.size(queries, task.dim)  # refuses too few
    task.metric.ledger.require(queries)
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


def alike(metric: Metric, found: Sequence[Evaluation]) -> Evaluation:
    """Return the first rank's evaluation of a model, if all ranks found the same.

    Raises:
        RankError: One did not.
    """
    first, *others = found
    for number, other in enumerate(others, 1):
        if not _agree(metric, first, other):
            here, there = (
                f"{each.value:.6g}" + "".join(f" (halves {a:.6g}, {b:.6g})" for a, b in each.pairs[:1])
                for each in (first, other)
            )
            raise RankError(
                f"metric {metric.name!r} is {here} on rank 0, but {there} on rank {number}, for the same model: each"
                " rank's metric must see all the data (no shard of it, no DistributedSampler), and draw the same at"
                " random"
            )
    return first


def _agree(metric: Metric, a: Evaluation, b: Evaluation) -> bool:
    """Whether evaluations of one model are the same but for rounding, and for the noise that repeats show."""
    low, high = metric.bounds or (0.0, 1e-3)
    close = partial(math.isclose, rel_tol=ROUNDING, abs_tol=1e-6 * (high - low))  # single precision, of what is near 0
    if metric.repeats > 1:
        spread = math.hypot(a.noise or 0.0, b.noise or 0.0)
        if close(a.value, b.value) or not spread:
            return close(a.value, b.value)
        from scipy.special import stdtr  # of Student's t distribution

        return bool(2 * stdtr(2 * (metric.repeats - 1), -abs(a.value - b.value) / spread) > CHANCE)
    values, others = ((each.value, *chain(*each.pairs)) for each in (a, b))
    same = len(values) == len(others) and a.also.keys() == b.also.keys() and all(map(close, values, others))
    return same and all(math.isclose(a.also[n], b.also[n], rel_tol=ROUNDING, abs_tol=1e-9) for n in a.also)
