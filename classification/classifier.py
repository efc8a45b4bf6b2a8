"""The classifier that a config describes: loaded, resumed or trained."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from metricopt_ext.classification.adapter import attach, check_adapter
from metricopt_ext.classification.config import ClassificationConfig, ModelConfig
from metricopt_ext.classification.models import build_model
from metricopt_ext.classification.named_loss import named_loss
from metricopt_ext.classification.published import load_published, published
from metricopt_ext.classification.targets import Target
from metricopt_ext.data.labelled import Split
from metricopt_ext.data.named_model import class_names_of, folder_weights, has_weights, settings_of
from metricopt_ext.data.pretrained import pretrained
from metricopt_ext.data.splits import Splits
from metricopt_ext.data.training import train_supervised
from metricopt_ext.errors import DataError
from metricopt_ext.runtime.progress import Callback
from metricopt_ext.tasks.batches import TensorBatches
from metricopt_ext.utils.seeding import generator
from metricopt_ext.utils.state_dict import load_state, read_state_dict
from metricopt_ext.utils.words import shortened


def classifier(
    config: ClassificationConfig, splits: Splits, seed: int, folder: Path, callback: Callback | None = None
) -> nn.Module:
    """Return the classifier: loaded, resumed from ``folder``, or trained and kept there as ``model.safetensors``.

    Raises:
        DataError: The weights don't fit the model.
    """
    settings = config.model
    target = Target(config.data.kind, splits.num_classes)

    def trained(model: nn.Module, file: Path) -> None:
        loss = named_loss(config, target)
        train(model, splits.train, settings, settings.balanced, seed, loss, checkpoint=file, callback=callback)

    return pretrained(
        lambda: built(config, splits),
        trained,
        check=lambda model: check_adapter(attach(model, config, seed), config),
        weights=settings.weights or _own_weights(config, splits),
        folder=folder,
        seed=seed,
        device=splits.train.x.device,
        entry=settings.entry,
        load=lambda model, weights, entry: _load(model, settings.name, weights, entry),
    )


def built(config: ClassificationConfig, splits: Splits) -> nn.Module:
    """Return the classifier with weights drawn from torch's global stream, an output for each logit."""
    target, settings = Target(config.data.kind, splits.num_classes), config.model
    own, shape = target.kind == "classes", splits.train.x.shape[1:]
    return build_model(settings.name, shape, target.count, one_logit=own, **settings_of(settings))


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
        load_state(model, read_state_dict(path, entry, what=f"weights for {type(model).__name__}"), path)
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
    config: ModelConfig,
    balanced: bool,
    seed: int,
    loss: Callable[[nn.Module, Any], Tensor],
    **options: Any,
) -> None:
    """Train a model's trainable parameters by a loss of a model on a batch, on balanced batches or not.

    Further options are those of `train_supervised`.
    """
    batches = TensorBatches(part.x, part.y, config.batch_size, balanced=balanced)
    options |= {"steps": steps_of(config, part), "lr": config.lr, "seed": seed, "augment": config.augment}
    train_supervised(model, loss, batches, **options)


def steps_of(config: ModelConfig, part: Split) -> int:
    """Return the steps of a training on a part of the data."""
    return max(1, config.epochs * len(part) // config.batch_size)
