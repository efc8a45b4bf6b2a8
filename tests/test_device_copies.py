"""What a step does without reading a tensor: on a device, each such read waits for all that was launched before it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import metricopt_ext as mo
from metricopt_ext.adapters.attach import attach_input_bias
from metricopt_ext.value.value_function import NeuralValueFunction

DIM = 6


def model(device: str = "cpu") -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)]
    return nn.Sequential(*layers).eval().to(device)


class Reads(TorchDispatchMode):
    """Counts numbers that are read from tensors, as by ``item``, ``bool`` or ``float``."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


def reads(call: Callable[[], Any]) -> int:
    """How often a call reads numbers of a tensor, or copies one to the CPU."""
    call()  # what is set up once
    with pytest.MonkeyPatch.context() as patch, Reads() as counted:
        for name in ("cpu", "numpy", "tolist"):
            patch.setattr(torch.Tensor, name, counting(getattr(torch.Tensor, name), counted))
        call()
    return counted.count


def counting(method: Any, counted: Reads) -> Any:
    def called(*arguments: Any, **options: Any) -> Any:
        counted.count += 1
        return method(*arguments, **options)

    return called


@pytest.mark.parametrize(
    "attach",
    [lambda host: mo.attach_film(host, dim=DIM), lambda host: attach_input_bias(host, dim=DIM)],
    ids=["film", "input bias"],
)
def test_adapters_attach_modulate_and_merge_without_numbers(attach: Any) -> None:
    host, x = model("meta"), torch.empty(2, 3, 8, 8, device="meta")
    adapter = attach(host)
    adapter.set_phi(torch.empty(DIM, device="meta"))
    adapter.model(x).sum().backward()
    assert (adapter.phi.device.type, adapter.phi.grad.shape) == ("meta", (DIM,))
    assert adapter.merge() is host
    assert host(x).shape == (2, 4)


def test_a_metric_step_reads_nothing() -> None:
    f = NeuralValueFunction(DIM, members=2)
    f.set_domain(torch.randn(50, DIM, generator=torch.Generator().manual_seed(0)))
    adapter = mo.attach_film(model(), dim=DIM)
    ours = mo.MetricOpt(adapter.parameters(), f.eval(), even_untrusted=True)
    x, before = torch.randn(2, 3, 8, 8), adapter.phi.detach().clone()

    def step() -> None:
        ours.zero_grad()
        adapter.model(x).logsumexp(1).sum().backward()
        ours.step()

    assert reads(step) == 0
    assert not torch.equal(adapter.phi.detach(), before)
    assert reads(lambda: float(adapter.phi.detach().sum())) == 1  # as it would be told
    assert reads(lambda: adapter.phi.detach().cpu()) == 1


def test_an_f_on_the_cpu_steers_a_phi_that_is_elsewhere() -> None:
    with FakeTensorMode():  # a GPU's tensors without one, and without their numbers
        phi = nn.Parameter(torch.empty(DIM, device="cuda"))
        f = NeuralValueFunction(DIM, members=2).eval()
        ours = mo.MetricOpt([phi], f, even_untrusted=True)
        for _ in range(2):
            phi.grad = torch.empty_like(phi)
            ours.step()
        kept = ours.state_dict()["state"][0]
        assert {each.device.type for each in (phi, kept["history"])} == {"cuda"}
        assert f.radius.device.type == "cpu"


@pytest.mark.parametrize("population", [1, 4])
def test_gradients_of_a_population_are_read_once_to_see_that_they_are_finite(population: int) -> None:
    batches = mo.TensorBatches(torch.randn(16, 3, 8, 8), torch.arange(16) % 4, 4)
    task = mo.FinetuneTask(
        mo.attach_film(model(), dim=DIM),
        loss=lambda host, batch: nn.functional.cross_entropy(host(batch[0]), batch[1]),
        batches=batches,
        metric=mo.Metric(lambda: 0.0, maximize=True),
        population=population,
    )
    tasks = list(range(population))
    phi = task.starts(0.2, 0, tasks)
    drawn = reads(lambda: [batches(0, each, 0) for each in tasks])
    assert reads(lambda: task.loss_and_gradient(phi, 0, tasks, 0)) == drawn + 1
