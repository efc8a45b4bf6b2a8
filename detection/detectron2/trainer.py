"""Detectron2's default trainer with MetricOpt under its optimizer."""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from detectron2.config import CfgNode
from detectron2.engine import DefaultTrainer, HookBase
from detectron2.utils import comm
from torch import nn

from metricopt_ext.detection.detectron2.config import Settings, settings_of
from metricopt_ext.detection.detectron2.datasets import truth_of
from metricopt_ext.detection.detectron2.evaluator import AP50Evaluator, validation_metric
from metricopt_ext.detection.detectron2.hooks import BestCheckpoint, ReplayedSteps, TrajectoryRecorder
from metricopt_ext.detection.detectron2.placements import film_layers
from metricopt_ext.film import Adapter, attach_film
from metricopt_ext.optimizer import MetricOpt
from metricopt_ext.recording import Recording
from metricopt_ext.seeding import generator
from metricopt_ext.trajectory import TrajectoryStore
from metricopt_ext.value_function import load_value_function


class MetricOptTrainer(DefaultTrainer):  # type: ignore[misc]
    """Finetunes phi if ``METRICOPT.ENABLED``, and trains as Detectron2 does if not; either is evaluated by AP50.

    phi is finetuned for ``SOLVER.MAX_ITER`` steps. Where ``METRICOPT.VALIDATION`` names a set, AP50 on it is asked at
    some of the points, the best of which is kept in ``OUTPUT_DIR/model_best.pth``. ``DATASETS.TEST`` is evaluated once,
    at the end. Checkpoints hold phi and the optimizer's past gradients; a resumed run goes on from them, as
    `hooks.ReplayedSteps` says.

    Args:
        cfg: A config that has a METRICOPT node.
    """

    def __init__(self, cfg: CfgNode) -> None:
        if settings_of(cfg).enabled:
            # Evaluating now and then, as Detectron2 does, would choose a model by the test set.
            cfg = cfg.clone()
            cfg.defrost()
            cfg.TEST.EVAL_PERIOD = 0
        super().__init__(cfg)

    @classmethod
    def build_model(cls, cfg: CfgNode) -> nn.Module:
        """Return the model, its FiLM attached and phi at its start."""
        model: nn.Module = super().build_model(cfg)
        settings = settings_of(cfg)
        if settings.enabled:
            adapter = attach_film(model, film_layers(model, settings.layers), dim=settings.dim, seed=settings.seed)
            # The same on every rank, whose global streams differ.
            drawn = torch.randn(settings.dim, generator=generator(settings.seed, "start", settings.index))
            adapter.set_phi(settings.start_std * drawn)
        return model

    @classmethod
    def build_optimizer(cls, cfg: CfgNode, model: nn.Module) -> torch.optim.Optimizer:
        """Return MetricOpt on phi, or gradient descent on it where there is no value function."""
        settings = settings_of(cfg)
        if not settings.enabled:
            return super().build_optimizer(cfg, model)  # type: ignore[no-any-return]
        return phi_optimizer(Adapter(model), settings, cfg.SOLVER.MAX_ITER)

    @classmethod
    def build_lr_scheduler(cls, cfg: CfgNode, optimizer: torch.optim.Optimizer) -> Any:
        """Return a constant rate for phi, the solver's schedule for ordinary training."""
        if not settings_of(cfg).enabled:
            return super().build_lr_scheduler(cfg, optimizer)
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)

    @classmethod
    def build_evaluator(cls, cfg: CfgNode, dataset_name: str) -> AP50Evaluator:
        """Return the AP50 evaluator of a set."""
        return AP50Evaluator(truth_of(dataset_name), settings_of(cfg).definition)

    def build_hooks(self) -> list[HookBase]:
        """Return Detectron2's hooks, and ours before those that write checkpoints."""
        built: list[HookBase] = super().build_hooks()
        settings = settings_of(self.cfg)
        if not settings.enabled:
            return built
        ours: list[HookBase] = [ReplayedSteps(settings.seed)]
        if settings.validation:
            recording = self._recording(settings)
            best = BestCheckpoint(recording, Path(self.cfg.OUTPUT_DIR) / "model_best.pth")
            ours += [TrajectoryRecorder(recording), best]
        return [*ours, *built]

    def batches(self) -> Iterator[Any]:
        """Return the iterator that the next step takes its batch from."""
        return self._trainer._data_loader_iter  # type: ignore[no-any-return]

    def _recording(self, settings: Settings) -> Recording:
        adapter = Adapter(unwrapped(self.model))
        metric = validation_metric(
            self.cfg,
            settings.validation,
            definition=settings.definition,
            images=settings.validation_images,
            seed=settings.seed,
        )
        folder = settings.trajectories if settings.trajectories and comm.is_main_process() else None
        return Recording(
            adapter,
            metric,
            open_store(self.cfg, folder),
            steps=self.cfg.SOLVER.MAX_ITER,
            evals=settings.evals,
            seed=settings.seed,
            round=settings.round,
            index=settings.index,
        )


def phi_optimizer(adapter: Adapter, settings: Settings, steps: int) -> torch.optim.Optimizer:
    """Return MetricOpt on phi, or gradient descent on it where the settings name no value function.

    Raises:
        FileFormatError: The value function's file is corrupt.
        ValueFunctionError: It was fitted for another dimension.
    """
    if not settings.value_function:
        return torch.optim.SGD(adapter.parameters(), lr=settings.lr)
    f = load_value_function(settings.value_function, adapter.dim).to(adapter.phi.device)
    return MetricOpt(
        adapter.parameters(),
        f,
        lr=settings.lr,
        metric_step=settings.metric_step,
        loss_weight=settings.loss_weight,
        steps=steps,
        trust=settings.trust,
        history=settings.history,
    )


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model that checkpoints are made of."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        return model.module  # type: ignore[no-any-return]
    return model


def open_store(cfg: CfgNode, folder: str | None) -> TrajectoryStore:
    """Return the trajectories in a folder, or an empty store in memory.

    Raises:
        FileFormatError: Its trajectories are of runs with other settings.
    """
    settings = asdict(settings_of(cfg))
    names = ("layers", "dim", "seed", "lr", "start_std", "definition", "validation", "validation_images", "evals")
    return TrajectoryStore(
        folder,
        {
            **{name: settings[name] for name in names},
            "steps": cfg.SOLVER.MAX_ITER,
            "backbone": cfg.MODEL.BACKBONE.NAME,
            "weights": cfg.MODEL.WEIGHTS,
        },
    )
