"""Cells of tables as numbers, compared with what they say."""

import numpy as np
import pytest

from metricopt_ext.data.numerals import MISSING, Numeral, in_one_go, number_in, plain_number


@pytest.mark.parametrize(
    ("cell", "decimal", "number"),
    [
        ("12", "", Numeral(12)),
        ("\u22123", "", Numeral(-3)),
        ("( 0.5 )", "", Numeral(-0.5)),
        ("12%", "", Numeral(12, "%")),
        ("-$7.5", "", Numeral(-7.5, "$")),
        ("5 €", "", Numeral(5, "€")),
        ("($1,234.5)", ".", Numeral(-1234.5, "$")),
        ("1.234,5", ",", Numeral(1234.5)),
        ("1'234'567", ",", Numeral(1234567)),
        ("-inf", "", Numeral(-np.inf)),
    ],
)
def test_a_number_keeps_its_value_and_sign(cell: str, decimal: str, number: Numeral) -> None:
    assert number_in(cell, decimal) == number


@pytest.mark.parametrize(("cell", "decimal"), [("1,5", ""), ("1,234", ""), ("1.5", ","), ("1,5", ".")])
def test_another_notation_is_told_from_no_number(cell: str, decimal: str) -> None:
    found = number_in(cell, decimal)
    assert found is not None
    assert found.other
    assert np.isnan(found.value)


@pytest.mark.parametrize("cell", [*sorted(MISSING), "x", "1_0", "$5$", "((3))", "1,23,4", "1 2"])
def test_words_and_marks_of_missing_numbers_are_none(cell: str) -> None:
    assert number_in(cell, "") is None
    assert plain_number(cell) is None


def test_a_column_in_one_go_is_of_plain_numbers_alone() -> None:
    found = in_one_go(["1", "-.5", "+2."])
    assert found is not None
    assert found.tolist() == [1, -0.5, 2]
    assert in_one_go(["1", "1e3"]) is None  # read cell by cell
    assert in_one_go(["1", "1-2"]) is None
    assert in_one_go(["1", ""]) is None


def test_a_plain_number_has_neither_sign_of_currency_nor_parted_thousands() -> None:
    assert plain_number("1e3") == 1000
    assert plain_number("$1") is None
    assert plain_number("1,000") is None
