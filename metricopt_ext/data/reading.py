"""How a file of examples was read, for the report and for the terminal: nothing is guessed in silence."""

import unicodedata
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import Tensor

from metricopt_ext.data.numerals import plain_number
from metricopt_ext.utils.words import brief, counted

HEADER = ["column", "read as", "inputs", "values", "bad cells"]
METRICS = "for the metric"  # how a column was read that the metric is given, and the model is not
TELLING = 10  # rows from which on values of their own are worth a look
MOST = 30  # columns that are shown one by one; report.json has all


@dataclass(frozen=True)
class Column:
    """How one column of a table was read.

    Attributes:
        name: Its name.
        kind: ``"number"``, ``"category"``, ``"class"`` (the target), ``"for the metric"`` or
            ``"left out"``.
        inputs: How many inputs it became.
        values: How many different values it has.
        bad: How many cells hold no value of this kind: missing ones, or text among numbers.
        which: The first of these cells, with their rows.
        note: What else is worth a look; empty if nothing is.
    """

    name: str
    kind: str
    inputs: int = 0
    values: int = 0
    bad: int = 0
    which: list[str] = field(default_factory=list)
    note: str = ""

    @property
    def notable(self) -> bool:
        """Whether somebody should look at it."""
        return bool(self.bad or self.note)

    def __str__(self) -> str:
        """Say in a line how it was read, and what to look at."""
        said = f"column {brief(self.name)}: {self.kind}, {counted(self.values, 'value')}"
        if self.bad:
            said += f", {self.bad} without one ({self._which()})"
        return said + (f"; {self.note}" if self.note else "")

    def row(self) -> list[str]:
        """Return its row of the table under `HEADER`."""
        kind = self.kind + (f"; {self.note}" if self.note else "")
        bad = f"{self.bad}: {self._which()}" if self.bad else "0"
        return [brief(self.name), kind, str(self.inputs), str(self.values), bad]

    def _which(self) -> str:
        return ", ".join(self.which) + (", ..." if self.bad > len(self.which) else "")


@dataclass(frozen=True)
class Reading:
    """How a file was read.

    Attributes:
        found: What the file is written in, in words.
        columns: Its columns in order; none for a file without names.
        filled: How missing numbers were filled in; empty if none were.
    """

    found: str
    columns: list[Column] = field(default_factory=list)
    filled: str = ""

    @property
    def inputs(self) -> list[str]:
        """The column of each input."""
        return [column.name for column in self.columns for _ in range(column.inputs)]

    def lines(self) -> list[str]:
        """Say in a few lines what was found, with the columns that are worth a look."""
        kinds = [column.kind for column in self.columns]
        counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
        notable = [str(column) for column in self.columns if column.notable]
        more = [f"{len(notable) - MOST} more columns are worth a look; report.json has them"]
        return [
            f"read as {self.found}" + (f"; columns: {counts}" if counts else ""),
            *notable[:MOST],
            *(more if len(notable) > MOST else []),
            *([self.filled] if self.filled else []),
        ]

    def rows(self) -> list[list[str]]:
        """Return a table's rows under `HEADER`: of many columns those that are worth a look, then the first ones."""
        order = sorted(range(len(self.columns)), key=lambda i: (not self.columns[i].notable, i))
        shown = [self.columns[i].row() for i in sorted(order[:MOST])]
        left = len(self.columns) - len(shown)
        return [*shown, *([[f"and {counted(left, 'column')} like these", "", "", "", ""]] if left else [])]


def near_names(values: Iterable[str]) -> list[str]:
    """Say which values differ in nothing but case, spaces, Unicode's form or how a number is written, if any do."""
    seen: dict[str | float, str] = {}
    for value in values:
        number = plain_number(value)
        key = " ".join(unicodedata.normalize("NFKC", value).casefold().split()) if number is None else number
        other = seen.setdefault(key, value)
        if other != value:
            show = ascii if len({unicodedata.normalize("NFC", each) for each in (other, value)}) == 1 else brief
            return [f"{show(other)} and {show(value)} are two of them, write them alike if they are one"]
    return []


def warn_of_near_names(what: str, values: Iterable[str]) -> None:
    """Warn of values that differ only as `near_names` says."""
    for said in near_names(values):
        warnings.warn(f"of the {what} {said}", stacklevel=2)


def row_numbers(x: Tensor, first: int = 0) -> str:
    """Say which features ``n x d``, counted from ``first`` on, have another whole number in each row, if any do."""
    n = len(x)
    if n < TELLING or x.ndim != 2:
        return ""
    possible = ((x % 1 == 0).all(0) & (x.amax(0) - x.amin(0) >= n - 1)).nonzero().flatten().tolist()
    found = [place for place in possible if len(x[:, place].unique()) == n]
    if not found:
        return ""
    shown = ", ".join(str(place + first) for place in found[:MOST])
    return f"; {counted(len(found), 'feature')} with another whole number in each row, as of an id: {shown}"
