"""Programs that are run, with a time limit, in process groups that end as a whole, and their output in a log."""

import os
import re
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from metricopt_ext.errors import ConfigError
from metricopt_ext.utils.words import brief, duration

GRACE = 5.0  # seconds from asking a group to end until it is killed
POLL = 0.05  # seconds between two looks at what is asked to end
READ = 1 << 24  # of an output as many bytes are read, the last ones
SHELL = ("|", "||", "&", "&&", ";", "<", ">", ">>", "2>", "2>&1", "&>")


class StoppedError(Exception):
    """A program was ended because all were."""


@dataclass(frozen=True)
class Ended:
    """How a program has ended.

    Attributes:
        status: Its exit status; the negative number of the signal that ended it.
        seconds: How long it took.
        output: What it wrote to the standard output, the last `READ` bytes.
        errors: What it wrote to the error stream, likewise.
        timed_out: Whether it was ended as it took too long.
    """

    status: int
    seconds: float
    output: str
    errors: str
    timed_out: bool = False

    def failure(self) -> str | None:
        """Return in words why it failed; None if it did not."""
        if self.timed_out:
            return f"the program was ended after its time limit of {duration(self.seconds)}"
        if self.status < 0:
            return f"signal {-self.status} ended the program"
        return f"the program's exit status is {self.status}" if self.status else None


def command_words(command: str, switch: str, needed: Sequence[str] = ()) -> list[str]:
    """Split a command as a shell does.

    Args:
        command: The command.
        switch: How messages call it.
        needed: The names that must be in braces in it.

    Raises:
        ConfigError: It is empty, a quotation is open, it needs a shell, or lacks a placeholder.
    """
    try:
        words, quoted = shlex.split(command), shlex.split(command, posix=False)
    except ValueError as error:
        raise ConfigError(f"{switch} {brief(command)}: {brief(error)}") from error
    if not words:
        raise ConfigError(f"{switch} is empty; it must be a program and its arguments")
    if of_shell := [word for word in quoted if word in SHELL]:
        raise ConfigError(f"{switch} has {of_shell[0]!r}, but no shell runs it; write sh -c '...', or a script")
    for name in needed:
        if not re.search(rf"(?<!\$)\{{{name}\}}", command):
            raise ConfigError(f"{switch} {brief(command)} has no {{{name}}}; write it where the {name}'s path belongs")
    return words


def filled(words: Sequence[str], values: Mapping[str, str]) -> list[str]:
    """Return the words with what stands for each name in braces; other braces stay, as does a shell's ``${NAME}``."""
    names = "|".join(map(re.escape, values))
    return [re.sub(rf"(?<!\$)\{{({names})\}}", lambda match: values[match[1]], word) for word in words]


class Programs:
    r"""Runs programs, from any threads, and ends all that are running.

    A program is started without a shell in the caller's directory, in a process group of its own, with no input. Its
    standard output goes to a log as it is written, the error stream to a file beside it that is appended to the log at
    the end.

    Examples:
        >>> from tempfile import mkdtemp
        >>> Programs().run(["echo", "0.5"], Path(mkdtemp()) / "0.log").output
        '0.5\n'
    """

    def __init__(self) -> None:
        self._running: set[subprocess.Popen[bytes]] = set()
        self._lock = threading.Lock()
        self._stopped = False

    def run(self, words: Sequence[str], log: Path, timeout: float | None = None) -> Ended:
        """Run a program to its end.

        Args:
            words: The program and its arguments.
            log: What it writes is added to this file.
            timeout: Seconds after which its group is ended; None for no limit.

        Raises:
            ConfigError: There is no such program, or it can't be started.
            StoppedError: `stop` was called.
            OSError: The log can't be written.
        """
        log.parent.mkdir(parents=True, exist_ok=True)
        aside = log.with_suffix(".err")
        with log.open("a+b") as output, aside.open("w+b") as errors:
            output.seek(0, os.SEEK_END)
            begins = output.tell()
            began = time.monotonic()
            process = self._started(words, output.fileno(), errors.fileno())
            timed_out = False
            try:
                process.wait(timeout)
            except subprocess.TimeoutExpired:
                timed_out = True
            finally:
                seconds = time.monotonic() - began
                _end(process)
                with self._lock:
                    self._running.discard(process)
            said, complained = _last(log, begins), _last(aside, 0)
            output.seek(0, os.SEEK_END)
            output.write(complained.encode())
            if timed_out:
                output.write(f"\n[ended after its time limit of {timeout:g} s]\n".encode())
        aside.unlink(missing_ok=True)
        if self._stopped:
            raise StoppedError
        return Ended(process.returncode, seconds, said, complained, timed_out)

    def _started(self, words: Sequence[str], output: int, errors: int) -> "subprocess.Popen[bytes]":
        with self._lock:
            if self._stopped:
                raise StoppedError
            try:
                process = subprocess.Popen(
                    words, stdin=subprocess.DEVNULL, stdout=output, stderr=errors, start_new_session=True
                )
            except OSError as error:
                raise ConfigError(f"{brief(words[0])} can't be started: {error.strerror}") from error
            self._running.add(process)
        return process

    def stop(self) -> None:
        """End the groups of all programs, and start no more."""
        with self._lock:
            self._stopped = True
            running = list(self._running)
        until = time.monotonic() + GRACE
        try:
            for process in running:
                _signal(process, signal.SIGTERM)
            while any(process.poll() is None for process in running) and time.monotonic() < until:
                time.sleep(POLL)
        finally:  # also of a second Ctrl-C
            for process in running:
                if process.poll() is None:
                    _signal(process, signal.SIGKILL)

    @contextmanager
    def stopping_at_the_end(self) -> Iterator[None]:
        """End all programs when the block ends, however that comes."""
        try:
            yield
        finally:
            self.stop()


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End what is left of a process group: the program itself, if it runs, and what it has started."""
    if process.poll() is None:
        _signal(process, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
    _signal(process, signal.SIGKILL)
    process.wait()


def _signal(process: "subprocess.Popen[bytes]", number: int) -> None:
    """Send a signal to a process group, which may have ended."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def _last(path: Path, begins: int) -> str:
    """Return what a file has from some byte on, at most the last `READ` bytes."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(begins, size - READ))
        return file.read().decode(errors="replace")


def last_lines(path: Path, count: int) -> list[str]:
    """Return a log's last lines; none of one that is missing."""
    return _last(path, 0).splitlines()[-count:] if path.is_file() else []
