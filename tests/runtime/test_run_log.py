"""A run's log."""

import re
import warnings
from pathlib import Path

import pytest

from helpers.refusals import assert_warned, having
from metricopt_ext.errors import MetricError
from metricopt_ext.plain import MESSAGE
from metricopt_ext.runtime.run_log import run_log, telling_warnings

STAMP = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[+-]\d{4}  "


def lines(path: Path) -> list[str]:
    """The lines without their time stamps, which each must have."""
    found = path.read_text(encoding="utf-8").splitlines()
    assert all(re.match(STAMP, line) for line in found)
    return [re.sub(STAMP, "", line, count=1) for line in found]


def test_lines_are_added_at_the_end(tmp_path: Path) -> None:
    for said in ("seed 0  train %s {0}", "a metric\nof two lines: µ"):
        with run_log(tmp_path / "log.txt") as log:
            log(said)
            assert lines(tmp_path / "log.txt")[-1] == " ".join(said.splitlines())  # while the run goes on
    assert lines(tmp_path / "log.txt") == ["seed 0  train %s {0}", "a metric of two lines: µ"]


def test_a_line_is_plain_and_cut(tmp_path: Path) -> None:
    with run_log(tmp_path / "log.txt") as log:
        log("a\x1b[31m\u202e\ud800\nb")
        log("c" * 3000)
    first, second = lines(tmp_path / "log.txt")
    assert first == r"a\x1b[31m\u202e\ud800 b"
    assert len(second) == MESSAGE


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (MetricError("the metric\nis down"), "error: MetricError: the metric is down"),
        (ZeroDivisionError("a bug"), "error: ZeroDivisionError: a bug"),
        (KeyboardInterrupt(), "stopped"),
    ],
)
def test_the_error_with_which_a_run_ends_is_noted(error: BaseException, line: str, tmp_path: Path) -> None:
    with pytest.raises(type(error)), run_log(tmp_path / "log.txt"):
        raise error
    assert lines(tmp_path / "log.txt") == [line]


def test_warnings_are_told_and_shown() -> None:
    told: list[str] = []
    with pytest.warns(UserWarning, match=having("odd")), telling_warnings(told.append):
        warnings.warn("odd", stacklevel=1)
    assert_warned(lambda: warnings.warn("later", stacklevel=1), "later")
    with pytest.warns(UserWarning, match=having("name", "\\x1b[31m")), telling_warnings(told.append):
        warnings.warn("name \x1b[31m", stacklevel=1)
    assert told == ["UserWarning: odd", r"UserWarning: name \x1b[31m"]
