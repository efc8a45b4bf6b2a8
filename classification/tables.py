"""Tables of text: CSV and Parquet files as labelled examples."""

import difflib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from metricopt_ext.classification.columns import MOST_VALUES, Columns, class_labels, too_many
from metricopt_ext.data.labelled import Table
from metricopt_ext.data.numerals import plain_number
from metricopt_ext.data.parquet import PARQUET, parquet_cells
from metricopt_ext.data.reading import Column, Reading
from metricopt_ext.data.text_files import DELIMITERS, content_of, rows_of_cells
from metricopt_ext.errors import DataError
from metricopt_ext.runtime.pace import followed
from metricopt_ext.utils.files import existing
from metricopt_ext.utils.words import brief, counted, override

StrPath = str | os.PathLike[str]
Array = npt.NDArray[Any]


def read_csv(
    path: StrPath | Sequence[StrPath],
    target: str,
    *,
    drop: Sequence[str] = (),
    categories: Sequence[str] = (),
    columns: Sequence[str] = (),
    targets: Sequence[str] = (),
    missing: bool = False,
) -> Table:
    """Read a table with a header row; numeric columns are kept, each other column becomes one 0/1 column per value.

    Its cells are parted by the one of `DELIMITERS` that gives the header the target and as many cells as each row;
    whitespace around them is ignored. A text column, like the target, has at most `MOST_VALUES` values.

    A column is numeric if at least 90% of its cells, but for those that mark a missing one (empty, ``?``, ``-``,
    ``NA``, ...), are numbers. One that is no plain number is refused: a percentage, a currency, a decimal comma.

    A file named ``.parquet`` is read as the text of its cells would be. Several files become one table: a column is
    then of one kind in all of them, and has the values of all.

    Args:
        path: The file, or several with the same columns, in any order.
        target: Name of the class column; classes are numbered in numeric or else alphabetical order, and a class named
            NA or none comes after numbers.
        drop: Names of columns to leave out.
        categories: Names of columns whose cells are values as they stand, numbers or not.
        columns: Names of columns that are no inputs, but are kept for a metric (`Split.columns`): as whole numbers,
            numbers or texts.
        targets: In place of ``target``, names of two columns or more, each a label that a row has or not: 1 or 0, yes
            or no, true or false. y is then ``n x k``, and the classes' names are those of the labels.
        missing: Whether missing numbers, and what is none in a numeric column, become NaN instead of an error.

    Returns:
        Numbers with all their digits, ``n x d``, NaN where missing, and classes named by their values.

    Raises:
        DataError: For a missing or malformed file, a name not in the header or a column without a name, a missing
            number or one that can't be read, a missing label, or a column with too many
            values.
    """
    files = [path] if isinstance(path, str | os.PathLike) else list(path)
    path = ", ".join(map(str, files))
    targets = list(targets) or [target]
    asked = [*targets[1:], *drop, *categories, *columns]
    header, rows, sizes, found = _joined(files, targets[0], asked)
    lines = [line for line, _ in rows]
    cells = list(zip(header, zip(*(row for _, row in rows), strict=True), strict=True))
    del rows
    named = dict(cells)
    labels: dict[str, Column] = {}
    names_of_classes: list[str] = []
    if len(targets) == 1:
        labels[target], names_of_classes = class_labels(
            path, target, named[target], lines, header, target in categories
        )
    read = Columns(path, lines, missing, sizes)
    y = np.zeros(0)
    if len(targets) > 1:
        y = np.stack([read.present(name, named[name]) for name in targets], 1)

    features: list[Array] = []
    said: list[Column] = []
    kept: dict[str, Array] = {}
    for name, column in followed(cells, f"look through the columns of {path}", len(cells)):
        if name in columns:
            kept[name], how = read.of_rows(name, column, name in categories)
            said.append(how)
            continue
        if name in targets or name in drop:
            how = labels.get(name, Column(name, "class" if name in targets else "left out", values=len(set(column))))
            said.append(how)
            continue
        values, how = read.column(name, column, name in categories)
        features.append(values)
        said.append(how)
    if not features:
        raise DataError(f"{path} must have a feature column besides the target {target!r}, got {header}")
    if len(names_of_classes) > MOST_VALUES:
        raise DataError(f"{path}: {too_many('target', target, names_of_classes)}; it must hold classes, not a quantity")
    if len(targets) == 1:
        places = {value: place for place, value in enumerate(names_of_classes)}
        y = np.array([places[cell] for cell in named[target]])
    # float32, at half the memory, where it holds all numbers
    with np.errstate(over="ignore"):
        exact = all(part.dtype == bool or np.array_equal(part.astype(np.float32), part) for part in features)
    kind: Any = np.float32 if exact else np.float64
    x = np.concatenate(features, axis=1, dtype=kind)
    found = f"{found}, {counted(len(lines), 'row')}"
    names = tuple(names_of_classes if len(targets) == 1 else targets)
    reading = Reading(found, said)
    named_rows = [f"row {line}" for line in lines]
    return Table(torch.from_numpy(x), torch.from_numpy(y), names, reading, tuple(sizes), columns=kept, names=named_rows)


def _joined(
    files: Sequence[StrPath], target: str, named: Sequence[str]
) -> tuple[list[str], list[tuple[int | str, list[str]]], list[int], str]:
    """The header, the rows of all files with their numbers, how many each file has, and what they are written in."""
    header: list[str] = []
    joined: list[tuple[int | str, list[str]]] = []
    sizes: list[int] = []
    found: list[str] = []
    for path in files:
        (_, own), *rows, how = _one_file(path, target)
        _check_header(path, own, target, named)
        header = header or own
        if sorted(own) != sorted(header) or (own != header and len({*own}) < len(own)):
            uneven = (name for name in [*own, *header] if own.count(name) != header.count(name))
            other = next(uneven, "")
            if not other:
                raise DataError(f"{path} has columns of one name in another order than {files[0]}; name each")
            lacking = files[0] if header.count(other) < own.count(other) else path
            raise DataError(f"{path} must have the columns of {files[0]}, but {lacking} lacks {brief(other)}")
        order = [*range(len(own))] if own == header else [own.index(name) for name in header]
        where = f" of {path}" if len(files) > 1 else ""
        joined += [(f"{number}{where}" if where else number, [row[i] for i in order]) for number, row in rows]
        sizes.append(len(rows))
        found.append(how)
    return header, joined, sizes, "; ".join(dict.fromkeys(found))


def _one_file(path: StrPath, target: str) -> tuple[Any, ...]:
    """The header and the rows of a file, each with its number; then what it is written in."""
    if Path(path).suffix.lower() in PARQUET:
        rows = parquet_cells(existing(path))
        if len(rows) < 2:
            raise DataError(f"{path} must hold at least one row, got none")
        return (*rows, "Parquet")
    lines, delimiter = rows_of_cells(path, content_of(existing(path)), "", target)
    return (*lines, f"cells parted by {delimiter!r}")


def _check_header(path: StrPath, header: list[str], target: str, named: Sequence[str]) -> None:
    for name in (target, *named):
        if header.count(name) == 1 or (name == "" and "" in header):
            continue
        near = ", ".join(
            map(brief, difflib.get_close_matches(name, [cell[:100] for cell in header[:1000]], cutoff=0.0))
        )
        why = f"{path} must have one column {name!r}, got {header.count(name)}; nearest among {len(header)}: {near}"
        if header[0].startswith("sep="):
            why += "; take away its first row, which is for Excel"
        elif len(header) == 1:
            why += f"; its cells must be parted by {' or '.join(map(repr, DELIMITERS))}"
        elif sum(plain_number(cell) is not None for cell in header) > len(header) / 2:
            why += "; its first row must name the columns"
        raise DataError(why)
    if "" in header and "" not in named:
        raise DataError(
            f"{path}: column {header.index('') + 1} of {len(header)} has no name, like one of row numbers; name it, or"
            f" leave out all that have none ({override('data.drop', '')})"
        )
