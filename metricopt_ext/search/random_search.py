"""Random search: the metric at the start and at points drawn around it, the least that any other search must beat."""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch

from metricopt_ext.search.strategy import Algorithm, Batches, DirectSearch, DirectStrategy
from metricopt_ext.tasks.task import FinetuneTask
from metricopt_ext.utils.checks import check_above
from metricopt_ext.utils.seeding import generator


@dataclass(frozen=True)
class RandomSearch(DirectStrategy):
    """The start, then independent Gaussian points around it; the first n points are the same for every budget.

    Attributes:
        std: Standard deviation of each coordinate, above 0.
    """

    anytime: ClassVar[bool] = True
    std: float = 0.1

    def __post_init__(self) -> None:
        """Check the settings.

        Raises:
            ValueError: A setting is out of range.
        """
        check_above(0, std=self.std)

    def least_queries(self, dim: int, starts: int = 1) -> int:
        """Return the smallest budget: the starts and one point."""
        return starts + 1

    def algorithm(self, task: FinetuneTask, seed: int) -> Algorithm:
        """Return what it asks (see `DirectStrategy`); all points are one batch."""
        return partial(self._batches, seed)

    def _batches(self, seed: int, state: DirectSearch) -> Batches:
        rng, start = generator(seed, "random_search"), state.start
        while True:
            if not state.left:
                yield []
                continue
            # One row at a time: torch draws other numbers for a matrix with other rows.
            noise = [torch.randn(len(start), generator=rng, dtype=torch.float64) for _ in range(state.left)]
            yield from state.ask((start.double().cpu() + self.std * torch.stack(noise)).to(start))
