"""Claims: Holm's correction by hand, and paired tests beside closed forms of Student's t."""

import math
from typing import Any

import numpy as np
import pytest

from helpers.comparisons import OURS, compared
from metricopt_ext.comparison.claims import all_pairs, baselines_of, guard_blocks, holm, pair, t_test


def test_holm_by_hand() -> None:
    """Of 0.01, 0.04, 0.03, 0.005: 4 x 0.005, 3 x 0.01, 2 x 0.03, and 0.04 raised to what comes before it."""
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.5]) == [1.0, 1.0]
    assert holm([]) == []
    corrected = holm([0.02, math.nan, 0.03])
    assert corrected[0] == pytest.approx(0.04)
    assert math.isnan(corrected[1])
    assert corrected[2] == pytest.approx(0.04)


def test_holm_rejects_what_the_step_down_procedure_does() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        p, level = rng.uniform(size=12) ** 3, 0.05
        rejected = np.zeros(12, dtype=bool)
        for rank, i in enumerate(np.argsort(p)):  # as Holm (1979) states it
            if p[i] > level / (12 - rank):
                break
            rejected[i] = True
        assert ((np.array(holm(p.tolist())) <= level) == rejected).all()


def test_t_tests_of_two_and_three_numbers_are_the_closed_forms() -> None:
    """Student's t with one degree of freedom is Cauchy's distribution; with two, its integral is algebraic."""
    assert t_test([0.3, -0.1]) == pytest.approx(1 - 2 / math.pi * math.atan(0.1 / 0.2), rel=1e-12)
    t = 0.2 / (math.sqrt(0.07) / math.sqrt(3))  # of a mean of 0.2, and a variance of (0.01 + 0.09 + 0.04) / 2
    assert t_test([0.3, -0.1, 0.4]) == pytest.approx(1 - t / math.sqrt(2 + t**2), rel=1e-12)
    assert math.isnan(t_test([0.3]))
    assert t_test([0.0, 0.0]) == 1
    assert t_test([0.5, 0.5]) == 0


def test_pairs_are_by_seed_and_in_the_metrics_direction() -> None:
    higher, lower = (
        compared(maximize, metricopt=OURS, noisy_ei={"60": [0.7, None, 0.75]}) for maximize in (True, False)
    )
    assert baselines_of(higher) == ["pretrained", "batchnorm", "best_start", "noisy_ei"]
    found = pair(higher, "noisy_ei", 60)
    assert found is not None
    assert found.interval.mean == pytest.approx(0.025)
    assert (found.wins, found.losses, found.seeds) == (1, 1, 2)
    assert found.p == pytest.approx(1 - 2 / math.pi * math.atan(0.025 / 0.075))  # of 0.1 and -0.05
    opposite = pair(lower, "noisy_ei", 60)
    assert opposite is not None
    assert opposite.interval.mean == pytest.approx(-0.025)
    assert pair(higher, "noisy_ei", 150) is None
    assert pair(higher, "noisy_ei", 20) is None
    across = pair(higher, "best_start", 150, 60)
    assert across is not None
    assert across.interval.mean == pytest.approx(0.8 - 1.6 / 3)
    assert pair(higher, "best_start", 1, 60) is None  # fewer queries than its choice takes
    assert [(each.baseline, each.budget) for each in all_pairs(higher)] == [
        *((name, 60) for name in ("pretrained", "batchnorm", "best_start", "noisy_ei")),
        *((name, 150) for name in ("pretrained", "batchnorm", "best_start")),
    ]


def test_the_guards_statistics_over_whole_runs() -> None:
    """Losses are of what was kept, and clear gains those of the best candidate."""
    step = {"change": 0.5, "accepted": True, "error": 0.01}

    def run(change: float, error: float, best: float, best_error: float) -> dict[str, Any]:
        whole = {"accepted": change != 0, "change": change, "error": error, "best": best, "best_error": best_error}
        return {**step, "whole": whole}

    guards = [
        run(0.05, 0.01, 0.05, 0.01),
        run(0.0, 0.0, 0.05, 0.01),
        run(-0.02, 0.01, 0.05, 0.03),
        run(-0.02, 0.03, 0.05, 0.01),
    ]
    blocks = guard_blocks(guards)
    assert [points[0] for _, points in blocks] == [
        "4 guarded runs, 4 accepted; mean change on test +0.5000",
        "4 guarded runs, 3 accepted; mean change on test +0.0025",
    ]
    assert blocks[1][1][1:] == [
        "1 of 4 (25.0%) lose more than one standard error on test",
        "2 of 3 (66.7%) accepted where the best candidate gains more than two standard errors on test",
    ]
