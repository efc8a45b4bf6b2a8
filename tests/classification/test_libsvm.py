"""LIBSVM files made here, as they are read or refused."""

import gzip
import re
from pathlib import Path

import pytest
import torch

from helpers.refusals import assert_refused
from metricopt_ext.classification.libsvm import load_a9a, load_libsvm, read_libsvm
from metricopt_ext.errors import DataError

LIBSVM = "-1 1:0.5 3:2\n+1 2:1\n-1\n"


def test_libsvm(tmp_path: Path) -> None:
    (tmp_path / "a").write_text(LIBSVM)
    with gzip.open(tmp_path / "b.gz", "wt") as file:
        file.write("+1 4:7\n")
    data = load_libsvm([tmp_path / "a", tmp_path / "b.gz"])
    assert data.x.tolist() == [[0.5, 0, 2, 0], [0, 1, 0, 0], [0, 0, 0, 0], [0, 0, 0, 7]]
    assert data.x.dtype == torch.float32
    assert data.y.tolist() == [0, 1, 0, 1]
    assert data.class_names == ("-1", "1")
    assert load_libsvm(tmp_path / "a", num_features=6).x.shape == (3, 6)


@pytest.mark.parametrize("content", ["1 1:0.5\n1 2:oops\n", "", "1 a b\n", "1 1:nan\n"])
def test_malformed_libsvm(tmp_path: Path, content: str) -> None:
    (tmp_path / "bad").write_text(content)
    assert_refused(lambda: load_libsvm(tmp_path / "bad"), DataError)


def test_truncated_gzip_and_too_many_features(tmp_path: Path) -> None:
    (tmp_path / "cut.gz").write_bytes(gzip.compress(LIBSVM.encode() * 99)[:40])
    assert_refused(lambda: load_libsvm(tmp_path / "cut.gz"), DataError, "cut.gz")
    (tmp_path / "a").write_text(LIBSVM)
    assert_refused(lambda: load_libsvm(tmp_path / "a", num_features=2), DataError)


def test_a9a_takes_either_form(tmp_path: Path) -> None:
    (tmp_path / "a9a").write_text("-1 3:1 14:1\n")
    assert_refused(lambda: load_a9a(tmp_path), DataError, "a9a.t", "data.root=DIR")
    (tmp_path / "a9a.t.gz").write_bytes(gzip.compress(b"+1 1:1\n"))
    data = load_a9a(str(tmp_path))
    assert data.x.shape == (2, 123)
    assert data.x.nonzero().tolist() == [[0, 2], [0, 13], [1, 0]]
    assert data.y.tolist() == [0, 1]


def test_libsvm_labels_keep_their_digits(tmp_path: Path) -> None:
    for labels, names in (
        (["1000001", "1000002"], ("1000001", "1000002")),
        (["+1", "-1"], ("-1", "1")),
        (["1e6", "0.5", "1.0"], ("0.5", "1", "1000000")),
        (["0.1234567891", "0.1234567892"], ("0.1234567891", "0.1234567892")),
    ):
        (tmp_path / "l").write_text("".join(f"{label} 1:1\n" for label in labels))
        assert load_libsvm(tmp_path / "l").class_names == names


@pytest.mark.parametrize(
    ("content", "x", "said"),
    [
        ("1 0:5 2:6\n2 1:7\n", [[5, 0, 6], [0, 7, 0]], r"2 examples.*3 features, indices from 0"),
        ("1 1:5 2:6 # 3:9\n2\n", [[5, 6], [0, 0]], r"2 examples.*2 features, indices from 1"),
        ("1 qid:3 1:5\n2 qid:3 1:6\n", [[5], [6]], r"query ids \(qid\) are left out"),
        ("1 1:1700000064\n2 1:1700000065\n", [[1700000064], [1700000065]], "1 feature,"),
        ("1\n2\n", [[0], [0]], "1 feature,"),
    ],
)
def test_libsvm_as_it_was_found(tmp_path: Path, content: str, x: list[list[float]], said: str) -> None:
    (tmp_path / "l").write_text(content)
    table = read_libsvm(tmp_path / "l")
    assert table.x.tolist() == x
    assert re.search(said, table.reading.found)


def test_a_mark_of_unicode_is_no_label(tmp_path: Path) -> None:
    (tmp_path / "l").write_text("1 1:5\n2 1:6\n", encoding="utf-8-sig")
    assert read_libsvm(tmp_path / "l").x.tolist() == [[5], [6]]


@pytest.mark.parametrize(
    ("content", "names"),
    [
        ("a,y\n1,2\n", ()),
        ("1 1:1\n2 2:1 1:1\n", ("LIBSVM",)),
        ("1 1:1\n" * 70 + "2 1:1 1:2\n" + "1 1:1\n" * 9, ("LIBSVM",)),
        ("1 1:1\n1,2 1:1\n", ("LIBSVM",)),
        ("nan 1:1\n2 1:1\n", ("labels", "2^53", "nan")),
        ("9007199254740993 1:1\n2 1:1\n", ("labels", "2^53", "9007199254740992")),
        (
            "".join(f"{i / 7} 1:1\n" for i in range(200)),
            ("200",),
        ),
        ("1 1:1e39\n2 1:1\n", ("3.4e38", "1e+39")),
    ],
)
def test_libsvm_that_is_refused(tmp_path: Path, content: str, names: tuple[str, ...]) -> None:
    (tmp_path / "l").write_text(content)
    assert_refused(lambda: read_libsvm(tmp_path / "l"), DataError, *names)


def test_labels_that_are_quantities_are_refused(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("".join(f"{i / 8} 1:{i}\n" for i in range(200)))
    assert_refused(lambda: read_libsvm(tmp_path / "data"), DataError, "200", "0.125")
