"""The data that a config describes: loaded, divided, thinned out, shifted, normalised."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from metricopt_ext.classification.arrays import read_arrays
from metricopt_ext.classification.config import ClassificationConfig
from metricopt_ext.classification.data import (
    SKLEARN_SETS,
    divided,
    hold_out,
    imputed,
    load_cifar10,
    load_sklearn,
    single_precision,
    standardise,
    with_positive,
)
from metricopt_ext.classification.data_config import (
    DataConfig,
    LabelledImagesConfig,
    OwnDataConfig,
    PartsConfig,
    TableConfig,
)
from metricopt_ext.classification.libsvm import load_a9a
from metricopt_ext.classification.own_data import labelled_images, own_parts, read_table, streams
from metricopt_ext.classification.published import cropped, mean_and_std, published
from metricopt_ext.classification.shift import long_tail, shift_class_ratio
from metricopt_ext.data.images import load_image_folder
from metricopt_ext.data.labelled import Labelled, Table, Unscaled
from metricopt_ext.data.named_model import preprocessing_of
from metricopt_ext.data.own_parts import warn_of_copies
from metricopt_ext.data.reading import warn_of_near_names
from metricopt_ext.data.splits import PARTS, Splits
from metricopt_ext.data.streamed import changed
from metricopt_ext.errors import ConfigError
from metricopt_ext.utils.config import config_section

# by the settings and the columns that the metric is given
LOADERS: dict[str, Callable[[DataConfig, Sequence[str]], Labelled | Table]] = {
    "a9a": lambda data, _: load_a9a(data.root),
    "arrays": lambda data, _: read_arrays([Path(data.root)])[0],
    "csv": lambda data, columns: read_table(data, [data.root], columns),
    "image_folder": lambda data, _: load_image_folder(data.root, data.image_size or None, stream=streams(data)),
    "libsvm": lambda data, columns: read_table(data, [data.root], columns),
    **{name: lambda data, _, name=name: load_sklearn(name) for name in SKLEARN_SETS},  # type: ignore[misc]
}


def load_splits(config: ClassificationConfig, seed: int) -> Splits:
    """Load the data, divide it by the seed, and thin out train or shift validation and test if the settings say so.

    Raises:
        ConfigError: A setting is unknown.
        DataError: The data are missing or unusable.
    """
    with config_section("data"):
        splits = _divided(config, seed)
    warn_of_copies(splits)
    warn_of_near_names("classes", splits.class_names)
    _check_columns(splits, config)
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
        splits = splits.map(lambda part, name: replace(part, x=changed(part.x, lambda x: x.float().div_(255))))
    with config_section("shift"):
        splits = _shifted(splits, config, seed)
    return _normalised(splits, config)


def _check_columns(splits: Splits, config: ClassificationConfig) -> None:
    """Reject parts that lack a column which the metric is to be given."""
    for name in PARTS:
        having = getattr(splits, name).columns
        for column in config.metric_columns:
            if column not in having:
                found = ", ".join(having) or "none"
                raise ConfigError(
                    f"{config.shown_columns}: the {name} part of data.name={config.data.name} has no"
                    f" column {column!r}; its columns are: {found}"
                )


def _normalised(splits: Splits, config: ClassificationConfig) -> Splits:
    """Normalise images as published weights or the model's folder need it, or as the settings say."""
    weights = published(config.model.name, config.model.weights)
    mean, std = (config.data.mean, config.data.std) if weights is None else mean_and_std(weights)
    known = preprocessing_of(config.model.name)  # which refuses what the settings can't say either
    if not mean and known:
        mean, std = known
    if not mean:
        return splits
    shape = splits.train.x.shape[1:]
    if len(shape) != 3 or len(mean) != shape[0]:
        raise ConfigError(f"data.mean={mean} normalises images of {len(mean)} channels, but the data is {tuple(shape)}")

    def normalise(x: Tensor) -> Tensor:
        centre, spread = (x.new_tensor(values).view(-1, 1, 1) for values in (mean, std))
        return (x - centre).div_(spread)

    return splits.map(lambda part, name: replace(part, x=changed(part.x, normalise)))


def _divided(config: ClassificationConfig, seed: int) -> Splits:
    data, weights = config.data, published(config.model.name, config.model.weights)
    if data.name not in (*LOADERS, "cifar10") and not isinstance(data, OwnDataConfig):
        raise ConfigError(
            f"data.name={data.name!r} is none of cifar10, {', '.join(LOADERS)}; name your own function as"
            " MODULE:FUNCTION"
        )
    size = cropped(weights) if weights else data.image_size or None
    if (own := own_parts(data, seed, size, config.metric_columns)) is not None:
        return own
    if data.name not in SKLEARN_SETS and not data.root:
        raise ConfigError(
            f"data.name={data.name} needs data.root=PATH, the file or folder that holds it"
            + (", or data.train=PATH and data.val or data.test" if isinstance(data, PartsConfig) else "")
        )
    if data.name == "cifar10":
        train, test = load_cifar10(data.root)
        rest, validation = hold_out(train, data.validation_size, seed)
        return Splits(rest, validation, test, train.class_names)
    if isinstance(data, LabelledImagesConfig):
        images, reading = labelled_images(data, size)
        return replace(divided(images, images.class_names, data.fractions, seed), reading=reading)
    if weights is None:
        whole = LOADERS[data.name](data, config.metric_columns)
    else:
        whole = load_image_folder(data.root, cropped(weights), stream=streams(data))
    if isinstance(whole, Table):
        rows = Unscaled(whole.x, whole.y, columns=whole.columns, names=whole.names)
        parts = divided(rows, whole.class_names, data.fractions, seed)
        return replace(parts, reading=whole.reading)
    return divided(whole, whole.class_names, data.fractions, seed)


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
