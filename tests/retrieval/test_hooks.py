"""Real trainers, testers and hooks of pytorch-metric-learning finetune phi inside a trunk."""

import copy
import doctest
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("faiss")
pytest.importorskip("pytorch_metric_learning")

from pytorch_metric_learning import losses, miners, testers, trainers
from pytorch_metric_learning.utils.logging_presets import HookContainer

import metricopt_ext as mo
from helpers.quadratics import Quadratic
from helpers.tensors import rand32
from metricopt_ext.retrieval import task as retrieval_task
from metricopt_ext.retrieval.accuracy import RecallCalculator
from metricopt_ext.retrieval.hooks import TrajectoryRecorder
from metricopt_ext.retrieval.recall import recall_metric
from metricopt_ext.retrieval.task import embedding_loss
from metricopt_ext.tasks.ledger import Ledger
from metricopt_ext.tasks.metric import Metric
from metricopt_ext.tasks.trajectories import Trajectory, TrajectoryStore, observation_steps
from metricopt_ext.value.value_function import Quality
from retrieval_losses import RecallLoss

CPU = torch.device("cpu")
D, CLASSES, BATCH = 6, 5, 15
ITERATIONS = 4  # of an epoch

each_loss = pytest.mark.parametrize(
    ("loss_fn", "miner"),
    [
        (losses.FastAPLoss(), None),
        (losses.TripletMarginLoss(margin=0.3), miners.TripletMarginMiner(margin=0.2, type_of_triplets="semihard")),
        (losses.MarginLoss(), miners.DistanceWeightedMiner()),  # which draws at random
        (RecallLoss(lambda_val=50.0), None),  # enough to change ranks
    ],
    ids=["fastap", "mined triplet", "random margin", "recall"],
)


def images(seed: int = 0) -> tuple[Tensor, Tensor]:
    y = torch.arange(ITERATIONS * BATCH) % CLASSES
    return rand32(CLASSES, 2, 5, 5, seed=9)[y] + rand32(len(y), 2, 5, 5, seed=seed), y


def dataset(seed: int = 0) -> list[tuple[Tensor, int]]:
    x, y = images(seed)
    return list(zip(x, y.tolist(), strict=True))


def make_trunk() -> nn.Module:
    torch.manual_seed(0)
    trunk = nn.Sequential(
        nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Dropout(0.5), nn.Flatten(), nn.Linear(54, 8)
    )
    trunk(images()[0])  # moves the running statistics
    return trunk


def make_embedder() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))


def make_f() -> Quadratic:
    f = Quadratic(D, 2)
    f.coefficients.copy_(rand32(2 * D, 2, seed=5))
    f.radius.fill_(1.0)
    f.gradient_floor.fill_(0.1)
    f.quality = Quality(
        spearman=0.9, mae=0.01, constant_mae=0.1, points=100, trajectories=40, near_mae=0.01, headroom=0.1
    )
    return f.eval()


def tensors_of(*modules: nn.Module) -> dict[str, Tensor]:
    """Everything but phi that a model holds, copied."""
    states = ((f"{i}.{key}", value) for i, module in enumerate(modules) for key, value in module.state_dict().items())
    return {key: value.clone() for key, value in states if not key.endswith("metricopt.phi")}


def assert_same(before: dict[str, Tensor], after: dict[str, Tensor]) -> None:
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)


def make_trainer(
    trunk: nn.Module,
    optimizer: torch.optim.Optimizer,
    kind: Any = trainers.MetricLossOnly,
    loss_fn: nn.Module | None = None,
    miner: nn.Module | None = None,
    **options: Any,
) -> Any:
    """Batches come in one fixed order, so that a resumed run meets those that it would have met."""
    x, _ = images()
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(3)).tolist()
    options = {
        "models": {"trunk": trunk},
        "loss_funcs": {"metric_loss": loss_fn or losses.TripletMarginLoss()},
    } | options
    return kind(
        optimizers={"trunk_optimizer": optimizer},
        batch_size=BATCH,
        mining_funcs={} if miner is None else {"tuple_miner": miner},
        dataset=dataset(),
        sampler=order,
        data_device=CPU,
        dataloader_num_workers=0,
        **options,
    )


def test_resume_through_hook_container(tmp_path: Path, records: Any) -> None:
    """Phi, MetricOpt's history and what was recorded come back, and the run goes on as if never stopped."""

    def run(folder: Path, epochs: list[int]) -> tuple[Tensor, dict[str, Any], Trajectory]:
        for done, last in zip([0, *epochs], epochs, strict=False):
            trunk = make_trunk()
            adapter, before = mo.attach_film(trunk, dim=D), tensors_of(trunk)
            optimizer = mo.MetricOpt(adapter.parameters(), make_f(), lr=0.1, steps=3 * ITERATIONS)
            hooks = HookContainer(records, primary_metric="recall_at_1")
            tester = testers.GlobalEmbeddingSpaceTester(
                accuracy_calculator=RecallCalculator(ks=(1,)), dataloader_num_workers=0, data_device=CPU
            )
            tester.end_of_testing_hook = hooks.end_of_testing_hook
            metric = recall_metric([images(seed=1)], ledger=Ledger(5))
            recorder = TrajectoryRecorder(
                adapter, metric, TrajectoryStore(), steps=10, evals=5, then=hooks.end_of_iteration_hook
            )
            trainer = make_trainer(
                trunk,
                optimizer,
                end_of_iteration_hook=recorder,
                end_of_epoch_hook=hooks.end_of_epoch_hook(tester, {"val": dataset(seed=1)}, str(folder)),
            )
            trainer.recorders = {"recorder": recorder}
            hooks.saveable_trainer_objects.append("recorders")
            first = hooks.load_latest_saved_models(trainer, str(folder), device=CPU)
            assert first == done + 1
            assert len(recorder.losses) == done * ITERATIONS
            trainer.train(first, last)
            assert_same(before, tensors_of(trunk))  # all but phi is as it was
        assert recorder.trajectory is not None
        return adapter.phi.detach().clone(), optimizer.state_dict(), recorder.trajectory

    phi, state, trajectory = run(tmp_path / "whole", [3])
    resumed_phi, resumed_state, resumed_trajectory = run(tmp_path / "resumed", [1, 2, 3])
    assert phi.any()
    assert torch.equal(phi, resumed_phi)
    assert state["state"][0]["step"] == resumed_state["state"][0]["step"] == 3 * ITERATIONS
    assert torch.equal(state["state"][0]["history"], resumed_state["state"][0]["history"])
    for name in ("phi", "loss", "observed", "cost", "halves"):
        assert torch.equal(getattr(trajectory, name), getattr(resumed_trajectory, name))


@each_loss
def test_population_equals_one_by_one(loss_fn: Any, miner: Any) -> None:
    trunk, embedder, (x, y) = make_trunk(), make_embedder().train(), images()
    shapes: list[Any] = []

    class Spy(nn.Module):
        def forward(self, embeddings: Tensor, labels: Tensor, mined: Any) -> Tensor:
            shapes.append((embeddings.shape, labels.shape))
            value: Tensor = loss_fn(embeddings, labels, mined)
            return value

    adapter = mo.attach_film(trunk.double(), dim=D)
    task = mo.FinetuneTask(
        adapter,
        loss=embedding_loss(Spy(), miner, embedder=embedder.double()),
        batches=mo.TensorBatches(x.double(), y, BATCH, balanced=True),
        metric=Metric(lambda: 0.0, maximize=True),
        population=4,
    )
    shapes.clear()  # of the first batch, which is run at once
    phi, indices = 0.3 * rand32(6, D, seed=2).double(), [4, 2, 0, 9, 7, 1]
    stream = torch.get_rng_state()
    loss, gradient = task.loss_and_gradient(phi, 0, indices, step=3)
    assert torch.equal(stream, torch.get_rng_state())
    assert shapes == [((BATCH, 4), (BATCH,))] * 6
    assert embedder.training
    assert loss.unique().numel() == 6

    for row, index in enumerate(indices):
        images_of_task, labels = task.batches(0, index, 3)
        adapter.set_phi(phi[row])
        torch.manual_seed(0)  # what the loss and the miner draw from, at every step
        embeddings = embedder.eval()(trunk(images_of_task))
        expected = loss_fn(embeddings, labels, None if miner is None else miner(embeddings, labels))
        (slope,) = torch.autograd.grad(expected, adapter.phi)
        torch.testing.assert_close(loss[row], expected.detach(), rtol=1e-9, atol=1e-10)
        torch.testing.assert_close(gradient[row], slope, rtol=1e-7, atol=1e-9)
        assert slope.norm() > 1e-6


@pytest.mark.parametrize("held", [0, 5, 12])
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_memory_of_earlier_batches_is_constant(held: int, wrapped: bool) -> None:
    memory = losses.CrossBatchMemory(losses.ContrastiveLoss(pos_margin=0.1, neg_margin=2.0), 4, memory_size=12)
    earlier, classes = rand32(held, 4, seed=1).double(), torch.arange(held) % 3
    if held:  # as a training left it
        memory(earlier, classes)
    state = copy.deepcopy(memory.state_dict())
    loss = embedding_loss(losses.MultipleLosses([memory]) if wrapped else memory)
    embedder = nn.Linear(4, 4, dtype=torch.float64)
    x, y = rand32(6, 4, seed=2).double(), torch.tensor([0, 1, 2, 0, 1, 2])
    with torch.no_grad():
        newest = embedder(x)
    kept, place = (earlier, held) if held < 12 else (earlier[6:], 0)  # the batch takes the place of the oldest
    known = torch.cat([y, classes[6:]] if held == 12 else [classes, y])
    remembered = torch.cat([newest, kept] if held == 12 else [kept, newest])
    own = torch.arange(6)[:, None] + place == torch.arange(len(known))

    def by_hand() -> Tensor:
        unit = torch.nn.functional.normalize
        distances = torch.cdist(unit(embedder(x)), unit(remembered), compute_mode="donot_use_mm_for_euclid_dist")
        same = (y[:, None] == known) & ~own
        pulled, pushed = (distances - 0.1).clamp(min=0)[same], (2.0 - distances).clamp(min=0)[y[:, None] != known]
        return sum((part[part > 0].mean() for part in (pulled, pushed) if (part > 0).any()), torch.zeros(()))

    for _ in range(2):  # the second step starts from the same memory
        value = loss(embedder, (x, y))
        expected = by_hand()
        torch.testing.assert_close(value, expected.to(value), rtol=1e-9, atol=1e-12)
        (slope,), (true,) = (torch.autograd.grad(each, embedder.weight) for each in (value, expected))
        torch.testing.assert_close(slope, true, rtol=1e-7, atol=1e-10)
        assert slope.norm() > 1e-3
    for name, tensor in memory.state_dict().items():
        assert torch.equal(tensor, state[name])
    assert memory.queue_idx == held % 12


def sgd_run(recorder_of: Callable[[mo.Adapter], Any], lr: float = 0.5) -> tuple[Tensor, Any]:
    """Train with randomly shuffled batches; returns the last phi and the trainer."""
    trunk, embedder = make_trunk(), make_embedder()
    adapter = mo.attach_film(trunk, dim=D)
    adapter.set_phi(0.2 * rand32(D, seed=4))
    torch.manual_seed(7)
    optimizer = torch.optim.SGD(adapter.parameters(), lr=lr)
    recorder = recorder_of(adapter)
    models = {"trunk": trunk, "embedder": embedder}
    trainer = make_trainer(trunk, optimizer, models=models, end_of_iteration_hook=recorder)
    trainer.sampler = None
    trainer.freeze_these = ("embedder",)
    trainer.train(num_epochs=2)
    return adapter.phi.detach().clone(), trainer


def shuffling_metric(seen: list[tuple[Tensor, bool]], **options: Any) -> Metric:
    """Judges phi, and draws from torch's global stream as a shuffling data loader does."""

    def judge(model: Any) -> float:
        torch.rand(5)
        seen.append((model.metricopt.phi.detach().clone(), model.training))
        return float(torch.sigmoid(model.metricopt.phi.sum()))

    return Metric(judge, maximize=True, **options)


def test_recorder_records_exact_steps() -> None:
    seen: list[tuple[Tensor, bool]] = []
    store, after = TrajectoryStore(), []
    steps, evals = 6, 4

    def recorder_of(adapter: mo.Adapter) -> TrajectoryRecorder:
        metric = shuffling_metric(seen)
        return TrajectoryRecorder(adapter, metric, store, steps=steps, evals=evals, seed=3, index=8, then=after.append)

    path: list[Tensor] = []
    loss: list[Tensor] = []

    def naive(trainer: Any) -> None:
        path.append(trainer.models["trunk"].metricopt.phi.detach().clone())
        loss.append(trainer.losses["total_loss"].detach().clone())

    plain, _ = sgd_run(lambda adapter: naive)
    recorded, trainer = sgd_run(recorder_of)
    assert torch.equal(plain, recorded)  # the metric's queries disturb nothing
    assert trainer.models["trunk"].training
    assert after == [trainer] * 2 * ITERATIONS

    trajectory = store.get(0, 8)
    assert trajectory is not None
    expected = torch.stack([0.2 * rand32(D, seed=4), *path[:steps]])
    assert torch.equal(trajectory.phi, expected)
    assert torch.equal(trajectory.loss, torch.stack(loss[:steps]))
    assert torch.equal(trajectory.observed, observation_steps(steps, evals, 3, 8))
    assert [training for _, training in seen] == [False] * evals
    assert torch.equal(torch.stack([phi for phi, _ in seen]), trajectory.observed_phi)
    costs = -torch.sigmoid(trajectory.observed_phi.sum(dim=1))
    torch.testing.assert_close(trajectory.cost, costs.double())
    assert trajectory.halves is None


def test_examples() -> None:
    failed, attempted = doctest.testmod(retrieval_task)
    assert attempted > 0
    assert failed == 0
