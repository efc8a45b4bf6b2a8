"""Arrays from files of several kinds."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers.refusals import assert_refused, assert_warned
from metricopt_ext.data.arrays import Names, read_array
from metricopt_ext.errors import DataError

X = np.arange(12, dtype=np.float32).reshape(4, 3) / 7
Y = np.array([3, 1, 2**40, 1])


NAMES = np.array(["bee", "ant", "zebra", "ant"])


def write_npz(path: Path, x: np.ndarray, y: np.ndarray) -> None:
    np.savez(path, embeddings=x, labels=y)


def write_npz_compressed(path: Path, x: np.ndarray, y: np.ndarray) -> None:
    np.savez_compressed(path, embeddings=x, labels=y)


def write_pt(path: Path, x: np.ndarray, y: np.ndarray) -> None:
    labels = y.tolist() if y.dtype.kind == "U" else torch.from_numpy(y)
    torch.save({"embeddings": torch.from_numpy(x), "labels": labels}, path)


def table(path: Path, columns: dict[str, Any]) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.table(columns), path)


def write_lists(path: Path, x: np.ndarray, y: np.ndarray) -> None:
    table(path, {"embeddings": list(x), "labels": y.tolist()})


def write_fixed_lists(path: Path, x: np.ndarray, y: np.ndarray) -> None:
    arrow = pytest.importorskip("pyarrow")
    lists = arrow.FixedSizeListArray.from_arrays(arrow.array(x.ravel()), x.shape[1])
    table(path, {"embeddings": lists, "labels": arrow.array(y.tolist()).dictionary_encode()})


def write_columns(path: Path, x: np.ndarray, y: np.ndarray) -> None:
    columns = {f"dim_{i}": x[:, i] for i in (2, 0, 1)}
    table(path, {"row": np.arange(len(x)), **columns, "labels": y.tolist()})


WRITERS = {
    "a.npz": write_npz,
    "b.npz": write_npz_compressed,
    "a.pt": write_pt,
    "a.parquet": write_lists,
    "b.pq": write_fixed_lists,
    "c.parquet": write_columns,
}


@pytest.mark.parametrize("file", WRITERS)
@pytest.mark.parametrize("y", [Y, NAMES], ids=["numbers", "text"])
def test_both_lie_in_one_file(tmp_path: Path, file: str, y: np.ndarray) -> None:
    path = tmp_path / file
    WRITERS[file](path, X, y)
    assert np.array_equal(np.asarray(read_array(path, "embeddings")), X)
    assert np.asarray(read_array(path, "labels")).tolist() == y.tolist()


@pytest.mark.parametrize(
    ("file", "write", "names"),
    [
        ("a.npz", lambda path: np.savez(path, weights=X), ("embeddings", "weights")),
        ("a.npz", lambda path: np.savez(path, embeddings=np.array([{}], dtype=object)), ("Python",)),
        (
            "a.npy",
            lambda path: np.save(path, Y.astype(object)),
            ("Python", "labels.astype(str)"),
        ),
        ("a.npz", lambda path: path.write_bytes(b"PK\x03\x04 torn"), ("npz",)),
        ("a.pt", lambda path: torch.save([1, 2, 3], path), ("list", "dict")),
        ("a.pt", lambda path: torch.save({"embeddings": torch.eye(3).to_sparse()}, path), ("embeddings", "to_dense")),
        ("a.parquet", lambda path: table(path, {"embeddings": [[1.0], None]}), ("1", "2")),
        ("a.h5", lambda path: path.write_bytes(b"\x89HDF"), (".npz",)),
        (
            "a.parquet",
            lambda path: table(path, {"d0": [1.0], "d2": [1.0]}),
            ("embeddings", "'d0'", "'d2'"),
        ),
    ],
)
def test_what_can_t_be_read_is_named(
    tmp_path: Path, file: str, write: Callable[[Path], Any], names: tuple[str, ...]
) -> None:
    pytest.importorskip({"parquet": "pyarrow"}.get(file[2:], "numpy"))
    write(tmp_path / file)
    assert_refused(lambda: read_array(tmp_path / file, "embeddings"), DataError, *names)


@pytest.mark.parametrize("suffix", ["csv", "tsv"])
@pytest.mark.parametrize(
    ("labels", "expected"),
    [(["7", "-1", "7"], [7, -1, 7]), (["a", "b c", "a"], ["a", "b c", "a"]), (["1.0", "2", "3"], [1, 2, 3])],
)
def test_tables_of_embeddings(tmp_path: Path, suffix: str, labels: list[str], expected: list[Any]) -> None:
    numbers = np.random.default_rng(0).normal(size=(3, 12))
    order = [*range(3, 12), 0, 1, 2]  # columns may be in any order, and others beside them
    rows = [["file", *(f"f{j}" for j in order), "labels"]]
    rows += [[f"{i}.jpg", *(repr(float(numbers[i, j])) for j in order), labels[i]] for i in range(3)]
    between = "," if suffix == "csv" else "\t"
    (tmp_path / f"e.{suffix}").write_text("\n".join(map(between.join, rows)) + "\n")
    path = tmp_path / f"e.{suffix}"
    np.testing.assert_array_equal(read_array(path, "embeddings"), numbers)
    assert read_array(path, "labels").tolist() == expected


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        (["1290000000000000001", "-9"], [1290000000000000001, -9]),
        (["9223372036854775808", "9223372036854775809"], ["9223372036854775808", "9223372036854775809"]),
        (["9" * 5000, "01"], ["9" * 5000, "01"]),
    ],
)
def test_ids_of_many_digits_stay_apart(tmp_path: Path, labels: list[str], expected: list[Any]) -> None:
    (tmp_path / "a.csv").write_text("labels\n" + "\n".join(labels))
    assert read_array(tmp_path / "a.csv", "labels").tolist() == expected


@pytest.mark.parametrize("file", ["a.csv", "a.tsv"])
@pytest.mark.parametrize(
    ("labels", "expected", "near"),
    [
        (["01", "1", "001", "7"], ["01", "1", "001", "7"], "'01'"),
        (["1E5", "100000", "2"], ["1E5", "100000", "2"], "'1E5'"),
        (["1.0", "1", "2"], ["1.0", "1", "2"], "'1.0'"),
        (["007", "010"], ["007", "010"], ""),
        (["Cat", "cat"], ["Cat", "cat"], "'Cat'"),
        (["caf\u00e9", "cafe\u0301"], ["caf\u00e9", "cafe\u0301"], r"cafe\u0301"),
        (["1.000e+00", "2.000e+00"], [1, 2], ""),
    ],
)
@pytest.mark.parametrize("column", ["labels", "label"])
def test_codes_are_what_the_file_says(
    tmp_path: Path, file: str, labels: list[str], expected: list[Any], near: str, column: str
) -> None:
    (tmp_path / file).write_text("\n".join([column, *labels]))
    read = read_array(tmp_path / file, "labels")
    assert read.tolist() == expected
    if near:
        numbers = assert_warned(lambda: Names().numbered(read, tmp_path / file), near)
        assert numbers.tolist() == list(range(len(labels)))
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            Names().numbered(read, tmp_path / file)
