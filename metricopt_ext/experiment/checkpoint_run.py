"""Tunes a checkpoint for a score that a program prints: trial files, programs side by side, guard, tuned file."""

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from metricopt_ext.adapters.file import FileMoves
from metricopt_ext.errors import BudgetError, ConfigError
from metricopt_ext.experiment.program_trials import HELD_OUT, NAME, TRIALS, ProgramRun, TrialError, ending, side_by_side
from metricopt_ext.methods.ask_and_tell import Search, Trial
from metricopt_ext.methods.assessment import QUERIES as FIRST
from metricopt_ext.methods.ending import confirmed
from metricopt_ext.methods.guard import CONFIDENCE
from metricopt_ext.methods.result import Result
from metricopt_ext.runtime.identity import fingerprint, fingerprint_of_content
from metricopt_ext.runtime.progress import Callback
from metricopt_ext.search.trust_region import GuidedTrustRegion
from metricopt_ext.tasks.program_score import Failed, ProgramScore, Score
from metricopt_ext.utils.checkpoint_file import CheckpointFile
from metricopt_ext.utils.files import opened_atomically, read_json, remove_unfinished, write_json
from metricopt_ext.utils.program import Programs
from metricopt_ext.utils.words import brief, counted

SEARCH = "search"
UNCHANGED = "0"  # the name of the trial that is the file as it was


@dataclass(frozen=True)
class Tuned:
    """What a run found.

    Attributes:
        result: The guarded result, in the score's own units.
        queries: Runs of the program, by purpose; those on data held out are counted apart.
        failed: Trials that failed.
        phi: What was kept, ``d``.
    """

    result: Result
    queries: dict[str, int]
    failed: int
    phi: Tensor

    @property
    def changed(self) -> bool:
        """Whether another model is kept than the one that was given."""
        return bool(self.phi.any())


class CheckpointRun(ProgramRun):
    """One run on one checkpoint.

    Args:
        file: The checkpoint.
        moving: What phi moves of it.
        score: Scores a file on the data that the search sees.
        folder: Keeps the search, trial files while they are scored, and logs.
        holdout: Scores it on data that the search does not see; None without any.
        maximize: Whether higher is better.
        subject_to: Constraints on other quantities that the score has, by name (`Metric`); not on data held out.
        seed: Seed of the search.
        gradients: ``gradients(path, keys)`` returns gradients of a loss by key, each of its tensor's shape or
            m of them stacked; they shape the search. None takes all directions for alike.
    """

    def __init__(
        self,
        file: CheckpointFile,
        moving: FileMoves,
        score: ProgramScore,
        folder: Path,
        *,
        holdout: ProgramScore | None = None,
        maximize: bool = True,
        subject_to: Mapping[str, str] | None = None,
        seed: int = 0,
        gradients: Callable[[str, list[str]], Mapping[str, Tensor]] | None = None,
    ) -> None:
        super().__init__(folder)
        self.file, self.moving, self.score, self.holdout = file, moving, score, holdout
        self.maximize, self.subject_to, self.seed = maximize, subject_to, seed
        self.gradients: Tensor | None = None
        if gradients is not None:
            found = gradients(str(file.path), list(moving.base))
            if not isinstance(found, Mapping):
                raise ConfigError(f"the function of gradients returned {brief(found)}; it must be a dict by key")
            self.gradients = moving.gradients(found)

    @property
    def least_queries(self) -> int:
        """The fewest runs of the program that the search can do with."""
        return GuidedTrustRegion().least_queries(self.moving.adapter.dim) * self.score.repeats

    def check_queries(self, queries: int) -> None:
        """Check that so many runs of the program are enough to search with.

        Raises:
            ConfigError: They are too few.
        """
        if queries < (least := self.least_queries):
            trials = counted(queries // self.score.repeats, "query")
            raise ConfigError(
                f"--queries {queries} with --repeats {self.score.repeats}: {trials} of the checkpoint, and the search"
                f" needs {least // self.score.repeats}"
            )

    def score_unchanged(self) -> Score:
        """Score the file as it was, but written by us.

        Raises:
            TrialError: The program fails on it, so that it would on any other.
            ConfigError: It can't be started.
            OSError: The file can't be written.
        """
        with ending() as programs:
            found = self._scored(programs, self.score, UNCHANGED, self.moving.adapter.phi.detach() * 0)
        if isinstance(found, Failed):
            raise TrialError(f"the unchanged checkpoint can't be scored: {found.reason}", self.log(UNCHANGED))
        return found

    def claim(self, described: dict[str, Any], resume: bool) -> None:
        """Take the folder for this run, or go on with the same one.

        Args:
            described: What the run depends on besides the file and what moves.
            resume: Continue what an interrupted run left there.

        Raises:
            FileFormatError: The folder holds a run, and ``resume`` is False or it is another.
        """
        identity = {
            "content of the checkpoint": fingerprint_of_content(self.file.path),
            "mix": [fingerprint_of_content(each) for each in self.moving.others],
            "moved": [key for part in self.moving.parts for key in part.keys],
        }
        super().claim({**identity, **described}, resume)
        for name in ("[0-9]*", f"{HELD_OUT}-*"):
            for leftover in (self.folder / TRIALS).glob(name + self.file.path.suffix):
                leftover.unlink()
        remove_unfinished(self.folder / TRIALS)

    def tune(
        self,
        queries: int,
        *,
        unchanged: Score | None = None,
        jobs: int = 1,
        failures: int = 0,
        resume: bool = False,
        callback: Callback | None = None,
        before: int = 0,
    ) -> Tuned:
        """Search, have the guard decide, and ask the data held out if there are any.

        Args:
            queries: Runs of the program that the search may take, those of the unchanged file included.
            unchanged: What `score_unchanged` found, which is the search's first trial; None to score it again.
            jobs: How many programs run at once; the result does not depend on it.
            failures: How many trials may fail.
            resume: Continue what an interrupted run left in the folder.
            callback: Notified of progress.
            before: Runs of the program that it was told of already.

        Raises:
            TrialError: More trials failed.
            ConfigError: There are too few queries to search with.
            FileFormatError: As from `Search`.
            OSError: A file can't be written.
        """
        callback = callback or Callback()
        with self._searching(queries, resume) as search:
            callback.stage("search")
            if search.spent:
                callback.on_file(before + search.spent * self.score.repeats)
            self._ask_and_tell(search, unchanged, jobs, failures, callback, before)
            result: Result = search.result()
            failed = search.failed
            spent = {NAME: search.spent * self.score.repeats}
        if self.holdout is not None and result.chosen != "start":
            callback.stage("data held out")
            with ending() as programs:
                judged = partial(self._held_out, programs, self.holdout, result)
                result = confirmed(result, judged, CONFIDENCE, None)
            spent["held out"] = len(result.holdout) * self.holdout.repeats
        callback.outcome(result.before, result.after)
        callback.done()
        return Tuned(result, spent, failed, result.ends[result.chosen])

    def _searching(self, queries: int, resume: bool) -> Search:
        trials = queries // self.score.repeats
        made = None if self.score.scale is None else self.score.scale.combination
        try:
            return Search(
                self.moving.adapter,
                trials,
                seed=self.seed,
                output_dir=self.folder / SEARCH,
                resume=resume,
                maximize=self.maximize,
                name=NAME,
                subject_to=self.subject_to or None,
                combine=None if made is None else made.combine,
                gradients=self.gradients,
            )
        except BudgetError as error:
            raise ConfigError(f"--queries {queries} with --repeats {self.score.repeats}: {error}") from error

    def _ask_and_tell(
        self, search: Search, unchanged: Score | None, jobs: int, failures: int, callback: Callback, before: int
    ) -> None:
        """Score all that the search asks for, several at once, and tell it each score when it is there."""
        said = search.spent >= FIRST  # whether it is worth it, when it was run before

        def tell(trial: Trial, found: Score | Failed) -> None:
            if isinstance(found, Score):
                if found.outcomes is None:
                    search.tell(trial.id, found.value, halves=found.halves, noise=found.noise, outcomes=found.also)
                else:
                    told = {name: (each.value, each.pairs or None, each.noise) for name, each in found.besides.items()}
                    search.tell(trial.id, told, noise=found.noise)
                callback.query(before + search.spent * self.score.repeats, found.value)
                nonlocal said
                if search.spent >= FIRST and not said:
                    said = True
                    for line in search.assessment(FIRST).lines():
                        callback.say(line)
                return
            # One too many stays open, so that --resume tries it again.
            self.allow(trial.id, found, search.failed, failures, callback)
            search.fail(trial.id, found.reason)

        side_by_side(
            search.ask,
            lambda programs, trial: self._scored(programs, self.score, str(trial.id), trial.phi.clone()),
            tell,
            jobs,
            lambda trial: unchanged if str(trial.id) == UNCHANGED else None,
        )

    def _held_out(self, programs: Programs, holdout: ProgramScore, result: Result, name: str) -> float:
        """Return the score of one of the guard's candidates on the data held out; it is asked for once, and kept."""
        path, trial, phi = self.folder / f"{HELD_OUT}.json", f"{HELD_OUT}-{name}", result.ends[name]
        kept, point = read_json(path) if path.exists() else {}, fingerprint({"phi": phi})
        if not isinstance(kept.get(point), float):
            scored = self._scored(programs, holdout, trial, phi)
            if isinstance(scored, Failed):
                raise TrialError(f"--holdout failed on {name!r}: {scored.reason}", self.log(trial))
            kept[point] = scored.value
            write_json(path, kept)
        found: float = kept[point]
        self.check_unit(result.evaluations[name].value, found, trial)
        return found

    def _scored(self, programs: Programs, score: ProgramScore, trial: str, phi: Tensor) -> Score | Failed:
        """Write a trial's file, score it, delete it; any thread may call it."""
        path = (self.folder / TRIALS / f"{trial}{self.file.path.suffix}").absolute()
        self.file.write(path, self.moving.tensors(phi), durable=False)
        try:
            return score(programs, path, trial, self.log(trial))
        finally:
            path.unlink(missing_ok=True)

    def write(self, path: Path, tuned: Tuned) -> None:
        """Write the checkpoint with what was kept: the same bytes as before if that is the model as it was.

        Raises:
            DataError: The checkpoint changed since it was read.
            OSError: The file can't be written.
        """
        if tuned.changed:
            self.file.write(path, self.moving.tensors(tuned.phi))
            return
        self.file.check_unchanged()
        with open(self.file.path, "rb") as old, opened_atomically(path) as file:
            shutil.copyfileobj(old, file, 1 << 20)

    def disk(self, jobs: int) -> int:
        """Return how many bytes the files of a run take at most: a trial for each job, the tuned one, and a spare."""
        return (jobs + 2) * self.file.path.stat().st_size
