"""Tables and LIBSVM files made here: what their cells mean, and what may mean another."""

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.refusals import assert_named, assert_refused
from metricopt_ext.classification.libsvm import load_a9a, load_libsvm, read_libsvm
from metricopt_ext.classification.tables import read_csv
from metricopt_ext.errors import DataError


@pytest.mark.parametrize("load", [load_libsvm, lambda path: read_csv(path, "y")])
def test_a_missing_file_names_the_path_and_the_key(tmp_path: Path, load: Any) -> None:
    assert_refused(lambda: load(tmp_path / "nowhere"), DataError, "nowhere", "data.root=DIR")


@pytest.mark.parametrize(
    ("rows", "names"),
    [
        ([f"p{i},{i % 2}" for i in range(101)], ("'a'", "101", "'p1'")),  # a text column of too many values
        ([f"{i % 2},{i}.5" for i in range(101)], ("'y'", "101")),  # a quantity as the target
        ([f"{10**18 + i},{i % 2}" for i in range(40)], ("'a'", 2)),  # more digits than float64 has
        ([f"1700000000.{i:09d},{i % 2}" for i in range(9)], ("'a'",)),
        (["1,1", "2,0", "3,1.0"], ("'y'", "'1.0'", 4)),  # one label in two ways
    ],
)
def test_columns_that_may_mean_another_are_refused(tmp_path: Path, rows: list[str], names: tuple[object, ...]) -> None:
    (tmp_path / "t.csv").write_text("\n".join(["a,y", *rows, ""]))
    assert_refused(lambda: read_csv(tmp_path / "t.csv", "y"), DataError, *names)


def test_columns_for_a_metric_are_no_inputs(tmp_path: Path) -> None:
    rows = [
        f"{i / 10},{'n' if i % 2 else ''},{9007199254740993 + i},{i}.5,00{i},{'yes' if i % 3 else 'no'}"
        for i in range(30)
    ]
    (path := tmp_path / "t.csv").write_text("\n".join(["size,region,id,share,code,y", *rows]))
    table = read_csv(path, "y", columns=["share", "region", "id", "code"], categories=["code"])
    assert table.x.shape == (30, 1)
    assert {name: values.dtype for name, values in table.columns.items()} == {
        "region": object,
        "id": np.int64,
        "share": np.float64,
        "code": object,
    }
    assert table.columns["region"].tolist() == ["", "n"] * 15
    assert table.columns["id"].tolist() == [9007199254740993 + i for i in range(30)]
    assert table.columns["share"].tolist() == [i + 0.5 for i in range(30)]
    assert table.columns["code"][7] == "007"
    kinds = {column.name: column.kind for column in table.reading.columns}
    assert [name for name, kind in kinds.items() if kind == "for the metric"] == ["region", "id", "share", "code"]


def test_a_number_for_a_metric_must_be_there(tmp_path: Path) -> None:
    rows = [f"{i},{i if i != 4 else '?'},{'ab'[i % 2]}" for i in range(20)]
    (path := tmp_path / "t.csv").write_text("\n".join(["size,weight,y", *rows]))
    for missing in (False, True):  # what fills in inputs does not fill in weights
        names = ("weight", "metric.columns", "'?'", "6")
        with pytest.raises(DataError) as caught:
            read_csv(path, "y", columns=["weight"], missing=missing)
        assert_named(caught, *names)
    texts = read_csv(path, "y", columns=["weight"], categories=["weight"]).columns["weight"]
    assert (texts[4], texts[5]) == ("?", "5")


def test_columns_of_labels_are_read_as_one_target(tmp_path: Path) -> None:
    content = "size,red,blue,round\n" + "\n".join(f"{i},{i % 2},{['no', 'Yes'][i % 3 > 0]},{i < 2}" for i in range(12))
    (tmp_path / "t.csv").write_text(content)
    table = read_csv(tmp_path / "t.csv", "", targets=["red", "round", "blue"])
    assert table.class_names == ("red", "round", "blue")
    assert table.x.shape == (12, 1)
    assert table.y.tolist() == [[i % 2, int(i < 2), int(i % 3 > 0)] for i in range(12)]
    assert [column.kind for column in table.reading.columns] == ["number", "class", "class", "class"]
    (tmp_path / "t.csv").write_text(content.replace("Yes", "maybe", 1))
    assert_refused(
        lambda: read_csv(tmp_path / "t.csv", "", targets=["red", "blue"]), DataError, "blue", "1", "0", "maybe", "3"
    )
    assert_refused(lambda: read_csv(tmp_path / "t.csv", "", targets=["red", "green"]), DataError, "green", "0")


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
    ("content", "x"),
    [
        ("1 0:5 2:6\n2 1:7\n", [[5, 0, 6], [0, 7, 0]]),
        ("1 1:5 2:6 # 3:9\n2\n", [[5, 6], [0, 0]]),
        ("1 qid:3 1:5\n2 qid:3 1:6\n", [[5], [6]]),
    ],
)
def test_libsvm_as_it_was_found(tmp_path: Path, content: str, x: list[list[float]]) -> None:
    (tmp_path / "l").write_text(content)
    assert read_libsvm(tmp_path / "l").x.tolist() == x
