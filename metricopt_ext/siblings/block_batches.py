"""Batches for the many short steps of sibling methods: training batches drawn several steps at once."""

from collections.abc import Sequence

from torch import Tensor

from metricopt_ext.tasks.batches import TensorBatches
from metricopt_ext.utils.seeding import generator

BLOCK = 256  # steps that are drawn together


class BlockBatches(TensorBatches):
    """Batches as those of `TensorBatches`, drawn `BLOCK` steps at once: for many short steps, taken in order.

    Drawing takes several times as long as the step of a small network otherwise. Any step can still be replayed alone,
    at the cost of drawing its block.
    """

    _block: tuple[tuple[int, int, int], Sequence[Tensor]] = (-1, -1, -1), ()

    def index(self, seed: int, task: int, step: int) -> Tensor:
        """Return the indices of a batch, ``batch_size``."""
        key = seed, task, step // BLOCK
        if self._block[0] != key:
            drawn = self._sample.drawn(generator(seed, "batches", *key[1:]), BLOCK)
            self._block = key, drawn.to(self.tensors[0].device).unbind(0)
        return self._block[1][step % BLOCK]
