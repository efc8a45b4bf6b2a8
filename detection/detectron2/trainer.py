"""Detectron2's default trainer with MetricOpt under its optimizer."""

import hashlib
import os
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from detectron2.config import CfgNode
from detectron2.engine import DefaultTrainer, HookBase
from torch import nn

from metricopt_ext.detection.detectron2.ap_loss import use_ap_loss
from metricopt_ext.detection.detectron2.build import (
    finetuning_hooks,
    main_process_folder,
    phi_of,
    phi_optimizer,
    with_film,
)
from metricopt_ext.detection.detectron2.config import settings_of
from metricopt_ext.detection.detectron2.datasets import truth_of
from metricopt_ext.detection.detectron2.evaluator import AP50Evaluator, validation_metric
from metricopt_ext.seeding import generator
from metricopt_ext.trajectory import TrajectoryStore


class MetricOptTrainer(DefaultTrainer):  # type: ignore[misc]
    """Finetunes phi if ``METRICOPT.ENABLED``, and trains as Detectron2 does if not; either is evaluated by AP50.

    phi is finetuned for ``METRICOPT.STEPS`` steps. Where ``METRICOPT.VALIDATION`` names a set, AP50 on it is asked at
    some of the points, the best of which is kept in ``OUTPUT_DIR/model_best.pth``. ``DATASETS.TEST`` is evaluated once,
    at the end. Checkpoints hold phi and the optimizer's past gradients; a resumed run goes on from them, as
    `hooks.ReplayedSteps` says.

    Args:
        cfg: A config that has a METRICOPT node.
    """

    def __init__(self, cfg: CfgNode) -> None:
        settings = settings_of(cfg)
        if settings.enabled:
            cfg = cfg.clone()
            cfg.defrost()
            cfg.SOLVER.MAX_ITER = settings.steps
            # Evaluating now and then, as Detectron2 does, would choose a model by the test set.
            cfg.TEST.EVAL_PERIOD = 0
        super().__init__(cfg)

    @classmethod
    def build_model(cls, cfg: CfgNode) -> nn.Module:
        """Return the model, its FiLM attached and phi at its start."""
        settings = settings_of(cfg)
        model: nn.Module = super().build_model(cfg)
        if settings.classification_loss == "ap":
            use_ap_loss(model)
        if not settings.enabled:
            return model
        return with_film(
            model,
            settings.layers,
            dim=settings.dim,
            seed=settings.seed,
            start_std=settings.start_std,
            index=settings.index,
        )

    @classmethod
    def build_optimizer(cls, cfg: CfgNode, model: nn.Module) -> Any:
        """Return MetricOpt on phi, or gradient descent on it where there is no value function."""
        settings = settings_of(cfg)
        if not settings.enabled:
            return super().build_optimizer(cfg, model)
        return phi_optimizer(
            phi_of(model),
            value_function=settings.value_function,
            lr=settings.lr,
            metric_step=settings.metric_step,
            loss_weight=settings.loss_weight,
            steps=settings.steps,
            trust=settings.trust,
            history=settings.history,
            even_untrusted=settings.round > 0,  # whose trajectories are to correct f
        )

    @classmethod
    def build_lr_scheduler(cls, cfg: CfgNode, optimizer: torch.optim.Optimizer) -> Any:
        """Return a constant rate for phi, the solver's schedule for ordinary training."""
        if not settings_of(cfg).enabled:
            return super().build_lr_scheduler(cfg, optimizer)
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)

    @classmethod
    def build_train_loader(cls, cfg: CfgNode) -> Any:
        """Return Detectron2's loader, its order another one for each trajectory."""
        settings = settings_of(cfg)
        if settings.enabled:
            cfg = cfg.clone()
            cfg.defrost()
            cfg.SEED = generator(settings.seed, "batches", settings.index).initial_seed() % 2**31
        return super().build_train_loader(cfg)

    @classmethod
    def build_evaluator(cls, cfg: CfgNode, dataset_name: str) -> AP50Evaluator:
        """Return the AP50 evaluator of a set."""
        return AP50Evaluator(truth_of(dataset_name), settings_of(cfg).definition)

    def build_hooks(self) -> list[HookBase]:
        """Return ours and Detectron2's hooks."""
        stock: list[HookBase] = super().build_hooks()
        settings = settings_of(self.cfg)
        if not settings.enabled:
            return stock
        metric = None
        if settings.validation:
            metric = validation_metric(
                self.cfg,
                settings.validation,
                definition=settings.definition,
                images=settings.validation_images,
                seed=settings.seed,
            )
        ours = finetuning_hooks(
            self.model,
            metric,
            open_store(self.cfg, main_process_folder(settings.trajectories)),
            steps=settings.steps,
            evals=settings.evals,
            output_dir=self.cfg.OUTPUT_DIR,
            seed=settings.seed,
            round=settings.round,
            index=settings.index,
        )
        return [*ours, *stock]


def open_store(cfg: CfgNode, folder: str | None) -> TrajectoryStore:
    """Return the trajectories in a folder, or an empty store in memory.

    Raises:
        FileFormatError: Its trajectories are of runs with other settings.
    """
    settings = asdict(settings_of(cfg))
    names = ("layers", "dim", "seed", "steps", "lr", "start_std", "trust", "history", "tasks", "data")
    asked = ("classification_loss", "definition", "validation", "validation_images", "evals")
    identity = {name: settings[name] for name in (*names, *asked)}
    identity |= {"backbone": cfg.MODEL.BACKBONE.NAME, "weights": cfg.MODEL.WEIGHTS}
    if os.path.isfile(cfg.MODEL.WEIGHTS):  # else a name in Detectron2's model zoo
        identity["weights"] += f" ({_fingerprint(cfg.MODEL.WEIGHTS, os.stat(cfg.MODEL.WEIGHTS).st_mtime_ns)})"
    return TrajectoryStore(folder, identity)


@lru_cache
def _fingerprint(file: str, changed: int) -> str:
    """Return 16 digits that tell a file from another that takes its place, e.g. of a detector that is trained again."""
    return hashlib.blake2b(Path(file).read_bytes(), digest_size=8).hexdigest()
