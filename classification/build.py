"""Turns a classification config into the things it describes: data, model, adapter, metric."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from metricopt_ext.adapters.adapter import Adapter
from metricopt_ext.adapters.attach import attach_film, attach_input_bias, attach_outputs
from metricopt_ext.adapters.signature import Outputs
from metricopt_ext.classification.arrays import read_arrays
from metricopt_ext.classification.besides import check_besides
from metricopt_ext.classification.cifar_files import from_published
from metricopt_ext.classification.config import (
    ClassificationConfig,
    DataConfig,
    MetricConfig,
    ModelConfig,
    PartsConfig,
    SecondRoundConfig,
    TableConfig,
)
from metricopt_ext.classification.data import (
    divided,
    hold_out,
    imputed,
    load_cifar10,
    load_sklearn,
    ordered,
    single_precision,
    split,
    standardise,
    with_positive,
)
from metricopt_ext.classification.kept_features import Rest
from metricopt_ext.classification.masks import load_masks
from metricopt_ext.classification.metrics import METRICS, MetricSpec, check_split, expected_cost, from_callable
from metricopt_ext.classification.models import CifarResNet, build_model
from metricopt_ext.classification.own_data import own_parts, read_table, size_of, streams
from metricopt_ext.classification.probe import output_scale
from metricopt_ext.classification.published import cropped, load_published, mean_and_std, published
from metricopt_ext.classification.shift import long_tail, shift_class_ratio
from metricopt_ext.classification.tables import load_a9a
from metricopt_ext.classification.target_metrics import prepared_by, target_metric
from metricopt_ext.classification.targets import IGNORED, Target, beyond
from metricopt_ext.data.images import Limits, load_image_folder
from metricopt_ext.data.labelled import Labelled, Split, Table, Unscaled
from metricopt_ext.data.named_model import (
    class_names_of,
    folder_weights,
    has_weights,
    preprocessing_of,
    settings_of,
)
from metricopt_ext.data.parts import part_size
from metricopt_ext.data.precision import check_told_apart
from metricopt_ext.data.pretrained import pretrained
from metricopt_ext.data.splits import PARTS, Splits
from metricopt_ext.data.streamed import changed
from metricopt_ext.data.training import train_supervised
from metricopt_ext.errors import ConfigError, DataError
from metricopt_ext.tasks.batch_metric import BatchMetric
from metricopt_ext.tasks.batches import TensorBatches
from metricopt_ext.tasks.metric import Metric, with_halves
from metricopt_ext.tasks.own_metric import own_metric
from metricopt_ext.utils.config import config_section
from metricopt_ext.utils.modes import evaluating
from metricopt_ext.utils.progress import Watcher
from metricopt_ext.utils.seeding import generator
from metricopt_ext.utils.state_dict import load_state, read_state_dict
from metricopt_ext.utils.words import shortened

SKLEARN_SETS = ("breast_cancer", "diabetes", "digits", "iris", "wine")
# by the settings, the bounds and the columns that the metric is given
LOADERS: dict[str, Callable[[DataConfig, Limits, Sequence[str]], Labelled | Table]] = {
    "a9a": lambda data, limits, _: load_a9a(data.root, max_bytes=limits["max_bytes"]),
    "arrays": lambda data, limits, _: read_arrays([Path(data.root)], max_bytes=limits["max_bytes"])[0],
    "csv": lambda data, limits, columns: read_table(data, [data.root], limits, columns),
    "image_folder": lambda data, limits, _: load_image_folder(data.root, size_of(data), stream=streams(data), **limits),
    "segmentation": lambda data, limits, _: load_masks(data.root, data.image_size or None, **limits),
    "libsvm": lambda data, limits, columns: read_table(data, [data.root], limits, columns),
    **{name: lambda data, limits, _, name=name: load_sklearn(name) for name in SKLEARN_SETS},  # type: ignore[misc]
}


def classification_loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
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
    return torch.cat([output_of(model(part)) for part in x.split(part_size(x))])


def output_of(found: Any) -> Tensor:
    """Return a model's logits; torchvision's segmentation networks have them as ``"out"`` of several."""
    logits: Tensor = found["out"] if isinstance(found, dict) else found
    return logits


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


def loss_of(target: Target) -> Callable[[nn.Module, Any], Tensor]:
    """Return the loss of a model on a batch, inputs ``n x ...`` and labels, for what it predicts."""
    if target.kind == "classes":
        return classification_loss
    return lambda model, batch: target.loss(output_of(model(batch[0])), batch[1])


def target_in(config: ClassificationConfig, splits: Splits) -> Target:
    """Return what is predicted; of quantities the error counts in standard deviations of train's."""
    if config.data.kind != "regression":
        return Target(config.data.kind, splits.num_classes)
    spread = float(splits.train.y.std(correction=0))
    if spread == 0:
        raise DataError(f"the target is {float(splits.train.y[0]):g} in each row of train; there is nothing to predict")
    check_told_apart(
        splits.train.y[:, None],
        splits.train.y[:, None].float(),
        ["the target"],
        "subtract what all values have in common",
    )
    return Target("regression", 1, spread)


def check_part(part: Split, target: Target, name: str) -> None:
    """Make sure that a metric is meaningful on a part's labels (see `check_split`).

    Raises:
        DataError: It has one class, no label, or one quantity alone.
    """
    if target.kind == "multilabel":
        if not bool((part.y == 1).any()):
            raise DataError(f"no example of the {name} split has a label")
    elif target.kind == "segmentation":
        if bool((part.y == IGNORED).all()):
            raise DataError(f"no pixel of the {name} split counts")
    elif target.kind == "regression":
        if len(part) and bool((part.y == part.y[0]).all()):
            raise DataError(f"the {name} split must hold targets that differ, got {float(part.y[0]):g} everywhere")
    else:
        check_split(part.y, target.count, name)


def value_of(spec: MetricSpec, logits: Tensor, part: Split, rows: Tensor | None = None) -> float:
    """Return a metric's value on a part of the data, or on some rows of it.

    Args:
        spec: The metric; it is given what ``spec.columns`` names of the part's columns, of the same rows.
        logits: Those of the whole part, ``n`` or ``n x c``.
        part: Inputs, labels and columns.
        rows: Indices, which may repeat; None for all rows.
    """
    columns = [part.columns[name] for name in spec.columns]
    if rows is None:
        return spec.function(logits, part.y, *columns)
    places = rows.numpy(force=True)
    return spec.function(logits[rows], part.y[rows], *(column[places] for column in columns))


def model_metric(
    spec: MetricSpec,
    part: Split,
    halves: Sequence[Tensor] | str = (),
    *,
    also: Mapping[str, MetricSpec] | None = None,
    subject_to: Mapping[str, str] | None = None,
) -> Metric:
    """Make the black box: a classifier's metric on one part of the data.

    Args:
        spec: The metric.
        part: Inputs and labels.
        halves: Indices of two halves of them, for a metric that also reports its value on each, or why there are
            none; empty for one that does not.
        also: What counts besides, by name (`Metric`).
        subject_to: Constraints on it, which are told at every query, by the same logits.
    """
    also, subject_to = also or {}, subject_to or {}
    bounded = {name: each for name, each in also.items() if name in subject_to}

    def function(model: nn.Module) -> Any:
        logits = predict(model, part.x)
        value = with_halves(lambda half: value_of(spec, logits, part, half), halves)
        others = {name: value_of(each, logits, part) for name, each in bounded.items()}
        return {spec.name: value, **others} if others else value

    def alone(other: MetricSpec) -> Callable[[nn.Module], float]:
        return lambda model: value_of(other, predict(model, part.x), part)

    return Metric(
        function,
        maximize=spec.maximize,
        bounds=spec.bounds,
        name=spec.name,
        also={name: alone(each) for name, each in also.items() if name not in bounded},
        subject_to=subject_to,
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
    if y.dim() > 1 or y.is_floating_point():  # no classes
        return list(order.chunk(max(1, len(y) // size)))
    order = order[y[order].argsort(stable=True)]  # class by class, in random order within each
    parts = max(1, min(len(y) // size, int(y.unique(return_counts=True)[1].min())))
    return [order[i::parts] for i in range(parts)]


def batch_metric(spec: MetricSpec) -> BatchMetric:
    """Make the black box of a batch's scores and labels."""
    return BatchMetric(spec.function, maximize=spec.maximize, bounds=spec.bounds, name=spec.name)


def build_metric(config: MetricConfig, kind: str = "classes") -> MetricSpec:
    """Return the metric that the settings name; a module that they name is imported, which runs it.

    Args:
        config: The metric's settings.
        kind: What is predicted (`targets.KINDS`).

    Raises:
        ConfigError: There is no such metric, or its settings are incomplete.
    """
    own = own_metric(config.name, config)
    if own is None and kind != "classes":
        return target_metric(config.name, kind)
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
            columns=getattr(config, "columns", ()),
            prepared=None if kind == "classes" else prepared_by(kind, getattr(config, "scores", "labels")),
        )
    except ConfigError:
        raise
    except (TypeError, ValueError) as error:
        raise ConfigError(f"metric.name={config.name!r}: {error}") from error


def try_metric(
    config: MetricConfig,
    part: Split,
    num_classes: int,
    target: Target | None = None,
    others: Mapping[str, MetricSpec] | None = None,
) -> None:
    """Evaluate the metric on made-up predictions, every second of them right, before work is done for it.

    Args:
        config: The metric's settings.
        part: Has true labels, ``n`` in 0..num_classes-1, and the columns that the metric is given.
        num_classes: Number of classes.
        target: What is predicted, if not classes.
        others: What counts besides the metric, by name.

    Raises:
        ConfigError: The metric fails; the message says why.
    """
    target = target or Target("classes", num_classes)
    metric, outputs = build_metric(config, target.kind), _made_up(part.y, target)
    check_besides(others or {}, outputs, part.y)
    try:
        value_of(metric, outputs, part)
    except Exception as error:
        keys = (
            "; see metric.kwargs (its arguments), metric.scores and metric.columns (what it is given) and metric.bounds"
            " (its range)"
        )
        raise ConfigError(
            f"metric.name={config.name} fails on made-up predictions of {_what(target)}: {str(error).rstrip('.')}"
            f"{keys if ':' in config.name else ''}"
        ) from error


def _what(target: Target) -> str:
    named = {"classes": "classes", "multilabel": "labels each", "ordinal": "ranks", "segmentation": "classes"}
    return f"{target.count} {named[target.kind]}" if target.kind in named else "quantities"


def _made_up(labels: Tensor, target: Target) -> Tensor:
    """Outputs of which every second is right."""
    wrong = torch.arange(len(labels), device=labels.device) % 2
    if target.kind == "regression":
        return (labels + target.scale * wrong).float()
    if target.kind == "multilabel":
        return 2 * (labels ^ wrong[:, None]).float() - 1
    if target.kind == "segmentation":
        predicted = (labels.where(labels != IGNORED, 0) + wrong[:, None, None]) % target.count
        return F.one_hot(predicted, target.count).movedim(-1, 1).float()
    predicted = (labels + wrong) % target.count
    if target.kind == "ordinal":
        return 2 * beyond(predicted, target.count).float() - 1
    return F.one_hot(predicted, target.count).float()


def load_splits(config: ClassificationConfig, seed: int) -> Splits:
    """Load the data, divide it by the seed, and thin out train or shift validation and test if the settings say so.

    Raises:
        ConfigError: A setting is unknown.
        DataError: The data are missing or unusable.
    """
    with config_section("data"):
        splits = _divided(config, seed)
    _check_columns(splits, config)
    if config.data.kind == "ordinal":
        splits = ordered(splits, config.data.order)
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
        splits = splits.map(lambda part, name: replace(part, x=changed(part.x, lambda x: x.float() / 255)))
    with config_section("shift"):
        splits = _shifted(splits, config, seed)
    splits = _normalised(splits, config)
    if config.data.metric_on == "train":
        return replace(splits, validation=train_subset(splits, seed))
    return splits


def _check_columns(splits: Splits, config: ClassificationConfig) -> None:
    """Reject parts that lack a column which the metric is to be given."""
    for name in PARTS:
        having = getattr(splits, name).columns
        for column in config.metric_columns:
            if column not in having:
                found = ", ".join(having) or "none"
                raise ConfigError(
                    f"metric.columns={config.metric_columns}: the {name} part of data.name={config.data.name} has no"
                    f" column {column!r}; its columns are: {found}"
                )


def _normalised(splits: Splits, config: ClassificationConfig) -> Splits:
    """Normalise images as published weights or the model's folder need it, or as the settings say."""
    weights = published(config.model.name, config.model.weights)
    mean, std = (config.data.mean, config.data.std) if weights is None else mean_and_std(weights)
    if not mean and (known := preprocessing_of(config.model.name)):
        mean, std = known
    if not mean:
        return splits
    shape = splits.train.x.shape[1:]
    if len(shape) != 3 or len(mean) != shape[0]:
        raise ConfigError(f"data.mean={mean} normalises images of {len(mean)} channels, but the data is {tuple(shape)}")

    def normalise(x: Tensor) -> Tensor:
        centre, spread = (x.new_tensor(values).view(-1, 1, 1) for values in (mean, std))
        return (x - centre) / spread

    return splits.map(lambda part, name: replace(part, x=changed(part.x, normalise)))


def train_subset(splits: Splits, seed: int) -> Split:
    """Return train examples drawn at random: as many as validation has, or all if there are no more (paper, Fig. S4).

    Every class keeps its share of train, give or take one.
    """
    y = splits.train.y
    order = torch.randperm(len(y), generator=generator(seed, "train subset")).to(y.device)
    if y.dim() == 1:  # several labels, or pixels, have no order
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
    target = target_in(config, splits)

    def trained(model: nn.Module, file: Path) -> None:
        if target.kind != "regression":
            balanced = settings.balanced and target.kind != "segmentation"
            train(model, splits.train, settings, balanced, seed, target, checkpoint=file, **own)
            return
        last, mean = last_linear(model), float(splits.train.y.mean())
        part = replace(splits.train, y=(splits.train.y - mean) / target.scale)
        train(model, part, settings, False, seed, Target("regression", 1), checkpoint=file, **own)
        in_units_of(last, mean, target.scale)

    return pretrained(
        lambda: built(config, splits),
        trained,
        check=lambda model: _check_adapter(attach(tuned_part(model, config), config, seed), config),
        weights=settings.weights or _own_weights(config, splits),
        folder=folder,
        seed=seed,
        device=splits.train.x.device,
        entry=settings.entry,
        load=lambda model, weights, entry: _load(model, settings.name, weights, entry),
    )


def built(config: ClassificationConfig, splits: Splits) -> nn.Module:
    """Return the classifier with weights drawn from torch's global stream, an output for each logit."""
    target, settings = target_in(config, splits), config.model
    own, shape = target.kind == "classes", splits.train.x.shape[1:]
    return build_model(settings.name, shape, target.outputs, one_logit=own, **settings_of(settings))


def last_linear(model: nn.Module) -> nn.Linear:
    """Return the layer of a model that gives its one number.

    Raises:
        ConfigError: Its last linear layer gives several, or it has none.
    """
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    if not linear or linear[-1].out_features != 1 or linear[-1].bias is None:
        raise ConfigError("data.kind=regression needs a model whose last layer is linear, with a bias and one output")
    return linear[-1]


@torch.no_grad()
def in_units_of(layer: nn.Linear, mean: float, spread: float) -> None:
    """Have a layer that gives ``(y - mean) / spread`` give y."""
    layer.weight.mul_(spread)
    layer.bias.mul_(spread).add_(mean)


def _own_weights(config: ClassificationConfig, splits: Splits) -> str:
    """Return the model's name if it is a folder that has weights of its own, for the data's classes.

    Raises:
        DataError: They are for the same classes in another order.
    """
    name = config.model.name
    if not has_weights(name):
        return ""
    theirs, ours = class_names_of(name), list(splits.class_names)
    if theirs != ours and sorted(theirs) == sorted(ours):
        raise DataError(
            f"model.name={name} has the data's classes in another order, {shortened(theirs)}, and the data"
            f" {shortened(ours)}; change id2label, and the rows of its last layer, in the folder"
        )
    if theirs and theirs != ours:
        warnings.warn(
            f"model.name={name} names its classes {shortened(theirs)}, the data {shortened(ours)}; they are taken for"
            " the same, in this order",
            stacklevel=2,
        )
    return name


def _load(model: nn.Module, name: str, weights: str, entry: str) -> None:
    """Load published weights, those of the model's own folder, or a file's."""
    known = published(name, weights)
    if weights == name:
        model.load_state_dict(folder_weights(name, model))
    elif known is None:
        path = Path(weights)
        state = read_state_dict(path, entry, what=f"weights for {type(model).__name__}")
        if isinstance(model, CifarResNet):
            state = from_published(model, state) or state
        load_state(model, state, path)
    else:
        load_published(model, known)


def untrained(config: ClassificationConfig, splits: Splits, seed: int) -> nn.Module:
    """Return the classifier with random weights of a seed, all of them trainable."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(generator(seed, "untrained").initial_seed())
        model = built(config, splits)
    return model.to(splits.train.x.device)


def train(
    model: nn.Module,
    part: Split,
    config: ModelConfig | SecondRoundConfig,
    balanced: bool,
    seed: int,
    target: Target | None = None,
    **options: Any,
) -> None:
    """Train a model's trainable parameters by the target's loss, cross-entropy by default, on balanced batches or not.

    Further options are those of `train_supervised`.
    """
    batches = TensorBatches(part.x, part.y, config.batch_size, balanced=balanced)
    steps = max(1, config.epochs * len(part) // config.batch_size)
    options |= {"steps": steps, "lr": config.lr, "seed": seed, "augment": config.augment}
    loss = classification_loss if target is None else loss_of(target)
    train_supervised(model, loss, batches, **options)


def attach(
    model: nn.Module, config: ClassificationConfig, seed: int, x: Tensor | None = None, scale: float = 1.0
) -> Adapter:
    """Attach the adapter that the settings describe.

    Args:
        model: The classifier.
        config: The settings.
        seed: Seed of the adapter's matrices.
        x: Train inputs, ``n x ...``, on which the scale of the logits' offsets is measured beside the matrices'
            coordinates (see `output_scale`); None for ``scale``.
        scale: How far a unit of an offset moves an output where that is not measured.

    Raises:
        AdapterError: The model lacks the layers.
        ConfigError: The settings contradict themselves.
    """
    settings = config.adapter
    layer = settings.layers[0] if settings.layers else None
    if settings.kind == "outputs":
        if len(settings.layers) > 1:
            raise ConfigError(f"adapter.layers={settings.layers}: one layer gives the logits")
        return attach_outputs(model, Outputs(layer, scale=scale, temperature=settings.temperature))
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
    size = cropped(weights) if weights else size_of(data)
    if (own := own_parts(data, limits, seed, size, config.metric_columns)) is not None:
        return own
    if data.name not in SKLEARN_SETS and not data.root:
        raise ConfigError(
            f"data.name={data.name} needs data.root=PATH, the file or folder that holds it"
            + (", or data.train=PATH and data.val or data.test" if isinstance(data, PartsConfig) else "")
        )
    if data.name == "cifar10":
        train, test = load_cifar10(data.root, **limits)
        rest, validation = hold_out(train, data.validation_size, seed)
        return Splits(rest, validation, test, train.class_names)
    if weights is None:
        whole = LOADERS[data.name](data, limits, config.metric_columns)
        if isinstance(whole, Table):
            rows = Unscaled(whole.x, whole.y, columns=whole.columns)
            parts = divided(rows, whole.class_names, data.fractions, seed)
            return replace(parts, reading=whole.reading)
    else:
        whole = load_image_folder(data.root, cropped(weights), stream=streams(data), **limits)
    return split(whole.x, whole.y, data.fractions, seed, class_names=whole.class_names)


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
