"""Weights that torchvision publishes for a classifier, and the preprocessing that they were trained with."""

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from metricopt_ext.errors import ConfigError, DataError

NAMED = re.compile(r"\w+_Weights\.\w+")
AUXILIARY = re.compile(r"(?:^|\.)aux_classifier\.")


def published(model: str, weights: str) -> Any:
    """Return torchvision's entry of published weights, e.g. ``ResNet18_Weights.IMAGENET1K_V1``; None for a file.

    Args:
        model: Name of the classifier in torchvision.
        weights: The weights' name, or what else ``model.weights`` may be.

    Raises:
        ConfigError: It is such a name, but torchvision has no such weights of this classifier.
    """
    if not NAMED.fullmatch(weights):
        return None
    from torchvision.models import get_model_weights, get_weight

    try:
        own = get_model_weights(model)
    except ValueError:
        raise ConfigError(f"model.weights={weights} are torchvision's, which has no model.name={model}") from None
    try:
        found = get_weight(weights)
    except (AttributeError, KeyError, ValueError):
        found = None
    if not isinstance(found, own):
        raise ConfigError(
            f"model.weights={weights} is none of model.name={model}'s: {', '.join(str(each) for each in own)}"
        )
    return found


def cropped(weights: Any) -> Callable[[Any], Any]:
    """Return what resizes a PIL image and cuts out its centre, as the weights' own preprocessing does."""
    from torchvision.transforms import functional

    preset = weights.transforms()

    def crop(image: Any) -> Any:
        resized = functional.resize(image, preset.resize_size, preset.interpolation, antialias=preset.antialias)
        return functional.center_crop(resized, preset.crop_size)

    return crop


def mean_and_std(weights: Any) -> tuple[list[float], list[float]]:
    """Return what pixels in [0, 1] are normalised by, channel by channel."""
    preset = weights.transforms()
    return list(preset.mean), list(preset.std)


def of_segmentation(state: dict[str, Any], model: nn.Module, path: Path) -> dict[str, Any]:
    """Return what of a state dict is of one of torchvision's segmentation networks, which has no auxiliary classifier.

    A warning tells of the auxiliary classifier, which only training uses.

    Args:
        state: The state dict, perhaps with a prefix before its names.
        model: The network.
        path: The file that it is from, for messages.

    Raises:
        DataError: It is for another number of classes.
    """
    head: Any = model.classifier
    name, last = [each for each in head.named_modules() if isinstance(each[1], nn.Conv2d)][-1]
    kept = {key: value for key, value in state.items() if not AUXILIARY.search(key)}
    found = [value for key, value in kept.items() if f".{key}".endswith(f".classifier.{name}.weight")]
    if len(found) == 1 and found[0].shape[0] != last.out_channels:
        theirs = found[0].shape[0]
        more = (
            f"if the maps' numbers mean what its do, set data.classes={theirs}"
            if theirs > last.out_channels
            else "number the maps' classes as its are"
        )
        raise DataError(
            f"{path} is of a network for {theirs} classes, but the data has {last.out_channels}; {more}, or train its"
            " last layer on yours, and give the file of the result"
        )
    if len(kept) < len(state):
        warnings.warn(f"{path}: the auxiliary classifier, which only training uses, left out", stacklevel=2)
    return kept


def load_published(model: nn.Module, weights: Any) -> None:
    """Load published weights, which are downloaded and checked if torch's cache does not have them.

    Raises:
        DataError: They can't be had, or the model has another number of classes.
    """
    try:
        model.load_state_dict(weights.get_state_dict(progress=False, check_hash=True))
    except (OSError, RuntimeError) as error:
        classes = len(weights.meta["categories"])
        raise DataError(
            f"model.weights={weights} can't be loaded ({str(error).splitlines()[0]}); they are for {classes} classes:"
            " if yours are others, train the last layer, and give the file of the result"
        ) from error
    if hasattr(model, "transform_input"):  # GoogLeNet and Inception, which normalise once more for these weights
        model.transform_input = True  # type: ignore[assignment]
