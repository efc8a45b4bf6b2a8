"""CSV and LIBSVM files made here, as they are read or refused."""

import gzip
from pathlib import Path
from typing import Any

import pytest
import torch

from metricopt_ext.classification.tables import load_a9a, load_csv, load_libsvm
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
    with pytest.raises(DataError, match=r"bad|finite"):
        load_libsvm(tmp_path / "bad")


def test_truncated_gzip_and_too_many_features(tmp_path: Path) -> None:
    (tmp_path / "cut.gz").write_bytes(gzip.compress(LIBSVM.encode() * 99)[:40])
    with pytest.raises(DataError, match=r"cut\.gz"):
        load_libsvm(tmp_path / "cut.gz")
    (tmp_path / "a").write_text(LIBSVM)
    with pytest.raises(DataError, match="features"):
        load_libsvm(tmp_path / "a", num_features=2)


def test_a9a_takes_either_form(tmp_path: Path) -> None:
    (tmp_path / "a9a").write_text("-1 3:1 14:1\n")
    with pytest.raises(DataError, match=r"a9a\.t or .*a9a\.t\.gz not found; set data\.root=DIR"):
        load_a9a(tmp_path)
    (tmp_path / "a9a.t.gz").write_bytes(gzip.compress(b"+1 1:1\n"))
    data = load_a9a(str(tmp_path))
    assert data.x.shape == (2, 123)
    assert data.x.nonzero().tolist() == [[0, 2], [0, 13], [1, 0]]
    assert data.y.tolist() == [0, 1]


CSV = "age, job,hours ,income\n30, clerk,40,>50K\n41,none,38.5, <=50K\n\n25, clerk, 1e1,<=50K\n"


def test_csv(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("\ufeff" + CSV, encoding="utf-8")
    data = load_csv(path, "income")
    assert data.x.tolist() == [[30, 1, 0, 40], [41, 0, 1, 38.5], [25, 1, 0, 10]]
    assert data.y.tolist() == [1, 0, 0]
    assert data.class_names == ("<=50K", ">50K")
    assert load_csv(path, "income", drop=["job", "age"]).x.tolist() == [[40], [38.5], [10]]


def test_marks_of_missing_numbers_are_values_of_a_text_column(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(",kind,y\n0,?,b\n1,none,b\n2,red,NA\n")
    data = load_csv(tmp_path / "t.csv", "y", drop=[""])
    assert data.x.tolist() == [[1, 0, 0], [0, 1, 0], [0, 0, 1]]
    assert data.class_names == ("NA", "b")


def test_words_alone_are_values(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("kind,y\nNA,none\n,NULL\nnone,NULL\n")
    data = load_csv(tmp_path / "t.csv", "y")
    assert data.x.tolist() == [[0, 1, 0], [1, 0, 0], [0, 0, 1]]
    assert data.class_names == ("NULL", "none")


def test_a_class_may_be_named_like_a_missing_number(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("a,y\n1,none\n2,10\n3,NA\n4,9\n")
    data = load_csv(tmp_path / "t.csv", "y")
    assert data.class_names == ("9", "10", "NA", "none")
    assert data.y.tolist() == [3, 1, 2, 0]


def test_errors_of_wide_tables_are_short(tmp_path: Path) -> None:
    names = [f"feature_{i}" for i in range(55)]
    (tmp_path / "t.csv").write_text(",".join([*names, "target"]) + "\n" + ",".join(["1"] * 55 + ["a"]) + "\n")
    with pytest.raises(DataError, match=r"'Target', got 0; nearest among 56: 'target', ") as caught:
        load_csv(tmp_path / "t.csv", "Target")
    assert str(caught.value).count("feature_") == 2
    (tmp_path / "t.csv").write_text("text,y\n" + "".join(f"{i} {'word ' * 99},a\n" for i in range(9)))
    with pytest.raises(DataError, match="got 9 such as") as caught:
        load_csv(tmp_path / "t.csv", "y", max_categories=8)
    assert len(str(caught.value).replace(str(tmp_path), "")) < 250


def test_csv_orders_numeric_classes_by_number(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("x;y\n1;10\n2;-1\n3;9\n4;2\n5;10\n")
    data = load_csv(tmp_path / "t.csv", "y", delimiter=";")
    assert data.class_names == ("-1", "2", "9", "10")
    assert data.y.tolist() == [3, 0, 2, 1, 3]


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        (CSV, {"target": "incme"}, "'incme', got 0; nearest among 4: 'income', "),
        (CSV, {"target": "income", "drop": ["jobs"]}, "nearest among 4: 'job', "),
        (CSV, {"target": "income", "delimiter": ";"}, r"among 1: 'age, job,hours ,income'; is data\.delimiter the"),
        ("1,2,no\n3,4,yes\n", {"target": "y"}, "'y', got 0; .*; its first row must name the columns"),
        (",a,y\n1,2,0\n2,3,1\n", {"target": "y"}, r"""column 1 of 3 has no name, .* \("data\.drop=\[''\]"\)"""),
        (CSV, {"target": "income", "delimiter": "||"}, r"data\.delimiter='\|\|' must be one character"),
        ("a,a,y\n1,2,3\n", {"target": "a"}, "one column 'a', got 2"),
        ("a,y\n1,0\n,1\n", {"target": "y"}, "'a' .* got '' in row 3"),
        ("a,y\n1,0\ninf,1\n", {"target": "y"}, "'a' .* got 'inf' in row 3"),
        ("a,y\n1,0\n?,1\n", {"target": "y"}, r"'a' .* got '\?' in row 3; fill it in, or .* \(data\.drop=\[a\]\)"),
        ("a,y\n1,0\n2,1\nNA,1\n", {"target": "y"}, "'a' .* got 'NA' in row 4"),
        ('a,y\n"1,5",0\n2,1\n', {"target": "y"}, "numbers must have a decimal point, got '1,5' in column 'a'"),
        ("a,y\n1,0\n2,\n", {"target": "y"}, "'y' must be given in each row, but is '' in row 3"),
        ("a,y\n1,no\n2,\n", {"target": "y"}, "'y' must be given in each row, but is '' in row 3"),
        ("a,y\n1,no\n2,?\n", {"target": "y"}, r"'y' must be given in each row, but is '\?' in row 3"),
        ("a,y\n?,0\n,1\n", {"target": "y"}, r"'a' .* got '\?' in row 2"),
        ("a,y\n1,0\n2\n", {"target": "y"}, "row 3 must have 2 cells"),
        ("y\n0\n1\n", {"target": "y"}, "feature column"),
        ("a,y\n", {"target": "y"}, "at least one row"),
        ("a,y\n\n\n", {"target": "y"}, "at least one row"),
        (
            "a,y\np,0\nq,1\nr,1\n",
            {"target": "y", "max_categories": 2},
            r"text column 'a' .* got 3 such as \['p', 'q', 'r'\]; leave it out \(data\.drop=\[a\]\) or raise",
        ),
        (
            "a,y\n1,0.5\n1,1.5\n2,2.5\n",
            {"target": "y", "max_categories": 2},
            "target 'y' .* got 3 .* must hold classes, not a quantity",
        ),
        ('a,y\n"1,0\n', {"target": "y"}, "as CSV"),
    ],
)
def test_bad_csv_is_named(tmp_path: Path, content: str, options: dict[str, Any], message: str) -> None:
    (tmp_path / "t.csv").write_text(content)
    with pytest.raises(DataError, match=message):
        load_csv(tmp_path / "t.csv", **options)


@pytest.mark.parametrize("load", [load_libsvm, lambda path: load_csv(path, "y")])
def test_a_missing_file_names_the_path_and_the_key(tmp_path: Path, load: Any) -> None:
    with pytest.raises(DataError, match=r"nowhere not found; set data\.root=DIR"):
        load(tmp_path / "nowhere")
