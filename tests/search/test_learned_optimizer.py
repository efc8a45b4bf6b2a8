"""A learned update rule as a torch optimizer: the functional form, in any loop."""

import copy
import io
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers.refusals import assert_refused, having
from helpers.tensors import rand
from metricopt_ext.search.learned import BlindWarning, LearnedOptimizer, UpdateRule, unroll

D = 4


def make_rule(**options: Any) -> UpdateRule:
    rule = UpdateRule(hidden=5, step=0.1, seed=2, **options).double()
    rule.weights.data.copy_(0.4 * rand(len(rule.weights), seed=7))
    return rule


def test_it_is_the_functional_form(quadratic: Callable[..., Any]) -> None:
    task, rule, costs = quadratic(D), make_rule(), {0: 0.7, 3: 0.4}

    def cost_at(phi: Tensor, step: int) -> Tensor:
        return phi.new_tensor([costs[max(s for s in costs if s <= step)]])

    start = task.starts(0.3, 0, [7])
    points, _ = unroll(task, rule, start, cost_at, steps=6, seed=3, indices=[7])
    task.adapter.set_phi(start[0])
    optimizer = LearnedOptimizer(task.adapter.parameters(), rule)
    for step in range(6):
        if step in costs:
            optimizer.observe(cost=costs[step])
        optimizer.zero_grad()
        loss = task.loss(task.adapter.model, task.batches(3, 7, step))
        loss.backward()
        optimizer.observe(loss=loss.item())
        optimizer.step()
        torch.testing.assert_close(task.adapter.phi.detach(), points[0, step + 1], rtol=1e-12, atol=1e-13)


def follow(optimizer: LearnedOptimizer, phi: Tensor, steps: range) -> None:
    for step in steps:
        phi.grad = rand(D, seed=50 + step)
        optimizer.observe(loss=1.0 + 0.1 * step)
        optimizer.step()


@pytest.mark.parametrize("after", [0, 1, 4])
def test_state_dict_continues_bit_for_bit(after: int) -> None:
    rule, phi = make_rule(), nn.Parameter(rand(D))
    optimizer = LearnedOptimizer([phi], rule, lr=0.7)
    optimizer.observe(cost=0.4)
    follow(optimizer, phi, range(after))
    buffer = io.BytesIO()
    torch.save({"phi": phi.detach(), "optimizer": optimizer.state_dict()}, buffer)
    follow(optimizer, phi, range(after, 7))
    buffer.seek(0)
    saved = torch.load(buffer)
    resumed = nn.Parameter(saved["phi"])
    other = LearnedOptimizer([resumed], rule)
    other.load_state_dict(saved["optimizer"])
    follow(other, resumed, range(after, 7))
    assert torch.equal(phi, resumed)


def test_a_copy_has_its_rule_and_goes_on_alike() -> None:
    phi = nn.Parameter(rand(D))
    optimizer = LearnedOptimizer([phi], make_rule())
    optimizer.observe(cost=0.4)
    follow(optimizer, phi, range(3))
    other = copy.deepcopy(optimizer)
    (copied,) = other.param_groups[0]["params"]
    follow(optimizer, phi, range(3, 6))
    follow(other, copied, range(3, 6))
    assert copied is not phi
    assert torch.equal(copied, phi)


def test_what_does_not_fit_is_refused() -> None:
    phi = nn.Parameter(rand(D))
    assert_refused(
        lambda: LearnedOptimizer([phi], "rule.safetensors"), TypeError, "rule", "UpdateRule", "load_update_rule"
    )
    assert_refused(lambda: LearnedOptimizer([phi], make_rule(), lr=-1.0), ValueError, "lr", "-1.0")
    assert_refused(
        lambda: LearnedOptimizer([{"params": [phi]}, {"params": [nn.Parameter(rand(1))]}], make_rule()), ValueError, "2"
    )
    assert_refused(lambda: LearnedOptimizer([phi], make_rule()).observe(cost=math.nan), ValueError, "cost", "nan")


def test_a_rule_that_is_not_told_what_it_sees_says_so() -> None:
    phi, names = nn.Parameter(rand(D)), having("loss", "observe")
    optimizer = LearnedOptimizer([phi], make_rule())
    optimizer.observe(cost=0.4)
    phi.grad = rand(D)
    with pytest.warns(BlindWarning, match=names) as told:
        optimizer.step()
    assert told[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
        LearnedOptimizer([phi], make_rule(sees_loss=False, sees_metric=False)).step()
