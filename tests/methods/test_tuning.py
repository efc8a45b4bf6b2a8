"""One start under a known value function: guard, adaptation, refinement, and what each costs."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.refusals import assert_refused
from metricopt_ext.errors import ValueFunctionError
from metricopt_ext.methods.guard import judge
from metricopt_ext.methods.recipe import Recipe
from metricopt_ext.methods.recipe_settings import START_QUERIES
from metricopt_ext.methods.rounds import meta_train
from metricopt_ext.methods.tuning import FRESH, finetune, metric_policy, tune_start
from metricopt_ext.search.optimizer import LossStep
from metricopt_ext.tasks.metric import Metric
from metricopt_ext.value.fitting import Fit
from metricopt_ext.value.learners import RidgeLearner
from metricopt_ext.value.loading import load_value_function
from metricopt_ext.value.value_function import RidgeValueFunction

RECIPE = Recipe(steps=10, lr=0.1, evals=3, rounds=2, folds=2, trials=0, learners=(RidgeLearner(),))


def learned(task: Any, recipe: Recipe = RECIPE, seed: int = 0) -> Fit:
    return meta_train(task, tasks=10, recipe=recipe, seed=seed)


@pytest.mark.parametrize("start", [None, torch.full((4,), 0.2)])
def test_ends_are_those_of_the_step_rules(quadratic: Callable[..., Any], start: torch.Tensor | None) -> None:
    task = quadratic(dtype=torch.float32)
    fit = learned(task)
    assert fit.f.trusted
    spent = task.metric.ledger.spent
    tuned = tune_start(task, fit, recipe=RECIPE, setting=(0.2, 0.3), start=start, index=FRESH + 5, seed=2)
    expected = finetune(task, metric_policy(fit.f, RECIPE, (0.2, 0.3)), 10, 2, start, FRESH + 5)
    assert torch.equal(tuned.ends["start"], expected[0])
    assert torch.equal(tuned.ends["metricopt"], expected[-1])
    assert {name: answer.cost for name, answer in tuned.evaluations.items()} == {
        name: task.true_cost(phi) for name, phi in tuned.ends.items()
    }
    assert tuned.chosen == tuned.best == min(tuned.ends, key=lambda name: task.true_cost(tuned.ends[name]))
    assert task.metric.ledger.spent - spent == task.metric.ledger.spent_on["guard"] == 3
    assert not task.adapter.phi.any()  # as it was


@pytest.mark.parametrize(
    ("wrong", "names"),
    [
        ({"setting": (0.3, math.nan)}, ("metric_step", "nan")),
        ({"setting": (-0.3, 0.1)}, ("loss_weight", "-0.3")),
        ({"index": 1.5}, ("index", "1.5")),
        ({"seed": -1}, ("seed", "-1", "0")),
    ],
)
def test_arguments_out_of_range_cost_no_query(
    quadratic: Callable[..., Any], wrong: dict[str, Any], names: tuple[str, ...]
) -> None:
    task, f = quadratic(), RidgeValueFunction(4, 2)
    assert_refused(lambda: tune_start(task, Fit(f), recipe=RECIPE, **wrong), ValueError, *names)
    assert task.queries == 0


def test_a_value_function_from_a_file_is_followed(quadratic: Callable[..., Any], tmp_path: Path) -> None:
    task = quadratic(dtype=torch.float32)
    fit = learned(task)
    fit.f.save(tmp_path / "f.safetensors")
    tuned = tune_start(task, Fit(load_value_function(tmp_path / "f.safetensors")), recipe=RECIPE)
    known = tune_start(task, fit, recipe=RECIPE)
    assert torch.equal(tuned.ends["metricopt"], known.ends["metricopt"])
    assert tuned.chosen == known.chosen
    assert (tuned.verdict.chance, tuned.verdict.optimism, tuned.verdict.guard) == (None, 0, "none")


def test_an_f_of_another_adapter_is_refused_before_any_query(quadratic: Callable[..., Any]) -> None:
    task = quadratic(dtype=torch.float32)
    fit = learned(task)
    assert fit.f.signature == task.adapter.signature
    task.adapter.context.seed, spent = 1, task.queries
    assert_refused(lambda: tune_start(task, fit, recipe=RECIPE), ValueFunctionError, "0", "1")
    assert task.queries == spent
    fit.f.signature = None
    tune_start(task, fit, recipe=RECIPE)
    assert task.queries > spent


def test_an_f_without_skill_is_not_followed(quadratic: Callable[..., Any]) -> None:
    task = quadratic(dtype=torch.float32)
    fit = learned(task)
    fit.f.quality = None
    tuned = tune_start(task, fit, recipe=RECIPE)
    assert torch.equal(tuned.ends["metricopt"], tuned.ends["loss_finetune"])
    assert task.metric.ledger.spent_on["guard"] == 2


@pytest.mark.parametrize("trusted", [True, False])
def test_a_metric_of_two_halves_is_cross_checked(quadratic: Callable[..., Any], trusted: bool) -> None:
    """Each half has a goal of its own: what f gains on one is partly lost on the other, its own f trusted or not."""
    task = quadratic(dtype=torch.float32)
    goals = [task.goal + 0.4, task.goal - 0.4]

    def metric(model: Any) -> Any:
        halves = tuple(float(((model.metricopt.phi - goal) ** 2).sum()) for goal in goals)
        return sum(halves) / 2, halves

    task = replace(task, metric=Metric(metric, maximize=False, bounds=None, name="distance"))
    fit = learned(task)
    before = task.metric.ledger.spent
    ends = [finetune(task, metric_policy(f, RECIPE, (0.2, 0.3)), 10, 0)[-1] for f in fit.half_fits]
    if not trusted:
        for f in fit.half_fits:
            f.quality = None
    tuned = tune_start(task, fit, recipe=RECIPE, setting=(0.2, 0.3))
    assert task.metric.ledger.spent - before == 5 == START_QUERIES
    a, b = (torch.stack([((end - goal) ** 2).sum() for goal in goals]) for end in ends)
    crossed = float((a[1] - a[0]) + (b[0] - b[1])) / 4
    others = [tuned.evaluations[name] for name in ("loss_finetune", "metricopt")]
    by_halves = judge(tuned.evaluations["start"], tuned.evaluations["metricopt"], [*fit.visited, *others]).optimism
    assert tuned.verdict.optimism == pytest.approx(max(crossed, by_halves), rel=1e-5)
    assert crossed > 0.05
    assert torch.equal(tuned.ends["metricopt"], finetune(task, metric_policy(fit.f, RECIPE, (0.2, 0.3)), 10, 0)[-1])


def test_a_half_that_never_differs_is_not_cross_checked(quadratic: Callable[..., Any]) -> None:
    task = quadratic(dtype=torch.float32)
    distance = task.distance
    task = replace(
        task, metric=Metric(lambda model: (distance(model), (distance(model), 1.0)), maximize=False, bounds=None)
    )
    fit = learned(task)
    assert fit.half_fits == ()
    before = task.metric.ledger.spent
    assert len(tune_start(task, fit, recipe=RECIPE).ends) == task.metric.ledger.spent - before == 3


def test_finetuning_is_gradient_descent_on_fresh_batches_and_asks_nothing(quadratic: Callable[..., Any]) -> None:
    task = quadratic()
    phi = torch.zeros(4, dtype=torch.float64)
    path = [phi]
    for step in range(5):
        phi = phi - 0.2 * task.curvature * (phi - task.centre - task.batch(3, FRESH, step))
        path.append(phi)
    torch.testing.assert_close(finetune(task, LossStep(0.2), 5, seed=3), torch.stack(path))
    assert torch.equal(finetune(task, LossStep(0.2), 5, seed=3, start=path[2])[0], path[2])
    assert task.queries == 0
