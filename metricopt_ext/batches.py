"""Mini-batches addressed by (seed, task, step): any step of any run can be replayed alone."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .errors import DataError
from .seeding import generator

Batches = Callable[[int, int, int], Any]


class IndexSampler:
    """Draws the indices of a batch, with replacement.

    Args:
        size: Number of examples n.
        batch_size: Indices per batch; rounded down to a multiple of the number of classes where ``labels`` are given.
        labels: Class labels, ``n``; given, every class gets an equal part of the batch (paper, section 4.2).
    """

    def __init__(self, size: int, batch_size: int, labels: Tensor | None = None) -> None:
        if size < 1:
            raise DataError("there are no examples to draw batches from")
        self.groups = [torch.arange(size)]
        if labels is not None:
            if len(labels) != size:
                raise DataError(f"{len(labels)} labels for {size} examples")
            self.groups = [(labels.cpu() == label).nonzero().squeeze(1) for label in labels.unique().tolist()]
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


class TensorBatches:
    """Batches ``(x, y)`` from tensors in memory.

    Args:
        x: Inputs, ``n x ...``.
        y: Targets, ``n x ...``.
        batch_size: Examples per batch.
        balanced: Whether every class in ``y``, ``n``, gets an equal part of the batch.
    """

    def __init__(self, x: Tensor, y: Tensor, batch_size: int, *, balanced: bool = False) -> None:
        if len(x) != len(y):
            raise DataError(f"{len(x)} inputs for {len(y)} targets")
        self.x, self.y = x, y
        self.sample = IndexSampler(len(x), batch_size, y if balanced else None)

    def __call__(self, seed: int, task: int, step: int) -> tuple[Tensor, Tensor]:
        """Return inputs ``batch_size x ...`` and targets ``batch_size x ...``."""
        index = self.sample(seed, task, step).to(self.x.device)
        return self.x[index], self.y[index]


class DatasetBatches:
    """Collated batches from any map-style dataset, e.g. a torchvision image folder.

    Args:
        dataset: Has ``__len__`` and ``__getitem__``. Random augmentation in it draws from torch's global CPU stream,
            which is seeded for every batch and restored.
        batch_size: Examples per batch.
        labels: Class labels, ``n``; given, every class gets an equal part of the batch.
        collate: Makes a batch of a list of examples.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        *,
        labels: Tensor | None = None,
        collate: Callable[[list[Any]], Any] = torch.utils.data.default_collate,
    ) -> None:
        self.dataset, self.collate = dataset, collate
        self.sample = IndexSampler(len(dataset), batch_size, labels)

    def __call__(self, seed: int, task: int, step: int) -> Any:
        """Return what ``collate`` makes of ``batch_size`` examples."""
        indices = self.sample(seed, task, step).tolist()
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(generator(seed, "augmentation", task, step).initial_seed())
            return self.collate([self.dataset[index] for index in indices])
