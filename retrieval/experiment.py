"""One seed of a retrieval run: train an embedder, finetune it for its metric, and run the baselines."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from metricopt_ext.adapters.start import Start, StartLine
from metricopt_ext.data.halves import class_draws
from metricopt_ext.data.parts import large_parts
from metricopt_ext.data.rare import Rare, rare_groups
from metricopt_ext.data.splits import PARTS, Splits
from metricopt_ext.data.training import train_supervised
from metricopt_ext.data.variation import jitter
from metricopt_ext.errors import AdapterError
from metricopt_ext.experiment.bootstrap import error_of, jackknife_error, of_groups
from metricopt_ext.experiment.experiment import Experiment, Subject
from metricopt_ext.experiment.method import Method
from metricopt_ext.experiment.siblings import EmbedderSiblingsConfig, plot_histories, training
from metricopt_ext.experiment.usual_methods import planned
from metricopt_ext.experiment.whole_network import FEWEST_CLASSES, LabelParts, held_third
from metricopt_ext.methods.folder import ADAPTER, CARD
from metricopt_ext.methods.soups import Training
from metricopt_ext.retrieval.build import attach, class_batches, embedder, steps_of, untrained
from metricopt_ext.retrieval.config import RetrievalConfig
from metricopt_ext.retrieval.data import queries_of
from metricopt_ext.retrieval.few_classes import FewClasses
from metricopt_ext.retrieval.judged import Processing
from metricopt_ext.retrieval.merge_whitening import whitened_layer
from metricopt_ext.retrieval.metrics import besides, check_ks, check_searched, embedding_metric, try_metric
from metricopt_ext.retrieval.named_loss import build_loss
from metricopt_ext.retrieval.named_metric import batch_metric, build_metric, embed_with
from metricopt_ext.retrieval.pictures import plot_neighbours, plot_recalls, save_recalls
from metricopt_ext.retrieval.recall import hits_at_k
from metricopt_ext.retrieval.settings import RetrievalSettings, retrieval_settings
from metricopt_ext.retrieval.splits import load_splits
from metricopt_ext.runtime.progress import Callback
from metricopt_ext.siblings.training import TrainingTask
from metricopt_ext.tasks.batches import Batches
from metricopt_ext.tasks.inference_file import INFERENCE, load_inference, save_inference
from metricopt_ext.tasks.metric import Metric
from metricopt_ext.tasks.settings import Settings, Values
from metricopt_ext.tasks.task import FinetuneTask
from metricopt_ext.utils.config import config_section
from metricopt_ext.utils.device import choose_device
from metricopt_ext.utils.files import write_atomically, write_json
from metricopt_ext.utils.modes import evaluating
from metricopt_ext.utils.seeding import generator
from metricopt_ext.utils.words import counted

STATISTICS_BATCH = 256  # images that BatchNorm's statistics are taken of at once
LEFT_OUT = 20  # groups of test classes that are left out in turn
# Whitenings that a search begins with, by their start's name. The best powers, or next to them, on six grounds; that
# within classes sees the labels that the metric is judged on, so what validation says of it is optimistic.
WHITENINGS: dict[str, Values] = {
    "whitening": {"whitening": 0.5},
    "lda_whitening": {"whitening": 0.75, "covariance": "within"},
}
FEWEST = 3  # classes: with one of two left out, every image has the other's label


class RetrievalExperiment(Experiment[RetrievalConfig]):
    """A trained embedder: its loss sees the train classes, its metric the validation classes."""

    config_type = RetrievalConfig
    splits: Splits
    _deployed: Start | None = None  # what was kept, its whitening merged where it can be

    @classmethod
    def describe(cls, config: RetrievalConfig) -> Subject:
        """Return what a run is about."""
        metric = embedding_metric(config.metric)
        besides(config.metric)  # refuses what is no metric
        build_loss(config.loss)
        config.check_settings(("whitening", "augmentation"))
        data = config.data.name
        shown = data if config.shift.kind == "none" else f"shifted {data}"
        title = f"{config.model.name} on {shown}"
        return Subject(f"retrieval/{data}", title, metric.name, metric.maximize, metric.description)

    @classmethod
    def plot_seeds(cls, folder: Path, seeds: Sequence[int]) -> list[Path]:
        """Draw Recall@k for many k, before and after, over all seeds, and what the sibling methods measured."""
        recalls = plot_recalls([folder / f"seed-{seed}" / "recalls.json" for seed in seeds], folder / "recalls.png")
        return [recalls, *plot_histories(folder, seeds)]

    def prepare(self) -> tuple[FinetuneTask, Metric]:
        """Load the data, train the embedder or load it from the folder, and return the task and the test metric."""
        config, seed, device = self.config, self.seed, choose_device(self.config.device)
        self.splits = load_splits(config, seed).to(device)
        self.reading = self.splits.reading
        if self.reading is not None and seed == config.seed:
            for line in self.reading.lines():
                self.callback.say(line)
        self.validation()  # too few pairs for a batch are found here rather than after training
        try_metric(config.metric, self.splits.validation.y, config.model.embedding)
        queries = queries_of(self.splits)
        others = len(self.splits.test) - 1 if queries is None else int((~queries).sum())
        for name, count in (("validation data", len(self.splits.validation) - 1), ("test data", others)):
            check_searched(config.metric, name, count)
        test = build_metric(config.metric, self.splits.test, queries=queries, constrained=False)
        validation, batches = self.splits.validation, class_batches(self.splits.train, config.loss)
        model = embedder(config, self.splits, seed, self.folder, self.callback)
        self._loss = build_loss(config.loss)
        task = FinetuneTask(
            attach(model, config, seed),
            loss=self._loss,
            batches=batches,
            metric=build_metric(
                config.metric,
                validation,
                class_draws(validation.y, seed),
                new_classes=True,
                keep_gib=config.adapter.keep_gib,
            ),
            population=config.population,
        )
        for name in config.trained_methods:
            self._siblings.build(name).check(self._training(task))
        classes = self.splits.classes_of("validation")
        if seed == config.seed:
            self.callback.say(f"validation has {counted(len(classes), 'class')}; test has other classes")
        told = FewClasses(task.metric, lambda: len(classes), self.callback.say, config.guard.confidence)
        task.metric.callbacks.append(told)
        return task, test

    def own_settings(self) -> Settings:
        """Return retrieval's settings, those that are named or else all; no whitening where images are too few."""
        names, settings = self.config.named_settings, self._judged_settings
        if not names and not self._whitens:
            others = [name for name in settings.names if name not in ("whitening", "covariance")]
            return settings.only(others) if others else settings.limited(queries=0)
        with config_section("settings.names"):
            return settings.only(names) if names else settings

    @cached_property
    def in_force(self) -> Settings | None:
        """The settings, none of which is tuned, for a start that whitens; None without any, or of too few images."""
        named = WHITENINGS.keys() & {*self.config.starts}
        return self._judged_settings.limited(queries=0) if named and self._whitens else None

    @cached_property
    def _judged_settings(self) -> RetrievalSettings:
        """Retrieval's settings; a whitening is fitted on the validation images, as BatchNorm is on them."""
        with config_section("settings.names"):
            labelled = [(part.x, part.y) for part in (self.splits.train, self.splits.validation)]
            return retrieval_settings(self.task.metric, self.test_metric, whiten_on=self.task.metric, labelled=labelled)

    @cached_property
    def _whitens(self) -> bool:
        x = self.splits.validation.x
        width = embed_with(self.task.adapter, self.task.origin(), x[:2]).shape[1]
        if len(x) <= width and self.seed == self.config.seed:
            self.callback.say(f"no whitening, as {len(x)} validation images are too few for {width} dimensions")
        return len(x) > width

    def rare(self) -> Rare | None:
        """Return the groups of queries, the classes, of which validation has few examples."""
        labels, counts = self.splits.validation.y.unique(return_counts=True)
        names = [self.splits.class_names[label] for label in labels.tolist()]
        return rare_groups("query group", dict(zip(names, counts.tolist(), strict=True)))

    def validation(self) -> tuple[Sequence[Tensor], Batches]:
        """Return the validation images in parts, and labelled batches of them."""
        part = self.splits.validation
        return large_parts(part.x, STATISTICS_BATCH), class_batches(part, self.config.loss)

    def start(self, name: str) -> Start | StartLine | None:
        """Return a start by name, or None if it does not apply; see `Experiment.start`."""
        if name in WHITENINGS:
            if self.task.settings is None or not self._whitens:
                return None
            return Start(self.task.origin(), settings=WHITENINGS[name], presumed=True)
        return super().start(name)

    def starts(self) -> dict[str, Start | StartLine]:
        """Return what the settings name; where a whitening is among them, the others have it too, and are named so."""
        found = super().starts()
        for name in found.keys() & WHITENINGS.keys():  # one at most
            whitening = found.pop(name)
            return {name: whitening, **{f"{name}+{other}": _with(WHITENINGS[name], s) for other, s in found.items()}}
        return found

    def methods(self, resume: bool = False, callback: Callback | None = None) -> dict[str, Method]:
        """Return the usual methods, and the sibling methods that the settings select."""
        config, methods = self.config, super().methods(resume, callback)
        for name in config.trained_methods:
            sibling = training(
                name, self._siblings.build(name), self._training, folder=self.folder, resume=resume, callback=callback
            )
            methods[name] = planned(sibling, 0, self.seed)
        return methods

    def training(self) -> Training:
        """Return how the embedder was trained; batches have all classes in equal shares, however it is."""
        settings, part = self.config.model, self.splits.train
        batches, loss = class_batches(part, self.config.loss), self._loss

        def trained(model: nn.Module, batches: Batches, **options: Any) -> None:
            train_supervised(model, loss, batches, augment=settings.augment, **options)

        return Training(
            steps_of(self.config, part, batches), settings.lr, batches=batches, augment=jitter, train=trained
        )

    def label_parts(self) -> LabelParts:
        """Return batches of two thirds of the classes, the metric on the others, and batches of all.

        Of few classes, images of each are held out in place of whole ones.
        """
        part, loss = self.splits.validation, self.config.loss
        classes, places = part.y.cpu().unique(return_inverse=True)
        held = held_third(torch.zeros(len(classes)), self.seed)[places]
        if len(classes) < FEWEST_CLASSES:
            held = held_third(places, self.seed)
        fit, judged = (part.take(each.nonzero().flatten().to(part.y.device)) for each in (~held, held))
        metric = build_metric(self.config.metric, judged, constrained=False)
        return LabelParts(class_batches(fit, loss), metric, class_batches(part, loss))

    def test_error(self, before: Start, after: Start) -> float | None:
        """Return the standard error of the test metric's difference between two starts, None for too few classes.

        In both all test images are searched, or the gallery. Images of a class depend on each other, so whole classes
        are drawn, of queries for Recall@k, which is a mean over them, or left out in turn, for other metrics.
        """
        labels, rng, embedded = self.splits.test.y.cpu(), generator(self.seed, "test_error"), []
        for each in (before, after):
            with self.task.adapter.applied(each) as model, evaluating(model):
                raw = embed_with(self.task.adapter, each.phi, self.splits.test.x)
                embedded.append(self._processing(each.settings).alone(raw))
        if self.config.metric.name == "recall":
            ks, queries = check_ks(self.config.metric), queries_of(self.splits)
            return recall_error(embedded[0], embedded[1], labels, ks, rng, queries)
        queries = queries_of(self.splits)
        metric, classes = embedding_metric(self.config.metric), labels.unique()
        if len(classes) < FEWEST:
            return None

        def change(rows: Tensor) -> float:
            those = None if queries is None else queries[rows]
            old, new = (metric.judge(embeddings[rows], labels[rows], those) for embeddings in embedded)
            return new - old

        parts = classes[torch.randperm(len(classes), generator=rng)].chunk(LEFT_OUT)
        return jackknife_error(change, [torch.isin(labels, part).nonzero().flatten() for part in parts])

    def _processing(self, values: Values) -> Processing:
        """Return what is done to embeddings that the model as it stands gives, unscaled, with settings of inference."""
        settings = self.task.settings
        if isinstance(settings, RetrievalSettings):
            return settings.processing(self.task.adapter.model, values)
        return Processing(unscaled=True)

    def save_tuned(self) -> None:
        """Write the tuned embedder; a whitening is merged into its last linear layer, or else stays a setting."""
        if self._deployed is None:
            self._deployed = self._merged()
        self.task.adapter.apply(self._deployed)
        super().save_tuned()

    def _merged(self) -> Start:
        """Return what was kept, its whitening merged; then the adapter, settings and card on file say so, too."""
        adapter, file = self.task.adapter, self.folder / INFERENCE
        start, settings, values = adapter.as_start(), self.task.settings, load_inference(file) if file.exists() else {}
        if not isinstance(settings, RetrievalSettings) or not values.get("whitening"):
            return start
        try:
            layer = whitened_layer(adapter, self._processing(values), self.splits.validation.x[:2])
        except AdapterError as error:
            self.callback.say(f"the whitening is not merged, but in {INFERENCE}: {error}")
            return start
        start = replace(start, tensors={**start.tensors, **layer})
        adapter.apply(start)
        (self.folder / ADAPTER).unlink()  # which says that the run has finished: never with both
        own = settings.defaults
        others = {name: own[name] if name in ("whitening", "covariance") else each for name, each in values.items()}
        save_inference(file, settings, others)
        merged = "The whitening is merged into the tensors of the adapter, and so no setting any more.\n"
        write_atomically(self.folder / CARD, (self.folder / CARD).read_bytes() + b"\n" + merged.encode())
        adapter.save(self.folder / ADAPTER)
        return start

    def finish(self) -> None:
        """Write the tuned embedder, the classes of each part and the recalls of the curves, and draw neighbours."""
        super().finish()
        write_json(self.folder / "classes.json", {part: self.splits.classes_of(part) for part in PARTS})
        test, adapter = self.splits.test, self.task.adapter
        with self.as_trained():
            before = Processing(unscaled=True).alone(embed_with(adapter, self.task.origin(), test.x))
        queries, file = queries_of(self.splits), self.folder / INFERENCE
        processing = self._processing(load_inference(file) if file.exists() else {})
        after, augmentation = processing.searched(embed_with(adapter, adapter.phi.detach(), test.x), queries)
        found = {"pretrained": (before, 0), "metricopt": (after, augmentation)}
        plot_neighbours(test, before, after, self.folder / "neighbours.png", self.seed, queries, augmentation)
        save_recalls(test.y, found, self.folder / "recalls.json", queries)

    @property
    def _siblings(self) -> EmbedderSiblingsConfig:
        assert self.config.siblings is not None  # the methods that read it bring it
        return self.config.siblings

    def _training(self, task: FinetuneTask) -> TrainingTask:
        """Return the task of the sibling methods, on what the settings let them train."""
        config, splits = self.config, self.splits
        made = TrainingTask.of(
            task,
            trains="phi" if self._siblings.trains == "phi" else "model",
            predict=lambda model, batch: (model(batch[0]), batch[1]),
            batch_metric=batch_metric(config.metric),
            validation=class_batches(splits.validation, config.loss),
            build=lambda seed: untrained(config, splits, seed),
        )
        return made.untrained(self.seed) if self._siblings.trains == "scratch" else made


def _with(settings: Values, start: Start | StartLine) -> Start | StartLine:
    """Return a start, or a line of them, with settings of inference."""
    if isinstance(start, StartLine):
        return StartLine(lambda t: replace(start.at(t), settings=settings), start.low, start.high, start.first)
    return replace(start, settings=settings)


def recall_error(
    before: Tensor,
    after: Tensor,
    labels: Tensor,
    ks: Sequence[int],
    rng: torch.Generator,
    queries: Tensor | None = None,
) -> float | None:
    """Return the standard error of mean Recall@k's difference, by resampled classes of queries; None for one class.

    Of few classes, n, the bootstrap's variance is too low by the factor (n - 1) / n, which is made up for.

    Args:
        before: Embeddings, ``n x d``.
        after: Others of the same images.
        labels: ``n``.
        ks: Numbers of neighbours.
        rng: Source of the draws.
        queries: Which of the images are queries, ``n`` booleans; None if each searches all others.
    """
    found, gallery = [], None
    own_labels = labels if queries is None else labels[queries]
    for embeddings in (before, after):
        if queries is not None:
            gallery = embeddings[~queries], labels[~queries]
        rows, hits = hits_at_k(embeddings if queries is None else embeddings[queries], own_labels, ks, gallery=gallery)
        found.append(torch.from_numpy(hits).double().mean(1))
    change, own = found[1] - found[0], own_labels[torch.from_numpy(rows)]
    classes = [(own == label).nonzero().flatten() for label in own.unique()]
    n = len(classes)
    if n == 1:
        return None
    return math.sqrt(n / (n - 1)) * error_of(lambda some: float(change[some].mean()), of_groups(classes, rng))
