"""Averages of models as starts: against sums by hand in float64, and what they cost in queries and memory."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import metricopt_ext as mo
from helpers.networks import BatchNormNet as Net
from helpers.refusals import assert_refused, assert_warned, having
from metricopt_ext.adapters.attach import attach_film
from metricopt_ext.errors import AdapterError, BudgetError, DataError
from metricopt_ext.methods.short_finetunes import Training
from metricopt_ext.methods.soups import soup_starts
from metricopt_ext.methods.starts import reestimate_batchnorm, with_start
from metricopt_ext.runtime.progress import Callback
from metricopt_ext.tasks.ledger import Ledger
from metricopt_ext.tasks.metric import Metric
from metricopt_ext.tasks.task import FinetuneTask

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
    state = with_start(task, start).adapter.model.state_dict()
    return {name: state[name] for name in Net().state_dict()}


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
    assert set(start.buffers) == {name for name, _ in Net().named_buffers()}
    assert all(torch.equal(value, before[key]) for key, value in task.adapter.model.state_dict().items())


def test_what_is_the_same_everywhere_is_not_replaced(tmp_path: Path) -> None:
    for seed in (1, 2):
        save_file({**Net().state_dict(), "last.bias": torch.full((2,), float(seed))}, tmp_path / f"{seed}.safetensors")
    start = soup_starts(task_of(), sorted(tmp_path.glob("*")), kinds=["uniform"])["uniform_soup"]
    assert set(start.replaced) == {"last.bias"}
    assert start.parameters["last.bias"].tolist() == [1.5, 1.5]


def test_sums_are_of_float64(tmp_path: Path) -> None:
    task = task_of()
    values = [3e7, 1.0, 1.0, -3e7]  # in float32 the ones would be lost
    for number, value in enumerate(values):
        state = {**Net().state_dict(), "last.bias": torch.tensor([value, 0.0])}
        save_file(state, tmp_path / f"{number}.safetensors")
    start = soup_starts(task, sorted(tmp_path.glob("*")), kinds=["uniform"])["uniform_soup"]
    assert start.parameters["last.bias"].tolist() == [0.5, 0.0]


@pytest.mark.parametrize("kinds", [["uniform"], ["greedy"]])
def test_statistics_are_estimated_anew_on_inputs(files: list[Path], kinds: list[str]) -> None:
    task, inputs = task_of(), 2 * X + 1
    (start,) = soup_starts(task, files, kinds=kinds, recalibrate=iter(inputs.split(16))).values()
    plain, state = Net(), model_of(task, start)
    plain.load_state_dict(state)
    again = reestimate_batchnorm(plain, inputs.split(16))
    assert again is not None
    for name, value in again.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=0, atol=0)
    if kinds == ["uniform"]:
        assert torch.equal(state["first.weight"], mean_of((3, 1, 2))["first.weight"])


# --- Greedy ------------------------------------------------------------------------------------------------------


class Lines(Callback):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, line: str) -> None:
        self.lines.append(line)


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

    task, callback = task_of(metric, bounds=None), Lines()
    order = sorted(files, key=lambda path: _loss(task, path))  # all alike: a bias for both classes alike
    start = soup_starts(task, files, kinds=["greedy"], callback=callback)["greedy_soup"]
    kept: list[float] = []
    expected, best = [], float("inf")
    for path in order:
        trial = [*kept, values[int(path.stem[-1])]]
        expected.append(sum(trial) / len(trial))
        if abs(expected[-1] - 1.6) <= best:
            best, kept = abs(expected[-1] - 1.6), trial
    assert asked == pytest.approx(expected)
    assert float(start.parameters["last.bias"][0]) == pytest.approx(sum(kept) / len(kept))
    assert task.metric.ledger.spent_on == {"soups": 3}
    assert callback.lines == ["greedy soup: 3 queries, of an average each"]


def _loss(task: FinetuneTask, path: Path) -> float:
    model = Net().eval()
    model.load_state_dict(torch.load(path)["model"])
    return float(loss(model, task.batches(0, 0, 0)).detach())  # type: ignore[misc]


def test_a_greedy_soup_is_at_least_as_good_as_its_first(files: list[Path]) -> None:
    task = task_of()
    both = soup_starts(task, files)
    assert list(both) == ["uniform_soup", "greedy_soup"]
    first = min(files, key=lambda path: _loss(task, path))
    model = Net().eval()
    model.load_state_dict(torch.load(first)["model"])
    greedy = with_start(task, both["greedy_soup"])
    assert task.metric.function(greedy.adapter.model) >= task.metric.function(model)


def test_a_budget_that_is_too_small_is_refused_before_a_query(files: list[Path]) -> None:
    task = task_of(ledger=Ledger(2))
    assert_refused(lambda: soup_starts(task, files), BudgetError, "3", "kinds")
    assert task.metric.ledger.spent == 0
    assert "uniform_soup" in soup_starts(task, files, kinds=["uniform"])


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


def test_models_that_share_one_are_not(files: list[Path], recwarn: pytest.WarningsRecorder) -> None:
    soup_starts(task_of(), files)
    assert not [each for each in recwarn if "basin" in str(each.message)]


def test_a_task_without_a_loss_has_soups_too(files: list[Path]) -> None:
    task = task_of()
    bare = FinetuneTask(task.adapter, metric=task.metric)
    assert set(soup_starts(bare, files)) == {"uniform_soup", "greedy_soup"}


def test_without_batchnorm_inputs_change_nothing(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2)).eval()
    for name in ("a.pth", "b.pth"):
        torch.save(
            {key: value + 0.01 * torch.randn_like(value) for key, value in model.state_dict().items()}, tmp_path / name
        )
    task = FinetuneTask(attach_film(model, ["1"], dim=3), metric=Metric(lambda model: 0.0, maximize=True))
    paths = [tmp_path / "a.pth", tmp_path / "b.pth"]
    plain = soup_starts(task, paths, kinds=["uniform"])["uniform_soup"]
    with_inputs = assert_warned(
        lambda: soup_starts(task, paths, kinds=["uniform"], recalibrate=X.split(32))["uniform_soup"],
        "recalibrate",
        "BatchNorm",
    )
    assert with_inputs.digest == plain.digest
    assert not with_inputs.buffers
    assert len(with_inputs.parameters) == 6


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ({}, ("give",)),
        ({"checkpoints": ["a.pth", "b.pth"], "finetunes": 3}, ("checkpoints",)),
        ({"checkpoints": "a.pth"}, ("checkpoints", "a.pth")),
        ({"checkpoints": ["a.pth"]}, ("checkpoints", "1")),
        ({"checkpoints": ["a.pth", "b.pth", "a.pth"]}, ("checkpoints", "a.pth")),
        ({"checkpoints": [{"weight": torch.ones(2)}] * 2}, ("checkpoints", "weight")),
        ({"checkpoints": ["a.pth", "b.pth"], "kinds": ["best"]}, ("kinds", "best")),
        ({"checkpoints": ["a.pth", "b.pth"], "kinds": "uniform"}, ("kinds", "uniform")),
        ({"finetunes": 1, "training": Training(9, 0.1)}, ("finetunes", "2")),
        ({"finetunes": 2}, ("finetunes", "lr")),
        ({"finetunes": 2, "training": Training(9, 0.1), "share": 1.5}, ("share", "1.5", "0")),
    ],
)
def test_what_can_not_be_asked_for_is_refused(arguments: dict[str, Any], names: tuple[str, ...]) -> None:
    assert_refused(lambda: soup_starts(task_of(), **arguments), ValueError, *names)


def test_one_file_by_two_names_is_refused_and_a_copy_of_it_told(files: list[Path], tmp_path: Path) -> None:
    (link := tmp_path / "last.pth").symlink_to(files[1])
    (tmp_path / "sub").mkdir()
    for other in (link, tmp_path / "sub" / ".." / files[1].name):
        with pytest.raises(ValueError, match=having("model_0000001.pth")):
            soup_starts(task_of(), [*files, other], kinds=["uniform"])
    copied = shutil.copy(files[1], tmp_path / "model_final.pth")
    assert_warned(
        lambda: soup_starts(task_of(), [*files, copied], kinds=["uniform"]), "model_final.pth", "model_0000001.pth"
    )


def test_a_metric_that_does_not_take_the_model_is_refused(files: list[Path]) -> None:
    task = task_of()
    blind = task.judged_by(Metric(lambda: 0.5, maximize=True, name="blind"))
    assert_refused(lambda: soup_starts(blind, files), AdapterError, "blind")


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


# --- Memory ------------------------------------------------------------------------------------------------------

PEAK = r"""
import re, sys, torch
from pathlib import Path
import metricopt_ext as mo
from metricopt_ext.methods.soups import soup_starts
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(500, 4000), nn.BatchNorm1d(4000), nn.Linear(4000, 1000)
    def forward(self, x):
        return self.last(self.norm(self.first(x)).relu())
torch.manual_seed(0)
x = torch.randn(4, 500)
task = mo.FinetuneTask(
    mo.attach_film(Net().eval(), ["norm"], dim=2),
    loss=lambda model, batch: model(batch).square().mean(),
    batches=lambda seed, task, step: x,
    metric=mo.Metric(lambda model: float(model(x).sum().detach()), maximize=True, bounds=None),
)
files = sorted(Path(sys.argv[1]).iterdir())
def peak():
    return int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1])  # of this program alone
before = peak()
found = soup_starts(task, files[:int(sys.argv[2])])
print(before, peak())
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's account of a program's own memory")
@pytest.mark.parametrize("suffix", ["pth", "safetensors"])
def test_memory_does_not_grow_with_the_number_of_files(suffix: str, tmp_path: Path) -> None:
    """A model of 24 MB: 8 files would take 145 MB more than 2 if all were held."""
    folder = tmp_path / "files"
    folder.mkdir()
    torch.manual_seed(0)
    first, norm, last = nn.Linear(500, 4000), nn.BatchNorm1d(4000), nn.Linear(4000, 1000)
    parts = {"first": first, "norm": norm, "last": last}
    state = {f"{name}.{key}": each for name, part in parts.items() for key, each in part.state_dict().items()}
    for number in range(8):
        changed = {key: each * (1 + number / 1000) if each.is_floating_point() else each for key, each in state.items()}
        path = folder / f"{number}.{suffix}"
        torch.save(changed, path) if suffix == "pth" else save_file(changed, path)

    # What is freed is given back at once, and no earlier soup is in the same process: else chance decides.
    given_back = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}

    def peak(count: int) -> int:
        command = [sys.executable, "-c", PEAK, str(folder), str(count)]
        done = subprocess.run(command, check=True, capture_output=True, text=True, env=given_back)
        before, after = map(int, done.stdout.splitlines()[-1].split())
        assert after > before
        return after

    two, eight = peak(2), peak(8)
    assert eight <= 1.1 * two, (two, eight)
