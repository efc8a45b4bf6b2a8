"""Numbers as tables write them: with signs, thousands parted, a decimal point or comma; and marks of missing ones."""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

BLANK = {"", "?"}  # how tables mark a missing value
# and a missing number, in lower case
MISSING = {*BLANK, "-", "--", ".", "#n/a", "#na", "<na>", "n.a.", "n/a", "na", "nan", "none", "null"}


class Numeral(NamedTuple):
    """A number as a table has it.

    Attributes:
        value: The number.
        sign: That of a percentage or a currency beside it; empty for none.
        other: Whether it is written in another notation than the table's.
    """

    value: float
    sign: str = ""
    other: bool = False


_SIGNS = "%$€£¥"
_SIGNED = re.compile(rf"(?P<minus>[+-]?)\s*(?P<before>[{_SIGNS}]?)\s*(?P<bare>.*?)\s*(?P<after>[{_SIGNS}]?)")
_SPACES = "' \u2019\u00a0\u202f"  # that part thousands, whatever the decimal sign is


def _forms(point: str, parts: str) -> list[re.Pattern[str]]:
    """What a plain number and one with thousands parted look like, for a decimal sign and a sign between thousands."""
    point = re.escape(point)
    return [
        re.compile(rf"[+-]?(?:[0-9]+{point}?[0-9]*|{point}[0-9]+)(?:[eE][+-]?[0-9]+)?"),
        re.compile(
            rf"[+-]?[0-9]{{1,3}}(?P<mark>[{parts}{_SPACES}])[0-9]{{3}}(?:(?P=mark)[0-9]{{3}})*(?:{point}[0-9]*)?"
        ),
    ]


_WITH_POINT, _WITH_COMMA = _forms(".", ","), _forms(",", ".")
_NOTATIONS = {"": _WITH_POINT[:1], ".": _WITH_POINT, ",": _WITH_COMMA}  # by the decimal sign that is given
WHOLE = re.compile(r"[+-]?[0-9]+")
_INFINITE = re.compile(r"[+-]?inf(?:inity)?", re.IGNORECASE)


def in_one_go(column: Sequence[str]) -> Array | None:
    """A column of nothing but plain numbers; None for any other."""
    if not set("".join(column)) <= set("0123456789.+-"):
        return None
    try:
        return np.array(column, dtype=np.float64)
    except ValueError:
        return None


def plain_number(cell: str) -> float | None:
    """The number that a cell is without a sign, a decimal comma or parted thousands; None if it is none."""
    return float(cell) if _NOTATIONS[""][0].fullmatch(cell) else None


def number_in(text: str, decimal: str) -> Numeral | None:
    """What a cell holds as a number; None if it holds none."""
    text = text.replace("\u2212", "-")  # the minus of typesetting
    if _INFINITE.fullmatch(text):
        return Numeral(float(text))
    if text[:1] == "(" and text[-1:] == ")" and text[1:2] not in ("(", "-", "+"):
        inner = number_in(text[1:-1].strip(), decimal)
        return None if inner is None else inner._replace(value=0 - inner.value)
    signed = _SIGNED.fullmatch(text)
    if signed is None or (signed["before"] and signed["after"]):
        return None
    bare, sign = signed["minus"] + signed["bare"], signed["before"] or signed["after"]
    if any(form.fullmatch(bare) for form in _NOTATIONS[decimal]):
        point = decimal or "."
        return Numeral(
            float("".join(each for each in bare if each in f"0123456789eE+-{point}").replace(point, ".")), sign
        )
    if any(form.fullmatch(bare) for form in (*_WITH_POINT, *_WITH_COMMA)):
        return Numeral(np.nan, sign, other=True)
    return None
