"""The rivals that any task's tool can run beside MetricOpt."""

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from metricopt_ext.adapters.adapter import Adapter
from metricopt_ext.adapters.modulation import CONTEXT_NAME
from metricopt_ext.evidence.run_config import RunConfig
from metricopt_ext.methods.result import MetricOptResult
from metricopt_ext.methods.tuning import finetune
from metricopt_ext.search.direct import CMAES, GuidedES, Search
from metricopt_ext.search.optimizer import LossStep
from metricopt_ext.tasks.batches import Batches
from metricopt_ext.tasks.task import FinetuneTask

Rival = Callable[[FinetuneTask, MetricOptResult], Tensor | nn.Module | None]


def usual_rivals(
    config: RunConfig, inputs: Sequence[Tensor], batches: Batches, seed: int
) -> tuple[dict[str, Rival], dict[str, Rival]]:
    """Return rivals and follow-ups by name, as `evidence.compare` takes them; some run only if the settings say so.

    Args:
        config: The run.
        inputs: The validation data's inputs in parts of about one size, for BatchNorm to be re-estimated on.
        batches: Batches of the labelled validation data, as the loss takes them.
        seed: Seed of batches and searches.
    """
    recipe = config.recipe

    def batchnorm_on_validation(task: FinetuneTask, result: MetricOptResult) -> nn.Module | None:
        return reestimate_batchnorm(task.adapter.model, inputs)

    def finetune_on_validation(task: FinetuneTask, result: MetricOptResult) -> Tensor:
        return finetune_on(task, batches, recipe.lr, recipe.steps, seed)

    def searched(task: FinetuneTask, result: MetricOptResult, search: Search) -> Tensor | None:
        if not config.search_queries:
            return None
        return search(task, task.origin(), config.search_queries, seed=seed).phi

    def refined(task: FinetuneTask, result: MetricOptResult) -> Tensor | None:
        if not config.refine_queries:
            return None
        return CMAES()(task, result.ends[result.chosen], config.refine_queries, seed=seed).phi

    rivals: dict[str, Rival] = {
        "batchnorm_validation": batchnorm_on_validation,
        "loss_finetune_validation": finetune_on_validation,
        "guided_es": partial(searched, search=GuidedES(lr=recipe.lr)),
        "cma_es": partial(searched, search=CMAES()),
    }
    return rivals, {"refined": refined}


def best_of_loss_finetune(task: FinetuneTask, points: Tensor, evals: int) -> Tensor:
    """Evaluate the metric at evenly spaced points of a loss-only finetune and return the best, ``d`` (paper, Table 1).

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
    return finetune(replace(task, batches=batches), LossStep(lr), steps, seed)


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
