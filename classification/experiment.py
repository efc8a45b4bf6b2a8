"""One seed of a classification run: train a classifier, finetune it for the metric, and run the baselines."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from metricopt_ext.adapters.start import Start, StartLine
from metricopt_ext.classification.adapter import attach
from metricopt_ext.classification.besides import besides
from metricopt_ext.classification.classifier import classifier, steps_of, untrained
from metricopt_ext.classification.config import ClassificationConfig, OwnLossConfig
from metricopt_ext.classification.groups import (
    RowBatches,
    batches_of_outcomes,
    check_groups,
    groups_of,
    metric_halves,
    rare_judged,
    strata,
    values_of,
    with_sizes,
)
from metricopt_ext.classification.metrics import MetricSpec, check_classes
from metricopt_ext.classification.named_loss import named_loss, try_loss
from metricopt_ext.classification.named_metric import NO_VALUES, build_metric, try_metric
from metricopt_ext.classification.offsets import (
    adjust_logits,
    prior_adjustment,
    raise_worst,
    target_line,
    threshold_of,
    tune_adjustment,
    tune_offsets,
    tune_threshold,
)
from metricopt_ext.classification.pictures import plot_examples
from metricopt_ext.classification.predictions import predict, scores_at
from metricopt_ext.classification.settings import classification_settings
from metricopt_ext.classification.split_metric import batch_metric, check_part, model_metric, value_of
from metricopt_ext.classification.splits import load_splits
from metricopt_ext.classification.targets import Target, matching_offsets
from metricopt_ext.data.labelled import Split
from metricopt_ext.data.parts import large_parts
from metricopt_ext.data.rare import Rare, rare_groups
from metricopt_ext.data.splits import PARTS, Splits
from metricopt_ext.data.streamed import taken
from metricopt_ext.data.training import train_supervised
from metricopt_ext.data.variation import jitter
from metricopt_ext.errors import ConfigError
from metricopt_ext.experiment.baselines import at_each_budget, ending_at
from metricopt_ext.experiment.bootstrap import error_of, within_groups
from metricopt_ext.experiment.experiment import Experiment, Subject
from metricopt_ext.experiment.method import Baseline, Method
from metricopt_ext.experiment.siblings import SiblingsConfig, plot_histories, training
from metricopt_ext.experiment.usual_methods import asked_for, planned
from metricopt_ext.experiment.whole_network import LabelParts, held_third
from metricopt_ext.methods.soups import Training
from metricopt_ext.methods.starts import cost_offsets, em_prior_start, moved_by
from metricopt_ext.runtime.progress import Callback
from metricopt_ext.siblings.block_batches import BlockBatches
from metricopt_ext.siblings.training import TrainingTask
from metricopt_ext.tasks.batches import Batches, TensorBatches
from metricopt_ext.tasks.inputs import logits_of, refuse_probabilities
from metricopt_ext.tasks.metric import Metric
from metricopt_ext.tasks.settings import Settings
from metricopt_ext.tasks.task import FinetuneTask
from metricopt_ext.utils.config import config_section
from metricopt_ext.utils.device import choose_device
from metricopt_ext.utils.modes import evaluating
from metricopt_ext.utils.seeding import generator
from metricopt_ext.utils.words import shortened

PRIORS = {"prior": 1.0, "prior_twice": 2.0}  # strengths of logit adjustment that a search may begin from
ROUNDING = 1e-9  # adjustments below it are none
LOOKED_AT = 8  # examples whose outputs are looked at, whether they are logits
SIBLING_BATCH = 100  # examples in a batch of a sibling method, an equal share of each class
MOST_STRENGTHS = 101  # candidates for the strength of logit adjustment


class ClassificationExperiment(Experiment[ClassificationConfig]):
    """A trained classifier, and the splits that it was trained on and is judged by.

    Attributes:
        splits: The data.
        target: What is predicted.
        values: Those of the column that ``metric.by`` names, in order.
    """

    config_type = ClassificationConfig
    splits: Splits
    target: Target
    values: npt.NDArray[Any]

    @classmethod
    def describe(cls, config: ClassificationConfig) -> Subject:
        """Return what a run is about."""
        metric, data = build_metric(config.metric, config.data.kind), config.data.name
        besides(config.metric, config.data.kind)  # refuses what is no metric
        if config.loss:
            named_loss(config, Target("classes", 2))  # refuses what is no loss
        config.check_settings(("flip", "crops", "temperature"))
        shown = data if config.data.imbalance == 1 else f"long-tailed {data}"
        shown = shown if config.shift.kind == "none" else f"shifted {shown}"
        arguments = [f"{name}={value}" for name, value in getattr(config.metric, "kwargs", {}).items()]
        title = f"{config.model.name} on {shown}"
        return Subject(
            f"classification/{data}", title, metric.name, metric.maximize, ", ".join([metric.description, *arguments])
        )

    def prepare(self) -> tuple[FinetuneTask, Metric]:
        """Load the data, train the classifier or load it from the folder, and return the task and the test metric."""
        config, seed, device = self.config, self.seed, choose_device(self.config.device)
        self.splits = splits = load_splits(config, seed).to(device)
        self.reading = splits.reading
        self.target = target = Target(config.data.kind, splits.num_classes)
        by = config.metric.by
        self.values = values_of(splits, by) if by else NO_VALUES
        metric = self._metric
        if self.reading is not None and by:
            self.reading = with_sizes(self.reading, metric, splits)
        if self.reading is not None and seed == config.seed:
            for line in self.reading.lines():
                self.callback.say(line)
        for name in PARTS:
            check_part(getattr(splits, name), target, name)
        also, subject_to = besides(config.metric, target.kind, splits.class_names), config.metric.subject_to
        if target.kind == "classes":
            line = check_classes([config.metric.name, *also], splits.class_names, config.data.positive)
            if line and seed == config.seed:
                self.callback.say(line)
        for name in PARTS[1:]:
            part = getattr(splits, name)
            try_metric(config.metric, part, target, also, metric)
            if by:
                check_groups(metric, part, name)
        self._batches(splits.train)  # refuses a size before anything is trained, as do the siblings'
        if config.trained_methods:
            self._sibling_batches()
        if isinstance(config.loss, OwnLossConfig):
            try_loss(config, untrained(config, splits, seed), splits.train)
        if ":" in config.model.name:  # the tools' own networks return logits
            with evaluating(untrained(config, splits, seed)) as model:
                refuse_probabilities(logits_of(predict(model, taken(splits.train.x, slice(LOOKED_AT)))))
        model = classifier(config, splits, seed, self.folder, self.callback)
        adapter = attach(model, config, seed, splits.train.x)
        task = FinetuneTask(
            adapter,
            loss=named_loss(config, target),
            batches=self._batches(splits.train),
            metric=model_metric(
                metric,
                splits.validation,
                metric_halves(splits.validation, metric, seed),
                also=also,
                subject_to=subject_to,
            ),
            population=config.population,
            batches_of=self._batches_of_outcomes(metric),
        )
        for name in config.trained_methods:
            self._siblings.build(name).check(self._training(task))
        return task, model_metric(metric, splits.test, also=also)

    @classmethod
    def plot_seeds(cls, folder: Path, seeds: Sequence[int]) -> list[Path]:
        """Draw what the sibling methods measured on the way, if any ran."""
        return plot_histories(folder, seeds)

    def rare(self) -> Rare | None:
        """Return the classes of which validation has few examples, or else such values of a metric's column.

        The groups by ``metric.by`` come first.
        """
        part, several = self.splits.validation, self.target.kind == "multilabel"
        if self.config.metric.by and (found := rare_judged(self._metric, part)):
            return found
        counts = part.y.sum(0) if several else torch.bincount(part.y, minlength=self.splits.num_classes)
        named = dict(zip(self.splits.class_names, counts.tolist(), strict=True))
        found = rare_groups("label" if several else "class", named)
        for name in groups_of(part, self._metric):
            values, sizes = np.unique(part.columns[name], return_counts=True)
            found = found or rare_groups(f"{name} value", dict(zip(map(str, values), sizes.tolist(), strict=True)))
        return found

    def validation(self) -> tuple[Sequence[Tensor], Batches]:
        """Return the validation inputs in parts, and labelled batches of them."""
        part = self.splits.validation
        return large_parts(part.x), self._batches(part)

    def methods(self, resume: bool = False, callback: Callback | None = None) -> dict[str, Method]:
        """Return the usual methods, what adds constants to the logits, and any others that the settings select."""
        config, x = self.config, self.splits.validation.x
        methods, baselines = super().methods(resume, callback), self.baselines(config, self)
        budgets = config.rows_on_logits
        if self.target.kind == "classes":
            counts = torch.bincount(self.splits.train.y, minlength=self.splits.num_classes)
            if counts.min() > 0:
                methods["logit_adjustment"] = planned(ending_at(lambda task: adjust_logits(task, x, counts)))
            else:  # a class that training lacks has no prior
                del budgets["logit_adjustment_tuned"]
        tuned = {name: planned(baselines[name], queries, self.seed) for name, queries in budgets.items()}
        methods |= asked_for(config, tuned)
        for name in config.trained_methods:
            sibling = training(
                name,
                self._siblings.build(name),
                self._training,
                self._with_threshold,
                folder=self.folder,
                resume=resume,
                callback=callback,
            )
            methods[name] = planned(sibling, 0, self.seed)
        return methods

    @classmethod
    def baselines(cls, config: Any, subject: Experiment[Any] | None = None) -> dict[str, Baseline]:
        """Return the usual baselines, a tuned threshold, class offsets, and logits adjusted by a tuned strength."""

        def threshold(task: FinetuneTask, start: Tensor, queries: int, seed: int) -> nn.Module | None:
            assert isinstance(subject, ClassificationExperiment)
            return tune_threshold(task, subject.splits.validation.x, queries, start=start)

        def class_offsets(task: FinetuneTask, start: Tensor, queries: int, seed: int) -> nn.Module | None:
            assert isinstance(subject, ClassificationExperiment)
            return tune_offsets(task, subject.splits.validation.x, budget=queries, start=start)

        def raised(task: FinetuneTask, start: Tensor | None, queries: int, seed: int) -> nn.Module | None:
            assert isinstance(subject, ClassificationExperiment)
            splits = subject.splits
            return raise_worst(task, splits.validation.x, splits.class_names, queries, start=start)

        def adjusted(task: FinetuneTask, start: Tensor, queries: int, seed: int) -> nn.Module:
            assert isinstance(subject, ClassificationExperiment)
            splits = subject.splits
            counts, evals = splits.train.y.bincount(minlength=splits.num_classes), min(queries, MOST_STRENGTHS)
            return tune_adjustment(task, splits.validation.x, counts, evals=evals)  # from the trained model itself

        more = {
            "threshold": threshold,
            "class_offsets": class_offsets,
            "raise_worst": raised,
            "raise_worst_trained": lambda task, start, queries, seed: raised(task, None, queries, seed),
            "logit_adjustment_tuned": adjusted,
        }
        if config.data.kind == "multilabel":
            more = {"label_thresholds": class_offsets}
        baselines = {name: at_each_budget(run, least=lambda dim: 2) for name, run in more.items()}
        return {**super().baselines(config, subject), **baselines}

    def start(self, name: str) -> Start | StartLine | None:
        """Return one of `run_config.STARTS`, or None if it does not apply; see `Experiment.start`."""
        adapter, train = self.task.adapter, self.splits.train
        if name == "soup_prior":
            prior = self.start("prior")
            soup = None if prior is None else self.start("soup")
            if isinstance(prior, Start) and isinstance(soup, Start):
                return replace(soup, phi=prior.phi)
            return None
        if name in PRIORS:
            adjustment = prior_adjustment(adapter, self.target, train.y)
            if adjustment is None or float(adjustment.abs().max()) < ROUNDING:
                return None  # of classes that are as frequent as each other it is the model as it was trained
            return Start(moved_by(adapter, PRIORS[name] * adjustment))
        if name == "prior_line":
            return target_line(adapter, self.target, train.y)
        if name == "em_prior":
            counts = train.y.bincount(minlength=self.target.count) if self.target.kind == "classes" else torch.zeros(1)
            known = adapter.outputs is not None and bool((counts > 0).all())
            return em_prior_start(self.task, self.validation()[0], counts) if known else None
        if name == "costs":
            costs = torch.tensor(self.config.metric.costs)
            if adapter.outputs is None or not len(costs):
                return None
            offsets = cost_offsets(costs, one_logit=len(adapter.phi[adapter.offsets]) == 1)
            return None if offsets is None else Start(moved_by(adapter, offsets))
        if name != "thresholds":
            return super().start(name)
        shares = self.target.shares(train.y)
        if adapter.outputs is None or not len(shares):
            return None
        offsets = matching_offsets(scores_at(adapter, self.task.origin(), train.x), shares)
        return Start(moved_by(adapter, offsets))

    def training(self) -> Training:
        """Return how the classifier was trained; images are jittered."""
        settings, part = self.config.model, self.splits.train
        images = part.x.dim() == 4

        def batches(balanced: bool) -> TensorBatches:
            return TensorBatches(part.x, part.y, min(settings.batch_size, len(part)), balanced=balanced)

        loss = named_loss(self.config, self.target)

        def trained(model: nn.Module, batches: Batches, **options: Any) -> None:
            train_supervised(model, loss, batches, augment=settings.augment and images, **options)

        return Training(
            steps_of(settings, part),
            settings.lr,
            batches=batches(settings.balanced),
            rebalanced=batches(not settings.balanced),
            augment=jitter if images else None,
            train=trained,
        )

    def label_parts(self) -> LabelParts:
        """Return batches of two thirds of each class, the metric on the other third, and batches of all."""
        part = self.splits.validation
        held = held_third(strata(part, self._metric), self.seed)
        held = held.to(part.y.device)
        fit, judged = part.take((~held).nonzero().flatten()), part.take(held.nonzero().flatten())
        return LabelParts(self._batches(fit), model_metric(self._metric, judged), self._batches(part))

    @property
    def _metric(self) -> MetricSpec:
        return build_metric(self.config.metric, self.config.data.kind, self.splits.class_names, self.values)

    def test_error(self, before: Start, after: Start) -> float | None:
        """Return the standard error of the test metric's difference between two starts.

        Both are judged on the same examples, resampled within classes, where the metric is defined on them.
        """
        part, spec = self.splits.test, self._metric
        first, second = (self._scores(each) for each in (before, after))
        kind = strata(part, spec)
        alike = [(kind == each).nonzero().flatten() for each in kind.unique()]

        def difference(rows: Tensor) -> float:
            try:
                return value_of(spec, second, part, rows) - value_of(spec, first, part, rows)
            except Exception:  # whatever one's own metric raises where a label is missing
                return math.nan

        error = error_of(difference, within_groups(alike, generator(self.seed, "test_error")))
        return None if math.isnan(error) else error

    def _scores(self, start: Start) -> Tensor:
        """Return what a start's model computes for the test examples."""
        with self.task.adapter.applied(start):
            return scores_at(self.task.adapter, start.phi, self.splits.test.x)

    def own_settings(self) -> Settings:
        """Return the classifier's settings: views of its images, and a temperature if it is named."""
        names = self.config.named_settings
        with config_section("settings.names"):
            settings = classification_settings(
                self.task.adapter.model,
                images=self.splits.validation.x.dim() == 4,
                temperature="temperature" in names,
            )
            return settings.only(names) if names else settings

    def finish(self) -> None:
        """Write the tuned classifier, and draw some test images, with their classes before and after."""
        super().finish()
        part, adapter = self.splits.test, self.task.adapter
        if part.x.dim() == 4 and self.target.kind == "classes":
            with self.as_trained():
                before = self.target.decide(scores_at(adapter, self.task.origin(), part.x))
            after = self.target.decide(scores_at(adapter, adapter.phi.detach(), part.x))
            plot_examples(part, before, after, self.splits.class_names, self.folder / "examples.png", self.seed)

    @property
    def _siblings(self) -> SiblingsConfig:
        """The settings of the sibling methods."""
        return self.config.siblings or SiblingsConfig()

    def _training(self, task: FinetuneTask) -> TrainingTask:
        """Return the task of the sibling methods, on what the settings let them train."""
        config, splits = self._siblings, self.splits
        made = TrainingTask.of(
            task,
            trains="phi" if config.trains == "phi" else "model",
            predict=lambda model, batch: (model(batch[0]), batch[1]),
            batch_metric=batch_metric(self._metric),
            batches=self._sibling_batches(),
            validation=self._batches(splits.validation),
            build=lambda seed: untrained(self.config, splits, seed),
        )
        return made.untrained(self.seed) if config.trains == "scratch" else made

    def _sibling_batches(self) -> BlockBatches:
        part = self.splits.train
        with config_section("siblings"):
            return BlockBatches(part.x, part.y, SIBLING_BATCH, balanced=True)

    def _with_threshold(self, task: FinetuneTask, model: nn.Module) -> nn.Module | None:
        """Return a trained model with the threshold that is best for the task's metric, if there is one to tune."""
        evals = self._siblings.threshold_evals
        return threshold_of(model, task.metric, self.splits.validation.x, evals) if evals else None

    def _batches_of_outcomes(self, metric: MetricSpec) -> dict[str, RowBatches] | None:
        """Return the train batches of each class or group that the metric is made of; None if it is made of none."""
        if metric.outcomes is None:
            return None
        config, splits = self.config, self.splits
        found = batches_of_outcomes(metric, splits, config.batch_size)
        if lacking := [name for name, batches in found.items() if not len(batches.rows)]:
            self.callback.say(
                f"train has no examples of {shortened(lacking)}, so no loss promises which way"
                f" {'it goes' if len(lacking) == 1 else 'they go'}"
            )
            found = {name: batches for name, batches in found.items() if name not in lacking}
        if isinstance(config.loss, OwnLossConfig):  # it may need several classes in a batch
            model = untrained(config, splits, self.seed)
            try:
                for batches in found.values():
                    try_loss(config, model, splits.train.take(batches.rows))
            except ConfigError as error:
                self.callback.say(f"the loss promises nothing of single classes or groups: {error}")
                return None
        return found

    def _batches(self, part: Split) -> TensorBatches:
        return TensorBatches(part.x, part.y, self.config.batch_size, balanced=self.config.balanced)
