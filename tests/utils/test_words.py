"""Words for numbers."""

import pytest
import torch

from metricopt_ext.utils.words import brief, counted, decimals


@pytest.mark.parametrize(
    ("count", "noun", "expected"),
    [
        (1, "seed", "1 seed"),
        (0, "seed", "0 seeds"),
        (10, "seed", "10 seeds"),
        (1, "metric query", "1 metric query"),
        (2, "metric query", "2 metric queries"),
        (66, "batch", "66 batches"),
    ],
)
def test_one_is_singular_and_all_else_plural(count: int, noun: str, expected: str) -> None:
    assert counted(count, noun) == expected


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.5, "0.5000"),
        (0.0, "0.0000"),
        (-0.0001, "-0.0001"),
        (-9.9e-5, "-9.9e-05"),
        (1e6, "1e+06"),
        (-1e300, "-1e+300"),
    ],
)
def test_four_decimals_where_they_tell_the_value(value: float, shown: str) -> None:
    assert decimals(value) == shown


def test_an_array_is_on_one_line() -> None:
    assert brief({"a": torch.zeros(2, 2)}) == "{'a': tensor([[0., 0.],         [0., 0.]])}"
