"""Adaptation of f to new tasks (Algorithm S1, line 5) against the formula written out."""

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from metricopt_ext.value.learning import Objective, regression_loss
from metricopt_ext.value.observations import Observations
from metricopt_ext.value.reptile import SGD, ReptileLearner
from metricopt_ext.value.value_function import NeuralValueFunction

DIM, POINTS = 3, 6
PLAIN = replace(ReptileLearner.paper(), objective=Objective(gamma=10.0, beta=0.0))


def task(index: int) -> Observations:
    """A walk, with a smooth cost."""
    phi = torch.randn(POINTS, DIM, generator=torch.Generator().manual_seed(index))
    nothing = torch.zeros(POINTS, dtype=torch.long)
    return Observations(
        phi=phi,
        cost=0.3 + 0.1 * torch.tanh(phi[:, 0]),
        sigma=torch.linspace(0.01, 0.03, POINTS),
        trajectory=nothing,
        round=nothing,
        progress=torch.linspace(0, 1, POINTS),
        observed=torch.ones(POINTS, dtype=torch.bool),
    )


def untrained() -> tuple[NeuralValueFunction, Tensor]:
    """A frozen f, and meta-weights that are not its own."""
    f, other = (NeuralValueFunction.drawn(DIM, 1, torch.Generator().manual_seed(seed)) for seed in range(2))
    return f.eval().requires_grad_(False), parameters_to_vector(other.parameters()).detach()


def test_one_task_by_sgd_as_printed() -> None:
    f, w = untrained()
    naive = deepcopy(f)
    vector_to_parameters(w.clone(), naive.parameters())
    naive.train().requires_grad_(True)
    new = task(1)
    loss = 10 * regression_loss(naive(new.phi)[:, None], new.cost[:, None], new.sigma[:, None])
    slopes = torch.cat([slope.flatten() for slope in torch.autograd.grad(loss, list(naive.parameters()))])
    before = w.clone()
    adapted = PLAIN.adapt(f, w, Observations.joined([task(0), new]), 1, torch.Generator())
    torch.testing.assert_close(adapted, w - SGD.keywords["lr"] * slopes, rtol=1e-4, atol=1e-6)
    assert torch.equal(parameters_to_vector(f.parameters()), adapted)
    assert torch.equal(w, before)


def test_f_is_ready_to_be_followed() -> None:
    f, w = untrained()
    data = Observations.joined([task(i) for i in range(5)])
    ReptileLearner().adapt(f, w, data, 2, torch.Generator())
    assert not f.training
    assert not any(parameter.requires_grad for parameter in f.parameters())
    assert float(f.cost_mean) == pytest.approx(float(data.cost.mean()))
    assert float(f.cost_std) == pytest.approx(float(data.cost.std()))
    assert f.radius.isfinite()
    h, layers = data.phi[:, None], list(zip(f.linears, f.norms, strict=True))
    for linear, norm in layers:  # as training mode computes on all points
        h = linear(h)
        h = torch.nn.functional.batch_norm(h.flatten(1), None, None, norm.weight, norm.bias, True).view_as(h).relu()
    torch.testing.assert_close(f(data.phi), f.predict(h).squeeze(1), rtol=1e-3, atol=1e-4)
