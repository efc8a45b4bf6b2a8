"""Both networks of a set and their derivatives, against autograd's of the layers written out."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from metricopt_ext.siblings.sl.set_loss import SetLoss
from metricopt_ext.siblings.sl.set_network import NETWORKS, SetNetwork


def weights_of(network: str, outputs: int = 1) -> list[Tensor]:
    torch.manual_seed(3)
    net = SetLoss(outputs, "mcr", network).double()  # type: ignore[arg-type]
    if net.norm is not None:
        nn.init.uniform_(net.norm.weight, 0.5, 2)
        nn.init.normal_(net.norm.bias)
    return [each.detach().requires_grad_() for each in net._weights()]


def examples(outputs: int = 1, size: int = 6) -> Tensor:
    rng = torch.Generator().manual_seed(4)
    return torch.randn(size, 2 * outputs, generator=rng, dtype=torch.float64).requires_grad_()


def written_out(inputs: Tensor, weights: list[Tensor]) -> Tensor:
    w1, b1, w2, b2, w3, b3, w4, b4, w5, b5, *norm = weights
    bend = torch.tanh if norm else F.leaky_relu
    hidden = bend(F.linear(inputs, w1, b1))
    if norm:
        variance = hidden.var(0, unbiased=False)
        hidden = (hidden - hidden.mean(0)) / (variance + 1e-3).sqrt() * norm[0] + norm[1]
    mean = bend(F.linear(hidden, w2, b2)).mean(0)
    output = F.linear(bend(F.linear(bend(F.linear(mean, w3, b3)), w4, b4)), w5, b5).squeeze()
    return F.leaky_relu(output, 0.2) if norm else output


@pytest.mark.parametrize("outputs", [1, 3])
@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("shift", [-3.0, 3.0])  # below and above the bend of the output
def test_values_and_all_derivatives_are_autograds(network: str, outputs: int, shift: float) -> None:
    inputs, weights = examples(outputs), weights_of(network, outputs)
    with torch.no_grad():
        weights[9] += shift
    ours, theirs = SetNetwork.apply(inputs, *weights), written_out(inputs, weights)
    assert ours.item() == pytest.approx(theirs.item(), abs=1e-13)
    assert ours.item() * shift > 0
    for a, b in zip(*(torch.autograd.grad(each, [inputs, *weights]) for each in (ours, theirs)), strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-13)
    frozen = [each.detach() for each in weights]
    (alone,) = torch.autograd.grad(SetNetwork.apply(inputs, *frozen), inputs)
    assert torch.allclose(alone, torch.autograd.grad(written_out(inputs, frozen), inputs)[0], rtol=0, atol=1e-13)
