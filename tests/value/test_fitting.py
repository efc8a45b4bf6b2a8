"""Fitting: quality on held-out trajectories against scipy, scikit-learn and naive loops, and the choice by it."""

import math
from collections.abc import Callable, Sequence
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
from metricopt_ext.tasks.trajectories import Trajectory
from metricopt_ext.value.fitting import fit_value_function, measure, measure_ahead
from metricopt_ext.value.learners import NeuralLearner
from metricopt_ext.value.observations import Observations
from metricopt_ext.value.value_function import (
    ValueFunction,
)


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
    predicted = torch.tensor([[own, 5.0, best] for own, best in zip(f, [9.0, 5.5, *[1.5] * 6], strict=True)])
    quality = measure_ahead(predicted, torch.tensor(true), start=9.0)
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
    data, spy = Observations.of(trajectories(smooth, n=11)), known(Quadratic, 1.0, folds)
    fit_value_function(data, [spy], folds=folds, seed=3)
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
        fit_value_function(data, [spy], folds=folds, seed=other)
        draws.append(tuple(spy.asked[1].tolist()))
    assert len(set(draws)) > 1


@pytest.mark.parametrize(("rounds", "members"), [(1, 4), (3, 4), (3, 8)])
def test_quality_is_that_of_held_out_predictions(
    smooth: Callable[[Tensor], Tensor], trajectories: Callable[..., list[Trajectory]], rounds: int, members: int
) -> None:
    data, spy = Observations.of(trajectories(smooth, rounds=rounds)), known(Quadratic, 1.0, members)
    fit = fit_value_function(data, [spy], seed=3)
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


class Broken(Quadratic):
    kind = "broken"

    def members(self, phi: Tensor) -> Tensor:
        return super().members(phi) * math.nan


class Shifted(Quadratic):
    """Ranks as its coefficients do, with a constant error."""

    kind = "shifted"

    def members(self, phi: Tensor) -> Tensor:
        return super().members(phi) + 3


def known(kind: type[Quadratic], noise: float, members: int = 4) -> Spy:
    """Make the coefficients of `diagonal`, less exact with more noise."""
    f = kind(6, members)
    i = torch.arange(6)
    coefficients = torch.cat([0.5 - i / 4, 0.3 * (-1.0) ** i])[:, None]
    f.coefficients.copy_(coefficients + noise * rand32(12, members, seed=8))
    f.intercept.fill_(0.7)
    return Spy(f)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(
    ("learners", "best", "trusted"),
    [
        pytest.param([NeuralLearner(iterations=3), QuadraticLearner()], "quadratic", True, marks=pytest.mark.outcome),
        pytest.param([NeuralLearner(iterations=300), known(Quadratic, 1.0)], "neural", True, marks=pytest.mark.outcome),
        ([known(Shifted, 0.0), known(Quadratic, 0.1)], "quadratic", True),  # useful before well ranked
        ([known(Shifted, 0.0), known(Quadratic, 1.0)], "quadratic", False),  # none useful: the smaller error
        ([known(Broken, 0.0), QuadraticLearner()], "quadratic", True),
    ],
)
def test_the_better_kind_is_kept(
    diagonal: Callable[[Tensor], Tensor],
    trajectories: Callable[..., list[Trajectory]],
    learners: Sequence[Any],
    best: str,
    trusted: bool,
    reverse: bool,
) -> None:
    fit = fit_value_function(Observations.of(trajectories(diagonal)), learners[::-1] if reverse else learners)
    # Of those that are trained: a Spearman of 1.00 against 0.09 ± 0.14, an error of 0.27 ± 0.02 of a constant's.
    assert fit.f.kind == best
    assert len(fit.candidates) == 2
    assert fit.f.quality == fit.candidates[best]
    assert fit.f.trusted is trusted


@pytest.mark.parametrize("reverse", [False, True])
def test_of_two_useful_ones_the_better_ranking_is_kept(
    diagonal: Callable[[Tensor], Tensor], trajectories: Callable[..., list[Trajectory]], reverse: bool
) -> None:
    exact, near = known(Quadratic, 0.0), known(Quadratic, 0.1)
    exact.f.intercept += 0.3  # type: ignore[operator]
    data = Observations.of(trajectories(diagonal))
    alone = [fit_value_function(data, [spy]).f.quality for spy in (exact, near)]
    assert alone[0].spearman > alone[1].spearman
    assert alone[1].mae < alone[0].mae < alone[0].constant_mae
    assert fit_value_function(data, [near, exact][:: -1 if reverse else 1]).f is exact.f


@pytest.mark.outcome
@pytest.mark.parametrize("per_trajectory", [False, True])
def test_noise_is_rarely_trusted(
    smooth: Callable[[Tensor], Tensor], trajectories: Callable[..., list[Trajectory]], per_trajectory: bool
) -> None:
    def noisy(item: Trajectory, rng: torch.Generator) -> Trajectory:
        noise = torch.rand(1 if per_trajectory else len(item.cost), generator=rng, dtype=torch.float64)
        return replace(item, cost=noise.expand(len(item.cost)))

    items, trusted = trajectories(smooth), []
    for seed in range(60):
        rng = torch.Generator().manual_seed(seed)
        data = Observations.of([noisy(item, rng) for item in items])
        trusted.append(fit_value_function(data, [QuadraticLearner()], seed=seed).f.trusted)
    assert sum(trusted) <= 6  # 0.4 ± 0.5


@pytest.mark.parametrize(("n", "folds", "name"), [(3, 4, "3"), (1, 2, "1")])
def test_too_few_trajectories(
    smooth: Callable[[Tensor], Tensor], trajectories: Callable[..., list[Trajectory]], n: int, folds: int, name: str
) -> None:
    data = Observations.of(trajectories(smooth, n=n))
    assert_refused(
        lambda: fit_value_function(data, [QuadraticLearner()], folds=folds), ValueFunctionError, name, folds, "folds"
    )
