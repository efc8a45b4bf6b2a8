"""Learns a value function by Detectron2's default trainer: rounds of short runs, each from another phi."""

import logging
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from detectron2.config import CfgNode
from detectron2.utils import comm

from metricopt_ext.detection.detectron2.build import main_process_folder
from metricopt_ext.detection.detectron2.config import Settings, metricopt_settings
from metricopt_ext.detection.detectron2.trainer import MetricOptTrainer, trajectory_store
from metricopt_ext.errors import ConfigError, FileFormatError
from metricopt_ext.methods.recipe import Recipe
from metricopt_ext.tasks.trajectory import TrajectoryStore
from metricopt_ext.utils.progress import Bars, Watcher
from metricopt_ext.value.fitting import Fit


def meta_train(cfg: CfgNode, path: str | Path, resume: bool = False) -> Fit | None:
    """Learn f for a trained detector and write it (Algorithm 1, meta-training, as `metricopt_ext.meta_train` does).

    Each of ``METRICOPT.ROUNDS * METRICOPT.TASKS`` runs starts from a phi of its own and evaluates AP50 on
    ``METRICOPT.VALIDATION`` ``METRICOPT.EVALS`` times. Trajectories are kept in ``METRICOPT.TRAJECTORIES``, or else in
    ``OUTPUT_DIR/trajectories``.

    Args:
        cfg: The config of the finetuning to come; ``MODEL.WEIGHTS`` is the trained detector. A ``METRICOPT.START_STD``
            of 0 stands for `Recipe`'s here, as f can't be learned from one start. On-policy runs take steps around
            ``METRICOPT.METRIC_STEP``.
        path: Receives f at the end.
        resume: Go on with the trajectories that are there.

    Returns:
        f with its held-out quality; None on all processes but the main one.

    Raises:
        ConfigError: No trained detector is named, or no set to evaluate AP50 on.
        FileFormatError: There are trajectories and ``resume`` is False, or they are of runs with other settings.
    """
    settings = metricopt_settings(cfg)
    _check(cfg, settings)
    tasks, rounds, scratch = settings.tasks, settings.rounds, os.path.join(cfg.OUTPUT_DIR, "meta_train")
    recipe = Recipe(
        start_std=settings.start_std or Recipe.start_std, explored_step=settings.metric_step or Recipe.explored_step
    )
    latest, fit = os.path.join(scratch, "f.safetensors"), None
    with _progress(cfg, settings) as watcher:
        for round in range(rounds):
            skill = f"f at {fit.f.quality.spearman:.2f}" if fit and fit.f.quality else "loss only"
            watcher.stage(f"round {round + 1}/{rounds}, {skill}")
            for index in range(round * tasks, (round + 1) * tasks):
                weight, metric_step = recipe.explored_settings(settings.seed, [index])[0].tolist()
                task = cfg.clone()
                task.defrost()
                task.OUTPUT_DIR, task.DATASETS.TEST = scratch, ()
                task.METRICOPT.update(
                    ENABLED=True,
                    TRAJECTORIES=settings.trajectories or os.path.join(cfg.OUTPUT_DIR, "trajectories"),
                    START_STD=recipe.start_std,
                    VALUE_FUNCTION=latest if round else "",
                    METRIC_STEP=metric_step,
                    LOSS_WEIGHT=weight,
                    ROUND=round,
                    INDEX=index,
                )
                if index == 0 and not resume:
                    _refuse_mixing(task)
                if not _stored(task, round, index):
                    _run(task)
                _tell(watcher, task, (index + 1) * settings.evals)
            if comm.is_main_process():
                fit = recipe.fit([each for each in _store(task) if each.round <= round], settings.seed)
                fit.f.save(latest)
            comm.synchronize()  # every process follows it in the next round
        if fit is not None:
            fit.f.save(path)
            watcher.say(f"value function ({fit.f.kind}): {fit.f.quality}")
            watcher.done()
            shutil.rmtree(scratch)
    return fit


def _check(cfg: CfgNode, settings: Settings) -> None:
    if not cfg.MODEL.WEIGHTS or "ImageNetPretrained" in cfg.MODEL.WEIGHTS:
        raise ConfigError(
            f"meta-training needs the trained detector: MODEL.WEIGHTS is {cfg.MODEL.WEIGHTS!r}; give e.g. the"
            " OUTPUT_DIR/model_final.pth of its training"
        )
    if not settings.validation:
        raise ConfigError(
            "meta-training needs METRICOPT.VALIDATION, the set that AP50 is evaluated on; hold it out of both training"
            " and test"
        )


def _refuse_mixing(cfg: CfgNode) -> None:
    if comm.all_gather(len(_store(cfg)))[0]:
        raise FileFormatError(
            f"{cfg.METRICOPT.TRAJECTORIES} holds trajectories already: add --resume to go on with them, or use another"
            " folder"
        )


def _run(cfg: CfgNode) -> None:
    trainer = MetricOptTrainer(cfg)
    trainer.resume_or_load(resume=False)
    trainer.train()


def _store(cfg: CfgNode) -> TrajectoryStore:
    return trajectory_store(cfg, main_process_folder(cfg.METRICOPT.TRAJECTORIES))


def _stored(cfg: CfgNode, round: int, index: int) -> bool:
    """Return whether the main process, which alone keeps trajectories, has this one."""
    return bool(comm.all_gather(_store(cfg).get(round, index) is not None)[0])


def _tell(watcher: Watcher, cfg: CfgNode, spent: int) -> None:
    trajectory = _store(cfg).get(cfg.METRICOPT.ROUND, cfg.METRICOPT.INDEX)
    if trajectory is not None:
        first, last = (1 - trajectory.cost[[0, -1]]).tolist()  # AP50's cost is what it lacks to 1
        watcher.query(spent, f"AP50 {first:.4f} -> {last:.4f}")


@contextmanager
def _progress(cfg: CfgNode, settings: Settings) -> Iterator[Watcher]:
    """Show a bar on the main process, in place of what Detectron2 logs to the terminal."""
    handlers = [
        handler
        for name in ("detectron2", "fvcore")
        for handler in logging.getLogger(name).handlers
        if getattr(handler, "stream", None) in (sys.stdout, sys.stderr)
    ]
    levels = [handler.level for handler in handlers]
    for handler in handlers:
        handler.setLevel(logging.WARNING)
    try:
        if comm.is_main_process():
            with Bars() as bars:
                watcher = bars.watch("AP50", settings.rounds * settings.tasks * settings.evals)
                if handlers:
                    watcher.say(f"what the runs log is in {cfg.OUTPUT_DIR}/log.txt")
                yield watcher
        else:
            yield Watcher()
    finally:
        for handler, level in zip(handlers, levels, strict=True):
            handler.setLevel(level)
