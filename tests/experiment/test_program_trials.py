"""Trials side by side: how many at once, what is known already, and that all end with an error."""

import threading
import time
from pathlib import Path

import pytest

from helpers.refusals import assert_named
from metricopt_ext.experiment.program_trials import ProgramRun, TrialError, side_by_side
from metricopt_ext.tasks.program_score import Failed, Score
from metricopt_ext.utils.program import Programs, StoppedError


class Bench:
    """Hands out numbers, scores each by itself, and notes what happens."""

    def __init__(self, count: int, batch: int = 100) -> None:
        self.left, self.batch = list(range(count)), batch
        self.told: dict[int, Score | Failed] = {}
        self.at_once, self.most, self.lock = 0, 0, threading.Lock()

    def ask(self, count: int) -> list[int]:
        if len(self.told) < self.batch and self.left and self.left[0] >= self.batch:
            return []  # a batch that is not complete
        asked, self.left = self.left[:count], self.left[count:]
        return asked

    def score(self, programs: Programs, trial: int) -> Score | Failed:
        with self.lock:
            self.at_once += 1
            self.most = max(self.most, self.at_once)
        time.sleep(0.02)
        with self.lock:
            self.at_once -= 1
        return Failed("odd") if trial % 2 else Score(trial, None, None, 0.02)

    def tell(self, trial: int, found: Score | Failed) -> None:
        assert trial not in self.told
        self.told[trial] = found


@pytest.mark.parametrize("jobs", [1, 3])
def test_each_is_scored_once_by_as_many_as_jobs(jobs: int) -> None:
    bench = Bench(10, batch=6)
    side_by_side(bench.ask, bench.score, bench.tell, jobs)
    assert bench.told == {n: Failed("odd") if n % 2 else Score(n, None, None, 0.02) for n in range(10)}
    assert bench.most == jobs


def test_what_is_known_is_not_scored() -> None:
    bench, known = Bench(5), Score(9.0, None, None, 1.0)
    side_by_side(bench.ask, bench.score, bench.tell, 2, lambda trial: known if trial == 1 else None)
    assert bench.told[1] == known
    assert bench.told[3] == Failed("odd")


def test_an_error_of_tell_ends_the_programs(tmp_path: Path) -> None:
    ended = list[str]()

    def score(programs: Programs, trial: int) -> Score | Failed:
        if trial == 0:
            return Failed("it is odd")
        try:
            programs.run(["sleep", "60"], tmp_path / "1.log")
        except StoppedError:
            ended.append("stopped")
            raise
        return Failed("it ran to its end")

    def tell(trial: int, found: Score | Failed) -> None:
        raise TrialError("trial 0 failed", tmp_path / "0.log")

    began = time.monotonic()
    with pytest.raises(TrialError) as caught:
        side_by_side(Bench(2).ask, score, tell, 2)
    assert_named(caught, "trial 0 failed")
    assert time.monotonic() - began < 30
    assert caught.value.log == tmp_path / "0.log"
    assert ended == ["stopped"]


def test_a_score_in_percent_is_not_compared_with_one_that_is_not(tmp_path: Path) -> None:
    one = ProgramRun(tmp_path)
    for seen, aside, switch in ((0.7, 65.0, "--holdout"), (65.0, 0.7, "--score"), (-0.26, -17.6, "--holdout")):
        with pytest.raises(TrialError) as caught:
            one.check_unit(seen, aside, "holdout-start")
        assert_named(caught, switch)
        assert caught.value.log == one.log("holdout-start")
    for seen, aside in ((0.7, 0.65), (70.0, 65.0), (0.05, 1.2), (0.0, 50.0), (-0.5, 50.0), (0.5, 5000.0)):
        one.check_unit(seen, aside, "holdout-start")
