"""Tunes the settings of a program for a score that it prints: its trials side by side, kept on file, and the guard."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

import torch

from metricopt_ext.adapters.start import Start
from metricopt_ext.errors import ConfigError, FileFormatError
from metricopt_ext.experiment.program_trials import HELD_OUT, NAME, ProgramRun, TrialError, ending, side_by_side
from metricopt_ext.methods.constrained import Constrained, besides, decide_within, ranked
from metricopt_ext.methods.guard import CONFIDENCE, Decision, Guard, Verdict, decide_among
from metricopt_ext.methods.holdout import best_on_holdout
from metricopt_ext.methods.result import with_so_little_data
from metricopt_ext.methods.tuned_settings import SETTINGS_CONFIDENCE
from metricopt_ext.runtime.progress import Callback
from metricopt_ext.search.asking import FAILED, Asking, Batch, Run, labelled
from metricopt_ext.search.stages import SettingsEnd, SettingsStage
from metricopt_ext.tasks.constraints import Limits, parse_constraints
from metricopt_ext.tasks.cost_scale import CostScale
from metricopt_ext.tasks.evaluation import Evaluation
from metricopt_ext.tasks.log import Log
from metricopt_ext.tasks.program_score import Failed, ProgramScore, Score
from metricopt_ext.tasks.program_settings import ProgramSettings
from metricopt_ext.tasks.settings import Value, Values
from metricopt_ext.utils.described import Finite, from_json
from metricopt_ext.utils.files import read_json, write_json
from metricopt_ext.utils.program import Programs
from metricopt_ext.utils.words import brief, decimals

EVALUATIONS = "settings.json"
BEFORE, AFTER = "start", "settings"  # the guard's candidates: the defaults, and the search's end


@dataclass(frozen=True)
class KeptScore:
    """What a program found for some settings.

    Attributes:
        settings: What stood in the command for each of them.
        value: The score; None of a failure.
        halves: The scores on two halves of the data; None if they are not asked for.
        noise: Standard error of the value; None without repeats.
        seconds: How long it took.
        also: Other quantities by name; None without any.
        failed: Why there is no score; None if there is one.
    """

    settings: dict[str, str]
    value: Finite | None = None
    halves: tuple[Finite, Finite] | None = None
    noise: Finite | None = None
    seconds: Finite = field(default=Finite(0.0))
    also: dict[str, Finite] | None = None
    failed: str | None = None

    def __post_init__(self) -> None:
        """Check the numbers."""
        if (self.value is None) == (self.failed is None):
            raise ValueError("a score has a value, or says why it failed")

    @classmethod
    def of(cls, settings: dict[str, str], found: Score | Failed) -> "KeptScore":
        """Make one of what was found."""
        if isinstance(found, Failed):
            return cls(settings, failed=found.reason)
        return cls(settings, **asdict(found))

    @property
    def score(self) -> Score | Failed:
        """What was found."""
        if self.value is None:
            return Failed(str(self.failed))
        return Score(self.value, self.halves, self.noise, self.seconds, None if self.also is None else {**self.also})


@dataclass(frozen=True)
class _File:
    evaluations: list[KeptScore]
    held_out: list[KeptScore]


class _Ledger:
    """The scores of a run in a file, each of which is paid for once.

    Args:
        path: The JSON file.
        names: Names of the settings.

    Raises:
        FileFormatError: The file holds something else.
    """

    def __init__(self, path: Path, names: Sequence[str]) -> None:
        self._path = path
        self._file = _File([], [])
        if not path.exists():
            return
        try:
            self._file = from_json(_File, read_json(path))
            for each in (*self._file.evaluations, *self._file.held_out):
                if list(each.settings) != list(names):
                    raise ValueError(f"a score of settings {', '.join(each.settings)}, not {', '.join(names)}")
        except (ValueError, FileFormatError) as error:
            raise FileFormatError(f"{path} holds no scores of the run: {brief(error)}; use another folder") from error

    @property
    def spent(self) -> int:
        """How many settings were scored, or failed."""
        return len(self._file.evaluations)

    @property
    def failed(self) -> int:
        """How many failed."""
        return sum(each.failed is not None for each in self._file.evaluations)

    def found(self, settings: dict[str, str], *, held_out: bool = False) -> Score | Failed | None:
        """Return what is on file of settings; None if they were not scored."""
        return next((each.score for each in self._those(held_out) if each.settings == settings), None)

    def keep(self, settings: dict[str, str], found: Score | Failed, *, held_out: bool = False) -> None:
        """Keep what was found; it is on disk when this returns."""
        self._those(held_out).append(KeptScore.of(settings, found))
        write_json(self._path, asdict(self._file))

    def _those(self, held_out: bool) -> list[KeptScore]:
        return self._file.held_out if held_out else self._file.evaluations


@dataclass(frozen=True)
class SettingsOutcome:
    """What a run found, in the score's own units.

    Attributes:
        values: What was kept, for every setting.
        best_values: The best candidate's.
        before: What was found for the defaults.
        after: What was found for what was kept.
        best: The score of the best candidate.
        verdict: What the guard thinks of it.
        holdout: Scores on data held out, of the defaults and of the best candidate; empty without any.
        queries: Runs of the program, by purpose; those on data held out are counted apart.
        failed: Trials that failed.
        constrained: How the run stands to its constraints; None without any.
    """

    values: dict[str, Value]
    best_values: dict[str, Value]
    before: Score
    after: Score
    best: float
    verdict: Verdict
    holdout: dict[str, float]
    queries: dict[str, int]
    failed: int
    constrained: Constrained | None = None

    @property
    def changed(self) -> bool:
        """Whether other settings were kept than the defaults."""
        return self.after is not self.before

    @property
    def guard(self) -> Guard:
        """What told a gain from chance."""
        return self.verdict.guard

    @property
    def also(self) -> dict[str, tuple[float, float]]:
        """Other quantities than the score, by name: with the defaults, and with what was kept."""
        after = self.after.also or {}
        return {name: (value, after[name]) for name, value in (self.before.also or {}).items()}

    def row(self) -> list[str]:
        """Return a table's cells: scores before, best and after, the guard, queries and failed trials."""
        numbers = [decimals(each) for each in (self.before.value, self.best, self.after.value)]
        guard = "unguarded" if self.guard == "none" else self.guard
        return [*numbers, guard, " + ".join(map(str, self.queries.values())), str(self.failed)]

    def lines(self, settings: ProgramSettings) -> list[str]:
        """Return what there is to say besides the scores: of time, of data held out, and of what was not kept."""
        lines = besides(self.also, self.constrained)
        if self.constrained is not None:
            lines += self.constrained.lines(AFTER if self.changed else BEFORE)
        lines += [f"held out, {name}: {decimals(value)}" for name, value in self.holdout.items()]
        if self.changed:
            before, after = self.before.seconds, self.after.seconds
            lines.append(f"a trial took {before:.3g} s with the defaults, and {after:.3g} s with these settings")
        elif settings.changed(self.best_values):
            texts = settings.texts(self.best_values)
            best = ", ".join(f"{name}={texts[name]}" for name in settings.changed(self.best_values))
            lines.append(f"the best candidate, {best}, has {decimals(self.best)}, but {self._doubt()}")
        return lines

    def _doubt(self) -> str:
        if self.holdout:
            return "the held-out data do not confirm it"
        if self.verdict.gain <= 0:
            return "it gains nothing"
        return with_so_little_data((self.verdict.needed or 0) + self.verdict.optimism)


class SettingsRun(ProgramRun):
    """One run on a program's settings.

    Args:
        settings: The settings.
        score: Scores them on the data that the search sees.
        folder: Keeps the scores, and logs.
        holdout: Scores them on data that the search does not see; None without any.
        maximize: Whether higher is better.
        subject_to: Constraints on other quantities that the score has, by name (`Metric`); not on data held out.
        checkpoint: What stands for ``{checkpoint}`` in the command; None without any.
        prefix: Begins the names of trials.
    """

    def __init__(
        self,
        settings: ProgramSettings,
        score: ProgramScore,
        folder: Path,
        *,
        holdout: ProgramScore | None = None,
        maximize: bool = True,
        subject_to: Mapping[str, str] | None = None,
        checkpoint: Path | None = None,
        prefix: str = "",
    ) -> None:
        super().__init__(folder, prefix)
        self.settings, self.score, self.holdout, self.maximize = settings, score, holdout, maximize
        self.checkpoint = None if checkpoint is None else checkpoint.absolute()
        self.constraints = parse_constraints(subject_to, NAME)
        self._scale = CostScale(maximize=maximize, bounds=None, name=NAME)

    def score_defaults(self) -> Score:
        """Score the defaults.

        Raises:
            TrialError: The program fails with them, so that it would with any others.
            ConfigError: It can't be started.
            OSError: Its log can't be written.
        """
        with ending() as programs:
            found = self._scored(programs, self.score, 0, self.settings.defaults)
        if isinstance(found, Failed):
            raise TrialError(f"the defaults can't be scored: {found.reason}", self.log(0))
        return found

    def check(self, queries: int) -> None:
        """Refuse a budget that is too small.

        Raises:
            ConfigError: It is.
        """
        if queries < (least := 2 * self.score.repeats):
            raise ConfigError(
                f"--queries {queries} with --repeats {self.score.repeats}: at least {least} are needed, for the"
                " defaults and one other"
            )

    def tune(
        self,
        queries: int,
        *,
        defaults: Score | None = None,
        jobs: int = 1,
        failures: int = 0,
        callback: Callback | None = None,
    ) -> SettingsOutcome:
        """Search, have the guard decide, and ask the data held out if there are any.

        What an interrupted run left in the folder is not asked again.

        Args:
            queries: Runs of the program that the search may take, those of the defaults included.
            defaults: What `score_defaults` found, which is the first trial; None to score them again.
            jobs: How many programs run at once; the result does not depend on it.
            failures: How many trials may fail.
            callback: Notified of progress.

        Raises:
            TrialError: More trials failed.
            ConfigError: There are too few queries to search with.
            FileFormatError: The folder holds something else than the scores of a run.
            OSError: A file can't be written.
        """
        callback, repeats = callback or Callback(), self.score.repeats
        self.check(queries)
        ledger = _Ledger(self.folder / EVALUATIONS, self.settings.names)
        callback.stage("settings")
        if ledger.spent:
            callback.on_file(ledger.spent * repeats)
        first = self.settings.texts(self.settings.defaults)
        if ledger.found(first) is None:
            ledger.keep(first, defaults or self.score_defaults())
            callback.query(ledger.spent * repeats, self._at(ledger, self.settings.defaults).value)
        before = self._at(ledger, self.settings.defaults)
        asking = Asking(self._asked(queries // repeats - 1), Log(None, self._scale), repeats)
        while batch := asking.next_batch():
            values = [self.settings.complete(each.at.settings) for each in batch]
            self._score_batch(ledger, batch[0].id, values, jobs, failures, callback)
            for trial, chosen in zip(batch, values, strict=True):
                found = ledger.found(self.settings.texts(chosen))
                asking.tell(trial.id, self._evaluation(found) if isinstance(found, Score) else FAILED)
        assert asking.end is not None
        visited = [each for trial in asking.trials if (each := asking.answer(trial.id)) is not None]
        limits = Limits.of(self.constraints, visited[0])
        tuned = self._decided(ledger, before, asking.end.values, visited, limits)
        if self.holdout is not None and tuned.changed:
            callback.stage("data held out")
            tuned = self._confirmed(ledger, tuned)
        return tuned

    def _asked(self, queries: int) -> Run[SettingsEnd]:
        """Ask for the defaults, then for other settings; returns the best."""
        at = Start(torch.zeros(0))
        ((_, first),) = yield Batch([at], "starts", [BEFORE])
        assert first is not None
        rank = partial(ranked, limits=Limits.of(self.constraints, first))
        stage = SettingsStage(self.settings, at, first, queries, rank)
        yield from labelled(stage.batches(), "settings", BEFORE)
        return stage.end()

    def _score_batch(
        self,
        ledger: _Ledger,
        first: int,
        batch: Sequence[Values],
        jobs: int,
        failures: int,
        callback: Callback,
    ) -> None:
        """Score what is not on file of a batch, several at once, and keep it; what is in it twice is scored once."""
        new = {json.dumps(self.settings.texts(values)): (first + index, values) for index, values in enumerate(batch)}
        left = [trial for trial in new.values() if ledger.found(self.settings.texts(trial[1])) is None]

        def ask(count: int) -> list[tuple[int, Values]]:
            proposed = left[:count]
            del left[:count]
            return proposed

        def tell(trial: tuple[int, Values], found: Score | Failed) -> None:
            number, values = trial
            if isinstance(found, Failed):
                # One too many is not on file, so that --resume tries it again.
                self.allow(number, found, ledger.failed, failures, callback)
            ledger.keep(self.settings.texts(values), found)
            if isinstance(found, Score):
                callback.query(ledger.spent * self.score.repeats, found.value)

        side_by_side(ask, lambda programs, trial: self._scored(programs, self.score, *trial), tell, jobs)

    def _decided(
        self, ledger: _Ledger, before: Score, end: Values, visited: Sequence[Evaluation], limits: Limits | None
    ) -> SettingsOutcome:
        """Return what the guard makes of the search's end; one that failed, or violates a constraint, is none."""
        failed = not isinstance(ledger.found(self.settings.texts(end)), Score)
        best_values = self.settings.complete({} if failed else end)
        best = self._at(ledger, best_values)
        ends = {BEFORE: self._evaluation(before), AFTER: self._evaluation(best)}
        others = list(visited)
        others.remove(ends[AFTER])  # which is among what was chosen from anyway

        def decide(candidates: Mapping[str, Evaluation]) -> Decision:
            return decide_among(candidates, others, SETTINGS_CONFIDENCE)

        decision = decide_within(limits, ends, decide, decide)
        kept = decision.kept == AFTER
        if limits is not None and not limits.hold(ends[AFTER]):
            best_values, best = self.settings.defaults, before
        return SettingsOutcome(
            best_values if kept else self.settings.defaults,
            best_values,
            before,
            best if kept else before,
            best.value,
            decision.verdict,
            {},
            {NAME: ledger.spent * self.score.repeats},
            ledger.failed,
            Constrained.of(limits, ends if kept else {BEFORE: ends[BEFORE]}, visited),
        )

    def _confirmed(self, ledger: _Ledger, tuned: SettingsOutcome) -> SettingsOutcome:
        """Return what data held out prefer; each candidate is asked for once, and kept."""
        assert self.holdout is not None
        aside = dict[str, float]()
        seen = {BEFORE: tuned.before.value, AFTER: tuned.after.value}
        if tuned.constrained is not None and not tuned.constrained.allows(BEFORE):
            del seen[BEFORE]
        with ending() as programs:
            for name in seen:
                values = self.settings.defaults if name == BEFORE else tuned.values
                trial, texts = f"{HELD_OUT}-{name}", self.settings.texts(values)
                found = ledger.found(texts, held_out=True)
                if found is None:
                    found = self._scored(programs, self.holdout, trial, values)
                if isinstance(found, Failed):
                    raise TrialError(f"--holdout failed on {name!r}: {found.reason}", self.log(trial))
                if ledger.found(texts, held_out=True) is None:
                    ledger.keep(texts, found, held_out=True)
                aside[name] = found.value
                self.check_unit(seen[name], found.value, trial)
        chosen, verdict = best_on_holdout(seen, aside, self._scale, tuned.guard, CONFIDENCE)
        queries = {**tuned.queries, "held out": len(aside) * self.holdout.repeats}
        tuned = replace(tuned, verdict=verdict or tuned.verdict, holdout=aside, queries=queries)
        return tuned if chosen == AFTER else replace(tuned, values=self.settings.defaults, after=tuned.before)

    def _at(self, ledger: _Ledger, values: Values) -> Score:
        found = ledger.found(self.settings.texts(values))
        assert isinstance(found, Score)
        return found

    def _evaluation(self, score: Score) -> Evaluation:
        halves = score.halves and self._scale.costs_of((score.halves,))
        return Evaluation.of(self._scale.to_cost(score.value), halves or None, score.noise)._replace(also=score.also)

    def _scored(self, programs: Programs, score: ProgramScore, trial: int | str, values: Values) -> Score | Failed:
        """Score settings; any thread may call it."""
        return score.at(self.settings.texts(values))(
            programs, self.checkpoint, f"{self.prefix}{trial}", self.log(trial)
        )
