"""The text of files made here: its encoding, its rows and cells, as they are found or refused."""

import bz2
import gzip
import lzma
import os
import re
from pathlib import Path
from typing import Any

import pytest

from helpers.csv_tables import reads, refused, rows_of
from helpers.refusals import assert_refused
from metricopt_ext.classification.tables import load_csv
from metricopt_ext.data.text_files import DELIMITERS
from metricopt_ext.errors import DataError

PLAIN = rows_of("name,a,y", ["Müller", *["Smith"] * 5], range(6))


@pytest.mark.parametrize(
    ("encoding", "found"),
    [
        ("utf-8", "utf-8"),
        ("utf-8-sig", "utf-8 with its mark"),
        ("utf-16", "utf-16"),
    ],
)
def test_encodings_that_are_found(tmp_path: Path, encoding: str, found: str) -> None:
    table = reads(tmp_path, PLAIN.encode(encoding))
    assert table.reading.found == f"{found}, cells parted by ',', decimal point, 6 rows"
    assert table.x.tolist() == [[float(i == 0), float(i > 0), i] for i in range(6)]


def test_an_encoding_that_is_given(tmp_path: Path) -> None:
    for encoding in ("latin-1", "cp1252", "utf-16-le", "utf-16-be", "utf-32", "mac-roman"):
        assert reads(tmp_path, PLAIN.encode(encoding), encoding=encoding).x.shape == (6, 3)


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        (
            PLAIN.encode("latin-1"),
            {},
            r"row 2.*UTF-8.*set data.encoding to what",
        ),
        (b'"a\nb",y\n1,no\n2,\xff\n', {}, r"row 3 is not UTF-8 \(byte 0xff\)"),
        (PLAIN.encode("utf-16") + b"\x00", {}, r"row 8 is not UTF-16"),
        (PLAIN.encode(), {"encoding": "ascii"}, r"row 2 is not ASCII \(byte 0xc3\)"),
        ("a,y\n1,no\n2,yes\n".encode("utf-16-le"), {}, r"row 1.*UTF-16 .* data.encoding"),
        (b"a,y\n1,no\n2\x00,yes\n", {}, "row 3 has a NUL character"),
        (PLAIN.encode("utf-32"), {}, r"row 1.*UTF-32; .* data\.encoding=utf-32"),
        (b"PK\x03\x04\0\0", {}, "zip file, as Excel's workbooks are: unpack it, or save the sheet as CSV"),
        (gzip.compress(PLAIN.encode(), mtime=0), {}, "packed by gzip: give it a name that ends in .gz"),
        (bz2.compress(PLAIN.encode()), {}, "packed by bzip2: give it a name that ends in .bz2"),
        (lzma.compress(PLAIN.encode()), {"encoding": "latin-1"}, "packed by xz: unpack it"),
        (b"PAR1\x15", {}, "in Parquet's format: give it a name that ends in .parquet"),
        (PLAIN.encode(), {"encoding": "utf-9"}, r"data.encoding='utf-9'.*encoding: utf-9"),
    ],
)
def test_another_encoding_is_refused_by_its_row(
    tmp_path: Path, content: bytes, options: dict[str, Any], message: str
) -> None:
    assert re.search(message, refused(tmp_path, content, **options))


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
        ("y,a;y\n1,2;3\n", r"','.*say which by data.delimiter"),
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


def test_a_tab_may_be_written_as_in_a_shell(tmp_path: Path) -> None:
    assert reads(tmp_path, "a|b\ty\n1\tno\n2\tyes\n", delimiter=r"\t").x.tolist() == [[1], [2]]


def test_a_mark_of_utf8_goes_with_no_other_encoding(tmp_path: Path) -> None:
    content = "\ufeffä,y\n1,no\n2,yes\n".encode()
    assert "begins with the mark of UTF-8, so data.encoding='latin-1'" in refused(tmp_path, content, encoding="latin-1")
    for encoding in ("", "utf-8", "utf-8-sig"):
        assert reads(tmp_path, content, encoding=encoding).reading.columns[0].name == "ä"


@pytest.mark.parametrize("suffix", ["csv", "csv.gz", "csv.bz2"])
def test_a_pipe_is_refused_at_once(tmp_path: Path, suffix: str) -> None:
    os.mkfifo(tmp_path / f"t.{suffix}")
    assert_refused(lambda: load_csv(tmp_path / f"t.{suffix}", "y"), DataError)
