"""Algorithm S1: its bookkeeping line by line, and what it learns on problems with a known answer."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.refusals import assert_refused
from metricopt_ext import Callback, load_value_function, optimize_metric
from metricopt_ext.methods.paper.joint import UNROLLED, AlgorithmS1, combine
from metricopt_ext.methods.paper.recipe import FRESH
from metricopt_ext.search.learned import LearnedOptimizer, load_update_rule, unroll
from metricopt_ext.tasks.trajectories import TrajectoryStore, observation_steps
from metricopt_ext.utils.seeding import generator
from metricopt_ext.value.observations import Observations
from metricopt_ext.value.reptile import ReptileLearner
from metricopt_ext.value.value_function import NeuralValueFunction

QUICK = AlgorithmS1(steps=5, evals=3, tasks=2, pairs=3, start_std=0.5, hidden=4, step=0.1)


def known_f(task: Any) -> Any:
    """A value function that was adapted to two tasks."""
    trajectories = QUICK.collect(task, QUICK.new_rule(0), TrajectoryStore(), iteration=0, seed=0)
    rng = torch.Generator().manual_seed(0)
    f = NeuralValueFunction.drawn(task.dim, 1, rng)
    weights = torch.nn.utils.parameters_to_vector(f.parameters()).detach()
    QUICK.value.adapt(f, weights, Observations.of(trajectories), len(trajectories), rng)
    return f


@pytest.mark.parametrize("sees_metric", [False, True])
def test_line_3_observes_the_metric_along_the_optimizer_s_own_tasks(
    quadratic: Callable[..., Any], sees_metric: bool
) -> None:
    task, store, told = quadratic(3), TrajectoryStore(), []
    settings = replace(QUICK, sees_metric=sees_metric)
    rule = settings.new_rule(0)
    with task.metric.calling(told.append):
        trajectories = settings.collect(task, rule, store, iteration=4, seed=2)
    assert [t.index for t in trajectories] == [8, 9]
    assert task.queries == len(told) == 2 * 3
    assert task.metric.ledger.spent_on == {"collect": 6}
    for t in trajectories:
        assert t.round == 4
        assert torch.equal(t.observed, observation_steps(5, 3, 2, t.index))
        assert t.cost.tolist() == [task.true_cost(phi) for phi in t.observed_phi]
        phi, memory, cost = task.starts(0.5, 2, [t.index]), None, torch.tensor([math.nan]).double()
        for step in range(5):
            torch.testing.assert_close(t.phi[step], phi[0], rtol=1e-10, atol=1e-12)
            loss, gradient = task.loss_and_gradient(phi, 2, [t.index], step)
            if step in t.observed:
                cost = torch.tensor([task.true_cost(phi[0])], dtype=torch.float64)
            change, memory = rule.propose(phi, gradient, loss, cost, memory)
            phi = phi + change.detach()
        torch.testing.assert_close(t.phi[5], phi[0], rtol=1e-10, atol=1e-12)
    assert settings.collect(task, rule, store, iteration=4, seed=2) == trajectories
    assert task.queries == 6
    cut_short = TrajectoryStore()
    cut_short.add(trajectories[1])
    again, kept = settings.collect(task, rule, cut_short, iteration=4, seed=2)
    assert task.queries == 6 + 3
    assert kept is trajectories[1]
    assert torch.equal(again.phi, trajectories[0].phi)


def test_the_objective_is_eq_6_with_f_in_place_of_the_metric(quadratic: Callable[..., Any]) -> None:
    task, settings = quadratic(3), QUICK
    f, rule = known_f(task), settings.new_rule(0).double()
    task.problem.queries = 0
    values = settings.objective_of(
        task, rule, f, rule.weights.detach().expand(2, -1), seed=3, indices=[UNROLLED, UNROLLED + 1]
    )
    for row, index in enumerate((UNROLLED, UNROLLED + 1)):
        observed = observation_steps(5, 3, 3, index).tolist()
        costs: list[Tensor] = []

        def cost_at(phi: Tensor, step: int, observed: list[int] = observed, costs: list[Tensor] = costs) -> Tensor:
            costs.append(f(phi).double() if step in observed else costs[-1])
            return costs[-1]

        start = task.starts(0.5, 3, [index])
        points, losses = unroll(task, rule, start, cost_at, steps=5, seed=3, indices=[index])
        last, _ = task.loss_and_gradient(points[:, 5], 3, [index], 5)
        loss, predicted, total = [*losses[0], last[0]], f(points[0]).tolist(), 0.0
        for t in range(1, 6):
            best = min(predicted[:t])
            total += 50 * math.log1p(math.exp(2.5 * (predicted[t] - best) / max(abs(predicted[t]), 0.01))) / 5
            total += (math.log(loss[t] + 1e-3) - math.log(loss[0] + 1e-3)) / 5
        assert float(values[row]) == pytest.approx(total, rel=1e-5)
    assert task.queries == 0


@pytest.mark.parametrize("estimator", ["combined", "score"])
@pytest.mark.parametrize("population", [2, 32])
def test_line_6_combines_estimates_of_a_task_for_each_pair(
    quadratic: Callable[..., Any], estimator: Any, population: int
) -> None:
    task, settings = quadratic(3, population=population), replace(QUICK, estimator=estimator)
    f, rule = known_f(task), settings.new_rule(0).double()
    gradient = settings.gradient(task, rule, f, seed=1, update=4)

    noise = torch.randn(3, len(rule.weights), generator=generator(1, "weights", 4)).double()
    slopes, scores = [], []
    for pair in range(3):
        sides = []
        for sign in (1, -1):
            w = (rule.weights.detach() + sign * 0.1 * noise[pair])[None].requires_grad_(True)
            index = UNROLLED + 4 * 3 + pair
            loss = settings.objective_of(task, rule, f, w, seed=1, indices=[index])
            (slope,) = torch.autograd.grad(loss.sum(), w)
            sides.append((float(loss.detach()), slope[0]))
        slopes.append((sides[0][1] + sides[1][1]) / 2)
        scores.append(noise[pair] * (sides[0][0] - sides[1][0]) / 0.2)
    by = {
        "combined": combine(torch.stack(slopes), torch.stack(scores)),
        "score": torch.stack(scores).mean(0),
    }
    # f is in single precision, and the score divides a difference of its predictions.
    torch.testing.assert_close(gradient, by[estimator], rtol=1e-3, atol=2e-3 * float(by[estimator].abs().max()))


def test_meta_training_is_lines_3_to_7(quadratic: Callable[..., Any]) -> None:
    task, weights, asked = quadratic(3), [], []

    class Watched(ReptileLearner):
        def adapt(self, f: Any, before: Tensor, *given: Any) -> Tensor:
            adapted = super().adapt(f, before, *given)
            weights.append((before.clone(), adapted.clone()))
            asked.append(task.queries)
            return adapted

    settings, store = replace(QUICK, updates=2, rate=0.05, tasks=1, value=Watched()), TrajectoryStore()
    rule, fit = settings.meta_train(task, iterations=3, seed=1, store=store)
    assert asked == [3, 6, 9]  # line 3 comes before line 5, and nothing else asks
    for eta, (before, adapted), (after, _) in zip((1, 2 / 3), weights[:2], weights[1:], strict=True):  # line 7
        torch.testing.assert_close(after, before + eta * (adapted - before))
    assert task.queries == len(store) * 3 == 3 * 3
    assert fit.f.quality is not None
    assert fit.f.quality.points == 6  # of two tasks of three, the later ones
    assert fit.f.signature == task.adapter.signature
    assert not torch.equal(rule.weights, settings.new_rule(1).weights)


def test_steps_on_the_weights_are_adam_s_on_clipped_gradients(quadratic: Callable[..., Any]) -> None:
    values = (3.0, -1e-3, 0.5, 2.0, 1.0, -0.5)  # the first is longer than 10
    fakes = iter(values)

    class Faked(AlgorithmS1):
        def gradient(self, task: Any, rule: Any, f: Any, *, seed: int, update: int) -> Tensor:
            return torch.full_like(rule.weights.detach(), next(fakes))

    settings = Faked(**{**vars(QUICK), "rate": 0.05, "updates": 2})
    rule, _ = settings.meta_train(quadratic(3), iterations=3, seed=0)
    weights = torch.nn.Parameter(settings.new_rule(0).weights.detach().clone())
    adam = torch.optim.Adam([weights], 0.05)
    for value in values:
        fake = torch.full_like(weights.detach(), value)
        weights.grad = fake * min(1.0, 10.0 / float(fake.norm()))
        adam.step()
    torch.testing.assert_close(rule.weights.detach(), weights.detach(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("sees_metric", [True, False])
def test_meta_testing_is_the_optimizer_alone(quadratic: Callable[..., Any], sees_metric: bool) -> None:
    task, settings = quadratic(3), replace(QUICK, sees_metric=sees_metric)
    rule = settings.new_rule(0)
    path = settings.meta_test(task, rule, seed=2)
    assert task.metric.ledger.spent_on == ({"meta_test": 2} if sees_metric else {})

    observed = observation_steps(5, 3, 2, FRESH)[:-1].tolist()
    task.adapter.set_phi(task.origin())
    optimizer = LearnedOptimizer(task.adapter.parameters(), rule)
    for step in range(5):
        torch.testing.assert_close(task.adapter.phi.detach(), path[step], rtol=1e-6, atol=1e-7)
        if step in observed:
            optimizer.observe(cost=task.true_cost(task.adapter.phi.detach()))
        optimizer.zero_grad()
        loss = task.loss(task.adapter.model, task.batches(2, FRESH, step))
        loss.backward()
        optimizer.observe(loss=loss.item())
        optimizer.step()
    torch.testing.assert_close(task.adapter.phi.detach(), path[5], rtol=1e-6, atol=1e-7)


@pytest.mark.outcome
@pytest.mark.slow
def test_it_lowers_a_metric_that_the_loss_does_not_know(quadratic: Callable[..., Any]) -> None:
    """The metric's optimum lies off the loss's, alike in each coordinate; a share of what the loss's optimum costs."""
    settings = AlgorithmS1(steps=15, evals=4, start_std=0.5, step=0.1, tasks=4, rate=1e-2, sees_metric=False)
    left = []
    for seed in range(3):
        task = quadratic(3, dtype=torch.float32)
        task.problem.goal = task.centre + (0.6, -0.6, 0.4)[seed]
        rule = settings.meta_train(task, iterations=40, seed=seed)[0]
        end = settings.meta_test(task, rule, seed=seed)[-1]
        left.append(task.true_cost(end) / task.true_cost(task.centre))
    assert sum(left) / len(left) < 0.7  # 0.12


@pytest.mark.parametrize(
    ("name", "value", "names"),
    [
        ("evals", 52, ("52", "51")),
        ("estimator", "best", ("best",)),
        ("rate", 0.0, ("0.0",)),
        ("labels", "gp", ("'gp'", "GaussianProcessLabels()")),
        ("value", None, ("None", "ReptileLearner()")),
        ("sees_metric", "no", ("'no'", "True", "False")),
    ],
)
def test_bad_settings(name: str, value: Any, names: tuple[str, ...]) -> None:
    assert_refused(lambda: AlgorithmS1(**{name: value}), ValueError, name, *names)


# --- As a strategy of optimize_metric: what it spends and keeps, and that a run goes on where it stopped -------------


@pytest.mark.parametrize("sees_metric", [True, False])
def test_every_query_is_counted_by_its_purpose(
    quadratic: Callable[..., Any], sees_metric: bool, tmp_path: Path
) -> None:
    settings, task = replace(QUICK, sees_metric=sees_metric), quadratic(3)
    per_start = 3 + 2 * sees_metric
    result = optimize_metric(
        task, queries=2 * 6 + per_start + 5, strategy=settings, output_dir=tmp_path, callback=Callback()
    )
    assert result.rule is not None
    assert result.fit is not None
    assert result.queries == {"collect": 12, **({"meta_test": 2} if sees_metric else {}), "guard": 3}
    assert result.queries_per_start == settings.start_queries == per_start
    kept = load_update_rule(tmp_path / "update_rule.safetensors")
    assert torch.equal(kept.weights, result.rule.weights)
    f = load_value_function(tmp_path / "value_function.safetensors")
    assert torch.equal(f(result.path), result.fit.f(result.path))
