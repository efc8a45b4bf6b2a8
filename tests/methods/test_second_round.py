import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from helpers.refusals import assert_refused
from metricopt_ext.adapters.attach import attach_film
from metricopt_ext.errors import ValueFunctionError
from metricopt_ext.methods.recipe import Recipe
from metricopt_ext.methods.rounds import meta_train
from metricopt_ext.methods.second_round import run_second_round, unfrozen_theta
from metricopt_ext.tasks.metric import Metric
from metricopt_ext.tasks.task import FinetuneTask
from metricopt_ext.value.fitting import Fit
from metricopt_ext.value.learners import RidgeLearner

RECIPE = Recipe(steps=6, lr=0.05, evals=3, rounds=2, folds=2, trials=0, learners=(RidgeLearner(),))
X = torch.randn(64, 5, generator=torch.Generator().manual_seed(0))
Y = X @ torch.tensor([1.0, -1.0, 0.5, 0.0, 2.0])


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.mse_loss(model(batch[0]).squeeze(-1), batch[1])


def error(model: nn.Module) -> float:
    with torch.no_grad():
        return float(loss(model, (X, Y)))


@pytest.fixture
def task() -> FinetuneTask:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
    model(X)
    return FinetuneTask(
        attach_film(model, dim=4),
        loss=loss,
        batches=lambda seed, task, step: (X, Y),
        metric=Metric(error, maximize=False, bounds=None, name="mse"),
    )


@pytest.fixture
def fit(task: FinetuneTask) -> Fit:
    return meta_train(task, tasks=8, recipe=RECIPE)


def train(model: nn.Module, steps: int = 40, lr: float = 0.05) -> None:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr)
    model.train()
    for _ in range(steps):
        optimizer.zero_grad()
        loss(model, (X, Y)).backward()
        optimizer.step()
    model.eval()


def ruin(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.fill_(3.0)


def run(task: FinetuneTask, fit: Fit, train_theta: Any) -> Any:
    return run_second_round(task, fit, train_theta, recipe=RECIPE, setting=(0.3, 0.15))


def test_trains_theta_and_says_what_each_step_was_worth(task: FinetuneTask, fit: Fit) -> None:
    task.adapter.set_phi(torch.full((4,), 0.1))
    before = error(task.adapter.model)
    spent = task.metric.ledger.spent
    trained = task.copied().adapter
    with unfrozen_theta(trained) as model:
        train(model)
    result = run(task, fit, train)
    assert task.metric.ledger.spent - spent == 3
    assert result.before == pytest.approx(before, rel=1e-6)
    assert result.theta == pytest.approx(error(trained.model), rel=1e-6)
    assert result.theta != result.before
    kept = {"before": result.before, "theta": result.theta, "after": result.after}[result.kept]
    assert kept == min(result.before, result.theta, result.after)
    assert error(task.adapter.model) == pytest.approx(kept, rel=1e-6)
    assert torch.equal(result.points[0], torch.full((4,), 0.1))


def test_an_f_of_another_adapter_is_refused_before_any_training(task: FinetuneTask, fit: Fit) -> None:
    fit.f.signature = replace(task.adapter.signature, dim=9)
    spent = task.metric.ledger.spent
    assert_refused(lambda: run(task, fit, ruin), ValueFunctionError, "dim", "9", "4")
    assert task.metric.ledger.spent == spent


def test_guard_restores_theta_and_phi_bit_for_bit_when_training_ruins_them(task: FinetuneTask, fit: Fit) -> None:
    task.adapter.set_phi(torch.full((4,), 0.1))
    before = copy.deepcopy(task.adapter.model.state_dict())
    result = run(task, fit, ruin)
    assert result.kept == "before"
    after = task.adapter.model.state_dict()
    assert all(torch.equal(after[key], value) for key, value in before.items())


def test_only_theta_is_unfrozen_and_statistics_stay(task: FinetuneTask) -> None:
    model = task.adapter.model
    statistics = model[1].running_mean.clone()  # type: ignore[index]
    phi = task.adapter.phi.detach().clone()
    with unfrozen_theta(task.adapter):
        trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        assert trainable == {"0.weight", "0.bias", "1.weight", "1.bias", "3.weight", "3.bias"}
        train(model, steps=3)
    assert {name for name, parameter in model.named_parameters() if parameter.requires_grad} == {"metricopt.phi"}
    assert torch.equal(model[1].running_mean, statistics)  # type: ignore[index]
    assert torch.equal(task.adapter.phi, phi)


def test_theta_is_frozen_again_after_an_error(task: FinetuneTask, fit: Fit) -> None:
    def fail(model: nn.Module) -> None:
        raise OSError("disk full")

    assert_refused(lambda: run(task, fit, fail), OSError, "disk full")
    assert [p.requires_grad for p in task.adapter.model.parameters()].count(True) == 1


def test_a_copied_task_leaves_the_original_alone(task: FinetuneTask, fit: Fit) -> None:
    before = error(task.adapter.model)
    result = run(task.copied(), fit, train)
    assert result.theta != result.before
    assert error(task.adapter.model) == before
