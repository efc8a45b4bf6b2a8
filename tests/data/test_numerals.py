"""Cells of tables as numbers, compared with what they say."""

import math

import pytest

from metricopt_ext.data.numerals import MISSING, in_one_go, number_in, plain_number, written_otherwise


@pytest.mark.parametrize(("cell", "number"), [("12", 12), ("-7.5", -7.5), ("+.5", 0.5), ("1e3", 1000), ("6.", 6)])
def test_a_plain_number_is_read(cell: str, number: float) -> None:
    assert plain_number(cell) == number_in(cell) == number
    assert not written_otherwise(cell)


def test_infinity_is_a_number_but_no_plain_one() -> None:
    assert number_in("-inf") == -math.inf
    assert plain_number("-inf") is None


@pytest.mark.parametrize(
    "cell",
    ["1,5", "1,234", "1.234,5", "1'234'567", "1\u00a0234", "\u22123", "12%", "-$7.5", "5 €", "(3)", "($1,234.5)"],
)
def test_another_notation_is_told_from_no_number(cell: str) -> None:
    assert number_in(cell) is None
    assert written_otherwise(cell)


@pytest.mark.parametrize(
    "cell", [*sorted(MISSING), "x", "1_0", "((3))", "1,23,4", "1 2", "1.2.3", "2020-01-02", "12:30", "A1"]
)
def test_words_and_marks_of_missing_numbers_are_none(cell: str) -> None:
    assert number_in(cell) is None
    assert not written_otherwise(cell)


def test_a_column_in_one_go_is_of_plain_numbers_alone() -> None:
    found = in_one_go(["1", "-.5", "+2."])
    assert found is not None
    assert found.tolist() == [1, -0.5, 2]
    assert in_one_go(["1", "1e3"]) is None  # read cell by cell
    assert in_one_go(["1", "1-2"]) is None
    assert in_one_go(["1", ""]) is None
