"""How long what is left takes, by what has been."""

import pytest

from metricopt_ext.runtime.pace import Pace, seconds_left


class Clock:
    """A clock that is set by hand."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def queried(pace: Pace, clock: Clock, queries: int, seconds: float) -> Pace:
    for _ in range(queries):
        clock.now += seconds
        pace.query(pace.spent + 1)
    return pace


def test_nothing_is_said_before_three_queries(clock: Clock) -> None:
    pace = Pace(10, clock)
    assert queried(pace, clock, 2, 5.0).seconds_left is None
    assert queried(pace, clock, 1, 5.0).seconds_left == 35.0
    clock.now += 1000  # of a query that is being made, or of a method that makes none
    assert pace.seconds_left == 35.0


def test_what_comes_before_the_first_query_is_not_counted(clock: Clock) -> None:
    pace = Pace(10, clock)
    clock.now += 100
    pace.stage()
    queried(pace, clock, 4, 2.0)
    pace.stage()  # a later stage's time is
    assert pace.seconds_left == 12.0


def test_queries_on_file_are_not_timed(clock: Clock) -> None:
    pace = Pace(10, clock)
    pace.on_file(5)
    assert queried(pace, clock, 5, 0.001).seconds_left is None
    assert queried(pace, clock, 2, 7.0).seconds_left is None
    assert queried(pace, clock, 1, 7.0).seconds_left == pytest.approx(14.0)


def test_runs_that_have_not_begun_are_taken_to_be_as_fast_as_the_others(clock: Clock) -> None:
    assert seconds_left([Pace(10, clock)], 1) is None
    slow, fast = queried(Pace(10, clock), clock, 5, 4.0), Pace(10, clock)
    queried(fast, clock, 5, 2.0)
    runs = [slow, fast, Pace(10, clock)]
    assert seconds_left(runs, 1) == 5 * 4 + 5 * 2 + 10 * 3
    assert seconds_left(runs, 2) == 30
    assert seconds_left(runs, 3) == 30  # no more than one process works on the longest
