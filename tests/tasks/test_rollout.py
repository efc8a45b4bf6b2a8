"""Rollouts in closed form, observations along them, and collection that survives a kill."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.refusals import assert_refused, having
from metricopt_ext.errors import BudgetError, MetricError
from metricopt_ext.search.optimizer import LossStep
from metricopt_ext.tasks.rollout import collect, observation_steps, rollout
from metricopt_ext.tasks.trajectory import Trajectory, TrajectoryStore

Make = Callable[..., Any]


@pytest.mark.parametrize("population", [1, 2, 32])
@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_rollout_is_the_closed_form(quadratic: Make, noise: float, population: int) -> None:
    task = quadratic(noise=noise, population=population)
    starts, lr, steps, indices = task.starts(1.0, 0, range(3)), 0.2, 8, [4, 9, 2]
    ticks: list[int] = []
    points, losses = rollout(
        task, starts, LossStep(lr), steps=steps, seed=5, indices=indices, on_step=lambda: ticks.append(1)
    )
    assert points.shape == (3, 9, 4)
    assert losses.shape == (3, 8)
    assert len(ticks) == 8
    for row, index in enumerate(indices):
        # phi_t - c = (1 - lr h)^t (phi_0 - c) + lr h sum_s (1 - lr h)^(t - 1 - s) noise_s
        shrink = 1 - lr * task.curvature
        noises = [task.batch(5, index, step) for step in range(steps)]
        for t in range(steps + 1):
            expected = task.centre + shrink**t * (starts[row] - task.centre)
            for s in range(t):
                expected = expected + lr * task.curvature * shrink ** (t - 1 - s) * noises[s]
            torch.testing.assert_close(points[row, t], expected, rtol=1e-12, atol=1e-12)
            if t < steps:
                loss = (task.curvature * (expected - task.centre - noises[t]) ** 2).sum() / 2
                torch.testing.assert_close(losses[row, t], loss, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("history", [1, 3, 20])
def test_policy_sees_the_latest_gradients(quadratic: Make, history: int) -> None:
    task = quadratic()
    seen: list[tuple[Tensor, Tensor, int]] = []

    def policy(phi: Tensor, gradients: Tensor, step: int) -> Tensor:
        seen.append((phi, gradients, step))
        return phi + 1

    points, _ = rollout(task, task.starts(1.0, 0, range(2)), policy, steps=6, seed=5, indices=[4, 9], history=history)
    assert [step for _, _, step in seen] == list(range(6))
    for phi, gradients, step in seen:
        assert torch.equal(phi, points[:, step])
        steps = range(max(0, step + 1 - history), step + 1)
        expected = [task.loss_and_gradient(points[:, s], 5, [4, 9], s)[1] for s in steps]
        torch.testing.assert_close(gradients, torch.stack(expected, 1), rtol=0, atol=0)


def test_rollout_needs_a_history(quadratic: Make) -> None:
    task = quadratic()
    assert_refused(
        lambda: rollout(task, task.starts(1.0, 0, [0]), LossStep(0.1), steps=2, seed=0, indices=[0], history=0),
        ValueError,
        "history",
        "0",
    )


@pytest.mark.parametrize(("steps", "evals"), [(1, 2), (2, 2), (2, 3), (50, 5), (10, 11)])
def test_observation_steps(steps: int, evals: int) -> None:
    for index in range(20):
        observed = observation_steps(steps, evals, 3, index).tolist()
        assert len(observed) == evals
        assert observed == sorted(set(observed))
        assert observed[0] == 0
        assert observed[-1] == steps
        assert observed == observation_steps(steps, evals, 3, index).tolist()


def test_inner_observations_are_drawn_evenly() -> None:
    drawn = torch.cat([observation_steps(10, 5, 3, index) for index in range(3000)])
    inner = drawn.bincount()[1:-1]
    assert inner.sum() == 9000
    assert (inner - 1000).abs().max() < 150
    others = [observation_steps(50, 5, seed, 0).tolist() for seed in range(10)]
    assert len({tuple(steps) for steps in others}) == 10


def test_random_ends_are_drawn_as_evenly_as_the_other_steps() -> None:
    drawn = [observation_steps(10, 4, 3, index, ends="random") for index in range(2500)]
    assert all(each.tolist() == sorted(set(each.tolist())) and len(each) == 4 for each in drawn)
    counts = torch.cat(drawn).bincount(minlength=11)
    assert counts[0] == 0
    assert (counts[1:] - 1000).abs().max() < 150
    assert observation_steps(4, 4, 0, 0, ends="random").tolist() == [1, 2, 3, 4]
    for evals in (1, 5):
        with pytest.raises(ValueError, match=having("evals", evals, "4", "ends", "random")):
            observation_steps(4, evals, 0, 0, ends="random")


@pytest.mark.parametrize(("steps", "evals"), [(10, 1), (10, 0), (10, 12), (1, 3)])
def test_impossible_observations(steps: int, evals: int) -> None:
    assert_refused(lambda: observation_steps(steps, evals, 0, 0), ValueError, "evals", evals, "1", steps + 1)


@pytest.mark.parametrize("wrong", [{"steps": 10.0}, {"evals": 3.0}, {"evals": True}, {"seed": -1}, {"seed": 0.5}])
def test_what_is_no_integer_is_refused_by_name(wrong: dict[str, Any]) -> None:
    ((name, value),) = wrong.items()
    assert_refused(
        lambda: observation_steps(**{"steps": 10, "evals": 3, "seed": 0, "index": 0, **wrong}), ValueError, name, value
    )


def run(task: Any, store: TrajectoryStore, indices: Sequence[int] = range(5), **kwargs: Any) -> list[Trajectory]:
    settings: dict[str, Any] = {"round": 0, "start_std": 0.5, "steps": 6, "evals": 3, "seed": 8, **kwargs}
    return collect(task, store, lambda chunk: LossStep(0.2), indices=indices, **settings)


@pytest.mark.parametrize("population", [1, 2, 32])
def test_collected_trajectories(quadratic: Make, population: int) -> None:
    task, store, costs = quadratic(population=population), TrajectoryStore(), []
    indices = [3, 1, 4, 0, 5]
    with task.metric.calling(lambda query: costs.append(query.evaluation.cost)):
        found = run(task, store, indices, round=2)
    assert [trajectory.index for trajectory in found] == indices
    assert task.metric.ledger.spent_on == {"collect": 15}
    assert task.queries == store.queries == 15
    assert len(store) == 5
    for trajectory in found:
        assert trajectory.round == 2
        assert trajectory.signature == task.adapter.signature
        starts = task.starts(0.5, 8, [trajectory.index])
        points, losses = rollout(task, starts, LossStep(0.2), steps=6, seed=8, indices=[trajectory.index])
        torch.testing.assert_close(trajectory.phi, points[0], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(trajectory.loss, losses[0], rtol=1e-12, atol=1e-12)
        assert torch.equal(trajectory.observed, observation_steps(6, 3, 8, trajectory.index))
        assert trajectory.cost.dtype == torch.float64
        assert trajectory.cost.tolist() == [task.true_cost(trajectory.phi[step]) for step in trajectory.observed]
        assert torch.equal(trajectory.observed_phi, torch.stack([trajectory.phi[i] for i in trajectory.observed]))
    assert costs == torch.cat([trajectory.cost for trajectory in found]).tolist()


def test_each_chunk_has_its_policy(quadratic: Make) -> None:
    chunks: list[list[int]] = []

    def policy_of(chunk: Sequence[int]) -> LossStep:
        chunks.append(list(chunk))
        return LossStep(0.2)

    collect(
        quadratic(population=2),
        TrajectoryStore(),
        policy_of,
        round=0,
        indices=[6, 7, 8, 9, 10],
        start_std=0.5,
        steps=3,
        evals=2,
        seed=0,
    )
    assert chunks == [[6, 7], [8, 9], [10]]


def test_collecting_leaves_phi_alone(quadratic: Make) -> None:
    task = quadratic()
    task.adapter.set_phi(torch.ones(4))
    run(task, TrajectoryStore())
    assert torch.equal(task.adapter.phi, torch.ones(4))


@pytest.mark.parametrize("failing", range(1, 15, 3))
def test_a_failing_metric_is_located(quadratic: Make, failing: int) -> None:
    task, store = quadratic(population=2), TrajectoryStore()
    task.problem.fail_after = failing
    index, query = divmod(failing, 3)
    step = int(observation_steps(6, 3, 8, index)[query])
    names = ("distance", "OSError", "round", "4", index, step)
    assert_refused(lambda: run(task, store, round=4), MetricError, *names)
    assert len(store) == index
    assert task.metric.ledger.spent == failing + 1


@pytest.mark.parametrize("population", [1, 2, 32])
@pytest.mark.parametrize("stopped_by", ["metric", "budget"])
@pytest.mark.parametrize("after", [0, 1, 3, 7, 14])
def test_resumed_run_is_the_uninterrupted_run(
    same: Callable[[Trajectory | None, Trajectory | None], bool],
    files: Callable[[Path], dict[str, bytes]],
    quadratic: Make,
    tmp_path: Path,
    after: int,
    stopped_by: str,
    population: int,
) -> None:
    identity = {"seed": 8, "layers": ("a", "b"), "lr": 0.1}
    whole = run(quadratic(population=population), TrajectoryStore(tmp_path / "whole", identity))

    folder = tmp_path / "resumed"
    killed = quadratic(population=population, budget=after if stopped_by == "budget" else None)
    killed.problem.fail_after = after if stopped_by == "metric" else None
    with pytest.raises(MetricError if stopped_by == "metric" else BudgetError):
        run(killed, TrajectoryStore(folder, identity))
    assert killed.queries == after + (stopped_by == "metric")
    finished = after // 3
    names = ["identity.json", *(f"round-0-task-{i:05d}.safetensors" for i in range(finished))]
    assert list(files(folder)) == names
    kept = files(folder)

    task, store = quadratic(population=population), TrajectoryStore(folder, identity)
    assert len(store) == finished
    resumed = run(task, store)
    assert task.queries == task.metric.ledger.spent == (5 - finished) * 3
    assert all(same(a, b) for a, b in zip(resumed, whole, strict=True))
    assert files(folder).keys() == files(tmp_path / "whole").keys()
    assert all(same(a, b) for a, b in zip(TrajectoryStore(folder, identity), whole, strict=True))
    assert all(files(folder)[name] == data for name, data in kept.items())

    again = quadratic(population=population)
    run(again, TrajectoryStore(folder, identity))
    assert again.queries == 0
