"""Supervised training: its steps against Adam written out, what it leaves alone, and the batches it asks for."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers.tensors import rand
from metricopt_ext.data.training import train_supervised


def squares(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return ((model(batch[0]) - batch[1]) ** 2).mean()


def linear() -> nn.Linear:
    model = nn.Linear(3, 1).double()
    model.weight.data, model.bias.data = rand(1, 3, seed=5), rand(1, seed=6)
    return model


def one_cycle(step: int, steps: int, peak: float) -> tuple[float, float]:
    """Rate and momentum of a one-cycle schedule (Smith and Topin): up by a cosine for 30 % of the steps, then down."""
    top, last = 0.3 * steps - 1, steps - 1
    share = step / top if step <= top else (step - top) / (last - top)
    bend = (1 + math.cos(math.pi * share)) / 2  # from 1 to 0
    if step <= top:
        return peak + (peak / 25 - peak) * bend, 0.85 + (0.95 - 0.85) * bend
    least = peak / 25 / 1e4
    return least + (peak - least) * bend, 0.95 + (0.85 - 0.95) * bend


def test_steps_are_those_of_adam_under_a_one_cycle_schedule() -> None:
    model, steps, peak = linear(), 20, 0.1

    def batch_of(step: int) -> tuple[Tensor, Tensor]:
        return rand(8, 3, seed=100 + step), rand(8, 1, seed=200 + step)

    w = torch.cat([model.weight.detach().flatten(), model.bias.detach()])
    m, v = torch.zeros(4).double(), torch.zeros(4).double()
    for step in range(steps):
        x, y = batch_of(step)
        x = torch.cat([x, torch.ones(8, 1).double()], dim=1)
        gradient = 2 * x.T @ (x @ w - y.flatten()) / 8
        rate, momentum = one_cycle(step, steps, peak)
        m, v = momentum * m + (1 - momentum) * gradient, 0.999 * v + 0.001 * gradient**2
        mean = m / (1 - momentum ** (step + 1))  # torch's correction: as if the momentum had always been this one
        w = w - rate * mean / ((v / (1 - 0.999 ** (step + 1))).sqrt() + 1e-8)
    train_supervised(model, squares, lambda seed, task, step: batch_of(step), steps=steps, lr=peak, seed=0)
    trained = torch.cat([model.weight.detach().flatten(), model.bias.detach()])
    torch.testing.assert_close(trained, w, rtol=1e-9, atol=1e-9)


def test_it_comes_to_the_least_squares_solution() -> None:
    x, noise = rand(50, 3), rand(50, 1, seed=2)
    y = x @ torch.tensor([[1.0], [-2.0], [0.5]]).double() + 0.3 + 0.1 * noise
    model = linear()
    train_supervised(model, squares, lambda *address: (x, y), steps=1000, lr=0.05, seed=0)
    solution = torch.linalg.lstsq(torch.cat([x, torch.ones(50, 1).double()], dim=1), y).solution.flatten()
    torch.testing.assert_close(model.weight.detach().flatten(), solution[:3], atol=1e-3, rtol=0)
    torch.testing.assert_close(model.bias.detach(), solution[3:], atol=1e-3, rtol=0)


def test_what_is_frozen_stays_and_modes_are_those_of_training() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
    model[0].requires_grad_(False)
    frozen, free = model[0].weight.clone(), model[2].weight.detach().clone()
    modes: list[bool] = []

    def loss(model: nn.Module, batch: Any) -> Tensor:
        modes.append(model.training)
        return squares(model, batch)

    asked: list[tuple[int, int, int]] = []

    def batches(*address: int) -> tuple[Tensor, Tensor]:
        asked.append(address)  # type: ignore[arg-type]
        return rand(6, 3), rand(6, 1, seed=2)

    train_supervised(model.eval(), loss, batches, steps=4, lr=0.1, seed=7)
    assert asked == [(7, 0, step) for step in range(4)]
    assert modes == [True] * 4
    assert not any(module.training for module in model.modules())
    assert torch.equal(model[0].weight, frozen)
    assert not torch.equal(model[2].weight, free)
    assert model[1].running_mean.abs().max() > 0


@pytest.mark.parametrize("augment", [False, True])
def test_images_are_varied_by_seed_and_step_alone_where_asked(augment: bool) -> None:
    images, labels = torch.rand(5, 1, 8, 8), torch.zeros(5, 1)

    def seen_with(seed: int) -> list[Tensor]:
        torch.rand(1)  # the global stream is somewhere else each time
        seen: list[Tensor] = []

        def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
            seen.append(batch[0])
            return ((model(batch[0]) - batch[1]) ** 2).mean()

        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 1))
        train_supervised(model, loss, lambda *address: (images, labels), steps=3, lr=0.1, seed=seed, augment=augment)
        return seen

    one, same, other = seen_with(0), seen_with(0), seen_with(1)
    assert all(torch.equal(a, b) for a, b in zip(one, same, strict=True))
    assert torch.equal(one[0], images) is not augment
    assert torch.equal(one[0], one[1]) is not augment
    assert torch.equal(one[0], other[0]) is not augment
