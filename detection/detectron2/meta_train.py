"""Learns a value function with Detectron2's default trainer: rounds of short runs, each from a different phi."""

import logging
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from detectron2.config import CfgNode
from detectron2.engine import HookBase
from detectron2.engine.hooks import CallbackHook
from detectron2.utils import comm
from detectron2.utils.logger import setup_logger

from metricopt_ext.detection.detectron2.config import Settings, metricopt_settings
from metricopt_ext.detection.detectron2.hooks import (
    LOGGER,
    BestCheckpoint,
    MergedCheckpoint,
    TrajectoryHook,
    values_of,
)
from metricopt_ext.detection.detectron2.identity import identity_of_trainer
from metricopt_ext.detection.detectron2.processes import alone, on_main_process
from metricopt_ext.detection.detectron2.trainer import MetricOptTrainer, check_amp, trajectory_store
from metricopt_ext.errors import ConfigError, FileFormatError
from metricopt_ext.methods.paper.recipe import Recipe, learn_in_rounds
from metricopt_ext.runtime import distributed
from metricopt_ext.runtime.identity import claim
from metricopt_ext.runtime.progress import Bars, Callback
from metricopt_ext.tasks.trajectories import Recording, Trajectory
from metricopt_ext.utils.words import counted
from metricopt_ext.value.fitting import Fit


def meta_train(
    cfg: CfgNode, path: str | Path, resume: bool = False, trainer_class: type[MetricOptTrainer] = MetricOptTrainer
) -> Fit:
    """Learn f for a trained detector and write it (Algorithm 1, meta-training; see `recipe.learn_in_rounds`).

    Each of ``META.ROUNDS * META.TASKS`` runs starts from its own phi and evaluates AP50 on ``METRIC.SET``
    ``METRIC.EVALS`` times. Several processes take the runs of a round in turn, each as if it were alone, so f does not
    depend on their number. Trajectories are kept in ``META.TRAJECTORIES``, or else in ``OUTPUT_DIR/trajectories``.

    Args:
        cfg: The config of the finetuning to come; ``MODEL.WEIGHTS`` is the trained detector. A ``FINETUNE.START_STD``
            of 0 means `Recipe`'s here, as f can't be learned from one start. On-policy runs take steps around
            ``FINETUNE.METRIC_STEP``.
        path: Receives f at the end; a ``.safetensors`` file in a folder that exists.
        resume: Continue with the trajectories that are there, and write over an f of before.
        trainer_class: The trainer of the finetuning to come: f is learned under its model, loss, data, evaluator and
            hooks.

    Returns:
        f with its held-out quality; the same on every process.

    Raises:
        ConfigError: No trained detector is named, or no set to evaluate AP50 on, or ``path`` can't be written to;
            or ``SOLVER.AMP.ENABLED`` without a GPU, or a trainer that averages weights.
        FileFormatError: There are trajectories and ``resume`` is False, or they are from runs with other settings or
            of another trainer class.
        TypeError: ``trainer_class`` is not a `MetricOptTrainer`, or lacks its metric or its recorder among the hooks.
    """
    settings, path = metricopt_settings(cfg), Path(path)
    check_detector(cfg, settings, "meta-training")
    on_main_process(lambda: _check_file(path, resume))
    check_trainer(trainer_class)
    check_amp(cfg)
    tuning, meta = settings.finetune, settings.meta
    recipe = Recipe(
        rounds=meta.rounds,
        start_std=tuning.start_std or Recipe.start_std,
        explored_step=tuning.metric_step or Recipe.explored_step,
    )
    runs, scratch = cfg.clone(), os.path.join(cfg.OUTPUT_DIR, "meta_train")
    own = os.path.join(scratch, str(comm.get_rank()))
    runs.defrost()
    runs.OUTPUT_DIR, runs.DATASETS.TEST, runs.METRICOPT.ENABLED = own, (), True
    runs.METRICOPT.FINETUNE.START_STD = recipe.start_std
    runs.METRICOPT.META.TRAJECTORIES = meta.trajectories or os.path.join(cfg.OUTPUT_DIR, "trajectories")
    if _stored(runs) and not resume:
        raise FileFormatError(
            f"{runs.METRICOPT.META.TRAJECTORIES} already holds trajectories: add --resume to continue with them, or use"
            " another folder"
        )
    of_trainer = identity_of_trainer(trainer_class)
    on_main_process(lambda: claim(Path(runs.METRICOPT.META.TRAJECTORIES) / "trainer.json", of_trainer))
    with alone():
        metric = trainer_class.build_metric(runs)
    if metric is None:
        raise TypeError(f"{trainer_class.__name__}.build_metric returned None; it must return a metric to learn")

    queries = meta.rounds * meta.tasks * settings.metric.evals
    alike = {"seed": settings.seed, "tasks": meta.tasks}
    with progress(cfg, metric.name, queries) as callback, distributed.joined(), distributed.sharing(alike):
        callback.on_file(len(_stored(runs)) * settings.metric.evals)

        def collect(round: int, indices: Sequence[int], fit: Fit | None) -> list[Trajectory]:
            followed = "" if fit is None else os.path.join(own, "f.safetensors")
            if fit is not None:
                fit.f.save(followed)
            stored = _stored(runs)
            missing = [index for index in indices if (round, index) not in stored]

            def run(index: int) -> Trajectory:
                with alone():
                    return _run(_config_of(runs, recipe, followed, round, index), trainer_class, callback)

            finished = distributed.each(run, missing)
            for index in indices:
                trajectory = stored[round, index] if index not in missing else next(finished)
                on_main_process(partial(_keep, runs, trajectory))
                first, last = (metric.sign * cost for cost in trajectory.cost[[0, -1]].tolist())
                spent = (index + 1) * settings.metric.evals
                callback.query(spent, last)
                LOGGER.info(
                    f"Round {round + 1} of {meta.rounds}, run {index + 1} of {meta.rounds * meta.tasks}: {metric.name}"
                    f" {first:.4f} -> {last:.4f}; {queries - spent} of {queries} queries left"
                )
            return [trajectory for trajectory in _stored(runs).values() if trajectory.round <= round]

        fit = learn_in_rounds(collect, recipe, tasks=meta.tasks, seed=settings.seed, callback=callback)
        if fit.f.quality:
            callback.say(f"f's held-out Spearman {fit.f.quality.spearman:.2f}")
        callback.done()
    if comm.is_main_process():
        fit.f.save(path)
        shutil.rmtree(scratch, ignore_errors=True)
    return fit


def check_detector(cfg: CfgNode, settings: Settings, work: str) -> None:
    """Check that a config names what f is learned for.

    Args:
        cfg: The config.
        settings: Its node METRICOPT.
        work: What needs it, for the message.

    Raises:
        ConfigError: It names no trained detector, or no set to evaluate AP50 on.
    """
    if not cfg.MODEL.WEIGHTS or "ImageNetPretrained" in cfg.MODEL.WEIGHTS:
        raise ConfigError(
            f"{work} needs the trained detector: MODEL.WEIGHTS is {cfg.MODEL.WEIGHTS!r}; give e.g. the"
            " OUTPUT_DIR/model_final.pth of its training"
        )
    if not settings.metric.set:
        raise ConfigError(
            f"{work} needs METRICOPT.METRIC.SET, the set that AP50 is evaluated on; hold it out from both training and"
            " test"
        )


def check_trainer(trainer_class: type) -> None:
    """Check that a trainer class is one of ours.

    Raises:
        TypeError: It is not.
    """
    if not issubclass(trainer_class, MetricOptTrainer):
        raise TypeError(f"trainer_class is {trainer_class.__name__}; it must be a subclass of MetricOptTrainer")


def _check_file(path: Path, resume: bool) -> None:
    """Check that f can be written, before a query is spent on it."""
    if path.suffix != ".safetensors":
        raise ConfigError(f"{path} will be a safetensors file: its name must end in .safetensors")
    try:
        if path.is_dir():
            raise ConfigError(f"{path} is a folder; give the name of a file")
        if path.exists() and not resume:
            raise ConfigError(f"{path} exists and would be overwritten: give another name, or --resume what wrote it")
        TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise ConfigError(f"{path} can't be written: {error.strerror}; give a file in a folder that exists") from error


def _stored(cfg: CfgNode) -> dict[tuple[int, int], Trajectory]:
    """Return the trajectories by (round, index); every process gets those of the main one, which alone stores them."""
    trajectories = on_main_process(lambda: list(trajectory_store(cfg, cfg.METRICOPT.META.TRAJECTORIES)))
    return {(trajectory.round, trajectory.index): trajectory for trajectory in trajectories}


def _config_of(cfg: CfgNode, recipe: Recipe, followed: str, round: int, index: int) -> CfgNode:
    weight, metric_step = recipe.explored_settings(cfg.METRICOPT.SEED, [index])[0].tolist()
    cfg = cfg.clone()
    cfg.METRICOPT.FINETUNE.update(VALUE_FUNCTION=followed, METRIC_STEP=metric_step, LOSS_WEIGHT=weight)
    cfg.METRICOPT.META.update(ROUND=round, INDEX=index)
    return cfg


def _keep(cfg: CfgNode, trajectory: Trajectory) -> None:
    """Store a trajectory, unless the process that it is of has reached the same folder."""
    store = trajectory_store(cfg, cfg.METRICOPT.META.TRAJECTORIES)
    if store.get(trajectory.round, trajectory.index) is None:
        store.add(trajectory)


def _run(cfg: CfgNode, trainer_class: type[MetricOptTrainer], callback: Callback) -> Trajectory:
    recordings: list[Recording] = []

    class Run(trainer_class):  # type: ignore[valid-type,misc]
        """Is trained for its trajectory: no model is kept."""

        def build_hooks(self) -> list[HookBase]:
            hooks = [each for each in super().build_hooks() if not isinstance(each, BestCheckpoint | MergedCheckpoint)]
            recordings[:] = [each.recording for each in hooks if isinstance(each, TrajectoryHook)]
            if len(recordings) != 1:
                raise TypeError(
                    f"{trainer_class.__name__}.build_hooks returned {counted(len(recordings), 'TrajectoryHook')};"
                    " meta-training needs one: keep the hooks of MetricOptTrainer.build_hooks"
                )
            (recording,) = recordings
            earlier = cfg.METRICOPT.META.INDEX * cfg.METRICOPT.METRIC.EVALS

            def show(trainer: Any) -> None:
                values = values_of(recording)
                callback.query(earlier + len(values), values[-1])

            return [*hooks, CallbackHook(before_train=show, after_step=show)]

    trainer = Run(cfg)
    trainer.resume_or_load(resume=False)
    trainer.train()
    (recording,) = recordings
    assert recording.trajectory is not None
    return recording.trajectory


@contextmanager
def progress(cfg: CfgNode, name: str, queries: int) -> Iterator[Callback]:
    """Show the queries on the main process, instead of Detectron2's log on the terminal."""
    if not logging.getLogger("detectron2").isEnabledFor(logging.INFO):
        setup_logger()  # which the first trainer would do otherwise
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
                callback = bars.watch(name, queries, name)
                log = Path(cfg.OUTPUT_DIR) / "log.txt"
                if log.exists():
                    callback.say(f"the runs' log is in {log}")
                yield callback
        else:
            yield Callback()
    finally:
        for handler, level in zip(handlers, levels, strict=True):
            handler.setLevel(level)
