"""Short finetunes of a whole model: which they are, that files keep them, and what they cost."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import metricopt_ext as mo
from helpers.refusals import assert_refused
from metricopt_ext.adapters.attach import attach_film
from metricopt_ext.errors import FileFormatError
from metricopt_ext.methods.short_finetunes import VARIANTS, Training, short_finetunes, variants_of
from metricopt_ext.methods.soups import soup_starts
from metricopt_ext.runtime import distributed
from metricopt_ext.tasks.metric import Metric
from metricopt_ext.tasks.task import FinetuneTask
from metricopt_ext.utils.files import read_tensors

X = torch.randn(64, 3, generator=torch.Generator().manual_seed(5))
Y = (X.sum(1) > 0).long()


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def task_of(frozen: bool = False) -> FinetuneTask:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Dropout(0.3), nn.ReLU(), nn.Linear(5, 2)).eval()
    model[0].requires_grad_(not frozen)
    return FinetuneTask(
        attach_film(model, ["1"], dim=3),
        loss=loss,
        batches=mo.TensorBatches(X, Y, 16),
        metric=Metric(lambda model: 0.0, maximize=True),
    )


def made(
    task: FinetuneTask, training: Training, folder: Path, count: int = 3, **options: Any
) -> list[dict[str, Tensor]]:
    given = {"share": 0.5, "seed": 0, "say": lambda line: None, **options}
    files = short_finetunes(task, training, count, folder=folder, **given)
    return [read_tensors(file, "metricopt_ext.finetune")[0] for file in files]


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(value, b[name]) for name, value in a.items())


# --- Which -------------------------------------------------------------------------------------------------------


def nothing(batch: Any, rng: torch.Generator) -> Any:
    return batch


def test_the_first_six_have_each_part_three_times() -> None:
    assert len(set(VARIANTS)) == len(VARIANTS) == 8
    six = VARIANTS[:6]
    assert [sum(each.rate == 1 for each in six), sum(each.rebalanced for each in six)] == [3, 3]
    assert sum(each.augmented for each in six) == 3


def test_a_training_without_classes_or_augmentation_varies_in_rate_and_seed() -> None:
    other = mo.TensorBatches(X, Y, 16)
    assert [each.rate for each in variants_of(Training(9, 0.1), 3)] == [0.3, 1.0, 0.3]
    assert not any(each.rebalanced or each.augmented for each in variants_of(Training(9, 0.1), 3))
    assert len(set(variants_of(Training(9, 0.1, rebalanced=other), 6))) == 4
    assert variants_of(Training(9, 0.1, rebalanced=other, augment=nothing), 6) == list(VARIANTS[:6])


def test_each_is_trained_as_it_says(tmp_path: Path) -> None:
    calls: list[dict[str, Any]] = []
    seen: list[Any] = []

    def train(model: nn.Module, batches: Any, **options: Any) -> None:
        assert all(parameter.requires_grad for parameter in model.parameters())
        calls.append(options)
        seen.append(batches(0, 0, 0)[0])

    own, other = mo.TensorBatches(X, Y, 16), mo.TensorBatches(10 * X, Y, 16)

    def augment(batch: Any, rng: torch.Generator) -> Any:
        return batch[0] + 1000, batch[1]

    training = Training(40, 0.2, batches=own, rebalanced=other, augment=augment, train=train)
    made(task_of(), training, tmp_path, 6, share=0.25)
    assert [each["steps"] for each in calls] == [10] * 6
    assert [each["lr"] for each in calls] == pytest.approx([0.2 * variant.rate for variant in VARIANTS[:6]])
    assert len({each["seed"] for each in calls}) == 6
    plain, other_plain = own(0, 0, 0)[0], other(0, 0, 0)[0]
    for found, variant in zip(seen, VARIANTS, strict=False):
        assert torch.equal(found, (other_plain if variant.rebalanced else plain) + 1000 * variant.augmented)


def test_the_whole_model_is_finetuned_and_the_tasks_stays(tmp_path: Path) -> None:
    task = task_of()
    before = {name: value.clone() for name, value in task.adapter.model.state_dict().items()}
    states = made(task, Training(20, 0.05), tmp_path)
    assert all(not torch.equal(state[name], before[name]) for state in states for name in state if name in before)
    assert all(torch.equal(value, before[name]) for name, value in task.adapter.model.state_dict().items())
    assert not same(states[0], states[2])  # alike but for the seed


def test_what_was_frozen_stays_so(tmp_path: Path) -> None:
    task = task_of(frozen=True)
    state = made(task, Training(20, 0.05), tmp_path, 2)[0]
    assert torch.equal(state["0.weight"], task.adapter.model[0].weight)
    assert not torch.equal(state["4.weight"], task.adapter.model[4].weight)


def test_a_model_that_can_not_be_trained_is_refused(tmp_path: Path) -> None:
    task = task_of()
    model = task.adapter.remove().requires_grad_(False)
    task = FinetuneTask(attach_film(model, ["1"], dim=3), loss=loss, batches=task.batches, metric=task.metric)
    assert_refused(lambda: made(task, Training(20, 0.05), tmp_path), ValueError, "Sequential")


def test_a_task_without_a_loss_needs_one(tmp_path: Path) -> None:
    task = task_of()
    bare = FinetuneTask(task.adapter, metric=task.metric)
    assert_refused(lambda: made(bare, Training(20, 0.05), tmp_path), ValueError)


# --- Files -------------------------------------------------------------------------------------------------------


def counting(calls: list[int]) -> Callable[..., None]:
    def train(model: nn.Module, batches: Any, **options: Any) -> None:
        calls.append(options["seed"])
        with torch.no_grad():
            model[4].bias.add_(float(len(calls)))

    return train


def test_what_is_on_file_is_not_done_again(tmp_path: Path) -> None:
    calls, lines = list[int](), list[str]()
    training = Training(20, 0.05, train=counting(calls))
    first = made(task_of(), training, tmp_path, 2, say=lines.append)
    again = made(task_of(), training, tmp_path, 3, say=lines.append)
    assert all(map(same, again, made(task_of(), training, tmp_path, 3, say=lines.append)))
    assert len(calls) == 3
    assert all(map(same, first, again))
    assert lines == [
        "soup: 2 finetunes of the whole model, 10 steps each: 20 passes of a batch, there and back, 100% of the"
        " training's 20",
        "soup: 3 finetunes of the whole model, 10 steps each: 30 passes of a batch, there and back, 150% of the"
        " training's 20; 2 of them are on file",
    ]


def test_a_rank_that_does_not_see_the_first_one_s_files_gets_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks on two machines, played by one process."""
    training = Training(8, 0.1)
    expected = made(task_of(), training, tmp_path / "first", count=2)
    monkeypatch.setattr(distributed, "world", lambda: 2)
    monkeypatch.setattr(distributed, "only_first", lambda function: None)
    files = iter(sorted((tmp_path / "first").glob("*.safetensors")))
    monkeypatch.setattr(distributed, "on_first", lambda function: read_tensors(next(files), "metricopt_ext.finetune"))
    (tmp_path / "second").mkdir()
    found = made(task_of(), training, tmp_path / "second", count=2)
    assert all(map(same, found, expected))
    files = iter(sorted((tmp_path / "first").glob("*.safetensors")))
    (own,) = list((tmp_path / "second").glob("*-0.safetensors"))
    own.write_bytes(b"as it was")  # of a rank that sees the first one's
    short_finetunes(task_of(), training, 2, 0.5, 0, tmp_path / "second", lambda line: None)
    assert own.read_bytes() == b"as it was"


def test_a_killed_finetune_goes_on_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("metricopt_ext.data.training_state.KEEP_EVERY", 0.0)
    whole = made(task_of(), Training(20, 0.05), tmp_path / "whole", 2)

    class Killed(BaseException):
        pass

    calls = 0

    def dying(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 19:  # in the middle of the second; the first losses are of the task's checks
            raise Killed
        return loss(model, batch)

    task = task_of()
    torn = FinetuneTask(task.adapter, loss=dying, batches=task.batches, metric=task.metric, population=1)
    calls = 0
    with pytest.raises(Killed):
        made(torn, Training(20, 0.05), tmp_path / "torn", 2)
    names = sorted(path.name for path in (tmp_path / "torn").iterdir())
    assert names == ["finetune-0.safetensors", "finetune-1.training.safetensors"]
    assert all(map(same, whole, made(task_of(), Training(20, 0.05), tmp_path / "torn", 2)))
    assert len(list((tmp_path / "torn").iterdir())) == 2


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"seed": 1}, ("seed", "0", "1")),
        ({"share": 0.1}, ("10", "2")),
    ],
)
def test_files_of_other_finetunes_are_refused(change: dict[str, Any], names: tuple[str, ...], tmp_path: Path) -> None:
    training = Training(20, 0.05, train=counting([]))
    made(task_of(), training, tmp_path)
    assert_refused(
        lambda: made(task_of(), training, tmp_path, **change), FileFormatError, "finetune-0.safetensors", *names
    )


def test_files_of_another_model_are_refused(tmp_path: Path) -> None:
    training = Training(20, 0.05, train=counting([]))
    made(task_of(), training, tmp_path)
    other = task_of()
    with torch.no_grad():
        other.adapter.model[4].bias.add_(1)
    assert_refused(lambda: made(other, training, tmp_path), FileFormatError)


# --- Their soup --------------------------------------------------------------------------------------------------


def test_a_soup_of_finetunes_is_their_mean_and_leaves_nothing_without_a_folder(tmp_path: Path) -> None:
    task, training = task_of(), Training(20, 0.05)
    kept = soup_starts(task, finetunes=3, training=training, share=0.5, kinds=["uniform"], output_dir=tmp_path)
    states = made(task, training, tmp_path)
    for name, value in kept["uniform_soup"].parameters.items():
        expected = torch.stack([state[name].double() for state in states]).mean(0).float()
        assert torch.equal(value, expected), name
    assert set(kept["uniform_soup"].parameters) == {name for name, _ in task.adapter.base_state_dict().items()} & {
        f"{layer}.{part}" for layer in "014" for part in ("weight", "bias")
    }
    alone = soup_starts(task, finetunes=3, training=training, share=0.5, kinds=["uniform"])
    assert alone["uniform_soup"].replaces_the_same(kept["uniform_soup"])


@pytest.mark.parametrize(("steps", "lr"), [(0, 0.1), (9, 0.0)])
def test_a_training_of_nothing_is_refused(steps: int, lr: float) -> None:
    assert_refused(lambda: Training(steps, lr), ValueError)
