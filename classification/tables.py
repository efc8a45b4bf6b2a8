"""Tables of text: CSV and LIBSVM files as labelled examples."""

import bz2
import csv
import difflib
import gzip
import io
import os
import reprlib
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import torch

from metricopt_ext.data.labelled import MAX_BYTES, Labelled, check_bytes
from metricopt_ext.errors import DataError
from metricopt_ext.utils.files import existing, read_at_most
from metricopt_ext.utils.words import brief, counted

StrPath = str | os.PathLike[str]
Array = npt.NDArray[Any]

# Text may have max_bytes divided by this: while it is parsed, it takes up to 30 times its size.
TEXT_SHARE = 32

_BLANK = {"", "?"}  # how tables mark a missing value
_MISSING = {*_BLANK, "n/a", "na", "none", "null"}  # and a missing number, in lower case; float reads nan


def load_libsvm(
    paths: StrPath | Sequence[StrPath], num_features: int | None = None, *, max_bytes: int = MAX_BYTES
) -> Labelled:
    """Read files in LIBSVM (SVMlight) format, gzipped if named ``.gz``, and stack them.

    Args:
        paths: One file or several.
        num_features: Number of features d; by default the largest index found.
        max_bytes: Most bytes of the inputs in memory; of the text, unzipped, a 32nd part of it.

    Returns:
        Inputs ``n x d`` float32, and classes numbered in ascending order of their labels in the file (-1 before +1).

    Raises:
        DataError: For a file that is missing or malformed, or has more than d features, or more bytes than allowed.
    """
    from sklearn.datasets import load_svmlight_files

    files = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    named, left = ", ".join(map(str, files)), max_bytes // TEXT_SHARE
    texts = []
    for file in files:
        texts.append(_text(existing(file), left))
        left -= len(texts[-1])
    try:
        loaded = load_svmlight_files(list(map(io.BytesIO, texts)), n_features=num_features, dtype=np.float32)
    except Exception as error:  # it indexes and converts whatever it reads, with errors of many types
        raise DataError(f"cannot read {named} as LIBSVM data: {brief(error)}") from error
    del texts
    rows, features = sum(part.shape[0] for part in loaded[::2]), loaded[0].shape[1]
    check_bytes(f"{named}, of {rows} rows and {features} features,", 4 * rows * features, max_bytes)
    x = np.concatenate([part.toarray() for part in loaded[::2]])
    labels, y = np.unique(np.concatenate(loaded[1::2]), return_inverse=True)
    if len(y) == 0:
        raise DataError(f"{named} holds no examples")
    return Labelled(torch.from_numpy(x), torch.from_numpy(y), tuple(f"{label:g}" for label in labels))


def load_a9a(root: StrPath, *, max_bytes: int = MAX_BYTES) -> Labelled:
    """Read the two files of a9a (Adult), 48,842 rows of 123 features; class 1 earns more than 50,000.

    Args:
        root: Folder of ``a9a`` and ``a9a.t``, each gzipped (``.gz``) or not.
        max_bytes: As in `load_libsvm`.

    Raises:
        DataError: For a missing or malformed file.
    """
    files = [existing(Path(root, name), Path(root, f"{name}.gz")) for name in ("a9a", "a9a.t")]
    return load_libsvm(files, 123, max_bytes=max_bytes)


def load_csv(
    path: StrPath,
    target: str,
    *,
    drop: Sequence[str] = (),
    delimiter: str = ",",
    max_categories: int = 100,
    max_bytes: int = MAX_BYTES,
) -> Labelled:
    """Read a table with a header row; numeric columns are kept, each other column becomes one 0/1 column per value.

    Args:
        path: The file, in UTF-8.
        target: Name of the class column; classes are numbered in numeric or else alphabetical order, and a class named
            NA or none comes after numbers.
        drop: Names of columns to leave out.
        delimiter: Character between cells; whitespace around cells is ignored.
        max_categories: Maximum number of values in a text column, or of classes in the target.
        max_bytes: Most bytes of the inputs in memory; of the file a 32nd part of it.

    Returns:
        Inputs ``n x d`` float32, and classes named by their values.

    Raises:
        DataError: For a missing or malformed file, a name not in the header or a column without a name, a missing
            number (an empty cell, ``?``, ``NA``, ...), a decimal comma, an empty cell or ``?`` in the target, a
            column with too many values, or more bytes than allowed.
    """
    if len(delimiter) != 1:
        raise DataError(f"data.delimiter={delimiter!r} must be one character")
    rows = _table(path, delimiter, max_bytes // TEXT_SHARE)
    header = rows[0][1]
    _check_header(path, header, target, drop)
    lines = [line for line, _ in rows[1:]]
    columns = list(zip(header, zip(*(row for _, row in rows[1:]), strict=True), strict=True))

    features: list[Array] = []
    width = 0
    for name, column in columns:
        if name == target or name in drop:
            continue
        numbers = _numbers(column)
        if numbers is None:
            if _numbers([cell.replace(",", ".") for cell in column]) is not None:
                comma = next(cell for cell in column if "," in cell)
                raise DataError(f"{path}: numbers must have a decimal point, got {comma!r} in column {name!r}")
            values, codes = _coded(column)
            if len(values) > max_categories:
                raise DataError(
                    f"{path}: {_too_many('text column', name, values, max_categories)}; leave it out"
                    f" (data.drop=[{name}]) or raise data.max_categories"
                )
            width += len(values)
            check_bytes(
                f"{path}, of {len(codes)} rows and at least {width} features,", 4 * width * len(codes), max_bytes
            )
            features.append(codes[:, None] == np.arange(len(values)))
            continue
        invalid = np.flatnonzero(~np.isfinite(numbers))
        if len(invalid):
            at = int(invalid[0])
            raise DataError(
                f"{path}: column {name!r} must be a finite number in each row, got {column[at]!r} in row {lines[at]}; "
                f"fill it in, or leave out the row or the column (data.drop=[{name}])"
            )
        width += 1
        features.append(numbers[:, None].astype(np.float32))
    if not features:
        raise DataError(f"{path} must have a feature column besides the target {target!r}, got {header}")

    labels = dict(columns)[target]
    for line, label in zip(lines, labels, strict=True):
        if label in _BLANK:
            raise DataError(f"{path}: {target!r} must be given in each row, but is {label!r} in row {line}")
    classes, y = _coded(labels)
    if len(classes) > max_categories:
        raise DataError(
            f"{path}: {_too_many('target', target, classes, max_categories)}; it must hold classes, not a quantity"
            " (or raise data.max_categories)"
        )
    numbers = _numbers(classes)
    if numbers is not None:
        order = np.argsort(numbers, kind="stable")
        classes, y = [classes[i] for i in order], np.argsort(order)[y]
    x = np.concatenate(features, axis=1, dtype=np.float32)
    return Labelled(torch.from_numpy(x), torch.from_numpy(y), tuple(classes))


def _text(path: Path, most: int) -> bytes:
    """A file's content, unzipped if it is named ``.gz`` or ``.bz2``: at most so many bytes."""
    openers: dict[str, Callable[..., IO[bytes]]] = {".gz": gzip.open, ".bz2": bz2.open}  # type: ignore[dict-item]
    opener = openers.get(path.suffix, open)
    try:
        with opener(path, "rb") as file:
            text = read_at_most(file, most)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"cannot read {path}: {brief(error)}") from error
    if text is None:
        raise DataError(
            f"{path} has more than {most} bytes of text; all text may have max_bytes / {TEXT_SHARE}, so raise max_bytes"
            " if that is right"
        )
    return text


def _table(path: StrPath, delimiter: str, most: int) -> list[tuple[int, list[str]]]:
    """The rows that are not blank, header first, each with its number and its cells stripped."""
    try:
        lines = io.StringIO(_text(existing(path), most).decode("utf-8-sig"), newline="")
        read = list(csv.reader(lines, delimiter=delimiter, skipinitialspace=True, strict=True))
    except (csv.Error, UnicodeDecodeError) as error:
        raise DataError(f"cannot read {path} as CSV: {brief(error)}") from error
    rows = [(number, [cell.strip() for cell in row]) for number, row in enumerate(read, start=1) if row]
    if len(rows) < 2:
        raise DataError(f"{path} must hold a header and at least one row, got {counted(len(rows), 'row')}")
    width = len(rows[0][1])
    for number, row in rows:
        if len(row) != width:
            raise DataError(f"{path}: row {number} must have {width} cells like the header, got {len(row)}")
    return rows


def _check_header(path: StrPath, header: list[str], target: str, drop: Sequence[str]) -> None:
    for name in (target, *drop):
        if header.count(name) == 1:
            continue
        near = ", ".join(
            map(brief, difflib.get_close_matches(name, [cell[:100] for cell in header[:1000]], cutoff=0.0))
        )
        why = f"{path} must have one column {name!r}, got {header.count(name)}; nearest among {len(header)}: {near}"
        if len(header) == 1:
            why += "; is data.delimiter the character between its cells?"
        elif sum(_numbers([cell]) is not None for cell in header) > len(header) / 2:
            why += "; its first row must name the columns"
        raise DataError(why)
    if "" in header and "" not in drop:
        raise DataError(
            f"{path}: column {header.index('') + 1} of {len(header)} has no name, like one of row numbers; name it, or"
            """ leave it out ("data.drop=['']")"""
        )


def _numbers(column: Sequence[str]) -> Array | None:
    """The column as float64 with NaN for missing numbers; None if it holds text, or nothing but words such as none."""
    words = {cell.lower() for cell in column} - _BLANK
    if words and words <= _MISSING:
        return None
    try:
        return np.array(["nan" if cell.lower() in _MISSING else cell for cell in column], dtype=np.float64)
    except ValueError:
        return None


def _coded(column: Sequence[str]) -> tuple[list[str], Array]:
    """The distinct values in alphabetical order, and the place of each cell's. NumPy would make all as long as one."""
    values = sorted(set(column))
    places = {value: place for place, value in enumerate(values)}
    return values, np.array([places[cell] for cell in column])


def _too_many(what: str, name: str, values: Sequence[str], limit: int) -> str:
    shown = reprlib.repr(values[:3])
    return f"{what} {name!r} must have at most {limit} distinct values, got {len(values)} such as {shown}"
