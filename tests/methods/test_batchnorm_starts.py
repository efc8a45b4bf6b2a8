"""Starts of BatchNorm against what their papers' formulas come to when written down once more."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from metricopt_ext.adapters.attach import attach_film
from metricopt_ext.adapters.start import PlacesOnLine, Start
from metricopt_ext.methods.batchnorm_starts import batchnorm_line
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
    assert batchnorm_start(task, inputs()) is None


def test_the_line_and_another_start_meet_on_one_model() -> None:
    """What a line does not replace stays that of the start that it is looked along from."""
    task = task_of(network())
    line, end, norm = batchnorm_line(task, inputs()), batchnorm_start(task, inputs()), network()[1]
    assert line is not None
    assert end is not None
    moved = Start(
        task.origin(), end.buffers, {"1.weight": 1.1 * norm.weight.detach(), "1.bias": norm.bias.detach() - 0.1}
    )
    through = line.through(moved)
    start = through.at(0.5)
    assert start.parameters.keys() == moved.parameters.keys()
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
    assert PlacesOnLine(through, task.adapter.base_state_dict()).of(moved) == pytest.approx(1, abs=1e-6)


def test_norms_without_statistics_have_none_to_replace() -> None:
    torch.manual_seed(0)
    model = (
        nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6, track_running_stats=False), nn.Linear(6, 3)).double().eval()
    )
    task = task_of(model)
    assert batchnorm_start(task, inputs()) is None
