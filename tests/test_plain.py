"""Text of files is shown as text, whatever a terminal or a page would make of it."""

import io
import pickle
import sys
import unicodedata

import pytest

from metricopt_ext.errors import DataError, MetricOptError
from metricopt_ext.plain import MESSAGE, escape_unprintable, in_markdown, plain


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b]0;owned\x07\x1b[31m", r"\x1b]0;owned\x07\x1b[31m"),  # a terminal's title and colour
        ("a\rb\nc\td\x0be\x0c", r"a\rb\nc\td\x0be\x0c"),
        ("\x00\x7f\x85\x9b31m\u2028\u2029", r"\x00\x7f\x85\x9b31m\u2028\u2029"),  # \x9b is ESC [ in one character
        ("\u202egnp.exe\u2066\u200f", r"\u202egnp.exe\u2066\u200f"),  # right to left
        ("\u200b\ufeff\u00ad\U000e0041", r"\u200b\ufeff\xad\U000e0041"),  # invisible
        ("\udce9\ud800", r"\udce9\ud800"),  # of a file name that is no UTF-8
        ("Zürich 日本\u3000é\u00a0\\ 👩\u200d👧", "Zürich 日本\u3000é\u00a0\\ 👩\u200d👧"),
    ],
)
def test_what_a_terminal_would_obey_is_written_out(text: str, shown: str) -> None:
    assert plain(text) == shown
    assert plain(shown) == shown
    plain(text).encode()


def test_nothing_of_a_control_or_a_direction_passes() -> None:
    every = "".join(map(chr, range(0x11000)))
    passed = {unicodedata.category(each) for each in plain(every)}
    assert not passed & {"Cc", "Cs", "Zl", "Zp"}
    assert {each for each in plain(every) if unicodedata.category(each) == "Cf"} == {"\u200c", "\u200d"}
    assert plain("a\n\tb\r", lines=True) == "a\n\tb\\r"


def test_long_text_keeps_its_beginning_and_its_end() -> None:
    assert plain("x" * 20, 20) == "x" * 20
    assert plain("a" * 50 + "b" * 50, 25) == "a" * 15 + " ... " + "b" * 5
    assert plain("\x1b" * 10**7, 100) == (r"\x1b" * 25)[:72] + " ... " + r"\x1b"[-3:] + (r"\x1b" * 5)


@pytest.mark.parametrize(
    ("text", "escaped"),
    [
        ("<script>alert(1)</script>", "&lt;script>alert(1)&lt;/script>"),
        ("</b> <!-- <?x", "&lt;/b> &lt;!-- &lt;?x"),
        ("p <0.001 < 0.1", "p <0.001 < 0.1"),
        ("a | b", r"a \| b"),
        (r"a \| b \\| c", r"a \\\| b \\\\\| c"),
        ("`code`", r"\`code\`"),
        ("![x](http://there) [y][z]", r"![x]\(http://there) [y][z]"),
        ("<http://there>", "&lt;http://there>"),
        ("a\n# b\x1b", r"a\n# b\x1b"),
        (r"C:\images\x1b", r"C:\images\x1b"),
        ("+0.1 [-0.2, +0.3] ±0.1 **best** a_b", "+0.1 [-0.2, +0.3] ±0.1 **best** a_b"),
    ],
)
def test_markdown_shows_text_as_text(text: str, escaped: str) -> None:
    assert in_markdown(text) == escaped


def test_messages_are_plain_and_cut() -> None:
    error = DataError(f"{'n' * 100_000}\x1b[31m\nname it otherwise")
    assert len(str(error)) == MESSAGE
    assert str(error).startswith("nnn")
    assert str(error).endswith("\\x1b[31m\nname it otherwise")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert str(MetricOptError("short")) == "short"
    assert str(MetricOptError()) == ""


def test_what_an_encoding_lacks_is_written_as_an_escape(monkeypatch: pytest.MonkeyPatch) -> None:
    for encoding, errors, shown in (
        ("ascii", "strict", b"\\xb1 \\u2192"),
        ("ascii", "surrogateescape", b"\\xb1 \\u2192"),
        ("latin-1", "strict", b"\xb1 \\u2192"),
        ("utf-8", "strict", "\xb1 \u2192".encode()),
    ):
        raw = io.BytesIO()
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding, errors))
        escape_unprintable()
        print("\xb1 \u2192", end="", flush=True)
        assert raw.getvalue() == shown
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    escape_unprintable()  # nothing to do
