"""Value functions and when they are trusted, against plain networks and naive loops."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from helpers.quadratics import Quadratic
from helpers.tensors import rand, rand32
from metricopt_ext.value.value_function import NeuralValueFunction, Quality

GOOD = Quality(spearman=0.9, mae=0.01, constant_mae=0.1, points=100, trajectories=40, near_mae=0.01, headroom=0.1)


def neural(dim: int = 5, members: int = 3) -> NeuralValueFunction:
    """Make an untrained f with running statistics, affine weights and cost units of its own."""
    torch.manual_seed(0)
    f = NeuralValueFunction(dim, members)
    with torch.no_grad():
        for norm in f.norms:
            norm.weight.uniform_(0.5, 1.5)
            norm.bias.uniform_(-0.5, 0.5)
            norm.running_mean.uniform_(-0.5, 0.5)
            norm.running_var.uniform_(0.5, 1.5)
        f.cost_mean.fill_(0.4)
        f.cost_std.fill_(0.3)
    return f.eval()


def quadratic(dim: int = 5, members: int = 3) -> Quadratic:
    f = Quadratic(dim, members)
    f.coefficients.copy_(rand32(2 * dim, members, seed=3))
    f.intercept.copy_(rand32(members, seed=4))
    return f


each_kind = pytest.mark.parametrize("make", [neural, quadratic])


# --- The functions -------------------------------------------------------------------------------------------


def member_network(f: NeuralValueFunction, member: int) -> nn.Sequential:
    """Copy one member's weights into an ordinary network."""
    widths, layers = (f.dim, 64, 32, 32, 16), []
    for i in range(4):
        linear, norm = nn.Linear(widths[i], widths[i + 1]), nn.BatchNorm1d(widths[i + 1])
        mine = slice(member * widths[i + 1], (member + 1) * widths[i + 1])
        linear.weight.data, linear.bias.data = f.linears[i].weight.data[member].T, f.linears[i].bias.data[member]
        for name in ("weight", "bias", "running_mean", "running_var"):
            getattr(norm, name).data = getattr(f.norms[i], name).data[mine].clone()
        layers += [linear, norm, nn.ReLU()]
    head = nn.Linear(16, 1)
    head.weight.data, head.bias.data = f.head.weight.data[member].T, f.head.bias.data[member]
    return nn.Sequential(*layers, head).train(f.training)


@pytest.mark.parametrize("train", [False, True])
def test_a_member_is_an_ordinary_network(train: bool) -> None:
    f, phi = neural().train(train), rand32(20, 5)
    networks = [member_network(f, member) for member in range(3)]
    predicted = f.members(phi)
    assert predicted.shape == (20, 3)
    for member, network in enumerate(networks):
        expected = network(phi).squeeze(1) * 0.3 + 0.4
        torch.testing.assert_close(predicted[:, member], expected.double(), rtol=1e-4, atol=1e-5)
        for i in range(4):
            mine = f.norms[i].running_var.view(3, -1)[member]
            torch.testing.assert_close(mine, network[3 * i + 1].running_var, rtol=1e-4, atol=1e-5)
    assert len({round(p, 4) for p in predicted[0].tolist()}) == 3


@each_kind
@pytest.mark.parametrize("shape", [(), (1,), (6,), (2, 3), (0,)])
def test_f_is_the_mean_of_its_members(make: Any, shape: tuple[int, ...]) -> None:
    f, phi = make(), rand32(*shape, 5)
    assert f.members(phi).shape == (*shape, 3)
    assert f(phi).shape == shape
    for index in np.ndindex(*shape):
        one_by_one = f.members(phi[index])
        torch.testing.assert_close(f(phi)[index], one_by_one.sum() / 3, rtol=1e-4, atol=1e-5)


@each_kind
@pytest.mark.parametrize("shape", [(), (6,), (2, 3)])
def test_gradient_is_the_slope(make: Any, shape: tuple[int, ...]) -> None:
    f, phi = make().double(), rand(*shape, 5, dtype=torch.float64)
    with torch.no_grad():
        gradient = f.gradient(phi)
        steps = 1e-6 * torch.eye(5).double()
        slopes = torch.stack([(f(phi + e) - f(phi - e)) / 2e-6 for e in steps], -1)
    assert not gradient.requires_grad
    torch.testing.assert_close(gradient, slopes, rtol=1e-5, atol=1e-7)


# --- Quality -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spearman", "trajectories", "lower"),
    [(0.5, 28, 0.21681), (0.0, 103, -0.16303), (-0.5, 28, -0.70557), (0.9, 7, 0.57148), (0.9, 3, -1.0), (1.0, 0, -1.0)],
)
def test_confidence_bound(spearman: float, trajectories: int, lower: float) -> None:
    quality = replace(GOOD, spearman=spearman, trajectories=trajectories)
    assert quality.spearman_lower == pytest.approx(lower, abs=1e-5)


@pytest.mark.parametrize(
    ("change", "trusted"),
    [
        ({}, True),
        ({"spearman": 0.3}, True),
        ({"spearman": 0.25}, False),
        ({"trajectories": 3}, False),
        ({"mae": 0.1}, False),
        ({"mae": math.nan}, False),
    ],
)
def test_trust(change: dict[str, Any], trusted: bool) -> None:
    quality = replace(GOOD, **change)
    assert quality.trusted is trusted
    f = quadratic()
    assert not f.trusted
    f.quality = quality
    assert f.trusted is trusted
