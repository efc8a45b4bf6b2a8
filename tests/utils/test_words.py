"""Words for numbers."""

import pytest

from metricopt_ext.utils.words import counted


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
