"""Random search: the metric at the start and at points drawn around it, the least that any other search must beat."""

from dataclasses import dataclass

import torch
from torch import Tensor

from metricopt_ext.search.direct import SearchResult, Told, _Counted
from metricopt_ext.tasks.task import FinetuneTask
from metricopt_ext.utils.checks import check_above
from metricopt_ext.utils.seeding import generator


@dataclass(frozen=True)
class RandomSearch:
    """The start, then independent Gaussian points around it; the first n points are the same for every budget.

    Attributes:
        std: Standard deviation of each coordinate, above 0.
    """

    std: float = 0.1

    def __post_init__(self) -> None:
        """Check the settings.

        Raises:
            ValueError: A setting is out of range.
        """
        check_above(0, std=self.std)

    def least_queries(self, dim: int) -> int:
        """Return the smallest budget: the start and one point."""
        return 2

    def __call__(
        self, task: FinetuneTask, start: Tensor, queries: int, *, seed: int = 0, on_query: Told | None = None
    ) -> SearchResult:
        """Search from a start (see `Search`)."""
        cost_at = _Counted(task, start, queries, self.least_queries(task.dim), on_query)
        rng = generator(seed, "random_search")
        while cost_at.left:
            # One row at a time: torch draws other numbers for a matrix with other rows.
            noise = torch.randn(task.dim, generator=rng, dtype=torch.float64)
            cost_at.one((start.double().cpu() + self.std * noise).to(start))
        return cost_at.finish([start])
