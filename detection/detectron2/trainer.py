"""Detectron2's default trainer with MetricOpt as its optimizer."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any, ClassVar

import torch
from detectron2.config import CfgNode
from detectron2.data import build_detection_test_loader, build_detection_train_loader
from detectron2.engine import DefaultTrainer, HookBase
from detectron2.engine.hooks import PeriodicCheckpointer
from detectron2.evaluation import COCOEvaluator, DatasetEvaluator
from detectron2.utils import comm
from torch import nn

from metricopt_ext.detection.detectron2.ap_loss import use_ap_loss
from metricopt_ext.detection.detectron2.build import (
    finetuning_hooks,
    main_process_folder,
    phi_of,
    phi_optimizer,
    warn_once,
    with_film,
)
from metricopt_ext.detection.detectron2.config import Settings, metricopt_settings
from metricopt_ext.detection.detectron2.datasets import Mapper, drawn_images, registered_truth
from metricopt_ext.detection.detectron2.evaluator import AP50Evaluator, ap50_metric
from metricopt_ext.detection.detectron2.identity import identity_of_run, identity_of_trajectories
from metricopt_ext.detection.detectron2.weights import load_weights
from metricopt_ext.detection.metric import kind_of
from metricopt_ext.errors import ConfigError, DataError, MetricOptError
from metricopt_ext.runtime.identity import claim
from metricopt_ext.tasks.metric import Metric
from metricopt_ext.tasks.trajectories import TrajectoryStore
from metricopt_ext.utils.seeding import generator, seeded_streams


class MetricOptTrainer(DefaultTrainer):  # type: ignore[misc]
    """Finetunes phi if ``METRICOPT.ENABLED``, and trains as Detectron2 does if not; both are evaluated by AP50.

    Masks, ``METRICOPT.METRIC.NAME`` ``segm/AP`` and the like, are judged by Detectron2's COCOEvaluator.

    phi is finetuned for ``METRICOPT.FINETUNE.STEPS`` steps. If ``METRICOPT.METRIC.SET`` names a set, AP50 on it is
    evaluated at some of the points, and logged and written in percent as ``SET/bbox/AP50``. The best point, the start
    included, is what the model is after `train`: it is kept in ``OUTPUT_DIR/model_best.pth`` and, with phi merged, in
    ``model_merged.pth``; ``DATASETS.TEST`` is evaluated once, there. Checkpoints, of which the last numbered one is
    kept, hold phi and the optimizer's past gradients; a resumed run continues from them, see `hooks.ReplayedSteps`.

    A subclass may have its own detector, by `build_detector`, and loss, data loaders, evaluator and hooks, by the
    methods of `DefaultTrainer`; phi is tuned for the ``METRIC.NAME`` of its evaluator. `meta_train.meta_train` takes
    the class. `lazy.lazy_trainer` makes one of a LazyConfig.

    Attributes:
        described: What else of the class a run depends on, beside its name: trajectories and searches with another are
            refused.

    With ``SOLVER.AMP.ENABLED`` steps are in mixed precision, phi and all evaluations in float32.

    Args:
        cfg: A config that has a METRICOPT node.

    Raises:
        ConfigError: ``SOLVER.AMP.ENABLED`` without a GPU.
    """

    described: ClassVar[dict[str, str]] = {}

    def __init__(self, cfg: CfgNode) -> None:
        settings = metricopt_settings(cfg)
        check_amp(cfg)
        if settings.enabled:
            cfg = cfg.clone()
            cfg.defrost()
            cfg.SOLVER.MAX_ITER = settings.finetune.steps
            cfg.SOLVER.REFERENCE_WORLD_SIZE = 0  # which would scale the number of steps
            # Evaluating periodically, as Detectron2 does, would choose a model by the test set.
            cfg.TEST.EVAL_PERIOD = 0
            cfg.TEST.PRECISE_BN.ENABLED = False  # theta is frozen, its statistics included
            # The order of the batches, which differs from trajectory to trajectory.
            cfg.SEED = generator(settings.seed, "batches", settings.meta.index).initial_seed() % 2**31
            warn(settings)
        super().__init__(cfg)

    def resume_or_load(self, resume: bool = True) -> None:
        """Continue from the last checkpoint, or start from ``MODEL.WEIGHTS``.

        Raises:
            FileFormatError: The checkpoint is from a finetuning run with other settings.
            DataError: The checkpoint is from another kind of run, or the weights can't be loaded; see
                `weights.load_weights`.
        """
        if metricopt_settings(self.cfg).enabled and comm.is_main_process():
            self._claim_folder(resume)
        if resume and self.checkpointer.has_checkpoint():
            try:
                super().resume_or_load(resume)
            except (MetricOptError, torch.OutOfMemoryError):
                raise
            except (KeyError, RuntimeError, ValueError) as error:
                raise DataError(
                    f"{self.checkpointer.get_checkpoint_file()} is not a checkpoint of such a run ({error}); use"
                    " another OUTPUT_DIR, or omit --resume"
                ) from error
        elif self.cfg.MODEL.WEIGHTS:
            load_weights(self.model, self.cfg.MODEL.WEIGHTS, strict=metricopt_settings(self.cfg).enabled)

    def _claim_folder(self, resume: bool) -> None:
        """Check that the checkpoints in ``OUTPUT_DIR`` are from this run, or forget them if a new one starts."""
        folder = Path(self.cfg.OUTPUT_DIR)
        if not resume:
            (folder / "last_checkpoint").unlink(missing_ok=True)
            (folder / "identity.json").unlink(missing_ok=True)
        claim(folder / "identity.json", identity_of_run(self.cfg))

    @classmethod
    def build_detector(cls, cfg: CfgNode) -> nn.Module:
        """Return the detector as the config says, without phi."""
        model: nn.Module = super().build_model(cfg)
        return model

    @classmethod
    def build_model(cls, cfg: CfgNode) -> nn.Module:
        """Return the detector, with FiLM attached and phi at its start."""
        settings = metricopt_settings(cfg)
        model = cls.build_detector(cfg)
        if settings.classification_loss == "ap":
            use_ap_loss(model)
        if not settings.enabled:
            return model
        return with_film(
            model,
            settings.film.layers,
            dim=settings.film.dim,
            seed=settings.seed,
            start_std=settings.finetune.start_std,
            index=settings.meta.index,
        )

    @classmethod
    def build_optimizer(cls, cfg: CfgNode, model: nn.Module) -> Any:
        """Return MetricOpt on phi, or gradient descent on it if there is no value function."""
        settings = metricopt_settings(cfg)
        if not settings.enabled:
            return super().build_optimizer(cfg, model)
        return phi_optimizer(
            phi_of(model),
            value_function=settings.finetune.value_function,
            lr=settings.finetune.lr,
            metric_step=settings.finetune.metric_step,
            loss_weight=settings.finetune.loss_weight,
            steps=settings.finetune.steps,
            trust=settings.finetune.trust,
            history=settings.finetune.history,
            update_rule=settings.finetune.update_rule,
            even_untrusted=settings.meta.round > 0,  # its trajectories are meant to correct f
        )

    @classmethod
    def build_lr_scheduler(cls, cfg: CfgNode, optimizer: torch.optim.Optimizer) -> Any:
        """Return a constant rate for phi, the solver's schedule for ordinary training."""
        if not metricopt_settings(cfg).enabled:
            return super().build_lr_scheduler(cfg, optimizer)
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)

    @classmethod
    def build_train_loader(cls, cfg: CfgNode) -> Any:
        """Return Detectron2's loader, whose order is drawn by ``SEED``."""
        # Before February 2024 Detectron2 draws it from NumPy's global stream, whatever SEED is.
        with nullcontext() if cfg.SEED < 0 else seeded_streams(cfg.SEED, torch.device("cpu")):
            return build_detection_train_loader(cfg, mapper=Mapper(cfg, is_train=True))

    @classmethod
    def build_test_loader(cls, cfg: CfgNode, dataset_name: str) -> Any:
        """Return Detectron2's loader of a set's images."""
        return build_detection_test_loader(cfg, dataset_name, mapper=Mapper(cfg, is_train=False))

    @classmethod
    def build_evaluator(cls, cfg: CfgNode, dataset_name: str) -> DatasetEvaluator:
        """Return the AP50 evaluator of a set; Detectron2's own, of COCO's numbers, if ``METRIC.NAME`` is of shapes."""
        metric = metricopt_settings(cfg).metric
        if kind_of(metric.name) != "bbox":
            return COCOEvaluator(
                dataset_name,
                output_dir=str(Path(cfg.OUTPUT_DIR) / "inference"),
                allow_cached_coco=False,  # it may be of another set of this name
            )
        more = metric.name in ("bbox/AP", "bbox/AP75")
        return AP50Evaluator(registered_truth(dataset_name), metric.definition, ap=more)

    @classmethod
    def build_metric(cls, cfg: CfgNode) -> Metric | None:
        """Return what phi is tuned for: ``METRIC.NAME`` on ``METRIC.SET``, by this class's loader and evaluator.

        None if no set is named.

        Raises:
            ConfigError: The set has fewer images than ``METRIC.IMAGES``, or is trained on.
            DataError: There is no such set.
        """
        settings = metricopt_settings(cfg)
        if not settings.metric.set:
            return None
        if settings.metric.set in cfg.DATASETS.TRAIN:
            raise ConfigError(
                f"METRICOPT.METRIC.SET {settings.metric.set} is one of DATASETS.TRAIN; name one that is not trained on"
            )
        drawn = drawn_images(settings.metric.set, settings.metric.images, settings.seed)
        evaluator = cls.build_evaluator(cfg, drawn)
        result = settings.metric.name
        return ap50_metric(
            cls.build_test_loader(cfg, drawn), evaluator, f"{settings.metric.set}/{result}", result=result
        )

    def build_hooks(self) -> list[HookBase]:
        """Return our and Detectron2's hooks."""
        stock: list[HookBase] = super().build_hooks()
        settings = metricopt_settings(self.cfg)
        if not settings.enabled:
            for hook in stock:
                if isinstance(hook, PeriodicCheckpointer) and settings.soup:
                    hook.period = min(hook.period, max(1, self.cfg.SOLVER.MAX_ITER // (2 * settings.soup)))
                    hook.max_to_keep = settings.soup
            return stock
        for hook in stock:
            if isinstance(hook, PeriodicCheckpointer):
                hook.max_to_keep = 1
        ours = finetuning_hooks(
            self.model,
            self.build_metric(self.cfg),
            trajectory_store(self.cfg, main_process_folder(settings.meta.trajectories)),
            steps=settings.finetune.steps,
            evals=settings.metric.evals,
            output_dir=self.cfg.OUTPUT_DIR,
            seed=settings.seed,
            round=settings.meta.round,
            index=settings.meta.index,
        )
        return [*ours, *stock]


def warn(settings: Settings) -> None:
    """Say what a finetuning run lacks, which may well run without it."""
    # Meta-training's first runs have no f yet.
    finetune = settings.finetune
    if not (finetune.value_function or finetune.update_rule or settings.meta.trajectories):
        warn_once(
            "METRICOPT.FINETUNE.VALUE_FUNCTION is empty: phi follows the loss alone; learn f, e.g. by --meta-train FILE"
            " of tools/train_detector.py, and name its file there"
        )


def check_amp(cfg: CfgNode) -> None:
    """Check that Detectron2 can train in mixed precision, which it asks at its first step only.

    Raises:
        ConfigError: It can't on this machine.
    """
    if cfg.SOLVER.AMP.ENABLED and not torch.cuda.is_available():
        raise ConfigError(
            "SOLVER.AMP.ENABLED is True, but no GPU was found, on which alone Detectron2 trains in mixed precision; set"
            " it to False"
        )


def trajectory_store(cfg: CfgNode, folder: str | None) -> TrajectoryStore:
    """Return the trajectories in a folder, or an empty store in memory.

    Raises:
        FileFormatError: Its trajectories are from runs with other settings.
    """
    return TrajectoryStore(folder, identity_of_trajectories(cfg))
