"""The picture of a comparison: its axis; see tests/comparison/test_comparison_report.py for the file."""

from typing import Any

import pytest

from metricopt_ext.comparison.comparison_plot import _axis


def content(*free: float) -> dict[str, Any]:
    """A search of 0.5 at each seed, and one of 0.6 with a standard error of 0.1; and free starts."""
    cells = {"20": {"test": [0.5, 0.5]}, "60": {"test": [0.5, 0.7, None]}}
    starts = {str(height): {"test": [height]} for height in free}
    return {"starts": starts, "best_start": {"test": [0.5]}, "methods": {"metricopt": {"cells": cells}}}


@pytest.mark.parametrize(
    ("free", "low", "high"),
    [
        ((), 0.5, 0.7),
        ((0.4, 0.8), 0.4, 0.8),
        ((0.2, 1.0), 0.5, 0.7),  # they would more than double it
    ],
)
def test_the_axis_has_all_searches_and_the_free_starts_near_them(
    free: tuple[float, ...], low: float, high: float
) -> None:
    assert _axis(content(*free)) == pytest.approx((low - 0.01, high + 0.01))  # a twentieth of what searches span
