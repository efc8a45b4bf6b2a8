"""One call of a training script that tunes its model: what it leaves, what it refuses, several processes."""

import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler, TensorDataset

import metricopt_ext as mo
from helpers.refusals import assert_named, assert_refused
from metricopt_ext.errors import AdapterError, DataError, MetricError
from metricopt_ext.integrations.loops import loader_batches, on_device, tune_model
from metricopt_ext.runtime.progress import Callback

X = torch.randn(60, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = (X[:, 0] > 0.5).long()
LOADER = DataLoader(TensorDataset(X, Y), batch_size=20, shuffle=True)
ROOT = Path(__file__).resolve().parents[2]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 2)).double()


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def likelihood(model: nn.Module) -> tuple[float, list[float]]:
    """The mean probability of the right class, whose best value no rounding decides."""
    right = model(X).detach().softmax(1).gather(1, Y[:, None])[:, 0]
    return float(right.mean()), [float(right[::2].mean()), float(right[1::2].mean())]


def tuned(model: nn.Module, metric: Any, **options: Any) -> Any:
    options = {"queries": 20, "callback": Callback(), "attach": lambda inner: mo.attach_film(inner, dim=4), **options}
    return tune_model(model, LOADER, loss, metric, **options)


def test_no_trainer_s_package_is_needed(tmp_path: Path) -> None:
    """What does need one of pytorch-metric-learning's says what to install."""
    script = tmp_path / "script.py"
    script.write_text(
        """
import sys
sys.modules["pytorch_metric_learning"] = None
import torch
from torch.utils.data import DataLoader, TensorDataset
from metricopt_ext.integrations.loops import tune_model
model, data = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4)), torch.randn(40, 4)
loader = DataLoader(TensorDataset(data, data), batch_size=8)
tune_model(model, loader, torch.nn.MSELoss(), lambda: float(torch.rand(())), queries=12, population=1)
try:
    import metricopt_ext.retrieval.search
except ImportError as error:
    print(error)
"""
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, cwd=ROOT, check=False)
    assert "pip install 'pytorch-metric-learning<3" in done.stdout, done.stderr


on_the_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there it wants the model on a GPU")


@pytest.mark.parametrize(
    "wrap",
    [
        lambda model: model,
        pytest.param(nn.DataParallel, marks=on_the_cpu, id="DataParallel"),
        lambda model: torch.compile(model),
    ],
)
def test_the_model_is_an_ordinary_one_again_and_the_one_that_was_judged_best(wrap: Any) -> None:
    model = network()
    wrapped, names, before = wrap(model), set(model.state_dict()), likelihood(model.eval())[0]
    model.train()
    run = tuned(wrapped, lambda: likelihood(model))
    assert sum(run.queries.values()) == 20
    assert run.before == pytest.approx(before)
    assert run.guard == "halves"
    assert model.training
    assert set(model.state_dict()) == names
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert run.after > run.before + 0.01
    assert likelihood(model.eval())[0] == pytest.approx(run.after, abs=1e-9)


def test_how_many_phi_are_computed_at_once_is_chosen_unless_it_is_given() -> None:
    seen: list[str] = []
    for population in (None, 1):
        shown = type("Shown", (Callback,), {"say": lambda self, line: seen.append(line)})()
        tuned(network(), likelihood, population=population, callback=shown)
    assert [line for line in seen if line.startswith("population")] == [next(iter(seen))]
    assert seen[0].startswith("population 32: the activations of 32 batches take ")


def test_the_search_is_the_one_of_the_parts() -> None:
    ours, other = network(), network()
    run = tuned(ours, likelihood)
    task = mo.FinetuneTask(
        adapter := mo.attach_film(other, dim=4),
        loss=loss,
        batches=mo.DatasetBatches(LOADER.dataset, 20),
        metric=mo.Metric(likelihood, maximize=True),
    )
    assert mo.optimize_metric(task, queries=20, callback=Callback()).after == run.after
    adapter.merge()
    assert all(torch.equal(a, b) for a, b in zip(ours.state_dict().values(), other.state_dict().values(), strict=True))


def test_what_the_metric_is_called() -> None:
    def broken() -> float:
        raise RuntimeError("no data")

    for metric, options, name in (
        (broken, {}, "'broken'"),
        (lambda: broken(), {}, "'metric'"),
        (broken, {"name": "acc1"}, "'acc1'"),
    ):
        with pytest.raises(MetricError) as caught:
            tuned(network(), metric, **options)
        assert_named(caught, name)


def test_a_loss_that_is_there_in_training_mode_alone() -> None:
    """As that of torchvision's detectors; dropout still computes as in evaluation, and what is drawn is replayed."""
    modes, drawn = set(), []

    def noisy(model: nn.Module, batch: list[Tensor]) -> Tensor:
        modes.add(model.training)
        drawn.append(float(torch.rand(())))
        return loss(model, batch)

    before = torch.get_rng_state()
    tune_model(network(), LOADER, noisy, likelihood, queries=20, training=True, callback=Callback())
    assert modes == {True}
    assert len(set(drawn)) == 1
    assert torch.equal(before, torch.get_rng_state())


def test_a_criterion_of_outputs_and_targets() -> None:
    ours, other = network(), network()
    tuned(ours, likelihood)
    options = {"queries": 20, "callback": Callback(), "attach": lambda inner: mo.attach_film(inner, dim=4)}
    tune_model(other, LOADER, nn.CrossEntropyLoss(), likelihood, **options)
    assert all(torch.equal(a, b) for a, b in zip(ours.state_dict().values(), other.state_dict().values(), strict=True))


def squares(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.softmax(1)[:, 1] - targets).square().mean()


PAIRS = DataLoader([{"x": x, "y": y} for x, y in zip(X, Y, strict=True)], batch_size=20)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("criterion", "loader", "names"),
    [
        (F.cross_entropy, LOADER, ("loss", "cross_entropy", "batch")),
        (F.mse_loss, LOADER, ("loss", "mse_loss", "outputs")),
        (partial(F.cross_entropy, label_smoothing=0.1), LOADER, ("loss", "cross_entropy", "outputs")),
        (squares, LOADER, ("Sequential", "outputs")),
        (nn.CrossEntropyLoss, LOADER, ("loss=CrossEntropyLoss()",)),
        (None, LOADER, ("loss", "None")),
        (nn.CrossEntropyLoss(), PAIRS, ("batch['x']", "batch['y']")),
        (nn.CrossEntropyLoss(), DataLoader(X, batch_size=20), ("Tensor",)),  # type: ignore[arg-type]
    ],
)
def test_a_loss_of_other_things_is_refused_before_the_first_query(
    criterion: Any, loader: Any, names: tuple[str, ...]
) -> None:
    asked: list[int] = []
    model = network()
    assert_refused(
        lambda: tune_model(model, loader, criterion, lambda: asked.append(1), queries=20, callback=Callback()),
        TypeError,
        *names,
    )
    assert not asked
    assert set(model.state_dict()) == set(network().state_dict())


def test_an_error_within_a_loss_stays_as_it_is() -> None:
    def fails(model: nn.Module, batch: Any) -> Tensor:
        raise TypeError("no such label")

    assert_refused(
        lambda: tune_model(network(), LOADER, fails, likelihood, queries=20, callback=Callback()),
        TypeError,
        "no such label",
    )


def test_after_an_error_the_model_is_as_it_was() -> None:
    model, asked = network(), []

    def fails_later() -> float:
        asked.append(1)
        if len(asked) > 3:
            raise RuntimeError("the disk is full")
        return 0.5

    before = {name: each.clone() for name, each in model.state_dict().items()}
    assert_refused(lambda: tuned(model, fails_later), MetricError, "the disk is full")
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_what_can_not_be_merged_costs_no_query() -> None:
    model, asked = network(), []
    model.scale = model[1].weight
    assert_refused(lambda: tuned(model, lambda: asked.append(1)), AdapterError, "1.weight")
    assert not asked
    assert all(parameter.requires_grad for parameter in model.parameters())


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(zip(X, Y, strict=True))


def test_data_without_batches_to_draw_again() -> None:
    model = network()
    for loader, names in (
        (DataLoader(Stream(), batch_size=5), ()),
        ([(X, Y)], ()),
        (DataLoader(TensorDataset(X, Y), batch_size=None), ("batch_size",)),
    ):
        with pytest.raises(DataError) as caught:
            tune_model(model, loader, loss, likelihood, queries=20)
        assert_named(caught, *names)
    assert not [name for name in model.state_dict() if "metricopt" in name]


def test_batches_of_loaders() -> None:
    data = TensorDataset(X, Y)
    sampled = DataLoader(data, batch_sampler=BatchSampler(SequentialSampler(data), 7, False), collate_fn=list)
    batch = loader_batches(sampled)(0, 0, 0)
    assert isinstance(batch, list)
    assert len(batch) == 7
    assert len(loader_batches(LOADER, 3)(0, 0, 0)[1]) == 3


def test_batches_on_a_device() -> None:
    class Encoded(dict[str, Tensor]):
        def to(self, device: torch.device) -> str:
            return f"moved to {device}"

    meta = torch.device("meta")
    x, (y, name) = on_device((X, {"y": Y, "name": "a"}), meta), ("y", "name")
    assert x[0].device == x[1][y].device == meta
    assert x[1][name] == "a"
    assert on_device(Encoded(), meta) == "moved to meta"
    assert on_device(X, meta).device == meta


SHARDED = """
import sys, torch, torch.nn.functional as F
from torch import distributed, nn
from torch.utils.data import DataLoader, TensorDataset
from metricopt_ext.errors import ConfigError, MetricError
from metricopt_ext.integrations.loops import tune_model
from metricopt_ext.tasks.halved import with_halves
from metricopt_ext.runtime.progress import Callback

ROWS = torch.arange(60)
distributed.init_process_group("gloo")
rank, world = distributed.get_rank(), distributed.get_world_size()
x = torch.randn(60, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
y = (x[:, 0] > 0.5).long()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 2)).double()
wrapped = nn.parallel.DistributedDataParallel(model)

def metric():  # of each process's shard, gathered; the first one alone returns it
    right = wrapped(x[rank::world]).softmax(1).gather(1, y[rank::world, None])[:, 0].contiguous()
    shards = [torch.empty_like(right) for _ in range(world)]
    distributed.all_gather(shards, right)
    return with_halves(lambda half: float(torch.stack(shards).mean()), (ROWS[::2], ROWS[1::2])) if rank == 0 else None

def fails():
    if rank == 0:
        raise RuntimeError("no data")
    return 0.5

loss = lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])
run = tune_model(wrapped, DataLoader(TensorDataset(x, y), 20), loss, metric, queries=16, callback=Callback())
try:
    tune_model(model, DataLoader(TensorDataset(x, y), 20), loss, fails, queries=16)
except MetricError as error:
    assert "no data" in str(error), error
else:
    raise AssertionError("it did not fail")
try:
    world == 1 or tune_model(wrapped, DataLoader(TensorDataset(x, y), 20), loss, metric, queries=16, output_dir="out")
except ConfigError as error:
    assert world == 2 and "output_dir='out' is for one process" in str(error)
torch.save((run.before, run.after, model.state_dict()), f"{sys.argv[1]}/{world}-{rank}.pt")
distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_processes_judge_their_shards_together(forked: Any, tmp_path: Path) -> None:
    for world in (1, 2):
        forked(SHARDED, world, str(tmp_path))
    (before, after, one), *two = (torch.load(tmp_path / name) for name in ("1-0.pt", "2-0.pt", "2-1.pt"))
    assert after > before
    for shared_before, shared_after, state in two:
        assert (shared_before, shared_after) == pytest.approx((before, after), abs=1e-9)
        for name, each in state.items():
            assert torch.equal(each, two[0][2][name])
            torch.testing.assert_close(each, one[name], rtol=0, atol=1e-6)
