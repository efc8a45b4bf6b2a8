"""The protocol of the sibling methods: a task and a seed in, a trained copy of the model and its costs out."""

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from metricopt_ext.adapters.adapter import Adapter
from metricopt_ext.runtime.progress import Callback
from metricopt_ext.siblings.training import History, TrainingTask, Trains
from metricopt_ext.utils.checks import check_integer
from metricopt_ext.utils.seeding import generator, seeded_streams


class Product(Protocol):
    """What a method learns besides the model, e.g. a surrogate loss, a policy or an optimizer."""

    def save(self, path: str | Path) -> None:
        """Write it to a file."""


@dataclass(frozen=True)
class Trained:
    """What a sibling method returns.

    Attributes:
        model: The trained copy of the task's model, in evaluation mode.
        trained: What was trained of it: ``"phi"`` or ``"model"``.
        product: What was learned besides, with a ``save``; None if nothing was.
        queries: Evaluations of the metric of a model, by purpose.
        batch_queries: Evaluations of the metric of a batch, by purpose.
        seconds: Wall-clock seconds.
        history: What was measured on the way, by name.
    """

    model: nn.Module
    trained: Trains
    product: Product | None
    queries: dict[str, int]
    batch_queries: dict[str, int]
    seconds: float
    history: History

    @property
    def phi(self) -> Tensor | None:
        """The trained phi, ``d``; None if all weights were trained."""
        return Adapter(self.model).phi.detach() if self.trained == "phi" else None


class Sibling(ABC):
    """A method that trains a model for a black-box metric; its settings are the fields of a frozen dataclass.

    A subclass defines `run`, and extends `check` by what it can't work with.
    """

    def check(self, task: TrainingTask) -> None:  # noqa: B027 (a method may have nothing to refuse)
        """Refuse a task that the method can't train, before any query; the model is left unchanged."""

    @abstractmethod
    def run(self, task: TrainingTask, seed: int, callback: Callback) -> tuple[Product | None, History]:
        """Train ``task.model``, a copy in training mode, in place.

        torch's global stream is seeded, so that dropout may draw from it. Queries go through ``task.metric`` and
        ``task.batch_metric`` alone, whose ledgers count them.

        Returns:
            What was learned besides the model, and what was measured on the way.
        """

    def train(self, task: TrainingTask, *, seed: int = 0, callback: Callback | None = None) -> Trained:
        """Train a copy of the task's model; the task's own model and the global random streams stay as they are.

        Args:
            task: Model, batches and metrics. What is spent is charged to both metrics' ledgers as it is.
            seed: Seed of all draws.
            callback: Notified of progress.

        Raises:
            ValueError: The seed, or what `check` refuses.
            BudgetError: A ledger's budget ran out.
            MetricError: A metric failed.
            FloatingPointError: What is trained is no longer finite.
        """
        check_integer(0, seed=seed)
        self.check(task)
        own, before, began = task.copied(), _spent(task), time.perf_counter()
        own.model.train()
        with seeded_streams(generator(seed, "sibling").initial_seed(), task.device):
            product, history = self.run(own, seed, callback or Callback())
        own.model.eval()
        if task.device.type == "cuda":
            torch.cuda.synchronize()
        queries, batch_queries = (_difference(a, b) for a, b in zip(_spent(task), before, strict=True))
        seconds = time.perf_counter() - began
        return Trained(own.model, own.trains, product, queries, batch_queries, seconds, history)


def _spent(task: TrainingTask) -> tuple[dict[str, int], dict[str, int]]:
    return dict(task.metric.ledger.spent_on), dict(task.batch_metric.ledger.spent_on)


def _difference(after: Mapping[str, int], before: Mapping[str, int]) -> dict[str, int]:
    """Return what was spent between two states of a ledger, by purpose."""
    return {name: n - before.get(name, 0) for name, n in after.items() if n > before.get(name, 0)}
