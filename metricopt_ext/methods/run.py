"""A run on a metric: one generator of all that it asks for, and the loop that answers it on the task's own metric."""

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

from metricopt_ext.adapters.start import Start
from metricopt_ext.errors import BudgetError, RankError
from metricopt_ext.methods.assessment import QUERIES, Assessment, Evaluated, assessed, kind_of
from metricopt_ext.methods.ending import guarded
from metricopt_ext.methods.guard import Began, accepted, chosen_start, decided, held_back
from metricopt_ext.methods.result import Result, kept
from metricopt_ext.methods.starts import divided
from metricopt_ext.methods.strategy import Plan
from metricopt_ext.runtime import distributed
from metricopt_ext.runtime.identity import ROUNDING
from metricopt_ext.runtime.progress import Callback
from metricopt_ext.search.asking import Asking, Batch, Run, Trial, labelled
from metricopt_ext.search.stages import SETTINGS, Point, SettingsStage, along_line, planned_lines
from metricopt_ext.search.strategy import Answers, Begun
from metricopt_ext.search.visited import ranked
from metricopt_ext.tasks.constraints import Limits
from metricopt_ext.tasks.evaluation import Evaluation
from metricopt_ext.tasks.log import Log
from metricopt_ext.tasks.metric import Metric
from metricopt_ext.tasks.settings import Settings
from metricopt_ext.tasks.task import FinetuneTask
from metricopt_ext.utils.words import counted

# A budget that the first trials of a search do not come near: no end is asked for among them, and no batch is cut.
OUT_OF_SIGHT = 1_000_000

CHANCE = 1e-6  # how unlikely a difference of two ranks' noisy values must be to be one of data


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
        queries: Evaluations of the sitting; they may be raised.
        starts: The starts, by name; the best of lines, and tuned settings, are added.
        evaluated: The metric's evaluations of them.
        points: All starts that were asked for, those on lines too.
        standing: Has the model be a start inside a ``with`` block, where the search may ask for its loss; `Evaluating`
            puts one in its place that leaves the model there.

    Raises:
        FileFormatError: The log was given more queries.
    """

    def __init__(self, plan: Plan, log: Log) -> None:
        self.task, self.strategy, self.seed, self._confidence = plan.task, plan.strategy, plan.seed, plan.confidence
        task, budget = plan.task, plan.queries // plan.task.metric.repeats
        self.queries, *self._later = [OUT_OF_SIGHT] if plan.endless else log.sit(budget)
        self._planned = OUT_OF_SIGHT if plan.endless else log.sittings[0].budget
        self.starts, self._lines = divided(plan.starts)
        self._fixed, self._least = len(self.starts), self.strategy.least_queries(task.dim, len(self.starts))
        self.evaluated: dict[str, Evaluation] = {}
        self.points: list[Point] = []
        self.limits: Limits | None = None  # known with the start
        self.started = self._against = "start"  # where the search begins, and what its end is held against
        self._strengths: dict[str, float] = {}  # the t of the best of each line
        self._settings: SettingsStage | None = None
        self._search: Begun | None = None
        self._part: Answers | None = None  # what is known of the part of the way to the end
        self._over, self._besides = False, 0  # whether nothing is left to ask; evaluations of earlier sittings' ends
        self.standing: Callable[[Start], AbstractContextManager[Any]] = task.adapter.applied
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
        self._against = self._chosen(["start", *(name for name, each in self.starts.items() if each.presumed)])
        yield from self._along_lines()
        self.started = model = self._begin_at()
        if self.task.settings is not None:
            yield from self._tune_settings(self.task.settings)
        yield from self._searching(model)

    def _along_lines(self) -> Run[None]:
        base = self.task.adapter.base_state_dict()
        spare = self._planned - held_back(self.strategy, self.task.metric) - self._least
        ranks = {name: ranked(each, self.limits) for name, each in self.evaluated.items()}
        planned = planned_lines(self._lines, self.starts, self._planned, spare, base, ranks, self._against)
        for name, line in self._lines.items():
            if not planned[name].queries:
                continue
            best = self.starts[self._chosen(self.evaluated)]
            along = along_line(name, line, planned[name].queries, self.points, best, base, self.limits)
            found = yield from labelled(along, "starts", name)
            if found is not None:
                (_, self.starts[name], self.evaluated[name]), self._strengths[name] = found

    def _chosen(self, among: Collection[str]) -> str:
        starts = {name: self.starts[name] for name in among}
        return chosen_start(starts, self.evaluated, self.limits, self._confidence)

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

    def _tune_settings(self, settings: Settings) -> Run[None]:
        """Tune settings at the start that was chosen; those that surely gain are a start of their own."""
        at, asked = self.starts[self.started], len(self.points)
        left = self._planned - self._for_what_is_kept()
        most = max(0, min((left - asked) // 2, left - self._least - (asked - self._fixed)))
        stage = self._settings = SettingsStage(settings, at, self.evaluated[self.started], most, self.limits)
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
        held, elsewhere = self._for_what_is_kept(), self._spent_before() - len(known)
        there = replace(at, phi=self.task.origin())
        with self.standing(there):
            search = self._search = self.strategy.begin(
                self.task, at, lambda: self.queries - elsewhere - held, known=known, seed=self.seed
            )
        search.limits = self.limits
        lines = {name: self.evaluated[name] for name in self._strengths if self.starts[name].of_the_same(at)}
        if lines:
            search.reached = self.starts[min(lines, key=lambda name: ranked(lines[name], self.limits))].phi
        batches, answers, shared = search.batches(), None, 0  # the budget at which a part of the way was asked for
        while True:
            with self.standing(there):
                starts = batches.send(answers)
            self._over, answers = not starts, Answers()
            if starts:
                self._part = None
            elif held and shared != self.queries:
                shared = self.queries
                if part := self._part_of_the_way(search):
                    self._part = yield Batch(part, "search", [model])
            if self._over and self._later:
                self._besides += search.end().queries - len(search.points) + (self._part is not None)
                self.queries = self._later.pop(0)
            else:
                answers = yield Batch(starts, "search", [model] * len(starts))

    def _part_of_the_way(self, search: Begun) -> list[Start]:
        """Return what the guard keeps of the way to the search's end; nothing where that is none or all of it."""
        end, at = search.end(), self.starts[self.started]
        share = decided(self._began, end).share
        if share is None or not 0 < share.share < 1:
            return []
        return [replace(at, phi=share.point(at.phi, end.phi))]

    def _for_what_is_kept(self) -> int:
        """Return how many evaluations are held back; without halves, there is no share to keep."""
        halves = self.evaluated[self.started].halves is not None
        return held_back(self.strategy, self.task.metric) if halves else 0

    def _spent_before(self) -> int:
        """Return how many evaluations were made before the search, those that were given up not among them."""
        return len(self.points) + (0 if self._settings is None else self._settings.spent)

    # --- What it comes to --------------------------------------------------------------------------------------------

    def outcome(self) -> Result:
        """Return what the guard makes of all that was told; the run goes on as if nobody had looked.

        Raises:
            BudgetError: Too few were; the message says how many are missing.
        """
        asking = self.asking
        asking.go_on()
        entries = [(each.stage, asking.log.told(each.id)) for each in asking.trials]
        known = [stage for stage, told in entries if told is not None and not told.given_up]
        missing = self._least - self._fixed - known.count("search")
        if self._search is None:  # it begins once all that is open is answered
            missing += sum(asking.log.told(each.id) is None for each in asking.batch)
        if missing > 0 and not self._over:
            more = counted(missing, "more trial")
            raise BudgetError(f"{more} must be told before there is a result; {len(known)} were")
        assert self._search is not None
        end = self._search.end(Answers() if self._over else asking.told())
        part = None if self._part is None else next(iter(self._part.evaluated), None)
        return guarded(self._began, end, part, self._besides)

    def assessment(self, most: int) -> Assessment:
        """Return what the first trials say, as far as they were told, of whether the search is worth its queries.

        Args:
            most: How many trials.
        """
        told = [(each, self.asking.answer(each.id)) for each in self.asking.trials[:most]]
        known = [(trial, evaluation) for trial, evaluation in told if evaluation is not None]
        began, first = self.starts[self.started], list[Evaluated]()
        for trial, evaluation in known:
            if trial.stage != SETTINGS:
                kind = kind_of(self.task.adapter, trial.at, began if trial.stage == "search" else None)
                first.append(Evaluated(trial.name if trial.id < self._fixed else "", kind, evaluation))
        if SETTINGS in self.evaluated:
            of_starts = sum(trial.stage == "starts" for trial, _ in known)
            first.insert(of_starts, Evaluated(SETTINGS, "settings", self.evaluated[SETTINGS]))
        return assessed(
            self.task.metric,
            first,
            self.task.dim,
            confidence=self._confidence,
            least=self._least,
            besides=len(known) - len(first),
            limits=self.limits,
        )

    def quality(self) -> tuple[int, float] | None:
        """Return how many points f knows, and the Spearman correlation of what it predicted with what was found.

        None if it predicted nothing yet.
        """
        search = self._search
        quality = None if search is None else search.quality()
        return None if search is None or quality is None else (len(search.points), quality.spearman)

    @property
    def _began(self) -> Began:
        besides = self._confidence, self._strengths, self.limits, self._settings
        return Began(self.task, self.starts, self.evaluated, self.started, self._against, self.points, *besides)


class Evaluating:
    """Answers what a run asks for by the task's own metric, until there is nothing more to ask.

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
        self._stage, self._known = "", 0  # what was told of
        self._there: Start | None = None
        self._alike = distributed.world() == 1  # whether all ranks were seen to find the same value
        if run is not None:
            run.standing = self._standing

    def trials(self) -> Iterator[Trial]:
        """Yield what the run asks for, each once it is answered."""
        while True:
            batch = self._next_batch()
            quality = None if self.run is None else self.run.quality()
            if quality is not None and quality[0] > self._known:
                self._known = quality[0]
                self.callback.quality(self.task.metric.ledger.spent, quality[1])
            if not batch:
                return
            if self._stage != batch[0].stage:
                self._stage = batch[0].stage
                self.callback.stage(self._stage)
            yield from self._answered(batch)

    @contextmanager
    def _standing(self, start: Start) -> Iterator[None]:
        """Have the model be a start, whose tensors are put in only where it has others, and leave it there."""
        if self._there is not None and self._there.tensors is start.tensors:
            self.task.adapter.set_phi(start.phi)
        else:
            self.task.adapter.apply(start)
            self._there = start
        yield

    def _next_batch(self) -> list[Trial]:
        batch = self.asking.next_batch()
        if distributed.world() == 1:
            return batch
        wanted = [(each.id, each.stage, each.name, dict(each.at.settings)) for each in batch]
        of_first, points = distributed.on_first(lambda: (wanted, [each.at.phi for each in batch]))
        if wanted != of_first:
            raise RankError(
                f"rank {distributed.rank()} would ask for {wanted}, and rank 0 for {of_first}: the loss must be the"
                " same on all"
            )
        return self.asking.placed(points)

    def _answered(self, trials: Sequence[Trial]) -> Iterator[Trial]:
        """Answer the trials of a batch: first those on file, then the others."""
        metric, stage = self.task.metric, trials[0].stage
        for trial in trials:
            if (known := self.asking.answer(trial.id)) is not None:
                metric.ledger.spend(stage, metric.repeats)
                metric.tell(known, stage, trial.at.phi, on_file=True)
                yield trial
        new, spent = [trial for trial in trials if self.asking.log.told(trial.id) is None], metric.ledger.spent
        for trial, evaluation in zip(new, self._evaluations(new), strict=True):
            self.asking.tell(trial.id, evaluation)
            spent += metric.repeats  # the ledger has all that were evaluated at once already
            metric.tell(evaluation, stage, trial.at.phi, spent)
            yield trial

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
            with self._standing(trial.at):
                return self.task.judge(trial.at, self._where(trial))

        while trials:
            at_once = min(distributed.world() if self._alike else 1, metric.ledger.left / metric.repeats)
            wave, trials = trials[: max(1, int(at_once))], trials[max(1, int(at_once)) :]
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
    """Begin what answers a run, and refuse one that changed the model's weights."""
    with run.task.metric.calling(callback.answered), run.task.keeping_weights():
        yield Evaluating(run.task, run.asking, callback, run)


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
    plan.check()
    run, advised, of_settings = SearchRun(plan, kept or Log(None, metric)), False, 0
    with begun(run, plan.callback) as loop:
        for number in numbers:
            if number != numbers[0]:
                run.queries = number
            for trial in loop.trials():
                of_settings += trial.stage == SETTINGS
                of_phi = trial.id + 1 - of_settings
                if not advised and trial.stage != SETTINGS and of_phi >= min(QUERIES, run.queries - of_settings):
                    advised = True
                    for line in run.assessment(trial.id + 1).lines():
                        plan.callback.say(line)
            yield distributed.on_first(run.outcome)
        if moved := run.asking.moved():
            plan.callback.say(moved)


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
    slack = 1e-6 * (high - low)  # single precision, of what is near 0
    if metric.repeats > 1:
        from scipy.special import stdtrit  # of Student's t distribution

        quantile = stdtrit(2 * (metric.repeats - 1), 1 - CHANCE / 2)
        slack += quantile * math.hypot(a.noise or 0.0, b.noise or 0.0)
        return math.isclose(a.value, b.value, rel_tol=ROUNDING, abs_tol=slack)
    values, others = ([each.value, *chain(*each.pairs)] for each in (a, b))
    close = partial(math.isclose, rel_tol=ROUNDING, abs_tol=slack)
    same = len(values) == len(others) and a.also.keys() == b.also.keys() and all(map(close, values, others))
    return same and all(math.isclose(a.also[n], b.also[n], rel_tol=ROUNDING, abs_tol=1e-9) for n in a.also)
