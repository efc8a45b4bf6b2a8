"""Text files: unpacked, decoded, and parted into rows of cells."""

import bz2
import csv
import gzip
import io
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from metricopt_ext.errors import DataError
from metricopt_ext.runtime.pace import followed
from metricopt_ext.utils.text import text_of
from metricopt_ext.utils.words import brief, counted

StrPath = str | os.PathLike[str]

DELIMITERS = (",", ";", "\t", "|")  # looked for without a delimiter


def content_of(path: Path) -> str:
    """A file's text, in UTF-8, unpacked if it is named ``.gz`` or ``.bz2``.

    Raises:
        DataError: It can't be read, or is no text.
    """
    openers: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open}
    try:
        with openers.get(path.suffix, open)(path, "rb") as file:
            text = text_of(file.read())
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise DataError(f"cannot read {path}: {brief(error)}") from error
    if "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + 1
        raise DataError(f"cannot read {path}: line {line} has a NUL character, as UTF-16 has; save it as UTF-8")
    return text


def rows_of_cells(path: StrPath, text: str, delimiter: str, target: str) -> tuple[list[tuple[int, list[str]]], str]:
    """The rows that are not blank, header first, each with its number and its cells stripped; and the delimiter."""
    found = [delimiter] if delimiter else [each for each in DELIMITERS if _divides(text, each, target)]
    if len(found) > 1:
        raise DataError(
            f"{path}: its cells may be parted by {' or '.join(map(repr, found))}; leave one alone of them in its header"
        )
    delimiter = found[0] if found else ","
    read: list[list[str]] = []
    try:
        read.extend(followed(_reader(text, delimiter), f"read {path}", text.count("\n") + 1))
    except csv.Error as error:
        raise DataError(
            f"cannot read row {len(read) + 1} of {path} as CSV: {brief(error)}; its cells were parted at {delimiter!r}."
            " Quotes around a cell must enclose all of it, and those inside must be doubled"
        ) from error
    stripped = ((number, [cell.strip() for cell in row]) for number, row in enumerate(read, start=1))
    rows = [(number, row) for number, row in stripped if row not in ([], [""])]
    if len(rows) < 2:
        raise DataError(f"{path} must hold a header and at least one row, got {counted(len(rows), 'row')}")
    width = len(rows[0][1])
    for number, row in rows:
        if len(row) != width:
            raise DataError(
                f"{path}: row {number} must have {width} cells like the header, got {len(row)}, parted by {delimiter!r}"
            )
    return rows, delimiter


def _reader(text: str, delimiter: str) -> Any:
    return csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, skipinitialspace=True, strict=True)


def _divides(text: str, delimiter: str, target: str) -> bool:
    """Whether a character gives the header several cells, one of them the target."""
    try:
        header: list[str] = next((row for row in _reader(text, delimiter) if row), [])
    except csv.Error:
        return False
    return len(header) > 1 and target in [cell.strip() for cell in header]
