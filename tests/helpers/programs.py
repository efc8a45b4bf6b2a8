"""Programs called in this process as the command line calls them."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
DETECTRON2 = frozenset(
    {
        *("--config-file", "--resume", "--eval-only"),
        *("--num-gpus", "--num-machines", "--machine-rank", "--dist-url"),
    }
)
"""The switches that Detectron2's own parser has, and tools/train_detector.py with it."""


def call(program: ModuleType, *arguments: object) -> None:
    """Call a script, a module with a ``main``, with these arguments."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [f"{program.__name__.rpartition('.')[2]}.py", *map(str, arguments)])
        program.main()


def refused(program: ModuleType, *arguments: object) -> str:
    """Return why a program refuses these arguments: the one line that it ends with, in place of a traceback."""
    with pytest.raises(SystemExit) as caught:
        call(program, *arguments)
    message = str(caught.value.code)  # a string: printed to stderr, and the exit code is 1
    assert message.startswith("error: ")
    assert len(message.splitlines()) == 1
    return message.removeprefix("error: ")


def end(program: ModuleType, *arguments: object, status: int = 0) -> None:
    """Call a program that must end with this status; print to stderr what the interpreter would."""
    if not status:
        call(program, *arguments)
        return
    with pytest.raises(SystemExit) as caught:
        call(program, *arguments)
    code = caught.value.code
    if isinstance(code, str):
        print(code, file=sys.stderr)
        code = 1
    assert code == status


def started(*arguments: str) -> "subprocess.Popen[str]":
    """Start ``metricopt`` as a process of its own, which Ctrl-C stops even where that is ignored around it."""
    command = [sys.executable, "-m", "metricopt_ext", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    heeding = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    return subprocess.Popen(command, env=environment, start_new_session=True, preexec_fn=heeding, **pipes)


def until(condition: Callable[[], bool], process: "subprocess.Popen[str]") -> None:
    """Wait for what a process does, at most a minute."""
    end = time.monotonic() + 60
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.01)
