"""Finetuning tasks: populations and gradients against hand-written references."""

import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from helpers.refusals import assert_refused
from helpers.tensors import rand
from metricopt_ext.adapters.adapter import Adapter
from metricopt_ext.adapters.attach import attach_film, attach_input_bias
from metricopt_ext.adapters.signature import Outputs
from metricopt_ext.adapters.start import Start
from metricopt_ext.errors import AdapterError, MetricError
from metricopt_ext.tasks.batches import TensorBatches
from metricopt_ext.tasks.inputs import entropy, logits_of, refuse_probabilities
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
    parts = make_task(make, population=2, train=train).loss_and_gradient(phi, 0, indices, step=4)
    torch.testing.assert_close(parts, (loss, gradient), rtol=1e-12, atol=1e-12)
    assert all(torch.equal(before[key], value) for key, value in task.adapter.model.state_dict().items())
    assert task.adapter.phi.grad is None
    assert all(parameter.grad is None for parameter in task.adapter.model.parameters())


def mlp_by_hand(task: FinetuneTask, phi: Tensor, x: Tensor) -> Tensor:
    first, second = task.adapter.model[0], task.adapter.model[2]
    C = task.adapter.moves["0"].C
    return torch.tanh(x @ first.weight.T + first.bias + C @ phi) @ second.weight.T + second.bias


def cnn_by_hand(task: FinetuneTask, phi: Tensor, x: Tensor) -> Tensor:
    conv, norm, _, _, _, head = list(task.adapter.model)[:6]
    film = task.adapter.moves["1"]
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


def with_dropout(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(F.dropout(model(batch[0]), 0.5), batch[1])


def ragged(seed: int, task: int, step: int) -> tuple[Tensor, Tensor]:
    return rand(4 + task, 4), classes(4 + task)


@pytest.mark.parametrize(
    ("loss", "batches"),
    [
        (with_dropout, None),
        (lambda model, batch: torch.tensor(cross_entropy(model, batch).item()) * cross_entropy(model, batch), None),
        (cross_entropy, ragged),
    ],
    ids=["dropout", "item", "ragged batches"],
)
def test_what_fails_for_several_phi_at_once_names_population_1(loss: Any, batches: Any) -> None:
    task = make_task(mlp)
    task = replace(task, loss=loss, batches=batches or task.batches)
    assert_refused(lambda: task.check_loss(0, 3), AdapterError, "torch.func.vmap", "population=1")
    assert task.adapter.context.override is None
    replace(task, population=1).check_loss(0, 3)
    task.check_loss(0, 1)


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
        with task.adapter.applied(Start(point)):
            expected.append(read(task.adapter.model))
    task.adapter.set_phi(own)
    assert len(set(expected)) == 4

    assert [task.evaluate(point, "one").cost for point in points] == expected
    assert torch.equal(task.adapter.phi, own)
    assert task.metric.ledger.spent_on == {"one": 4}


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
    task.evaluate(points[0], "test")
    assert_refused(lambda: task.evaluate(points[1], "test", "point 1"), MetricError, "no space", "1", "phi", length)
    assert_refused(lambda: task.evaluate(torch.zeros(4), "test"), AdapterError, "(4,)")
    assert torch.equal(torch.stack(seen), points[:2])
    assert torch.equal(task.adapter.phi, own)
    assert task.adapter.phi.requires_grad


# --- Refusals ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "error", "names"),
    [
        ({"adapter": nn.LayerNorm(3)}, TypeError, ("adapter", "LayerNorm", "attach_film(model)")),
        ({"metric": lambda model: 0.5}, TypeError, ("metric", "Metric", "maximize=True")),
        ({"loss": nn.CrossEntropyLoss()}, TypeError, ("CrossEntropyLoss()", "outputs", "loss=lambda")),
        ({"batches": torch.utils.data.DataLoader(range(3))}, TypeError, ("batches", "batch_size")),
        ({"population": 0}, ValueError, ("population", "0")),
        ({"inputs": [torch.zeros(2, 3)]}, ValueError, ("inputs", "loss")),
    ],
)
def test_what_makes_no_task_is_refused(more: dict[str, Any], error: type[Exception], names: tuple[str, ...]) -> None:
    given = {
        "adapter": attach_film(nn.LayerNorm(3), dim=2),
        "metric": Metric(lambda: 0.5, maximize=True),
        "loss": cross_entropy,
        "batches": lambda *_: (torch.ones(2, 3), classes(2)),
        **more,
    }
    assert_refused(lambda: FinetuneTask(**given), error, *names)


@pytest.mark.parametrize("population", [1, 4])
@pytest.mark.parametrize(
    ("loss", "names"),
    [
        (lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], reduction="none"), ("(6,)",)),
        (OutputLoss(lambda model, batch: model(batch[0]), lambda outputs, batch: outputs.sum(dim=0)), ("(3,)",)),
        # And without a gradient in phi.
        (lambda model, batch: (model(batch[0]).argmax(1) != batch[1]).double().mean(), ()),
        (lambda model, batch: cross_entropy(model, batch).detach(), ()),
    ],
)
def test_a_loss_is_a_scalar_with_a_gradient(loss: Any, names: tuple[str, ...], population: int) -> None:
    task = replace(make_task(mlp, population=population), loss=loss)
    assert_refused(lambda: task.loss_and_gradient(rand(2, 5), 0, [0, 1], 0), AdapterError, *names)


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
    # The first batch is run at once, again where the layer of the logits is a guess, and no more for another metric.
    assert len(calls) == (checked := 2 if make is cnn_with_outputs else 1)
    task = task.judged_by(task.metric)
    phi, indices = rand(9, 5, seed=2), range(9)
    loss, gradient = task.loss_and_gradient(phi, 0, indices, step=4)
    assert len(calls) == checked + 3  # of 4, 4 and 1 tasks
    expected = single.loss_and_gradient(phi, 0, indices, step=4)
    torch.testing.assert_close((loss, gradient), expected, rtol=1e-10, atol=1e-10)
    assert loss.unique().numel() == 9


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


# --- Undone, inputs and the entropy of predictions -----------------------------------------------------------


@pytest.mark.parametrize(
    ("logits", "expected"),
    [
        (torch.zeros(3, 4), math.log(4)),
        (torch.log(torch.tensor([[0.5, 0.25, 0.25]])), 1.5 * math.log(2)),
        (torch.zeros(5), math.log(2)),  # one logit of two classes
        (torch.log(torch.tensor([3.0])), -0.75 * math.log(0.75) - 0.25 * math.log(0.25)),
        (torch.tensor([[0.0, 1000.0]]), 0.0),
        (torch.zeros(2, 3, 4, 5), math.log(3)),  # of pixels
    ],
)
def test_the_entropy_is_that_of_the_predicted_probabilities(logits: Tensor, expected: float) -> None:
    for output in (logits, {"out": logits}, {"logits": logits}, SimpleNamespace(logits=logits)):
        assert float(entropy(nn.Identity(), output)) == pytest.approx(expected, abs=1e-6)


def test_probabilities_are_refused_and_logits_are_not() -> None:
    logits = torch.randn(30, 4, generator=torch.Generator().manual_seed(0))
    for taken in (logits, logits.log_softmax(1), torch.rand(30, 4), logits[:, :1], torch.rand(5, 1), torch.zeros(0, 4)):
        refuse_probabilities(taken)
    for probabilities in (logits.softmax(1), logits.half().softmax(1), logits[:, :1].sigmoid()):
        assert_refused(lambda taken=probabilities: refuse_probabilities(taken), AdapterError)
    assert_refused(lambda: logits_of(torch.zeros(2, 3), 2), AdapterError, "3", "phi", "2")


@pytest.mark.parametrize(
    ("last", "refused"),
    [
        (lambda z: z.softmax(1), True),
        (lambda z: z.sigmoid(), True),  # of labels, or of two classes
        (lambda z: z[:, :1].sigmoid(), True),
        (lambda z: z[:, 0].sigmoid().double(), True),
        (lambda z: z.softmax(1)[:, 1], True),
        (lambda z: F.log_softmax(z, 1), False),
        (lambda z: 0.5 + 0.01 * z[:, 0], False),  # weak logits, as of a class that is little more frequent
        (lambda z: 0.3 + 0.01 * z, False),
    ],
)
def test_inputs_of_a_model_that_returns_probabilities(last: Any, refused: bool) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.norm, self.linear = nn.LayerNorm(3), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = last(self.linear(self.norm(x)))
            return found

    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    metric = Metric(lambda model: 0.5, maximize=True)
    make = lambda: FinetuneTask(attach_film(Model(), dim=2), metric=metric, inputs=[x])  # noqa: E731
    if refused:
        assert_refused(make, AdapterError, "probabilities", "logits")
    else:
        assert make().inputs is not None
