"""Eq. 6 against its formula, its gradients against differences, and what can divide by zero."""

import math

import pytest
import torch
from torch import Tensor

from metricopt_ext.methods.paper.joint import learned_objective


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
