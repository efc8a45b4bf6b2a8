"""A population that nobody has given: chosen by whether two phi can be computed together."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from helpers.refusals import assert_refused
from metricopt_ext.adapters.attach import attach_film
from metricopt_ext.errors import AdapterError
from metricopt_ext.tasks.metric import Metric
from metricopt_ext.tasks.task import FinetuneTask

METRIC = Metric(lambda: 0.0, maximize=True)


class Branching(nn.Module):
    """Control flow that depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.LayerNorm(6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return self.head(h if (h > 100).any() else h * 2)


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant: bool = False) -> None:
        super().__init__()
        self.norm, self.head, self.last = nn.LayerNorm(6), nn.Linear(6, 3), nn.LayerNorm(3)
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.head(checkpoint(self.norm, x, use_reentrant=self.use_reentrant)))


def cross_entropy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 3))


def numbers(seed: int, task: int, step: int, size: int = 8) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(100 * task + step)
    return torch.randn(size, 6, generator=rng), torch.arange(size) % 3


def ragged(seed: int, task: int, step: int) -> tuple[Tensor, Tensor]:
    """A batch of another size now and then, but not among the first two."""
    return numbers(seed, task, step, 8 - task // 2)


def made(model: nn.Module, batches: Any = numbers, attach: Any = attach_film, loss: Any = cross_entropy, **how: Any):
    return FinetuneTask(attach(model, **({"dim": 4} if attach is attach_film else {})), loss=loss, batches=batches,
                        metric=METRIC, **how)  # fmt: skip


def test_a_model_that_vmap_can_not_take_is_computed_one_by_one() -> None:
    torch.manual_seed(0)
    task = made(Branching())
    assert task.at_once == 1
    assert task.chosen.startswith("population 1: ")
    loss, gradient = task.loss_and_gradient(torch.zeros(3, task.dim), 0, [0, 1, 2], 0)
    given = replace(task, population=1).loss_and_gradient(torch.zeros(3, task.dim), 0, [0, 1, 2], 0)
    assert torch.equal(loss, given[0])
    assert torch.equal(gradient, given[1])


def test_gradient_checkpointing_gives_its_gradients() -> None:
    torch.manual_seed(0)
    task = made(Checkpointed())
    phi = 0.1 * torch.randn(5, task.dim)
    loss, gradient = task.loss_and_gradient(phi, 0, range(5), 0)
    model = task.adapter.model
    for row in range(5):
        own = phi[row].clone().requires_grad_(True)
        x, y = numbers(0, row, 0)
        with task.adapter.using(own):
            expected = F.cross_entropy(model.last(model.head(model.norm(x))), y)
        (slope,) = torch.autograd.grad(expected, own)
        torch.testing.assert_close(loss[row], expected.detach(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(gradient[row], slope, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("indices", [[0], [0, 1]])
def test_gradients_of_gradients_are_refused_under_checkpointing(indices: list[int]) -> None:
    """Their backward pass comes when another phi is in place: half of each gradient would be of that."""
    torch.manual_seed(0)
    task, phi = made(Checkpointed()), torch.full((len(indices), 4), 0.3)
    assert_refused(
        lambda: task.loss_and_gradient(phi, 0, indices, 0, differentiable=True), AdapterError, "Checkpointed"
    )
    again = task.loss_and_gradient(phi, 0, indices, 0)
    assert all(each.isfinite().all() for each in again)
    behind = made(Checkpointed(), attach=lambda model: attach_film(model, "last", dim=4))
    _, slope = behind.loss_and_gradient(phi, 0, indices, 0, differentiable=True)
    assert torch.equal(slope.detach(), behind.loss_and_gradient(phi, 0, indices, 0)[1])


def test_a_checkpoint_that_keeps_no_gradient_is_refused() -> None:
    """Of phi in the first norm there would be none, and of that in the last one there would."""
    assert_refused(
        lambda: made(Checkpointed(use_reentrant=True)), AdapterError, "use_reentrant=True", "use_reentrant=False"
    )


def test_a_loss_that_is_another_for_two_phi_at_once_is_computed_one_by_one() -> None:
    calls = []

    def loss(model: nn.Module, batch: Any) -> Tensor:
        calls.append(None)
        return cross_entropy(model, batch) * (1 + len(calls) % 2)

    task = made(mlp(), loss=loss)
    assert task.at_once == 1


def test_what_vmap_can_not_take_later_is_computed_one_by_one() -> None:
    late: list[bool] = []

    def loss(model: nn.Module, batch: Any) -> Tensor:
        value = cross_entropy(model, batch)
        return value * 2 if late and float(value.detach()) > 0 else value

    task = made(mlp(), loss=loss)
    assert task.at_once == 16
    assert task.chosen.startswith("population 16: ")
    late.append(True)
    phi = 0.1 * torch.randn(5, task.dim)
    for differentiable in (False, True):
        loss_of, slope = task.loss_and_gradient(phi, 0, range(5), 0, differentiable=differentiable)
        alone = replace(task, population=1).loss_and_gradient(phi, 0, range(5), 0)
        assert torch.equal(loss_of.detach(), alone[0])
        assert torch.equal(slope.detach(), alone[1])
    assert_refused(
        lambda: replace(task, population=5).loss_and_gradient(phi, 0, range(5), 0), AdapterError, "population=1"
    )


def test_batches_of_other_sizes_are_computed_one_by_one() -> None:
    task = made(mlp(), batches=ragged)
    assert task.at_once == 16
    phi = 0.1 * torch.randn(6, task.dim)
    loss, gradient = task.loss_and_gradient(phi, 0, range(6), 0)
    alone = replace(task, population=1).loss_and_gradient(phi, 0, range(6), 0)
    assert torch.equal(loss, alone[0])
    assert torch.equal(gradient, alone[1])
    first = made(mlp(), batches=lambda seed, task, step: numbers(seed, task, step, 8 - task))
    assert first.at_once == 1


def test_the_choice_leaves_model_and_streams_as_they_were() -> None:
    class Caching(Branching):
        def forward(self, x: Tensor) -> Tensor:
            self.last = x * 1
            return super().forward(x)

    model = Caching().train()
    before = {name: each.clone() for name, each in model.state_dict().items()}
    torch.manual_seed(7)
    task = made(model)
    drawn = torch.rand(3)
    torch.manual_seed(7)
    assert torch.equal(drawn, torch.rand(3))
    assert not torch._C._functorch.is_batchedtensor(model.last)
    assert model.training
    state = task.adapter.base_state_dict()
    assert all(torch.equal(before[name], state[name]) for name in before)
