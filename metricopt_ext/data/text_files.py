"""Text files: unzipped, decoded, and parted into rows of cells."""

import bz2
import codecs
import csv
import gzip
import io
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from metricopt_ext.errors import DataError
from metricopt_ext.utils.words import brief, counted

StrPath = str | os.PathLike[str]

# What begins a file that is no text, and what to do with it.
PACKED = {
    b"PK\x03\x04": "a zip file, as Excel's workbooks are: unpack it, or save the sheet as CSV",
    b"\xd0\xcf\x11\xe0": "an old workbook of Excel's: save the sheet as CSV",
    b"\x1f\x8b": "packed by gzip: give it a name that ends in .gz",
    b"BZh91AY&SY": "packed by bzip2: give it a name that ends in .bz2",
    b"\xfd7zXZ\0": "packed by xz: unpack it",
    b"\x28\xb5\x2f\xfd": "packed by Zstandard: unpack it",
    b"PAR1": "in Parquet's format: give it a name that ends in .parquet",
}

DELIMITERS = (",", ";", "\t", "|")  # looked for without a delimiter


def content_of(path: Path) -> bytes:
    """A file's content, of text, unpacked if it is named ``.gz`` or ``.bz2``."""
    openers: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open}
    try:
        with openers.get(path.suffix, open)(path, "rb") as file:
            text: bytes = file.read()
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"cannot read {path}: {brief(error)}") from error
    for mark, what in PACKED.items():
        if text.startswith(mark):
            raise DataError(f"{path} is {what}")
    return text


def decoded(path: StrPath, content: bytes, encoding: str) -> tuple[str, str]:
    """A file's text, and its encoding: the one that is given, or UTF-8, or UTF-16 by its mark."""
    found = encoding or "utf-8"
    if not encoding and content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        found = "utf-32" if content.startswith(codecs.BOM_UTF32_LE) else "utf-16"
    remedy = "save it as UTF-8, or set data.encoding to what it is, such as latin-1, cp1252 or utf-16"
    if found == "utf-32" and not encoding:
        raise DataError(f"{path}: row 1 begins with the mark of UTF-32; save it as UTF-8, or set data.encoding=utf-32")
    try:
        text = content.decode(found)
    except UnicodeDecodeError as error:
        row = _row_of(content[: error.start].decode(found, "replace"))
        raise DataError(
            f"{path}: row {row} is not {found.upper()} (byte 0x{content[error.start]:02x}); {remedy}"
        ) from error
    except (LookupError, UnicodeError, ValueError) as error:
        raise DataError(f"{path}: data.encoding={encoding!r} can't be used: {brief(error)}") from error
    if "\0" in text:
        raise DataError(
            f"{path}: row {_row_of(text[: text.index(chr(0))])} has a NUL character, as has UTF-16 without its mark;"
            " save it as UTF-8, or set data.encoding, such as utf-16-le"
        )
    if content.startswith(codecs.BOM_UTF8) and not codecs.lookup(found).name.startswith("utf-8"):
        raise DataError(
            f"{path} begins with the mark of UTF-8, so data.encoding={encoding!r} would misread it; leave the key out"
        )
    if text.startswith("\ufeff"):
        text, found = text[1:], f"{found} with its mark"
    return text, found


def _row_of(before: str) -> int:
    """The number of the row that goes on after so much of a text."""
    return sum(1 for _ in csv.reader(io.StringIO(before + "x", newline="")))


def rows_of_cells(path: StrPath, text: str, delimiter: str, target: str) -> tuple[list[tuple[int, list[str]]], str]:
    """The rows that are not blank, header first, each with its number and its cells stripped; and the delimiter."""
    delimiter = "\t" if delimiter == r"\t" else delimiter  # as it is typed in a shell
    if len(delimiter) > 1 or delimiter in ('"', "\r", "\n"):
        raise DataError(f"data.delimiter={delimiter!r} must be one character, or \\t for a tab")
    found = [delimiter] if delimiter else [each for each in DELIMITERS if _divides(text, each, target)]
    if len(found) > 1:
        raise DataError(
            f"{path}: its cells may be parted by {' or '.join(map(repr, found))}; say which by data.delimiter"
        )
    delimiter = found[0] if found else ","
    read: list[list[str]] = []
    try:
        read.extend(_reader(text, delimiter))
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
