"""The data that a config names, divided into train, validation and test."""

from dataclasses import replace
from pathlib import Path

from metricopt_ext.data.own_parts import warn_of_copies
from metricopt_ext.data.reading import Reading, warn_of_near_names
from metricopt_ext.data.splits import Splits
from metricopt_ext.errors import ConfigError
from metricopt_ext.retrieval.config import DataConfig, OwnDataConfig, RetrievalConfig
from metricopt_ext.retrieval.data import (
    hold_out_classes,
    load_digits,
    load_omniglot,
    load_stanford_online_products,
    split_classes,
)
from metricopt_ext.retrieval.layouts import load_class_folders
from metricopt_ext.retrieval.own_data import of_function, own_parts
from metricopt_ext.utils.config import config_section

NAMES = ("class_folders", "digits", "omniglot", "stanford_online_products")


def load_splits(config: RetrievalConfig, seed: int) -> Splits:
    """Load the data, divide its classes by the seed, and shift validation and test if the settings say so.

    Raises:
        ConfigError: A setting is unknown.
        DataError: The data are missing or unusable.
    """
    with config_section("data"):
        splits = _divided(config.data, seed)
    warn_of_copies(splits)
    warn_of_near_names("classes", splits.class_names)
    with config_section("shift"):
        if config.shift.kind == "none":
            return splits
        if config.shift.kind != "image":
            raise ConfigError(f"shift.kind={config.shift.kind!r} must be none or image")
        return splits.shifted(config.shift.image_shift(), seed)


def _divided(data: DataConfig, seed: int) -> Splits:
    if isinstance(data, OwnDataConfig):
        return of_function(data, seed)
    if data.name not in NAMES:
        raise ConfigError(
            f"data.name={data.name!r} is none of {', '.join(NAMES)}; name your own function as MODULE:FUNCTION"
        )
    if data.name != "digits" and not (data.root or data.parts):
        raise ConfigError(
            f"data.name={data.name} needs data.root=PATH, the file or folder that holds it"
            + ", or data.train=PATH and data.val or data.test" * (data.name == "class_folders")
        )
    if (parts := own_parts(data, seed)) is not None:
        return parts
    if data.name == "stanford_online_products":
        train, test = load_stanford_online_products(data.root, data.image_size or 224)
        return hold_out_classes(train, test, data.validation_share, seed)
    said = ""
    if data.name == "class_folders":
        whole, said = load_class_folders(Path(data.root), data.image_size or None, stream=data.stream)
    elif data.name == "digits":
        whole = load_digits()
    else:
        whole = load_omniglot(data.root, data.image_size or None)
    splits = split_classes(whole, data.fractions, seed, last_test=data.last_test, test_classes=data.test_classes)
    return replace(splits, reading=Reading(said)) if said else splits
