"""Ridge regression against scikit-learn."""

import numpy as np
import pytest
import sklearn.linear_model
import sklearn.model_selection
import torch

from helpers.tensors import rand32
from metricopt_ext.value.ridge import best_penalty, ridge_path


@pytest.mark.parametrize(("n", "p"), [(40, 7), (12, 30), (20, 20)])
def test_ridge_paths_are_scikit_learns(n: int, p: int) -> None:
    x, y = rand32(n, p, seed=1).double() * 3 + 1, rand32(n, seed=2).double()
    penalties = [1e-4, 0.1, 10.0]
    scale = x.std(0).numpy()
    z = (x.numpy() - x.mean(0).numpy()) / scale
    for (coefficients, intercept), penalty in zip(ridge_path(x, y, penalties), penalties, strict=True):
        reference = sklearn.linear_model.Ridge(alpha=penalty * n).fit(z, y.numpy())
        np.testing.assert_allclose(coefficients.numpy(), reference.coef_ / scale, rtol=1e-6, atol=1e-9)
        np.testing.assert_allclose((x @ coefficients + intercept).numpy(), reference.predict(z), rtol=1e-6)


@pytest.mark.parametrize("noise", [0.0, 0.5, 5.0])
def test_the_best_penalty_errs_least_on_groups_left_out(noise: float) -> None:
    x, group = rand32(30, 5).double(), torch.arange(30) % 4
    y = x @ rand32(5, seed=2).double() + noise * rand32(30, seed=3).double()
    penalties = [10.0**e for e in range(-5, 3)]
    errors = []
    for penalty in penalties:
        error = 0.0
        for inside, outside in sklearn.model_selection.LeaveOneGroupOut().split(x, y, group):
            mean, std = x[inside].mean(0), x[inside].std(0)
            reference = sklearn.linear_model.Ridge(alpha=penalty * len(inside)).fit((x[inside] - mean) / std, y[inside])
            error += np.abs(reference.predict((x[outside] - mean) / std) - y[outside].numpy()).sum()
        errors.append(error)
    assert sorted(errors)[1] > 1.0001 * min(errors)  # no near-tie
    assert best_penalty(x, y, group, penalties) == penalties[int(np.argmin(errors))]


def test_a_feature_that_never_changes_gets_no_weight() -> None:
    x = torch.cat([rand32(20, 2).double(), torch.full((20, 1), 7.0).double()], dim=1)
    ((coefficients, intercept),) = ridge_path(x, 3 * x[:, 0] - x[:, 1] + 2, [1e-12])
    torch.testing.assert_close(coefficients, torch.tensor([3.0, -1.0, 0.0]).double(), rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(intercept, torch.tensor(2.0).double(), rtol=1e-8, atol=1e-8)
