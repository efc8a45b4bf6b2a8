"""CSV files made here, as they are read or refused."""

from pathlib import Path
from typing import Any

import pytest

from helpers.csv_tables import rows_of
from helpers.refusals import assert_named, assert_refused
from metricopt_ext.classification.libsvm import load_libsvm
from metricopt_ext.classification.tables import read_csv
from metricopt_ext.data.precision import in_single_precision
from metricopt_ext.errors import DataError

CSV = "age, job,hours ,income\n30, clerk,40,>50K\n41,none,38.5, <=50K\n\n25, clerk, 1e1,<=50K\n"


def test_csv(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("\ufeff" + CSV, encoding="utf-8")
    data = read_csv(path, "income")
    assert data.x.tolist() == [[30, 1, 0, 40], [41, 0, 1, 38.5], [25, 1, 0, 10]]
    assert data.y.tolist() == [1, 0, 0]
    assert data.class_names == ("<=50K", ">50K")
    assert read_csv(path, "income", drop=["job", "age"]).x.tolist() == [[40], [38.5], [10]]


def test_marks_of_missing_numbers_are_values_of_a_text_column(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(",kind,y\n0,?,b\n1,none,b\n2,red,NA\n")
    data = read_csv(tmp_path / "t.csv", "y", drop=[""])
    assert data.x.tolist() == [[1, 0, 0], [0, 1, 0], [0, 0, 1]]
    assert data.class_names == ("NA", "b")


def test_words_alone_are_values(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("kind,y\nNA,none\n,NULL\nnone,NULL\n")
    data = read_csv(tmp_path / "t.csv", "y")
    assert data.x.tolist() == [[0, 1, 0], [1, 0, 0], [0, 0, 1]]
    assert data.class_names == ("NULL", "none")


def test_a_class_may_be_named_like_a_missing_number(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("a,y\n1,none\n2,10\n3,NA\n4,9\n")
    assert_refused(lambda: read_csv(tmp_path / "t.csv", "y"), DataError, "'none'")
    data = read_csv(tmp_path / "t.csv", "y", categories=["y"])
    assert data.class_names == ("9", "10", "NA", "none")
    assert data.y.tolist() == [3, 1, 2, 0]


def test_errors_of_wide_tables_are_short(tmp_path: Path) -> None:
    names = [f"feature_{i}" for i in range(55)]
    (tmp_path / "t.csv").write_text(",".join([*names, "target"]) + "\n" + ",".join(["1"] * 55 + ["a"]) + "\n")
    with pytest.raises(DataError) as caught:
        read_csv(tmp_path / "t.csv", "Target")
    assert_named(caught, "0", "56", "target")
    assert str(caught.value).count("feature_") == 2
    (tmp_path / "t.csv").write_text("text,y\n" + "".join(f"{i} {'word ' * 99},a\n" for i in range(101)))
    with pytest.raises(DataError) as caught:
        read_csv(tmp_path / "t.csv", "y")
    assert_named(caught, "101", "100")
    assert len(str(caught.value).replace(str(tmp_path), "")) < 250


def test_csv_orders_numeric_classes_by_number(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("x;y\n1;10\n2;-1\n3;9\n4;2\n5;10\n")
    data = read_csv(tmp_path / "t.csv", "y")
    assert data.class_names == ("-1", "2", "9", "10")
    assert data.y.tolist() == [3, 0, 2, 1, 3]


@pytest.mark.parametrize(
    ("content", "options", "names"),
    [
        (CSV, {"target": "incme"}, ("0", "4", "income")),
        (CSV, {"target": "income", "drop": ["jobs"]}, ("4", "job")),
        ("age:income\n1:no\n2:yes\n", {"target": "income"}, ("1", "age:income", "';'")),
        ("1,2,no\n3,4,yes\n", {"target": "y"}, ("'y'", "0")),
        (",a,y\n1,2,0\n2,3,1\n", {"target": "y"}, ("1", "3", "data.drop")),
        ("a,a,y\n1,2,3\n", {"target": "a"}, ("'a'", "2")),
        ("a,y\n1,0\n,1\n", {"target": "y"}, ("'a'", "''", "3")),
        ("a,y\n1,0\ninf,1\n", {"target": "y"}, ("'a'", "inf", "3")),
        ("a,y\n1,0\n?,1\n", {"target": "y"}, ("'a'", "data.drop")),
        ("a,y\n1,0\n2,1\nNA,1\n", {"target": "y"}, ("'a'", "'NA'", "4")),
        ('a,y\n"1,5",0\n2,1\n', {"target": "y"}, ("1,5", "'a'", "2")),
        ("a,y\n1,0\n2,\n", {"target": "y"}, ("'y'", "''", "3")),
        ("a,y\n1,no\n2,\n", {"target": "y"}, ("'y'", "''", "3")),
        ("a,y\n1,no\n2,?\n", {"target": "y"}, ("'y'", "'?'", "3")),
        ("a,y\n?,0\n,1\n", {"target": "y"}, ("'a'", "'?'", "2")),
        ("a,y\n1,0\n2\n", {"target": "y"}, ("3", "2")),
        ("y\n0\n1\n", {"target": "y"}, ()),
        ("a,y\n", {"target": "y"}, ()),
        ("a,y\n\n\n", {"target": "y"}, ()),
        (
            "a,y\n" + "".join(f"p{i},{i % 2}\n" for i in range(101)),
            {"target": "y"},
            ("text", "'a'", "101", "'p1'"),
        ),
        (
            "a,y\n" + "".join(f"{i % 2},{i}.5\n" for i in range(101)),
            {"target": "y"},
            ("target", "'y'", "101"),
        ),
        ('a,y\n"1,0\n', {"target": "y"}, ("CSV",)),
    ],
)
def test_bad_csv_is_named(tmp_path: Path, content: str, options: dict[str, Any], names: tuple[str, ...]) -> None:
    (tmp_path / "t.csv").write_text(content)
    assert_refused(lambda: read_csv(tmp_path / "t.csv", **options), DataError, *names)


@pytest.mark.parametrize("load", [load_libsvm, lambda path: read_csv(path, "y")])
def test_a_missing_file_names_the_path_and_the_key(tmp_path: Path, load: Any) -> None:
    assert_refused(lambda: load(tmp_path / "nowhere"), DataError, "nowhere", "data.root=DIR")


def test_float32_refuses_what_it_cannot_tell_apart(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(rows_of("ts,y", range(1_700_000_000, 1_700_000_400)))
    assert_refused(lambda: in_single_precision(read_csv(tmp_path / "t.csv", "y")), DataError, "'ts'")
