"""Recording of somebody else's training: what is kept of it, what it must not disturb, and what is refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers.refusals import assert_refused
from metricopt_ext.adapters.adapter import Adapter
from metricopt_ext.adapters.attach import attach_input_bias
from metricopt_ext.errors import BudgetError, FileFormatError, MetricError
from metricopt_ext.tasks.ledger import Ledger
from metricopt_ext.tasks.metric import Metric
from metricopt_ext.tasks.recording import Recording
from metricopt_ext.tasks.rollout import observation_steps
from metricopt_ext.tasks.trajectory import Trajectory, TrajectoryStore

D = 3


def adapter() -> Adapter:
    torch.manual_seed(0)
    return attach_input_bias(nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.5), nn.Linear(4, 2)).double(), dim=D)


def path(steps: int) -> Tensor:
    return torch.randn(steps + 1, D, generator=torch.Generator().manual_seed(4), dtype=torch.float64)


def length(model: Any) -> float:
    return float(model.metricopt.phi.norm())


def judged_by(judge: Callable[[Any], Any], budget: int | None = None) -> Metric:
    return Metric(judge, maximize=False, bounds=None, name="length", ledger=Ledger(budget))


def train(recording: Recording, points: Tensor, models: Any = None) -> None:
    """Stand for a trainer whose phi goes through the points, with 0, 1, 2, ... for losses."""
    models = [recording.adapter.model] if models is None else models
    if not recording.points:
        recording.adapter.set_phi(points[0])
        recording.start()
    for point in points[len(recording.points) :]:
        recording.adapter.set_phi(point)
        recording.record(float(len(recording.losses)), models)


def test_the_first_steps_become_a_trajectory() -> None:
    store, points = TrajectoryStore(), path(9)
    recording = Recording(adapter(), judged_by(length), store, steps=6, evals=4, seed=3, round=2, index=8)
    train(recording, points[:6])
    assert recording.trajectory is None
    assert len(store) == 0
    train(recording, points)
    (trajectory,) = store
    assert trajectory is recording.trajectory is store.get(2, 8)
    assert torch.equal(trajectory.phi, points[:7])  # what comes after T steps is not recorded
    assert trajectory.loss.tolist() == [0, 1, 2, 3, 4, 5]
    assert torch.equal(trajectory.observed, observation_steps(6, 4, 3, 8))
    assert trajectory.cost.tolist() == [float(points[step].norm()) for step in trajectory.observed]
    assert trajectory.halves is None
    assert trajectory.signature == recording.adapter.signature
    assert recording.metric.ledger.spent_on == {"collect": 4}
    assert torch.equal(recording.adapter.phi, points[9])


def test_the_metric_disturbs_neither_modes_nor_phi_nor_random_streams() -> None:
    mine, other = adapter(), nn.Dropout(0.5)
    other.eval()
    frozen = nn.Sequential(nn.BatchNorm1d(2), nn.Dropout(0.5)).train()
    frozen[0].eval()
    seen: list[tuple[bool, ...]] = []

    def judge(model: Any) -> float:
        torch.rand(7)
        seen.append((model.training, model[1].training, other.training, frozen.training, frozen[1].training))
        return length(model)

    recording = Recording(mine, judged_by(judge), TrajectoryStore(), steps=3, evals=4)
    mine.model.train()
    torch.manual_seed(5)
    train(recording, path(3), [mine.model, other, frozen])
    assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(5)))
    assert seen == [(False,) * 5] * 4
    assert [module.training for module in mine.model] == [True] * 3 + [True]
    assert not other.training
    assert [frozen.training, frozen[0].training, frozen[1].training] == [True, False, True]
    assert torch.equal(mine.phi, path(3)[3])
    assert mine.phi.requires_grad


def test_a_point_that_was_due_is_judged_as_it_was() -> None:
    """A trainer may tell of a step before anything could be evaluated; `observe` then goes back to phi_0."""
    mine, seen = adapter(), []
    points = path(2)

    def judge(model: Any) -> float:
        seen.append(model.metricopt.phi.detach().clone())
        return 0.5

    recording = Recording(mine, judged_by(judge), TrajectoryStore(), steps=2, evals=3)
    mine.set_phi(points[0])
    recording.start()
    mine.set_phi(points[1])  # the optimizer's step came first
    recording.observe([mine.model])
    assert torch.equal(torch.stack(seen), points[:1])
    assert torch.equal(mine.phi, points[1])
    recording.observe([mine.model])
    assert len(seen) == 1  # nothing else is due


def halved(model: Any) -> Any:
    value = length(model)
    return value, (value / 2, value / 3)


def same(a: Trajectory | None, b: Trajectory | None) -> bool:
    assert a is not None
    assert b is not None
    names = [name for name in ("phi", "loss", "observed", "cost", "halves") if getattr(a, name) is not None]
    assert names == [name for name in ("phi", "loss", "observed", "cost", "halves") if getattr(b, name) is not None]
    return (a.round, a.index) == (b.round, b.index) and all(
        torch.equal(getattr(a, name), getattr(b, name)) for name in names
    )


@pytest.mark.parametrize("judge", [length, halved])
@pytest.mark.parametrize("stop", [0, 2, 5])
def test_it_goes_on_from_a_checkpoint_as_if_never_stopped(judge: Any, stop: int) -> None:
    points = path(5)
    settings = {"steps": 5, "evals": 4, "seed": 1, "index": 2}
    whole = Recording(adapter(), judged_by(judge), TrajectoryStore(), **settings)
    train(whole, points)
    first = Recording(adapter(), judged_by(judge), TrajectoryStore(), **settings)
    train(first, points[: stop + 1])
    second = Recording(adapter(), judged_by(judge), TrajectoryStore(), **settings)
    second.load_state_dict(first.state_dict())
    assert len(second.losses) == stop
    second.adapter.set_phi(points[stop])
    train(second, points)
    assert same(second.trajectory, whole.trajectory)
    assert first.metric.ledger.spent + second.metric.ledger.spent == whole.metric.ledger.spent == 4


def test_halves_are_kept_beside_the_costs() -> None:
    recording = Recording(adapter(), judged_by(halved), TrajectoryStore(), steps=5, evals=3)
    train(recording, path(5))
    trajectory = recording.trajectory
    assert trajectory is not None
    torch.testing.assert_close(trajectory.halves, trajectory.cost[:, None] / torch.tensor([[2.0, 3.0]]).double())


def test_a_trajectory_that_the_store_has_is_not_recorded_again() -> None:
    store = TrajectoryStore()
    train(Recording(adapter(), judged_by(length), store, steps=2, evals=2, index=5), path(2))
    again = Recording(adapter(), judged_by(length), store, steps=2, evals=2, index=5)
    assert again.trajectory is not None
    again.start()
    again.record(0.5, [again.adapter.model])
    assert again.metric.ledger.spent == 0
    assert len(store) == 1
    assert again.losses == []


@pytest.mark.parametrize("evals", [1, 9])
def test_observations_out_of_range_are_refused(evals: int) -> None:
    assert_refused(
        lambda: Recording(adapter(), judged_by(length), TrajectoryStore(), steps=5, evals=evals),
        ValueError,
        "evals",
        evals,
        "2",
        "1",
        "6",
    )


def test_the_checkpoint_of_another_trajectory_is_refused() -> None:
    one, other = (
        Recording(adapter(), judged_by(length), TrajectoryStore(), steps=8, evals=4, seed=seed) for seed in (1, 2)
    )
    one.start()
    assert_refused(lambda: other.load_state_dict(one.state_dict()), FileFormatError, "observed", "0")


def test_a_failing_metric_is_located_and_the_trained_phi_is_back() -> None:
    mine, points = adapter(), path(2)

    def failing(model: Any) -> float:
        if not torch.equal(model.metricopt.phi, points[0]):
            raise OSError("the evaluation server is down")
        return 0.5

    recording = Recording(mine, judged_by(failing), TrajectoryStore(), steps=2, evals=3, round=1, index=7)
    assert_refused(lambda: train(recording, points), MetricError, "server", "1", "7")
    assert torch.equal(mine.phi, points[1])
    assert mine.model.training


def test_a_spent_budget_ends_it() -> None:
    recording = Recording(adapter(), judged_by(length, budget=1), TrajectoryStore(), steps=2, evals=3)
    assert_refused(lambda: train(recording, path(2)), BudgetError, "0", "budget", "1")
