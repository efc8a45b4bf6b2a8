"""A small task that every sibling method can train: a classifier with an adapter, in double precision."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from metricopt_ext.adapters.attach import attach_input_bias
from metricopt_ext.siblings.batch_metric import BatchMetric
from metricopt_ext.siblings.training import TrainingTask, Trains
from metricopt_ext.tasks.batches import TensorBatches
from metricopt_ext.tasks.metric import Metric
from metricopt_ext.tasks.task import FinetuneTask


class Net(nn.Module):
    """A network with BatchNorm and dropout, of one logit or of C."""

    def __init__(self, outputs: int = 1, dropout: float = 0.2) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 4), nn.LeakyReLU(), nn.BatchNorm1d(4), nn.Dropout(dropout))
        self.head = nn.Linear(4, outputs)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(x))
        return logits.squeeze(-1) if logits.shape[-1] == 1 else logits


def _untrained(seed: int, outputs: int = 1, dropout: float = 0.2) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Net(outputs, dropout).double()


def _loss(model: nn.Module, batch: Any) -> Tensor:
    logits = model(batch[0])
    if logits.dim() == 1:
        return F.binary_cross_entropy_with_logits(logits, batch[1].to(logits.dtype))
    return F.cross_entropy(logits, batch[1])


def _errors(logits: Tensor, labels: Tensor) -> float:
    decided = (logits > 0).long() if logits.dim() == 1 else logits.argmax(1)
    return float((decided != labels).double().mean())


class Calls:
    """How often each black box was really called."""

    def __init__(self) -> None:
        self.metric = self.batch_metric = 0


@pytest.fixture
def calls() -> Calls:
    """Count what the black boxes of `training_task` are called for, whatever their ledgers say."""
    return Calls()


@pytest.fixture
def training_task(calls: Calls) -> Callable[..., TrainingTask]:
    """Make a task of ``outputs`` logits that trains ``"phi"`` or the whole ``"model"``; dropout as told."""

    def make(trains: Trains = "model", outputs: int = 1, dropout: float = 0.2) -> TrainingTask:
        rng = torch.Generator().manual_seed(5)
        x = torch.randn(60, 3, generator=rng, dtype=torch.float64)
        y = torch.arange(60) % max(2, outputs)
        x[:, 0] += y

        def judge(model: nn.Module) -> float:
            calls.metric += 1
            return _errors(model(x), y)

        def judge_batch(scores: Tensor, labels: Tensor) -> float:
            calls.batch_metric += 1
            return _errors(scores, labels)

        model = _untrained(1, outputs, dropout).eval()
        for parameter in model.parameters():
            parameter.requires_grad_(True)
        task = FinetuneTask(
            attach_input_bias(model, dim=3),
            loss=_loss,
            batches=TensorBatches(x, y, 12, balanced=True),
            metric=Metric(judge, maximize=False, name="mcr"),
        )
        return TrainingTask.of(
            task,
            trains=trains,
            predict=lambda model, batch: (model(batch[0]), batch[1]),
            batch_metric=BatchMetric(judge_batch, maximize=False, name="mcr"),
            validation=TensorBatches(x, y, 20),
            build=lambda seed: _untrained(seed, outputs, dropout),
        )

    return make
