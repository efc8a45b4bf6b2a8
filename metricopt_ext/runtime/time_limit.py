"""A limit on how long something may take."""

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import TypeVar

Returned = TypeVar("Returned")

AGAIN = 1.0  # seconds from one ring of an alarm to the next, for work that goes on after the first


class _Rung(BaseException):
    """The alarm rang: no Exception, as work that catches these, for one bad example or another try, would go on."""


def call_within(seconds: float | None, function: Callable[[], Returned]) -> Returned:
    """Return what a function returns, unless it takes longer than some seconds; None for no limit.

    In a program's main thread, on a system with alarms, it is stopped as soon as Python runs again, and if it goes on,
    every second anew; elsewhere it is not stopped. An alarm that the program has set for itself is put off meanwhile.

    Raises:
        TimeoutError: It took longer, whether it was stopped, returned or raised something else.
    """
    if seconds is None:
        return function()
    rung: list[bool] = []
    alarms = threading.current_thread() is threading.main_thread() and hasattr(signal, "setitimer")
    began, message = time.monotonic(), f"it took longer than its timeout of {seconds:g} s"

    def late() -> bool:  # by the alarm where there is one, as somebody may set the clock
        return bool(rung) if alarms else time.monotonic() - began > seconds

    try:
        returned = _alarmed(seconds, function, rung) if alarms else function()
    except _Rung:
        raise TimeoutError(message) from None
    except Exception as error:
        if late():  # of the alarm's making, as likely as not
            raise TimeoutError(message) from error
        raise
    if late():
        raise TimeoutError(message)
    return returned


def _alarmed(seconds: float, function: Callable[[], Returned], rung: list[bool]) -> Returned:
    """Call a function, in which `_Rung` is raised after some seconds, and again and again; ``rung`` then has items."""
    began, working = time.monotonic(), True

    def ring(number: int, frame: FrameType | None) -> None:
        if working:
            rung.append(True)
            raise _Rung

    left, again = signal.getitimer(signal.ITIMER_REAL)
    handler = signal.signal(signal.SIGALRM, ring)
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, seconds, AGAIN)
            return function()
        finally:
            working = False  # a ring before this line is raised here, and the next one is a second away
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if left:
            signal.setitimer(signal.ITIMER_REAL, max(1e-6, left - (time.monotonic() - began)), again)
