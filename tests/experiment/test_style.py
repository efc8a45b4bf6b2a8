"""How figures look, and that making them leaves matplotlib's global state alone."""

from pathlib import Path

import pytest

from metricopt_ext.experiment.style import (
    markdown_table,
    print_points,
    print_table,
    print_written,
)

HOSTILE = "a\x1b]0;owned\x07|<b>`c`\u202e\nd\ud800"
SHOWN = r"a\x1b]0;owned\x07|<b>`c`\u202e\nd\ud800"


def test_tables_and_lists_show_text_as_text(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    print_points([HOSTILE])
    print_table(["name", HOSTILE], [[HOSTILE, "1"]], title=HOSTILE)
    print_written(HOSTILE, Path(HOSTILE))
    shown = capsys.readouterr().out
    assert shown.count(SHOWN) == 6
    assert {each for each in shown if not each.isprintable()} == {"\n"}


def test_a_table_in_markdown_has_its_columns_whatever_they_hold() -> None:
    cell = r"a\x1b]0;owned\x07\|&lt;b>\`c\`\u202e\nd\ud800"
    assert markdown_table([HOSTILE, "b"], [["**1**", HOSTILE]]) == [
        f"| {cell} | b |",
        "| --- | --- |",
        f"| **1** | {cell} |",
    ]
