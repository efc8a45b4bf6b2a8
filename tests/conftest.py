"""A finetuning task whose loss and metric are known in closed form, and a record keeper in memory."""

import sqlite3
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from metricopt_ext.film import attach_input_bias
from metricopt_ext.metric import Ledger, Metric
from metricopt_ext.seeding import generator
from metricopt_ext.task import FinetuneTask

torch.set_num_threads(1)  # the tests' tensors are small: threads would only wait for each other


class Quadratic(FinetuneTask):
    """loss = 1/2 sum_i h_i (phi_i - c_i - noise_i)^2 with batch = noise; metric = |phi - goal|^2, lower is better."""

    def __init__(self, dim: int, *, population: int, noise: float, dtype: torch.dtype, budget: int | None) -> None:
        rng = torch.Generator().manual_seed(11)
        self.curvature = torch.rand(dim, generator=rng, dtype=dtype) + 0.5
        self.centre = torch.randn(dim, generator=rng, dtype=dtype)
        self.goal = torch.randn(dim, generator=rng, dtype=dtype)
        self.noise = noise
        self.fail_after: int | None = None
        self.asked = 0
        super().__init__(
            attach_input_bias(nn.Linear(2, 3).to(dtype), dim=dim),
            loss=self._quadratic,
            batches=self.batch,
            metric=Metric(self._distance, maximize=False, bounds=None, name="distance", ledger=Ledger(budget)),
            population=population,
        )

    def batch(self, seed: int, task: int, step: int) -> Tensor:
        return self.noise * torch.randn(self.dim, generator=generator(seed, "batch", task, step)).to(self.centre)

    def _quadratic(self, model: Any, batch: Tensor) -> Tensor:
        return (self.curvature * (model.metricopt.value() - self.centre - batch) ** 2).sum() / 2

    def true_cost(self, phi: Tensor) -> float:
        return float(((phi - self.goal) ** 2).sum())

    def _distance(self, model: Any) -> float:
        self.asked += 1
        if self.fail_after is not None and self.asked > self.fail_after:
            raise OSError("the evaluation server is down")
        return self.true_cost(model.metricopt.phi)


@pytest.fixture
def quadratic() -> Callable[..., Quadratic]:
    """Make a quadratic task of a given dimension."""

    def make(
        dim: int = 4,
        *,
        population: int = 32,
        noise: float = 0.3,
        dtype: torch.dtype = torch.float64,
        budget: int | None = None,
    ) -> Quadratic:
        return Quadratic(dim, population=population, noise=noise, dtype=dtype, budget=budget)

    return make


class Records:
    """What HookContainer asks of a record keeper, on a table in memory for each group, written when told to."""

    def __init__(self) -> None:
        self.unsaved: list[tuple[str, dict[str, Any]]] = []
        self.hash_map: dict[str, str] = {}
        self.database = sqlite3.connect(":memory:")
        self.database.row_factory = sqlite3.Row

    def table_exists(self, name: str) -> bool:
        query = "SELECT name FROM sqlite_master WHERE type='table' AND name=?"
        return self.database.execute(query, (name,)).fetchone() is not None

    def query(self, query: str, values: Any = (), **options: Any) -> list[Any]:
        return self.database.execute(query, values).fetchall()

    def update_records(self, record: Any, iteration: int, parent_name: str = "", **options: Any) -> None:
        if "epoch" in record:
            self.unsaved.append((parent_name, dict(record)))

    def save_records(self) -> None:
        for table, record in self.unsaved:
            columns, marks = (", ".join(words) for words in (map('"{}"'.format, record), "?" * len(record)))
            self.database.execute(f'CREATE TABLE IF NOT EXISTS "{table}" ({columns})')
            self.database.execute(f'INSERT INTO "{table}" VALUES ({marks})', list(record.values()))
        self.unsaved.clear()


@pytest.fixture
def records() -> Records:
    """A record keeper for a HookContainer of pytorch-metric-learning, in place of the package record-keeper."""
    return Records()
