"""A guided search as a whole job: starts, guard, other buffers and resuming, on tasks known in closed form."""

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from helpers.refusals import assert_refused
from metricopt_ext import (
    Adapter,
    Callback,
    FinetuneTask,
    Metric,
    Result,
    Start,
    attach_film,
    batchnorm_start,
    load_run,
    optimize_metric,
)
from metricopt_ext.errors import FileFormatError, MetricError
from metricopt_ext.methods.starts import line_between
from metricopt_ext.search.direct import RandomSearch

NEAR = {"near": 0.8, "far": -3.0}  # starts at so much of the goal


def guided(task: Any, *, queries: int = 30, **arguments: Any) -> Result:
    return optimize_metric(task, queries=queries, **{"callback": Callback(), **arguments})


def starts_of(task: Any, **shares: float) -> dict[str, Start]:
    return {name: Start(share * task.goal) for name, share in (shares or NEAR).items()}


class Normed:
    """A classifier whose BatchNorm statistics are wrong, and a metric that sees how far its outputs are."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.x = 3 * torch.randn(64, 5) + 1
        self.model = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 2)).eval()

    def task(self) -> FinetuneTask:
        adapter = attach_film(self.model, dim=3)
        task = FinetuneTask(
            adapter,
            loss=lambda model, batch: model(batch).square().mean(),
            batches=lambda seed, task, step: self.x[(task + step) % 8 :: 8],
            metric=Metric(self.metric, maximize=False, bounds=None, name="gap"),
        )
        self.start = batchnorm_start(task, self.x.split(16))
        return task

    def metric(self, model: nn.Module) -> float:
        """How far the statistics are from those of the inputs, and phi from 1."""
        off = (model[1].running_mean - model[0](self.x).mean(0)).abs().mean()
        return float(off + 0.1 * (model.metricopt.phi - 1).square().mean())


def test_starts_are_judged_first_and_the_search_begins_from_the_best(quadratic: Callable[..., Any]) -> None:
    task = quadratic()
    result = guided(task, starts=starts_of(task))
    points = [torch.zeros_like(task.goal), 0.8 * task.goal, -3.0 * task.goal]
    assert torch.equal(result.points[:3], torch.stack(points))
    assert result.starts == dict(zip(("start", "near", "far"), map(task.true_cost, points), strict=True))
    assert result.started_at == "near"
    assert result.queries == task.metric.ledger.spent_on == {"starts": 3, "search": 27}
    assert task.queries == 30
    around = result.points[3:7]
    torch.testing.assert_close(around.mean(0), points[1], rtol=0, atol=1e-12)  # pairs around where it began
    assert result.after <= result.starts["near"] < result.before


def test_a_search_that_finds_nothing_keeps_the_start_that_gained(quadratic: Callable[..., Any]) -> None:
    task = quadratic()
    result = guided(task, starts=starts_of(task, goal=1.0))
    assert (result.chosen, result.started_at, result.after) == ("goal", "goal", 0.0)
    assert torch.equal(task.adapter.phi, task.goal)


@pytest.mark.parametrize("gain", [True, False])
def test_batchnorm_statistics_stay_only_if_they_gain(gain: bool, tmp_path: Path) -> None:
    host = Normed()
    task = host.task()
    if not gain:
        metric = Metric(lambda model: 9 - host.metric(model), maximize=False, bounds=None, name="gap")
        task = task.judged_by(metric)
    before = {name: value.clone() for name, value in host.model.named_buffers()}
    result = guided(task, starts={"batchnorm": host.start}, output_dir=tmp_path)
    changed = {name for name, value in host.model.named_buffers() if not torch.equal(value, before[name])}
    assert result.started_at == ("batchnorm" if gain else "start")
    assert changed == (set(host.start.tensors) if gain else set())
    assert result.start_of(result.chosen).tensors.keys() == changed
    assert result.after == task.evaluate(task.adapter.phi.detach(), "check").value
    assert result.queries == {"starts": 2, "search": 28}
    assert len(result.points) == 28  # without the start of the other buffers, and the end


@pytest.mark.parametrize("agrees", [True, False])
def test_held_out_data_judge_each_candidate_with_its_buffers(agrees: bool) -> None:
    """The metric prefers BatchNorm statistics of the inputs; so do the held-out data, or those of the training."""
    host = Normed()
    task, trained = host.task(), host.model[1].running_mean.clone()

    def aside(model: Any) -> float:
        off = (model[1].running_mean - trained).abs().mean()
        return host.metric(model) if agrees else float(off + 0.1 * (model.metricopt.phi - 1).square().mean())

    holdout = Metric(aside, maximize=False, bounds=None, name="aside")
    result = guided(task, starts={"batchnorm": host.start}, holdout=holdout)
    assert list(result.holdout) == ["start", "batchnorm", "search"]
    assert result.chosen == ("search" if agrees else "start")
    assert torch.equal(host.model[1].running_mean, trained) != agrees
    assert not agrees or result.holdout["search"] == result.after


@pytest.mark.parametrize("kind", ["buffers", "parameters"])
def test_what_a_start_replaced_is_loaded_removed_and_resumed_with(kind: str, tmp_path: Path) -> None:
    host, fresh = Normed(), Normed()
    bare, task = copy.deepcopy(host.model.state_dict()), host.task()
    started = host.start
    if kind == "parameters":  # the same effect on the metric, by the layer before
        mean = host.model[0](host.x).mean(0).detach()
        started = Start(started.phi, {"0.bias": bare["0.bias"] - mean})
    first = guided(task, starts={"other": started}, output_dir=tmp_path)
    assert first.started_at == "other"
    assert first.chosen != "start"
    left = host.model(host.x)
    trained = fresh.model(host.x)
    again = load_run(fresh.model, tmp_path)
    assert torch.equal(fresh.model(host.x), left)
    assert (left - trained).abs().max() > 0.01
    twin = copy.deepcopy(fresh.model)
    for adapter in (again, Adapter(twin)):
        assert all(torch.equal(value, bare[name]) for name, value in adapter.remove().state_dict().items())
    resumed = guided(task, starts={"other": started}, output_dir=tmp_path, resume=True)  # the model as the run left it
    assert str(resumed) == str(first)
    assert torch.equal(resumed.points, first.points)
    assert torch.equal(host.model(host.x), left)
    assert all(torch.equal(value, bare[name]) for name, value in task.adapter.remove().state_dict().items())


def test_a_flat_metric_is_told(quadratic: Callable[..., Any], tmp_path: Path) -> None:
    task = quadratic()
    task = replace(task, metric=Metric(lambda: 0.25, maximize=False, name="constant"))
    result = guided(task, output_dir=tmp_path)
    assert (result.chosen, result.fit, result.before, result.after) == ("start", None, 0.25, 0.25)
    assert result.queries == task.metric.ledger.spent_on == {"starts": 1, "search": 28}
    assert "unguarded" in result.lines()[0]
    assert not (tmp_path / "value_function.safetensors").exists()


def test_a_search_from_a_line_is_of_the_model_there() -> None:
    """Its points are judged with the statistics of the line's best, in a model of their own."""
    normed = Normed()
    task = normed.task()
    line = line_between(Start(task.origin()), normed.start, task.adapter.base_state_dict())
    result = guided(task, queries=20, strategy=RandomSearch(), starts={"line": line})
    assert result.started_at == "line"
    assert result.strengths["line"] == pytest.approx(1, abs=0.05)
    start = result.candidates["line"]
    for point, cost in zip(result.points, result.costs, strict=True):
        with task.adapter.applied(replace(start, phi=point)) as model:
            assert normed.metric(model) == cost
    assert len({tuple(point.tolist()) for point in result.points}) > 10


# --- Kept work belongs to its point ------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", [b'{"format": 5, ', None, b"[]"])
def test_work_without_its_identity_is_refused(quadratic: Callable[..., Any], tmp_path: Path, damage: Any) -> None:
    optimize_metric(quadratic(), queries=24, seed=1, output_dir=tmp_path, callback=Callback())
    identity = tmp_path / "identity.json"
    identity.unlink() if damage is None else identity.write_bytes(damage)
    for seed in (1, 2):
        with pytest.raises(FileFormatError) as e:
            optimize_metric(quadratic(), queries=24, seed=seed, output_dir=tmp_path, resume=True, callback=Callback())
        assert "delete" not in str(e.value)


def test_a_loss_that_draws_without_a_seed_loses_no_query(quadratic: Callable[..., Any], tmp_path: Path) -> None:
    def unseeded() -> Any:
        task = quadratic()

        def loss(model: Any, batch: Any) -> Any:
            return task.problem.loss(model, batch) + torch.randn(4, dtype=torch.float64) @ model.metricopt.value()

        return replace(task, loss=loss, population=1)

    started, resumed, said = unseeded(), unseeded(), []
    started.problem.fail_after = 25
    assert_refused(
        lambda: optimize_metric(started, queries=40, output_dir=tmp_path, callback=Callback()), MetricError, "server"
    )

    class Saying(Callback):
        def say(self, line: str) -> None:
            said.append(line)

    result = optimize_metric(resumed, queries=40, output_dir=tmp_path, resume=True, callback=Saying())
    assert resumed.problem.queries == 15
    assert [resumed.true_cost(point) for point in result.points] == pytest.approx(list(result.costs), rel=1e-12)
    assert [line for line in said if "the search was told the kept ones" in line]
