"""A limit on how long something may take."""

import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from helpers.refusals import assert_refused
from metricopt_ext.runtime import time_limit
from metricopt_ext.runtime.time_limit import call_within

needs_alarms = pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs alarms")

TIMEOUT = "0.05 s"


def waiting() -> None:
    time.sleep(60)


def with_catching(seconds: float, catch: type[BaseException]) -> str:
    """Work in a loop that catches what goes wrong, as of one bad example, and goes on."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with suppress(catch):
            time.sleep(0.01)
    return "done"


def raising(seconds: float) -> None:
    """Raise an error of its own on the alarm."""
    try:
        time.sleep(seconds)
    except BaseException:
        raise KeyError("example 3") from None


@needs_alarms
@pytest.mark.parametrize("function", [waiting, lambda: with_catching(60, Exception)], ids=["waits", "catches"])
def test_what_takes_too_long_is_stopped(function: Callable[[], Any]) -> None:
    began = time.monotonic()
    assert_refused(lambda: call_within(0.05, function), TimeoutError, TIMEOUT)
    assert time.monotonic() - began < 30


@needs_alarms
def test_the_alarm_rings_again_where_it_was_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time_limit, "AGAIN", 0.05)
    caught: list[type[BaseException]] = []

    def function() -> None:
        for _ in range(3):
            try:
                time.sleep(60)
            except BaseException as error:
                caught.append(type(error))
        time.sleep(60)

    assert_refused(lambda: call_within(0.05, function), TimeoutError, TIMEOUT)
    assert len(caught) == 3
    assert not any(issubclass(each, Exception) for each in caught)
    time.sleep(0.15)  # it rings no more


@pytest.mark.parametrize("main", [True, False], ids=["main thread", "another thread"])
@pytest.mark.parametrize(
    "function",
    [lambda: with_catching(0.2, BaseException), lambda: raising(0.2), lambda: time.sleep(0.2)],
    ids=["returns all the same", "raises something else", "waits"],
)
def test_the_time_is_looked_at_in_the_end(function: Callable[[], Any], main: bool) -> None:
    raised: list[str] = []

    def work() -> None:
        try:
            call_within(0.05, function)
        except TimeoutError as error:
            raised.append(str(error))

    if main:
        work()
    else:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert raised == ["it took longer than its timeout of 0.05 s"]


@pytest.mark.parametrize("limit", [None, 60.0])
def test_what_is_quick_enough_returns_and_raises_what_it_does(limit: float | None) -> None:
    assert call_within(limit, lambda: 3) == 3
    assert_refused(lambda: call_within(limit, lambda: raising(-1)), KeyError, "example 3")
    with pytest.raises(KeyboardInterrupt):
        call_within(limit, interrupted)


def interrupted() -> None:
    raise KeyboardInterrupt


@needs_alarms
def test_an_alarm_of_the_program_rings_later() -> None:
    rung: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda *_: rung.append(1))
    try:
        signal.setitimer(signal.ITIMER_REAL, 2.0)  # a busy machine may take a while until the next line
        with suppress(TimeoutError):
            call_within(0.01, waiting)
        assert not rung
        give_up = time.monotonic() + 30
        while not rung and time.monotonic() < give_up:
            time.sleep(0.01)
        assert rung
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@needs_alarms
@pytest.mark.parametrize("limit", [1e-6, 1e-4, 60.0])
def test_the_program_s_handler_is_put_back(limit: float) -> None:
    for _ in range(50):  # the shortest ones ring while the alarm is set or taken back
        with suppress(TimeoutError):
            call_within(limit, lambda: sum(range(100)))
        assert signal.getsignal(signal.SIGALRM) is signal.SIG_DFL
        assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
