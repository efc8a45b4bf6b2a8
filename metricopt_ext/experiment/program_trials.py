"""Trials that programs score, several side by side, and what is said of one that fails."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from metricopt_ext.errors import FileFormatError, MetricError
from metricopt_ext.runtime.identity import claim
from metricopt_ext.runtime.progress import Callback
from metricopt_ext.tasks.program_score import Failed, Score
from metricopt_ext.utils.files import remove_unfinished
from metricopt_ext.utils.program import Programs
from metricopt_ext.utils.words import counted

IDENTITY, TRIALS = "run.json", "trials"
HELD_OUT = "holdout"  # begins the names of trials on data held out
NAME = "score"  # of what the programs print
PERCENT = (30, 300)  # times as large as a share is its percentage on other data, roughly
FORMAT = 1  # of what is kept: a folder of another format is not resumed

Trial = TypeVar("Trial")


class TrialError(MetricError):
    """More trials failed than may.

    Args:
        message: What happened.
        log: What the program of the last one wrote.
    """

    def __init__(self, message: str, log: Path) -> None:
        super().__init__(message)
        self.log = log


class ProgramRun:
    """A folder with a run whose trials are scored by programs.

    Args:
        folder: Keeps what the run depends on, its scores, and logs.
        prefix: Begins the names of trials.
    """

    def __init__(self, folder: Path, prefix: str = "") -> None:
        self.folder, self.prefix = folder, prefix

    def log(self, trial: int | str) -> Path:
        """Return where a trial's output is."""
        return self.folder / TRIALS / f"{self.prefix}{trial}.log"

    def check_unit(self, seen: float, aside: float, trial: int | str) -> None:
        """Refuse a score on data held out that must be the other's in percent, as their gains are compared.

        Args:
            seen: The score on the data that the search sees.
            aside: The same candidate's on the data held out.
            trial: The trial on these.

        Raises:
            TrialError: It is.
        """
        seen_size, aside_size = abs(seen), abs(aside)
        for share, percent, switch in ((seen_size, aside_size, "--holdout"), (aside_size, seen_size, "--score")):
            if seen * aside > 0 and share <= 1 < percent <= 100 and PERCENT[0] <= percent / share <= PERCENT[1]:
                raise TrialError(
                    f"--holdout found {aside:g} where --score found {seen:g}, as if {switch} were in percent; their"
                    " gains are compared, so let both print the same unit",
                    self.log(trial),
                )

    def started(self) -> bool:
        """Whether the folder holds a run."""
        return (self.folder / IDENTITY).exists()

    def claim(self, described: dict[str, Any], resume: bool) -> None:
        """Take the folder for this run, or go on with the same one.

        Args:
            described: What the run depends on.
            resume: Continue what an interrupted run left there.

        Raises:
            FileFormatError: The folder holds a run, and ``resume`` is False or it is another.
        """
        if self.started() and not resume:
            raise FileFormatError(
                f"{self.folder} holds an earlier run: add --resume to continue it, or use another folder"
            )
        claim(self.folder / IDENTITY, {"format": FORMAT, **described})
        remove_unfinished(self.folder)

    def allow(self, trial: int, found: Failed, failed: int, failures: int, callback: Callback) -> None:
        """Say that a trial failed.

        Args:
            trial: The trial.
            found: Why.
            failed: How many failed before.
            failures: How many may.
            callback: Is told.

        Raises:
            TrialError: It is one too many.
        """
        log, name = self.log(trial), f"trial {self.prefix}{trial}"
        if failed >= failures:
            allowed = f"{counted(failures, 'trial')} may fail (--failures {failures})"
            raise TrialError(f"{name} failed: {found.reason}; {allowed}", log)
        callback.say(f"{name} failed: {found.reason}; its output is in {log}")


def side_by_side(
    ask: Callable[[int], Sequence[Trial]],
    score: Callable[[Programs, Trial], Score | Failed],
    tell: Callable[[Trial, Score | Failed], None],
    jobs: int,
    known: Callable[[Trial], Score | None] = lambda trial: None,
) -> None:
    """Score all that is asked for, several at once, and tell each score when it is there.

    Args:
        ask: Returns at most so many trials, none while it waits for those that are running, or at the end.
        score: Scores a trial; any thread may call it.
        tell: Takes what was found. What it raises ends all programs.
        jobs: How many programs run at once.
        known: Returns a trial's score where no program has to run for it.
    """
    running: dict[Future[Score | Failed], Trial] = {}
    with ThreadPoolExecutor(jobs) as pool, ending() as programs:
        while True:
            trials = ask(jobs - len(running)) if len(running) < jobs else []
            if not trials and not running:
                return
            for trial in trials:
                if (found := known(trial)) is not None:
                    tell(trial, found)
                else:
                    running[pool.submit(score, programs, trial)] = trial
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                tell(running.pop(future), future.result())


@contextmanager
def ending() -> Iterator[Programs]:
    """Yield what runs programs, all of which end with the block."""
    programs = Programs()
    with programs.stopping_at_the_end():
        yield programs
