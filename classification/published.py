"""Weights that torchvision publishes for a classifier, and the preprocessing that they were trained with."""

import re
from collections.abc import Callable
from typing import Any

from torch import nn

from metricopt_ext.errors import ConfigError, DataError

NAMED = re.compile(r"\w+_Weights\.\w+")


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
