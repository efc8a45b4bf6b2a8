"""Meta-training in rounds: what each round follows and what f is fitted to."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.refusals import assert_refused
from metricopt_ext.methods.recipe import Recipe
from metricopt_ext.methods.rounds import learn_in_rounds, meta_train
from metricopt_ext.runtime.progress import Callback
from metricopt_ext.tasks.trajectory import Trajectory, TrajectoryStore
from metricopt_ext.value.learners import RidgeLearner
from metricopt_ext.value.value_function import ValueFunction

RECIPE = Recipe(steps=10, lr=0.1, evals=3, rounds=2, folds=2, trials=1, learners=(RidgeLearner(),))


def test_small_rounds_make_do_with_fewer_parts(quadratic: Callable[..., Any]) -> None:
    recipe = replace(RECIPE, folds=4)
    seen: list[int] = []

    def learner(data: Any, fold: Tensor, folds: int, seed: int) -> Any:
        seen.append(folds)
        return RidgeLearner()(data, fold, folds, seed)

    meta_train(quadratic(), tasks=4, recipe=replace(recipe, learners=(learner,)))
    assert seen == [2, 4]


@pytest.mark.parametrize("tasks", [1, 0, 6.0, None])
def test_too_few_tasks_are_refused_before_any_query(quadratic: Callable[..., Any], tasks: Any) -> None:
    task = quadratic()
    assert_refused(lambda: meta_train(task, tasks=tasks, recipe=RECIPE), ValueError, "tasks", tasks)
    assert task.queries == 0


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


def test_an_f_without_skill_is_followed_in_collection_to_be_corrected(
    quadratic: Callable[..., Any], backwards: Any
) -> None:
    task, store = quadratic(), TrajectoryStore()
    recipe = replace(RECIPE, learners=(backwards,))
    assert not meta_train(task, tasks=6, recipe=recipe, seed=2, store=store).f.trusted
    off_loss = []
    for trajectory in store:
        phi = trajectory.phi[0]
        gradient = task.curvature * (phi - task.centre - task.batch(2, trajectory.index, 0))
        off_loss.append(float((trajectory.phi[1] - (phi - 0.1 * gradient)).norm()))
    assert max(off_loss[:6]) < 1e-12
    assert min(off_loss[6:]) > 1e-3


def test_all_value_functions_are_where_phi_is(
    halved: Callable[..., Any], quadratic: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    moved: list[Any] = []
    to = ValueFunction.to
    monkeypatch.setattr(ValueFunction, "to", lambda f, device: (moved.append((f, device)), to(f, device))[1])
    task = halved(quadratic(), 0.1)
    fit = meta_train(task, tasks=6, recipe=RECIPE)
    assert len(fit.half_fits) == 2
    for f in (fit.f, *fit.half_fits):
        assert any(f is other and device == task.origin().device for other, device in moved)


class Notifying(Callback):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.stages: list[str] = []
        self.lines: list[str] = []

    def stage(self, description: str) -> None:
        self.stages.append(description)

    def say(self, line: str) -> None:
        self.lines.append(line)


def walk(index: int, cost: Callable[[Tensor], Tensor], *, round: int, halves: Any = None) -> Trajectory:
    """A trajectory of ten steps in three dimensions, observed at four of them."""
    phi = 0.3 * torch.randn(11, 3, generator=torch.Generator().manual_seed(index)).cumsum(0)
    observed = torch.tensor([0, 3, 7, 10])
    costs = cost(phi[observed]).double()
    return Trajectory(round, index, phi, torch.zeros(10), observed, costs, None if halves is None else halves(costs))


def square(phi: Tensor) -> Tensor:
    return ((phi - 1) ** 2).sum(-1)


def test_rounds_are_collected_by_anyone_and_each_follows_the_fit_before() -> None:
    given: list[tuple[int, list[int], Any]] = []
    seen: list[Trajectory] = []
    callback = Notifying()

    def collect(round: int, indices: Any, fit: Any) -> list[Trajectory]:
        given.append((round, list(indices), fit))
        seen.extend(walk(index, square, round=round) for index in indices)
        return seen

    recipe = replace(RECIPE, rounds=3)
    fit = learn_in_rounds(collect, recipe, tasks=4, seed=5, callback=callback)
    assert [(round, indices) for round, indices, _ in given] == [
        (0, [0, 1, 2, 3]),
        (1, [4, 5, 6, 7]),
        (2, [8, 9, 10, 11]),
    ]
    assert given[0][2] is None
    for (_, _, followed), known in zip(given[1:], (4, 8), strict=True):
        alone = recipe.fit(seen[:known], 5)
        assert torch.equal(followed.f.coefficients, alone.f.coefficients)
        assert followed.f.quality == alone.f.quality
    assert torch.equal(fit.f.coefficients, recipe.fit(seen, 5).f.coefficients)
    assert ([each.halves for each in fit.visited], fit.half_fits) == ([None] * len(fit.visited), ())
    skills = [f"{followed.f.quality.spearman:.2f}" for _, _, followed in given[1:]]
    assert callback.stages == ["round 1/3, loss only", f"round 2/3, f at {skills[0]}", f"round 3/3, f at {skills[1]}"]
    assert callback.lines == [f"value function (ridge): {fit.f.quality}"]


def test_each_half_of_the_metrics_data_gets_an_f_of_its_own() -> None:
    def apart(costs: Tensor) -> Tensor:
        return torch.stack([1.5 * costs, 0.5 * costs], dim=1)

    made = [walk(index, square, round=0, halves=apart) for index in range(8)]
    recipe = replace(RECIPE, rounds=1)
    fit = learn_in_rounds(lambda *round: made, recipe, tasks=8, seed=5, callback=Callback())
    assert len(fit.half_fits) == 2
    for factor, f in zip((1.5, 0.5), fit.half_fits, strict=True):
        alone = recipe.fit([replace(each, cost=factor * each.cost, halves=None) for each in made], 5).f
        phi = torch.randn(9, 3, generator=torch.Generator().manual_seed(0))
        torch.testing.assert_close(f(phi), alone(phi))
    late = torch.cat([each.halves[2:] for each in made])  # type: ignore[index]
    assert torch.equal(torch.tensor([each.halves for each in fit.visited], dtype=torch.float64), late)


def test_a_half_that_never_differs_leaves_both_without_an_f() -> None:
    def stuck(costs: Tensor) -> Tensor:
        return torch.stack([2 * costs, torch.zeros_like(costs)], dim=1)

    made = [walk(index, square, round=0, halves=stuck) for index in range(8)]
    fit = learn_in_rounds(lambda *round: made, replace(RECIPE, rounds=1), tasks=8, seed=5, callback=Callback())
    assert fit.half_fits == ()
    assert all(each.halves is not None for each in fit.visited)
