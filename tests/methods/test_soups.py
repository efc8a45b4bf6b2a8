"""Averages of models as starts: against sums by hand in float64, and what they cost in queries and memory."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import metricopt_ext as mo
from helpers.networks import BatchNormNet as Net
from helpers.refusals import assert_refused, assert_warned
from metricopt_ext import FinetuneTask, Metric, attach_film, batchnorm_start, soup_starts
from metricopt_ext.errors import BudgetError, DataError, FileFormatError
from metricopt_ext.methods.soups import FINETUNES, VARIANTS, Training
from metricopt_ext.methods.starts import reestimate_batchnorm
from metricopt_ext.tasks.ledger import Ledger
from metricopt_ext.utils.files import read_tensors

X = torch.randn(64, 3, generator=torch.Generator().manual_seed(5))
Y = (X.sum(1) > 0).long()


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def task_of(metric: Callable[[nn.Module], float] | None = None, **options: Any) -> FinetuneTask:
    def accuracy(model: nn.Module) -> float:
        return float((model(X).argmax(1) == Y).float().mean())

    return FinetuneTask(
        attach_film(Net().eval(), ["norm"], dim=3),
        loss=loss,
        batches=mo.TensorBatches(X, Y, 32),
        metric=Metric(metric or accuracy, maximize=True, **options),
    )


def near(seed: int, scale: float = 0.02) -> dict[str, Tensor]:
    """Return a model near the task's, with statistics and counts of its own."""
    rng = torch.Generator().manual_seed(seed)
    state = Net().state_dict()
    for name, value in state.items():
        if value.is_floating_point():
            change = scale * torch.randn(value.shape, generator=rng)
            state[name] = value + (change.abs() if "var" in name else change)
        else:
            state[name] = torch.tensor(seed)
    return state


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / f"model_{seed:07d}.pth" for seed in (3, 1, 2)]
    for seed, path in zip((3, 1, 2), paths, strict=True):
        torch.save({"model": near(seed)}, path)
    return paths


def mean_of(seeds: tuple[int, ...]) -> dict[str, Tensor]:
    states = [near(seed) for seed in seeds]
    return {
        name: torch.stack([s[name].double() for s in states]).mean(0).float() if each.is_floating_point() else each
        for name, each in states[0].items()
    }


def model_of(task: FinetuneTask, start: Any) -> dict[str, Tensor]:
    with task.adapter.applied(start) as model:
        state = model.state_dict()
        return {name: state[name].clone() for name in Net().state_dict()}


# --- Averages ----------------------------------------------------------------------------------------------------


def test_a_uniform_soup_is_the_mean_with_the_first_files_integers_and_costs_no_query(files: list[Path]) -> None:
    task = task_of()
    before = {name: value.clone() for name, value in task.adapter.model.state_dict().items()}
    (name, start), *others = soup_starts(task, files, kinds=["uniform"]).items()
    assert (name, others, task.metric.ledger.spent) == ("uniform_soup", [], 0)
    found, expected = model_of(task, start), mean_of((3, 1, 2))
    for key, value in expected.items():
        assert torch.equal(found[key], value), key
    assert int(found["norm.num_batches_tracked"]) == 3
    assert {name for name, _ in Net().named_buffers()} < set(start.tensors)
    assert all(torch.equal(value, before[key]) for key, value in task.adapter.model.state_dict().items())


def test_what_is_the_same_everywhere_is_not_replaced(tmp_path: Path) -> None:
    for seed in (1, 2):
        save_file({**Net().state_dict(), "last.bias": torch.full((2,), float(seed))}, tmp_path / f"{seed}.safetensors")
    start = soup_starts(task_of(), sorted(tmp_path.glob("*")), kinds=["uniform"])["uniform_soup"]
    assert set(start.tensors) == {"last.bias"}
    assert start.tensors["last.bias"].tolist() == [1.5, 1.5]


def test_sums_are_of_float64(tmp_path: Path) -> None:
    task = task_of()
    values = [3e7, 1.0, 1.0, -3e7]  # in float32 the ones would be lost
    for number, value in enumerate(values):
        state = {**Net().state_dict(), "last.bias": torch.tensor([value, 0.0])}
        save_file(state, tmp_path / f"{number}.safetensors")
    start = soup_starts(task, sorted(tmp_path.glob("*")), kinds=["uniform"])["uniform_soup"]
    assert start.tensors["last.bias"].tolist() == [0.5, 0.0]


def test_statistics_are_estimated_anew_on_inputs(files: list[Path]) -> None:
    task, inputs = task_of(), 2 * X + 1
    soup = soup_starts(task, files, kinds=["uniform"])["uniform_soup"]
    start = batchnorm_start(task, iter(inputs.split(16)), soup)
    plain, state = Net(), model_of(task, start)
    plain.load_state_dict(state)
    again = reestimate_batchnorm(plain, inputs.split(16))
    assert again is not None
    for name, value in again.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=0, atol=0)
    assert torch.equal(state["first.weight"], mean_of((3, 1, 2))["first.weight"])


# --- Greedy ------------------------------------------------------------------------------------------------------


def test_greedy_takes_in_what_is_no_worse_and_asks_once_a_file(files: list[Path]) -> None:
    """The bias says which files are in; the metric likes 1 and 2, of which 3 is left out."""
    values = {3: 8.0, 1: 1.0, 2: 2.0}
    for path in files:
        seed = int(path.stem[-1])
        torch.save({"model": {**Net().state_dict(), "last.bias": torch.full((2,), values[seed])}}, path)
    asked: list[float] = []

    def metric(model: nn.Module) -> float:
        asked.append(float(model.last.bias[0]))
        return -abs(asked[-1] - 1.6)

    task = task_of(metric, bounds=None)
    order = sorted(files, key=lambda path: _loss(task, path))  # all alike: a bias for both classes alike
    start = soup_starts(task, files, kinds=["greedy"])["greedy_soup"]
    kept: list[float] = []
    expected, best = [], float("inf")
    for path in order:
        trial = [*kept, values[int(path.stem[-1])]]
        expected.append(sum(trial) / len(trial))
        if abs(expected[-1] - 1.6) <= best:
            best, kept = abs(expected[-1] - 1.6), trial
    assert asked == pytest.approx(expected)
    assert float(start.tensors["last.bias"][0]) == pytest.approx(sum(kept) / len(kept))
    assert task.metric.ledger.spent_on == {"soups": 3}


def _loss(task: FinetuneTask, path: Path) -> float:
    model = Net().eval()
    model.load_state_dict(torch.load(path)["model"])
    return float(loss(model, task.batches(0, 0, 0)).detach())  # type: ignore[misc]


# --- What is refused, and warned of ------------------------------------------------------------------------------


def test_models_that_share_no_basin_are_warned_of(tmp_path: Path) -> None:
    """Two trained networks, one with its hidden units in another order and sign: the same function, far apart."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = torch.optim.Adam(model.parameters(), 0.05)
    for _ in range(150):
        optimizer.zero_grad()
        loss(model, (X, Y)).backward()
        optimizer.step()
    state, turned = model.state_dict(), model.state_dict().copy()
    for name in ("0.weight", "0.bias", "1.weight", "1.bias"):
        turned[name] = state[name].flip(0)
    turned["3.weight"] = state["3.weight"].flip(1)
    task = FinetuneTask(
        attach_film(model.eval(), ["1"], dim=3),
        loss=loss,
        batches=mo.TensorBatches(X, Y, 32),
        metric=Metric(lambda model: 0.0, maximize=True),
    )
    for name, each in {"a.pth": state, "b.pth": turned}.items():
        torch.save(each, tmp_path / name)
    assert_warned(lambda: soup_starts(task, [tmp_path / "a.pth", tmp_path / "b.pth"], kinds=["uniform"]), "2")
    shutil.copy(tmp_path / "a.pth", tmp_path / "last.pth")  # as a training's final model is its last checkpoint
    twice = [tmp_path / "a.pth", tmp_path / "last.pth"]
    assert_warned(lambda: soup_starts(task, twice, kinds=["uniform"]), "a.pth", "last.pth")


FILES: dict[str, Any] = {"checkpoints": ["a.pth", "b.pth"]}


@pytest.mark.parametrize(
    ("arguments", "error", "names"),
    [
        ({}, ValueError, ()),
        ({**FILES, "finetunes": 3}, ValueError, ("checkpoints",)),
        ({"checkpoints": "a.pth"}, ValueError, ("checkpoints", "a.pth")),
        ({"checkpoints": [None, 3]}, ValueError, ("checkpoints", "None")),
        ({"checkpoints": ["a.pth", "b.pth", "a.pth"]}, ValueError, ("checkpoints", "a.pth")),
        ({**FILES, "kinds": ["best"]}, ValueError, ("kinds", "best")),
        ({"finetunes": 2}, ValueError, ("finetunes", "lr")),
        ({"checkpoints": ["a.pth", "b.pth", "c.pth"]}, BudgetError, ("3", "kinds")),
    ],
)
def test_what_can_not_be_asked_for_is_refused(arguments: Any, error: Any, names: tuple[str, ...]) -> None:
    assert_refused(lambda: soup_starts(task_of(ledger=Ledger(2)), **arguments), error, *names)


def test_a_file_that_does_not_fit_costs_no_query(files: list[Path]) -> None:
    torch.save({"model": {**near(2), "last.bias": torch.ones(3)}}, files[-1])
    task = task_of()
    assert_refused(lambda: soup_starts(task, files), DataError, files[-1].name, "last.bias")
    assert task.metric.ledger.spent == 0


# --- Search ------------------------------------------------------------------------------------------------------


def test_a_search_begins_from_a_soup_that_the_metric_likes_and_keeps_it(files: list[Path], tmp_path: Path) -> None:
    def likes_the_soup(model: nn.Module) -> float:
        bare = {n: v for n, v in model.state_dict().items() if n == "first.weight"}
        return -float((bare["first.weight"] - mean_of((3, 1, 2))["first.weight"]).abs().sum())

    task = task_of(likes_the_soup, bounds=None)
    starts = soup_starts(task, files, kinds=["uniform"])
    run = mo.optimize_metric(task, queries=12, starts=starts, output_dir=tmp_path / "run")
    assert run.started_at == "uniform_soup"
    assert torch.equal(task.adapter.model.first.weight, mean_of((3, 1, 2))["first.weight"])
    found, expected = task.adapter.merged_state_dict(), mean_of((3, 1, 2))
    assert all(torch.equal(found[name], expected[name]) for name in expected if not name.startswith("norm"))
    bare = task.adapter.remove()
    assert all(torch.equal(each, Net().state_dict()[name]) for name, each in bare.state_dict().items())


# --- Finetunes -----------------------------------------------------------------------------------------------------


def trainable(frozen: bool = False) -> FinetuneTask:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Dropout(0.3), nn.ReLU(), nn.Linear(5, 2)).eval()
    model[0].requires_grad_(not frozen)
    batches = mo.TensorBatches(X, Y, 16)
    metric = Metric(lambda model: 0.0, maximize=True)
    return FinetuneTask(attach_film(model, ["1"], dim=3), loss=loss, batches=batches, metric=metric)


def made(
    task: FinetuneTask, training: Training, folder: Path, count: int = 3, **options: Any
) -> list[dict[str, Tensor]]:
    given = {"kinds": ["uniform"], "output_dir": folder, "callback": mo.Callback(), **options}
    soup_starts(task, finetunes=count, training=training, **given)
    files = [folder / f"finetune-{number}.safetensors" for number in range(count)]
    return [read_tensors(file, "metricopt_ext.finetune")[0] for file in files]


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(value, b[name]) for name, value in a.items())


# --- Which -------------------------------------------------------------------------------------------------------


def test_each_is_trained_as_it_says(tmp_path: Path) -> None:
    calls: list[dict[str, Any]] = []
    seen: list[Any] = []

    def train(model: nn.Module, batches: Any, **options: Any) -> None:
        assert all(parameter.requires_grad for parameter in model.parameters())
        calls.append(options)
        seen.append(batches(0, 0, 0)[0])
        model[4].bias.data += len(calls)

    own, other = mo.TensorBatches(X, Y, 16), mo.TensorBatches(10 * X, Y, 16)

    def augment(batch: Any, rng: torch.Generator) -> Any:
        return batch[0] + 1000, batch[1]

    training = Training(10, 0.2, batches=own, rebalanced=other, augment=augment, train=train)
    made(trainable(), training, tmp_path, 6)
    assert [each["steps"] for each in calls] == [10] * 6
    assert [each["lr"] for each in calls] == pytest.approx([0.2 * rate for rate, _, _ in VARIANTS[:6]])
    assert len({each["seed"] for each in calls}) == 6
    plain, other_plain = own(0, 0, 0)[0], other(0, 0, 0)[0]
    for found, (_, rebalanced, augmented) in zip(seen, VARIANTS, strict=False):
        assert torch.equal(found, (other_plain if rebalanced else plain) + 1000 * augmented)


def test_the_whole_model_is_finetuned_but_what_was_frozen_and_the_tasks_stays(tmp_path: Path) -> None:
    task = trainable()
    before = {name: value.clone() for name, value in task.adapter.model.state_dict().items()}
    states = made(task, Training(10, 0.05), tmp_path)
    assert all(not torch.equal(state[name], before[name]) for state in states for name in state if name in before)
    assert all(torch.equal(value, before[name]) for name, value in task.adapter.model.state_dict().items())
    assert not same(states[0], states[2])  # alike but for the seed
    frozen = trainable(frozen=True)
    state = made(frozen, Training(10, 0.05), tmp_path / "frozen", 2)[0]
    assert torch.equal(state["0.weight"], frozen.adapter.model[0].weight)
    assert not torch.equal(state["4.weight"], frozen.adapter.model[4].weight)


# --- Files -------------------------------------------------------------------------------------------------------


def counting(calls: list[int]) -> Callable[..., None]:
    def train(model: nn.Module, batches: Any, **options: Any) -> None:
        calls.append(options["seed"])
        with torch.no_grad():
            model[4].bias.add_(float(len(calls)))

    return train


def test_what_is_on_file_is_not_done_again(tmp_path: Path) -> None:
    calls: list[int] = []
    training = Training(10, 0.05, train=counting(calls))
    first = made(trainable(), training, tmp_path, 2)
    again = made(trainable(), training, tmp_path, 3)
    assert all(map(same, again, made(trainable(), training, tmp_path, 3)))
    assert len(calls) == 3
    assert all(map(same, first, again))


def test_files_of_other_finetunes_are_refused(tmp_path: Path) -> None:
    task, training = trainable(), Training(10, 0.05, train=counting([]))
    made(task, training, tmp_path)
    assert_refused(lambda: made(task, training, tmp_path, seed=1), FileFormatError, "seed", "0", "1")
    assert_refused(lambda: made(task, Training(2, 0.05), tmp_path), FileFormatError, "steps", "10", "2")
    with torch.no_grad():
        task.adapter.model[4].bias.add_(1)
    assert_refused(lambda: made(task, training, tmp_path), FileFormatError)
    (tmp_path / FINETUNES).unlink()
    assert_refused(lambda: made(task, training, tmp_path), FileFormatError, FINETUNES)


def test_a_soup_of_finetunes_is_their_mean_and_leaves_nothing_without_a_folder(tmp_path: Path) -> None:
    task, training = trainable(), Training(10, 0.05)
    kept = soup_starts(task, finetunes=3, training=training, kinds=["uniform"], output_dir=tmp_path)
    states = made(task, training, tmp_path)
    for name in ("0.weight", "1.bias", "4.weight"):
        value = kept["uniform_soup"].tensors[name]
        expected = torch.stack([state[name].double() for state in states]).mean(0).float()
        assert torch.equal(value, expected), name
    weights = {name for name, _ in task.adapter.model.named_parameters()} & task.adapter.base_state_dict().keys()
    assert set(kept["uniform_soup"].tensors) & weights == {
        f"{layer}.{part}" for layer in "014" for part in ("weight", "bias")
    }
    alone = soup_starts(task, finetunes=3, training=training, kinds=["uniform"])
    assert alone["uniform_soup"].of_the_same(kept["uniform_soup"])
