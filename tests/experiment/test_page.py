"""A page is one file: it loads nothing, runs nothing, says what it is given, and is sound HTML."""

from collections.abc import Callable
from pathlib import Path

import pytest

from metricopt_ext.experiment.page import Code, Figure, Folded, Page, Part, Points, Section, Table, Text
from metricopt_ext.experiment.style import new_figure, save_figure

HOSTILE = "<script>alert('1')</script>\"&{{ 7 * 7 }}"


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    figure, _ = new_figure(3.0, 2.0)
    return save_figure(figure, tmp_path / "a.png")


def page(*parts: Part, title: str = "A", verdict: str = "B.") -> Page:
    return Page(title, verdict, [Section("C", parts)])


def test_what_is_given_is_shown_and_not_run(html: Callable, picture: Path) -> None:
    """Markup, quotes, ampersands and placeholders of templates, wherever a text may stand."""
    parts = [
        Text(HOSTILE),
        Points([HOSTILE]),
        Table(HOSTILE, [HOSTILE, HOSTILE], [[HOSTILE, HOSTILE]]),
        Figure(picture, HOSTILE, HOSTILE),
        Code(HOSTILE, HOSTILE),
        Folded(HOSTILE, [Text(HOSTILE)]),
    ]
    text = Page(HOSTILE, HOSTILE, [Section(HOSTILE, parts)]).html()
    seen = html(text)
    assert "<script" not in text
    for name in ("title", "h1", "h2", "li", "td", "code", "summary"):
        assert set(seen.texts(name)) == {HOSTILE}
    assert {attributes["alt"] for name, attributes in seen.elements if name == "img"} == {HOSTILE}


def test_what_no_page_should_hold_is_written_out(html: Callable) -> None:
    text = "a\x1b]0;owned\x07\u202e\ud800"
    seen = html(page(Text(text), Code(text, f"{text}\n\tb"), title=text).html())
    shown = r"a\x1b]0;owned\x07\u202e\ud800"
    assert seen.texts("h1") == seen.texts("p")[1:] == [shown]
    assert seen.texts("code") == [f"{shown}\n\tb"]


def test_nothing_is_loaded_and_nothing_runs(html: Callable, picture: Path) -> None:
    seen = html(page(Figure(picture, "a", "b")).html())
    seen.check()
    policy = next(attributes["content"] for name, attributes in seen.elements if "http-equiv" in attributes)
    assert policy == "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
