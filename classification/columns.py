"""Columns of text as numbers, as categories, or as what a row is to be predicted as."""

import os
import reprlib
from collections import Counter
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import numpy as np
import numpy.typing as npt

from metricopt_ext.data.numerals import (
    BLANK,
    CODE,
    MISSING,
    WHOLE,
    in_one_go,
    number_in,
    plain_number,
    written_otherwise,
)
from metricopt_ext.data.reading import METRICS, TELLING, Column, near_names
from metricopt_ext.errors import DataError
from metricopt_ext.utils.words import brief, override

StrPath = str | os.PathLike[str]
Array = npt.NDArray[Any]

# A column is one of numbers if so large a share of its cells are numbers, of those that do not mark a missing one.
NUMERIC = 0.9
# how a column says whether a row has a label, in lower case
PRESENT = {"1": 1, "1.0": 1, "true": 1, "yes": 1, "y": 1, "0": 0, "0.0": 0, "false": 0, "no": 0, "n": 0}
MOST_VALUES = 100  # of a text column, each one input, and classes of the target
_SHOWN = 3  # bad cells of a column that are named


def _check_names(path: StrPath, header: Sequence[str], target: str, labels: Sequence[str]) -> None:
    """Reject a header that is an example: nothing but numbers beside the target, which is a label or not in order."""
    numbers = [plain_number(cell) for cell in header if cell != target]
    if None in numbers:
        return
    order = np.diff([number for number in numbers if number is not None])
    if target in labels or not ((order > 0).all() or (order < 0).all()):
        raise DataError(
            f"{path}: its first row must name the columns, but seems to be an example: {brief(list(header))}"
        )


def class_labels(
    path: StrPath,
    target: str,
    column: Sequence[str],
    lines: Sequence[int | str],
    header: Sequence[str],
    as_they_are: bool,
) -> tuple[Column, list[str]]:
    """How the target was read, and the classes in numeric or else alphabetical order."""
    classes = sorted(set(column))
    rows: dict[str, int | str] = {}
    for line, label in zip(lines, column, strict=True):
        rows.setdefault(label, line)
    numbers = {label: value for label in classes if (value := plain_number(label)) is not None}
    words = [label for label in classes if label.lower() in MISSING]
    # Among numbers a word like NA is a missing one; among words it may be a class like none.
    numeric = bool(numbers) and len(numbers) + len(words) == len(classes) and not as_they_are
    for label in sorted(words, key=column.index):
        if label in BLANK or numeric:
            raise DataError(
                f"{path}: {target!r} must be given in each row, but is {label!r} in row {rows[label]}; fill it in, or"
                " leave out the row"
                + ("" if label in BLANK else f" ({override('data.categories', target)} if it is the name of a class)")
            )
    alike: dict[Decimal, str] = {}
    for label in numbers if not as_they_are else ():
        if (other := alike.setdefault(Decimal(label), label)) != label:
            raise DataError(
                f"{path}: {target!r} must have one way to write a label, got {other!r} in row {rows[other]} and"
                f" {label!r} in row {rows[label]}; write them alike, or {override('data.categories', target)} takes"
                " them as they are"
            )
    _check_names(path, header, target, classes)
    if len(numbers) + len(words) == len(classes) and numbers:
        classes.sort(key=lambda label: numbers.get(label, np.inf))  # stable: words stay in order
    notes = [f"one is {words[0]!r}, as in row {rows[words[0]]}, like a missing one"] if words else []
    return Column(target, "class", values=len(classes), note="; ".join(notes)), classes


class Columns:
    """Reads the columns of a table: as numbers, or as categories."""

    def __init__(self, path: StrPath, lines: Sequence[int | str], missing: bool, sizes: Sequence[int]) -> None:
        self._path, self._lines, self._missing, self._ends = path, lines, missing, np.cumsum(sizes)[:-1]

    def column(self, name: str, column: Sequence[str], as_they_are: bool) -> tuple[Array, Column]:
        """Return a column's inputs, ``n x inputs`` float64 or bool, and how it was read."""
        if as_they_are:
            return self._categories(name, column, "")
        if (plain := in_one_go(column)) is not None:
            return self._numbers(name, column, plain, [])
        cells = {cell: number_in(cell) for cell in set(column) if cell.lower() not in MISSING}
        given = [cell for cell in column if cell in cells]
        found = [cell for cell in given if cells[cell] is not None or written_otherwise(cell)]
        if given and len(found) < NUMERIC * len(given):
            return self._categories(name, column, self._mixed(column, given, found))
        if not given and set(column) - BLANK:  # nothing but words such as none
            return self._categories(name, column, "")
        self._check_notation(name, column)
        numbers = {cell: number for cell, number in cells.items() if number is not None}
        bad = [i for i, cell in enumerate(column) if cell not in numbers]
        values = np.array([numbers.get(cell, np.nan) for cell in column])
        return self._numbers(name, column, values, bad)

    def of_rows(self, name: str, column: Sequence[str], as_they_are: bool) -> tuple[Array, Column]:
        """Return what a column says of each row for a metric, ``n``, which is no input, and how it was read.

        It is one of numbers by the rule for inputs, int64 if all are whole, and else one of texts, which may be empty.
        """
        cells = {} if as_they_are else {cell: number_in(cell) for cell in set(column) - BLANK}
        given = [cell for cell in column if cell in cells and cell.lower() not in MISSING]
        found = [cell for cell in given if cells[cell] is not None or written_otherwise(cell)]
        if len(found) < NUMERIC * len(given) or not given:
            empty = [i for i, cell in enumerate(column) if not cell or (cell in BLANK and not as_they_are)]
            how = Column(name, METRICS, 0, len(set(column)), len(empty), [self._at(column, i) for i in empty[:_SHOWN]])
            return np.array(column, dtype=object), how
        self._check_notation(name, column)
        numbers = {cell: number for cell, number in cells.items() if number is not None}
        for i, cell in enumerate(column):
            if not np.isfinite(numbers.get(cell, np.nan)):
                raise DataError(
                    f"{self._path}: column {name!r} of metric.columns or metric.by must be a finite number in"
                    f" each row, got {self._at(column, i)}; fill it in, or leave out the row, or take all its cells as"
                    f" texts ({override('data.categories', name)})"
                )
        if all(WHOLE.fullmatch(cell) for cell in numbers):
            whole = np.array([int(cell) for cell in column])  # all digits, as ids may have many
            values = whole if whole.dtype == np.int64 else np.array(column, dtype=object)
        else:
            values = np.array([numbers[cell] for cell in column])
        return values, Column(name, METRICS, 0, len(np.unique(values)))

    def present(self, name: str, column: Sequence[str]) -> Array:
        """Return in which rows a label is, ``n`` int64 of 0 and 1."""
        for i, cell in enumerate(column):
            if cell.casefold() not in PRESENT:
                raise DataError(
                    f"{self._path}: {name!r} of data.targets must be 1 or 0 in each row, yes or no, true or false,"
                    f" got {self._at(column, i)}; give each label a column of its own"
                )
        return np.array([PRESENT[cell.casefold()] for cell in column])

    def _numbers(self, name: str, column: Sequence[str], values: Array, bad: Sequence[int]) -> tuple[Array, Column]:
        which = [self._at(column, i) for i in bad[:_SHOWN]]
        infinite = np.flatnonzero(np.isinf(values))
        if len(infinite) or (bad and not self._missing):
            at = self._at(column, int(infinite[0]) if len(infinite) else bad[0])
            filled = "" if len(infinite) else ", or set data.missing to mean, median or indicator"
            also = f"; {len(values) - len(bad)} of its {len(values)} cells are numbers" if bad else ""
            raise DataError(
                f"{self._path}: column {name!r} must be a finite number in each row, got {at}; fill it in, or"
                f" leave out the row or the column ({override('data.drop', name)}){filled}, or take all its cells as"
                f" categories ({override('data.categories', name)}){also}"
            )
        different = len(np.unique(values[~np.isnan(values)]))
        self._check_digits(name, column, values)
        notes = []
        code = next((i for i, cell in enumerate(column) if CODE.fullmatch(cell)), None)
        if code is not None:
            notes.append(
                f"some are written like codes ({self._at(column, code)}); if they are,"
                f" {override('data.categories', name)} takes them as they are"
            )
        if different < 2 and not bad:
            notes.append("the same in each row")
        if self._own(values) and ((values % 1 == 0).all() or all(map(_even, np.split(values, self._ends)))):
            notes.append(f"another number in each row, as of an id; {override('data.drop', name)} leaves it out")
        return values[:, None], Column(name, "number", 1, different, len(bad), which, "; ".join(notes))

    def _categories(self, name: str, column: Sequence[str], note: str) -> tuple[Array, Column]:
        values, codes = _coded(column)
        if len(values) > MOST_VALUES:
            raise DataError(
                f"{self._path}: {too_many('text column', name, values)}; leave it out ({override('data.drop', name)})"
                + (f" ({note})" if note else "")
            )
        empty = [i for i, cell in enumerate(column) if cell.lower() in MISSING]
        notes = [note] if note else []
        single = sum(count == 1 for count in Counter(column).values())
        own = self._own(codes)
        if own or (single > len(column) / 2 and len(column) >= TELLING):
            said = "another value in each row" if own else f"{single} of {len(column)} rows have a value of their own"
            notes.append(f"{said}, as of an id; {override('data.drop', name)} leaves it out")
        notes += near_names(values)
        how = Column(
            name,
            "category",
            len(values),
            len(values),
            len(empty),
            [self._at(column, i) for i in empty[:_SHOWN]],
            "; ".join([*(["these are categories too"] if empty else []), *notes]),
        )
        return codes[:, None] == np.arange(len(values)), how

    def _own(self, values: Array) -> bool:
        """Whether each row of a file has a value of its own."""
        files = np.split(values, self._ends)
        return len(values) >= TELLING * len(files) and all(len(np.unique(each)) == len(each) for each in files)

    def _check_notation(self, name: str, column: Sequence[str]) -> None:
        """Reject numbers in a notation that is not read: nothing fills these in."""
        at = next((i for i, cell in enumerate(column) if written_otherwise(cell)), None)
        if at is not None:
            raise DataError(
                f"{self._path}: column {name!r} must have plain numbers with a decimal point, such as -1234.5, got"
                f" {self._at(column, at)}; write them so, or {override('data.categories', name)} takes all its cells as"
                " categories"
            )

    def _check_digits(self, name: str, column: Sequence[str], values: Array) -> None:
        """Reject numbers, such as ids, that float64 does not tell apart."""
        long = [i for i, cell in enumerate(column) if len(cell) > 15 and not np.isnan(values[i])]
        exact = {Decimal(column[i]) for i in long}
        if len(set(map(float, exact))) < NUMERIC * len(exact):
            at = long[0]
            raise DataError(
                f"{self._path}: column {name!r} has numbers of more digits than float64 tells apart, got"
                f" {self._at(column, at)}; leave it out ({override('data.drop', name)}) or shorten them"
            )

    def _mixed(self, column: Sequence[str], given: Sequence[str], found: Sequence[str]) -> str:
        """Say that a column of categories has numbers too."""
        if not found:
            return ""
        numbers = set(found)
        text = next(i for i, cell in enumerate(column) if cell not in numbers)
        return f"{len(found)} of {len(given)} cells are numbers, others not ({self._at(column, text)})"

    def _at(self, column: Sequence[str], place: int) -> str:
        return f"{brief(column[place])} in row {self._lines[place]}"


def _even(values: Array) -> bool:
    """Whether numbers rise or fall by one step, as those of rows do."""
    steps = np.diff(values)
    return np.allclose(steps, steps[0], rtol=1e-6, atol=0)


def _coded(column: Sequence[str]) -> tuple[list[str], Array]:
    """The distinct values in alphabetical order, and the place of each cell's. NumPy would make all as long as one."""
    values = sorted(set(column))
    places = {value: place for place, value in enumerate(values)}
    return values, np.array([places[cell] for cell in column])


def too_many(what: str, name: str, values: Sequence[str]) -> str:
    """Say that a column has more values than it may have."""
    shown = reprlib.repr(values[:3])
    return f"{what} {name!r} must have at most {MOST_VALUES} distinct values, got {len(values)} such as {shown}"
