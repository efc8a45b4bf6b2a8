"""Seeds one after another and side by side; workers that end with their parent."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from helpers.refusals import assert_refused
from metricopt_ext.errors import ConfigError
from metricopt_ext.runtime.parallel import run_seeds


@pytest.mark.parametrize(("workers", "threads"), [(0, 1), (1, 0), (-1, 1)])
def test_workers_and_threads_are_at_least_one(workers: int, threads: int) -> None:
    assert_refused(
        lambda: run_seeds(
            lambda seed, callback: pytest.fail("was run"), [0], queries=1, workers=workers, threads=threads
        ),
        ConfigError,
        f"workers={workers}",
        "1",
    )


def test_the_number_of_threads_is_put_back() -> None:
    before = torch.get_num_threads()
    seen = run_seeds(lambda seed, callback: torch.get_num_threads(), [0], queries=1, workers=1, threads=before + 1)
    assert seen == [before + 1]
    assert torch.get_num_threads() == before


# A tool with two workers, each of which says who it is and works on.
TOOL = """
import os, sys, time
from pathlib import Path
from metricopt_ext.experiment.command import errors_in_one_line
from metricopt_ext.runtime.parallel import run_seeds

FOLDER = Path(sys.argv[1])

def run(seed, callback):
    callback.stage("working")
    (FOLDER / f"{os.getpid()}.worker").touch()
    if sys.argv[2:] == ["--kill-one"] and seed == 1:
        os.kill(os.getpid(), 9)
    time.sleep(600)

if __name__ == "__main__":
    with errors_in_one_line(keeps=FOLDER, resume="--resume"):
        run_seeds(run, [0, 1], queries=1, workers=2, threads=1)
"""


def until(condition: Callable[[], bool], seconds: float) -> bool:
    give_up = time.monotonic() + seconds
    while not condition() and time.monotonic() < give_up:
        time.sleep(0.05)
    return condition()


def alive(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"  # whoever should have waited for it is gone


def started(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    script = folder / "tool.py"
    script.write_text(TOOL)
    command = [sys.executable, script, folder, *arguments]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=heed_interrupts,
    )


def heed_interrupts() -> None:
    """Undo what a shell does to its background jobs, which may have started the tests: these ignore Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def workers(folder: Path) -> list[int]:
    return [int(file.stem) for file in folder.glob("*.worker")]


needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs Linux's /proc")


@pytest.mark.slow
@needs_proc
@pytest.mark.parametrize(
    ("number", "whole_terminal", "status"),
    [(signal.SIGTERM, False, 143), (signal.SIGINT, True, 130), (signal.SIGKILL, False, -9)],
)
def test_workers_end_with_their_parent(number: int, whole_terminal: bool, status: int, tmp_path: Path) -> None:
    """A signal reaches the parent alone, as from a batch system, or all processes, as Ctrl-C does."""
    tool = started(tmp_path)
    assert until(lambda: len(workers(tmp_path)) == 2, 300)
    (os.killpg if whole_terminal else os.kill)(tool.pid, number)
    _, said = tool.communicate(timeout=300)
    assert tool.returncode == status
    assert until(lambda: not any(map(alive, workers(tmp_path))), 120)
    if number != signal.SIGKILL:
        script = f"{Path(sys.orig_argv[0]).name} {tmp_path / 'tool.py'} {tmp_path}"
        assert said == f"stopped; what is finished is kept in {tmp_path}. To go on:\n  {script} --resume\n"


@pytest.mark.slow
@needs_proc
def test_a_worker_that_dies_ends_the_run(tmp_path: Path) -> None:
    tool = started(tmp_path, "--kill-one")
    _, said = tool.communicate(timeout=300)
    assert tool.returncode == 1
    assert "BrokenProcessPool" in said
    assert until(lambda: not any(map(alive, workers(tmp_path))), 120)
