"""Parquet files as text."""

from pathlib import Path

import pytest

from helpers.refusals import assert_refused
from metricopt_ext.data.parquet import parquet_cells
from metricopt_ext.errors import DataError

arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")


def write(path: Path, **columns: list[object]) -> Path:
    parquet.write_table(arrow.table(columns), path)
    return path


def test_cells_are_those_of_a_csv_file(tmp_path: Path) -> None:
    file = write(tmp_path / "t.parquet", a=[1, None], b=[0.1, 3.0], c=["x ", None], d=[True, False])
    assert parquet_cells(file) == [
        (1, ["a", "b", "c", "d"]),
        (2, ["1", "0.1", "x", "True"]),
        (3, ["", "3", "", "False"]),
    ]


def test_what_is_no_cell_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path / "t.parquet", a=[[1.0], [2.0]])
    assert_refused(lambda: parquet_cells(file), DataError, "'a'")


def test_a_file_that_is_no_parquet_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t.parquet").write_bytes(b"PAR1 but no more")
    assert_refused(lambda: parquet_cells(tmp_path / "t.parquet"), DataError, "t.parquet", "Parquet")
