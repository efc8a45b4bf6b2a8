"""Numbers as tables write them, and marks of missing ones."""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

BLANK = {"", "?"}  # how tables mark a missing value
MISSING = {*BLANK, "-", "n.a.", "n/a", "na", "nan", "none", "null"}  # and a missing number, in lower case

_PLAIN = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_INFINITE = re.compile(r"[+-]?inf(?:inity)?", re.IGNORECASE)
_SIGNS = "%$€£¥"
# A number that is none here: a percentage, a currency, (3) for -3, parted thousands, a decimal comma, another minus.
_OTHER = re.compile(
    rf"[(+\-\u2212]*\s*[{_SIGNS}]?\s*(?:[0-9]{{1,3}}(?:[.,' \u2019\u00a0\u202f][0-9]{{3}})+|[0-9]+)(?:[.,][0-9]*)?"
    rf"\s*[{_SIGNS}]?\s*\)?"
)
WHOLE = re.compile(r"[+-]?[0-9]+")
CODE = re.compile(r"[+-]?0[0-9]+|[0-9]+[eE][0-9]+")  # what is rather a code than a number, as 007 and 1E5


def in_one_go(column: Sequence[str]) -> Array | None:
    """A column of nothing but plain numbers; None for any other."""
    if not set("".join(column)) <= set("0123456789.+-"):
        return None
    try:
        return np.array(column, dtype=np.float64)
    except ValueError:
        return None


def plain_number(cell: str) -> float | None:
    """The finite number that a cell is, with a decimal point and no sign of a currency; None if it is none."""
    return float(cell) if _PLAIN.fullmatch(cell) else None


def number_in(cell: str) -> float | None:
    """The number that a cell is, which may be infinite; None if it is none."""
    return float(cell) if _INFINITE.fullmatch(cell) else plain_number(cell)


def written_otherwise(cell: str) -> bool:
    """Whether a cell seems to be a number, but in a notation that is not read."""
    return number_in(cell) is None and _OTHER.fullmatch(cell) is not None
