"""A network at checkpoints of its training, against torch's plain loop."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers.refusals import assert_refused
from metricopt_ext.siblings.checkpoints import Checkpoints, train
from metricopt_ext.siblings.training import TrainingTask


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


def test_they_are_due_from_the_first_step_to_the_last_and_denser_at_first() -> None:
    assert Checkpoints(100, count=5).due() == [0, 6, 25, 56, 100]
    assert Checkpoints(7, count=2).due() == [0, 7]


@pytest.mark.parametrize("builds", [True, False])
def test_each_is_the_network_after_that_many_steps(builds: bool, training_task: Callable[..., TrainingTask]) -> None:
    task = training_task("model", dropout=0.0)
    if not builds:
        task = replace(task, build=None)
    before = state(task.model)
    found = []
    for model in Checkpoints(4, lr=0.02, count=3).models(task, 5):
        assert not any(module.training for module in model.modules())
        found.append(state(model))
    assert same(state(task.model), before)

    plain = task.build(5) if task.build else task.copied().model
    plain.train()
    optimizer = torch.optim.Adam(plain.parameters(), 0.02)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=4)
    expected = [state(plain)]
    for step in range(4):
        optimizer.zero_grad()
        task.loss(plain, task.batches(5, 0, step)).backward()
        optimizer.step()
        schedule.step()
        if step in (0, 3):
            expected.append(state(plain))
    assert len(found) == 3
    assert all(same(a, b) for a, b in zip(found, expected, strict=True))


def test_under_an_adapter_phi_alone_is_trained(training_task: Callable[..., TrainingTask]) -> None:
    task = replace(training_task("phi"), build=None)
    first, last = (state(model) for model in Checkpoints(3, lr=0.1, count=2).models(task, 0))
    assert {name for name in first if not torch.equal(first[name], last[name])} == {"metricopt.phi"}


def test_a_loss_that_is_no_longer_finite_stops_it(training_task: Callable[..., TrainingTask]) -> None:
    task = training_task("model")
    losses = train(task, lambda model, batch: model(batch[0]).sum() * float("nan"), steps=2, lr=0.1, seed=0)
    assert_refused(lambda: next(losses), FloatingPointError, "nan", "0")


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"steps": 0}, ("steps", "0", "1")),
        ({"count": 1}, ("count", "1", "2")),
        ({"lr": -1.0}, ("lr", "-1.0")),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], names: tuple[str, ...]) -> None:
    assert_refused(lambda: Checkpoints(**settings), ValueError, *names)
