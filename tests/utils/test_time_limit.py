"""A limit on how long something may take."""

import signal
import threading
import time
from contextlib import suppress

import pytest

from metricopt_ext.utils.time_limit import time_limit

needs_alarms = pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs alarms")


@needs_alarms
def test_what_takes_too_long_is_stopped() -> None:
    began = time.monotonic()
    with pytest.raises(TimeoutError, match=r"it took longer than 0\.05 s"), time_limit(0.05):
        time.sleep(60)
    assert time.monotonic() - began < 30


def test_what_is_quick_enough_is_not() -> None:
    for limit in (None, 60.0):
        with time_limit(limit):
            pass


@needs_alarms
def test_an_alarm_of_the_program_rings_later() -> None:
    rung: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda *_: rung.append(1))
    try:
        signal.setitimer(signal.ITIMER_REAL, 2.0)  # a busy machine may take a while until the next line
        with suppress(TimeoutError), time_limit(0.01):
            time.sleep(60)
        assert not rung
        give_up = time.monotonic() + 30
        while not rung and time.monotonic() < give_up:
            time.sleep(0.01)
        assert rung
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_another_thread_is_told_at_the_end() -> None:
    raised: list[str] = []

    def work(limit: float, seconds: float) -> None:
        try:
            with time_limit(limit):
                time.sleep(seconds)
        except TimeoutError as error:
            raised.append(str(error))

    for limit, seconds, told in [(60.0, 0.0, 0), (0.05, 0.2, 1)]:
        thread = threading.Thread(target=work, args=(limit, seconds))
        thread.start()
        thread.join()
        assert len(raised) == told
