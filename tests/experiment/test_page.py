"""A page is one file: it loads nothing, runs nothing, says what it is given, and is sound HTML."""

import base64
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.refusals import assert_refused
from metricopt_ext.errors import FileFormatError
from metricopt_ext.experiment.page import Code, Figure, Folded, Page, Part, Points, Section, Table, Text
from metricopt_ext.experiment.style import new_figure, save_figure

HOSTILE = "<script>alert('1')</script>\"&{{ 7 * 7 }}"
Read = Callable[[str], "object"]


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    figure, _ = new_figure(3.0, 2.0)
    return save_figure(figure, tmp_path / "a.png")


def page(*parts: Part, title: str = "A", verdict: str = "B.") -> Page:
    return Page(title, verdict, [Section("C", parts)])


def test_each_part_is_there_as_it_was_given(html: Callable, picture: Path) -> None:
    table = Table("Of them.", ["name", "value", "note"], [["a", "1.0", "x"], ["b", "2.0", "y"]], {(1, 1)}, {0}, {0, 2})
    code = Code("Lines", "a = 1\nb = 2")
    seen = html(page(Text("One."), Points(["Two.", "Three."]), table, code, Folded("More", [Text("Four.")])).html())
    assert seen.texts("title") == ["A"]
    assert [(name, text) for name in ("h1", "h2") for text in seen.texts(name)] == [("h1", "A"), ("h2", "C")]
    assert seen.texts("p") == ["B.", "One.", "Four."]
    assert seen.texts("li") == ["Two.", "Three."]
    assert seen.texts("summary") == ["More"]
    assert seen.texts("code") == ["a = 1\nb = 2"]
    assert seen.tables == [[["name", "value", "note"], ["a", "1.0", "x"], ["b", "2.0", "y"]]]
    assert seen.texts("strong") == ["2.0"]
    scopes = [attributes["scope"] for name, attributes in seen.elements if name == "th"]
    assert scopes == ["col"] * 3 + ["row"] * 2
    aligned = [attributes.get("class") for name, attributes in seen.elements if name == "td"]
    assert aligned == [None, "words", "best", "words"]
    assert [attributes.get("class") for name, attributes in seen.elements if name == "tr"] == [None, "metricopt", None]


def test_pictures_are_embedded_with_their_size_and_words(html: Callable, picture: Path) -> None:
    seen = html(page(Figure(picture, "A line falls.", "The line.")).html())
    (image,) = (attributes for name, attributes in seen.elements if name == "img")
    kind, _, content = image["src"].partition(",")
    assert kind == "data:image/png;base64"
    assert base64.b64decode(content) == picture.read_bytes()
    assert (image["width"], image["height"], image["alt"]) == ("300", "200", "A line falls.")  # 100 to the inch
    assert struct.unpack(">II", picture.read_bytes()[16:24]) == (450, 300)
    assert seen.texts("figcaption") == ["The line."]


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


def test_contrast_is_that_of_wcag(html: Callable) -> None:
    """4.5 between any text and what it stands on, in both colour schemes."""
    text = page().html()

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    schemes = [line for line in text.splitlines() if line.strip().startswith("--back:")]
    assert len(schemes) == 2
    for line in schemes:
        colours = dict(part.strip().split(": ") for part in line.strip().removesuffix(";").split(";"))
        for front, back in (("--text", "--back"), ("--text", "--panel"), ("--text", "--best"), ("--quiet", "--back")):
            dark, light = sorted(luminance(colours[name]) for name in (front, back))
            assert (light + 0.05) / (dark + 0.05) >= 4.5, (front, back)


def test_a_picture_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.png").write_text("no picture of any kind")
    assert_refused(
        lambda: page(Figure(tmp_path / "text.png", "a", "b")).html(), FileFormatError, "text.png", "ValueError", "PNG"
    )


def test_a_page_is_written_whole(tmp_path: Path) -> None:
    made = page(Text("±"))
    assert made.write(tmp_path / "a.html") == tmp_path / "a.html"
    assert (tmp_path / "a.html").read_text(encoding="utf-8") == made.html()
