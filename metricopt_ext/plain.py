"""Text of files, made safe to show: what a terminal, a log or a page would obey is written out instead.

File names, class names, columns, keys and what libraries say of them can hold anything. They are shown by `plain`, and
in Markdown by `in_markdown`; HTML is escaped by its template.
"""

import io
import re
import sys
import unicodedata

MESSAGE = 1500  # the most characters of a message: it must be read, and what it quotes has no bound

# In Markdown: a backslash that makes a sign plain, a column's end, code, and what makes a link of brackets before it.
ACTIVE = r"\\(?=[!-/:-@\[-`{-~])|[|`]|(?<=\])\("

# Two letters of an alphabet may be joined or kept apart by these, which print nothing themselves.
JOINERS = "\u200c\u200d"


def plain(text: str, most: int | None = None, *, lines: bool = False) -> str:
    r"""Return text in which control characters, marks of direction and other invisible ones are written out.

    Args:
        text: Any text, half surrogate pairs included.
        most: The most characters that are kept; the middle of a longer text is left out. None for all.
        lines: Keep line ends and tabs.

    Examples:
        >>> print(plain("a\x1b[31m\u202eb\n"), plain("c" * 100, 20))
        a\x1b[31m\u202eb\n cccccccccccc ... ccc
    """
    shortened = _shortened(text, most)
    if shortened.isprintable():
        return shortened
    return _shortened("".join(_written_out(each, lines) for each in shortened), most)


def escape_unprintable() -> None:
    """Have standard output write what its encoding lacks as escapes, as the error stream does, instead of an error."""
    stream = sys.stdout
    if isinstance(stream, io.TextIOWrapper) and (stream.errors == "strict" or "utf" not in stream.encoding.lower()):
        stream.reconfigure(errors="backslashreplace")


def in_markdown(text: str) -> str:
    r"""Return a line of text for a Markdown page, in which it makes no tag, code, link or column of a table.

    Signs of emphasis are left, as they do no harm.

    Examples:
        >>> print(in_markdown("<b> a|b `c` [d](e)"))
        &lt;b> a\|b \`c\` [d]\(e)
    """
    return re.sub(ACTIVE, r"\\\g<0>", re.sub(r"<(?=[a-zA-Z/!?])", "&lt;", plain(text)))


def _written_out(character: str, lines: bool) -> str:
    shown = character.isprintable() or character in JOINERS or unicodedata.category(character) == "Zs"
    return character if shown or (lines and character in "\n\t") else character.encode("unicode_escape").decode()


def _shortened(text: str, most: int | None) -> str:
    if most is None or len(text) <= most:
        return text
    between = " ... "
    end = (most - len(between)) // 4  # a message ends with what to do
    return text[: most - len(between) - end] + between + text[len(text) - end :]
