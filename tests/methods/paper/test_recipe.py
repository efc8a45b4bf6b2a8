"""Recipes: what they achieve, what each step does against its formula, what they draw, and what is refused."""

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from statistics import mean
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from torch import Tensor

from helpers.evaluations import told
from helpers.quadratics import Quadratic, QuadraticLearner
from helpers.refusals import assert_refused
from metricopt_ext import Callback, Metric, Result, optimize_metric
from metricopt_ext.errors import BudgetError, ValueFunctionError
from metricopt_ext.methods.guard import judge
from metricopt_ext.methods.paper.recipe import (
    FRESH,
    LEAST_TASKS,
    GuidedESSteps,
    Recipe,
    finetune,
    meta_train,
    tune_start,
)
from metricopt_ext.search.optimizer import LossStep
from metricopt_ext.tasks.trajectories import TrajectoryStore, rollout
from metricopt_ext.value.fitting import Fit
from metricopt_ext.value.interpolation import GaussianProcessLabels
from metricopt_ext.value.learning import NeuralLearner
from metricopt_ext.value.observations import Observations

# Two rounds of six tasks with three observations, six queries to choose and three for the guard; two more are planned
# for, which only metrics need that tell halves.
RECIPE = Recipe(steps=10, lr=0.1, evals=3, rounds=2, folds=2, trials=1, learner=QuadraticLearner())
COLLECTED, QUERIES = 36, 47


def go(task: Any, *, queries: int = QUERIES, recipe: Recipe = RECIPE, **arguments: Any) -> Result:
    return optimize_metric(task, queries=queries, strategy=recipe, callback=Callback(), **arguments)


def backwards(data: Observations, fold: Tensor, folds: int, seed: int) -> Any:
    """Learn an f that is never trusted on a `Quadratic`, without luck: it predicts the negative of its metric."""
    return QuadraticLearner()(replace(data, cost=-data.cost), fold, folds, seed)


@pytest.mark.parametrize(
    ("name", "value", "names"),
    [
        ("evals", 1, ("evals", "1", "2")),
        ("evals", 12, ("12", "10", "11")),
        ("settings", ((0.1, 0.2, 0.3),), ("settings", "0.1")),
        ("settings", ((-0.3, 0.1),), ("loss_weight", "-0.3")),
        ("settings", ((0.3, math.nan),), ("metric_step", "nan")),
        ("learner", "neural", ("learner", "neural", "NeuralLearner()")),
        ("learner", QuadraticLearner, ("learner", "QuadraticLearner")),
        ("labels", GaussianProcessLabels, ("labels", "GaussianProcessLabels")),
        ("follow", GuidedESSteps, ("follow", "GuidedESSteps")),
        ("optimizer", "lbfgs", ("optimizer", "lbfgs", "adam")),
        ("ends", "both", ("ends", "both", "random")),
        ("ensemble", "no", ("ensemble", "no")),
    ],
)
def test_a_recipe_out_of_range_is_refused(name: str, value: Any, names: tuple[str, ...]) -> None:
    assert_refused(lambda: replace(RECIPE, **{name: value}), ValueError, *names)


def test_explored_settings_are_uniform_weights_and_log_uniform_steps() -> None:
    n = 4000
    weight, step = RECIPE.explored_settings(3, range(n)).double().unbind(1)
    logs = (step / RECIPE.explored_step).log() / math.log(3)  # uniform in [-1, 1]
    for drawn, low, high in ((weight, 0, 1), (logs, -1, 1)):
        assert low <= float(drawn.min()) < low + 0.01
        assert high - 0.01 < float(drawn.max()) <= high
        assert scipy.stats.kstest(drawn.numpy(), scipy.stats.uniform(low, high - low).cdf).pvalue > 0.001
    assert abs(np.corrcoef(weight, logs)[0, 1]) < 4 / n**0.5


@pytest.mark.parametrize(
    ("change", "choice", "start"),
    [
        ({}, 6, 5),
        ({"trials": 0}, 3, 5),
        ({"trials": 4}, 15, 5),
        ({"settings": ((0.0, 0.1),)}, 0, 5),  # nothing to choose
        ({"ensemble": False}, 6, 3),  # no cross-check
    ],
)
def test_queries_that_are_planned_besides_collection(change: dict[str, Any], choice: int, start: int) -> None:
    recipe = replace(RECIPE, **change)
    assert (recipe.choice_queries, recipe.start_queries) == (choice, start)
    fixed, per_task = choice + start, 2 * 3  # two rounds of three observations
    for tasks in (4, 7, 50):
        assert recipe.size(fixed + tasks * per_task) == {"tasks": tasks}
        assert recipe.size(fixed + (tasks + 1) * per_task - 1) == {"tasks": tasks}
    least = fixed + LEAST_TASKS * per_task
    assert_refused(lambda: recipe.size(least - 1), BudgetError, least - 1, "queries", "rounds", least)


@pytest.mark.outcome
@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("learner", [QuadraticLearner(), NeuralLearner(iterations=60)])
def test_the_metric_gets_better_than_the_loss_can_make_it(
    quadratic: Callable[..., Any], learner: Any, maximize: bool
) -> None:
    sign = -1 if maximize else 1
    of_finetune, of_best = [], []
    for seed in range(3):
        task = quadratic()
        if maximize:
            closeness = Metric(lambda model, task=task: -task.distance(model), maximize=True, bounds=None)
            task = replace(task, metric=closeness)
        times = torch.linspace(0, 20, 400, dtype=torch.float64)[:, None]
        flow = task.centre * (1 - torch.exp(-task.curvature * times))  # the loss's gradient flow from phi = 0
        result = go(task, queries=119, recipe=replace(RECIPE, learner=learner), seed=seed)
        assert sign * result.before == pytest.approx(float((task.goal**2).sum()), rel=1e-12)
        assert sign * result.after == task.true_cost(task.adapter.phi.detach())
        assert sign * result.loss_finetune == task.true_cost(result.ends["loss_finetune"])
        assert torch.equal(task.adapter.phi, result.ends[result.chosen])
        of_finetune.append(result.after / result.loss_finetune)
        of_best.append(sign * result.after / min(map(task.true_cost, flow)))
    assert mean(of_finetune) < 0.6  # at worst 0.36 ± 0.05
    assert mean(of_best) < 0.6  # at worst 0.35 ± 0.02


def test_an_f_without_skill_is_not_followed(quadratic: Callable[..., Any]) -> None:
    task = quadratic()
    result = go(task, recipe=replace(RECIPE, learner=backwards))
    assert not result.fit.f.trusted
    assert torch.equal(result.ends["metricopt"], result.ends["loss_finetune"])
    assert torch.equal(result.ends["metricopt"], finetune(task, LossStep(0.1), 10, 0)[-1])
    assert result.chosen in ("start", "loss_finetune")
    assert result.after == min(task.true_cost(phi) for phi in result.ends.values())
    assert result.queries == {"collect": COLLECTED, "guard": 2}  # nothing to choose, two equal ends
    assert task.queries == COLLECTED + 2


def test_choice_and_finetuning_meet_batches_that_collection_did_not(quadratic: Callable[..., Any]) -> None:
    task, met = quadratic(), []

    def batches(seed: int, index: int, step: int) -> Tensor:
        met.append(index)
        return task.batch(seed, index, step)

    task = replace(task, batches=batches)
    met.clear()  # of the first batch, which is run at once
    go(task)
    collected, fresh = set(met[: 12 * 10]), set(met[12 * 10 :])
    assert collected == set(range(12))
    assert fresh == {FRESH, FRESH + 1, FRESH + 2}  # the end points, and the random start and phi = 0 of the choice
    assert not collected & fresh


@pytest.mark.parametrize("trials", [0, 1, 4])
def test_the_setting_with_the_least_mean_metric_is_chosen(quadratic: Callable[..., Any], trials: int) -> None:
    settings = ((0.0, 0.01), (0.3, 0.15), (0.5, 0.3), (1.0, 0.05))
    recipe = replace(RECIPE, trials=trials, settings=settings)
    task = quadratic()
    result = go(task, queries=COLLECTED + recipe.choice_queries + 3, recipe=recipe)
    assert result.queries["choose"] == 4 * (1 + trials)
    indices = list(range(FRESH + 1, FRESH + 1 + trials))
    starts = [task.origin(), *(task.starts(recipe.start_std, 0, [index])[0] for index in indices)]
    means = {}
    for setting in settings:
        policy = recipe.policy(result.fit.f, setting)
        ends = [
            rollout(task, start[None], policy, steps=10, seed=0, indices=[index])[0][0, -1]
            for start, index in zip(starts, [FRESH + 1 + trials, *indices], strict=True)
        ]
        means[setting] = sum(map(task.true_cost, ends)) / len(ends)
    assert result.setting == min(means, key=lambda setting: means[setting])
    assert sorted(means.values())[1] > 1.01 * min(means.values())


def test_the_first_round_follows_the_loss_and_later_ones_f(quadratic: Callable[..., Any]) -> None:
    task, store = quadratic(), TrajectoryStore()
    fit = meta_train(task, tasks=6, recipe=RECIPE, seed=2, store=store)
    assert task.queries == store.queries == 36
    assert [(t.round, t.index) for t in store] == [(i // 6, i) for i in range(12)]
    off_loss = []
    for trajectory in store:
        assert trajectory.cost.tolist() == [task.true_cost(phi) for phi in trajectory.observed_phi]
        for step, (phi, after) in enumerate(pairwise(trajectory.phi)):
            gradient = task.curvature * (phi - task.centre - task.batch(2, trajectory.index, step))
            off_loss.append((trajectory.round, float((after - (phi - 0.1 * gradient)).norm())))
    assert max(distance for round, distance in off_loss if round == 0) < 1e-12
    assert min(distance for round, distance in off_loss if round == 1) > 1e-3
    again = meta_train(task, tasks=6, recipe=RECIPE, seed=2, store=store)
    assert task.queries == 36
    assert torch.equal(again.f.coefficients, fit.f.coefficients)


def test_each_half_of_the_metrics_data_gets_an_f_of_its_own(quadratic: Callable[..., Any]) -> None:
    task, store, recipe = quadratic(3, dtype=torch.float32), TrajectoryStore(), replace(RECIPE, rounds=1)

    def metric(model: Any) -> Any:
        value = task.true_cost(model.metricopt.phi.detach())
        return value, (1.5 * value, 0.5 * value)

    judged = task.judged_by(Metric(metric, maximize=False, bounds=None))
    fit = meta_train(judged, tasks=8, recipe=recipe, seed=5, store=store)
    assert len(fit.half_fits) == 2
    phi = torch.randn(9, 3, generator=torch.Generator().manual_seed(0))
    for factor, f in zip((1.5, 0.5), fit.half_fits, strict=True):
        alone = recipe.fit([replace(each, evaluations=told(factor * each.cost)) for each in store], 5).f
        torch.testing.assert_close(f(phi), alone(phi), rtol=1e-4, atol=1e-4)


ALONE = replace(RECIPE, trials=0, settings=((0.2, 0.3),))


def learned(task: Any, recipe: Recipe = ALONE, seed: int = 0) -> Fit:
    return meta_train(task, tasks=10, recipe=recipe, seed=seed)


@pytest.mark.parametrize("start", [None, torch.full((4,), 0.2)])
def test_ends_are_those_of_the_step_rules(quadratic: Callable[..., Any], start: torch.Tensor | None) -> None:
    task = quadratic(dtype=torch.float32)
    fit = learned(task)
    assert fit.f.trusted
    spent = task.metric.ledger.spent
    tuned = tune_start(task, fit, recipe=ALONE, start=start, index=FRESH + 5, seed=2)
    expected = finetune(task, ALONE.policy(fit.f, (0.2, 0.3)), 10, 2, start, FRESH + 5)
    assert torch.equal(tuned.ends["start"], expected[0])
    assert torch.equal(tuned.ends["metricopt"], expected[-1])
    assert tuned.chosen == min(tuned.ends, key=lambda name: task.true_cost(tuned.ends[name]))
    assert task.metric.ledger.spent - spent == task.metric.ledger.spent_on["guard"] == 3
    assert not task.adapter.phi.any()  # as it was


def test_arguments_out_of_range_cost_no_query(quadratic: Callable[..., Any]) -> None:
    task, f = quadratic(), Quadratic(4, 2)
    wrong = ({"index": 1.5}, "index"), ({"seed": -1}, "seed")
    for given, name in wrong:
        assert_refused(lambda given=given: tune_start(task, Fit(f), recipe=ALONE, **given), ValueError, name)
    assert_refused(lambda: meta_train(task, tasks=1, recipe=RECIPE), ValueError, "tasks", 1)
    assert_refused(lambda: go(task.judged_by(Metric(lambda: 0.25, maximize=False))), ValueFunctionError, "phi")
    assert task.queries == 0


def test_an_f_of_another_adapter_is_refused_before_any_query(quadratic: Callable[..., Any]) -> None:
    task = quadratic(dtype=torch.float32)
    fit = learned(task)
    assert fit.f.signature == task.adapter.signature
    task.adapter.context.means, spent = replace(task.adapter.signature, seed=1), task.queries
    assert_refused(lambda: tune_start(task, fit, recipe=ALONE), ValueFunctionError, "0", "1")
    assert task.queries == spent
    fit.f.signature = None
    tune_start(task, fit, recipe=ALONE)
    assert task.queries > spent


def halved(task: Any) -> tuple[Any, list[Tensor]]:
    """A task whose metric's halves have a goal each, and these."""
    goals = [task.goal + 0.4, task.goal - 0.4]

    def metric(model: Any) -> Any:
        halves = tuple(float(((model.metricopt.phi - goal) ** 2).sum()) for goal in goals)
        return sum(halves) / 2, halves

    return replace(task, metric=Metric(metric, maximize=False, bounds=None, name="distance")), goals


def test_the_correlation_of_halves_is_that_of_the_starts(quadratic: Callable[..., Any]) -> None:
    result = go(halved(quadratic())[0])
    starts = [trajectory.evaluations[0].halves for trajectory in result.trajectories]
    assert result.split_half == pytest.approx(scipy.stats.spearmanr(*np.transpose(starts)).statistic)


@pytest.mark.parametrize("trusted", [True, False])
def test_a_metric_of_two_halves_is_cross_checked(quadratic: Callable[..., Any], trusted: bool) -> None:
    """What f gains on one half is partly lost on the other, its own f trusted or not."""
    task, goals = halved(quadratic(dtype=torch.float32))
    fit = learned(task)
    before = task.metric.ledger.spent
    ends = [finetune(task, ALONE.policy(f, (0.2, 0.3)), 10, 0)[-1] for f in fit.half_fits]
    if not trusted:
        for f in fit.half_fits:
            f.quality = None
    tuned = tune_start(task, fit, recipe=ALONE)
    assert task.metric.ledger.spent - before == 5 == ALONE.start_queries
    a, b = (torch.stack([((end - goal) ** 2).sum() for goal in goals]) for end in ends)
    crossed = float((a[1] - a[0]) + (b[0] - b[1])) / 4
    others = [tuned.evaluations[name] for name in ("loss_finetune", "metricopt")]
    by_halves = judge(tuned.evaluations["start"], tuned.evaluations["metricopt"], [*fit.visited, *others]).optimism
    assert tuned.verdict.optimism == pytest.approx(max(crossed, by_halves), rel=1e-5)
    assert crossed > 0.05
    assert torch.equal(tuned.ends["metricopt"], finetune(task, ALONE.policy(fit.f, (0.2, 0.3)), 10, 0)[-1])


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
