"""Turns a classification config into the things it describes: data, model, adapter, metric."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from metricopt_ext.adapters.adapter import Adapter
from metricopt_ext.adapters.attach import attach_film, attach_input_bias, attach_outputs
from metricopt_ext.adapters.signature import Outputs
from metricopt_ext.classification.config import (
    ClassificationConfig,
    DataConfig,
    MetricConfig,
    ModelConfig,
    SecondRoundConfig,
    TableConfig,
)
from metricopt_ext.classification.data import (
    divided,
    hold_out,
    imputed,
    load_cifar10,
    load_sklearn,
    single_precision,
    split,
    standardise,
    with_positive,
)
from metricopt_ext.classification.kept_features import Rest
from metricopt_ext.classification.metrics import METRICS, MetricSpec, expected_cost, from_callable
from metricopt_ext.classification.models import build_model
from metricopt_ext.classification.probe import output_scale
from metricopt_ext.classification.published import cropped, load_published, mean_and_std, published
from metricopt_ext.classification.shift import long_tail, shift_class_ratio
from metricopt_ext.classification.tables import load_a9a, read_csv, read_libsvm
from metricopt_ext.data.images import Limits, load_image_folder
from metricopt_ext.data.labelled import Labelled, Split, Table, Unscaled
from metricopt_ext.data.parts import part_size
from metricopt_ext.data.pretrained import pretrained
from metricopt_ext.data.splits import Splits
from metricopt_ext.data.training import train_supervised
from metricopt_ext.errors import ConfigError
from metricopt_ext.tasks.batch_metric import BatchMetric
from metricopt_ext.tasks.batches import TensorBatches
from metricopt_ext.tasks.metric import Metric, with_halves
from metricopt_ext.tasks.own_metric import own_metric
from metricopt_ext.utils.config import config_section
from metricopt_ext.utils.files import load_checkpoint
from metricopt_ext.utils.modes import evaluating
from metricopt_ext.utils.progress import Watcher
from metricopt_ext.utils.seeding import generator

SKLEARN_SETS = ("breast_cancer", "digits", "iris", "wine")
LOADERS: dict[str, Callable[[DataConfig, Limits], Labelled | Table]] = {  # by the settings and the bounds
    "a9a": lambda data, limits: load_a9a(data.root, max_bytes=limits["max_bytes"]),
    "csv": lambda data, limits: _read_csv(data, limits),
    "image_folder": lambda data, limits: load_image_folder(data.root, data.image_size or None, **limits),
    "libsvm": lambda data, limits: read_libsvm(data.root, max_bytes=limits["max_bytes"]),
    **{name: lambda data, limits, name=name: load_sklearn(name) for name in SKLEARN_SETS},  # type: ignore[misc]
}


def classification_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Cross-entropy of ``n`` or ``n x c`` logits for inputs ``n x ...`` and labels ``n``."""
    x, y = batch
    return cross_entropy(model(x), y)


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of one logit per example, ``n``, or of ``n x c`` logits."""
    if logits.dim() == 1:
        return F.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype))
    return F.cross_entropy(logits, labels)


def predict(model: nn.Module, x: Tensor) -> Tensor:
    """Return the logits of inputs ``n x ...``, in batches; the caller sets evaluation mode and disables gradients."""
    return torch.cat([model(part) for part in x.split(part_size(x))])


@torch.no_grad()
def scores_at(adapter: Adapter, phi: Tensor, x: Tensor) -> Tensor:
    """Return the logits of the model with phi, ``d``, for inputs ``n x ...``."""
    with adapter.using(phi) as model, evaluating(model):
        return predict(model, x)


@torch.no_grad()
def predict_classes(adapter: Adapter, phi: Tensor, x: Tensor) -> Tensor:
    """Return the classes, ``n``, that the model with phi, ``d``, predicts for inputs ``n x ...``."""
    with adapter.using(phi) as model:
        logits = predict(model, x)
    return (logits > 0).long() if logits.dim() == 1 else logits.argmax(1)


def model_metric(spec: MetricSpec, part: Split, halves: Sequence[Tensor] | str = ()) -> Metric:
    """Make the black box: a classifier's metric on one part of the data.

    Args:
        spec: The metric.
        part: Inputs and labels.
        halves: Indices of two halves of them, for a metric that also reports its value on each, or why there are
            none; empty for one that does not.
    """

    def function(model: nn.Module) -> Any:
        logits = predict(model, part.x)

        def value_on(half: Tensor | None) -> float:
            rows = slice(None) if half is None else half
            return spec.function(logits[rows], part.y[rows])

        return with_halves(value_on, halves)

    return Metric(
        function,
        maximize=spec.maximize,
        bounds=spec.bounds,
        name=spec.name,
    )


def stratified_parts(y: Tensor, size: int, seed: int) -> list[Tensor]:
    """Divide examples at random into parts with about the same share of each class.

    Args:
        y: Labels, ``n``.
        size: Examples in a part, about; parts are larger where a class would be missing from some otherwise.
        seed: Seed of the division.

    Returns:
        The indices of each part.
    """
    order = torch.randperm(len(y), generator=generator(seed, "parts")).to(y.device)
    order = order[y[order].argsort(stable=True)]  # class by class, in random order within each
    parts = max(1, min(len(y) // size, int(y.unique(return_counts=True)[1].min())))
    return [order[i::parts] for i in range(parts)]


def batch_metric(spec: MetricSpec) -> BatchMetric:
    """Make the black box of a batch's scores and labels."""
    return BatchMetric(spec.function, maximize=spec.maximize, bounds=spec.bounds, name=spec.name)


def build_metric(config: MetricConfig) -> MetricSpec:
    """Return the metric that the settings name; a module that they name is imported, which runs it.

    Raises:
        ConfigError: There is no such metric, or its settings are incomplete.
    """
    own = own_metric(config.name, config)
    if config.name in METRICS:
        return METRICS[config.name]
    try:
        if config.name == "expected_cost":
            return expected_cost(config.costs, config.prior or None)
        if own is None:
            raise ConfigError(
                f"metric.name={config.name!r} is none of {', '.join([*METRICS, 'expected_cost'])}; name your own"
                " function as MODULE:FUNCTION, e.g. sklearn.metrics:matthews_corrcoef"
            )
        return from_callable(
            own.function,
            maximize=own.maximize,
            bounds=own.bounds,
            name=own.name,
            scores=getattr(config, "scores", "labels"),
        )
    except ConfigError:
        raise
    except (TypeError, ValueError) as error:
        raise ConfigError(f"metric.name={config.name!r}: {error}") from error


def try_metric(config: MetricConfig, labels: Tensor, num_classes: int) -> None:
    """Evaluate the metric on made-up predictions, every second of them right, before work is done for it.

    Args:
        config: The metric's settings.
        labels: True labels, ``n`` in 0..num_classes-1.
        num_classes: Number of classes.

    Raises:
        ConfigError: The metric fails; the message says why.
    """
    metric = build_metric(config)
    predicted = (labels + torch.arange(len(labels), device=labels.device) % 2) % num_classes
    try:
        metric.function(F.one_hot(predicted, num_classes).float(), labels)
    except Exception as error:
        keys = "; see metric.kwargs (its arguments), metric.scores (what it is given) and metric.bounds (its range)"
        raise ConfigError(
            f"metric.name={config.name} fails on made-up predictions of {num_classes} classes: {str(error).rstrip('.')}"
            f"{keys if ':' in config.name else ''}"
        ) from error


def load_splits(config: ClassificationConfig, seed: int) -> Splits:
    """Load the data, divide it by the seed, and thin out train or shift validation and test if the settings say so.

    Raises:
        ConfigError: A setting is unknown.
        DataError: The data are missing or unusable.
    """
    with config_section("data"):
        splits = _divided(config, seed)
    if config.data.positive:
        splits = with_positive(splits, config.data.positive)
    if config.data.imbalance != 1 or config.data.largest_class:
        with config_section("data"):
            splits = long_tail(splits, config.data.imbalance, config.data.largest_class, seed)
    if isinstance(config.data, TableConfig) and config.data.missing:
        splits = imputed(splits, config.data.missing)
    if config.data.standardise:
        splits = standardise(splits)
    elif isinstance(splits.train, Unscaled):
        splits = single_precision(splits)
    if splits.train.x.dtype == torch.uint8:
        splits = splits.map(lambda part, name: Split(part.x.float() / 255, part.y))
    with config_section("shift"):
        splits = _shifted(splits, config, seed)
    splits = _normalised(splits, config)
    if config.data.metric_on == "train":
        return replace(splits, validation=train_subset(splits, seed))
    return splits


def _normalised(splits: Splits, config: ClassificationConfig) -> Splits:
    """Normalise images as published weights need it, or as the settings say."""
    weights = published(config.model.name, config.model.weights)
    mean, std = (config.data.mean, config.data.std) if weights is None else mean_and_std(weights)
    if not mean:
        return splits
    shape = splits.train.x.shape[1:]
    if len(shape) != 3 or len(mean) != shape[0]:
        raise ConfigError(f"data.mean={mean} normalises images of {len(mean)} channels, but the data is {tuple(shape)}")

    def change(part: Split, name: str) -> Split:
        centre, spread = (part.x.new_tensor(values).view(-1, 1, 1) for values in (mean, std))
        return Split((part.x - centre) / spread, part.y)

    return splits.map(change)


def train_subset(splits: Splits, seed: int) -> Split:
    """Return train examples drawn at random: as many as validation has, or all if there are no more (paper, Fig. S4).

    Every class keeps its share of train, give or take one.
    """
    y = splits.train.y
    order = torch.randperm(len(y), generator=generator(seed, "train subset")).to(y.device)
    order = order[y[order].argsort(stable=True)]  # class by class, in random order within each
    places = torch.linspace(0, len(y) - 1, min(len(splits.validation), len(y))).round().long().to(y.device)
    return splits.train.take(order[places].sort().values)


def classifier(
    config: ClassificationConfig, splits: Splits, seed: int, folder: Path, watcher: Watcher | None = None
) -> nn.Module:
    """Return the classifier: loaded, resumed from ``folder``, or trained and kept there as ``model.safetensors``.

    Raises:
        DataError: The weights don't fit the model.
    """
    settings = config.model
    own: dict[str, Any] = {name: getattr(settings, name) for name in ("optimizer", "weight_decay", "bfloat16")}
    own["watcher"] = watcher
    return pretrained(
        lambda: build_model(settings.name, splits.train.x.shape[1:], splits.num_classes),
        lambda model, file: train(model, splits.train, settings, settings.balanced, seed, checkpoint=file, **own),
        check=lambda model: _check_adapter(attach(tuned_part(model, config), config, seed), config),
        weights=settings.weights,
        folder=folder,
        seed=seed,
        device=splits.train.x.device,
        load=lambda model, weights: _load(model, settings.name, weights),
    )


def _load(model: nn.Module, name: str, weights: str) -> None:
    """Load published weights, or a file's."""
    entry = published(name, weights)
    if entry is None:
        load_checkpoint(model, Path(weights))
    else:
        load_published(model, entry)


def untrained(config: ClassificationConfig, splits: Splits, seed: int) -> nn.Module:
    """Return the classifier with random weights of a seed, all of them trainable."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(generator(seed, "untrained").initial_seed())
        model = build_model(config.model.name, splits.train.x.shape[1:], splits.num_classes)
    return model.to(splits.train.x.device)


def train(
    model: nn.Module,
    part: Split,
    config: ModelConfig | SecondRoundConfig,
    balanced: bool,
    seed: int,
    **options: Any,
) -> None:
    """Train a model's trainable parameters by cross-entropy, on batches balanced by class or not.

    Further options are those of `train_supervised`.
    """
    batches = TensorBatches(part.x, part.y, config.batch_size, balanced=balanced)
    steps = max(1, config.epochs * len(part) // config.batch_size)
    options |= {"steps": steps, "lr": config.lr, "seed": seed, "augment": config.augment}
    train_supervised(model, classification_loss, batches, **options)


def attach(model: nn.Module, config: ClassificationConfig, seed: int, x: Tensor | None = None) -> Adapter:
    """Attach the adapter that the settings describe.

    Args:
        model: The classifier.
        config: The settings.
        seed: Seed of the adapter's matrices.
        x: Train inputs, ``n x ...``, on which the scale of the logits' offsets is measured beside the matrices'
            coordinates (see `output_scale`); None for a scale of 1.

    Raises:
        AdapterError: The model lacks the layers.
        ConfigError: The settings contradict themselves.
    """
    settings = config.adapter
    layer = settings.layers[0] if settings.layers else None
    if settings.kind == "outputs":
        if len(settings.layers) > 1:
            raise ConfigError(f"adapter.layers={settings.layers}: one layer gives the logits")
        return attach_outputs(model, Outputs(layer, temperature=settings.temperature))
    if settings.kind == "input_bias" and len(settings.layers) > 1:
        raise ConfigError(f"adapter.layers={settings.layers}: an input bias acts on one linear layer")
    if settings.kind not in ("film", "input_bias"):
        raise ConfigError(f"adapter.kind={settings.kind!r} is neither film nor input_bias nor outputs")

    def attached(outputs: Outputs | None) -> Adapter:
        if settings.kind == "film":
            return attach_film(model, settings.layers or None, dim=settings.dim, seed=seed, outputs=outputs)
        return attach_input_bias(model, layer, dim=settings.dim, seed=seed, outputs=outputs)

    if not settings.outputs:
        return attached(None)
    scale = 1.0
    if x is not None:
        probed = attached(None)
        scale = output_scale(probed, x)
        probed.remove()
    return attached(Outputs(scale=scale, temperature=settings.temperature))


def tuned_part(model: nn.Module, config: ClassificationConfig) -> nn.Module:
    """Return what of a classifier is tuned: all of it, or the `Rest` from the layer on that the settings name."""
    first = config.adapter.keep_before
    return Rest(model, first) if first else model


def _check_adapter(adapter: Adapter, config: ClassificationConfig) -> None:
    """Reject what the adapter or its number of coordinates makes impossible, on a model that isn't trained yet."""
    if isinstance(adapter.model, Rest):
        for layer in adapter.layers:
            if not adapter.model.runs(layer):
                raise ConfigError(
                    f"adapter.layers has {layer!r}, which comes before adapter.keep_before={adapter.model.first}: what"
                    " it computes is kept, so phi can't act there; name layers from there on"
                )
    config.check_dim(adapter.dim)
    adapter.merge()


def _divided(config: ClassificationConfig, seed: int) -> Splits:
    data, limits, weights = config.data, config.limits, published(config.model.name, config.model.weights)
    if data.name != "cifar10" and data.name not in LOADERS:
        raise ConfigError(f"data.name={data.name!r} is none of cifar10, {', '.join(LOADERS)}")
    if data.name not in SKLEARN_SETS and not data.root:
        raise ConfigError(f"data.name={data.name} needs data.root=PATH, the file or folder that holds it")
    if data.name == "cifar10":
        train, test = load_cifar10(data.root, **limits)
        rest, validation = hold_out(train, data.validation_size, seed)
        return Splits(rest, validation, test, train.class_names)
    if weights is None:
        whole = LOADERS[data.name](data, limits)
        if isinstance(whole, Table):
            parts = divided(Unscaled(whole.x, whole.y), whole.class_names, data.fractions, seed)
            return replace(parts, reading=whole.reading)
    else:
        whole = load_image_folder(data.root, cropped(weights), **limits)
    return split(whole.x, whole.y, data.fractions, seed, class_names=whole.class_names)


def _read_csv(data: DataConfig, limits: Limits) -> Table:
    assert isinstance(data, TableConfig)  # data.name=csv brings it
    return read_csv(
        data.root,
        data.target,
        drop=data.drop,
        categories=data.categories,
        delimiter=data.delimiter,
        decimal=data.decimal,
        encoding=data.encoding,
        missing=bool(data.missing),
        max_categories=data.max_categories,
        max_bytes=limits["max_bytes"],
    )


def _shifted(splits: Splits, config: ClassificationConfig, seed: int) -> Splits:
    settings = config.shift
    if settings.kind == "none":
        return splits
    if settings.kind == "class_ratio":
        return shift_class_ratio(splits, settings.ratio, seed)
    if settings.kind != "image":
        raise ConfigError(f"shift.kind={settings.kind!r} must be none, image or class_ratio")
    if splits.train.x.dim() != 4:
        raise ConfigError(
            f"shift.kind=image needs images, {config.data.name} has shape {tuple(splits.train.x.shape[1:])}"
        )
    return splits.shifted(settings.image_shift(), seed)
