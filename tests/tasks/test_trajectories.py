"""Trajectories and evaluations: rollouts in closed form, what is observed, and what is on file and comes back."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from helpers.refusals import assert_named, assert_refused, having
from metricopt_ext.adapters.adapter import Adapter
from metricopt_ext.adapters.attach import attach_input_bias
from metricopt_ext.adapters.signature import Signature
from metricopt_ext.adapters.start import Start
from metricopt_ext.errors import FileFormatError, MetricError
from metricopt_ext.search.asking import Asking
from metricopt_ext.search.optimizer import LossStep
from metricopt_ext.tasks.cost_scale import CostScale
from metricopt_ext.tasks.evaluation import Evaluation, Outcome
from metricopt_ext.tasks.ledger import Ledger
from metricopt_ext.tasks.log import Entry, Log
from metricopt_ext.tasks.metric import Metric
from metricopt_ext.tasks.trajectories import (
    Recording,
    Trajectory,
    TrajectoryStore,
    collect,
    load_trajectories,
    observation_steps,
    rollout,
)

Make = Callable[..., Any]


def same(a: Trajectory, b: Trajectory) -> bool:
    """Whether two trajectories are equal bit for bit."""
    tensors = ("phi", "loss", "observed", "cost")
    return (a.round, a.index, a.signature) == (b.round, b.index, b.signature) and all(
        getattr(a, name).dtype == getattr(b, name).dtype and torch.equal(getattr(a, name), getattr(b, name))
        for name in tensors
    )


@pytest.mark.parametrize("population", [1, 2, 32])
@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_rollout_is_the_closed_form(quadratic: Make, noise: float, population: int) -> None:
    task = quadratic(noise=noise, population=population)
    starts, lr, steps, indices = task.starts(1.0, 0, range(3)), 0.2, 8, [4, 9, 2]
    points, losses = rollout(task, starts, LossStep(lr), steps=steps, seed=5, indices=indices)
    assert points.shape == (3, 9, 4)
    assert losses.shape == (3, 8)
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


@pytest.mark.parametrize("history", [1, 3])
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


@pytest.mark.parametrize(("steps", "evals", "ends"), [(1, 2, "observed"), (10, 5, "observed"), (10, 4, "random")])
def test_observations_are_drawn_evenly(steps: int, evals: int, ends: Any) -> None:
    """With both ends, or as the paper has it: anywhere but at the start."""
    drawn = [observation_steps(steps, evals, 3, index, ends=ends).tolist() for index in range(2500)]
    assert all(each == sorted(set(each)) and len(each) == evals for each in drawn)
    assert drawn[7] == observation_steps(steps, evals, 3, 7, ends=ends).tolist()
    counts = torch.tensor(drawn).flatten().bincount(minlength=steps + 1)
    inner = counts[1:-1] if ends == "observed" else counts[1:]
    assert ends == "random" or counts[0] == counts[-1] == 2500
    assert (inner - 2500 * (evals - 2 * (ends == "observed")) / max(1, len(inner))).abs().le(150).all()


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


# --- The store -----------------------------------------------------------------------------------------------------


def make_trajectory(round: int = 0, index: int = 0) -> Trajectory:
    rng = torch.Generator().manual_seed(index)
    phi, loss = torch.randn(4, 2, generator=rng), torch.randn(3, generator=rng)
    costs = torch.rand(2, generator=rng, dtype=torch.float64).tolist()
    told = tuple(
        Evaluation(cost, outcomes={"size": Outcome(cost)}, pairs=((0.1, cost), (0.2, 0.3)), noise=0.5) for cost in costs
    )
    signature = None if round else Signature("film", ("a", "b"), (3, 4), index, 2, "normal/1", None)
    return Trajectory(round, index, phi, loss, torch.tensor([0, 3]), told, signature)


@pytest.mark.parametrize("on_disk", [False, True])
def test_store(on_disk: bool, tmp_path: Path) -> None:
    store = TrajectoryStore(tmp_path / "run" if on_disk else None, {"seed": 1})
    keys = [(1, 12), (0, 100_000), (10, 3), (1, 5)]
    for key in keys:
        store.add(make_trajectory(*key))
    stores = [store, TrajectoryStore(tmp_path / "run", {"seed": 1})] if on_disk else [store]
    for each in stores:
        assert len(each) == 4
        assert each.queries == 8
        assert [(t.round, t.index) for t in each] == sorted(keys)
        assert all(same(each.get(*key), make_trajectory(*key)) for key in keys)  # type: ignore[arg-type]
        assert each.get(0, 12) is None
        with pytest.raises(ValueError, match=having("12", "1")):
            each.add(make_trajectory(1, 12))
    if on_disk:  # read without the identity
        assert all(same(a, b) for a, b in zip(load_trajectories(tmp_path / "run"), store, strict=True))
        assert_refused(lambda: load_trajectories(tmp_path), FileFormatError, tmp_path, "output_dir")
        for other in ({"seed": 2}, {"seed": 1, "steps": 3}, None):
            assert_refused(lambda own=other: TrajectoryStore(tmp_path / "run", own), FileFormatError, tmp_path / "run")


@pytest.mark.parametrize("kept", [0.0, 0.3, 0.9])
def test_a_cut_file_is_refused_by_name_and_what_a_kill_left_is_not_read(kept: float, tmp_path: Path) -> None:
    store = TrajectoryStore(tmp_path)
    for index in range(3):
        store.add(make_trajectory(index=index))
    (tmp_path / ".round-0-task-00003.safetensors.x7").write_bytes(b"left by a kill")
    path = tmp_path / "round-0-task-00001.safetensors"
    path.write_bytes(path.read_bytes()[: int(kept * path.stat().st_size)])
    assert_refused(lambda: TrajectoryStore(tmp_path), FileFormatError, path)
    path.unlink()
    assert len(TrajectoryStore(tmp_path)) == 2


# --- Recording of somebody else's training -------------------------------------------------------------------------


D = 3


def adapter() -> Adapter:
    torch.manual_seed(0)
    return attach_input_bias(nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.5), nn.Linear(4, 2)).double(), dim=D)


def walk(steps: int) -> Tensor:
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


def test_a_point_that_was_due_is_judged_as_it_was() -> None:
    """A trainer may tell of a step before anything could be evaluated; `observe` then goes back to phi_0."""
    mine, seen = adapter(), []
    points = walk(2)

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


def test_the_checkpoint_of_another_trajectory_is_refused() -> None:
    one, other = (
        Recording(adapter(), judged_by(length), TrajectoryStore(), steps=8, evals=4, seed=seed) for seed in (1, 2)
    )
    one.start()
    assert_refused(lambda: other.load_state_dict(one.state_dict()), FileFormatError, "observed", "0")


def test_a_resumed_trajectory_has_all_that_the_metric_told() -> None:
    def recording(store: TrajectoryStore) -> Recording:
        values = iter([0.1, 0.3] * 9)
        pairs = (0.1, 0.2), (0.3, 0.4)
        metric = Metric(lambda: {"score": (next(values), pairs), "size": 3.0}, maximize=False, repeats=2, name="score")
        return Recording(adapter(), metric, store, steps=2, evals=3)

    whole, parted, points = TrajectoryStore(), TrajectoryStore(), walk(2)
    train(recording(whole), points)
    first, second = recording(parted), recording(parted)
    train(first, points[:2])
    second.load_state_dict(first.state_dict())
    train(second, points)
    for (one,) in (whole, parted):
        assert [each.noise for each in one.evaluations] == pytest.approx([0.1] * 3)
        assert all(np.allclose(each.pairs, [(0.1, 0.2), (0.3, 0.4)]) for each in one.evaluations)
        assert all(each.also == {"size": 3.0} for each in one.evaluations)


def test_a_failing_metric_is_located_and_the_trained_phi_is_back() -> None:
    mine, points = adapter(), walk(2)

    def failing(model: Any) -> float:
        if not torch.equal(model.metricopt.phi, points[0]):
            raise OSError("the evaluation server is down")
        return 0.5

    recording = Recording(mine, judged_by(failing), TrajectoryStore(), steps=2, evals=3, round=1, index=7)
    assert_refused(lambda: train(recording, points), MetricError, "server", "1", "7")
    assert torch.equal(mine.phi, points[1])
    assert mine.model.training


# --- A metric that remembers ---------------------------------------------------------------------------------------


def counting(stop: int = 99, halves: bool = False, **settings: int) -> Metric:
    """Return 0.0, 0.1, 0.2, ... and fail at the call of that number."""
    calls: list[float] = []

    def function() -> float | tuple[float, tuple[float, float]]:
        calls.append(len(calls) / 10)
        if len(calls) > stop:
            raise OSError("down")
        return (calls[-1], (calls[-1], calls[-1] + 0.05)) if halves else calls[-1]

    return Metric(function, maximize=False, ledger=Ledger(10), **settings)


def ask(metric: Metric, *points: float, path: Path | None = None, tensors: Any = None) -> list[Evaluation]:
    """Evaluate a metric at points of one dimension, which a file keeps."""
    logged = metric.logged(Log(path, metric))
    starts = [Start(torch.tensor([point], dtype=torch.float64), tensors or {}) for point in points]
    return [logged.ask(lambda: metric.judge(nn.Identity()), "x", start.phi, start) for start in starts]


def test_other_tensors_are_another_model_and_a_point_asked_twice_is_kept_twice(tmp_path: Path) -> None:
    path, twice = tmp_path / "log.jsonl", tmp_path / "twice.jsonl"
    ask(counting(), 1.0, path=path)
    ask(counting(), 1.0, path=path, tensors={"mean": torch.ones(2)})
    assert [bool(each.replaced) for _, each in sorted(Log(path, UNBOUNDED).entries.items())] == [False, True]
    told = ask(counting(), 1.0, 1.0, path=twice)
    assert [each.cost for each in told] == [0.0, 0.1]
    assert ask(counting(), 1.0, 1.0, 1.0, path=twice) == [*told, told[0]]
    assert [each.cost for each in ask(counting(), 1.0, 1.0, 1.0)] == [0.0, 0.1, 0.2]


def test_what_is_on_file_is_booked_and_told_but_not_asked(tmp_path: Path) -> None:
    ask(counting(), 1.0, 2.0, path=tmp_path / "log.jsonl")
    metric, told = counting(stop=1), list[Any]()
    metric.callbacks.append(told.append)
    ask(metric, 2.0, 3.0, 1.0, path=tmp_path / "log.jsonl")
    assert [(each.value, each.on_file, each.spent) for each in told] == [
        (0.1, True, 1),
        (0.0, False, 2),
        (0.0, True, 3),
    ]


def test_one_log_is_not_used_in_two_ways(tmp_path: Path) -> None:
    for path in (tmp_path / "log.jsonl", None):
        by_points, by_numbers = Log(path, UNBOUNDED), Log(path, UNBOUNDED)
        counting().logged(by_points).evaluate(nn.Identity(), "x")
        assert_refused(lambda log=by_points: Asking(iter(()), log), RuntimeError, "points", "numbers")
        Asking(iter(()), by_numbers)
        metric = counting(0).logged(by_numbers)
        assert_refused(lambda metric=metric: metric.evaluate(nn.Identity(), "x"), RuntimeError, "points", "numbers")


# --- The log -------------------------------------------------------------------------------------------------------


UNBOUNDED = CostScale(maximize=False, bounds=None, name="x")
SETTINGS = {"size": 566, "soft": 0.1 + 0.2, "flip": True}


def entry(id: int, dtype: torch.dtype = torch.float64) -> Entry:
    phi = torch.randn(7, generator=torch.Generator().manual_seed(3), dtype=torch.float64).to(dtype)
    return Entry.of(id, Start(phi * id) if id else Start(phi * id, {"mean": torch.ones(2)}, settings=SETTINGS))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_points_and_answers_come_back_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    path, log = tmp_path / "log.jsonl", Log(tmp_path / "log.jsonl", UNBOUNDED)
    points = [entry(id, dtype) for id in range(5)]
    log.append(points)
    pairs = (1 / 3, 2 / 3), (0.1 + 0.2, 1e-17)
    also = {
        "recall[person]": Outcome(0.1 + 0.2, pairs, 1e-9),
        "ece": Outcome(5e-324),
        "\u00e9 \n": Outcome(1 / 3),
        "none": Outcome(0.0),
    }
    one = Evaluation(0.0, also, ((1 / 3, 2 / 3),), 0.0)
    several = Evaluation(0.1, pairs=pairs, noise=0.5)
    log.append([points[2].told(one, 3)])
    log.append([points[4].told(several, 1), points[0].told(Evaluation(9.0, also, failed=True), 3)])
    log.append([points[1].told(None, 0)])
    again = Log(path, UNBOUNDED)
    assert again.entries == log.entries
    assert again.entries[3] == points[3]
    assert again.told(3) is None
    assert [again.evaluation(again.entries[id]) for id in (2, 4, 0, 1)] == [one, several, None, None]
    found = [(each.failed, each.given_up, each.asked, each.outcomes) for id in (0, 1, 2, 4) if (each := again.told(id))]
    # Of a stand-in for what failed nothing is kept: its values are another evaluation's.
    assert found == [(True, False, 3, None), (False, True, 0, None), (False, False, 3, also), (False, False, 1, None)]
    assert again.answered == 3
    like = torch.zeros(7, dtype=dtype)
    assert torch.equal(again.entries[2].at(like), entry(1, dtype).at(like) * 2)
    assert_refused(lambda: points[2].at(torch.zeros(3)), ValueError, "7", "phi", "3")


def test_a_torn_last_line_is_dropped_and_written_anew(tmp_path: Path) -> None:
    path, first, second = tmp_path / "log.jsonl", entry(0).told(Evaluation(0.5), 1), entry(1).told(Evaluation(0.25), 1)
    log = Log(path, UNBOUNDED)
    log.append([first])
    short = path.read_bytes()
    log.append([second])
    whole = path.read_bytes()
    assert whole.startswith(short)
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        torn = Log(path, UNBOUNDED)
        assert list(torn.entries) == ([0] if size >= len(short) else [])
        torn.append([each for each in (first, second) if each.id not in torn.entries])
        assert path.read_bytes() == whole


def lined(*contents: Any) -> str:
    first = {"format": "metricopt_ext/log/2"}
    return "".join(f"{json.dumps(each)}\n" for each in (first, *contents))


ANSWER = {"id": 0, "phi": [1.0], "value": 0.5, "asked": 1}


@pytest.mark.parametrize(
    ("changes", "bounds", "name"),
    [
        ({}, (0.0, 1.0), ""),
        ({"value": -7.0}, (0.0, 1.0), "-7.0"),
        ({"value": 9.5}, (0.0, 9.0), "9.5"),
        ({"pairs": [[0.5, 1.5]]}, (0.0, 1.0), "1.5"),
        ({"value": float("nan")}, (0.0, 1.0), "nan"),
        ({"noise": -0.5}, None, "0"),
        ({"outcomes": {"a": [0.5, [], -1.0]}}, None, "0"),
        ({"failed": True}, None, "value"),
        ({"phi": [0.5, float("nan")]}, None, "phi"),
        ({"value": "x"}, None, "value"),
    ],
)
def test_an_answer_that_can_be_none_is_not_believed(
    tmp_path: Path, changes: dict[str, Any], bounds: Any, name: str
) -> None:
    path, scale = tmp_path / "log.jsonl", CostScale(maximize=False, bounds=bounds, name="x")
    path.write_text(lined(ANSWER | changes))
    if not name:
        assert Log(path, scale).entries[0].value == 0.5
        return
    with pytest.raises(FileFormatError) as caught:
        Log(path, scale)
    assert_named(caught, name)


@pytest.mark.parametrize(
    "text",
    ["{\n", "[]\n", lined(1), lined(ANSWER, ANSWER), lined(ANSWER, {"id": 0, "phi": [1.0]}), lined()[4:]],
)
def test_a_foreign_or_changed_file_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text(text)
    assert_refused(lambda: Log(path, UNBOUNDED), FileFormatError, path)
