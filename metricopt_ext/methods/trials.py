"""The trials of a search: what it is asked for and told, each kept with its point."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from torch import Tensor

from metricopt_ext.adapters.start import Start, StartLine
from metricopt_ext.errors import BudgetError, FileFormatError, MetricError
from metricopt_ext.methods.assessment import Assessment, Evaluated, assessed, first_evaluated
from metricopt_ext.methods.constrained import best_of, ranked
from metricopt_ext.methods.ending import Began, decided, guarded
from metricopt_ext.methods.guard import CONFIDENCE
from metricopt_ext.methods.new_classes import held_back
from metricopt_ext.methods.result import Result
from metricopt_ext.methods.start_lines import Point, StartLinesState, divided, planned_lines
from metricopt_ext.methods.starts import with_start
from metricopt_ext.methods.trial import Trial
from metricopt_ext.methods.tuned_settings import SETTINGS, accepted
from metricopt_ext.search.settings_stage import SettingsState
from metricopt_ext.search.strategy import SearchState, SearchStrategy
from metricopt_ext.tasks.constraints import Limits
from metricopt_ext.tasks.evaluation import Evaluation
from metricopt_ext.tasks.halved import pairs_of
from metricopt_ext.tasks.kept_evaluations import SAME, KeptEvaluation, KeptEvaluations, KeptPoint
from metricopt_ext.tasks.metric import Metric
from metricopt_ext.tasks.task import FinetuneTask
from metricopt_ext.utils.checks import check_integer
from metricopt_ext.utils.numbers import number_of
from metricopt_ext.utils.words import brief, counted


@dataclass(frozen=True, eq=False)
class _Batch:
    """What the search waits for: trials with ids from ``first`` on.

    Attributes:
        first: The first one's id.
        trials: The points.
    """

    first: int
    trials: Sequence[Trial]


class Trials:
    """A search through its trials, in one process; what is on file is told as it is.

    It first asks for the starts, then along lines of them, then, at the best, for settings of inference if the task has
    any, and then searches from there. Trials come in batches; only once all of a batch are told, failed or given up
    does the search go on. So the result depends neither on the order nor on the time of telling.

    Args:
        task: Model, and loss and batches where it has them; of its metric direction, bounds and repeats count.
        strategy: The search.
        starts: What it may begin from, by name: ``"start"``, the model as it was trained, first; and lines of starts.
        queries: Evaluations that may be spent.
        kept: The evaluations on file.
        seed: Seed of all draws.
        confidence: How sure the guard must be, at least 0.5 and below 1.
    """

    task: FinetuneTask
    strategy: SearchStrategy
    queries: int

    def __init__(
        self,
        task: FinetuneTask,
        strategy: SearchStrategy,
        starts: Mapping[str, Start | StartLine],
        queries: int,
        kept: KeptEvaluations,
        seed: int = 0,
        confidence: float = CONFIDENCE,
    ) -> None:
        self.task, self.strategy, self.queries = task, strategy, queries
        self._kept, self._seed, self._confidence = kept, seed, confidence
        self._starts, self._lines = divided(starts)  # the best of a line, and settings that are tuned, are added
        self._fixed = self._initial = len(self._starts)  # trials of starts: without lines, and with those of lines
        self._least = strategy.least_queries(task.dim, self._fixed)
        self._along: StartLinesState | None = None
        self._chosen = False  # whether it is known where the search begins
        self._stage: SettingsState | None = None
        self._state: SearchState | None = None
        self._limits: Limits | None = None  # known with the start
        self._batch = _Batch(0, ())
        self._handed: set[int] = set()
        self._evaluated: dict[str, Evaluation] = {}  # of the starts
        self._first: list[tuple[str, Start]] = []  # all trials of starts, by their numbers; a line's without a name
        self._started = self._model = "start"  # where the search begins, and the given start whose model that is
        self._moved = self._replayed = 0
        self._settled = True  # whether the search knows all answers to the batch
        self._held_back = 0  # of the evaluations, for what is kept
        self._shared = False  # whether this budget's share of the way was looked for
        self._part: Trial | None = None  # where the metric is asked for what is kept

    # --- Asking --------------------------------------------------------------------------------------------------

    def ask(self, n: int = 1) -> list[Trial]:
        """Return at most ``n`` trials of the current batch that this object has not handed out yet.

        Returns:
            Fewer at the end of a batch; none while all of it is being evaluated (`open`), or once the budget is given
            out.

        Raises:
            ValueError: ``n`` is below 1.
        """
        check_integer(1, n=n)
        self._advance()
        done = self._handed | self._kept.evaluations.keys()
        new = [trial for trial in self._batch.trials if trial.id not in done][:n]
        fresh = [trial for trial in new if trial.id not in self._kept.open]
        if fresh:
            self._kept.ask(self._kept_point(trial) for trial in fresh)
        self._handed |= {trial.id for trial in new}
        return new

    def next_batch(self, most: int | None = None) -> list[tuple[Trial, bool, Evaluation | None]]:
        """Return the next batch, whether each trial is on file, and its answer there; [] at the end.

        It is for a loop that answers all: unlike `ask` it leaves the new trials to be written with their answers.

        Args:
            most: Number of the first trials that are wanted at all, the last batch's cut to them; None for all.
        """
        if most is not None and self._end >= most and self._batch.trials:
            return []
        if self._complete and not self._go_on():
            return []
        trials, kept = self._batch.trials, self._kept
        trials = trials if most is None else trials[: most - self._batch.first]
        new = [trial for trial in trials if trial.id not in kept.evaluations and trial.id not in kept.open]
        kept.ask(map(self._kept_point, new), write=False)
        return [(trial, trial.id in kept.evaluations, self._answer(trial.id)) for trial in trials]

    def extend(self, queries: int) -> None:
        """Go on with a larger budget, in evaluations."""
        more, self.queries = queries - self.queries, queries
        if self._state is not None and more:
            self._state.queries += more
            self._shared, self._part = False, None

    def quality(self) -> tuple[int, float] | None:
        """Return how many points f knows, and the Spearman correlation of what it predicted with what was found.

        None if it predicted nothing yet.
        """
        if self._complete:
            self._settle()
        spearman = None if self._state is None else self._state.quality()
        return None if self._state is None or spearman is None else (len(self._state.points), spearman)

    def open(self) -> list[Trial]:
        """Return the trials that were asked for, here or in an earlier process, and not told yet."""
        self._advance()
        return [trial for trial in self._batch.trials if trial.id in self._kept.open]

    def assessment(self, most: int, seconds: float = math.nan) -> Assessment:
        """Return what the first trials say, as far as they were told, of whether the search is worth its queries.

        Args:
            most: How many trials.
            seconds: Seconds that a query took.
        """
        evaluated = [each for id, each in sorted(self._kept.evaluations.items()) if id < most and not each.given_up]
        kept = [each for each in evaluated if self.task.settings is None or self.stage_of(each.id) != "settings"]
        worst, origin = self._worst(), self.task.origin()
        answers = [(each.id, each.at(origin), each.evaluation or worst) for each in kept]
        first = first_evaluated(self.task.adapter, self._first, self._starts[self._started], answers)
        besides = len(evaluated) - len(kept)
        if SETTINGS in self._evaluated:
            of_starts = sum(each.id < self._initial for each in kept)
            first.insert(of_starts, Evaluated(SETTINGS, "settings", self._evaluated[SETTINGS]))
            besides -= 1
        return assessed(
            self.task.metric,
            first,
            len(origin),
            confidence=self._confidence,
            least=self._least,
            seconds=seconds,
            besides=besides,
            limits=self._limits,
        )

    def stage_of(self, id: int) -> str:
        """Return what a trial that was asked for is for: ``"starts"``, ``"settings"`` or ``"search"``."""
        if id < self._initial:
            return "starts"
        if self._stage is None:
            return "search"
        tried = self._initial + len(self._stage.end().tried) - 1
        return "settings" if id < tried or self._state is None else "search"

    def state_on_line(self, trial: Trial) -> Start | None:
        """Return a trial's start where that is on a line, whose trials and search have no other name for it."""
        return trial._state if trial.start in self._lines else None

    @property
    def spent(self) -> int:
        """Queries that were told or failed so far, the metric's repeats among them."""
        return self._kept.answered * self.task.metric.repeats

    @property
    def failed(self) -> int:
        """How many evaluations have failed, in earlier processes too."""
        return sum(each.failed for each in self._kept.evaluations.values())

    # --- Notifying -------------------------------------------------------------------------------------------------

    def tell(
        self,
        id: int,
        value: float,
        halves: tuple[float, float] | Sequence[tuple[float, float]] | None = None,
        noise: float | None = None,
        also: Mapping[str, float] | None = None,
    ) -> None:
        """Tell what the metric is at a trial; it is on disk when this returns.

        Args:
            id: The trial's.
            value: The metric's value, in its own units.
            halves: Its values on two random halves of the data, by which the guard tells a gain from chance; or on
                several pairs of halves, as many at each trial.
            noise: Standard error of the value, if it is the mean of several evaluations.
            also: Other quantities, by name: those that the metric is subject to, and any that are to be shown.

        Raises:
            ValueError: There is no such trial, it has another answer already, or a number is not finite, outside the
                metric's bounds, or missing although the metric is subject to it, or another trial was told another
                number of pairs. Nothing has changed then.
        """
        metric, pairs = self.task.metric, None
        try:
            cost = metric.checked_cost(number_of(value))
            if halves is not None:
                pairs = metric.costs_of(pairs_of(halves))
            error = None if noise is None else number_of(noise) / metric.scale
        except (TypeError, ValueError) as wrong:
            evaluated = f"{brief(value)}, halves {brief(halves)}, noise {brief(noise)}"
            raise ValueError(
                f"{evaluated}: tell a number, two for halves or None (or several pairs of two), and a number for"
                " noise or None"
            ) from wrong
        except MetricError as wrong:
            raise ValueError(str(wrong)) from wrong
        if error is not None and not 0 <= error < math.inf:
            raise ValueError(f"noise is {noise!r}; it must be a standard error, at least 0 and finite, or None")
        before = {len(each.pairs) or 1 for each in self._kept.evaluations.values() if each.halves is not None}
        if pairs is not None and before and len(pairs) not in before:
            raise ValueError(
                f"trial {id} is told {counted(len(pairs), 'pair')} of halves, but others {before.pop()}; divide the"
                " data in the same ways for all"
            )
        besides = told_besides(also, metric)
        self.tell_evaluation(id, Evaluation.of(cost, pairs, error)._replace(also=besides))

    def tell_evaluation(self, id: int, evaluation: Evaluation) -> None:
        """Tell the metric's evaluation at a trial, as a cost; see `tell`, as for the errors."""
        if not self._repeated(id, evaluation):
            point = self._kept_point(self._trial(id))
            self._kept.tell(KeptEvaluation.evaluated(point, evaluation, self.task.metric.repeats))

    def fail(self, id: int, reason: str = "") -> None:
        """Say that a trial's evaluation failed: it counts as a query, and the worst value of the run stands in for it.

        Args:
            id: The trial's.
            reason: Why, for the error if it is the first.

        Raises:
            ValueError: There is no such trial, it has an answer already, or it is the model as it was trained.
        """
        failed = Evaluation(math.inf, failed=True)
        if self._repeated(id, failed):
            return
        trial = self._trial(id)
        if id == 0:
            raise ValueError(
                "trial 0 is the model as it was trained, so its value is needed: it failed"
                f" ({reason or 'no reason given'}); fix the scorer, then tell its value"
            )
        self._kept.tell(KeptEvaluation.evaluated(self._kept_point(trial), failed, self.task.metric.repeats))

    def give_up(self, id: int) -> None:
        """Wait for a trial no longer: it costs no query, and its batch closes without it.

        Raises:
            ValueError: There is no such trial, it has an answer already, or it is the model as it was trained.
        """
        if self._repeated(id, None):
            return
        trial = self._trial(id)
        if id < self._fixed:
            raise ValueError(f"trial {id} is a start, whose value is needed; tell it, or leave that start out")
        self._kept.tell(KeptEvaluation.without(self._kept_point(trial)))

    def _repeated(self, id: int, evaluation: Evaluation | None) -> bool:
        """Whether a trial has this very answer already; another one is refused."""
        evaluated = self._kept.evaluations.get(id)
        if evaluated is None:
            return False
        if evaluation is None:
            same = evaluated.given_up
        else:
            same = evaluated.failed if evaluation.failed else evaluated.evaluation == evaluation
        if same:
            return True
        said = "given up" if evaluated.given_up else "a failure" if evaluated.failed else "another value"
        raise ValueError(f"trial {id} was told before, as {said}; what was told stays")

    def _trial(self, id: int) -> Trial:
        check_integer(0, id=id)
        self._advance()
        at = id - self._batch.first
        if not 0 <= at < len(self._batch.trials) or id not in self._handed | set(self._kept.open):
            known = ", ".join(str(trial.id) for trial in self.open()) or "none"
            raise ValueError(f"there is no open trial {id!r}; open are {known}: ask for trials first")
        return self._batch.trials[at]

    def _kept_point(self, trial: Trial) -> KeptPoint:
        return KeptPoint.of(trial.id, trial.phi, trial._state)

    # --- Going on ------------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Close the batch once all of it is answered, and take the next; what is on file is told as it is."""
        while self._complete and self._go_on():
            pass

    @property
    def _complete(self) -> bool:
        return all(trial.id in self._kept.evaluations for trial in self._batch.trials)

    def _go_on(self) -> bool:
        """Take the next batch; returns whether there is one."""
        if not self._batch.trials and self._state is None:
            self._first = list(self._starts.items())
            self._batch = _Batch(0, [self._made(id, *each) for id, each in enumerate(self._first)])
            return True
        self._settle()
        first = self._end
        if self._state is None:
            if self._along is None:
                self._along = self._lines_started()
            name, asked_of = self._along.ask()
            if asked_of:
                self._batch = _Batch(first, [self._made(id, name, at) for id, at in enumerate(asked_of, first)])
                self._first += [("", at) for at in asked_of]
                self._initial, self._settled = self._end, False
                return True
            if not self._chosen:
                self._choose()
            if values := [] if self._stage is None else self._stage.ask():
                at, self._settled = self._starts[self._started], False
                proposed = enumerate((replace(at, settings=each) for each in values), first)
                self._batch = _Batch(first, [self._made(id, self._model, each) for id, each in proposed])
                return True
            self._begin()
        assert self._state is not None
        with self._base():
            points = self._state.ask()
        self._settled = not len(points)
        if self._settled and self._held_back and not self._shared:
            self._shared, points = True, self._part_of_the_way()
        found = (replace(self._starts[self._started], phi=point) for point in points)
        self._batch = _Batch(first, [self._made(id, self._model, each) for id, each in enumerate(found, first)])
        if self._settled and self._batch.trials:
            (self._part,) = self._batch.trials
        return len(points) > 0

    def _part_of_the_way(self) -> Tensor:
        """Return what the guard keeps of the way to the search's end, ``1 x d``; ``0 x d`` for nothing or all."""
        assert self._state is not None
        end, start = self._state.end(), self._starts[self._started].phi
        _, share = decided(self.task, self._began, end, self._confidence, self._limits)
        if share is None or not 0 < share.share < 1:
            return start[None][:0]
        return share.point(start, end.phi)[None]

    def _settle(self) -> None:
        """Tell the search, or a stage before it, what became of the batch, unless it knows."""
        if self._settled:
            return
        if self._state is not None:
            self._tell_state()
        elif self._stage is not None:
            for index, trial in enumerate(self._batch.trials):
                self._stage.tell(index, self._answer(trial.id), trial.settings)
        else:
            assert self._along is not None
            for index, trial in enumerate(self._batch.trials):
                self._along.tell(index, self._answer(trial.id), trial._state)
        self._settled = True

    def _made(self, id: int, name: str, at: Start) -> Trial:
        """Make a trial: at the point, and with the settings, that are on file under its number, if there are any.

        Args:
            id: Its number.
            name: The start whose model it is a point of.
            at: What would be asked for today.
        """
        kept = self._kept.evaluations.get(id) or self._kept.open.get(id)
        point = phi = at.phi
        if kept is not None:
            if moved := self._has_other_settings(kept, at):
                at = replace(at, settings=kept.settings or {})
            if (kept.settings or {}) != dict(at.settings):
                raise FileFormatError(
                    f"{self._kept.path} has trial {id} with settings {brief(kept.settings or {})}, where"
                    f" {brief(dict(at.settings))} would be asked now, as there are too few queries to try as many;"
                    " give more, or use another output folder"
                )
            if not kept.is_of(at):
                raise FileFormatError(
                    f"{self._kept.path} has trial {id} of a model with other tensors than those of the start {name!r};"
                    " use another output folder"
                )
            try:
                point = kept.at(phi)
            except ValueError as error:
                raise FileFormatError(f"{self._kept.path} holds {error}; use another output folder") from error
            self._replayed += 1
            origin = self._starts[name].phi if name in self._starts else self.task.origin()
            radius = max(float((phi - origin).norm()), float((point - origin).norm()))
            self._moved += moved or bool((point - phi).norm() > SAME * radius)
        return Trial(id, point, name, self.task, replace(at, phi=point))

    def _has_other_settings(self, kept: KeptPoint, at: Start) -> bool:
        """Whether a trial of settings is on file with others than those that would be asked for today.

        Raises:
            FileFormatError: These are none that can be.
        """
        if self._stage is None or self._state is not None or kept.settings == dict(at.settings):
            return False
        try:
            self._stage.settings.check(kept.settings or {})
        except ValueError as error:
            raise FileFormatError(f"{self._kept.path}: {error}; use another output folder") from error
        return True

    def _lines_started(self) -> StartLinesState:
        """Begin to look along lines, by what the starts are, which were all answered."""
        worst, base = self._worst(), self.task.adapter.base_state_dict()
        self._evaluated = {
            trial.start: self._kept.evaluations[trial.id].evaluation or worst for trial in self._batch.trials
        }
        self._limits = limits = Limits.of(self.task.metric.constraints, self._evaluated["start"])
        fixed = [Point(name, self._starts[name], evaluation) for name, evaluation in self._evaluated.items()]
        spare = self.queries - held_back(self.strategy, self.task.metric) - self._least
        ranks = {name: ranked(evaluation, limits) for name, evaluation in self._evaluated.items()}
        planned = planned_lines(self._lines, self._starts, self.queries, spare, base, ranks)
        return StartLinesState(self._lines, planned, fixed, base, lambda each: ranked(each, limits))

    def _choose(self) -> None:
        """Choose the best of the starts, and begin to tune settings there if the task has any."""
        assert self._along is not None
        self._chosen = True
        for name, best in self._along.best.items():
            self._starts[name], self._evaluated[name] = best.start, best.evaluation
        limits, on_lines = self._limits, len(self._along.points)
        self._started = self._model = self._origin()
        if self.task.settings is not None:
            left = self.queries - self._for_what_is_kept()
            most = max(0, min((left - on_lines) // 2, left - self._least - (on_lines - self._fixed)))
            first, values = (
                self._evaluated[self._started],
                self.task.with_values(self._starts[self._started].settings).values,
            )
            self._stage = SettingsState(self.task.settings, first, most, lambda each: ranked(each, limits), values)

    def _origin(self) -> str:
        """Return the name of the start that the search begins from.

        That is the best fixed one where a line's best, which is better, differs from it in phi alone: the search knows
        all of the line, and the guard then judges the whole way from a start that was not chosen among as many. With
        settings it is the best of all, as they are tuned there.
        """
        assert self._along is not None
        best = best_of(self._evaluated, self._limits)
        if best not in self._along.best or self.task.settings is not None:
            return best
        fixed = [name for name in self._evaluated if name not in self._along.best]
        same = {name: self._evaluated[name] for name in fixed if self._starts[name].of_the_same(self._starts[best])}
        return best_of(same, self._limits) if same else best

    def _for_what_is_kept(self) -> int:
        """Return how many evaluations are held back; without halves, there is no share to keep."""
        evaluated = self._evaluated[self._started].halves is not None
        return held_back(self.strategy, self.task.metric) if evaluated else 0

    def _begin(self) -> None:
        """Begin the search at the best of the starts, of which it knows those that differ in phi alone.

        Settings that surely gain are a start of their own.
        """
        assert self._along is not None
        points = self._along.points
        elsewhere = 0 if self._stage is None else self._stage.spent
        if self._stage is not None and accepted(end := self._stage.end(), self._confidence):
            self._starts[SETTINGS] = replace(self._starts[self._started], settings=end.values)
            self._evaluated[SETTINGS], self._started = end.evaluation, SETTINGS
            points = [*points, Point(SETTINGS, self._starts[SETTINGS], end.evaluation)]
            elsewhere -= 1  # the search knows it
        limits, at = self._limits, self._starts[self._started]
        known = [each for each in points if each.start.of_the_same(at)]
        elsewhere += len(points) - len(known)
        self._held_back = self._for_what_is_kept()
        with self._base():
            self._state = self.strategy.begin(
                with_start(self.task, at),
                at.phi,
                self.queries - elsewhere - self._held_back,
                known=[(each.start.phi, each.evaluation) for each in known],
                seed=self._seed,
            )
        self._state.limits = limits
        lines = {name: self._evaluated[name] for name in self._along.best if self._starts[name].of_the_same(at)}
        if lines:
            self._state.reached = self._starts[best_of(lines, limits)].phi

    def _tell_state(self) -> None:
        """Tell the search what is known of the batch; the worst value so far stands in for those that failed."""
        assert self._state is not None
        worst = self._worst()
        for index, trial in enumerate(self._batch.trials):
            kept = self._kept.evaluations.get(trial.id)
            if kept is not None and not kept.given_up:
                self._state.tell(index, kept.evaluation or worst, trial.phi)
            elif kept is not None and self._complete:
                self._state.give_up(index, trial.phi)

    def _answer(self, id: int) -> Evaluation | None:
        """Return a trial's answer, of one that failed the worst so far; None without any, or if it was given up."""
        kept = self._kept.evaluations.get(id)
        return None if kept is None or kept.given_up else kept.evaluation or self._worst()

    def _worst(self) -> Evaluation:
        """Return the worst evaluation so far, which stands in for those that failed."""
        known = [
            kept.evaluation for id, kept in sorted(self._kept.evaluations.items()) if id < self._end and kept.evaluation
        ]
        return max(known, key=lambda each: each.cost)._replace(failed=True)

    @property
    def _end(self) -> int:
        """The first id after the current batch."""
        return self._batch.first + len(self._batch.trials)

    @contextmanager
    def _base(self) -> Iterator[None]:
        """Have the model be what it was trained to meanwhile."""
        with self.task.adapter.applied(Start(self.task.origin())):
            yield

    def moved(self) -> str:
        """Say how many points on file are not those that the search would ask for today; empty if all are."""
        if not self._moved:
            return ""
        return (
            f"{self._moved} of {counted(self._replayed, 'kept point')} are not what the search would ask for today, as"
            " another processor rounds in another way, or the loss draws without a seed; the search was told the kept"
            " ones"
        )

    # --- The end -------------------------------------------------------------------------------------------------

    def outcome(self) -> Result:
        """Return what `result` does, and leave the model and the folder as they are."""
        self._advance()
        over = self._state is not None and not self._batch.trials  # one query early if the metric never varied
        least = self._least + (0 if self._stage is None else self._stage.spent)
        least += 0 if self._along is None else len(self._along.points) - self._fixed
        if self._along is not None and self._state is None:  # the search begins once all of these are answered
            evaluated = self._kept.evaluations
            least += sum(trial.id not in evaluated or not evaluated[trial.id].given_up for trial in self._batch.trials)
        if self._kept.answered < least and not over:
            missing = least - self._kept.answered
            raise BudgetError(
                f"{counted(missing, 'more trial')} must be told before there is a result:"
                f" {self._kept.answered} of at least {least} were"
            )
        assert self._state is not None
        if not self._settled:  # what is told of an open batch counts too
            self._tell_state()
        end = self._state.end()
        self._state.forget_open()
        part = None if self._part is None else self._answer(self._part.id)
        known = None if self._part is None or part is None else (self._part.phi, part)
        stage = None if self._stage is None else self._stage.end()
        return guarded(self.task, self._began, end, self._confidence, known, self._limits, stage)

    @property
    def _began(self) -> "Began":
        assert self._along is not None
        return Began(self._starts, self._evaluated, self._started, self._along.points, self._along.strengths)


def told_besides(also: Mapping[str, float] | None, metric: Metric) -> dict[str, float] | None:
    """Return what was told besides the metric; None if it is nothing.

    Raises:
        ValueError: It is no mapping of names to finite numbers, or lacks what the metric is subject to.
    """
    if also is not None and not isinstance(also, Mapping):
        raise ValueError(f"also is {brief(also)}; it must map names to numbers, e.g. {{'accuracy': 0.9}}")
    evaluated = dict[str, float]()
    for name, value in (also or {}).items():
        try:
            evaluated[name] = number_of(value)
        except TypeError as wrong:
            raise ValueError(f"also has {brief(name)}: {brief(value)}; it must be a number") from wrong
        if not isinstance(name, str) or not math.isfinite(evaluated[name]):
            raise ValueError(f"also has {brief(name)}: {brief(value)}; it must be a finite number with a name")
    missing = [name for name in metric.subject_to if name not in evaluated]
    if missing:
        known = f"told are {', '.join(map(repr, evaluated))}" if evaluated else "nothing was told"
        raise ValueError(
            f"the metric is subject to {missing[0]!r}, and {known} besides; tell(..., also={{{missing[0]!r}: VALUE}})"
        )
    return evaluated or None
