"""Searches for phi with what a trainer class of Detectron2's has: its data loader, its loss and its evaluator."""

import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from detectron2.config import CfgNode
from detectron2.engine.defaults import default_writers
from detectron2.utils import comm
from detectron2.utils.events import CommonMetricPrinter, EventStorage
from torch import Tensor, nn

from metricopt_ext.adapters.adapter import Adapter
from metricopt_ext.detection.detectron2.config import metricopt_settings
from metricopt_ext.detection.detectron2.export import export
from metricopt_ext.detection.detectron2.hooks import LOGGER, check_no_average
from metricopt_ext.detection.detectron2.identity import identity_of_search
from metricopt_ext.detection.detectron2.kept_features import keep_features
from metricopt_ext.detection.detectron2.meta_train import check_detector, check_trainer, progress
from metricopt_ext.detection.detectron2.processes import alone, on_main_process
from metricopt_ext.detection.detectron2.trainer import MetricOptTrainer
from metricopt_ext.detection.detectron2.weights import MODEL, divided, load_weights
from metricopt_ext.errors import ConfigError, FileFormatError
from metricopt_ext.methods.optimize import optimize_metric
from metricopt_ext.methods.result import Result
from metricopt_ext.methods.soups import soup_starts
from metricopt_ext.runtime import distributed
from metricopt_ext.runtime.identity import claim
from metricopt_ext.tasks.metric import Query
from metricopt_ext.tasks.task import FinetuneTask
from metricopt_ext.utils.modes import in_mode
from metricopt_ext.utils.seeding import generator, seeded_streams
from metricopt_ext.utils.words import counted

FOLDER, MERGED = "search", "model_merged.pth"  # in OUTPUT_DIR
NUMBERED = re.compile(r"model_\d+\.pth")  # what Detectron2 calls the checkpoints of a training


def search(cfg: CfgNode, resume: bool = False, trainer_class: type[MetricOptTrainer] = MetricOptTrainer) -> Result:
    """Find a phi of a higher AP50 for a trained detector, by a guided search (see `optimize_metric`).

    AP50 on ``METRIC.SET`` is evaluated ``SEARCH.QUERIES`` times, logged, and written in percent at the number of the
    query as ``SET/bbox/AP50``. ``OUTPUT_DIR/search`` receives ``value_function.safetensors``, which
    ``FINETUNE.VALUE_FUNCTION`` can name, ``adapter.safetensors``, and what ``resume`` needs; ``OUTPUT_DIR`` receives
    ``model_merged.pth``, the detector that the guard kept, with phi in its weights. ``DATASETS.TEST`` is evaluated
    once, there.

    With ``METRICOPT.SOUP``, the average of the detector's last checkpoints is a start too, which costs a query.

    Several processes evaluate several phi at once, each as if it were alone; what is found is the same.

    Args:
        cfg: The config; ``MODEL.WEIGHTS`` is the trained detector. The nodes FINETUNE and META have no influence.
        resume: Continue with the evaluations that are there.
        trainer_class: Has the model, the loss (the sum of what the model returns in training), the training data and
            the evaluator. Its hooks and its steps have no part in a search.

    Raises:
        ConfigError: No trained detector is named, or no set to evaluate AP50 on; or there are too few queries; or the
            model keeps an average of its weights.
        FileFormatError: There is a search and ``resume`` is False, or it has other settings or another trainer class.
        TypeError: ``trainer_class`` is not a `MetricOptTrainer`, or lacks its metric.
    """
    settings, folder = metricopt_settings(cfg), Path(cfg.OUTPUT_DIR)
    check_detector(cfg, settings, "a search")
    check_trainer(trainer_class)
    queries, strategy = settings.search.queries, settings.search.build()
    if cfg.SOLVER.AMP.ENABLED:
        LOGGER.info("SOLVER.AMP.ENABLED is of training alone: a search computes in float32, as Detectron2 evaluates")
    checkpoints = checkpoints_beside(cfg.MODEL.WEIGHTS, settings.soup)
    least = strategy.least_queries(settings.film.dim, 1 + bool(checkpoints))
    if queries < least:
        raise ConfigError(
            f"METRICOPT.SEARCH.QUERIES is {queries}; with METRICOPT.FILM.DIM {settings.film.dim} it must be at least"
            f" {least}"
        )
    identity, cfg = identity_of_search(cfg, trainer_class), _config_of(cfg)
    with alone():
        metric = trainer_class.build_metric(cfg)
        if metric is None:
            name = trainer_class.__name__
            raise TypeError(f"{name}.build_metric returned None; it must return a metric to tune phi for")
        model = trainer_class.build_model(cfg)
        check_no_average(model)
        load_weights(model, cfg.MODEL.WEIGHTS)
    on_main_process(lambda: _claim(folder / FOLDER, identity, resume))  # no folder is left where these are refused
    keep_features(model, settings.search.keep_gib)
    written = Written(cfg.OUTPUT_DIR, metric.name, queries)
    with alone():  # its first batch is drawn as all others are
        task = FinetuneTask(
            Adapter(model),
            loss=training_loss,
            batches=LoaderBatches(cfg, trainer_class),
            metric=metric.with_settings(),
            population=1,
        )
    with closing(written), progress(cfg, metric.name, queries) as callback:
        with distributed.joined(), alone(), task.metric.calling(written):
            run = optimize_metric(
                task,
                queries=queries,
                strategy=strategy,
                starts=soup_starts(task, checkpoints, kinds=("uniform",)) if checkpoints else None,
                seed=settings.seed,
                output_dir=folder / FOLDER,
                resume=resume,
                callback=callback,
            )
        outcome = {"before": run.before, "after": run.after, "best": run.best}
        scalars = {f"{metric.name}_{name}": each for name, each in outcome.items()}
        written.write(queries + 1, scalars)  # a writer takes each iteration once
    on_main_process(lambda: export(model, folder / MERGED))
    LOGGER.info("%s\nmerged into %s", run, folder / MERGED)
    if cfg.DATASETS.TEST:
        trainer_class.test(cfg, model)
    return run


def _claim(folder: Path, identity: dict[str, Any], resume: bool) -> None:
    if folder.exists() and not resume:
        raise FileFormatError(
            f"{folder} already holds a search: add --resume to continue it, or use another OUTPUT_DIR"
        )
    claim(folder / "trainer.json", identity)


def checkpoints_beside(weights: str, count: int) -> list[Path]:
    """Return the last checkpoints of the training that a detector is from, ``model_NUMBER.pth`` beside it.

    Args:
        weights: The detector's file.
        count: How many, at most; 0 for none.

    Raises:
        ConfigError: There are fewer than two, or an entry of the detector's file is named.
    """
    if not count:
        return []
    if (entry := divided(weights)[1]) not in (None, MODEL):
        raise ConfigError(
            f"METRICOPT.SOUP is {count}, which averages what checkpoints have as {MODEL}; with MODEL.WEIGHTS={weights},"
            f" entry={entry}, set it to 0"
        )
    found = sorted(path for path in Path(weights).parent.glob("model_*.pth") if NUMBERED.fullmatch(path.name))[-count:]
    if len(found) < 2:
        raise ConfigError(
            f"METRICOPT.SOUP is {count}, but MODEL.WEIGHTS={weights} has {counted(len(found), 'checkpoint')} of its"
            " training beside it, model_0000099.pth and the like; train it with METRICOPT.SOUP, or set that to 0"
        )
    return found


def _config_of(cfg: CfgNode) -> CfgNode:
    """Return the config of the model and of its data: FiLM at phi = 0, batches in an order drawn by the seed."""
    cfg = cfg.clone()
    cfg.defrost()
    cfg.METRICOPT.ENABLED, cfg.METRICOPT.FINETUNE.START_STD = True, 0.0
    cfg.SEED = generator(cfg.METRICOPT.SEED, "batches", 0).initial_seed() % 2**31
    return cfg


def training_loss(model: nn.Module, batch: Any) -> Tensor:
    """Return the sum of a detector's losses on a batch, as Detectron2's trainers take it, a scalar.

    What it samples is drawn from the same seed each time, so a step can be replayed.
    """
    device = next(model.parameters()).device
    with in_mode(model, training=True), EventStorage(), seeded_streams(0, device):
        losses = model(batch)
    return losses if isinstance(losses, Tensor) else torch.stack(list(losses.values())).sum()


class LoaderBatches:
    """Batches of a trainer class's own training loader: batch ``task + step`` in the order that a seed draws.

    The loader goes forwards only: for an earlier batch it starts anew. The latest batch alone is kept.

    Args:
        cfg: Its config.
        trainer_class: Builds the loader.
    """

    def __init__(self, cfg: CfgNode, trainer_class: type[MetricOptTrainer]) -> None:
        self.cfg, self.trainer_class = cfg, trainer_class
        self._seed, self._number = -1, -1
        self._latest: Any = None
        self._iterator: Iterator[Any] = iter(())

    def __call__(self, seed: int, task: int, step: int) -> Any:
        """Return a batch of the loader, a list of Detectron2's dictionaries."""
        number = task + step
        if seed != self._seed or number < self._number:
            self._seed, self._number = seed, -1
            with seeded_streams(generator(seed, "loader").initial_seed(), torch.device("cpu")):
                self._iterator = iter(self.trainer_class.build_train_loader(self.cfg))
        while self._number < number:
            self._number += 1
            with seeded_streams(generator(seed, "loader", self._number).initial_seed(), torch.device("cpu")):
                self._latest = next(self._iterator)
        return self._latest


class Written:
    """A callback that has Detectron2's log and writers tell each value, at the number of the query.

    Args:
        output_dir: Receives ``metrics.json`` and TensorBoard's events.
        name: The metric's.
        queries: How often it will be evaluated.
    """

    def __init__(self, output_dir: str, name: str, queries: int) -> None:
        self.name, self.queries, self.storage = name, queries, EventStorage()
        writers = default_writers(output_dir, queries) if comm.is_main_process() else []
        self.writers = [writer for writer in writers if not isinstance(writer, CommonMetricPrinter)]  # the log has it

    def __call__(self, query: Query) -> None:
        """Log and write a query's value, unless it is on file, as the run that asked it wrote it."""
        if not query.on_file:
            LOGGER.info("%s: %.4f at query %d of %d", self.name, query.value, query.spent, self.queries)
            self.write(query.spent, {self.name: query.value})

    def write(self, iteration: int, scalars: dict[str, float]) -> None:
        """Have the writers write some scalars."""
        self.storage.iter = iteration
        with self.storage:
            self.storage.put_scalars(**scalars, smoothing_hint=False)
            for writer in self.writers:
                writer.write()

    def close(self) -> None:
        """Close the writers' files."""
        for writer in self.writers:
            writer.close()
