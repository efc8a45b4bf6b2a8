"""Programs: their output, their end, and that nothing of them is left."""

import os
import sys
import threading
import time
from pathlib import Path

import pytest

from helpers.refusals import assert_refused
from metricopt_ext.errors import ConfigError
from metricopt_ext.utils import program
from metricopt_ext.utils.program import Programs, StoppedError, command_words, filled


def python(code: str) -> list[str]:
    return [sys.executable, "-S", "-c", code]


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended but was not waited for, as its parent is gone, does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def number_in(path: Path) -> int:
    until = time.monotonic() + 20
    while not (path.exists() and path.read_text().strip().isdecimal()):
        assert time.monotonic() < until
        time.sleep(0.01)
    return int(path.read_text())


def gone(pid: int) -> bool:
    until = time.monotonic() + 10
    while alive(pid) and time.monotonic() < until:
        time.sleep(0.01)
    return not alive(pid)


# Starts a process of its own, which ignores SIGTERM, tells its number, and waits.
PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-S", "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(100)"])
open("child", "w").write(str(child.pid))
print("begun", flush=True)
time.sleep(100)
"""


def test_output_and_errors_are_told_apart_and_logged(tmp_path: Path) -> None:
    code = "import sys; print('a 1'); print('b 2', file=sys.stderr); print('a 3'); sys.exit(4)"
    ended = Programs().run(python(code), tmp_path / "new" / "0.log")
    assert (ended.output, ended.errors, ended.status) == ("a 1\na 3\n", "b 2\n", 4)
    assert ended.failure() == "the program's exit status is 4"
    assert (tmp_path / "new" / "0.log").read_text() == "a 1\na 3\nb 2\n"
    assert os.listdir(tmp_path / "new") == ["0.log"]


def test_one_that_takes_too_long_ends_with_all_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    began = time.monotonic()
    ended = Programs().run(python(PARENT), tmp_path / "0.log", timeout=1.0)
    assert time.monotonic() - began < program.GRACE  # the parent ends when it is asked to
    assert ended.timed_out
    assert ended.output == "begun\n"
    assert ended.failure() == "the program was ended after its time limit of 1 s"
    assert "[ended after its time limit of 1 s]" in (tmp_path / "0.log").read_text()
    assert gone(number_in(tmp_path / "child"))


def test_what_one_leaves_behind_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ended = Programs().run(python(PARENT.replace("\ntime.sleep(100)", "")), tmp_path / "0.log")
    assert ended.failure() is None
    assert gone(number_in(tmp_path / "child"))


def test_stopping_ends_all_and_starts_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(program, "GRACE", 1.0)
    programs, raised = Programs(), list[type[Exception]]()

    def run() -> None:
        try:
            programs.run(python(PARENT), tmp_path / "0.log")
        except StoppedError as error:
            raised.append(type(error))

    thread = threading.Thread(target=run)
    thread.start()
    child = number_in(tmp_path / "child")
    programs.stop()
    thread.join(10)
    assert raised == [StoppedError]
    assert gone(child)
    with pytest.raises(StoppedError):
        programs.run(python("print(1)"), tmp_path / "1.log")


def test_a_program_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no program")
    for name in ("no-such-program", str(tmp_path / "text")):
        with pytest.raises(ConfigError):
            Programs().run([name], tmp_path / "0.log")


def test_words_are_those_of_a_shell() -> None:
    words = command_words("run 'a b' --weights={checkpoint} \"{trial}\" {other}", "--score", needed=["checkpoint"])
    assert words == ["run", "a b", "--weights={checkpoint}", "{trial}", "{other}"]
    values = {"checkpoint": "/x y/{trial}.pth", "trial": "7"}
    assert filled(words, values) == ["run", "a b", "--weights=/x y/{trial}.pth", "7", "{other}"]
    assert filled(["trial={trial}; run ${trial}", "$ {trial}"], values) == ["trial=7; run ${trial}", "$ 7"]
    assert_refused(
        lambda: command_words("sh -c 'run ${checkpoint}'", "--score", needed=["checkpoint"]),
        ConfigError,
        "--score",
        "{checkpoint}",
    )


@pytest.mark.parametrize(
    ("command", "names"),
    [
        ("", ("--score",)),
        ("run weights.pth", ("{checkpoint}",)),
        ("run {checkpoint} | tail -1", ("'|'",)),
    ],
)
def test_commands_that_can_not_be_meant_are_refused(command: str, names: tuple[str, ...]) -> None:
    assert_refused(lambda: command_words(command, "--score", needed=["checkpoint"]), ConfigError, *names)
