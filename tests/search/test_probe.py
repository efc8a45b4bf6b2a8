"""What a model says without a query: scales and directions in closed form, on models that are linear in phi."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers.tensors import rand
from metricopt_ext.adapters.attach import attach_film, attach_input_bias
from metricopt_ext.search.probe import (
    DIRECTIONS,
    GRADIENTS,
    MOVEMENT,
    SCALES,
    movement,
    probe,
)
from metricopt_ext.tasks.metric import Metric
from metricopt_ext.tasks.task import FinetuneTask
from metricopt_ext.utils.seeding import generator


class Linear(nn.Module):
    """Outputs ``base + gain * M phi`` for 5 examples, whatever phi: a model that is linear in phi."""

    def __init__(self, dim: int, gain: float) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 3).double()
        self.base, self.matrix, self.gain = rand(5, 2, seed=2), rand(5, 2, dim, seed=3), gain

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"logits": self.base + self.gain * self.matrix @ self.metricopt.value(), "names": ["a", "b"]}


def linear(gain: float, dim: int = 4) -> tuple[FinetuneTask, Linear]:
    model = Linear(dim, gain)

    def refuse(model: nn.Module) -> float:
        raise AssertionError("a query was spent")

    task = FinetuneTask(
        attach_input_bias(model, dim=dim),
        loss=lambda model, batch: ((model(batch)["logits"]) ** 2).mean(),
        batches=lambda seed, task, step: torch.zeros(2, dtype=torch.float64),
        metric=Metric(refuse, maximize=True),
        population=1,
    )
    return task, model


def directions(dim: int, seed: int) -> Tensor:
    return torch.randn(DIRECTIONS, dim, generator=generator(seed, "probe"), dtype=torch.float64)


# --- Movement ----------------------------------------------------------------------------------------------------


def test_movement_is_the_change_in_units_of_the_spread() -> None:
    still, change = rand(6, 3), rand(6, 3, seed=2)
    spread = math.sqrt(float(((still - still.mean(0)) ** 2).mean()))
    expected = math.sqrt(float((change**2).mean())) / spread
    assert movement([still], [still + change]) == pytest.approx(expected, rel=1e-12)
    assert movement([still], [still]) == 0
    number = torch.tensor([[-4.0]], dtype=torch.float64)
    assert movement([number], [number + 1]) == 0.25
    assert movement([still, number], [still + change, number + 1]) == pytest.approx((expected + 0.25) / 2, rel=1e-12)


def test_what_does_not_vary_or_changes_its_shape_says_nothing() -> None:
    same, still, empty = torch.ones(4, 2), rand(6, 3), torch.zeros(0, 4)
    assert movement([same], [same + 1]) == math.inf
    assert movement([still, same], [still[:5], same]) == math.inf
    assert movement([empty], [empty]) == math.inf
    assert movement([still, same, empty], [2 * still, same + 1, empty]) == movement([still], [2 * still]) < math.inf


# --- The scale ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gain", [0.05, 1.0, 30.0])
@pytest.mark.parametrize("at", [0.0, 1.0])
def test_the_scale_is_the_largest_whose_movement_is_small(gain: float, at: float) -> None:
    """In closed form: a linear model moves by ``scale * gain * |M direction|``, the same from any start."""
    task, model = linear(gain)
    start = at * rand(4, seed=9)
    found = probe(task, start, seed=5)
    shaped = directions(4, 5) @ found.spectrum.root(1.0).T
    still = model.base + gain * model.matrix @ start
    spread = (still - still.mean(0)).square().mean().sqrt()
    moves = torch.stack([(gain * model.matrix @ each).square().mean().sqrt() / spread for each in shaped])
    median = float(moves.sort().values[(DIRECTIONS - 1) // 2])
    assert found.scale == max(scale for scale in SCALES if scale * median <= MOVEMENT)
    assert min(abs(scale * median / MOVEMENT - 1) for scale in SCALES) > 1e-6  # no near-tie


def test_a_loss_that_calls_no_forward_is_measured_itself(quadratic: Callable[..., Any]) -> None:
    task = quadratic(dim=6)
    found = probe(task, task.origin(), seed=2)
    shaped, batch = directions(6, 2) @ found.spectrum.root(1.0).T, task.batch(2, 0, 0)

    def loss(phi: Tensor) -> Tensor:
        return (task.curvature * (phi - task.centre - batch) ** 2).sum() / 2

    def median(scale: float) -> float:
        still = loss(task.origin())
        moves = torch.stack([(loss(scale * each) - still).abs() / still for each in shaped])
        return float(moves.sort().values[(DIRECTIONS - 1) // 2])

    at = SCALES.index(found.scale)
    assert median(SCALES[at]) <= MOVEMENT < median(SCALES[at - 1])
    assert task.queries == 0


def test_no_hook_stays_on_the_model_though_its_loss_fails() -> None:
    task, model = linear(1.0)
    before, listened = len(model._forward_hooks), []

    def failing(model: nn.Module, batch: Tensor) -> Tensor:
        listened.append(len(model._forward_hooks) > before)
        if sum(listened) == 2:
            raise RuntimeError("out of memory")
        loss: Tensor = model(batch)["logits"].square().mean()
        return loss

    task = replace(task, loss=failing)
    with pytest.raises(RuntimeError, match="out of memory"):
        probe(task, task.origin(), seed=0)
    assert len(model._forward_hooks) == before


# --- The spectrum ------------------------------------------------------------------------------------------------


def test_the_spectrum_is_that_of_a_quadratic_loss_in_closed_form(quadratic: Callable[..., Any]) -> None:
    """At random phi twice as far as outputs move little; which of the scales that is, outputs decide."""
    task, start = quadratic(dim=5), rand(5, seed=4)
    found = probe(task, start, seed=3).spectrum
    rebuilt = found.basis @ found.weights.diag() @ found.basis.T

    def mean(std: float) -> Tensor:
        total = torch.zeros(5, 5, dtype=torch.float64)
        for index in range(GRADIENTS):
            phi = start + task.starts(std, 3, [index])[0]
            gradient = task.curvature * (phi - task.centre - task.batch(3, index, 0))
            total += torch.outer(gradient, gradient) / (gradient @ gradient)
        return total / GRADIENTS

    assert sum(torch.allclose(rebuilt, mean(2 * scale), rtol=0, atol=1e-12) for scale in SCALES) == 1
    torch.testing.assert_close(found.basis.T @ found.basis, torch.eye(5, dtype=torch.float64), rtol=0, atol=1e-12)
    assert float(found.weights.sum()) == pytest.approx(1, rel=1e-12)
    assert found.weights.min() >= 0
    assert task.queries == 0


def test_a_flat_loss_knows_no_direction(quadratic: Callable[..., Any]) -> None:
    task = replace(quadratic(dim=4), loss=lambda model, batch: 0 * model.metricopt.value().sum() + 3)
    found = probe(task, task.origin(), 0)
    assert found.scale == SCALES[0]
    assert torch.equal(found.spectrum.root(1.0), torch.eye(4, dtype=torch.float64))


# --- What it leaves ----------------------------------------------------------------------------------------------


def test_without_a_loss_the_entropy_of_inputs_says_which_directions_matter() -> None:
    """It is what the entropy as a loss on these batches finds; without inputs all directions are alike."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 3)).double().eval()
    adapter = attach_film(model, dim=5)
    batches = torch.randn(60, 4, dtype=torch.float64).split(20)
    metric = Metric(lambda model: 0.0, maximize=True)
    task = FinetuneTask(adapter, metric=metric, inputs=batches)
    given = FinetuneTask(
        adapter,
        metric=metric,
        loss=lambda model, x: torch.distributions.Categorical(logits=model(x)).entropy().mean(),
        batches=lambda seed, index, step: batches[(seed + index + step) % 3],
        population=1,
    )
    found, expected = probe(task, task.origin(), 1), probe(given, given.origin(), 1)
    assert found.scale == expected.scale
    torch.testing.assert_close(found.spectrum.weights, expected.spectrum.weights, rtol=1e-6, atol=1e-9)
    alike = probe(FinetuneTask(adapter, metric=metric), task.origin(), 1).spectrum.weights
    assert float(alike.max()) == float(alike.min())
    assert float(found.spectrum.weights.max()) > 10 * float(found.spectrum.weights.min())
