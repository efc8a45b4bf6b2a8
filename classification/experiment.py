"""One seed of a classification run: train a classifier, finetune it for the metric, and run the rivals."""

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torch import Tensor, nn

from metricopt_ext.classification.build import (
    EVALUATION_BATCH,
    attach,
    build_metric,
    classification_loss,
    classifier,
    load_splits,
    model_metric,
    predict_classes,
    stratified_halves,
    to_device,
    train,
)
from metricopt_ext.classification.config import ClassificationConfig
from metricopt_ext.classification.data import Splits
from metricopt_ext.classification.metrics import check_split
from metricopt_ext.classification.pictures import plot_examples
from metricopt_ext.classification.threshold import tune_threshold
from metricopt_ext.data.labelled import Split
from metricopt_ext.evidence.experiment import Experiment, run_experiment
from metricopt_ext.evidence.record import SeedRecord
from metricopt_ext.evidence.rivals import usual_rivals
from metricopt_ext.methods.result import MetricOptResult
from metricopt_ext.methods.second_round import copied_task, run_second_round
from metricopt_ext.methods.tuning import finetune
from metricopt_ext.search.optimizer import MetricOptStep
from metricopt_ext.tasks.batches import TensorBatches
from metricopt_ext.tasks.metric import Metric
from metricopt_ext.tasks.task import FinetuneTask
from metricopt_ext.utils.device import choose_device
from metricopt_ext.utils.progress import Watcher
from metricopt_ext.value.rotated import RotatedValueFunction
from metricopt_ext.value.value_function import load_value_function


@dataclass(frozen=True)
class Prepared:
    """A trained classifier with an adapter, ready to be finetuned.

    Attributes:
        task: Its loss sees the train data, its metric the validation data.
        test_metric: The same metric on the test data.
        splits: The data.
        config: What all of it was made from.
    """

    task: FinetuneTask
    test_metric: Metric
    splits: Splits
    config: ClassificationConfig

    def batches(self, part: Split) -> TensorBatches:
        """Return batches of a part of the data as the loss is given them."""
        return TensorBatches(part.x, part.y, self.config.batch_size, balanced=self.config.balanced)


def prepare(config: ClassificationConfig, folder: Path, seed: int) -> Prepared:
    """Load the data, train the classifier (or take it from ``folder``) and attach the adapter.

    Raises:
        MetricOptError: Data, settings or metric are not usable; the message says which.
    """
    splits = to_device(load_splits(config, seed), choose_device(config.device))
    for part, where in ((splits.train, "train"), (splits.validation, "validation"), (splits.test, "test")):
        check_split(part.y, splits.num_classes, where)
    metric = build_metric(config.metric)
    adapter = attach(classifier(config, splits, seed, folder), config, seed)
    task = FinetuneTask(
        adapter,
        loss=classification_loss,
        batches=TensorBatches(splits.train.x, splits.train.y, config.batch_size, balanced=config.balanced),
        metric=model_metric(metric, splits.validation, stratified_halves(splits.validation.y, seed)),
        population=config.population,
    )
    return Prepared(task, model_metric(metric, splits.test), splits, config)


def run_seed(config: ClassificationConfig, folder: Path, resume: bool, seed: int, watcher: Watcher) -> SeedRecord:
    """Run one seed and keep model, trajectories, value function, adapter and record in ``folder/seed-N``.

    Raises:
        MetricOptError: Data, settings or metric are not usable; the message says which.
    """
    recipe = config.recipe.build()

    def set_up(folder: Path) -> Experiment:
        prepared = prepare(config, folder, seed)
        task, splits = prepared.task, prepared.splits

        def threshold(task: FinetuneTask, result: MetricOptResult) -> nn.Module | None:
            return tune_threshold(task, splits.validation.x)

        def transferred(task: FinetuneTask, result: MetricOptResult, placebo: bool = False) -> Tensor | None:
            if not config.transfer.value_function:
                return None
            f = load_value_function(config.transfer.value_function, task.dim).to(task.adapter.phi.device)
            policy = MetricOptStep(
                RotatedValueFunction(f, seed) if placebo else f,
                recipe.lr,
                config.transfer.metric_step,
                config.transfer.loss_weight,
                recipe.steps,
                even_untrusted=True,
            )
            return finetune(task, policy, recipe.steps, seed)

        def train_theta(model: nn.Module) -> None:
            train(model, splits.train, config.second_round, config.balanced, seed)

        def second_round(task: FinetuneTask, result: MetricOptResult) -> nn.Module | None:
            if not config.second_round.epochs:
                return None
            again = copied_task(task)
            again.adapter.set_phi(result.ends[result.chosen])
            run_second_round(again, result.fit, train_theta, recipe=recipe, setting=result.setting, seed=seed)
            return again.adapter.merge()

        x = splits.validation.x
        parts = x.tensor_split(math.ceil(len(x) / EVALUATION_BATCH))
        rivals, follow_ups = usual_rivals(config, parts, prepared.batches(splits.validation), seed)

        def finish() -> None:
            if splits.test.x.dim() == 4:
                ends = task.origin(), task.adapter.phi.detach()
                before, after = (predict_classes(task.adapter, phi, splits.test.x) for phi in ends)
                plot_examples(splits.test, before, after, splits.class_names, folder / "examples.png", seed)

        return Experiment(
            task,
            prepared.test_metric,
            {
                "threshold": threshold,
                **rivals,
                "transferred": transferred,
                "placebo": partial(transferred, placebo=True),
            },
            {**follow_ups, "second_round": second_round},
            finish,
        )

    return run_experiment(set_up, config, folder, resume, seed, watcher)
