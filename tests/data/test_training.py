"""Supervised training: its steps against Adam written out, its batches, and what a killed one goes on from."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers.refusals import assert_refused
from helpers.tensors import rand
from metricopt_ext.data import training_state
from metricopt_ext.data.training import train_supervised
from metricopt_ext.errors import FileFormatError
from metricopt_ext.runtime.progress import Callback
from metricopt_ext.tasks.batches import TensorBatches


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


STEPS = 12


def small_net(seed: int, width: int = 6) -> nn.Module:
    """A network with all that a training changes or draws: BatchNorm's statistics, dropout's masks, a frozen layer."""
    torch.manual_seed(seed)
    convolution = nn.Conv2d(1, 2, 3, padding=1).requires_grad_(False)
    return nn.Sequential(
        *(convolution, nn.BatchNorm2d(2), nn.Flatten(), nn.Dropout(0.5)),
        *(nn.Linear(128, width), nn.ReLU(), nn.Linear(width, 3)),
    )


class Training:
    """Trains the network; ``train(killed=n)`` is interrupted in step n."""

    def __init__(self, file: Path | None, model: nn.Module, **settings: Any) -> None:
        self.file, self.model, self.taken = file, model, 0
        self.settings = {"steps": STEPS, "lr": 0.05, "seed": 4, "augment": True, **settings}

    def train(self, killed: int = -1, callback: Callback | None = None) -> None:
        x = torch.randn(30, 1, 8, 8, generator=torch.Generator().manual_seed(0))

        def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
            if self.taken == killed:
                raise KeyboardInterrupt
            self.taken += 1
            return nn.functional.cross_entropy(model(batch[0]), batch[1])

        batches = TensorBatches(x, torch.arange(30) % 3, 10)
        train_supervised(self.model, loss, batches, **self.settings, checkpoint=self.file, callback=callback)


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_state, "KEEP_EVERY", 0.0)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("killed", [0, 1, 3, 7, STEPS - 1])
def test_a_killed_training_goes_on_to_the_same_bits(killed: int, tmp_path: Path) -> None:
    file = tmp_path / "t.safetensors"
    straight = Training(None, small_net(0))
    straight.train()
    with pytest.raises(KeyboardInterrupt):
        Training(file, small_net(0)).train(killed=killed)
    resumed = Training(file, small_net(0 if killed == 0 else 1))  # at 0 there is no file
    resumed.train()
    assert resumed.taken == STEPS - killed
    for name, value in straight.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[name]), name


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize(
    ("model", "settings", "names"),
    [
        (small_net(0), {"lr": 0.1}, ("t.safetensors", "0.05", "0.1")),
        (small_net(0), {"steps": 20}, ("steps", "12", "20")),
        (small_net(0, width=7), {}, ("t.safetensors",)),
    ],
)
def test_another_training_is_not_gone_on_from(
    model: nn.Module, settings: dict[str, Any], names: tuple[str, ...], tmp_path: Path
) -> None:
    with pytest.raises(KeyboardInterrupt):
        Training(tmp_path / "t.safetensors", small_net(0)).train(killed=5)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    other = Training(tmp_path / "t.safetensors", model, **settings)
    assert_refused(other.train, FileFormatError, *names)
    assert other.taken == 0
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
