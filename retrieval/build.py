"""The model that a config describes, trained or loaded, and its adapter."""

from pathlib import Path

import torch
from torch import nn

from metricopt_ext.adapters.adapter import Adapter
from metricopt_ext.adapters.attach import attach_film
from metricopt_ext.data.labelled import Split
from metricopt_ext.data.named_model import folder_weights, has_weights, settings_of
from metricopt_ext.data.pretrained import pretrained
from metricopt_ext.data.splits import Splits
from metricopt_ext.data.training import train_supervised
from metricopt_ext.retrieval.config import LossConfig, ModelConfig, RetrievalConfig
from metricopt_ext.retrieval.models import Embedder, build_model
from metricopt_ext.retrieval.named_loss import build_loss
from metricopt_ext.runtime.progress import Callback
from metricopt_ext.tasks.batches import ClassBatches
from metricopt_ext.utils.seeding import generator
from metricopt_ext.utils.state_dict import load_checkpoint


def class_batches(part: Split, config: LossConfig) -> ClassBatches:
    """Return the loss's batches of a part of the data, with all its classes if it has fewer than a batch."""
    paired = int((part.y.unique(return_counts=True)[1] > 1).sum())
    return ClassBatches(part.x, part.y, max(2, min(config.classes, paired)), config.samples)


def embedder(
    config: RetrievalConfig, splits: Splits, seed: int, folder: Path, callback: Callback | None = None
) -> nn.Module:
    """Return the embedder: loaded, resumed from ``folder``, or trained and kept there as ``model.safetensors``.

    Raises:
        DataError: The weights don't fit the model.
    """
    settings, shape = config.model, splits.train.x.shape[1:]
    return pretrained(
        lambda: built(settings, shape, settings.trunk_weights),
        lambda model, checkpoint: train(model, splits.train, config, seed, checkpoint, callback),
        check=lambda model: attach(model, config, seed).merge(),
        weights=settings.weights or (settings.name if has_weights(settings.name) else ""),
        entry=settings.entry,
        folder=folder,
        seed=seed,
        device=splits.train.x.device,
        load=lambda model, weights, entry: _load(model, settings.name, weights, entry),
    )


def built(settings: ModelConfig, shape: torch.Size, trunk_weights: str = "") -> Embedder:
    """Return the embedder that the settings name, for images of a shape, ``c x h x w``.

    Args:
        settings: The settings.
        shape: The shape.
        trunk_weights: File of the classifier's weights to start from; empty for fresh ones.

    Raises:
        ConfigError: There is no such model, or it doesn't take images of this shape.
        DataError: The weights don't fit the model.
    """
    return build_model(
        settings.name,
        shape,
        settings.embedding,
        settings.width,
        trunk_weights,
        settings.entry,
        **settings_of(settings),
    )


def _load(model: nn.Module, name: str, weights: str, entry: str) -> None:
    """Load the weights of the model's own folder, or a file's."""
    trunk = model.trunk
    if weights == name and isinstance(trunk, nn.Module):
        trunk.load_state_dict(folder_weights(name, trunk))
    else:
        load_checkpoint(model, Path(weights), entry=entry)


def untrained(config: RetrievalConfig, splits: Splits, seed: int) -> nn.Module:
    """Return the embedder with random weights of a seed, all of them trainable."""
    settings = config.model
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(generator(seed, "untrained").initial_seed())
        model = built(settings, splits.train.x.shape[1:])
    return model.to(splits.train.x.device)


def train(
    model: nn.Module,
    part: Split,
    config: RetrievalConfig,
    seed: int,
    checkpoint: Path | None = None,
    callback: Callback | None = None,
) -> None:
    """Train an embedder by the surrogate loss; see `train_supervised`."""
    settings, batches = config.model, class_batches(part, config.loss)
    train_supervised(
        model,
        build_loss(config.loss),
        batches,
        steps=steps_of(config, part, batches),
        lr=settings.lr,
        seed=seed,
        augment=settings.augment,
        checkpoint=checkpoint,
        callback=callback,
    )


def steps_of(config: RetrievalConfig, part: Split, batches: ClassBatches) -> int:
    """Return the steps of a training on a part of the data."""
    return max(1, config.model.epochs * len(part) // (batches.classes * batches.samples))


def attach(model: nn.Module, config: RetrievalConfig, seed: int) -> Adapter:
    """Attach the adapter that the settings describe."""
    return attach_film(model, config.adapter.layers or None, dim=config.adapter.dim, seed=seed)
