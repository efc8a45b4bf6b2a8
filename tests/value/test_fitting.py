"""Fitting: quality on held-out trajectories against scipy, scikit-learn and naive loops."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import scipy.stats
import sklearn.metrics
import torch
from torch import Tensor

from helpers.quadratics import Quadratic, QuadraticLearner
from helpers.refusals import assert_refused
from helpers.tensors import rand32
from metricopt_ext.errors import ValueFunctionError
from metricopt_ext.tasks.evaluation import Evaluation
from metricopt_ext.tasks.trajectories import Trajectory
from metricopt_ext.value.fitting import fit_value_function, measure
from metricopt_ext.value.observations import Observations
from metricopt_ext.value.value_function import ValueFunction


def test_measure_is_what_scipy_and_sklearn_say() -> None:
    true = (rand32(101) * 4).round() / 4  # with ties
    predicted = true + rand32(101, seed=2)
    trajectory = torch.arange(101) // 5
    quality = measure(predicted, true, trajectory)
    ranks = [scipy.stats.rankdata(x) for x in (predicted, true)]
    assert quality.spearman == pytest.approx(np.corrcoef(*ranks)[0, 1], abs=1e-6)
    assert quality.mae == pytest.approx(sklearn.metrics.mean_absolute_error(true, predicted), abs=1e-6)
    constants = [sklearn.metrics.mean_absolute_error(true, np.full(101, c)) for c in np.linspace(-4, 4, 1601)]
    assert quality.constant_mae == pytest.approx(min(constants), abs=1e-6)
    assert (quality.points, quality.trajectories) == (101, 21)


def test_measure_of_a_diverged_fit() -> None:
    predicted = rand32(10)
    predicted[3] = math.nan
    quality = measure(predicted, rand32(10), torch.arange(10))
    assert (quality.spearman, quality.mae) == (-1, math.inf)
    assert not quality.trusted


def test_what_was_predicted_ahead_is_measured_against_what_was_found() -> None:
    """Of eight queries the best quarter by f are the second and the last."""
    f = [5.0, 1.0, 6.0, 7.0, 8.0, 4.0, 3.0, 2.0]
    true = [5.5, 1.5, 6.0, 6.0, 9.0, 4.0, 2.0, 3.0]
    ahead = torch.full((8,), 5.0), torch.tensor([9.0, 5.5, *[1.5] * 6]), 9.0
    quality = measure(torch.tensor(f), torch.tensor(true), torch.arange(8), ahead)
    assert quality.spearman == pytest.approx(scipy.stats.spearmanr(f, true).statistic)
    assert quality.mae == pytest.approx((0.5 + 0.5 + 0 + 1 + 1 + 0 + 1 + 1) / 8)
    assert quality.constant_mae == pytest.approx((0.5 + 3.5 + 1 + 1 + 4 + 1 + 3 + 2) / 8)
    assert quality.incumbent_mae == pytest.approx((3.5 + 4 + 4.5 + 4.5 + 7.5 + 2.5 + 0.5 + 1.5) / 8)
    assert quality.near_mae == pytest.approx((0.5 + 1) / 2)
    assert quality.headroom == pytest.approx(9 - (1.5 + 3) / 2)
    assert (quality.points, quality.trajectories) == (8, 8)


@dataclass
class Spy:
    """Returns a given f and remembers what it was asked with."""

    f: ValueFunction
    asked: Any = None

    def __call__(self, data: Observations, fold: Tensor, folds: int, seed: int) -> ValueFunction:
        self.asked = data, fold, folds, seed
        return self.f


@pytest.mark.parametrize("folds", [2, 4, 5])
def test_folds(smooth: Callable[[Tensor], Tensor], trajectories: Callable[..., list[Trajectory]], folds: int) -> None:
    data, spy = Observations.of(trajectories(smooth, n=11)), known(folds)
    fit_value_function(data, spy, folds=folds, seed=3)
    seen, fold, count, seed = spy.asked
    assert seen is data
    assert (count, seed) == (folds, 3)
    by_trajectory = [set(fold[data.trajectory == t].tolist()) for t in range(11)]
    assert all(len(folds_here) == 1 for folds_here in by_trajectory)
    sizes = np.bincount([folds_here.pop() for folds_here in by_trajectory], minlength=folds)
    assert len(sizes) == folds
    assert sizes.max() - sizes.min() <= 1

    draws = []
    for other in range(5):
        fit_value_function(data, spy, folds=folds, seed=other)
        draws.append(tuple(spy.asked[1].tolist()))
    assert len(set(draws)) > 1


@pytest.mark.parametrize(("rounds", "members"), [(1, 4), (3, 4), (3, 8)])
def test_quality_is_that_of_held_out_predictions(
    smooth: Callable[[Tensor], Tensor], trajectories: Callable[..., list[Trajectory]], rounds: int, members: int
) -> None:
    data, spy = Observations.of(trajectories(smooth, rounds=rounds)), known(members)
    fit = fit_value_function(data, spy, seed=3)
    fold, predicted, true, on = spy.asked[1], [], [], []
    for i, used in enumerate(data.where_used().tolist()):
        if used:
            predicted.append(float(spy.f.members(data.phi[i])[int(fold[i]) :: 4].mean()))
            true.append(float(data.cost[i]))
            on.append(int(data.trajectory[i]))
    assert 0 < len(predicted) < len(data.phi)
    np.testing.assert_allclose(fit.predicted, predicted, rtol=1e-5)
    np.testing.assert_allclose(fit.true, true)
    quality = fit.f.quality
    assert quality is not None
    assert quality.spearman == pytest.approx(scipy.stats.spearmanr(predicted, true).statistic, abs=1e-5)
    assert quality.mae == pytest.approx(np.abs(np.subtract(predicted, true)).mean(), rel=1e-5)
    assert quality.constant_mae == pytest.approx(np.abs(np.subtract(true, np.median(true))).mean(), rel=1e-5)
    assert quality.points == len(predicted)
    assert quality.trajectories == len(set(on))
    assert float(fit.f.radius) == pytest.approx(float(data.phi.norm(dim=1).quantile(0.95)))


def known(members: int) -> Spy:
    """Make coefficients near those of `diagonal`."""
    f = Quadratic(6, members)
    i = torch.arange(6)
    coefficients = torch.cat([0.5 - i / 4, 0.3 * (-1.0) ** i])[:, None]
    f.coefficients.copy_(coefficients + rand32(12, members, seed=8))
    f.intercept.fill_(0.7)
    return Spy(f)


@pytest.mark.outcome
@pytest.mark.parametrize("per_trajectory", [False, True])
def test_noise_is_rarely_trusted(
    smooth: Callable[[Tensor], Tensor], trajectories: Callable[..., list[Trajectory]], per_trajectory: bool
) -> None:
    def noisy(item: Trajectory, rng: torch.Generator) -> Trajectory:
        noise = torch.rand(1 if per_trajectory else len(item.cost), generator=rng, dtype=torch.float64)
        return replace(item, evaluations=tuple(map(Evaluation, noise.expand(len(item.cost)).tolist())))

    items, trusted = trajectories(smooth), []
    for seed in range(60):
        rng = torch.Generator().manual_seed(seed)
        data = Observations.of([noisy(item, rng) for item in items])
        trusted.append(fit_value_function(data, QuadraticLearner(), seed=seed).f.trusted)
    assert sum(trusted) <= 6  # 0.4 ± 0.5


@pytest.mark.parametrize(("n", "folds", "name"), [(3, 4, "3"), (1, 2, "1")])
def test_too_few_trajectories(
    smooth: Callable[[Tensor], Tensor], trajectories: Callable[..., list[Trajectory]], n: int, folds: int, name: str
) -> None:
    data = Observations.of(trajectories(smooth, n=n))
    assert_refused(
        lambda: fit_value_function(data, QuadraticLearner(), folds=folds), ValueFunctionError, name, folds, "folds"
    )
