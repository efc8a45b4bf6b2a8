"""One seed of a retrieval run: train an embedder, finetune it for Recall@k, and run the rivals."""

import math
from dataclasses import dataclass
from pathlib import Path

from metricopt_ext.evidence.experiment import Experiment, run_experiment
from metricopt_ext.evidence.record import SeedRecord
from metricopt_ext.evidence.rivals import usual_rivals
from metricopt_ext.retrieval.build import (
    EVALUATION_BATCH,
    attach,
    build_loss,
    build_metric,
    class_batches,
    class_halves,
    embed_with,
    embedder,
    load_splits,
    to_device,
)
from metricopt_ext.retrieval.config import MetricConfig, RetrievalConfig
from metricopt_ext.retrieval.data import Splits
from metricopt_ext.retrieval.pictures import plot_neighbours, save_recalls
from metricopt_ext.tasks.metric import Metric
from metricopt_ext.tasks.task import FinetuneTask
from metricopt_ext.utils.device import choose_device
from metricopt_ext.utils.progress import Watcher


@dataclass(frozen=True)
class Prepared:
    """A trained embedder with an adapter, ready to be finetuned.

    Attributes:
        task: Its loss sees the train classes, its metric the validation classes.
        test_metric: The same metric on the test classes, of all queries.
        splits: The data.
    """

    task: FinetuneTask
    test_metric: Metric
    splits: Splits


def prepare(config: RetrievalConfig, folder: Path, seed: int) -> Prepared:
    """Load the data, train the embedder (or take it from ``folder``) and attach the adapter.

    Raises:
        MetricOptError: Data or settings are not usable; the message says which.
    """
    loss = build_loss(config.loss)
    splits = to_device(load_splits(config, seed), choose_device(config.device))
    validation = splits.validation
    task = FinetuneTask(
        attach(embedder(config, splits, seed, folder), config, seed),
        loss=loss,
        batches=class_batches(splits.train, config.loss),
        metric=build_metric(config.metric, validation, class_halves(validation.y, seed)),
        population=config.population,
    )
    return Prepared(task, build_metric(MetricConfig(config.metric.ks), splits.test), splits)


def run_seed(config: RetrievalConfig, folder: Path, resume: bool, seed: int, watcher: Watcher) -> SeedRecord:
    """Run one seed and keep model, trajectories, value function, adapter and record in ``folder/seed-N``.

    Raises:
        MetricOptError: Data or settings are not usable; the message says which.
    """

    def set_up(folder: Path) -> Experiment:
        prepared = prepare(config, folder, seed)
        task, validation, test = prepared.task, prepared.splits.validation, prepared.splits.test
        parts = validation.x.tensor_split(math.ceil(len(validation) / EVALUATION_BATCH))

        def finish() -> None:
            ends = task.origin(), task.adapter.phi.detach()
            before, after = (embed_with(task.adapter, phi, test.x) for phi in ends)
            plot_neighbours(test, before, after, folder / "neighbours.png", seed)
            save_recalls(test.y, {"pretrained": before, "metricopt": after}, folder / "recalls.json")

        rivals = usual_rivals(config, parts, class_batches(validation, config.loss), seed)
        return Experiment(task, prepared.test_metric, *rivals, finish)

    return run_experiment(set_up, config, folder, resume, seed, watcher)
