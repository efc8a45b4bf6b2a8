"""What training scripts do besides: autocast, processes, averaged weights, accumulated gradients, compiled models."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import metricopt_ext as mo
from metricopt_ext.runtime.progress import Callback

D, STEPS = 4, 4

SETTING = """
import torch
import torch.nn.functional as F
from torch import nn
import metricopt_ext as mo
from metricopt_ext.value.value_function import NeuralValueFunction

def make_model():
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 8), nn.LayerNorm(8)]
    return nn.Sequential(*layers, nn.Linear(8, 3)).double()

def make_f():
    torch.manual_seed(5)
    f = NeuralValueFunction(4, 2).double()
    f.cost_std.fill_(10.0)
    f.radius.fill_(2.0)
    f.gradient_floor.fill_(0.1)
    return f.eval()

x = torch.randn(16, 1, 8, 8, generator=torch.Generator().manual_seed(1)).double()
y = torch.arange(16) % 3

def make_optimizer(adapter):
    return mo.MetricOpt(adapter.parameters(), make_f(), lr=0.2, steps=10, even_untrusted=True)

def follow(model, optimizer, parts, steps=4):
    for _ in range(steps):
        optimizer.zero_grad()
        for part in parts:
            (F.cross_entropy(model(x[part]), y[part]) / len(parts)).backward()
        optimizer.step()
"""
setting: dict[str, Any] = {}
exec(SETTING, setting)  # a launched script begins with it too
make_model: Callable[[], nn.Module] = setting["make_model"]
make_optimizer, follow = setting["make_optimizer"], setting["follow"]
X: Tensor = setting["x"]
Y: Tensor = setting["y"]
WHOLE = [slice(0, 16)]


def followed(wrap: Callable[[nn.Module], Any] = lambda model: model, parts: Any = WHOLE) -> Tensor:
    """Where phi is after some steps of MetricOpt through what a script made of the model."""
    adapter = mo.attach_film(make_model(), dim=D)
    follow(wrap(adapter.model), make_optimizer(adapter), parts)
    phi = adapter.phi.detach()
    assert float(phi.norm()) > 0.1
    return phi


def searched(forward: Callable[[nn.Module], Callable[[Tensor], Tensor]], **options: Any) -> tuple[Tensor, mo.Result]:
    """Where phi is after a search whose metric, a likelihood, is asked through what a script made of the model."""
    adapter = mo.attach_film(make_model(), dim=D)
    called = forward(adapter.model)
    task = mo.FinetuneTask(
        adapter,
        loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        batches=mo.TensorBatches(X, Y, batch_size=8),
        metric=mo.Metric(lambda: float(F.cross_entropy(called(X), Y)), maximize=False, bounds=None),
        **options,
    )
    run = mo.optimize_metric(task, queries=14, callback=Callback())
    return adapter.phi.detach(), run


def test_gradients_of_parts_add_up_to_those_of_the_batch() -> None:
    torch.testing.assert_close(followed(parts=[slice(0, 8), slice(8, 16)]), followed(), rtol=1e-10, atol=1e-12)


@pytest.mark.slow
def test_processes_follow_as_one_does(forked: Any, tmp_path: Path) -> None:
    script = f"""{SETTING}
import sys
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from metricopt_ext.runtime.distributed import left_in_order

@left_in_order()
def main():
    rank, world = dist.get_rank(), dist.get_world_size()
    adapter = mo.attach_film(make_model(), dim=4)
    model = DistributedDataParallel(adapter.model)
    follow(model, make_optimizer(adapter), [slice(rank * 16 // world, (rank + 1) * 16 // world)])
    torch.save([adapter.phi.detach(), adapter.merge()(x)], f"{{sys.argv[1]}}/{{rank}}.pt")

dist.init_process_group("gloo")
main()
"""
    for world in (1, 2):
        forked(script, world, str(tmp_path))
        phis, outputs = zip(*(torch.load(tmp_path / f"{rank}.pt") for rank in range(world)), strict=True)
        for phi in phis:
            torch.testing.assert_close(phi, followed(), rtol=1e-10, atol=1e-12)
        assert all(torch.equal(output, outputs[0]) for output in outputs)


@pytest.mark.parametrize("decay", [None, 0.9])
def test_an_averaged_model_has_the_average_phi(decay: float | None) -> None:
    adapter = mo.attach_film(make_model(), dim=D)
    averaged = AveragedModel(adapter.model, multi_avg_fn=None if decay is None else get_ema_multi_avg_fn(decay))
    optimizer, phis = make_optimizer(adapter), []
    for _ in range(STEPS):
        follow(adapter.model, optimizer, WHOLE, steps=1)
        averaged.update_parameters(adapter.model)
        phis.append(adapter.phi.detach().clone())
    expected = phis[0]
    for i, phi in enumerate(phis[1:], start=1):
        expected = expected + (phi - expected) * (1 / (i + 1) if decay is None else 1 - decay)
    theirs = mo.Adapter(averaged.module)
    torch.testing.assert_close(theirs.phi.detach(), expected, rtol=1e-12, atol=1e-12)
    adapter.set_phi(expected)
    torch.testing.assert_close(averaged(X), adapter.model(X), rtol=1e-12, atol=1e-12)
    merged = theirs.merge().eval()
    torch.testing.assert_close(merged(X), adapter.model(X).detach(), rtol=1e-10, atol=1e-10)
    make_model().load_state_dict(merged.state_dict())


def compiled(model: nn.Module) -> Any:
    return torch.compile(model, backend="aot_eager", fullgraph=True)


@pytest.mark.slow
def test_a_compiled_model_follows_phi() -> None:
    torch.testing.assert_close(followed(compiled), followed(), rtol=1e-10, atol=1e-12)


@pytest.mark.slow
def test_a_search_judges_a_compiled_model_at_each_phi() -> None:
    (phi, run), (expected, reference) = searched(compiled), searched(lambda model: model)
    torch.testing.assert_close(torch.tensor(run.costs), torch.tensor(reference.costs), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(phi, expected, rtol=1e-6, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("in_place", [False, True])
def test_what_was_compiled_before_attaching_is_compiled_anew(in_place: bool) -> None:
    model = make_model().eval()
    called = model if in_place else torch.compile(model, backend="aot_eager")
    if in_place:
        model.compile(backend="aot_eager")
    plain = called(X).detach()
    adapter = mo.attach_film(model, dim=D)
    torch.testing.assert_close(called(X).detach(), plain)
    for phi in (torch.ones(D).double(), -torch.ones(D).double()):
        adapter.set_phi(phi)
        expected = mo.Adapter(copy.deepcopy(make_attached(phi))).model(X).detach()
        torch.testing.assert_close(called(X).detach(), expected, rtol=1e-10, atol=1e-12)
    adapter.merge()
    torch.testing.assert_close(called(X).detach(), expected, rtol=1e-10, atol=1e-10)


def make_attached(phi: Tensor) -> nn.Module:
    adapter = mo.attach_film(make_model().eval(), dim=D)
    adapter.set_phi(phi)
    return adapter.model


def test_a_search_under_autocast_moves_phi_in_its_own_precision() -> None:
    """Loss and metric of a script that trains in bfloat16; the model's output is rounded, phi is not."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.cross_entropy(model(batch[0]), batch[1])

    adapter = mo.attach_film(make_model().float(), dim=D)
    task = mo.FinetuneTask(
        adapter,
        loss=loss,
        batches=mo.TensorBatches(X.float(), Y, batch_size=16),
        metric=mo.Metric(lambda model: float(loss(model, (X.float(), Y))), maximize=False, bounds=None),
    )
    point = 0.3 * torch.ones(1, D)
    _, rounded = task.loss_and_gradient(point, 0, [0], 0)
    with torch.autocast("cpu", enabled=False):
        exact = mo.FinetuneTask(
            adapter,
            loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
            batches=task.batches,
            metric=task.metric,
        ).loss_and_gradient(point, 0, [0], 0)[1]
    assert rounded.dtype == torch.float32
    assert float(F.cosine_similarity(rounded, exact)) > 0.98
    run = mo.optimize_metric(task, queries=14, callback=Callback())
    assert run.after < run.before
    assert adapter.phi.dtype == torch.float32
    assert adapter.phi.detach().bfloat16().float().ne(adapter.phi.detach()).any()
