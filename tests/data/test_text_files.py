"""The text of files: encodings, delimiters, numbers, and what is said of how it was read."""

import bz2
import gzip
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.csv_tables import reads, refused, rows_of
from helpers.refusals import assert_refused
from metricopt_ext.classification.tables import read_csv
from metricopt_ext.data.numerals import MISSING, number_in, plain_number, written_otherwise
from metricopt_ext.data.parquet import parquet_cells
from metricopt_ext.data.reading import Column
from metricopt_ext.data.text_files import DELIMITERS
from metricopt_ext.errors import DataError

PLAIN = rows_of("name,a,y", ["Müller", *["Smith"] * 5], range(6))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (PLAIN.encode("latin-1"), "line 2 is not UTF-8, by the byte 0xfc; save it as UTF-8"),
        (PLAIN.encode("utf-16"), "line 1 is not UTF-8"),
        ("a,y\n1,no\n2,yes\n".encode("utf-16-le"), "line 1 has a NUL character.*UTF-8"),
        (b"a,y\n1,no\n2\x00,yes\n", "line 3 has a NUL character"),
        (gzip.compress(PLAIN.encode(), mtime=0), "line 1 is not UTF-8"),
    ],
)
def test_another_encoding_is_refused_by_its_line(tmp_path: Path, content: bytes, message: str) -> None:
    assert re.search(message, refused(tmp_path, content))


@pytest.mark.parametrize(("suffix", "pack"), [(".gz", gzip.compress), (".bz2", bz2.compress)])
def test_a_packed_table_is_unpacked_by_its_name(tmp_path: Path, suffix: str, pack: Callable[[bytes], bytes]) -> None:
    path = tmp_path / f"t.csv{suffix}"
    path.write_bytes(pack(PLAIN.encode()))
    assert read_csv(path, "y").x.shape == (6, 3)
    path.write_bytes(path.read_bytes()[:-9])
    assert_refused(lambda: read_csv(path, "y"), DataError, path.name)


@pytest.mark.parametrize("delimiter", DELIMITERS)
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_the_delimiter_is_found_whatever_ends_a_line(tmp_path: Path, delimiter: str, end: str) -> None:
    content = rows_of(delimiter.join("aby"), range(4), range(4), delimiter=delimiter)
    table = reads(tmp_path, (content + "\n  \n\n").replace("\n", end))
    assert table.x.tolist() == [[i, i] for i in range(4)]
    assert f"cells parted by {delimiter!r}" in table.reading.found


@pytest.mark.parametrize(("cell", "number"), [("12", 12), ("-7.5", -7.5), ("+.5", 0.5), ("1e3", 1000), ("6.", 6)])
def test_a_plain_number_is_read(cell: str, number: float) -> None:
    assert plain_number(cell) == number_in(cell) == number
    assert not written_otherwise(cell)


@pytest.mark.parametrize(
    "cell",
    ["1,5", "1,234", "1.234,5", "1'234'567", "1\u00a0234", "\u22123", "12%", "-$7.5", "5 €", "(3)", "($1,234.5)"],
)
def test_another_notation_is_told_from_no_number(cell: str) -> None:
    assert number_in(cell) is None
    assert written_otherwise(cell)


@pytest.mark.parametrize(
    "cell", [*sorted(MISSING), "x", "1_0", "((3))", "1,23,4", "1 2", "1.2.3", "2020-01-02", "12:30", "A1"]
)
def test_words_and_marks_of_missing_numbers_are_none(cell: str) -> None:
    assert number_in(cell) is None
    assert not written_otherwise(cell)


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


def test_names_from_files_stay_on_their_line() -> None:
    assert str(Column("a\n\x1b[2J", "number", 1, 9)) == "column 'a\\n\\x1b[2J': number, 9 values"
