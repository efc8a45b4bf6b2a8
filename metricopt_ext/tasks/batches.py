"""Mini-batches addressed by (seed, task, step): any step of any run can be replayed alone."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from metricopt_ext.errors import DataError
from metricopt_ext.utils.checks import MOST_BATCH, check_integer
from metricopt_ext.utils.seeding import generator
from metricopt_ext.utils.words import brief, counted

Batches = Callable[[int, int, int], Any]


class IndexSampler:
    """Draws the indices of a batch, with replacement.

    Args:
        size: Number of examples n.
        batch_size: Indices per batch; rounded down to a multiple of the number of classes if ``labels`` are given.
        labels: Class labels, ``n``; if given, every class gets an equal share of the batch (paper, section 4.2). Of
            several labels each, ``n x k`` of 0 and 1, every label draws an equal share from the examples that have it,
            and so do those without any; an example may be drawn for each of its labels.
    """

    groups: list[Tensor]
    share: int

    def __init__(self, size: int, batch_size: int, labels: Tensor | None = None) -> None:
        check_integer(1, MOST_BATCH, batch_size=batch_size)
        if size < 1:
            raise DataError("there are no examples to draw batches from")
        self.groups = [torch.arange(size)]
        if labels is not None:
            labels = _as_labels(labels)
            if len(labels) != size:
                raise DataError(f"{counted(len(labels), 'label')} for {counted(size, 'example')}")
            self.groups = _groups(labels.cpu())
        if batch_size < len(self.groups):
            raise DataError(
                f"batch_size is {batch_size}, too small for one example of each of {len(self.groups)} classes"
            )
        self.share = batch_size // len(self.groups)

    def __call__(self, seed: int, task: int, step: int) -> Tensor:
        """Return indices, ``batch_size``."""
        rng = generator(seed, "batch", task, step)
        drawn = [group[torch.randint(len(group), (self.share,), generator=rng)] for group in self.groups]
        return drawn[0] if len(drawn) == 1 else torch.cat(drawn)


def _as_labels(labels: Any) -> Tensor:
    try:
        found = torch.as_tensor(labels)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"labels are {brief(labels)}; they must be numbers, n, or n x k of 0 and 1") from error
    if found.dim() not in (1, 2):
        raise DataError(f"labels are of shape {tuple(found.shape)}; they must be n, or n x k of 0 and 1")
    if found.dim() == 2 and bool((other := (found != 0) & (found != 1)).any()):
        remedy = "give them as n, labels.squeeze(1)" if found.shape[1] == 1 else "give numbers of classes as n"
        raise DataError(
            f"labels of shape {tuple(found.shape)} are of 0 and 1, got {found[other][0].item():g}; {remedy}"
        )
    return found


def _groups(labels: Tensor) -> list[Tensor]:
    """The examples of each class, or with each label and without any; groups that nothing is in are left out."""
    if labels.dim() == 1:
        return [(labels == label).nonzero().squeeze(1) for label in labels.unique().tolist()]
    having = [*(labels.T == 1), ~(labels == 1).any(1)]
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

    x: Tensor
    y: Tensor
    more: tuple[Tensor, ...]
    sample: IndexSampler

    def __init__(
        self, x: Tensor, y: Tensor, batch_size: int, *, balanced: bool = False, more: Sequence[Tensor] = ()
    ) -> None:
        for each in (x, y, *more):
            if not hasattr(each, "device") or not each.ndim or getattr(each, "is_sparse", False):
                raise DataError(f"batches are drawn from tensors, n x ..., and not sparse ones, got {brief(each)}")
            if len(x) != len(each):
                raise DataError(f"{counted(len(x), 'input')} for {counted(len(each), 'target')}")
        self.x, self.y, self.more = x, y, tuple(more)
        self.sample = IndexSampler(len(x), batch_size, y if balanced else None)

    def __call__(self, seed: int, task: int, step: int) -> tuple[Tensor, ...]:
        """Return inputs ``batch_size x ...``, targets ``batch_size x ...``, and what else there is of them."""
        index = self.sample(seed, task, step).to(self.x.device)
        return self.x[index], self.y[index], *(each[index] for each in self.more)


class BlockBatches:
    """Batches as those of `TensorBatches`, drawn many steps at once: for loops of many short steps, taken in order.

    Drawing takes several times as long as the step of a small network otherwise. Any step can still be replayed alone,
    at the cost of drawing its block.

    Args:
        x: Inputs, ``n x ...``.
        y: Targets, ``n x ...``.
        batch_size: Examples per batch; see `IndexSampler`.
        balanced: Whether every class in ``y``, ``n``, gets an equal share of the batch.
        block: Steps that are drawn together.
    """

    x: Tensor
    y: Tensor
    block: int
    sampler: IndexSampler

    def __init__(self, x: Tensor, y: Tensor, batch_size: int, *, balanced: bool = False, block: int = 256) -> None:
        if len(x) != len(y):
            raise DataError(f"{counted(len(x), 'input')} for {counted(len(y), 'target')}")
        check_integer(1, block=block)
        self.x, self.y, self.block = x, y, block
        self.sampler = IndexSampler(len(x), batch_size, y if balanced else None)
        self._drawn: tuple[tuple[int, int, int], Sequence[Tensor]] = ((-1, -1, -1), ())

    def __call__(self, seed: int, task: int, step: int) -> tuple[Tensor, Tensor]:
        """Return inputs ``batch_size x ...`` and targets ``batch_size x ...``."""
        key = seed, task, step // self.block
        if self._drawn[0] != key:
            rng, share = generator(seed, "batches", *key[1:]), self.sampler.share
            drawn = [
                group[torch.randint(len(group), (self.block, share), generator=rng)] for group in self.sampler.groups
            ]
            self._drawn = key, torch.cat(drawn, 1).to(self.x.device).unbind(0)
        index = self._drawn[1][step % self.block]
        return self.x[index], self.y[index]


class ClassBatches:
    """Batches ``(x, y)`` of m classes with k examples each, from tensors in memory.

    Classes are drawn without replacement, and so are the examples of a class that has k. A class with a single example
    is never drawn: it forms no pair.

    Args:
        x: Inputs, ``n x ...``.
        y: Class labels, ``n`` integers.
        classes: Number m of classes in a batch, at least 2.
        samples: Number k of examples of each class, at least 2.
    """

    x: Tensor
    y: Tensor
    classes: int
    samples: int
    groups: list[Tensor]

    def __init__(self, x: Tensor, y: Tensor, classes: int, samples: int) -> None:
        if len(x) != len(y):
            raise DataError(f"{counted(len(x), 'input')} for {counted(len(y), 'label')}")
        check_integer(2, classes=classes, samples=samples)
        self.x, self.y, self.classes, self.samples = x, y, classes, samples
        labels = y.cpu()
        groups = labels.argsort(stable=True).split(labels.unique(return_counts=True)[1].tolist())
        self.groups = [group for group in groups if len(group) > 1]
        if len(self.groups) < classes:
            raise DataError(f"a batch needs {classes} classes of at least two examples, got {len(self.groups)}")

    def __call__(self, seed: int, task: int, step: int) -> tuple[Tensor, Tensor]:
        """Return inputs ``mk x ...`` and labels ``mk``, class by class."""
        rng = generator(seed, "batch", task, step)
        chosen = torch.randperm(len(self.groups), generator=rng)[: self.classes].tolist()
        places = torch.arange(self.samples)
        drawn = [
            group[torch.randperm(len(group), generator=rng)[places % len(group)]]
            for group in (self.groups[i] for i in chosen)
        ]
        index = torch.cat(drawn).to(self.x.device)
        return self.x[index], self.y[index]


class DatasetBatches:
    """Collated batches from any map-style dataset, e.g. a torchvision image folder.

    Args:
        dataset: Has ``__len__`` and ``__getitem__``. Random augmentation in it draws from torch's global CPU stream,
            which is seeded for every batch and restored.
        batch_size: Examples per batch.
        labels: Class labels, ``n``; if given, every class gets an equal share of the batch.
        collate: Makes a batch from a list of examples.
    """

    dataset: Any
    collate: Callable[[list[Any]], Any]
    sample: IndexSampler

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        *,
        labels: Tensor | None = None,
        collate: Callable[[list[Any]], Any] = torch.utils.data.default_collate,
    ) -> None:
        if isinstance(dataset, DataLoader) or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
            remedy = "give its .dataset" if isinstance(dataset, DataLoader) else "it must have a length and examples"
            raise DataError(f"dataset is {brief(dataset)}, of which no example can be drawn by its number; {remedy}")
        self.dataset, self.collate = dataset, collate
        self.sample = IndexSampler(len(dataset), batch_size, labels)

    def __call__(self, seed: int, task: int, step: int) -> Any:
        """Return what ``collate`` makes of ``batch_size`` examples."""
        indices = self.sample(seed, task, step).tolist()
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(generator(seed, "augmentation", task, step).initial_seed())
            return self.collate([self.dataset[index] for index in indices])
