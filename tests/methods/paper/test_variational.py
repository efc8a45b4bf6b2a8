"""Both estimators of Eq. 7's gradient against closed forms, and how they are combined."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from helpers.tensors import rand
from metricopt_ext.methods.paper.joint import combine, gradient_samples

STD = 0.3


@pytest.mark.parametrize(
    ("objective", "slope"),
    [
        (lambda w: (1.5 * w**2 - 2 * w).squeeze(-1), lambda w: 3 * w - 2),
        (lambda w: (w**3).squeeze(-1), lambda w: 3 * (w**2 + STD**2)),  # smoothing adds to it
        (lambda w: (w**4).squeeze(-1), lambda w: 4 * (w**3 + 3 * w * STD**2)),
    ],
    ids=["quadratic", "cubic", "quartic"],
)
@pytest.mark.parametrize("w", [-0.7, 0.0, 1.2])
def test_both_estimators_are_unbiased(
    objective: Callable[[Tensor], Tensor], slope: Callable[[float], float], w: float
) -> None:
    """Their expectations over z ~ N(0, 1), exact by Gauss-Hermite quadrature, are the smoothed objective's gradient."""
    nodes, shares = np.polynomial.hermite_e.hermegauss(12)
    shares = torch.from_numpy(shares / shares.sum())
    noise = torch.from_numpy(nodes)[:, None]
    for estimates in gradient_samples(objective, torch.tensor([w], dtype=torch.float64), noise, STD):
        assert float(shares @ estimates[:, 0]) == pytest.approx(slope(w), rel=1e-10, abs=1e-10)


def test_weights_are_inverse_variances_of_each_number() -> None:
    first, second = rand(6, 3) * torch.tensor([1.0, 0.1, 5.0]), 2 + rand(6, 3, seed=2)
    combined = combine(first, second)
    for i in range(3):
        a, b = first[:, i].numpy(), second[:, i].numpy()
        va, vb = np.var(a, ddof=1), np.var(b, ddof=1)
        expected = (a.mean() / va + b.mean() / vb) / (1 / va + 1 / vb)
        assert float(combined[i]) == pytest.approx(expected, rel=1e-12)


def test_certain_and_useless_estimates() -> None:
    certain, spread = torch.ones(4, 2), rand(4, 2)
    assert torch.equal(combine(certain, spread.float()), torch.ones(2))
    assert torch.equal(combine(certain, 3 * certain), torch.full((2,), 2.0))
    broken = spread.clone()
    broken[1, 0], broken[2, 0] = torch.inf, torch.nan
    combined = combine(broken, spread)
    assert float(combined[0]) == pytest.approx(float(spread[:, 0].mean()))
    assert combined.isfinite().all()


def test_without_a_derivative_the_score_function_is_all() -> None:
    noise = rand(5, 2)
    slopes, scores = gradient_samples(
        lambda w: w.detach().round().sum(-1), torch.ones(2), noise, STD, differentiate=False
    )
    assert torch.equal(combine(slopes, scores), scores.mean(0))
