"""Ends a command that is stopped, by Ctrl-C or by a batch system's SIGTERM, in a few lines."""

import shlex
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from metricopt_ext.plain import plain
from metricopt_ext.runtime.launched import is_first
from metricopt_ext.utils.packaged import PROGRAM


class Terminated(KeyboardInterrupt):
    """SIGTERM arrived; where Ctrl-C ends things in order, so does this."""


@contextmanager
def ending_when_stopped(keeps: Path | None = None, resume: str = "") -> Iterator[None]:
    """End the process on Ctrl-C and SIGTERM with the shell's exit status, 130 or 143, and say how to go on.

    Of processes under torchrun, the first alone says it.

    Args:
        keeps: The folder in which finished work is kept; None if none is.
        resume: The option that continues an earlier run; empty if the same command does.
    """
    with _terminable():
        try:
            yield
        except KeyboardInterrupt as stop:
            status = 143 if isinstance(stop, Terminated) else 130
            if not is_first():
                sys.exit(status)
            lines = ["stopped; nothing is kept"]
            if keeps is not None:
                again = _command([resume] if resume and resume not in sys.argv[1:] else [])
                lines = [f"stopped; what is finished is kept in {keeps}. To go on:", f"  {again}"]
            print(*map(plain, lines), sep="\n", file=sys.stderr)
            sys.exit(status)


@contextmanager
def _terminable() -> Iterator[None]:
    """Raise `Terminated` on SIGTERM; only a program's main thread can be told of signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def terminate(number: int, frame: FrameType | None) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _command(more: list[str]) -> str:
    program, *arguments = sys.orig_argv
    if arguments and Path(arguments[0]).name == PROGRAM:  # to Python a script of an installed environment
        program, *arguments = arguments
    return shlex.join([Path(program).name, *arguments, *more])
