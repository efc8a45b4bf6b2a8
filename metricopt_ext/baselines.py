"""What MetricOpt has to beat: cheap things a user could do instead."""

import copy
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from .batches import Batches
from .film import CONTEXT_NAME, Adapter
from .optimizer import LossStep
from .start import finetune
from .task import FinetuneTask


def best_of_loss_finetune(task: FinetuneTask, points: Tensor, evals: int) -> Tensor:
    """Ask the metric at evenly spaced points of a loss-only finetune and return the best, ``d`` (paper, Table 1).

    Args:
        task: What is judged.
        points: The visited phi, ``(T + 1) x d``.
        evals: Number of queries, both ends included; all points where that is T + 1 or more.
    """
    chosen = torch.linspace(0, len(points) - 1, min(evals, len(points))).round().long()
    costs = task.costs_at(points[chosen], "loss_finetune_best")
    return points[chosen[costs.argmin()]]


def finetune_on(task: FinetuneTask, batches: Batches, lr: float, steps: int, seed: int) -> Tensor:
    """Finetune phi by the loss on other batches, e.g. of labelled validation data; the visited phi, ``(T + 1) x d``."""
    other = FinetuneTask(task.adapter, loss=task.loss, batches=batches, metric=task.metric, population=task.population)
    return finetune(other, LossStep(lr), steps, seed)


def reestimate_batchnorm(model: nn.Module, inputs: Iterable[Tensor]) -> nn.Module | None:
    """Return a copy of a model whose BatchNorm statistics are those of other inputs, or None if it has no BatchNorm.

    Args:
        model: With or without an adapter; the copy has none, and is in evaluation mode.
        inputs: Batches of inputs, without labels; each counts the same, so give them about one size.
    """
    copied = copy.deepcopy(model)
    if hasattr(copied, CONTEXT_NAME):
        Adapter(copied).remove()
    norms = [module for module in copied.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    if not norms:
        return None
    copied.eval()  # dropout, above all, must not disturb the statistics
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # the mean over all batches
        norm.train()
    with torch.no_grad():
        for batch in inputs:
            copied(batch)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
    return copied.eval()
