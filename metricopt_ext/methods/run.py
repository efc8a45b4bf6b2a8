"""A run on a metric as one generator: starts, lines of them, settings of inference, and the search from one of them."""

import math
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

from torch import Tensor

from metricopt_ext.adapters.adapter import Adapter
from metricopt_ext.adapters.start import Start
from metricopt_ext.errors import BudgetError, RankError
from metricopt_ext.methods.assessment import QUERIES, Assessment, Evaluated, assessed, kind_of
from metricopt_ext.methods.ending import Began, decided, guarded
from metricopt_ext.methods.guard import chosen_start, held_back
from metricopt_ext.methods.result import Result, kept
from metricopt_ext.methods.starts import divided
from metricopt_ext.methods.strategy import Plan
from metricopt_ext.methods.tuned_settings import accepted
from metricopt_ext.runtime import distributed
from metricopt_ext.runtime.identity import ROUNDING
from metricopt_ext.runtime.progress import Callback
from metricopt_ext.search.asking import Asking, Batch, Run, Trial, labelled
from metricopt_ext.search.stages import SETTINGS, Point, SettingsStage, along_line, planned_lines
from metricopt_ext.search.strategy import Answers, Begun, SearchResult, SearchStrategy
from metricopt_ext.search.visited import ranked
from metricopt_ext.tasks.constraints import Limits
from metricopt_ext.tasks.evaluation import Evaluation
from metricopt_ext.tasks.log import Log
from metricopt_ext.tasks.metric import Metric
from metricopt_ext.tasks.task import FinetuneTask
from metricopt_ext.utils.words import counted

CHANCE = 1e-6  # how unlikely a difference of two ranks' noisy values must be to be one of data


# A budget that the first trials of a search do not come near: no end is asked for among them, and no batch is cut.
OUT_OF_SIGHT = 1_000_000


class Held:
    """A model that stays at a start until it has to be at another, whose tensors are put in only then.

    Args:
        adapter: The model's, to which something else restores what it had (`Adapter.applied`).
    """

    def __init__(self, adapter: Adapter) -> None:
        self._adapter = adapter
        self._there: Start | None = None

    def at(self, start: Start) -> None:
        """Have the model be a start."""
        there = self._there
        if there is not None and there.tensors is start.tensors:
            self._adapter.set_phi(start.phi)
        else:
            self._adapter.apply(start)
            self._there = start


class SearchRun:
    """What a run asks for, in order, and what it comes to.

    It first asks for the starts, then along lines of them, then, at one of them, for settings of inference if the task
    has any, and then searches phi from there. Last it asks for a part of the way to the end where classes are new.

    Args:
        plan: What it is asked for; of its metric direction, bounds and repeats count. Where earlier sittings had fewer
            queries, the run comes to the end of each, a query of its own, and goes on; lines and settings get theirs by
            the first.
        log: Has the answers on file, and gets those to come.

    Attributes:
        asking: Drives the run.
        queries: Those of the sitting; it may be raised.
        starts: The starts, by name; the best of lines, and tuned settings, are added.
        evaluated: The metric's evaluations of them.
        points: All starts that were asked for, those on lines too.
    """

    def __init__(self, plan: Plan, log: Log) -> None:
        self.task, task = plan.task, plan.task
        self.strategy: SearchStrategy = plan.strategy
        self.queries, *self._later = [OUT_OF_SIGHT] if plan.endless else log.sit(plan.queries // task.metric.repeats)
        self.planned = OUT_OF_SIGHT if plan.endless else log.sittings[0].budget
        self.starts, self._lines = divided(plan.starts)
        self.evaluated: dict[str, Evaluation] = {}
        self.points: list[Point] = []
        self.limits: Limits | None = None  # known with the start
        self.started = self._against = "start"  # where the search begins, and what its end is held against
        self.seed, self._confidence = plan.seed, plan.confidence
        self._fixed = len(self.starts)
        self._least = self.strategy.least_queries(task.dim, self._fixed)
        self._strengths: dict[str, float] = {}  # the t of the best of each line
        self._settings: SettingsStage | None = None
        self._search: Begun | None = None
        self._part: Answers | None = None  # what is known of the part of the way to the end
        self._over = False  # whether there is nothing more to ask
        self._besides = 0  # evaluations of where earlier sittings ended
        self.held: Held | None = None  # where a loop has the model meanwhile
        check = (lambda values: None) if task.settings is None else task.settings.complete
        self.asking = Asking(self.batches(), log, task.metric.repeats, check)

    # --- What is asked, in order -------------------------------------------------------------------------------------

    def batches(self) -> Run[None]:
        """Yield what is asked for, and be sent the answers; never ends, as more may be spent."""
        answers = yield Batch(list(self.starts.values()), "starts", list(self.starts))
        for (name, start), (_, evaluation) in zip(list(self.starts.items()), answers, strict=True):
            assert evaluation is not None  # as a start's value is needed
            self.evaluated[name] = evaluation
            self.points.append(Point(name, start, evaluation))
        self.limits = Limits.of(self.task.metric.constraints, self.evaluated["start"])
        self.task.check_outcomes(self.evaluated["start"].outcomes.keys())
        named = ["start", *(name for name, each in self.starts.items() if each.presumed)]
        self._against = self._chosen(named)
        yield from self._along_lines()
        self.started = model = self._begin_at()
        if self.task.settings is not None:
            yield from self._tune_settings()
        yield from self._searching(model)

    def _along_lines(self) -> Run[None]:
        base = self.task.adapter.base_state_dict()
        spare = self.planned - held_back(self.strategy, self.task.metric) - self._least
        ranks = {name: ranked(each, self.limits) for name, each in self.evaluated.items()}
        planned = planned_lines(self._lines, self.starts, self.planned, spare, base, ranks, self._against)
        for name, line in self._lines.items():
            if not planned[name].queries:
                continue
            best = self.starts[self._chosen(self.evaluated)]
            found = yield from labelled(
                along_line(name, line, planned[name].queries, self.points, best, base, self.limits), "starts", name
            )
            if found is not None:
                (_, self.starts[name], self.evaluated[name]), self._strengths[name] = found

    def _chosen(self, among: Collection[str]) -> str:
        return chosen_start(self.starts, self.evaluated, self.limits, self._confidence, among)

    def _begin_at(self) -> str:
        """Return the name of the start that the search begins from.

        That is a fixed one where a line's best, which is better, differs from it in phi alone: the search knows all of
        the line, and the guard then judges the whole way from a start that was not chosen among as many. With settings
        it is the one chosen of all, as they are tuned there.
        """
        best = self._chosen(self.evaluated)
        if best not in self._strengths or (self.task.settings is not None and self.task.settings.queries):
            return best
        fixed = [name for name in self.evaluated if name not in self._strengths]
        same = [name for name in fixed if self.starts[name].of_the_same(self.starts[best])]
        return self._chosen(same) if same else best

    def _tune_settings(self) -> Run[None]:
        """Tune settings at the start that was chosen; those that surely gain are a start of their own."""
        assert self.task.settings is not None
        at, asked = self.starts[self.started], len(self.points)
        left = self.planned - self._for_what_is_kept()
        most = max(0, min((left - asked) // 2, left - self._least - (asked - self._fixed)))
        stage = self._settings = SettingsStage(self.task.settings, at, self.evaluated[self.started], most, self.limits)
        yield from labelled(stage.batches(), SETTINGS, self.started)
        if accepted(stage, self._confidence):
            _, self.starts[SETTINGS], self.evaluated[SETTINGS] = stage.best
            self.started = SETTINGS

    def _searching(self, model: str) -> Run[None]:
        """Search from the start that was chosen, of which all that differs in phi alone is known.

        Args:
            model: The given start whose model that is.
        """
        at, points = self.starts[self.started], list(self.points)
        if self.started == SETTINGS:
            points.append(Point(SETTINGS, at, self.evaluated[SETTINGS]))
        known = [(each.start.phi, each.evaluation) for each in points if each.start.of_the_same(at)]
        held, spent = self._for_what_is_kept(), self._spent_before()
        with self._standing():
            search = self.strategy.begin(
                self.task, at, lambda: self.queries - (spent - len(known)) - held, known=known, seed=self.seed
            )
        search.limits, self._search = self.limits, search
        lines = {name: self.evaluated[name] for name in self._strengths if self.starts[name].of_the_same(at)}
        if lines:
            search.reached = self.starts[min(lines, key=lambda name: ranked(lines[name], self.limits))].phi
        batches, answers, shared = search.batches(), None, 0  # the budget at which a part of the way was asked for
        while True:
            with self._standing():
                starts = batches.send(answers)  # type: ignore[arg-type]
            self._over = not starts
            if starts:
                self._part = None
            elif held and shared != self.queries:
                shared, starts = self.queries, self._part_of_the_way()
                if starts:
                    self._part = yield Batch(starts, "search", [model])
                    starts = []
            if self._over and self._later:
                self._besides += search.end().queries - len(search.points) + (self._part is not None)
                self.queries, answers = self._later.pop(0), Answers()
            else:
                answers = yield Batch(starts, "search", [model] * len(starts))

    def _part_of_the_way(self) -> list[Start]:
        """Return what the guard keeps of the way to the search's end; nothing where that is none or all of it."""
        assert self._search is not None
        end, at = self._search.end(), self.starts[self.started]
        _, share = decided(self.task, self._began, end, self._confidence, self.limits)
        if share is None or not 0 < share.share < 1:
            return []
        return [replace(at, phi=share.point(at.phi, end.phi))]

    def _for_what_is_kept(self) -> int:
        """Return how many evaluations are held back; without halves, there is no share to keep."""
        evaluated = self.evaluated[self.started].halves is not None
        return held_back(self.strategy, self.task.metric) if evaluated else 0

    def _spent_before(self) -> int:
        """Return how many evaluations were made before the search, those that were given up not among them."""
        return len(self.points) + (0 if self._settings is None else self._settings.spent)

    @contextmanager
    def _standing(self) -> Iterator[None]:
        """Have the model be the start that is searched from, at phi = 0: the search may ask for its loss."""
        start = replace(self.starts[self.started], phi=self.task.origin())
        if self.held is not None:
            self.held.at(start)
            yield
            return
        with self.task.adapter.applied(start):
            yield

    # --- What it comes to --------------------------------------------------------------------------------------------

    def outcome(self) -> Result:
        """Return what the guard makes of all that was told; the run goes on as if nobody had looked.

        Raises:
            BudgetError: Too few were; the message says how many are missing.
        """
        asking = self.asking
        asking.go_on()
        least, evaluated = self._least, asking.log.answered
        if self.points:
            least += self._spent_before() - self._fixed
        if self.points and self._search is None:  # the search begins once all of these are answered
            told = (asking.log.told(each.id) for each in asking.batch)
            least += sum(each is None or not each.given_up for each in told)
        if evaluated < least and not self._over:
            raise BudgetError(
                f"{counted(least - evaluated, 'more trial')} must be told before there is a result:"
                f" {evaluated} of at least {least} were"
            )
        assert self._search is not None
        end = self._search.end(Answers() if self._over else asking.told())
        part = None if self._part is None else next(iter(self._part.evaluated), None)
        result = guarded(self.task, self._began, end, self._confidence, part, self.limits, self._settings)
        besides = self._besides * self.task.metric.repeats
        queries = {**result.queries, "search": result.queries["search"] + besides}
        return replace(result, queries=queries, queries_per_start=result.queries_per_start + besides)

    def assessment(self, most: int, seconds: float = math.nan) -> Assessment:
        """Return what the first trials say, as far as they were told, of whether the search is worth its queries.

        Args:
            most: How many trials.
            seconds: Seconds that a query took.
        """
        told = [(each, self.asking.answer(each.id)) for each in self.asking.trials[:most]]
        known = [(trial, evaluation) for trial, evaluation in told if evaluation is not None]
        of_phi = [each for each in known if each[0].stage != "settings"]
        adapter, began = self.task.adapter, self.starts[self.started]
        first = [
            Evaluated(
                trial.name if trial.id < self._fixed else "",
                kind_of(adapter, trial.at, began if trial.stage == "search" else None),
                evaluation,
            )
            for trial, evaluation in of_phi
        ]
        besides = len(known) - len(of_phi)
        if SETTINGS in self.evaluated:
            of_starts = sum(trial.stage == "starts" for trial, _ in of_phi)
            first.insert(of_starts, Evaluated(SETTINGS, "settings", self.evaluated[SETTINGS]))
            besides -= 1
        return assessed(
            self.task.metric,
            first,
            self.task.dim,
            confidence=self._confidence,
            least=self._least,
            seconds=seconds,
            besides=besides,
            limits=self.limits,
        )

    def quality(self) -> tuple[int, float] | None:
        """Return how many points f knows, and the Spearman correlation of what it predicted with what was found.

        None if it predicted nothing yet.
        """
        if self._search is None or (quality := self._search.quality()) is None:
            return None
        return len(self._search.points), quality.spearman

    @property
    def _began(self) -> Began:
        return Began(self.starts, self.evaluated, self.started, self._against, self.points, self._strengths)


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
