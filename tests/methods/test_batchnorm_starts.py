"""Starts of BatchNorm against what their papers' formulas come to when written down once more."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from helpers.refusals import assert_refused
from metricopt_ext.adapters.attach import attach_film
from metricopt_ext.adapters.start import PlacesOnLine, Start
from metricopt_ext.errors import AdapterError, DataError
from metricopt_ext.methods.batchnorm_starts import RATE, batchnorm_line, tent_start
from metricopt_ext.methods.starts import batchnorm_start
from metricopt_ext.tasks.metric import Metric
from metricopt_ext.tasks.task import FinetuneTask


def network(outputs: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.5), nn.Linear(6, outputs))
    with torch.no_grad():
        model[1].running_mean.uniform_(-1, 1)
        model[1].running_var.uniform_(0.5, 2)
        model[1].weight.uniform_(0.5, 2)
    return model.double().eval()


def task_of(model: nn.Module) -> FinetuneTask:
    return FinetuneTask(attach_film(model, dim=4), metric=Metric(lambda model: 0.0, maximize=True))


def inputs(parts: int = 4) -> list[Tensor]:
    x = torch.randn(80, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return list((2 * x + 1).chunk(parts))


def test_statistics_are_mixed_linearly_and_no_variance_is_below_both() -> None:
    task = task_of(network())
    line, end = batchnorm_line(task, inputs()), batchnorm_start(task, inputs())
    assert line is not None
    assert end is not None
    assert (line.low, line.high) == (0, 1)
    own = task.adapter.base_state_dict()
    for t in (0.0, 0.25, 0.75, 1.0):
        start = line.at(t)
        task.adapter.check(start)
        assert start.buffers.keys() == {"1.running_mean", "1.running_var"}
        assert not start.phi.any()
        for name, found in start.buffers.items():
            expected = (1 - t) * own[name] + t * end.buffers[name]
            torch.testing.assert_close(found, expected, rtol=1e-14, atol=1e-14)
            assert bool((found >= torch.minimum(own[name], end.buffers[name])).all())
        assert line.at(t).digest == start.digest
    places = PlacesOnLine(line, own)
    assert places.of(Start(task.origin())) == 0
    assert places.of(end) == 1
    assert places.of(line.at(0.3)) == pytest.approx(0.3, abs=1e-6)
    assert places.of(Start(task.origin() + 1e-3, end.buffers)) is None


def test_a_model_without_batchnorm_has_neither() -> None:
    model = nn.Sequential(nn.Linear(5, 6), nn.LayerNorm(6), nn.Linear(6, 3)).double()
    task = task_of(model)
    assert batchnorm_line(task, inputs()) is None
    assert tent_start(task, inputs()) is None


def reference(model: nn.Sequential, batches: list[Tensor]) -> tuple[Tensor, Tensor]:
    """TENT of this one network, by Adam's formulas (Kingma and Ba, 2015, algorithm 1)."""
    first, norm, _, _, last = copy.deepcopy(model)
    values = [norm.weight.detach().clone(), norm.bias.detach().clone()]
    means, squares = [torch.zeros(6).double()] * 2, [torch.zeros(6).double()] * 2
    for step, batch in enumerate(batches, start=1):
        weight, bias = (each.clone().requires_grad_() for each in values)
        hidden = first(batch)
        unit = (hidden - hidden.mean(0)) / (hidden.var(0, unbiased=False) + norm.eps).sqrt()
        p = last(torch.tanh(weight * unit + bias)).softmax(1)
        gradients = torch.autograd.grad(-(p * p.log()).sum(1).mean(), (weight, bias))
        means = [0.9 * m + 0.1 * g for m, g in zip(means, gradients, strict=True)]
        squares = [0.999 * s + 0.001 * g**2 for s, g in zip(squares, gradients, strict=True)]
        values = [
            v - RATE * (m / (1 - 0.9**step)) / ((s / (1 - 0.999**step)).sqrt() + 1e-8)
            for v, m, s in zip(values, means, squares, strict=True)
        ]
    return values[0], values[1]


def test_tent_is_a_pass_of_adam_on_the_entropy_of_batch_statistics() -> None:
    task, batches = task_of(network()), inputs()
    before = {name: value.clone() for name, value in task.adapter.model.state_dict().items()}
    start = tent_start(task, iter(batches))
    assert start is not None
    weight, bias = reference(network(), batches)
    assert start.parameters.keys() == {"1.weight", "1.bias"}
    torch.testing.assert_close(start.parameters["1.weight"], weight, rtol=0, atol=1e-9)
    torch.testing.assert_close(start.parameters["1.bias"], bias, rtol=0, atol=1e-9)
    assert float((weight - network()[1].weight.detach()).abs().min()) > 1e-4  # it moved
    end = batchnorm_start(task, batches)
    assert end is not None
    torch.testing.assert_close(start.buffers["1.running_var"], end.buffers["1.running_var"])  # inputs' before the norm
    task.adapter.check(start)
    assert all(torch.equal(value, before[name]) for name, value in task.adapter.model.state_dict().items())
    assert not any(
        each.requires_grad for name, each in task.adapter.model.named_parameters() if "metricopt" not in name
    )


def entropy_at(task: FinetuneTask, start: Start) -> float:
    with task.adapter.applied(start) as model, torch.no_grad():
        return float(torch.distributions.Categorical(logits=model(torch.cat(inputs()))).entropy().mean())


def test_tent_lowers_the_entropy() -> None:
    task = task_of(network())
    tent, end = tent_start(task, inputs(16)), batchnorm_start(task, inputs(16))
    assert tent is not None
    assert end is not None
    assert entropy_at(task, tent) < entropy_at(task, end) - 1e-4


def test_tent_refuses_what_it_cannot_adapt_to() -> None:
    assert_refused(lambda: tent_start(task_of(network()), []), DataError, "x.split(100)")
    assert_refused(lambda: tent_start(task_of(network()), [inputs()[0], inputs()[0] * float("nan")]), DataError, "1")

    class Boxes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = network()

        def forward(self, x: Tensor) -> list[Tensor]:
            return [self.inner(x)]

    assert_refused(lambda: tent_start(task_of(Boxes().eval()), inputs()), AdapterError)


def test_the_line_and_tent_meet_on_one_model() -> None:
    """What a line does not replace stays that of the start that it is looked along from."""
    task = task_of(network())
    line, tent = batchnorm_line(task, inputs()), tent_start(task, inputs())
    assert line is not None
    assert tent is not None
    through = line.through(tent)
    start = through.at(0.5)
    assert start.parameters.keys() == tent.parameters.keys()
    assert torch.equal(start.buffers["1.running_mean"], line.at(0.5).buffers["1.running_mean"])
    with task.adapter.applied(start) as model:
        hidden = F.batch_norm(
            model[0](inputs()[0]),
            start.buffers["1.running_mean"],
            start.buffers["1.running_var"],
            start.parameters["1.weight"],
            start.parameters["1.bias"],
        )
        torch.testing.assert_close(model(inputs()[0]), model[4](torch.tanh(hidden)))
    assert PlacesOnLine(through, task.adapter.base_state_dict()).of(tent) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_tent_steps_in_single_precision(dtype: torch.dtype) -> None:
    """A step of 1e-3 is less than half precision can add to a scale of 1: only many of them show."""

    def scales(dtype: torch.dtype) -> Tensor:
        model = network().to(dtype)
        start = tent_start(task_of(model), [batch.to(dtype) for batch in inputs(16)])
        assert start is not None
        return start.parameters["1.weight"].double()

    moved = scales(torch.float64) - network()[1].weight.detach()
    found = scales(dtype) - network()[1].weight.detach()
    assert float(moved.abs().max()) > 0.01
    torch.testing.assert_close(found, moved, rtol=0, atol=0.012)  # a unit of bfloat16 near 2 is 0.0156


def test_half_precision_that_overflows_is_named() -> None:
    model = network().to(torch.float16)
    with torch.no_grad():
        model[4].weight.mul_(6e4)
    assert_refused(
        lambda: tent_start(task_of(model), [batch.to(torch.float16) for batch in inputs(4)]),
        DataError,
        "0",
        "torch.float16",
        "float32",
    )


def test_norms_without_statistics_have_none_to_replace() -> None:
    torch.manual_seed(0)
    model = (
        nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6, track_running_stats=False), nn.Linear(6, 3)).double().eval()
    )
    task = task_of(model)
    assert batchnorm_start(task, inputs()) is None
    start = tent_start(task, inputs())
    assert start is not None
    assert start.replaced.keys() == {"1.weight", "1.bias"}


def test_probabilities_are_no_logits() -> None:
    for last in (nn.Softmax(1), nn.Sequential(nn.Linear(3, 1), nn.Sigmoid())):
        with pytest.raises(AdapterError):
            tent_start(task_of(nn.Sequential(*network(), last.double())), inputs())
