"""Trials that programs score, several side by side, and what is said of one that fails."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from metricopt_ext.errors import MetricError
from metricopt_ext.tasks.program_score import Failed, Score
from metricopt_ext.utils.program import Programs

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
