"""Finetuning runs under an update rule: step by step, their derivatives, and what a population may not change."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from metricopt_ext.search.learned import UpdateRule, unroll


def make_rule() -> UpdateRule:
    rule = UpdateRule(hidden=3, step=0.1, seed=4).double()
    rng = torch.Generator().manual_seed(9)
    rule.weights.data.copy_(0.4 * torch.randn(len(rule.weights), generator=rng, dtype=torch.float64))
    return rule


def test_it_is_the_loop_of_algorithm_s1(quadratic: Callable[..., Any]) -> None:
    task, rule, told = quadratic(3), make_rule(), []

    def cost_at(phi: Tensor, step: int) -> Tensor:
        told.append(step)
        return phi.square().sum(-1)

    starts = task.starts(0.4, 0, [2, 5])
    points, losses = unroll(task, rule, starts, cost_at, steps=4, seed=1, indices=[2, 5])
    phi, memory = starts, None
    for step in range(4):
        assert torch.equal(points[:, step], phi)
        loss, gradient = task.loss_and_gradient(phi, 1, [2, 5], step)
        assert torch.equal(losses[:, step], loss)
        change, memory = rule.propose(phi, gradient, loss, phi.square().sum(-1), memory)
        phi = phi + change.detach()
    torch.testing.assert_close(points[:, 4], phi, rtol=1e-14, atol=1e-14)
    assert losses.shape == (2, 4)
    assert told == [0, 1, 2, 3, 4]
    assert not points.requires_grad
    assert task.queries == 0


@pytest.mark.parametrize("population", [1, 2])
def test_derivatives_in_the_weights_are_whole(quadratic: Callable[..., Any], population: int) -> None:
    """Through the loss gradients too, whose own slope the steps depend on."""
    task, rule = quadratic(3, population=population), make_rule()
    starts = task.starts(0.4, 0, [0, 1])
    weights = rule.weights.detach().expand(2, -1).clone()
    weights[1] += 0.1

    def value(w: Tensor, differentiable: bool = True) -> Tensor:
        points, losses = unroll(
            task,
            rule,
            starts,
            lambda phi, step: phi.exp().sum(-1),
            steps=3,
            seed=0,
            indices=[0, 1],
            weights=w,
            differentiable=differentiable,
        )
        return points.square().sum((1, 2)) + losses.sum(1)

    leaf = weights.clone().requires_grad_(True)
    (slope,) = torch.autograd.grad(value(leaf).sum(), leaf)
    for row, place in ((0, 0), (0, 11), (1, 5), (1, len(rule.weights) - 1)):
        moved = torch.zeros_like(weights)
        moved[row, place] = 1e-6
        with torch.no_grad():
            change = (value(weights + moved, False) - value(weights - moved, False)).sum() / 2e-6
        assert float(slope[row, place]) == pytest.approx(float(change), rel=1e-5, abs=1e-7)
    assert slope.count_nonzero() > len(rule.weights)
