"""Adam's direction against torch's, and as guide of a search."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from helpers.refusals import assert_refused
from metricopt_ext.search.adam import adam_direction
from metricopt_ext.search.optimizer import MetricOpt
from metricopt_ext.value.value_function import RidgeValueFunction


def test_it_is_torch_s() -> None:
    torch.manual_seed(0)
    gradients = torch.randn(9, 2, 4, dtype=torch.float64)
    phi = [nn.Parameter(torch.zeros(4, dtype=torch.float64)) for _ in range(2)]
    theirs = torch.optim.Adam(phi, 0.05)
    ours, memory = torch.zeros(2, 4, dtype=torch.float64), None
    for gradient in gradients:
        for parameter, own in zip(phi, gradient, strict=True):
            parameter.grad = own.clone()
        theirs.step()
        direction, memory = adam_direction(gradient, memory)
        ours = ours - 0.05 * direction
        torch.testing.assert_close(ours, torch.stack([p.detach() for p in phi]), rtol=1e-12, atol=1e-14)


def known_f(dim: int) -> RidgeValueFunction:
    f = RidgeValueFunction(dim).double()
    f.coefficients.copy_(torch.randn(2 * dim, 1, generator=torch.Generator().manual_seed(3)))
    f.radius.fill_(2.0)
    return f.eval()


def test_metricopt_with_adam_continues_bit_for_bit(quadratic: Callable[..., Any]) -> None:
    f, phi = known_f(4), nn.Parameter(torch.full((4,), 0.3, dtype=torch.float64))
    gradients = torch.randn(6, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    optimizer = MetricOpt([phi], f, even_untrusted=True, optimizer="adam")
    for gradient in gradients[:3]:
        phi.grad = gradient
        optimizer.step()
    resumed = nn.Parameter(phi.detach().clone())
    other = MetricOpt([resumed], f, even_untrusted=True)
    other.load_state_dict(optimizer.state_dict())
    for gradient in gradients[3:]:
        phi.grad, resumed.grad = gradient, gradient.clone()
        optimizer.step()
        other.step()
    assert torch.equal(phi, resumed)


def test_another_optimizer_is_refused() -> None:
    assert_refused(
        lambda: MetricOpt([nn.Parameter(torch.zeros(4))], known_f(4), even_untrusted=True, optimizer="rmsprop"),
        ValueError,
        "optimizer",
        "rmsprop",
        "sgd",
        "adam",
    )
