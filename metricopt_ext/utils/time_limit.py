"""A limit on how long something may take."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def time_limit(seconds: float | None) -> Iterator[None]:
    """Raise a TimeoutError in what takes longer than some seconds; None for no limit.

    In a program's main thread, on a system with alarms, it is raised as soon as Python runs again; elsewhere only
    once the work is done. An alarm that the program has set for itself is put off meanwhile.
    """
    if seconds is None:
        yield
        return
    began = time.monotonic()
    message = f"it took longer than {seconds:g} s"
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        if time.monotonic() - began > seconds:
            raise TimeoutError(message)
        return

    def ring(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(message)

    handler, (left, again) = signal.signal(signal.SIGALRM, ring), signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if left:
            signal.setitimer(signal.ITIMER_REAL, max(1e-6, left - (time.monotonic() - began)), again)
