"""The text of files made here: its encoding, its rows and cells, as they are found or refused."""

import bz2
import gzip
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.csv_tables import reads, refused, rows_of
from helpers.refusals import assert_refused
from metricopt_ext.classification.tables import read_csv
from metricopt_ext.data.text_files import DELIMITERS
from metricopt_ext.errors import DataError

PLAIN = rows_of("name,a,y", ["Müller", *["Smith"] * 5], range(6))


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_a_table_in_utf8(tmp_path: Path, encoding: str) -> None:
    table = reads(tmp_path, PLAIN.encode(encoding))
    assert table.reading.found == "cells parted by ',', 6 rows"
    assert table.x.tolist() == [[float(i == 0), float(i > 0), i] for i in range(6)]


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


def test_quoted_cells_may_have_the_delimiter_and_line_ends(tmp_path: Path) -> None:
    table = reads(tmp_path, 'text,a,y\n"p,\n""q""",1,no\nr,2,yes\n')
    assert table.x.tolist() == [[1, 0, 1], [0, 1, 2]]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("y,a;y\n1,2;3\n", r"','.*leave one alone"),
        ("a,y\n1,no,\n", r"row 2 must have 2.*3, parted by ','"),
        ("a,y,\n1,no,\n", "column 3 of 3 has no name"),
        ("5.1,3.5,y\n4.9,3.0,y\n", r"first.*seems to be an example"),
        ("5.1,y\n4.9,y\n", r"first.*seems to be an example"),
        ("a,y\n1,0\n2,nan\n", r"'y'.*3; .* \(data\.categories=\[y\] if"),
        ("a,y\n1,1\n2,0\n3,1.0\n", r"one way.*'1'.*2 and '1.0' in row 4"),
        ("a,y\n1,no\n,\n", r"'y' must be given.*'' in row 3"),
        ('a,y\n1,no\n"2" ,yes\n', r"cannot.*3 of.*','..*enclose all of it"),
        ('a,y\n1,no\n"2,yes\n3,no\n', r"cannot.*those inside must be doubled"),
        ("sep=;\na;y\n1;no\n2;yes\n", r"take.*first row, which is for Excel"),
    ],
)
def test_layouts_that_are_not_guessed(tmp_path: Path, content: str, message: str) -> None:
    assert re.search(message, refused(tmp_path, content))
