"""Parquet files: their cells as the text that a CSV file would have."""

from pathlib import Path
from typing import Any

from metricopt_ext.errors import DataError
from metricopt_ext.utils.words import brief

PARQUET = (".parquet", ".pq")


def parquet_cells(path: Path) -> list[tuple[int, list[str]]]:
    """Return the header, and the rows, each with its number from 1 on, the header's.

    Numbers keep all digits, what is null is empty, and what is true or false is a word.

    Args:
        path: The file.

    Raises:
        DataError: It is no such file, or has a column of lists, structures or bytes.
    """
    table = parquet_table(path)
    columns = [_column(path, name, table.column(i)) for i, name in enumerate(table.column_names)]
    rows = enumerate(zip(*columns, strict=True), start=2)
    return [(1, list(map(str, table.column_names))), *((number, list(row)) for number, row in rows)]


def parquet_table(path: Path) -> Any:
    """Return a file's table, as pyarrow has it.

    Args:
        path: The file.

    Raises:
        DataError: It is no such file.
    """
    import pyarrow.parquet

    try:
        return pyarrow.parquet.ParquetFile(path).read()
    except Exception as error:  # pyarrow's errors are of many types
        raise DataError(f"cannot read {path} as Parquet: {brief(error)}") from error


def _column(path: Path, name: str, column: Any) -> list[str]:
    import pyarrow.types

    kind = column.type.value_type if pyarrow.types.is_dictionary(column.type) else column.type
    if pyarrow.types.is_nested(kind) or pyarrow.types.is_binary(kind):
        raise DataError(f"{path}: column {name!r} is of {kind}; it must hold one number or text in each row")
    return ["" if value is None else _text(value) for value in column.to_pylist()]


def _text(value: Any) -> str:
    if isinstance(value, float):
        return "" if value != value else repr(int(value)) if value.is_integer() and abs(value) < 2**53 else repr(value)
    return str(value).strip()
