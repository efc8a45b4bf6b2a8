"""One seed of a detection run: train a detector, finetune it for its metric, and run the baselines."""

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from metricopt_ext.adapters.start import Start
from metricopt_ext.data.halves import random_halves
from metricopt_ext.data.rare import Rare
from metricopt_ext.data.reading import Reading
from metricopt_ext.detection.build import (
    attach,
    besides,
    build_metric,
    build_toolkit,
    detector,
    remembering,
    with_outputs_of,
)
from metricopt_ext.detection.config import SETTINGS, DetectionConfig
from metricopt_ext.detection.data import DetectionSplits, load_splits
from metricopt_ext.detection.metric import (
    PRECISIONS,
    ValueOn,
    detect_all,
    detector_metric,
    in_batches,
    rare_images,
    truth_of,
)
from metricopt_ext.detection.pictures import plot_detections
from metricopt_ext.detection.task import ExampleBatches, InputsOnDisk, detection_loss, jittered
from metricopt_ext.detection.toolkit import Toolkit, told_inference
from metricopt_ext.detection.train import train_detector
from metricopt_ext.experiment.bootstrap import error_of, within_groups
from metricopt_ext.experiment.experiment import Experiment, Subject
from metricopt_ext.methods.soups import Training
from metricopt_ext.tasks.batches import Batches
from metricopt_ext.tasks.metric import Metric
from metricopt_ext.tasks.settings import Settings
from metricopt_ext.tasks.task import FinetuneTask
from metricopt_ext.utils.kept_outputs import KeptOutputs
from metricopt_ext.utils.seeding import generator

SHOWN = 6
WARMUP = 5  # steps of a short finetune, whose model is trained already


class DetectionExperiment(Experiment[DetectionConfig]):
    """A trained detector; the tuned one is written to the seed's folder as ``tuned.pth``, an ordinary checkpoint."""

    config_type = DetectionConfig
    tuned_file = "tuned.pth"
    splits: DetectionSplits
    toolkit: Toolkit
    used: Toolkit  # the same, or one that remembers what phi can't change

    @classmethod
    def describe(cls, config: DetectionConfig) -> Subject:
        """Return what a run is about."""
        metric = build_metric(config.metric)
        besides(config.metric)  # refuses what is no metric
        build_toolkit(config)
        at_a_point = config.metric.name not in PRECISIONS
        of_classes = [name for name in config.named_settings if at_a_point and name.startswith("score_thresh[")]
        config.check_settings((*SETTINGS, *of_classes))
        model = Path(config.model.config_file).stem if config.toolkit == "detectron2" else config.model.name
        model = model if ":" in model else Path(model).stem
        data = config.data.name if config.shift is None or config.shift.is_none else f"shifted {config.data.name}"
        title = f"{model} on {data}" if ":" in model else f"{config.toolkit}'s {model} on {data}"
        return Subject(f"detection/{config.data.name}", title, metric.name, metric.maximize, metric.description)

    def prepare(self) -> tuple[FinetuneTask, Metric]:
        """Load the data, train the detector or load it from the folder, and return the task and the test metric."""
        config, seed, folder = self.config, self.seed, self.folder
        self.toolkit, metric = build_toolkit(config), build_metric(config.metric)
        self.splits = splits = load_splits(config, seed, folder)
        kept = folder / "model.safetensors"
        weights = str(kept) if kept.exists() else config.model.weights
        self.toolkit = with_outputs_of(self.toolkit, config, splits.classes, splits.category_ids, weights)
        if splits.found:
            self.reading = Reading("; ".join(splits.found))
            for line in self.reading.lines() if seed == config.seed else ():
                self.callback.say(line)
        metric.try_on(truth_of(splits.validation, splits.classes))
        also = besides(config.metric, splits.classes)
        for each, part in product(also.values(), (splits.validation, splits.test)):
            each.try_on(truth_of(part, splits.classes))
        model = detector(config, self.toolkit, splits, seed, folder, self.callback)
        if seed == config.seed and (told := told_inference(self.toolkit.inference(model))):
            self.callback.say(f"objects are found {told}")
        adapter = attach(self.toolkit, model, config.adapter, seed)
        self.used, classes = remembering(self.toolkit, adapter, config.adapter), splits.classes
        halves = random_halves(len(splits.validation), seed)
        task = FinetuneTask(
            adapter,
            loss=detection_loss(self.used),
            batches=ExampleBatches(splits.train, config.batch_size),
            metric=detector_metric(
                metric,
                self.used,
                splits.validation,
                classes,
                halves,
                also=also,
                subject_to=config.metric.subject_to,
            ),
            population=1,
        )
        return task, detector_metric(metric, self.used, splits.test, classes, (), also=also)

    def own_settings(self) -> Settings:
        """Return the detector's settings; what it computes before thresholds and NMS is kept, if boxes are judged."""
        model, names, kept = self.task.adapter.model, self.config.named_settings or None, KeptOutputs()
        average_precision = self.config.metric.name in PRECISIONS
        classes = self.splits.classes if names and not average_precision else ()
        if self.config.toolkit == "detectron2":
            from metricopt_ext.detection.detectron2.settings import detectron2_settings

            toolkit: Any = self.toolkit
            return detectron2_settings(
                toolkit,
                model,
                names=names,
                average_precision=average_precision,
                kept=kept,
                class_thresholds={name: label for label, name in enumerate(classes)},
            )
        from metricopt_ext.detection.settings import detection_settings

        labels = getattr(self.toolkit, "labels", ()) or range(1, len(self.splits.classes) + 1)
        return detection_settings(
            model,
            names=names,
            average_precision=average_precision,
            kept=kept if self.config.kind == "bbox" else None,
            boxes_only=self.config.kind == "bbox",
            class_thresholds=dict(zip(classes, labels, strict=False)),
        )

    def rare(self) -> Rare | None:
        """Return the types of images, by what is in them, of which validation has few."""
        return rare_images(truth_of(self.splits.validation, self.splits.classes))

    def validation(self) -> tuple[Sequence[Any], Batches]:
        """Return the validation images as the detector takes them, and labelled batches of them."""
        part = self.splits.validation
        inputs: Sequence[Any] = InputsOnDisk(
            in_batches(part), lambda batch: self.toolkit.inputs(self.task.adapter.model, batch)
        )
        if not self.config.data.stream:
            inputs = list(inputs)
        return inputs, ExampleBatches(part, self.config.batch_size)

    def training(self) -> Training:
        """Return how the detector was trained."""
        settings, toolkit = self.config.model, self.toolkit

        def trained(model: nn.Module, batches: Batches, **options: Any) -> None:
            train_detector(toolkit, model, batches, warmup=min(WARMUP, options["steps"] // 4), **options)

        batches = ExampleBatches(self.splits.train, settings.batch_size)
        return Training(max(1, settings.steps), settings.lr, batches=batches, augment=jittered, train=trained)

    def test_error(self, before: Start, after: Start) -> float:
        """Return the standard error of the test metric's difference between two starts.

        Both are judged on the same images, resampled within those that have an object and those that have none.
        """
        splits, metric = self.splits, build_metric(self.config.metric)
        truth = truth_of(splits.test, splits.classes)

        def judged(start: Start) -> ValueOn:
            with self.task.adapter.applied(start) as model:
                return metric.judge(detect_all(self.used, model, splits.test), truth)

        first, second = map(judged, (before, after))

        def difference(images: Tensor) -> float:
            rows = images.tolist()
            return second(rows) - first(rows)

        full = torch.from_numpy(metric.with_objects(truth))
        groups = [rows.nonzero().flatten() for rows in (full, ~full) if rows.any()]
        return error_of(difference, within_groups(groups, generator(self.seed, "test_error")))

    def finish(self) -> None:
        """Export the tuned detector, and draw detections before and after."""
        adapter, toolkit, splits = self.task.adapter, self.toolkit, self.splits
        toolkit.export(adapter.model, self.folder / "tuned.pth")
        order = torch.randperm(len(splits.test), generator=generator(self.seed, "pictures"))
        shown = [splits.test[i] for i in order[:SHOWN].tolist()]
        with self.as_trained(), adapter.using(self.task.origin()) as model:
            before = detect_all(toolkit, model, shown)
        with adapter.using(adapter.phi.detach()) as model:
            after = detect_all(toolkit, model, shown)
        plot_detections(shown, before, after, splits.classes, self.folder / "detections.png")
