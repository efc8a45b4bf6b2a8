"""Tables and LIBSVM files made here: what their cells mean, and what may mean another."""

import csv
import gzip
import hashlib
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers.refusals import assert_named, assert_refused, assert_warned
from metricopt_ext.classification.arrays import labelled
from metricopt_ext.classification.config import ClassificationConfig
from metricopt_ext.classification.libsvm import load_a9a, load_libsvm, read_libsvm
from metricopt_ext.classification.splits import load_splits
from metricopt_ext.classification.tables import read_csv
from metricopt_ext.data.splits import Splits
from metricopt_ext.errors import DataError
from metricopt_ext.utils.config import load_config
from metricopt_ext.utils.words import override


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


Cells = Callable[[int], object]


def table_of(folder: Path, columns: dict[str, Cells], count: int = 60) -> list[str]:
    """Write a table of two classes, and return the settings that name it."""
    every = {**columns, "size": lambda i: i * 7919 % 1000 / 8, "y": columns.get("y", lambda i: "ab"[i % 2])}
    with (folder / "t.csv").open("w", newline="") as file:
        csv.writer(file).writerows([[*every], *([cell(i) for cell in every.values()] for i in range(count))])
    return ["model.name=tabular_mlp", "data.name=csv", f"data.root={folder / 't.csv'}", "data.target=y"]


def read(settings: list[str]) -> Splits:
    config = load_config(ClassificationConfig, None, settings)
    config.check()
    return load_splits(config, 0)


@pytest.mark.parametrize(
    "cell",
    [
        lambda i: i,
        lambda i: (i * 37) % 61 + 1000,
        lambda i: f"{i}.0",
        lambda i: i / 10,
        lambda i: 1700000000 + 3600 * i,
        lambda i: f"P{i:03}",
        lambda i: hashlib.md5(b"%d" % i).hexdigest(),
        lambda i: f"2024-{1 + i // 28:02}-{1 + i % 28:02}",
    ],
    ids=["numbers", "mixed", "floats", "steps", "times", "codes", "hashes", "dates"],
)
@pytest.mark.parametrize("name", ["id", "Unnamed: 0", "a, 'b' #1"])
def test_a_column_of_ids_is_named_with_advice_that_leaves_it_out(cell: Cells, name: str, tmp_path: Path) -> None:
    settings = [*table_of(tmp_path, {name: cell}), "data.standardise=true"]
    reading = read(settings).reading
    assert reading is not None
    (said,) = [line for line in reading.lines() if line.startswith(f"column {name!r}")]
    advice = override("data.drop", name)
    assert advice in said
    (argument,) = shlex.split(advice)
    left = read([*settings, argument]).reading
    assert left is not None
    assert left.inputs == ["size"]
    assert not [line for line in left.lines() if line.startswith("column")]


@pytest.mark.parametrize("cell", [lambda i: i * 7919 % 1000 / 8, lambda i: i * 7919 % 50, lambda i: "ab"[i % 2]])
def test_other_columns_are_read_without_a_word(cell: Cells, tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    reading = read(table_of(tmp_path, {"a": cell})).reading
    assert reading is not None
    assert not [line for line in reading.lines() if line.startswith("column")]
    assert not list(recwarn)


@pytest.mark.parametrize("cell", [lambda i: i, lambda i: f"{(i * 7) % 20}.0", lambda i: f"r{i}"])
def test_numbers_of_the_rows_of_each_file_are_named(cell: Cells, tmp_path: Path) -> None:
    paths = []
    for name in ("train", "val", "test"):
        (tmp_path / name).mkdir()
        table_of(tmp_path / name, {"id": cell, "of": lambda i, name=name: len(name) + i % 3}, 20)
        paths.append(f"data.{name}={tmp_path / name / 't.csv'}")
    reading = read(
        ["model.name=tabular_mlp", "data.name=csv", "data.target=y", *paths, "data.standardise=true"]
    ).reading
    assert reading is not None
    assert [line for line in reading.lines() if line.startswith("column 'id'") and "data.drop=[id]" in line]


REMEDIES: list[tuple[dict[str, Cells], int, str, tuple[object, ...]]] = [
    ({"": lambda i: i}, 60, "data.drop=['']", ("column 1 of 3",)),
    ({"size": lambda i: i, "": lambda i: "", "y": lambda i: "ab"[i % 2]}, 60, "data.drop=['']", ()),
    ({"x: 1": lambda i: "" if i == 5 else i}, 60, "data.drop=['x: 1']", ("''", "row 7")),
    ({"x": lambda i: "" if i == 5 else i % 7}, 60, "data.categories=[x]", ("''", "row 7")),
    ({"x": lambda i: f"{i % 9},5"}, 60, "data.categories=[x]", ("'0,5'", "row 2")),
    ({"x": lambda i: f"p{i}"}, 200, "data.drop=[x]", ("'x'", "200")),
    ({"x": lambda i: 10**18 + i}, 60, "data.drop=[x]", ("'x'",)),
    ({"y": lambda i: ["01", "1", "001"][i % 3]}, 60, "data.categories=[y]", ("'001'", "'01'")),
    ({"y": lambda i: ["1E5", "100000"][i % 2]}, 60, "data.categories=[y]", ("'1E5'", "'100000'")),
    ({"y": lambda i: ["1.0", "1", "0"][i % 3]}, 60, "data.categories=[y]", ("'1.0'", "'1'")),
    ({"y": lambda i: ["null", "1", "0"][i % 3]}, 60, "data.categories=[y]", ("'null'", "row 2")),
]


@pytest.mark.filterwarnings("ignore:of the classes")
@pytest.mark.parametrize(("columns", "count", "remedy", "names"), REMEDIES)
def test_what_a_refusal_advises_is_read(
    columns: dict[str, Cells], count: int, remedy: str, names: tuple[object, ...], tmp_path: Path
) -> None:
    settings = table_of(tmp_path, columns, count)
    assert_refused(lambda: read(settings), DataError, remedy, *names)
    splits = read([*settings, remedy])
    assert sum(map(len, (splits.train, splits.validation, splits.test))) == count
    assert splits.num_classes == len({columns["y"](i) for i in range(6)} if "y" in columns else "ab")


@pytest.mark.parametrize(
    ("cell", "shown"),
    [(lambda i: f"{i % 7:03}", "'000'"), (lambda i: f"{i % 7 + 1}E5", "'1E5'")],
    ids=["zeros", "exponents"],
)
def test_codes_that_are_read_as_numbers_are_named(cell: Cells, shown: str, tmp_path: Path) -> None:
    settings = table_of(tmp_path, {"code": cell})
    reading = read(settings).reading
    assert reading is not None
    assert [line for line in reading.lines() if shown in line and "data.categories=[code]" in line]
    kept = read([*settings, "data.categories=[code]"]).reading
    assert kept is not None
    assert kept.inputs.count("code") == 7


@pytest.mark.parametrize("labels", [("Yes", "yes"), ("True", "TRUE"), ("a b", "a\u00a0b"), ("caf\u00e9", "cafe\u0301")])
def test_labels_of_nearly_one_spelling_are_named(labels: tuple[str, str], tmp_path: Path) -> None:
    settings = table_of(tmp_path, {"y": lambda i: (*labels, "no")[i % 3]})
    assert_warned(lambda: read(settings), "classes")


@pytest.mark.parametrize("name", ["arrays", "libsvm"])
def test_a_feature_of_row_numbers_is_named(name: str, tmp_path: Path) -> None:
    x = np.column_stack([np.random.default_rng(0).normal(size=60), np.arange(60) + 1])
    np.savez(tmp_path / "arrays", x=x, y=np.arange(60) % 2)
    (tmp_path / "libsvm").write_text("\n".join(f"{i % 2} 1:{a} 2:{b}" for i, (a, b) in enumerate(x)))
    file = tmp_path / (f"{name}.npz" if name == "arrays" else name)
    reading = read(
        ["model.name=tabular_mlp", f"data.name={name}", f"data.root={file}", "data.standardise=true"]
    ).reading
    assert reading is not None
    assert "an id: " + {"arrays": "1", "libsvm": "2"}[name] in reading.found


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_all_columns_without_a_name_are_left_out_as_advised(delimiter: str, tmp_path: Path) -> None:
    rows = [["", "a", "y", "", ""], *([str(i), str(i * 7 % 20 / 8), "ab"[i % 2], "", ""] for i in range(40))]
    (tmp_path / "t.csv").write_text("\n".join(map(delimiter.join, rows)))
    settings = ["model.name=tabular_mlp", "data.name=csv", f"data.root={tmp_path / 't.csv'}", "data.target=y"]
    assert_refused(lambda: read(settings), DataError, "column 1 of 5", "data.drop=['']")
    reading = read([*settings, "data.drop=['']"]).reading
    assert reading is not None
    assert reading.inputs == ["a"]


@pytest.mark.parametrize("labels", [["1", 1, "2"], [True, "True", False], ["a", float("nan"), "b"]])
def test_labels_of_several_types_are_refused(labels: list[Any]) -> None:
    x = torch.zeros(30, 2)
    assert_refused(lambda: labelled("mine", x, np.array(labels * 10, dtype=object)), DataError, "mine", "str")


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
