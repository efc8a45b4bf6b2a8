"""The parts of a finetuning run under Detectron2, for trainers by YAML, for LazyConfig and for a user's own trainer."""

import logging
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from detectron2.engine import HookBase
from detectron2.utils import comm
from detectron2.utils.logger import log_first_n
from torch import Tensor, nn

from metricopt_ext.adapters.adapter import Adapter
from metricopt_ext.adapters.attach import attach_film
from metricopt_ext.adapters.wrappers import unwrapped
from metricopt_ext.detection.detectron2.config import FilmNode
from metricopt_ext.detection.detectron2.hooks import (
    LOGGER,
    BestCheckpoint,
    EvaluationLog,
    MergedCheckpoint,
    ReplayedSteps,
    TrajectoryHook,
)
from metricopt_ext.detection.detectron2.placements import film_layers
from metricopt_ext.search.learned import LearnedOptimizer, load_update_rule
from metricopt_ext.search.optimizer import MetricOpt, UntrustedWarning
from metricopt_ext.tasks.metric import Metric
from metricopt_ext.tasks.trajectories import Recording, TrajectoryStore
from metricopt_ext.utils.seeding import generator
from metricopt_ext.value.loading import load_value_function


def with_film(
    model: nn.Module,
    layers: Sequence[str] = FilmNode.layers,
    *,
    dim: int = FilmNode.dim,
    seed: int = 0,
    start_std: float = 0.0,
    index: int = 0,
) -> nn.Module:
    """Attach FiLM to a model, set phi to a start, and return the model.

    Args:
        model: A detector, not yet wrapped for several processes.
        layers: Where FiLM goes; see `placements.film_layers`.
        dim: Dimension d of phi.
        seed: Draws FiLM's matrices and the start: the same on every rank, whose global streams differ.
        start_std: Standard deviation of the start; 0 starts from the model as it was trained.
        index: Each index has a different start.

    Raises:
        ConfigError: A placement or pattern is not in this model.
        AdapterError: It matches no layer that FiLM can modulate.
    """
    adapter = attach_film(model, film_layers(model, layers), dim=dim, seed=seed)
    adapter.set_phi(start_std * torch.randn(dim, generator=generator(seed, "start", index)))
    return model


def phi_of(model: nn.Module) -> list[nn.Parameter]:
    """Return what an optimizer tunes: a model's phi. The model may be wrapped for several processes."""
    return Adapter(unwrapped(model)).parameters()


def phi_optimizer(
    params: Iterable[Tensor], *, value_function: str = "", update_rule: str = "", lr: float = 0.1, **options: Any
) -> torch.optim.Optimizer:
    """Return `MetricOpt` on phi, a learned optimizer, or gradient descent if there is neither of their files.

    Args:
        params: phi; see `phi_of`.
        value_function: File of f; empty follows the loss alone.
        update_rule: File of a learned optimizer's rule, in place of f.
        lr: Rate of the loss step; a rule has its own.
        options: Further arguments of `MetricOpt`.

    Raises:
        FileFormatError: The value function's or the rule's file is corrupt.
        ValueFunctionError: It was fitted for another dimension or another adapter.
    """
    (phi,) = params
    if update_rule:
        return LearnedOptimizer([phi], load_update_rule(update_rule).to(phi.device))
    if not value_function:
        return torch.optim.SGD([phi], lr=lr)
    f = load_value_function(value_function).to(phi.device)
    if not f.trusted and not options.get("even_untrusted"):
        warn_once(
            f"{value_function} is {f.quality}: phi follows the loss alone; learn f from more METRICOPT.META.ROUNDS or"
            " TASKS, or from more METRICOPT.METRIC.IMAGES"
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UntrustedWarning)  # as the log has just said
        return MetricOpt([phi], f, lr=lr, **options)


def finetuning_hooks(
    model: nn.Module,
    metric: Metric | None,
    store: TrajectoryStore,
    *,
    steps: int,
    evals: int,
    output_dir: str | Path,
    seed: int = 0,
    round: int = 0,
    index: int = 0,
) -> list[HookBase]:
    """Return the hooks of a run; register them before those that write checkpoints and evaluate the trained model.

    Args:
        model: The detector with FiLM.
        metric: Evaluated at some of the points, the best of which the model ends at; None to evaluate and record
            nothing.
        store: Receives the trajectory; give only the main process one with a folder.
        steps: Number T of steps.
        evals: Number K of points at which the metric is evaluated.
        output_dir: Receives ``model_best.pth``, with phi, and ``model_merged.pth``, with phi in the weights.
        seed: Draws the observed steps and what each step samples.
        round: The trajectory's round.
        index: The trajectory's index.
    """
    adapter, folder = Adapter(unwrapped(model)), Path(output_dir)
    best, merged = folder / "model_best.pth", folder / "model_merged.pth"
    replayed = ReplayedSteps(seed, index)
    if metric is None:
        return [replayed, MergedCheckpoint(adapter, merged)]
    recording = Recording(adapter, metric, store, steps=steps, evals=evals, seed=seed, round=round, index=index)
    return [
        replayed,
        TrajectoryHook(recording),
        EvaluationLog(recording),
        BestCheckpoint(recording, best),
        MergedCheckpoint(adapter, merged, recording),
    ]


def warn_once(message: str) -> None:
    """Log a warning, unless this process has already: meta-training makes many trainers of one config."""
    log_first_n(logging.WARNING, message, name=LOGGER.name, key="message")


def main_process_folder(folder: str) -> str | None:
    """Return a folder on the main process, and None elsewhere or if it is empty."""
    return folder if folder and comm.is_main_process() else None
