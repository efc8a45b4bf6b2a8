"""Batches: the same from the same address, balanced where asked, and of classes."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from helpers.refusals import assert_refused
from metricopt_ext.errors import DataError
from metricopt_ext.siblings.block_batches import BlockBatches
from metricopt_ext.tasks.batches import ClassBatches, DatasetBatches, IndexSampler, TensorBatches


class Augmented:
    """A data set whose examples are drawn anew at each access."""

    def __init__(self, labels: Tensor) -> None:
        self.labels = labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return index + torch.rand(2), int(self.labels[index])


LABELS = torch.tensor([0] * 40 + [1] * 7 + [2] * 3)


def tensor_batches(batch_size: int, balanced: bool) -> TensorBatches:
    return TensorBatches(torch.arange(50.0)[:, None], LABELS, batch_size, balanced=balanced)


def block_batches(batch_size: int, balanced: bool) -> BlockBatches:
    return BlockBatches(torch.arange(50.0)[:, None], LABELS, batch_size, balanced=balanced)


def dataset_batches(batch_size: int, balanced: bool) -> DatasetBatches:
    return DatasetBatches(Augmented(LABELS), batch_size, labels=LABELS if balanced else None)


each_batches = pytest.mark.parametrize("make", [tensor_batches, block_batches, dataset_batches])


@each_batches
@pytest.mark.parametrize("balanced", [True, False])
def test_batches_are_replayable(make: Any, balanced: bool) -> None:
    batches = make(12, balanced)
    x, y = batches(3, 5, 7)
    assert x.shape[0] == y.shape[0] == 12
    assert torch.equal(LABELS[x[:, 0].long()], y)
    for other in [(4, 5, 7), (3, 6, 7), (3, 5, 8), (3, 7, 5)]:
        assert not torch.equal(batches(*other)[0], x)
    torch.rand(3)
    for replayed in (batches(3, 5, 7), make(12, balanced)(3, 5, 7)):
        assert torch.equal(replayed[0], x)
        assert torch.equal(replayed[1], y)


@each_batches
@pytest.mark.parametrize(("batch_size", "share"), [(3, 1), (12, 4), (14, 4), (150, 50)])
def test_balanced_batches(make: Any, batch_size: int, share: int) -> None:
    batches = make(batch_size, balanced=True)
    for step in range(5):
        _, y = batches(0, 1, step)
        assert y.bincount().tolist() == [share] * 3


def test_examples_are_drawn_evenly_within_a_class() -> None:
    sample = IndexSampler(50, 30, LABELS)
    counts = torch.cat([sample(0, task, 0) for task in range(1000)]).bincount(minlength=50)
    for label, size in ((0, 40), (1, 7), (2, 3)):
        mine = counts[label == LABELS]
        assert mine.sum() == 10_000
        assert (mine - 10_000 / size).abs().max() < 5 * (10_000 / size) ** 0.5


def test_augmentation_differs_between_examples_and_batches() -> None:
    batches = dataset_batches(50, balanced=False)
    noise = torch.cat([batches(0, 0, step)[0].frac().flatten() for step in range(3)])
    assert len(noise.mul(1e4).round().unique()) > 270  # 300 of so many digits, of which few are the same by chance


@each_batches
def test_the_global_stream_is_untouched(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    reseeded: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", reseeded.append)
    state = torch.get_rng_state()
    make(12, True)(0, 0, 0)
    assert torch.equal(torch.get_rng_state(), state)
    assert reseeded == []  # a GPU's global stream neither


def test_the_global_stream_is_restored_after_an_error() -> None:
    class Broken(Augmented):
        def __getitem__(self, index: int) -> Any:
            torch.rand(1)
            raise OSError("unreadable")

    state = torch.get_rng_state()
    assert_refused(lambda: DatasetBatches(Broken(LABELS), 4)(0, 0, 0), OSError, "unreadable")
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: TensorBatches(torch.zeros(3), torch.zeros(4), 2), ("3", "4")),
        (lambda: tensor_batches(2, balanced=True), ("batch_size", "2", "3")),
        (lambda: TensorBatches(torch.zeros(4), torch.zeros(4), 2, more=[torch.zeros(3)]), ("4", "3")),
        (lambda: ClassBatches(*numbered([2, 1, 1]), 2, 2), ("2", "1")),
        (lambda: DatasetBatches(torch.utils.data.DataLoader([1, 2]), 2), ()),
    ],
)
def test_data_that_give_no_batches(make: Callable[[], Any], names: tuple[str, ...]) -> None:
    assert_refused(make, DataError, *names)


def numbered(counts: list[int]) -> tuple[Tensor, Tensor]:
    """Inputs that hold their own number; class i has ``counts[i]`` of them."""
    y = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    return torch.arange(len(y))[:, None].expand(-1, 3), y


def test_batches_of_classes() -> None:
    inputs, labels = numbered([6, 1, 3, 8, 2, 5])
    batches = ClassBatches(inputs, labels, classes=3, samples=4)
    drawn: set[int] = set()
    for step in range(40):
        x, y = batches(7, 2, step)
        assert x.shape == (12, 3)
        assert torch.equal(labels[x[:, 0]], y)
        classes, counts = y.unique(return_counts=True)
        assert counts.tolist() == [4, 4, 4]
        drawn |= {*classes.tolist()}
        for label in classes.tolist():
            distinct = len(x[y == label, 0].unique())
            assert distinct == min(4, int((labels == label).sum()))
    assert drawn == {0, 2, 3, 4, 5}  # never the class of a single example
    assert all(torch.equal(a, b) for a, b in zip(batches(7, 2, 5), batches(7, 2, 5), strict=True))
    for other in ((8, 2, 5), (7, 3, 5), (7, 2, 6)):
        assert not torch.equal(batches(*other)[0], batches(7, 2, 5)[0])


def test_further_tensors_go_with_their_examples() -> None:
    x = torch.arange(20.0)[:, None]
    batches = TensorBatches(x, torch.arange(20), 6, more=[2 * x, x + 1])
    inputs, targets, twice, above = batches(0, 1, 2)
    assert (targets == inputs[:, 0]).all()
    assert (twice == 2 * inputs).all()
    assert (above == inputs + 1).all()


def test_batches_balanced_by_several_labels_have_each_of_them() -> None:
    y = torch.zeros(400, 3, dtype=torch.int64)
    y[:200, 0] = 1
    y[:8, 1] = 1  # rare, and always beside the first
    y[200:210, 2] = 1
    sample = IndexSampler(400, 40, y)
    assert [len(group) for group in sample.groups] == [200, 8, 10, 190]  # the last without any label
    drawn = torch.cat([sample(0, 0, step).view(4, 10) for step in range(50)], 1)
    for label in range(3):
        assert (y[drawn[label], label] == 1).all()
    assert not y[drawn[3]].any()
    assert_refused(lambda: IndexSampler(400, 3, y), DataError, "4")
    assert len(IndexSampler(200, 4, y[:200]).groups) == 2  # nothing has the third, or none


@pytest.mark.parametrize(
    ("labels", "names"),
    [
        (torch.tensor([[0], [1], [2]]), ("(3, 1)", "0", "2", "squeeze(1)")),
        (torch.tensor([[0.0, 1.0], [1.0, math.nan], [0.0, 0.0]]), ("nan",)),
        (["cat", "dog", "cat"], ("cat",)),
    ],
)
def test_labels_that_cannot_be_read_are_refused(labels: Any, names: tuple[str, ...]) -> None:
    assert_refused(lambda: DatasetBatches(TensorDataset(torch.arange(3.0)), 2, labels=labels), DataError, *names)
