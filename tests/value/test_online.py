"""Reptile on the fly against lines 5 and 7 written out."""

from copy import deepcopy
from dataclasses import replace

import pytest
import torch

from metricopt_ext.value.objective import Objective, regression_loss
from metricopt_ext.value.observations import Observations
from metricopt_ext.value.online import OnlineReptile
from metricopt_ext.value.reptile import SGD, ReptileLearner, export_weights

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


def test_one_task_by_sgd_as_printed() -> None:
    online = OnlineReptile(PLAIN, DIM, seed=1)
    data = [task(0)]
    for iteration in range(3):
        before = [weight.clone() for weight in online.meta_weights]
        naive = deepcopy(online.f)
        for parameter, weight in zip(naive.parameters(), before, strict=True):
            parameter.data.copy_(weight)
        naive.train().requires_grad_(True)
        new = data[-1]
        loss = 10 * regression_loss(naive(new.phi)[:, None], new.cost[:, None], new.sigma[:, None])
        slopes = torch.autograd.grad(loss, list(naive.parameters()))
        adapted = [weight - SGD.keywords["lr"] * slope for weight, slope in zip(before, slopes, strict=True)]

        online.adapt(Observations.joined(data), 1, iteration)
        for ours, theirs in zip(export_weights(online.f), adapted, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
        assert all(torch.equal(a, b) for a, b in zip(online.meta_weights, before, strict=True))
        online.update(0.25)
        for ours, old, new_weight in zip(online.meta_weights, before, adapted, strict=True):
            torch.testing.assert_close(ours, old + 0.25 * (new_weight - old), rtol=1e-4, atol=1e-6)
        data.append(task(iteration + 1))


def test_f_is_ready_to_be_followed() -> None:
    online = OnlineReptile(ReptileLearner(), DIM, seed=1)
    data = Observations.joined([task(i) for i in range(5)])
    online.adapt(data, 2, 0)
    f = online.f
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


def test_its_state_continues_bit_for_bit() -> None:
    one, two = (OnlineReptile(ReptileLearner(), DIM, seed=s) for s in (3, 4))
    data = [task(0), task(1)]
    one.adapt(Observations.joined(data), 2, 0)
    one.update(0.9)
    two.load_state_dict({name: value.clone() for name, value in one.state_dict().items()})
    two.seed = 3
    data.append(task(2))
    for online in (one, two):
        online.adapt(Observations.joined(data), 1, 1)
        online.update(0.5)
    assert torch.equal(one.f(data[0].phi), two.f(data[0].phi))
    assert all(torch.equal(a, b) for a, b in zip(one.meta_weights, two.meta_weights, strict=True))
