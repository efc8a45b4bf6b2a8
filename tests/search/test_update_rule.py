"""The MLP of Eq. 5 against a naive implementation, its inputs at their edges, and its file."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from helpers.tensors import rand
from metricopt_ext.search.learned import FLOOR, LARGEST, UpdateRule, load_update_rule

D = 5
NAN = torch.tensor(math.nan, dtype=torch.float64)


def number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def make_rule(**options: object) -> UpdateRule:
    """A rule with weights of its own, none of them special."""
    rule = UpdateRule(hidden=4, step=0.03, **options).double()  # type: ignore[arg-type]
    rule.weights.data.copy_(0.4 * rand(len(rule.weights), seed=7))
    return rule


class Naive:
    """Eq. 5 for one phi, number by number, with the scaling that the docstring gives."""

    def __init__(self, rule: UpdateRule) -> None:
        self.rule, w = rule, rule.weights.detach().numpy()
        self.first = w[: 8 * rule.hidden].reshape(8, rule.hidden)
        self.second = w[8 * rule.hidden :].reshape(rule.hidden + 1, 2)
        self.mean: np.ndarray | None = None
        self.seen: dict[str, list[float]] = {"loss": [], "cost": []}

    def outputs(self, inputs: list[float]) -> np.ndarray:
        x = np.clip(np.array(inputs), -LARGEST, LARGEST)
        hidden = np.maximum(0, x @ self.first[:-1] + self.first[-1])
        return hidden @ self.second[:-1] + self.second[-1]

    def scalars(self, name: str, value: float, shown: bool) -> list[float]:
        past = self.seen[name]
        if math.isnan(value):
            return [0.0, 0.0]
        first = past[0] if past else value
        average = past[0] if past else value
        for each in past:
            average = 0.9 * average + 0.1 * each
        change = (value - average) / max(abs(average), FLOOR)
        past.append(value)
        return [value / max(abs(first), FLOOR), change] if shown else [0.0, 0.0]

    def step(self, phi: np.ndarray, gradient: np.ndarray, loss: float, cost: float) -> np.ndarray:
        rule = self.rule
        self.mean = gradient if self.mean is None else 0.9 * self.mean + 0.1 * gradient
        g, m = (v / np.sqrt(np.mean(v**2)) for v in (gradient, self.mean))
        scalars = self.scalars("loss", loss, rule.sees_loss) + self.scalars("cost", cost, rule.sees_metric)
        pairs = [self.outputs([g[i], m[i], phi[i], *scalars]) for i in range(len(phi))]
        return np.array([rule.step * math.exp(min(max(o, -LARGEST), LARGEST)) * u for o, u in pairs])


@pytest.mark.parametrize("options", [{}, {"sees_loss": False}, {"sees_metric": False}], ids=str)
def test_steps_are_the_naive_formula(options: dict[str, bool]) -> None:
    rule, memory, phi = make_rule(**options), None, 0.3 * rand(D)
    naive = Naive(rule)
    losses = [2.0, 1.5, 1.7, 0.4, 30.0]  # the last beyond the largest input
    costs = [math.nan, 0.5, 0.5, 0.2, 0.2]
    for step, (loss, cost) in enumerate(zip(losses, costs, strict=True)):
        gradient = rand(D, seed=20 + step)
        expected = naive.step(phi.numpy(), gradient.numpy(), loss, cost)
        change, memory = rule.propose(phi, gradient, number(loss), number(cost), memory)
        np.testing.assert_allclose(change.detach(), expected, rtol=1e-9, atol=1e-14)
        phi = phi + change.detach()


def test_a_population_may_have_weights_of_its_own() -> None:
    rule, n = make_rule(), 3
    weights = 0.4 * rand(n, len(rule.weights), seed=3)
    phi, gradient, loss, cost = rand(n, D), rand(n, D, seed=2), rand(n, seed=4).abs(), rand(n, seed=5).abs()
    together, memory = rule.propose(phi, gradient, loss, cost, None, weights)
    again, _ = rule.propose(phi, gradient, loss * 2, cost / 2, memory, weights)
    for row in range(n):
        alone = make_rule()
        alone.weights.data.copy_(weights[row])
        one, own = alone.propose(phi[row], gradient[row], loss[row], cost[row])
        torch.testing.assert_close(one, together[row], rtol=1e-12, atol=1e-14)
        two, _ = alone.propose(phi[row], gradient[row], loss[row] * 2, cost[row] / 2, own)
        torch.testing.assert_close(two, again[row], rtol=1e-12, atol=1e-14)


def test_what_divides_by_zero_is_held_back() -> None:
    rule, zero = make_rule(), torch.zeros((), dtype=torch.float64)
    weights = rule.weights.detach().clone().requires_grad_(True)
    phi, memory = torch.zeros(D, dtype=torch.float64), None
    for cost in (zero, zero + 0.3, -zero):
        change, memory = rule.propose(phi, torch.zeros(D, dtype=torch.float64), zero, cost, memory, weights)
        phi = phi + change
    (slope,) = torch.autograd.grad(phi.sum(), weights)
    assert phi.isfinite().all()
    assert slope.isfinite().all()


def test_unknown_values_leave_no_nan_in_gradients() -> None:
    rule = make_rule()
    cost = torch.tensor([0.5, math.nan], dtype=torch.float64, requires_grad=True)
    weights = rule.weights.detach().expand(2, -1).clone().requires_grad_(True)
    change, memory = rule.propose(rand(2, D), rand(2, D, seed=2), torch.ones(2), cost, None, weights)
    more, _ = rule.propose(rand(2, D), rand(2, D, seed=3), torch.ones(2), 2 * cost, memory, weights)
    slopes = torch.autograd.grad((change + more).square().sum(), [cost, weights])
    assert all(slope.isfinite().all() for slope in slopes)
    assert slopes[0][0] != 0
    assert slopes[0][1] == 0


def test_an_untrained_rule_goes_down_the_averaged_gradient() -> None:
    rule = UpdateRule(step=0.05).double()
    gradient, memory = rand(64, seed=2), None
    for _ in range(3):
        change, memory = rule.propose(torch.zeros(64).double(), gradient, NAN, NAN, memory)
    descent = -0.05 * gradient / gradient.square().mean().sqrt()
    assert torch.corrcoef(torch.stack([change.detach(), descent]))[0, 1] > 0.7
    assert 0.3 < change.norm() / descent.norm() < 3


def test_a_file_holds_the_rule_bit_for_bit(tmp_path: Path) -> None:
    rule = UpdateRule(hidden=3, step=0.07, sees_loss=False, seed=5).double()
    rule.save(tmp_path / "rule.safetensors")
    loaded = load_update_rule(tmp_path / "rule.safetensors")
    assert torch.equal(loaded.weights, rule.weights)
    assert not loaded.weights.requires_grad
    settings = [(each.hidden, each.step, each.sees_loss, each.sees_metric) for each in (loaded, rule)]
    assert settings == [(3, 0.07, False, True)] * 2
