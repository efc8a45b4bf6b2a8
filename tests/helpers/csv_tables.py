"""Tables in CSV files, read or refused."""

from pathlib import Path
from typing import Any

import pytest

from metricopt_ext.classification.tables import read_csv
from metricopt_ext.data.labelled import Table
from metricopt_ext.errors import DataError


def rows_of(header: str, *columns: Any, delimiter: str = ",") -> str:
    """Return a table whose last column is of the classes no and yes, in turn."""
    lines = [
        delimiter.join([*map(str, row), "yes" if i % 2 else "no"]) for i, row in enumerate(zip(*columns, strict=True))
    ]
    return "\n".join([header, *lines, ""])


def reads(folder: Path, content: str | bytes, **options: Any) -> Table:
    """Return what is read of a file of this content, whose labels are in the column y."""
    path = folder / "t.csv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return read_csv(path, "y", **options)


def refused(folder: Path, content: str | bytes, **options: Any) -> str:
    """Return why a file of this content is refused."""
    with pytest.raises(DataError) as caught:
        reads(folder, content, **options)
    return str(caught.value)
