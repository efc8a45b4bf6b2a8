"""Intervals of means over queries, beside their definitions and how often they hold the truth."""

import math

import numpy as np
import pytest

from metricopt_ext.retrieval.intervals import interval


def test_intervals_are_wilsons_of_shares_and_normal_ones_of_other_means() -> None:
    low, high = interval(np.array([1.0] * 10))
    assert (low, high) == pytest.approx((10 / (10 + 1.959963984540054**2), 1.0), abs=1e-12)
    share = np.array([1.0] * 9 + [0.0])
    for end in interval(share):  # (share - p)^2 = z^2 p (1 - p) / n, which defines it
        assert (0.9 - end) ** 2 == pytest.approx(1.959963984540054**2 * end * (1 - end) / 10, abs=1e-12)
    values = np.array([0.25, 0.5, 0.5, 0.75])
    half = 1.959963984540054 * math.sqrt(0.125 / 3) / 2
    assert interval(values) == pytest.approx((0.5 - half, 0.5 + half), abs=1e-12)
    assert interval(np.array([0.3])) == (0.0, 1.0)  # one query tells nothing


def test_intervals_hold_the_truth_nearly_as_often_as_they_say() -> None:
    rng = np.random.default_rng(0)
    held = []
    for _ in range(2000):
        low, high = interval(rng.beta(2, 1, size=60))
        held.append(low <= 2 / 3 <= high)
    assert abs(np.mean(held) - 0.95) < 3 * math.sqrt(0.95 * 0.05 / 2000) + 0.005
