"""How figures look, and that making them leaves matplotlib's global state alone."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from helpers.refusals import assert_refused
from metricopt_ext.experiment.style import (
    markdown_table,
    new_figure,
    print_points,
    print_table,
    print_written,
    save_figure,
)


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (1, 3), (2, 1), (2, 3)])
def test_panels_come_as_a_grid_without_frames(rows: int, columns: int) -> None:
    figure, panels = new_figure(6.0, 4.0, rows, columns)
    assert panels.shape == (rows, columns)
    assert list(figure.axes) == list(panels.flat)
    for axes in panels.flat:
        assert {name: spine.get_visible() for name, spine in axes.spines.items()} == {
            "left": True,
            "bottom": True,
            "top": False,
            "right": False,
        }


def test_panels_may_share_their_axes() -> None:
    _, ((left, right),) = new_figure(4.0, 2.0, 1, 2, sharey=True)
    left.set_ylim(-3, 7)
    assert right.get_ylim() == (-3, 7)


def test_a_figure_that_cannot_be_written_leaves_the_old_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    (tmp_path / "figure.png").write_bytes(b"old")
    monkeypatch.setattr(os, "fsync", full)
    assert_refused(lambda: save_figure(new_figure(2.0, 1.0)[0], tmp_path / "figure.png"), OSError, "figure.png")
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"old"]


@pytest.mark.parametrize("kind", [str, Path])
def test_a_saved_figure_has_150_pixels_to_the_inch(tmp_path: Path, kind: type) -> None:
    figure, _ = new_figure(2.0, 1.0)
    path = save_figure(figure, kind(tmp_path / "figure.png"))
    assert path == tmp_path / "figure.png"
    assert isinstance(path, Path)
    with Image.open(path) as image:
        assert (image.format, image.size) == ("PNG", (300, 150))


def test_dollar_signs_are_no_formula_but_powers_of_ten_are(tmp_path: Path) -> None:
    figure, ((axes,),) = new_figure(3.0, 2.0)
    axes.set_xlabel(r"$\frac$ [/red]")
    axes.plot([1, 1000], [0, 1], label="$a$")
    axes.set_xscale("log")
    axes.legend()
    save_figure(figure, tmp_path / "figure.png")
    assert axes.xaxis.label.get_text() == r"$\frac$ [/red]"
    assert not any(text.get_parse_math() for text in (axes.xaxis.label, *axes.get_legend().get_texts()))
    assert all(tick.get_parse_math() for tick in axes.get_xticklabels() if tick.get_text())


@pytest.mark.parametrize("columns", ["80", "120"])
def test_a_list_is_folded_between_words(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: str
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    print_points(["one [/red]", 30 * "word+0.1234 "])
    first, *lines = capsys.readouterr().out.splitlines()
    assert first == "- one [/red]"
    assert all(len(line) <= int(columns) for line in lines)
    assert " ".join(lines).split() == ["-", *(30 * ["word+0.1234"])]


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


def test_a_figure_takes_any_name(tmp_path: Path) -> None:
    figure, ((axes,),) = new_figure(4.0, 2.0)
    axes.set_title(HOSTILE)
    axes.set_ylabel("two\nlines")
    save_figure(figure, tmp_path / "figure.png")
    assert axes.get_title() == SHOWN.replace(r"\nd", "\nd")
    assert axes.get_ylabel() == "two\nlines"


def test_no_window_system_is_asked_for(tmp_path: Path) -> None:
    code = (
        "import json, sys; from metricopt_ext.experiment.style import new_figure, save_figure;"
        "save_figure(new_figure(1, 1)[0], sys.argv[1]); print(json.dumps('matplotlib.pyplot' in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "a.png"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) is False
