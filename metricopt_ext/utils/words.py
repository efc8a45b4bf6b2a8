"""Words for numbers, names and values in messages."""

import difflib
import re
import reprlib
import textwrap
from collections.abc import Sequence

WORDS = re.compile(r"[A-Z]?[a-z]+[0-9]*|[A-Z]+(?![a-z])[0-9]*")
_BRIEF = reprlib.Repr()
_BRIEF.maxstring = _BRIEF.maxother = 80


def counted(count: int, noun: str) -> str:
    """Return a number with its regular noun.

    Examples:
        >>> counted(1, "seed"), counted(5, "seed"), counted(0, "query")
        ('1 seed', '5 seeds', '0 queries')
    """
    if count == 1:
        return f"1 {noun}"
    if noun.endswith("y"):
        return f"{count} {noun[:-1]}ies"
    return f"{count} {noun}es" if noun.endswith(("ch", "sh", "s", "x")) else f"{count} {noun}s"


def override(key: str, name: str) -> str:
    """Return the argument that sets a list of settings to one name, quoted for YAML and a shell where it needs that.

    Examples:
        >>> print(override("data.drop", "id"), override("data.drop", "Unnamed: 0"))
        data.drop=[id] "data.drop=['Unnamed: 0']"
    """
    if re.fullmatch(r"[\w.-]+", name):
        return f"{key}=[{name}]"
    quoted = name.replace("'", "''")
    return f"\"{key}=['{quoted}']\""


def words_in(name: str) -> str:
    """Return the words that a name is made of, with the numbers at their ends, in lower case.

    Examples:
        >>> words_in("val/mAP50"), words_in("BinaryF1Score"), words_in("top_k_accuracy")
        ('val m ap50', 'binary f1 score', 'top k accuracy')
    """
    return " ".join(WORDS.findall(name.replace("IoU", "iou"))).lower()


def decimals(value: float, sign: str = "") -> str:
    """Return a metric's value with four decimals; one that they would hide, or that has many digits, with four digits.

    Args:
        value: The value, in the metric's own units.
        sign: ``"+"`` for one before what is above 0, too.

    Examples:
        >>> decimals(0.25), decimals(0.0), decimals(3.2e-7), decimals(1.5e9, "+")
        ('0.2500', '0.0000', '3.2e-07', '+1.5e+09')
    """
    usual = value == 0 or 1e-4 <= abs(value) < 1e6
    return f"{value:{sign}.{'4f' if usual else '4g'}}"


def duration(seconds: float) -> str:
    """Return a time in the unit that suits it, as coarse as an estimate is.

    Examples:
        >>> duration(0.2), duration(89), duration(240), duration(5 * 3600), duration(3 * 86400)
        ('1 s', '89 s', '4 min', '5.0 h', '3.0 d')
    """
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    if seconds < 90 * 60:
        return f"{round(seconds / 60)} min"
    return f"{seconds / 3600:.1f} h" if seconds < 36 * 3600 else f"{seconds / 86400:.1f} d"


def shortened(names: list[str]) -> str:
    """Format a list of names; a long one is cut to its beginning and its length.

    Examples:
        >>> shortened(["a"]), shortened(list("abcdefg"))
        ("['a']", "['a', 'b', 'c', 'd', 'e', ... 7 in all]")
    """
    return str(names) if len(names) <= 6 else f"[{', '.join(map(repr, names[:5]))}, ... {len(names)} in all]"


def and_more(names: Sequence[str]) -> str:
    """Return the first name, and how many more there are.

    Examples:
        >>> and_more(["a"]), and_more(["a", "b", "c"])
        ('a', 'a and 2 more')
    """
    return f"{names[0]} and {len(names) - 1} more" if len(names) > 1 else names[0]


def nearest(name: str, known: list[str]) -> str:
    """Return the end of a message about an unknown name: the known names that are like it, or else all of them.

    Examples:
        >>> nearest("heat", ["head", "body"])
        "; did you mean ['head']?"
    """
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.3)
    return f"; did you mean {near}?" if near else f"; the choices are {shortened(known)}"


def brief(value: object) -> str:
    """Format a value from a file on one line of a message, however long or nested it is.

    An exception is its message, with its type where that alone would not tell, as for a missing key.

    Examples:
        >>> brief(list(range(100))), brief(KeyError("dim")), brief(ValueError("so  it is"))
        ('[0, 1, 2, 3, 4, 5, ...]', "KeyError('dim')", 'so it is')
    """
    if not isinstance(value, BaseException):
        return " ".join(_BRIEF.repr(value).splitlines())  # an array's has several
    text = repr(value) if isinstance(value, KeyError) or not str(value) else str(value)
    return textwrap.shorten(text, 300, placeholder=" ...")
