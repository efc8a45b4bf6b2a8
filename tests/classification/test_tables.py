"""CSV files made here, as they are read or refused."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from metricopt_ext.classification.libsvm import load_libsvm
from metricopt_ext.classification.tables import load_csv, read_csv
from metricopt_ext.data.labelled import Table
from metricopt_ext.data.reading import Column
from metricopt_ext.errors import DataError

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
    with pytest.raises(
        DataError, match=r"is 'none' in row 2; .* \(data\.categories=\[y\] if it is the name of a class\)"
    ):
        load_csv(tmp_path / "t.csv", "y")
    data = load_csv(tmp_path / "t.csv", "y", categories=["y"])
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


def rows_of(header: str, *columns: Any, delimiter: str = ",") -> str:
    """A table whose last column is of the classes no and yes, in turn."""
    lines = [
        delimiter.join([*map(str, row), "yes" if i % 2 else "no"]) for i, row in enumerate(zip(*columns, strict=True))
    ]
    return "\n".join([header, *lines, ""])


def reads(folder: Path, content: str | bytes, **options: Any) -> Table:
    path = folder / "t.csv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return read_csv(path, "y", **options)


def refused(folder: Path, content: str | bytes, **options: Any) -> str:
    with pytest.raises(DataError) as caught:
        reads(folder, content, **options)
    return str(caught.value)


AGES = [*range(20, 49), "-", *range(50, 80)]


def test_one_cell_does_not_make_categories_of_numbers(tmp_path: Path) -> None:
    said = refused(tmp_path, rows_of("age,y", AGES))
    assert "column 'age' must be a finite number in each row, got '-' in row 31; fill it in" in said
    assert "data.missing to mean, median or indicator" in said
    assert said.endswith("(data.categories=[age]); 59 of its 60 cells are numbers")
    table = reads(tmp_path, rows_of("age,y", AGES), missing=True)
    assert table.x.shape == (60, 1)
    assert table.x.isnan().flatten().nonzero().tolist() == [[29]]
    age, target = table.reading.columns
    assert age == Column("age", "number", 1, 59, 1, ["'-' in row 31"])
    assert target == Column("y", "class", values=2)
    ages = reads(tmp_path, rows_of("age,y", AGES), categories=["age"])
    assert (ages.x.shape, ages.reading.columns[0].kind) == ((60, 60), "category")
    assert "got 'n.a.' in row 79" in refused(tmp_path, rows_of("age,y", [*range(77), "n.a.", *range(222)]))


@pytest.mark.parametrize(
    "stray", ["", "?", "-", "--", "NA", "n.a.", "N/A", "NaN", "NULL", "none", "#N/A", "x", ">99", "1_0"]
)
def test_a_stray_cell_is_named_or_missing(tmp_path: Path, stray: str) -> None:
    content = rows_of("a,y", [*range(9), stray, *range(9)])
    assert f"got {stray!r} in row 11" in refused(tmp_path, content)
    table = reads(tmp_path, content, missing=True)
    assert table.x[:, 0].isnan().nonzero().tolist() == [[9]]
    assert table.reading.columns[0].which == [f"{stray!r} in row 11"]


@pytest.mark.parametrize(("text", "kind"), [(2, "number"), (3, "category")])
def test_a_column_is_numeric_from_nine_tenths_on(tmp_path: Path, text: int, kind: str) -> None:
    table = reads(tmp_path, rows_of("a,y", [*range(18), *"xyz"[:text], *([""] if text == 2 else [])]), missing=True)
    column = table.reading.columns[0]
    assert column.kind == kind
    numbers = "18 of 21 cells are numbers, others not ('x' in row 20)"
    own = "21 of 21 rows have a value that no other row has, which teaches nothing"
    assert column.note == ("" if kind == "number" else f"{numbers}; {own}")


@pytest.mark.parametrize(
    ("cells", "options", "expected", "note"),
    [
        (["12%", "7%"], {}, [12, 7], "all with '%'"),
        (["$12", "-$7.5", "$1e3"], {}, [12, -7.5, 1000], "all with '$'"),
        (["5 €", "6 €"], {}, [5, 6], "all with '€'"),
        (["1,234.5", "2"], {"decimal": "."}, [1234.5, 2], ""),
        (["1.234,5", "2", "0,25"], {"decimal": ","}, [1234.5, 2, 0.25], ""),
        (["1 234,5", "1'234'567"], {"decimal": ","}, [1234.5, 1234567], ""),
        (["\u22123", "+4", ".5", "6.", "1E2"], {}, [-3, 4, 0.5, 6, 100], ""),
        (
            ["01234", "56"],
            {},
            [1234, 56],
            "some begin with 0 ('01234' in row 2); if they are codes, data.categories=[a]",
        ),
        (["7", "7.0"], {}, [7, 7], "the same in each row"),
        (["1e30", "1e200"], {}, [1e30, 1e200], ""),
        (["1700000064", "1700000065"], {}, [1700000064, 1700000065], ""),
        (["0.1", "16777217"], {}, [0.1, 16777217], ""),
        (["(3)", "4.5", "( 0.5 )"], {}, [-3, 4.5, -0.5], "those in parentheses are negative"),
        (["($1,234.5)", "$6"], {"decimal": "."}, [-1234.5, 6], "all with '$'; those in parentheses are negative"),
        (["0.10000000000000000555", "0.30000000000000004"], {}, [0.1, 0.30000000000000004], ""),
    ],
)
def test_numbers_as_tables_write_them(
    tmp_path: Path, cells: list[str], options: dict[str, Any], expected: list[float], note: str
) -> None:
    table = reads(tmp_path, rows_of("a;y", cells, delimiter=";"), **options)
    single = torch.tensor(expected, dtype=torch.float64).float().tolist() == expected
    assert table.x.dtype == (torch.float32 if single else torch.float64)
    assert table.x.flatten().tolist() == expected
    assert table.reading.columns[0].kind == "number"
    assert table.reading.columns[0].note.startswith(note)
    assert bool(table.reading.columns[0].note) == bool(note)


@pytest.mark.parametrize(
    ("cells", "options", "message"),
    [
        (["1,5", "2"], {}, r"must have a decimal point, got '1,5' in column 'a', row 2; set data\.decimal=','"),
        ([*range(19), "1,234"], {"missing": True}, "got '1,234' in column 'a', row 21; set data.decimal=','"),
        (["1.5", "2.5"], {"decimal": ","}, r"must have a decimal comma, got '1\.5' in column 'a', row 2"),
        (
            [*range(19), "12%"],
            {"missing": True},
            "must all have the same sign, got '12%' in row 21, and others without",
        ),
        (["$1", "$2", "€3"], {}, r"must all have the same sign, got '€3' in row 4, and others with '\$'"),
        ([*range(19), "-inf"], {"missing": True}, "must be a finite number in each row, got '-inf' in row 21"),
        (["1e999", "1"], {"missing": True}, "finite number in each row, got '1e999' in row 2"),
        (
            [10**18 + i for i in range(40)],
            {},
            "more digits than float64 tells apart, got '1000000000000000000' in row 2",
        ),
        ([f"{2**53 + i}.0" for i in range(9)], {}, "more digits than float64 tells apart, got '9007199254740992.0'"),
        ([f"{2**53 + i:,}" for i in range(9)], {"decimal": "."}, "more digits than float64 tells apart"),
        ([f"1700000000.{i:09d}" for i in range(9)], {}, "more digits than float64 tells apart"),
        (["1", "(-2)", "((3))", *range(40)], {}, r"must be a finite number in each row, got '\(-2\)' in row 3"),
    ],
)
def test_numbers_that_could_mean_another(
    tmp_path: Path, cells: list[Any], options: dict[str, Any], message: str
) -> None:
    assert re.search(message, refused(tmp_path, rows_of("a;y", cells, delimiter=";"), **options))


def test_booleans_and_text_are_categories(tmp_path: Path) -> None:
    table = reads(tmp_path, rows_of("on,job,y", ["True", "False", "True"], ["", "clerk", "none"]))
    assert table.x.tolist() == [[0, 1, 1, 0, 0], [1, 0, 0, 1, 0], [0, 1, 0, 0, 1]]
    assert table.reading.columns[1] == Column(
        "job", "category", 3, 3, 2, ["'' in row 2", "'none' in row 4"], "these are categories too"
    )


def test_values_that_may_be_one_are_named(tmp_path: Path) -> None:
    spelt = ["Red", "red", "blue"]
    table = reads(tmp_path, "a,y\n" + "".join(f"{spelt[i % 3]},{('x  y', 'x y')[i % 2]}\n" for i in range(12)))
    notes = [column.note for column in table.reading.columns]
    said = "are two of them, write them alike if they are one"
    assert notes == [f"'Red' and 'red' {said}", f"'x  y' and 'x y' {said}"]
    assert table.x.shape == (12, 3)


def test_long_labels_are_told_apart(tmp_path: Path) -> None:
    assert reads(tmp_path, f"a,y\n1,{2**53}\n2,{2**53 + 1}\n").class_names == (str(2**53), str(2**53 + 1))


def test_headers_may_be_numbers_in_order_or_repeat(tmp_path: Path) -> None:
    assert reads(tmp_path, "0,1,y\n5,6,no\n7,8,yes\n").x.tolist() == [[5, 6], [7, 8]]
    twice = reads(tmp_path, "a,a,y\n5,6,no\n7,8,yes\n", drop=[])
    assert twice.x.tolist() == [[5, 6], [7, 8]]
    left_out = reads(tmp_path, ",a,y\n0,5,no\n1,7,NA\n", drop=[""]).reading.columns
    assert [column.kind for column in left_out] == ["left out", "number", "class"]
    assert left_out[2].note == "one is 'NA', as in row 3, like a missing one"


def test_load_csv_refuses_what_float32_cannot_tell_apart(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(rows_of("ts,y", range(1_700_000_000, 1_700_000_400)))
    with pytest.raises(DataError, match="can't tell the values of column 'ts' apart"):
        load_csv(tmp_path / "t.csv", "y")


def test_columns_for_a_metric_are_no_inputs(tmp_path: Path) -> None:
    rows = [
        f"{i / 10},{'n' if i % 2 else ''},{9007199254740993 + i},{i}%,00{i},{'yes' if i % 3 else 'no'}"
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
    assert table.columns["share"].tolist() == list(range(30))
    assert table.columns["code"][7] == "007"
    kinds = {column.name: column.kind for column in table.reading.columns}
    assert [name for name, kind in kinds.items() if kind == "for the metric"] == ["region", "id", "share", "code"]


def test_a_number_for_a_metric_must_be_there(tmp_path: Path) -> None:
    rows = [f"{i},{i if i != 4 else '?'},{'ab'[i % 2]}" for i in range(20)]
    (path := tmp_path / "t.csv").write_text("\n".join(["size,weight,y", *rows]))
    for missing in (False, True):  # what fills in inputs does not fill in weights
        message = (
            r"column 'weight' of metric.columns must be a finite number in each row, got '\?' in row 6; fill it in"
        )
        with pytest.raises(DataError, match=message):
            read_csv(path, "y", columns=["weight"], missing=missing)
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
    with pytest.raises(DataError, match=r"'blue' of data.targets must be 1 or 0 in each row.*got 'maybe' in row 3"):
        read_csv(tmp_path / "t.csv", "", targets=["red", "blue"])
    with pytest.raises(DataError, match="must have one column 'green', got 0"):
        read_csv(tmp_path / "t.csv", "", targets=["red", "green"])


def test_a_target_of_quantities_keeps_its_digits(tmp_path: Path) -> None:
    prices = [f"${1000 + i / 7:.6f}" for i in range(300)]
    content = "size,price\n" + "\n".join(f"{i},{price}" for i, price in enumerate(prices))
    (tmp_path / "t.csv").write_text(content)
    table = read_csv(tmp_path / "t.csv", "price", quantity=True)
    assert table.y.dtype == torch.float64
    assert table.y.tolist() == [float(price[1:]) for price in prices]
    assert (table.class_names, table.reading.columns[1].kind) == ((), "quantity")
    with pytest.raises(DataError, match=r"set data.kind=regression to predict it"):
        read_csv(tmp_path / "t.csv", "price")
    (tmp_path / "t.csv").write_text(content.replace(prices[4], "NA"))
    with pytest.raises(DataError, match=r"the target 'price' must be a finite number in each row, got 'NA' in row 6"):
        read_csv(tmp_path / "t.csv", "price", quantity=True)
