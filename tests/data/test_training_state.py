"""What a killed training goes on from: to the same bits, from its own file alone, kept about once a minute."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers.refusals import assert_refused
from metricopt_ext.data import training_state
from metricopt_ext.data.training import train_supervised
from metricopt_ext.errors import FileFormatError
from metricopt_ext.runtime.progress import Callback
from metricopt_ext.tasks.batches import TensorBatches

STEPS = 12


class Told(Callback):
    def __init__(self) -> None:
        self.stages: list[str] = []

    def stage(self, description: str) -> None:
        self.stages.append(description)


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


def test_it_is_kept_once_a_minute_and_told_each_half_minute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds, kept, told = iter(range(0, 1000, 11)), [], Told()
    clock = SimpleNamespace(monotonic=lambda: float(next(seconds)))  # each step takes 11 seconds
    monkeypatch.setattr(training_state, "time", clock)
    monkeypatch.setattr(training_state, "write_tensors", lambda _, tensors, *__: kept.append(len(tensors["losses"])))
    Training(tmp_path / "t.safetensors", small_net(0)).train(callback=told)
    assert kept == [6, 12]
    assert told.stages == [f"train the model, {share}%" for share in (25, 50, 75, 100)]


class Ending(Callback):
    """Ends a training that has gone on for some seconds."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.seen: list[tuple[int, int, float]] = []

    def goes_on(self, taken: int, left: int, seconds: float) -> bool:
        self.seen.append((taken, left, seconds))
        return seconds < self.seconds


def test_a_callback_may_end_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds, ending = iter(range(0, 1000, 11)), Ending(30.0)
    monkeypatch.setattr(training_state, "time", SimpleNamespace(monotonic=lambda: float(next(seconds))))
    training = Training(None, small_net(0))
    training.train(callback=ending)
    assert training.taken == 3
    assert ending.seen == [(1, STEPS - 1, 11.0), (2, STEPS - 2, 22.0), (3, STEPS - 3, 33.0)]
    training.train()  # in full again
    assert training.taken == 3 + STEPS


def test_a_callback_that_lets_it_go_on_changes_nothing() -> None:
    training = Training(None, small_net(0))
    training.train(callback=Ending(600.0))
    assert training.taken == STEPS


def test_a_short_training_keeps_and_tells_nothing(tmp_path: Path) -> None:
    told = Told()
    Training(tmp_path / "t.safetensors", small_net(0)).train(callback=told)
    assert not list(tmp_path.iterdir())
    assert not told.stages
