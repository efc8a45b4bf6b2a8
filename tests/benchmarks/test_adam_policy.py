"""The step rule against torch's Adam, and against `MetricOpt` with Adam."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from adam_policy import AdamPolicy
from metricopt_ext.search.optimizer import LossStep, MetricOpt, MetricOptStep
from metricopt_ext.tasks.rollout import rollout
from metricopt_ext.value.value_function import RidgeValueFunction


def known_f(dim: int) -> RidgeValueFunction:
    f = RidgeValueFunction(dim).double()
    f.coefficients.copy_(torch.randn(2 * dim, 1, generator=torch.Generator().manual_seed(3)))
    f.radius.fill_(2.0)
    return f.eval()


def test_the_policy_without_f_is_adam(quadratic: Callable[..., Any]) -> None:
    task = quadratic(4)
    points, _ = rollout(task, task.origin()[None], AdamPolicy(LossStep(0.1)), steps=8, seed=0, indices=[0])
    phi = nn.Parameter(task.origin())
    theirs = torch.optim.Adam([phi], 0.1)
    for step in range(8):
        _, gradient = task.loss_and_gradient(phi[None], 0, [0], step)
        phi.grad = gradient[0]
        theirs.step()
        torch.testing.assert_close(points[0, step + 1], phi.detach(), rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("k", [1, 3])
def test_metricopt_with_adam_is_the_policy(quadratic: Callable[..., Any], k: int) -> None:
    task, f = quadratic(4), known_f(4)
    policy = AdamPolicy(MetricOptStep(f, 0.1, steps=8, even_untrusted=True))
    points, _ = rollout(task, task.origin()[None], policy, steps=8, seed=0, indices=[0], history=k)
    task.adapter.set_phi(task.origin())
    optimizer = MetricOpt(
        task.adapter.parameters(), f, lr=0.1, steps=8, history=k, even_untrusted=True, optimizer="adam"
    )
    for step in range(8):
        optimizer.zero_grad()
        task.loss(task.adapter.model, task.batches(0, 0, step)).backward()
        optimizer.step()
        torch.testing.assert_close(task.adapter.phi.detach(), points[0, step + 1], rtol=1e-11, atol=1e-13)
