"""Arrays from files: .npy, and those of a name from .npz, .safetensors, .pt, .parquet and .csv."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from metricopt_ext.data.numerals import CODE, MISSING, WHOLE, plain_number
from metricopt_ext.data.parquet import PARQUET, parquet_table
from metricopt_ext.data.reading import warn_of_near_names
from metricopt_ext.data.text_files import DELIMITERS, content_of, rows_of_cells
from metricopt_ext.errors import DataError
from metricopt_ext.utils.words import brief, shortened

TORCH = (".pt", ".pth")
TABLES = (".csv", ".tsv")
SUFFIXES = (".npy", ".npz", ".safetensors", *TORCH, *PARQUET, *TABLES)

NUMBERED = re.compile(r"(?P<name>.*?)(?P<number>[0-9]+)")  # a column of a table with one for each dimension


def holds_several(path: Path) -> bool:
    """Whether a file is of a kind that has several arrays, each by its name."""
    return path.suffix.lower() in SUFFIXES and path.suffix.lower() != ".npy"


def read_array(path: Path, name: str) -> Any:
    """Read an array from a file.

    A .npy file has one. In the others it is the one of this name. A .parquet file may have a column of lists, or one
    for each dimension, such as ``f0``, ``f1``, ...; a .csv file has the latter, named in its first row. In all of
    them labels may be text.

    Args:
        path: The file.
        name: ``"embeddings"``, ``"labels"`` (``"label"`` is one, too), or another name.

    Returns:
        An array or a tensor.

    Raises:
        DataError: The file is missing, of another kind, corrupt, or has no such array.
    """
    if not path.is_file():
        raise DataError(f"{path} does not exist")
    suffix = path.suffix.lower()
    readers: dict[str, Callable[[Path, str], Any]] = {
        ".npy": _npy,
        ".npz": _npz,
        ".safetensors": _safetensors,
        **dict.fromkeys(TORCH, _torch),
        **dict.fromkeys(PARQUET, _parquet),
        **dict.fromkeys(TABLES, _csv),
    }
    if suffix not in readers:
        raise DataError(f"{path} must be a {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]} file")
    try:
        return readers[suffix](path, name)
    except _AbsentError as error:
        if name != "labels" or "label" not in error.there:
            raise
    return readers[suffix](path, "label")


def array_names(path: Path) -> list[str]:
    """Return the names of the arrays of a file that has several; errors are those of `read_array`."""
    try:
        read_array(path, "")
    except _AbsentError as error:
        return error.there
    return []


class _AbsentError(DataError):
    """A file lacks an array.

    Attributes:
        there: The names of those that it has.
    """

    there: list[str]


class Names:
    """Numbers names in the order in which they first occur, over all files: the same name is the same number."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._numeric = ""  # a file whose labels are numbers

    @property
    def names(self) -> list[str] | None:
        """The names by their numbers; None if labels are numbers themselves."""
        return list(self._numbers) or None

    def numbered(self, labels: Any, path: Path) -> Any:
        """Return labels as they are if they are numbers, or the numbers of their names, ``n`` int64.

        Args:
            labels: ``n`` or ``n x 1``, numbers or text.
            path: Their file, for the message.

        Raises:
            DataError: They are text, and those of another file numbers, or the other way round.
        """
        if isinstance(labels, Tensor) or np.asarray(labels).dtype.kind not in "USO":
            if self._numbers:
                raise DataError(f"{path} has numbers as labels, but those of another file are text; write them alike")
            self._numeric = self._numeric or str(path)
            return labels
        if self._numeric:
            raise DataError(f"{path} has text as labels, but those of {self._numeric} are numbers; write them alike")
        named = np.asarray(labels)
        flat = [each.decode("utf-8", "replace") if isinstance(each, bytes) else each for each in named.ravel().tolist()]
        flat = [each.strip() if isinstance(each, str) else each for each in flat]  # as cells of a text file are
        wrong = next((each for each in flat if not isinstance(each, str)), None)
        if wrong is not None or "" in flat:
            raise DataError(f"{path} has the label {brief(wrong or '')}; each must be a number, or text")
        blank = next((each for each in flat if each.lower() in MISSING), None)
        others = {each for each in flat if each.lower() not in MISSING} if blank is not None else ()
        if others and all(plain_number(each) is not None for each in others):
            raise DataError(f"{path} has the label {brief(blank)} among numbers, as if it were missing; leave such out")
        numbers = [self._numbers.setdefault(each, len(self._numbers)) for each in flat]
        warn_of_near_names("labels", self._numbers)
        return np.array(numbers, dtype=np.int64).reshape(named.shape)


def _check_there(path: Path, name: str, there: Sequence[str], what: str = "array") -> None:
    """Reject a file that has no array of a name."""
    if name not in there:
        listed = ", ".join(map(repr, there)) if len(there) <= 20 else shortened(list(there))
        error = _AbsentError(f"{path} has no {what} {name!r}, only {listed}")
        error.there = list(there)
        raise error


def _npy(path: Path, name: str) -> Any:
    try:
        found = np.load(path, allow_pickle=False)  # a pickle would run code
        if not isinstance(found, np.ndarray):
            raise ValueError("it has several arrays, as .npz files have")
    except Exception as error:  # its header is parsed as Python, with errors of many types
        raise _unread(path, error) from error
    return found


def _npz(path: Path, name: str) -> Any:
    try:
        with np.load(path, allow_pickle=False) as file:
            _check_there(path, name, file.files)
            return file[name]
    except DataError:
        raise
    except Exception as error:
        raise _unread(path, error) from error


def _unread(path: Path, error: Exception) -> DataError:
    return DataError(
        f"{path} is not a {path.suffix} file of numbers and text ({brief(error)}); Python objects are not read, so save"
        " text as labels.astype(str)"
    )


def _safetensors(path: Path, name: str) -> Any:
    from safetensors import safe_open

    try:
        with safe_open(path, framework="pt") as file:
            _check_there(path, name, list(file.keys()), "tensor")
            return file.get_tensor(name)
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"{path} is truncated or not a safetensors file ({brief(error)})") from error


def _torch(path: Path, name: str) -> Any:
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise DataError(
            f"{path} can't be read without running code of its own ({brief(error)}); save a dict of tensors, and text"
            " as a list"
        ) from error
    if not isinstance(content, dict):
        raise DataError(f"{path} holds a {type(content).__name__}; it must be a dict of tensors, each by its name")
    _check_there(path, name, [each for each in content if isinstance(each, str)], "tensor")
    found = content[name]
    if isinstance(found, list) and found and all(isinstance(each, str) for each in found):
        found = np.array(found)
    elif not isinstance(found, Tensor):
        raise DataError(
            f"{path} has {name!r} of type {type(found).__name__}; it must be a tensor, or labels a list of text"
        )
    elif not is_dense(found):
        raise DataError(
            f"{path} has {name!r} as a tensor that is sparse, quantised or without data; save all its numbers, as of"
            " .to_dense() or .dequantize()"
        )
    return found


def is_dense(tensor: Tensor) -> bool:
    """Whether a tensor has each of its numbers: it is not sparse, quantised or on the device ``meta``."""
    return tensor.layout == torch.strided and not tensor.is_quantized and not tensor.is_meta


def _parquet(path: Path, name: str) -> Any:
    table = parquet_table(path)
    names = list(map(str, table.column_names))
    dimensions = _numbered_columns(names) if name == "embeddings" else []
    if dimensions and name not in names:
        found = np.column_stack([_column(path, table, each) for each in dimensions])
    else:
        _check_there(path, name, names, "column")
        found = _column(path, table, name)
    return found


def _csv(path: Path, name: str) -> Any:
    text = content_of(path)
    delimiter = (
        "\t" if path.suffix.lower() == ".tsv" else next((d for d in DELIMITERS if d in text.split("\n", 1)[0]), ",")
    )
    (_, header), *rows = rows_of_cells(path, text, delimiter, "")[0]
    if repeated := [each for each in header if header.count(each) > 1]:
        raise DataError(f"{path} has {brief(repeated[0])} twice in its first row, which must name each column")
    columns = dict(zip(header, zip(*(row for _, row in rows), strict=True), strict=True))
    lines = [line for line, _ in rows]
    dimensions = _numbered_columns(header) if name == "embeddings" else []
    if name == "embeddings" and not dimensions:
        raise DataError(
            f"{path} must name a column for each dimension by its number in the first row, f0, f1, ..., got"
            f" {brief(header)}; or save the embeddings as .npy"
        )
    if dimensions:
        found = np.column_stack([_numbers_in(path, each, columns[each], lines) for each in dimensions])
    else:
        _check_there(path, name, header, "column")
        found = _labels_in(columns[name])
    return found


def _numbers_in(path: Path, name: str, cells: Sequence[str], lines: Sequence[int]) -> Any:
    """A column of numbers, ``n`` float64."""
    for cell, line in zip(cells, lines, strict=True):
        if plain_number(cell) is None:
            decimal = cell.replace(",", ".")
            raise DataError(
                f"{path}: column {name!r} must be of numbers, as a dimension of the embeddings, got"
                f" {brief(cell)} in row {line}" + "; write decimals with a point" * (plain_number(decimal) is not None)
            )
    return np.array(cells, dtype=np.float64)


def _labels_in(cells: Sequence[str]) -> Any:
    """A column of whole numbers, ``n`` int64, of numbers, or else of text.

    Text are digits beyond int64, too, and codes such as 01 and 1E5: two of them that are one number are two labels.
    """
    numbers = {cell: plain_number(cell) for cell in cells}
    codes = any(map(CODE.fullmatch, numbers)) or len({*numbers.values()}) < len(numbers)
    if codes or None in numbers.values():
        return np.array(cells)
    if all(map(WHOLE.fullmatch, numbers)):
        short = all(len(cell) < 19 or (len(cell) <= 20 and abs(int(cell)) < 1 << 63) for cell in numbers)
        return np.array([int(cell) for cell in cells], dtype=np.int64) if short else np.array(cells)
    return np.array([numbers[cell] for cell in cells], dtype=np.float64)


def _column(path: Path, table: Any, name: str) -> Any:
    """A column of numbers or text, ``n``, or of lists of one length, ``n x d``."""
    import pyarrow.compute
    import pyarrow.types

    column = table.column(name).combine_chunks()
    if pyarrow.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if column.null_count:
        raise DataError(f"{path}: column {name!r} has no value in {column.null_count} of {len(column)} rows")
    if not hasattr(column, "values"):
        return np.array(column.to_numpy(zero_copy_only=False))  # a copy, as its own can't be written to
    values, lengths = column.flatten(), pyarrow.compute.list_value_length(column).unique().to_pylist()
    width = len(values) // max(1, len(column))
    if lengths != [width] or values.null_count or hasattr(values, "values"):
        raise DataError(f"{path}: column {name!r} must hold lists of numbers, all of one length")
    return np.array(values.to_numpy(zero_copy_only=False)).reshape(len(column), width)


def _numbered_columns(names: Sequence[str]) -> list[str]:
    """The columns of a table that are numbered from 0 or 1 on, in order; none unless they are of one name."""
    found = {each: match for each in names if (match := NUMBERED.fullmatch(each))}
    if len({match["name"] for match in found.values()}) != 1:
        return []
    order = sorted(found, key=lambda each: int(found[each]["number"]))
    numbers = [int(found[each]["number"]) for each in order]
    return order if numbers == list(range(numbers[0], numbers[0] + len(order))) and numbers[0] in (0, 1) else []
