"""Mini-batches addressed by (seed, task, step): any step of any run can be replayed alone."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import IterableDataset

from metricopt_ext.errors import DataError
from metricopt_ext.utils.checks import MOST_BATCH, check_integer
from metricopt_ext.utils.seeding import generator
from metricopt_ext.utils.words import brief, counted

Batches = Callable[[int, int, int], Any]


def rows_of(batch: Any) -> int:
    """Return the number of examples in a batch: the length of its tensors, or of a list of examples.

    Raises:
        ValueError: They are of several lengths, or there are none.
    """
    lengths = {len(leaf) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()}
    if len(lengths) == 1:
        return lengths.pop()
    if isinstance(batch, list):
        return len(batch)
    raise ValueError(
        f"a batch has tensors of {sorted(lengths)} rows; let all have a row for each example, or give a list"
    )


class IndexSampler:
    """Draws the indices of a batch, with replacement.

    Args:
        size: Number of examples n.
        batch_size: Indices per batch; rounded down to a multiple of the number of classes if ``labels`` are given.
        labels: Class labels, ``n``; if given, every class gets an equal share of the batch (paper, section 4.2). Of
            several labels each, ``n x k`` of 0 and 1, every label draws an equal share from the examples that have it,
            and so do those without any; an example may be drawn for each of its labels.
    """

    def __init__(self, size: int, batch_size: int, labels: Tensor | None = None) -> None:
        check_integer(1, MOST_BATCH, batch_size=batch_size)
        if size < 1:
            raise DataError("there are no examples to draw batches from")
        self.groups = [torch.arange(size)] if labels is None else _groups(labels, size)
        if batch_size < len(self.groups):
            raise DataError(f"batch_size is {batch_size}, less than one example of each of {len(self.groups)} classes")
        self._share = batch_size // len(self.groups)

    def __call__(self, seed: int, task: int, step: int) -> Tensor:
        """Return indices, ``batch_size``."""
        return self.drawn(generator(seed, "batch", task, step))

    def drawn(self, rng: torch.Generator, *steps: int) -> Tensor:
        """Return indices of several steps, ``steps x batch_size``; of one step by default, ``batch_size``."""
        drawn = [group[torch.randint(len(group), (*steps, self._share), generator=rng)] for group in self.groups]
        return torch.cat(drawn, -1)


def _groups(labels: Any, size: int) -> list[Tensor]:
    """The examples of each class, or with each label and without any; groups that nothing is in are left out."""
    try:
        found = torch.as_tensor(labels).cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"labels are {brief(labels)}; they must be numbers, n, or n x k of 0 and 1") from error
    if found.dim() not in (1, 2) or len(found) != size:
        raise DataError(f"labels are of shape {tuple(found.shape)}; they must be {size}, or {size} x k of 0 and 1")
    if found.dim() == 1:
        return list(found.argsort(stable=True).split(found.unique(return_counts=True)[1].tolist()))
    if len(other := found[(found != 0) & (found != 1)]):
        remedy = "give numbers of classes as n, those of n x 1 by labels.squeeze(1)"
        raise DataError(f"labels of shape {tuple(found.shape)} are of 0 and 1, got {other[0].item():g}; {remedy}")
    having = [*(found.T == 1), ~(found == 1).any(1)]
    return [each.nonzero().squeeze(1) for each in having if each.any()]


class TensorBatches:
    """Batches ``(x, y)`` from tensors in memory.

    Args:
        x: Inputs, ``n x ...``.
        y: Targets, ``n x ...``.
        batch_size: Examples per batch.
        balanced: Whether every class in ``y``, ``n``, or label, ``n x k``, gets an equal share of the batch.
        more: Further tensors of the same examples, ``n x ...``, such as their weights, that batches have after y.
    """

    def __init__(
        self, x: Tensor, y: Tensor, batch_size: int, *, balanced: bool = False, more: Sequence[Tensor] = ()
    ) -> None:
        self.tensors: tuple[Tensor, ...] = (x, y, *more)
        for each in self.tensors:
            if not hasattr(each, "device") or not each.ndim or getattr(each, "is_sparse", False):
                raise DataError(f"batches are drawn from tensors, n x ..., and not sparse ones, got {brief(each)}")
            if len(each) != len(x):
                raise DataError(f"{counted(len(x), 'input')} for {counted(len(each), 'target')}")
        self._sample = IndexSampler(len(x), batch_size, y if balanced else None)

    def index(self, seed: int, task: int, step: int) -> Tensor:
        """Return the indices of a batch, ``batch_size``."""
        return self._sample(seed, task, step)

    def __call__(self, seed: int, task: int, step: int) -> tuple[Tensor, ...]:
        """Return inputs ``batch_size x ...``, targets ``batch_size x ...``, and what else there is of them."""
        index = self.index(seed, task, step).to(self.tensors[0].device)
        return tuple(each[index] for each in self.tensors)


class ClassBatches(TensorBatches):
    """Batches ``(x, y)`` of m classes with k examples each, class by class, from tensors in memory.

    Classes are drawn without replacement, and so are the examples of a class that has k. A class with a single example
    is never drawn: it forms no pair.

    Args:
        x: Inputs, ``n x ...``.
        y: Class labels, ``n`` integers.
        classes: Number m of classes in a batch, at least 2.
        samples: Number k of examples of each class, at least 2.
    """

    def __init__(self, x: Tensor, y: Tensor, classes: int, samples: int) -> None:
        check_integer(2, classes=classes, samples=samples)
        super().__init__(x, y, classes * samples)
        self.classes, self.samples = classes, samples
        self._groups = [group for group in _groups(y, len(x)) if len(group) > 1]
        if len(self._groups) < classes:
            raise DataError(f"a batch needs {classes} classes of at least two examples, got {len(self._groups)}")

    def index(self, seed: int, task: int, step: int) -> Tensor:
        """Return the indices of a batch, ``mk``."""
        rng = generator(seed, "batch", task, step)
        chosen = torch.randperm(len(self._groups), generator=rng)[: self.classes].tolist()
        places, groups = torch.arange(self.samples), [self._groups[i] for i in chosen]
        return torch.cat([each[torch.randperm(len(each), generator=rng)[places % len(each)]] for each in groups])


class DatasetBatches:
    """Collated batches from any map-style dataset, e.g. a torchvision image folder.

    Args:
        dataset: Has ``__len__`` and ``__getitem__``. Random augmentation in it draws from torch's global CPU stream,
            which is seeded for every batch and restored.
        batch_size: Examples per batch.
        labels: Class labels, ``n``; if given, every class gets an equal share of the batch.
        collate: Makes a batch from a list of examples.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        *,
        labels: Tensor | None = None,
        collate: Callable[[list[Any]], Any] = torch.utils.data.default_collate,
    ) -> None:
        if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
            raise DataError(f"dataset is {brief(dataset)}; it must be map-style, such as a DataLoader's .dataset")
        self._dataset, self._collate = dataset, collate
        self._sample = IndexSampler(len(dataset), batch_size, labels)

    def __call__(self, seed: int, task: int, step: int) -> Any:
        """Return what ``collate`` makes of ``batch_size`` examples."""
        indices = self._sample(seed, task, step).tolist()
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(generator(seed, "augmentation", task, step).initial_seed())
            return self._collate([self._dataset[index] for index in indices])


def loader_batches(loader: Any) -> DatasetBatches:
    """Return a DataLoader's data as batches that can be drawn again.

    Raises:
        DataError: They can't: there is no index, or no batch size.
    """
    dataset = getattr(loader, "dataset", None)
    if dataset is None or isinstance(dataset, IterableDataset):
        raise DataError(
            f"the training data is a {type(loader).__name__} without an index, so its batches can't be drawn again;"
            " give a DataLoader of a dataset with __len__ and __getitem__"
        )
    size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
    if size is None:
        raise DataError(
            "the training data's DataLoader has no batch_size, nor its batch_sampler; give one of them a batch_size"
        )
    return DatasetBatches(dataset, size, collate=loader.collate_fn)
