"""Eq. 6 against its formula and what can divide by zero; both estimators of Eq. 7's gradient, and how they combine."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from helpers.tensors import rand
from metricopt_ext.methods.paper.joint import combine, gradient_samples, learned_objective

STD = 0.3


def positive(*shape: int, seed: int = 1) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 0.1


def metric_term(costs: Tensor) -> Tensor:
    """L_metric alone, as a loss that stays the same adds 0."""
    return learned_objective(costs, torch.ones_like(costs), 1.0)


def naive(costs: list[float], losses: list[float], weight: float, eps: float = 1e-3) -> float:
    steps, metric = len(costs) - 1, 0.0
    beta = steps / 2
    for t in range(1, steps + 1):
        t_best = min(range(t), key=lambda i: costs[i])
        metric += math.log(1 + math.exp(beta * (costs[t] - costs[t_best]) / costs[t]))
    loss = sum(math.log(losses[t] + eps) - math.log(losses[0] + eps) for t in range(1, steps + 1))
    return weight * metric / steps + loss / steps


def test_it_is_the_naive_formula() -> None:
    costs, losses = positive(2, 3, 9), positive(2, 3, 9, seed=2)
    values = learned_objective(costs, losses)
    assert values.shape == (2, 3)
    for i in range(2):
        for j in range(3):
            expected = naive(costs[i, j].tolist(), losses[i, j].tolist(), 50.0)
            assert float(values[i, j]) == pytest.approx(expected, rel=1e-12)


def test_gradients() -> None:
    """Both the later cost and the best before it are differentiated."""
    costs, losses = positive(7).requires_grad_(True), positive(7, seed=2).requires_grad_(True)
    assert torch.autograd.gradcheck(learned_objective, (costs, losses, 5.0))
    a, b, beta = 0.4, 0.5, 1 / 2
    pair = torch.tensor([a, b], dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(metric_term(pair), pair)
    chance = 1 / (1 + math.exp(-beta * (b - a) / b))
    torch.testing.assert_close(slope, torch.tensor([-chance * beta / b, chance * beta * a / b**2]).double())


@pytest.mark.parametrize("last", [0.0, -0.2, 1e-30])
def test_a_cost_of_zero_or_below_is_finite_and_good(last: float) -> None:
    costs = torch.tensor([0.3, last], dtype=torch.float64, requires_grad=True)
    value = metric_term(costs)
    (slope,) = torch.autograd.grad(value, costs)
    assert 0 <= value < 0.3
    assert slope.isfinite().all()
    worse = torch.tensor([last, 0.3], dtype=torch.float64)
    assert metric_term(worse) > 0.9


def test_losses_of_zero_or_below_are_finite() -> None:
    losses = torch.tensor([1.0, 0.0, -1.0], dtype=torch.float64, requires_grad=True)
    value = learned_objective(torch.ones(3), losses, 0.0)
    assert value.item() == pytest.approx(math.log(1e-3) - math.log(1.001))
    (slope,) = torch.autograd.grad(value, losses)
    assert slope.isfinite().all()


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
