"""Tunes the settings of a program for a score that it prints: its trials side by side, kept on file, and the guard."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from metricopt_ext.adapters.start import Start
from metricopt_ext.errors import ConfigError
from metricopt_ext.experiment.program_trials import HELD_OUT, NAME, ProgramRun, TrialError, ending, side_by_side
from metricopt_ext.methods.guard import (
    CONFIDENCE,
    SETTINGS_CONFIDENCE,
    Constrained,
    Guard,
    Verdict,
    besides,
    decide,
    preferred,
)
from metricopt_ext.methods.result import kept, with_so_little_data, worst_of
from metricopt_ext.runtime.progress import Callback
from metricopt_ext.search.asking import FAILED, Asking, Batch, Run, Trial, labelled
from metricopt_ext.search.stages import SettingsStage
from metricopt_ext.tasks.constraints import Limits, parse_constraints
from metricopt_ext.tasks.cost_scale import CostScale
from metricopt_ext.tasks.evaluation import Evaluation
from metricopt_ext.tasks.log import Entry, Log
from metricopt_ext.tasks.program_score import Failed, ProgramScore, Score
from metricopt_ext.tasks.program_settings import ProgramSettings
from metricopt_ext.tasks.settings import Value, Values
from metricopt_ext.utils.program import Programs
from metricopt_ext.utils.words import decimals

EVALUATIONS, OTHER_DATA = "settings.jsonl", "settings_held_out.jsonl"
BEFORE, AFTER = "start", "settings"  # the guard's candidates: the defaults, and the search's end


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
        maximize: Whether higher is better.
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
    maximize: bool
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

    @property
    def made_of(self) -> dict[str, tuple[float, float | None]]:
        """What the score is made of, by name: with the defaults, and with what was kept; empty if of nothing."""
        before, after = self.before.outcomes or {}, self.after.outcomes or {}
        return {name: (each.value, after[name].value) for name, each in before.items()}

    def row(self) -> list[str]:
        """Return a table's cells: scores before, best and after, the guard, queries and failed trials."""
        numbers = [decimals(each) for each in (self.before.value, self.best, self.after.value)]
        guard = "unguarded" if self.guard == "none" else self.guard
        return [*numbers, guard, " + ".join(map(str, self.queries.values())), str(self.failed)]

    def lines(self, settings: ProgramSettings) -> list[str]:
        """Return what there is to say besides the scores: of time, of data held out, and of what was not kept."""
        lines = [worst_of(self.made_of, self.maximize)] if self.made_of else []
        lines += besides(self.also, self.constrained)
        if self.constrained is not None:
            lines += self.constrained.lines(AFTER if self.changed else BEFORE, kept)
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
        return with_so_little_data(self.verdict)


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
        self._scale = self._new_scale()

    def _new_scale(self) -> CostScale:
        made = None if self.score.scale is None else self.score.scale.combination
        return CostScale(maximize=self.maximize, bounds=None, name=NAME, combination=made)

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
        log = Log(self.folder / EVALUATIONS, self._scale)
        callback.stage("settings")
        callback.on_file(log.asked)
        asking = Asking(self._asked(queries // repeats - 1), log, repeats, self.settings.complete)
        (first,) = asking.next_batch()
        if log.told(first.id) is None:
            self._tell(asking, first, defaults or self.score_defaults(), callback)
        while batch := asking.next_batch():
            self._score_batch(asking, batch, jobs, failures, callback)
        tuned = self._decided(asking)
        if self.holdout is not None and tuned.changed:
            callback.stage("data held out")
            tuned = self._confirmed(tuned)
        return tuned

    def _asked(self, queries: int) -> Run[Start]:
        """Ask for the defaults, then for other settings; returns the best."""
        at = Start(torch.zeros(0))
        ((_, first),) = yield Batch([at], "starts", [BEFORE])
        assert first is not None
        stage = SettingsStage(self.settings, at, first, queries, Limits.of(self.constraints, first))
        yield from labelled(stage.batches(), "settings", BEFORE)
        return stage.best.start

    def _score_batch(
        self, asking: Asking[Start], batch: Sequence[Trial], jobs: int, failures: int, callback: Callback
    ) -> None:
        """Score what is not on file of a batch, several at once, and keep it; the same settings are scored once."""
        new: dict[str, list[Trial]] = {}
        for trial in batch:
            if asking.log.told(trial.id) is None:
                new.setdefault(json.dumps(self._texts(trial.at)), []).append(trial)
        left = [trials for trials in new.values() if not self._known(asking, trials)]

        def ask(count: int) -> list[list[Trial]]:
            proposed = left[:count]
            del left[:count]
            return proposed

        def tell(trials: list[Trial], found: Score | Failed) -> None:
            if isinstance(found, Failed):
                # One too many is not on file, so that --resume tries it again.
                self.allow(trials[0].id, found, asking.log.failed, failures, callback)
            self._tell(asking, trials[0], found, callback)
            self._known(asking, trials[1:])

        def scored(programs: Programs, trials: list[Trial]) -> Score | Failed:
            values = self.settings.complete(trials[0].at.settings)
            return self._scored(programs, self.score, trials[0].id, values)

        side_by_side(ask, scored, tell, jobs)

    def _tell(self, asking: Asking[Start], trial: Trial, found: Score | Failed, callback: Callback) -> None:
        if isinstance(found, Failed):
            asking.tell(trial.id, FAILED)
            return
        asking.tell(trial.id, self._evaluation(found), seconds=found.seconds)
        callback.query(asking.log.asked, found.value)

    def _known(self, asking: Asking[Start], trials: Sequence[Trial]) -> bool:
        """Answer trials whose settings were scored already, which takes no query; returns whether they were."""
        for trial in trials:
            known = self._entry(asking, trial.at.settings)
            if known is None:
                return False
            asking.tell(trial.id, asking.log.evaluation(known) or FAILED, asked=0)
        return True

    def _entry(self, asking: Asking[Start], values: Values) -> Entry | None:
        """Return what is known of settings; None if they were not scored."""
        texts = self.settings.texts(values)
        told = (asking.log.told(each.id) for each in asking.trials)
        return next((each for each in told if each is not None and self._texts(each) == texts), None)

    def _texts(self, at: Start | Entry) -> dict[str, str]:
        return self.settings.texts(at.settings or {})

    def _decided(self, asking: Asking[Start]) -> SettingsOutcome:
        """Return what the guard makes of the search's end; one that failed, or violates a constraint, is none."""
        assert asking.end is not None
        visited = [each for trial in asking.trials if (each := asking.answer(trial.id)) is not None]
        limits = Limits.of(self.constraints, visited[0])
        before, end = self._score(asking, {}), self._entry(asking, asking.end.settings)
        best_values = self.settings.complete({} if end is None or end.failed else asking.end.settings)
        best = self._score(asking, best_values)
        ends = {BEFORE: self._evaluation(before), AFTER: self._evaluation(best)}
        decision = decide(ends, visited, SETTINGS_CONFIDENCE, limits=limits)
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
            {NAME: asking.log.asked},
            asking.log.failed,
            self.maximize,
            Constrained.of(limits, ends if kept else {BEFORE: ends[BEFORE]}, visited),
        )

    def _confirmed(self, tuned: SettingsOutcome) -> SettingsOutcome:
        """Return what data held out prefer; each candidate is asked for once, and kept."""
        assert self.holdout is not None
        log, aside = Log(self.folder / OTHER_DATA, self._new_scale()), dict[str, float]()
        seen = {BEFORE: tuned.before.value, AFTER: tuned.after.value}
        if tuned.constrained is not None and not tuned.constrained.allows(BEFORE):
            del seen[BEFORE]
        with ending() as programs:
            for name in seen:
                values = self.settings.defaults if name == BEFORE else tuned.values
                at, judged = Start(torch.zeros(0), settings=values), partial(self._held_out, programs, name, values)
                known, _ = log.evaluated(at, judged, self.holdout.repeats)
                aside[name] = known.value
                self.check_unit(seen[name], aside[name], f"{HELD_OUT}-{name}")
        chosen, verdict = preferred(seen, aside, self.maximize, tuned.guard, CONFIDENCE)
        queries = {**tuned.queries, "held out": len(aside) * self.holdout.repeats}
        tuned = replace(tuned, verdict=verdict or tuned.verdict, holdout=aside, queries=queries)
        return tuned if chosen == AFTER else replace(tuned, values=self.settings.defaults, after=tuned.before)

    def _held_out(self, programs: Programs, name: str, values: Values) -> Evaluation:
        assert self.holdout is not None
        found = self._scored(programs, self.holdout, f"{HELD_OUT}-{name}", values)
        if isinstance(found, Failed):
            raise TrialError(f"--holdout failed on {name!r}: {found.reason}", self.log(f"{HELD_OUT}-{name}"))
        return self._evaluation(found)

    def _score(self, asking: Asking[Start], values: Values) -> Score:
        """Return what the program found for settings."""
        known = self._entry(asking, values)
        assert known is not None
        assert known.value is not None
        found, combination = known.outcomes or {}, self._scale.combination
        made = None if combination is None else {name: found[name] for name in combination.names(found)}
        also = {name: each.value for name, each in found.items() if name not in (made or {})}
        halves = known.pairs[0] if known.pairs else None
        return Score(known.value, halves, known.noise, known.seconds, also or None, made)

    def _evaluation(self, score: Score) -> Evaluation:
        pairs = () if score.halves is None else (score.halves,)
        return Evaluation(score.value, score.besides, pairs, score.noise, sign=self._scale.sign)

    def _scored(self, programs: Programs, score: ProgramScore, trial: int | str, values: Values) -> Score | Failed:
        """Score settings; any thread may call it."""
        return replace(score, settings=self.settings.texts(values))(
            programs, self.checkpoint, f"{self.prefix}{trial}", self.log(trial)
        )
