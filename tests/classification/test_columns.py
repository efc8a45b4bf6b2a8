"""Columns of tables made here: numbers, categories and labels, as they are read or refused."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers.csv_tables import reads, refused, rows_of
from helpers.refusals import assert_named, assert_refused
from metricopt_ext.classification.tables import read_csv
from metricopt_ext.data.reading import Column
from metricopt_ext.errors import DataError

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


@pytest.mark.parametrize("stray", ["", "?", "-", "NA", "n.a.", "N/A", "NaN", "NULL", "none", "#N/A", "x", ">99", "1_0"])
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
    ("cells", "expected", "note"),
    [
        (["-3", "+4", ".5", "6.", "1E2"], [-3, 4, 0.5, 6, 100], ""),
        (["01234", "56"], [1234, 56], "some begin with 0 ('01234' in row 2); if they are codes, data.categories=[a]"),
        (["7", "7.0"], [7, 7], "the same in each row"),
        (["1e30", "1e200"], [1e30, 1e200], ""),
        (["1700000064", "1700000065"], [1700000064, 1700000065], ""),
        (["0.1", "16777217"], [0.1, 16777217], ""),
        (["0.10000000000000000555", "0.30000000000000004"], [0.1, 0.30000000000000004], ""),
    ],
)
def test_numbers_as_tables_write_them(tmp_path: Path, cells: list[str], expected: list[float], note: str) -> None:
    table = reads(tmp_path, rows_of("a;y", cells, delimiter=";"))
    single = torch.tensor(expected, dtype=torch.float64).float().tolist() == expected
    assert table.x.dtype == (torch.float32 if single else torch.float64)
    assert table.x.flatten().tolist() == expected
    assert table.reading.columns[0].kind == "number"
    assert table.reading.columns[0].note.startswith(note)
    assert bool(table.reading.columns[0].note) == bool(note)


@pytest.mark.parametrize(
    ("cells", "options", "message"),
    [
        (["1,5", "2"], {}, r"'1,5' in row 2; .*data\.categories=\[a\]"),
        ([*range(19), "1,234"], {"missing": True}, r"got '1,234' in row 21"),
        ([*range(19), "12%"], {"missing": True}, r"'12%' in row 21"),
        (["12%", "7%"], {}, "'12%' in row 2"),
        (["$1", "$2"], {}, r"'\$1' in row 2"),
        (["5 €", "6"], {}, "'5 €' in row 2"),
        (["(3)", "4"], {}, r"'\(3\)' in row 2"),
        (["1 234.5", "4"], {}, r"'1 234.5' in row 2"),
        (["\u22123", "4"], {}, "in row 2"),
        ([*range(19), "-inf"], {"missing": True}, r"must be a finite.*'-inf' in row 21"),
        (["1e999", "1"], {"missing": True}, r"finite number.*'1e999' in row 2"),
        (
            [10**18 + i for i in range(40)],
            {},
            r"more digits than float64.*row 2",
        ),
        ([f"{2**53 + i}.0" for i in range(9)], {}, r"more.*float64.*got '9007199254740992.0'"),
        ([f"1700000000.{i:09d}" for i in range(9)], {}, "more digits than float64 tells apart"),
        (["1", "((3))", *range(40)], {}, r"must be a finite.*'\(\(3\)\)' in row 3"),
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
