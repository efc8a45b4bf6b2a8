"""Trivial predictors against loops over folds with scikit-learn."""

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr
from sklearn.linear_model import LinearRegression, Ridge
from sklearn.preprocessing import PolynomialFeatures, StandardScaler
from torch import Tensor

from metricopt_ext.tasks.trajectory import Trajectory
from metricopt_ext.value.fitting import assign_folds, fit_value_function
from metricopt_ext.value.learners import RidgeLearner
from metricopt_ext.value.observations import Observations
from trivial import PENALTIES, trivial_predictors

FOLDS, STEPS = 3, 10


def trajectories(n: int = 24, dim: int = 3, seed: int = 0) -> list[Trajectory]:
    """Random walks; the cost is a product of coordinates, plus noise."""
    rng = torch.Generator().manual_seed(seed)
    made = []
    for index in range(n):
        phi = 0.2 * torch.randn(STEPS + 1, dim, generator=rng).cumsum(0)
        observed = torch.tensor([0, 4, 6, STEPS])
        cost = (phi[observed, 0] * phi[observed, 1]).double() + 0.01 * torch.randn(4, generator=rng).double()
        made.append(Trajectory(index % 3, index, phi, torch.rand(STEPS, generator=rng), observed, cost))
    return sorted(made, key=lambda t: t.round)


def test_predictors_are_those_of_a_loop_over_folds() -> None:
    data, items = Observations.of(trajectories()), trajectories()
    fold, used = assign_folds(data.trajectory, FOLDS, seed=5).numpy(), data.where_used().numpy()
    cost, phi = data.cost.double().numpy(), data.phi.double().numpy()
    assert set(np.bincount(fold)) == {32}  # eight trajectories of four points each
    loss = torch.cat([torch.cat([t.loss, t.loss[-1:]])[t.observed] for t in items]).double().numpy()
    predicted = {name: np.zeros(len(cost)) for name in ("constant", "step", "end_distance", "loss")}
    for member in range(FOLDS):
        seen, held_out = (fold != member) & used, fold == member
        on_policy = [i for i, t in enumerate(items) if t.round > 0 and (data.trajectory[seen] == i).any()]
        end = np.mean([items[i].phi[-1].double().numpy() for i in on_policy], axis=0)
        features = {
            "constant": np.zeros(len(cost)),
            "step": data.progress.numpy(),
            "end_distance": np.linalg.norm(phi - end, axis=1),
            "loss": loss,
        }
        for name, x in features.items():
            fitted = LinearRegression().fit(x[seen, None], cost[seen])
            predicted[name][held_out] = fitted.predict(x[held_out, None])
    found = trivial_predictors(items, folds=FOLDS, seed=5)
    for name, values in predicted.items():
        assert found[name].mae == pytest.approx(np.abs(values - cost)[used].mean(), rel=1e-4)
        assert found[name].spearman == pytest.approx(spearmanr(values[used], cost[used]).statistic, abs=1e-6)
        assert (found[name].points, found[name].trajectories) == (used.sum(), 16)


def test_the_diagonal_one_is_the_ridge_learners() -> None:
    items = trajectories()
    ridge = fit_value_function(Observations.of(items), [RidgeLearner()], folds=FOLDS, seed=5).f.quality
    found = trivial_predictors(items, folds=FOLDS, seed=5)["diagonal_quadratic"]
    assert ridge is not None
    assert (found.spearman, found.mae) == pytest.approx((ridge.spearman, ridge.mae), abs=1e-4)


def test_the_full_one_has_all_products_and_a_ridge_penalty() -> None:
    items = trajectories()
    data = Observations.of(items)
    fold, used = assign_folds(data.trajectory, FOLDS, seed=5), data.where_used()
    x = PolynomialFeatures(2, include_bias=False).fit_transform(data.phi.double().numpy())

    def held_out(penalty: float) -> Tensor:
        predicted = torch.zeros(len(x), dtype=torch.float64)
        for member in range(FOLDS):
            inside, outside = (fold != member).numpy(), (fold == member).numpy()
            scaler = StandardScaler().fit(x[inside])
            ridge = Ridge(alpha=penalty * inside.sum()).fit(scaler.transform(x[inside]), data.cost.double()[inside])
            predicted[outside] = torch.tensor(ridge.predict(scaler.transform(x[outside])))
        return predicted

    found = trivial_predictors(items, folds=FOLDS, seed=5)["full_quadratic"]
    possible = [float((held_out(penalty) - data.cost)[used].abs().mean()) for penalty in PENALTIES]
    assert min(possible) - 1e-4 <= found.mae <= sorted(possible)[2]


@pytest.mark.outcome
def test_products_are_learned_by_the_full_quadratic_alone() -> None:
    found = [trivial_predictors(trajectories(seed=seed), folds=FOLDS, seed=5) for seed in range(5)]
    assert np.mean([each["full_quadratic"].spearman for each in found]) > 0.9  # 0.995 ± 0.001
    assert np.mean([each["diagonal_quadratic"].spearman for each in found]) < 0.6  # -0.03 ± 0.02


def test_what_decides_is_found() -> None:
    items = [
        Trajectory(1, i, torch.zeros(STEPS + 1, 2), torch.arange(STEPS) * 1.0, t.observed, (t.observed**2).double())
        for i, t in enumerate(trajectories())
    ]
    found = trivial_predictors(items, folds=FOLDS)
    assert found["step"].spearman == pytest.approx(1)
    assert found["constant"].spearman <= 0
    assert found["constant"].mae > found["step"].mae
