"""What a command says when it is stopped."""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from metricopt_ext.runtime.stopping import ending_when_stopped


@pytest.fixture(autouse=True)
def heeded_interrupts() -> Iterator[None]:
    """Undo what a shell does to its background jobs, which may have started the tests: these ignore Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_stopped_command_says_how_to_go_on(
    number: int, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "orig_argv", ["/usr/bin/python3", "-u", "tools/tool.py", "metric.name=a b"])
    monkeypatch.setattr(sys, "argv", ["tools/tool.py", "metric.name=a b"])
    with pytest.raises(SystemExit) as end, ending_when_stopped(Path("out"), "--resume"):
        os.kill(os.getpid(), number)
    assert end.value.code == status
    assert capsys.readouterr().err.splitlines() == [
        "stopped; what is finished is kept in out. To go on:",
        "  python3 -u tools/tool.py 'metric.name=a b' --resume",
    ]


def test_where_nothing_is_kept_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit), ending_when_stopped():
        raise KeyboardInterrupt
    assert capsys.readouterr().err == "stopped; nothing is kept\n"


def test_what_else_listens_to_the_signal_does_so_again() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with ending_when_stopped():
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before
