"""The bootstrap: what a resample holds, and its standard errors beside closed forms."""

import math

import pytest
import torch

from metricopt_ext.experiment.bootstrap import RESAMPLES, error_of, jackknife_error, of_groups, within_groups

GROUPS = [torch.tensor([0, 2, 4, 6]), torch.tensor([1]), torch.tensor([3, 5])]


def rng() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def test_groups_keep_their_sizes() -> None:
    resamples = list(within_groups(GROUPS, rng()))
    assert len(resamples) == RESAMPLES
    for rows in resamples:
        assert [len(part) for part in (rows[rows % 2 == 0], rows[rows == 1], rows)] == [4, 1, 7]
    assert {row for rows in resamples for row in rows.tolist()} == set(range(7))


def test_whole_groups_are_drawn() -> None:
    resamples = list(of_groups(GROUPS, rng()))
    assert len(resamples) == RESAMPLES
    for rows in resamples:
        times = rows.bincount(minlength=7)
        assert all(len(set(times[own].tolist())) == 1 for own in GROUPS)
        assert sum(int(times[own[0]]) for own in GROUPS) == len(GROUPS)
    assert len({len(rows) for rows in resamples}) > 1


def test_errors_are_those_of_a_mean() -> None:
    """With 200 resamples a standard error is known to 5%."""
    values = torch.randn(60, generator=rng(), dtype=torch.float64)
    values[30:] += 5  # between the halves, and so no part of the error within them
    halves = [torch.arange(30), torch.arange(30, 60)]
    within = error_of(lambda rows: float(values[rows].mean()), within_groups(halves, rng()))
    assert within == pytest.approx(
        math.sqrt(sum(float(values[own].var(correction=0)) for own in halves) / 120), rel=0.2
    )
    pairs = [torch.tensor([i, i + 30]) for i in range(30)]
    means = torch.stack([values[own].mean() for own in pairs])
    whole = error_of(lambda rows: float(values[rows].mean()), of_groups(pairs, rng()))
    assert whole == pytest.approx(math.sqrt(float(means.var(correction=0)) / 30), rel=0.2)
    assert error_of(lambda rows: 1.0, within_groups(halves, rng())) == 0


def test_the_jackknife_is_exact_for_a_mean_of_groups_of_one_size() -> None:
    values = torch.randn(12, generator=rng(), dtype=torch.float64)
    alone = [torch.tensor([i]) for i in range(12)]
    assert jackknife_error(lambda rows: float(values[rows].mean()), alone) == pytest.approx(
        float(values.std()) / math.sqrt(12)
    )
    groups = [torch.tensor([i, i + 6]) for i in range(6)]
    means = torch.stack([values[group].mean() for group in groups])
    error = jackknife_error(lambda rows: float(values[rows].mean()), groups)
    assert error == pytest.approx(float(means.std()) / math.sqrt(6))


def test_resamples_on_which_the_statistic_is_not_defined_are_left_out() -> None:
    rows = [torch.tensor([i]) for i in range(4)]
    values = {0: 1.0, 1: math.nan, 2: 4.0, 3: 5.0}
    defined = torch.tensor([1.0, 4.0, 5.0], dtype=torch.float64)
    assert error_of(lambda drawn: values[int(drawn)], iter(rows)) == float(defined.std())
    assert math.isnan(error_of(lambda drawn: values[int(drawn)], iter(rows[:2])))
