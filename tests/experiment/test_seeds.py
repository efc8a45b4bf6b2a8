"""Statistics over seeds, against closed forms."""

import math
from collections.abc import Callable

import numpy as np
import pytest
from scipy.integrate import quad

from metricopt_ext.experiment.report import Report
from metricopt_ext.experiment.report_text import markdown
from metricopt_ext.experiment.seeds import paired_interval, spread, standard_error


@pytest.mark.parametrize("level", [0.95, 0.8])
@pytest.mark.parametrize("n", [2, 5, 10])
def test_intervals_hold_their_share_of_students_t(n: int, level: float) -> None:
    differences = np.random.default_rng(n).normal(0.3, 1, n)
    mean, low, high = paired_interval(differences, level)
    assert mean == pytest.approx(differences.mean())
    assert high - mean == pytest.approx(mean - low)
    scale = math.exp(math.lgamma(n / 2) - math.lgamma((n - 1) / 2)) / math.sqrt((n - 1) * math.pi)
    ends = (high - mean) / (differences.std(ddof=1) / math.sqrt(n))
    held, _ = quad(lambda t: scale * (1 + t**2 / (n - 1)) ** (-n / 2), -ends, ends)  # the density's integral
    assert held == pytest.approx(level, abs=1e-8)


def test_equal_differences_have_an_interval_of_no_width() -> None:
    assert paired_interval([0.5, 0.5, 0.5]) == (0.5, 0.5, 0.5)
    assert paired_interval([0.0, 0.0]) == (0.0, 0.0, 0.0)


def test_one_seed_gives_no_interval(report: Callable[..., Report]) -> None:
    mean, low, high = paired_interval([0.25])
    assert mean == 0.25
    assert math.isnan(low)
    assert math.isnan(high)
    single = report({"pretrained": [0.5], "metricopt": [0.75]}, seeds=1)
    assert "MetricOpt against pretrained: +0.2500 on test (one seed, no interval)" in single.findings()
    assert "±" not in markdown(single)


def test_spread() -> None:
    assert spread([0.25]) == "0.2500"
    assert spread([0.0, 1.0]) == "0.5000 ±0.7071"


def test_the_standard_error_of_one_seed_is_no_band() -> None:
    assert standard_error([0.5]) == 0
    assert standard_error([1.0, 3.0]) == pytest.approx(1.0)
