"""Where a search may begin: starts of other buffers, and BatchNorm statistics against the inputs they come from."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers.refusals import assert_named, assert_refused
from metricopt_ext.adapters.attach import attach_film
from metricopt_ext.adapters.start import Start, StartLine
from metricopt_ext.errors import AdapterError, DataError
from metricopt_ext.methods.starts import (
    all_starts,
    batchnorm_start,
    best_start,
    has_batchnorm,
    reestimate_batchnorm,
    with_start,
)
from metricopt_ext.tasks.metric import Metric
from metricopt_ext.tasks.task import FinetuneTask


def task_of(model: nn.Module, metric: Callable[[nn.Module], float] | None = None) -> FinetuneTask:
    adapter = attach_film(model, dim=4)
    return FinetuneTask(
        adapter,
        loss=lambda model, batch: model(batch).square().mean(),
        batches=lambda seed, task, step: torch.ones(2, 3),
        metric=Metric(metric or (lambda model: float(model(torch.ones(2, 3)).sum())), maximize=True, bounds=None),
    )


def normed() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 2)).eval()


def buffers_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.named_buffers()}


# --- Starts ------------------------------------------------------------------------------------------------------


def test_a_start_without_buffers_has_the_same_task() -> None:
    task = task_of(normed())
    assert with_start(task, Start(torch.ones(4))) is task


def test_a_start_of_other_buffers_has_a_copy_of_the_model() -> None:
    task = task_of(normed())
    before, mean = buffers_of(task.adapter.model), torch.arange(5.0)
    other = with_start(task, Start(task.origin(), {"1.running_mean": mean}))
    changed = buffers_of(other.adapter.model)
    assert {name for name in before if not torch.equal(before[name], changed[name])} == {"1.running_mean"}
    assert torch.equal(changed["1.running_mean"], mean)
    assert all(torch.equal(value, before[name]) for name, value in task.adapter.model.named_buffers())
    assert other.metric.ledger is task.metric.ledger
    assert other.cost(task.origin(), "test") != task.cost(task.origin(), "test")


def test_phi_0_comes_first_and_all_are_copies() -> None:
    task, mean = task_of(normed()), torch.ones(5)
    task.adapter.set_phi(torch.full((4,), 0.5))
    found = all_starts(
        task, {"own": Start(task.adapter.phi), "bn": Start(torch.ones(4).double(), {"1.running_mean": mean})}
    )
    assert list(found) == ["start", "own", "bn"]
    task.adapter.set_phi(torch.full((4,), 7.0))
    mean.zero_()
    assert [start.phi.tolist() for start in found.values()] == [[0.0] * 4, [0.5] * 4, [1.0] * 4]
    assert not any(start.phi.requires_grad or start.phi.dtype != torch.float32 for start in found.values())
    assert found["bn"].buffers["1.running_mean"].tolist() == [1.0] * 5


@pytest.mark.parametrize("starts", [[Start(torch.zeros(4))], "a", {"a": torch.zeros(4)}, {1: None}, {"": None}])
def test_what_names_no_starts_is_refused(starts: Any) -> None:
    assert_refused(lambda: all_starts(task_of(normed()), starts), ValueError)


@pytest.mark.parametrize("name", ["start", "search"])
def test_a_name_that_is_taken_is_refused(name: str) -> None:
    assert_refused(lambda: all_starts(task_of(normed()), {name: Start(torch.zeros(4))}), ValueError, name)


@pytest.mark.parametrize(
    ("start", "names"),
    [
        (None, ("mine",)),
        (Start(torch.zeros(3)), ("mine", "(4,)")),
        (Start(torch.zeros(1, 4)), ("mine", "phi", "(1, 4)")),
        (Start(torch.tensor(0.0)), ("mine", "phi")),
        (Start(torch.tensor([0.0, math.nan, 0.0, 0.0])), ("mine", "phi", "nan")),
        (Start(torch.zeros(4), {"1.mean": torch.ones(5)}), ("1.mean",)),
        (
            Start(torch.zeros(4), {"1.running_mean": torch.ones(1)}),
            ("1.running_mean", "(5,)"),
        ),
        (
            Start(torch.zeros(4), {"1.running_mean": torch.full((5,), math.nan)}),
            ("mine", "1.running_mean", "NaN"),
        ),
        (
            Start(torch.zeros(4), {"1.running_var": torch.full((5,), -0.5)}),
            ("1.running_var", "-0.5"),
        ),
    ],
)
def test_what_does_not_fit_is_refused(start: Any, names: tuple[str, ...]) -> None:
    assert_refused(lambda: all_starts(task_of(normed()), {"mine": start}), AdapterError, *names)


def test_a_line_that_does_not_fit_is_refused_by_its_name() -> None:
    task = task_of(normed())
    assert_refused(
        lambda: all_starts(task, {"mine": StartLine(lambda t: None, 0.0, 1.0)}),
        AdapterError,
        "mine",
        "at(0.0)",
        "None",
        "Start",
    )
    assert_refused(
        lambda: all_starts(task, {"mine": StartLine(lambda t: Start(torch.full((3,), t)), 0.0, 1.0)}),
        AdapterError,
        "mine",
        "phi",
        "(3,)",
    )
    line = StartLine(lambda t: Start(torch.full((4,), t)), 0.0, 1.0)
    assert all_starts(task, {"mine": line})["mine"] is line


def test_a_model_has_batchnorm_or_not() -> None:
    assert has_batchnorm(normed())
    assert not has_batchnorm(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)))


def test_a_metric_that_knows_its_model_can_not_judge_a_copy() -> None:
    task = task_of(normed())
    blind = task.judged_by(Metric(lambda: 0.5, maximize=True, name="blind"))
    assert_refused(
        lambda: all_starts(blind, {"bn": Start(torch.zeros(4), {"1.running_mean": torch.ones(5)})}),
        AdapterError,
        "'bn'",
        "blind",
    )
    assert len(all_starts(blind, {"other": Start(torch.ones(4))})) == 2
    assert blind.metric.ledger.spent == 0


def test_a_start_of_other_parameters_has_a_copy_of_the_model() -> None:
    task, weight = task_of(normed()), torch.ones(2, 5)
    other = with_start(task, Start(task.origin(), {}, {"3.weight": weight}))
    assert torch.equal(other.adapter.model[3].weight, weight)
    assert not torch.equal(task.adapter.model[3].weight, weight)
    assert other.cost(task.origin(), "test") != task.cost(task.origin(), "test")


def test_a_start_is_of_the_base_whatever_the_model_holds() -> None:
    task = task_of(normed())
    start = Start(task.origin(), {"1.running_mean": torch.ones(5)})
    task.adapter.apply(start)
    assert with_start(task, start) is task
    bare = with_start(task, Start(task.origin()))
    assert torch.equal(bare.adapter.model[1].running_mean, torch.zeros(5))
    assert torch.equal(task.adapter.model[1].running_mean, torch.ones(5))


def test_a_batchnorm_start_is_the_model_with_other_statistics() -> None:
    task, x = task_of(normed()), 2 * torch.randn(40, 3, generator=torch.Generator().manual_seed(1)) + 1
    before = buffers_of(task.adapter.model)
    start = batchnorm_start(task, x.split(20))
    assert start is not None
    assert torch.equal(start.phi, task.origin())
    assert set(start.buffers) == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    assert all(torch.equal(value, before[name]) for name, value in task.adapter.model.named_buffers())
    expected = reestimate_batchnorm(task.adapter.model, x.split(20))
    assert expected is not None
    with torch.no_grad():
        found = with_start(task, start).adapter.model(x)
        torch.testing.assert_close(found, expected(x), rtol=0, atol=1e-6)
        assert (found - task.adapter.model(x)).abs().max() > 0.01


def test_a_model_without_batchnorm_has_no_such_start() -> None:
    task = task_of(nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5), nn.Linear(5, 2)))
    assert batchnorm_start(task, [torch.randn(4, 3)]) is None


# --- BatchNorm statistics ----------------------------------------------------------------------------------------


def statistics(norm: nn.Module) -> tuple[Tensor, Tensor]:
    return norm.running_mean, norm.running_var


@pytest.mark.parametrize("batches", [1, 4])
def test_batchnorm_statistics_are_those_of_the_inputs(batches: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5, momentum=0.3), nn.ReLU(), nn.Linear(5, 2)).eval()
    adapter = attach_film(model, dim=4)
    adapter.set_phi(torch.full((4,), 0.7))
    before = copy.deepcopy(model.state_dict())
    x = torch.randn(40, 3) * 2 + 1
    other = reestimate_batchnorm(model, x.split(40 // batches))
    with torch.no_grad():
        inputs = torch.nn.functional.linear(x, model[0].weight, model[0].bias).view(batches, -1, 5)
    mean, var = statistics(other[1])
    torch.testing.assert_close(mean, inputs.mean(1).mean(0))
    torch.testing.assert_close(var, inputs.var(1).mean(0))
    assert (mean - before["1.running_mean"]).abs().min() > 0.01
    assert not hasattr(other, "metricopt")  # the copy is the model without phi
    assert other[1].momentum == 0.3
    assert not any(module.training for module in other.modules())
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert torch.equal(adapter.phi, torch.full((4,), 0.7))
    with torch.no_grad():
        expected = model[3](torch.relu((inputs.flatten(0, 1) - mean) / (var + 1e-5).sqrt()))
    torch.testing.assert_close(other(x), expected, rtol=1e-4, atol=1e-5)


def test_batchnorm_statistics_of_images_and_of_a_model_in_training() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3)).train()
    x = torch.randn(6, 2, 8, 8)
    mean, var = statistics(reestimate_batchnorm(model, [x])[1])
    h = model[0](x).detach().movedim(1, 0).flatten(1)
    torch.testing.assert_close(mean, h.mean(1))
    torch.testing.assert_close(var, h.var(1))
    assert model.training
    assert int(model[1].num_batches_tracked) == 0


def test_batchnorm_statistics_are_taken_without_dropout_and_without_random_numbers() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Dropout(0.5), nn.BatchNorm1d(5))
    x, state = torch.randn(30, 3), torch.get_rng_state()
    mean, var = statistics(reestimate_batchnorm(model, [x])[2])
    torch.testing.assert_close(mean, model[0](x).detach().mean(0))
    torch.testing.assert_close(var, model[0](x).detach().var(0))
    assert torch.equal(torch.get_rng_state(), state)


def test_a_norm_that_no_input_reaches_keeps_its_statistics() -> None:
    class WithAuxiliaryHead(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.auxiliary = nn.BatchNorm1d(3), nn.BatchNorm1d(3)

        def forward(self, x: Tensor) -> Tensor:
            return self.auxiliary(x) if self.training else self.norm(x)

    model = WithAuxiliaryHead()
    model(torch.randn(20, 3) + 5)  # in training
    before = copy.deepcopy(model.auxiliary.state_dict())
    assert before["running_mean"].abs().min() > 0.1
    other = reestimate_batchnorm(model, [torch.randn(20, 3) - 2])
    assert all(torch.equal(value, before[name]) for name, value in other.auxiliary.state_dict().items())
    assert (other.norm.running_mean < -1).all()


def test_statistics_of_nothing_or_of_examples_with_labels_are_refused() -> None:
    task, x = task_of(normed()), torch.randn(40, 3)
    batches = iter(x.split(20))
    list(batches)
    for wrong, names in (
        (batches, ()),
        (x, ("0", "(3,)", "x.split(100)")),
        ([x, (x, torch.ones(40))], ("1",)),
        ([x, x[:0]], ("1",)),
        (None, ("inputs", "None")),
    ):
        with pytest.raises(DataError) as caught:
            batchnorm_start(task, wrong)  # type: ignore[arg-type]
        assert_named(caught, *names)


def test_no_batchnorm_nothing_to_reestimate() -> None:
    assert reestimate_batchnorm(nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2)), [torch.randn(4, 3)]) is None


def test_the_best_candidate_costs_one_query_each(quadratic: Callable[..., Any]) -> None:
    task = quadratic(budget=3)
    starts = {"pretrained": Start(task.origin()), "half": Start(task.goal / 2), "near": Start(task.goal * 0.9)}
    name, evaluations = best_start(task, starts)
    assert name == "near"
    assert {key: each.cost for key, each in evaluations.items()} == {
        key: task.true_cost(start.phi) for key, start in starts.items()
    }
    assert task.metric.ledger.spent_on == {"starts": 3}
    assert_refused(lambda: best_start(task, {}), ValueError)
