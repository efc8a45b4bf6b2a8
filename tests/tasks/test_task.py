"""Finetuning tasks: populations and gradients against hand-written references."""

import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from helpers.refusals import assert_named, assert_refused
from helpers.tensors import rand
from metricopt_ext.adapters.adapter import Adapter
from metricopt_ext.adapters.attach import attach_film, attach_input_bias
from metricopt_ext.adapters.signature import Outputs
from metricopt_ext.errors import AdapterError, MetricError
from metricopt_ext.tasks.batch_metric import BatchMetric
from metricopt_ext.tasks.batches import TensorBatches
from metricopt_ext.tasks.metric import Metric
from metricopt_ext.tasks.task import FinetuneTask, OutputLoss


def cross_entropy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y)


def classes(n: int, count: int = 3) -> Tensor:
    return torch.arange(n) % count


def mlp() -> tuple[Adapter, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    return attach_input_bias(model, dim=5), rand(30, 4)


def cnn() -> tuple[Adapter, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Softplus(), nn.Dropout(0.5), nn.Flatten(), nn.Linear(4 * 9, 3)
    ).double()
    model(rand(8, 2, 5, 5, seed=9))  # moves the running statistics
    return attach_film(model, dim=5), rand(30, 2, 5, 5)


def cnn_with_outputs() -> tuple[Adapter, Tensor]:
    adapter, x = cnn()
    return attach_film(adapter.remove(), "1", dim=1, outputs=Outputs(scale=2.0, temperature=True)), x


def attention() -> tuple[Adapter, Tensor]:
    torch.manual_seed(0)

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
            self.norm = nn.LayerNorm(4)
            self.head = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.norm(x + self.attention(x, x, x, need_weights=False)[0]).mean(1))

    return attach_film(Attention().double(), dim=5), rand(30, 3, 4)


def make_task(make: Callable[[], tuple[Adapter, Tensor]], population: int = 32, train: bool = True) -> FinetuneTask:
    adapter, x = make()
    adapter.model.train(train)
    return FinetuneTask(
        adapter,
        loss=cross_entropy,
        batches=TensorBatches(x, classes(len(x)), batch_size=6),
        metric=Metric(lambda: 0.0, maximize=True),
        population=population,
    )


# torch has no batching rule for its fast attention, and says so.
slow_attention = pytest.param(attention, marks=pytest.mark.filterwarnings("ignore:There is a performance drop"))
each_model = pytest.mark.parametrize("make", [mlp, cnn, cnn_with_outputs, slow_attention])


@each_model
@pytest.mark.parametrize("train", [True, False])
def test_population_equals_one_by_one(make: Callable[[], tuple[Adapter, Tensor]], train: bool) -> None:
    task, single = make_task(make, train=train), make_task(make, population=1, train=train)
    phi, indices = rand(5, 5, seed=2), [7, 3, 11, 0, 5]
    before = {key: value.clone() for key, value in task.adapter.model.state_dict().items()}
    loss, gradient = task.loss_and_gradient(phi, 0, indices, step=4)
    assert loss.shape == (5,)
    assert gradient.shape == (5, 5)
    assert not loss.requires_grad
    for row, index in enumerate(indices):
        for other in (task, single):
            one_loss, one_gradient = other.loss_and_gradient(phi[row : row + 1], 0, [index], step=4)
            torch.testing.assert_close(loss[row : row + 1], one_loss, rtol=1e-10, atol=1e-10)
            torch.testing.assert_close(gradient[row : row + 1], one_gradient, rtol=1e-10, atol=1e-10)
    assert all(torch.equal(before[key], value) for key, value in task.adapter.model.state_dict().items())
    assert task.adapter.phi.grad is None
    assert all(parameter.grad is None for parameter in task.adapter.model.parameters())


def test_one_population_s_batches_are_held_at_once(quadratic: Callable[..., Any]) -> None:
    task, events = quadratic(3, population=2), []

    def batches(*place: int) -> Tensor:
        events.append("batch")
        return task.problem.batch(*place)

    def loss(model: Any, batch: Tensor) -> Tensor:
        events.append("loss")  # vmap calls it once for a population
        return task.problem.loss(model, batch)

    watched = replace(task, batches=batches, loss=loss)
    events.clear()  # of the first batch, which is run at once
    phi = rand(5, 3)
    found = watched.loss_and_gradient(phi, 0, range(5), 0)
    assert events == ["batch", "batch", "loss"] * 2 + ["batch", "loss"]
    torch.testing.assert_close(found, task.loss_and_gradient(phi, 0, range(5), 0))


@pytest.mark.parametrize("population", [1, 2, 3])
def test_a_batch_is_held_once_and_no_longer_than_its_population(population: int, quadratic: Callable[..., Any]) -> None:
    """Batches that are stacked are gone as they were made; so a population takes as much memory as is counted."""
    task, alive, seen = quadratic(3, population=population), weakref.WeakSet[Tensor](), list[tuple[str, int]]()

    def batches(*place: int) -> Tensor:
        seen.append(("batch", len(alive)))
        alive.add(made := task.problem.batch(*place).clone())
        return made

    def loss(model: Any, batch: Tensor) -> Tensor:
        seen.append(("loss", len(alive)))
        return task.problem.loss(model, batch)

    watched = replace(task, batches=batches, loss=loss)
    seen.clear()
    phi = rand(6, 3)
    found = watched.loss_and_gradient(phi, 0, range(6), 0)
    assert seen == ([("batch", 0)] * population + [("loss", int(population == 1))]) * (6 // population)
    torch.testing.assert_close(found, task.loss_and_gradient(phi, 0, range(6), 0), rtol=0, atol=0)


@each_model
@pytest.mark.parametrize("population", [1, 2, 3, 7, 100])
def test_chunks_equal_the_whole(make: Callable[[], tuple[Adapter, Tensor]], population: int) -> None:
    phi, indices = rand(7, 5, seed=2), range(10, 17)
    whole = make_task(make, population=7).loss_and_gradient(phi, 1, indices, step=2)
    parts = make_task(make, population=population).loss_and_gradient(phi, 1, indices, step=2)
    torch.testing.assert_close(parts, whole, rtol=1e-12, atol=1e-12)


def mlp_by_hand(task: FinetuneTask, phi: Tensor, x: Tensor) -> Tensor:
    first, second = task.adapter.model[0], task.adapter.model[2]
    C = task.adapter.modulations()[0][1].C
    return torch.tanh(x @ first.weight.T + first.bias + C @ phi) @ second.weight.T + second.bias


def cnn_by_hand(task: FinetuneTask, phi: Tensor, x: Tensor) -> Tensor:
    conv, norm, _, _, _, head = list(task.adapter.model)[:6]
    film = task.adapter.modulations()[0][1]
    h = F.conv2d(x, conv.weight, conv.bias)
    h = (h - norm.running_mean[:, None, None]) / (norm.running_var[:, None, None] + norm.eps).sqrt()
    h = h * norm.weight[:, None, None] + norm.bias[:, None, None]
    h = h * (1 + film.A @ phi)[:, None, None] + (film.B @ phi)[:, None, None]
    return F.softplus(h).flatten(1) @ head.weight.T + head.bias


@pytest.mark.parametrize(("make", "by_hand"), [(mlp, mlp_by_hand), (cnn, cnn_by_hand)])
@pytest.mark.parametrize("population", [1, 4])
def test_loss_and_gradient_by_hand(make: Any, by_hand: Any, population: int) -> None:
    task = make_task(make, population=population)
    phi, indices = rand(4, 5, seed=2), [3, 9, 4, 1]
    loss, gradient = task.loss_and_gradient(phi, 5, indices, step=8)
    for row, index in enumerate(indices):
        x, y = task.batches(5, index, 8)
        point = phi[row].clone().requires_grad_(True)

        def reference(point: Tensor, x: Tensor = x, y: Tensor = y) -> Tensor:
            logits = by_hand(task, point, x)
            return (logits.logsumexp(1) - logits[torch.arange(len(y)), y]).mean()

        expected = reference(point)
        expected.backward()
        torch.testing.assert_close(loss[row], expected.detach(), rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(gradient[row], point.grad, rtol=1e-10, atol=1e-10)
        with torch.no_grad():
            step = 1e-6 * torch.eye(5).double()
            slopes = [(reference(phi[row] + e) - reference(phi[row] - e)) / 2e-6 for e in step]
        torch.testing.assert_close(gradient[row], torch.stack(slopes), rtol=1e-6, atol=1e-8)


def test_phi_given_may_need_gradients_already() -> None:
    task = make_task(mlp)
    phi = rand(2, 5).requires_grad_(True)
    _, gradient = task.loss_and_gradient(phi, 0, [0, 1], 0)
    assert phi.grad is None
    assert gradient.abs().min() > 0


@pytest.mark.parametrize("population", [1, 8])
def test_batches_of_dicts(population: int) -> None:
    adapter, _ = mlp()
    plain = make_task(mlp, population)

    def batches(seed: int, task: int, step: int) -> dict[str, Any]:
        inputs, labels = plain.batches(seed, task, step)
        return {"inputs": [inputs], "labels": labels}

    def loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
        return F.cross_entropy(model(batch["inputs"][0]), batch["labels"])

    task = FinetuneTask(adapter, loss=loss, batches=batches, metric=plain.metric, population=population)
    phi = rand(3, 5)
    torch.testing.assert_close(
        task.loss_and_gradient(phi, 0, [4, 5, 6], 1), plain.loss_and_gradient(phi, 0, [4, 5, 6], 1), rtol=0, atol=0
    )


def test_population_one_allows_control_flow() -> None:
    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        value = cross_entropy(model, batch)
        return value if value.item() > 0 else -value

    task, plain = make_task(mlp, population=1), make_task(mlp)
    task = replace(task, loss=loss)
    results = [each.loss_and_gradient(rand(3, 5), 0, range(3), 0) for each in (task, plain)]
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)


def by_control_flow(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    value = cross_entropy(model, batch)
    return value if value > 0 else -value


def with_dropout(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(F.dropout(model(batch[0]), 0.5), batch[1])


def ragged(seed: int, task: int, step: int) -> tuple[Tensor, Tensor]:
    return rand(4 + task, 4), classes(4 + task)


def named(seed: int, task: int, step: int) -> tuple[Tensor, Tensor, list[str]]:
    return rand(6, 4), classes(6), ["a.png"] * 6


@pytest.mark.parametrize(
    ("loss", "batches"),
    [
        (by_control_flow, None),
        (with_dropout, None),
        (lambda model, batch: torch.tensor(cross_entropy(model, batch).item()) * cross_entropy(model, batch), None),
        (cross_entropy, ragged),
        (lambda model, batch: cross_entropy(model, batch[:2]), named),
        (OutputLoss(lambda model, batch: F.dropout(model(batch[0])), lambda outputs, batch: outputs.sum()), None),
    ],
    ids=["control flow", "dropout", "item", "ragged batches", "names in a batch", "dropout in the outputs"],
)
def test_what_fails_for_several_phi_at_once_names_population_1(loss: Any, batches: Any) -> None:
    task = make_task(mlp)
    task = replace(task, loss=loss, batches=batches or task.batches)
    assert_refused(lambda: task.check_loss(0, 3), AdapterError, "torch.func.vmap", "population=1")
    assert task.adapter.context.override is None
    replace(task, population=1).check_loss(0, 3)
    task.check_loss(0, 1)


def test_an_error_of_one_phi_alone_is_its_own() -> None:
    def batches(seed: int, index: int, step: int) -> tuple[Tensor, Tensor]:
        return rand(6, 4), classes(6) + index  # the third class of the second task is none

    task = replace(make_task(mlp), batches=batches)
    assert_refused(lambda: task.check_loss(0, 3), IndexError, "Target", "3", "bounds")


class NoBackward(torch.autograd.Function):
    """Passes what it is given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()


@pytest.mark.parametrize("population", [1, 4])
def test_an_operation_without_a_backward_pass_names_a_search_that_needs_none(population: int) -> None:
    task = replace(
        make_task(mlp, population=population),
        loss=lambda model, batch: F.cross_entropy(NoBackward.apply(model(batch[0])), batch[1]),
    )
    assert_refused(lambda: task.check_loss(0, 3), AdapterError, "strategy=CMAES()")


@pytest.mark.filterwarnings("ignore")  # torch deprecates the function
@pytest.mark.parametrize("population", [1, 4])
def test_a_quantised_model_is_told_of_a_search_without_gradients(population: int) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 3))
    quantised = torch.ao.quantization.quantize_dynamic(model, {nn.Linear})
    task = FinetuneTask(
        attach_film(quantised, dim=3),
        loss=cross_entropy,
        batches=TensorBatches(rand(30, 4).float(), classes(30), batch_size=6),
        metric=Metric(lambda: 0.0, maximize=True),
        population=population,
    )
    assert_refused(lambda: task.check_loss(0, 3), AdapterError, "strategy=CMAES()")


# --- Starts --------------------------------------------------------------------------------------------------


def test_starts() -> None:
    task = make_task(mlp)
    starts = task.starts(0.2, 3, range(4000))
    assert starts.shape == (4000, 5)
    assert starts.dtype == torch.float64
    assert starts.std().item() == pytest.approx(0.2, rel=0.03)
    assert starts.mean().abs() < 0.01
    assert torch.equal(task.starts(0.2, 3, [17, 2]), starts[[17, 2]])
    assert not torch.allclose(task.starts(0.2, 4, [17, 2]), starts[[17, 2]])
    assert torch.equal(task.origin(), torch.zeros(5).double())
    assert task.dim == 5


# --- The metric ----------------------------------------------------------------------------------------------


def judged(read: Callable[[nn.Module], float]) -> FinetuneTask:
    adapter, x = mlp()
    return FinetuneTask(
        adapter,
        loss=cross_entropy,
        batches=TensorBatches(x, classes(30), 6),
        metric=Metric(read, maximize=False, bounds=None),
    )


X = rand(9, 4, seed=8)


@pytest.mark.parametrize(
    "read",
    [
        lambda model: model(X).sum().item(),
        lambda model: float(model.state_dict()["metricopt.phi"] @ torch.arange(5.0).double()),
        lambda model: sum(p.sum().item() for p in model.parameters()),
    ],
    ids=["output", "state dict", "parameters"],
)
def test_cost_judges_the_phi_given(read: Callable[[nn.Module], float]) -> None:
    task = judged(read)
    own, points = rand(5, seed=3), rand(4, 5, seed=4)
    expected = []
    for point in points:
        task.adapter.set_phi(point)
        expected.append(read(task.adapter.model))
    task.adapter.set_phi(own)
    assert len(set(expected)) == 4

    assert [task.cost(point, "one") for point in points] == expected
    costs = task.costs_at(points, "many")
    assert costs.dtype == torch.float64
    assert costs.tolist() == expected
    assert torch.equal(task.adapter.phi, own)
    assert task.metric.ledger.spent_on == {"one": 4, "many": 4}


def test_phi_is_restored_after_a_failure() -> None:
    seen: list[Tensor] = []

    def broken(model: Any) -> float:
        seen.append(model.metricopt.phi.clone())
        if len(seen) == 2:
            raise OSError("no space left")
        return 0.0

    task = judged(broken)
    own, points = rand(5, seed=3), rand(3, 5, seed=4)
    task.adapter.set_phi(own)
    length = f"{points[1].norm():.3g}"
    assert_refused(lambda: task.costs_at(points, "test", "round 3; "), MetricError, "no space", "3", "1", "phi", length)
    assert torch.equal(torch.stack(seen), points[:2])
    assert torch.equal(task.adapter.phi, own)
    assert task.adapter.phi.requires_grad


def test_judged_phi_of_another_dimension() -> None:
    task = judged(lambda model: 0.0)
    assert_refused(lambda: task.cost(torch.zeros(4), "test"), AdapterError, "(4,)")
    assert task.metric.ledger.spent == 0


# --- Refusals ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("population", [0, -1, 4.0, True])
def test_population_out_of_range(population: Any) -> None:
    assert_refused(lambda: make_task(mlp, population=population), ValueError, "population", population)


def test_a_model_without_numbers() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 4), nn.LayerNorm(4))
    metric = Metric(lambda model: 0.0, maximize=True)
    assert_refused(lambda: FinetuneTask(attach_film(model, dim=2), metric=metric), AdapterError, "Sequential", "device")


def test_a_data_loader_is_no_batches() -> None:
    adapter, x = mlp()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, classes(30)), 6)
    assert_refused(
        lambda: FinetuneTask(adapter, loss=cross_entropy, batches=loader, metric=Metric(lambda: 0.0, maximize=True)),
        TypeError,
        "batches",
        "batch_size",
    )


@pytest.mark.parametrize("population", [1, 4])
@pytest.mark.parametrize(
    ("loss", "names"),
    [
        (lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], reduction="none"), ("(6,)",)),
        (lambda model, batch: model(batch[0]).sum(0, keepdim=True), ("(1, 3)",)),
        (lambda model, batch: 0.5, ()),
    ],
)
def test_loss_must_be_a_scalar(loss: Any, names: tuple[str, ...], population: int) -> None:
    task = make_task(mlp, population=population)
    task = replace(task, loss=loss)
    assert_refused(lambda: task.loss_and_gradient(rand(2, 5), 0, [0, 1], 0), AdapterError, *names)
    assert task.adapter.context.override is None


TRAINABLE = nn.Parameter(torch.ones(3))


def error_rate(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (model(batch[0]).argmax(1) != batch[1]).double().mean()


@pytest.mark.parametrize("population", [1, 4])
@pytest.mark.parametrize(
    "loss",
    [
        error_rate,
        lambda model, batch: cross_entropy(model, batch).detach(),
        lambda model, batch: batch[0].sum(),
        lambda model, batch: TRAINABLE.sum(),
        OutputLoss(lambda model, batch: model(batch[0]), lambda outputs, batch: outputs.argmax(1).double().mean()),
    ],
    ids=["error rate", "detached", "data alone", "another parameter", "of outputs"],
)
def test_a_loss_without_a_gradient_in_phi_is_refused(loss: Any, population: int) -> None:
    task = replace(make_task(mlp, population=population), loss=loss)
    assert_refused(lambda: task.loss_and_gradient(rand(2, 5), 0, [0, 1], 0), AdapterError)


def test_a_loss_that_is_not_finite_before_the_first_step_is_no_matter_of_the_lr() -> None:
    task = replace(make_task(mlp), batches=lambda seed, task, step: (torch.zeros(0, 4).double(), classes(0)))
    assert_refused(lambda: task.loss_and_gradient(rand(1, 5), 0, [7], 0), FloatingPointError, "7")


@pytest.mark.parametrize(("bad", "slope"), [(-1.0, np.nan), (0.0, np.inf)])
@pytest.mark.parametrize("population", [1, 2, 4])
def test_gradient_that_is_not_finite(bad: float, slope: float, population: int) -> None:
    task = make_task(mlp, population=population)
    task = replace(task, loss=lambda model, batch: model.metricopt.value().sqrt().sum())
    phi = torch.ones(4, 5).double()
    _, gradient = task.loss_and_gradient(phi, 0, range(10, 14), 6)
    assert torch.equal(gradient, phi / 2)
    phi[2, 1] = bad
    np.testing.assert_equal(torch.autograd.functional.jacobian(torch.sqrt, phi[2, 1]).item(), slope)
    assert_refused(lambda: task.loss_and_gradient(phi, 0, range(10, 14), 6), FloatingPointError, "12", "6", "lr")


def hardest_half(outputs: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
    """A loss with control flow that depends on the data, which vmap can't take."""
    losses = F.cross_entropy(outputs["logits"], batch[1], reduction="none")
    hard = losses[losses > losses.median() + 1e-6]  # an example that was drawn twice is not above itself by rounding
    return hard.mean() if hard.sum().item() > 1 else losses.sum()


@each_model
def test_losses_of_outputs(make: Callable[[], tuple[Adapter, Tensor]]) -> None:
    calls = []

    def forward(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        calls.append(batch[0].shape)
        return {"logits": model(batch[0])}

    task, single = make_task(make, population=4), make_task(make, population=1)
    task = replace(task, loss=OutputLoss(forward, hardest_half))
    single = replace(single, loss=lambda model, batch: hardest_half({"logits": model(batch[0])}, batch))
    assert len(calls) == 1  # the first batch is run at once, and no more by the same task with another metric
    task = task.judged_by(task.metric)
    phi, indices = rand(9, 5, seed=2), range(9)
    loss, gradient = task.loss_and_gradient(phi, 0, indices, step=4)
    assert len(calls) == 1 + 3  # of 4, 4 and 1 tasks
    expected = single.loss_and_gradient(phi, 0, indices, step=4)
    torch.testing.assert_close((loss, gradient), expected, rtol=1e-10, atol=1e-10)
    assert loss.unique().numel() == 9


def test_losses_of_outputs_must_be_scalars() -> None:
    for population in (1, 2):
        task = make_task(mlp, population=population)
        task = replace(
            task, loss=OutputLoss(lambda model, batch: model(batch[0]), lambda outputs, batch: outputs.sum(dim=0))
        )
        with pytest.raises(AdapterError) as caught:
            task.loss_and_gradient(rand(2, 5), 0, [0, 1], step=0)
        assert_named(caught, "(3,)")


@pytest.mark.parametrize("population", [1, 2, 32])
def test_losses_and_gradients_can_be_differentiated_further(quadratic: Callable[..., Any], population: int) -> None:
    """With l = 1/2 sum_i h_i (phi_i - c_i - noise_i)^2: d/d phi of (l + |grad l|^2) is grad l + 2 h grad l."""
    task = quadratic(population=population)
    root = torch.randn(3, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64).requires_grad_(True)
    loss, gradient = task.loss_and_gradient(2 * root, 0, range(3), 1, differentiable=True)
    (slope,) = torch.autograd.grad(loss.sum() + gradient.square().sum(), root)
    plain_loss, plain = task.loss_and_gradient((2 * root).detach(), 0, range(3), 1)
    assert not plain.requires_grad
    assert torch.equal(loss.detach(), plain_loss)
    assert torch.equal(gradient.detach(), plain)
    torch.testing.assert_close(slope, 2 * (plain + 2 * task.curvature * plain), rtol=1e-12, atol=1e-12)
    fixed, _ = task.loss_and_gradient((2 * root).detach(), 0, range(3), 1, differentiable=True)
    assert torch.equal(fixed.detach(), plain_loss)  # of a phi that depends on nothing


# --- Inputs in place of a loss -----------------------------------------------------------------------------------


def classifying(**more: Any) -> FinetuneTask:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 6), nn.LayerNorm(6), nn.Linear(6, 3)).double().eval()
    return FinetuneTask(attach_film(model, dim=4), metric=Metric(lambda model: 0.0, maximize=True), **more)


def test_the_entropy_of_inputs_stands_in_for_a_loss_where_directions_are_looked_for() -> None:
    x = rand(20, 3, seed=3)
    task = classifying(inputs=x.split(5))
    assert (task.loss, task.batches) == (None, None)
    probing = task.probing()
    loss, gradient = probing.loss_and_gradient(rand(6, 4, seed=4), 0, range(6), 0)
    for index in range(6):
        phi = rand(6, 4, seed=4)[index].requires_grad_()
        with task.adapter.using(phi) as model:
            expected = torch.distributions.Categorical(logits=model(x[5 * (index % 4) :][:5])).entropy().mean()
        torch.testing.assert_close(loss[index], expected.detach())
        torch.testing.assert_close(gradient[index], torch.autograd.grad(expected, phi)[0])
    assert probing.probing() is probing
    assert classifying().probing().loss is None
    # it is no loss to follow
    assert_refused(lambda: task.loss_and_gradient(rand(6, 4, seed=4), 0, range(6), 0), AdapterError)
    other = classifying(inputs=(2 * x).split(5))
    assert task.first_loss(0) != other.first_loss(0)  # so runs on other inputs are told apart
    assert task.first_loss(0) == task.first_loss(0)


@pytest.mark.parametrize(
    ("more", "error", "names"),
    [
        ({"inputs": []}, ValueError, ("inputs",)),
        ({"inputs": torch.zeros(4, 3)}, ValueError, ()),
        (
            {"inputs": [torch.zeros(2, 3)], "gradients": torch.ones(1, 4)},
            ValueError,
            ("inputs", "gradients"),
        ),
        (
            {"inputs": [torch.zeros(2, 3)], "loss": lambda model, batch: 0.0, "batches": lambda *_: 0},
            ValueError,
            ("inputs", "loss"),
        ),
    ],
)
def test_what_are_no_inputs_is_refused(more: dict[str, Any], error: type[Exception], names: tuple[str, ...]) -> None:
    assert_refused(lambda: classifying(**more), error, *names)


def test_inputs_are_for_models_that_return_logits() -> None:
    class Boxes(nn.Sequential):
        def forward(self, x: Tensor) -> list[Tensor]:
            return [super().forward(x)]

    model = Boxes(nn.Linear(3, 6), nn.LayerNorm(6), nn.Linear(6, 3)).double()
    assert_refused(
        lambda: FinetuneTask(
            attach_film(model, dim=4), metric=Metric(lambda m: 0.0, maximize=True), inputs=[rand(2, 3, seed=1)]
        ),
        AdapterError,
    )


def test_an_adapter_and_a_metric_are_needed() -> None:
    model = nn.LayerNorm(3)
    assert_refused(
        lambda: FinetuneTask(model, metric=Metric(lambda: 0.5, maximize=True)),
        TypeError,
        "adapter",
        "LayerNorm",
        "attach_film(model)",
    )
    for other in (lambda model: 0.5, BatchMetric(lambda scores, labels: 0.5, maximize=True)):
        assert_refused(
            lambda other=other: FinetuneTask(attach_film(nn.LayerNorm(3), dim=2), metric=other),  # type: ignore[misc]
            TypeError,
            "metric",
            "Metric",
            "maximize=True",
        )


@pytest.mark.parametrize(
    ("loss", "names"),
    [
        (nn.CrossEntropyLoss(), ("CrossEntropyLoss()", "outputs", "loss=lambda")),
        (0.5, ("loss", "0.5")),
    ],
)
def test_a_loss_is_of_a_model_and_a_batch(loss: Any, names: tuple[str, ...]) -> None:
    metric = Metric(lambda: 0.5, maximize=True)
    assert_refused(
        lambda: FinetuneTask(
            attach_film(nn.LayerNorm(3), dim=2), loss=loss, batches=lambda *_: torch.ones(2, 3), metric=metric
        ),
        TypeError,
        *names,
    )
