"""The loss that a config names."""

import copy
import re
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from metricopt_ext.data.labelled import Split
from metricopt_ext.errors import ConfigError
from metricopt_ext.retrieval.config import LossConfig
from metricopt_ext.retrieval.kept_features import embed
from metricopt_ext.retrieval.proxies import PerClass, fitted_proxies
from metricopt_ext.tasks.task import Loss
from metricopt_ext.utils.modes import evaluating
from metricopt_ext.utils.seeding import generator, seeded_streams
from metricopt_ext.utils.words import brief

TRIED = 8  # dimension of the random embeddings that a loss is tried on
MEMORY = "cross_batch_memory"  # a loss of a loss (Wang et al., Cross-Batch Memory for Embedding Learning, CVPR 2020)


def build_loss(config: LossConfig, model: nn.Module | None = None, parts: Sequence[Split] = (), seed: int = 0) -> Loss:
    """Return the surrogate loss that the settings name, as a function of model and batch.

    It is one of pytorch-metric-learning's or of `metricopt_ext.retrieval.losses`, whose smooth_ap replaces theirs. One
    with proxies has those that fit the model (`fitted_proxies`), of each part that batches come from; one with a memory
    remembers the model's embeddings of the first part.

    Args:
        config: The settings.
        model: The embedder; None to check the settings alone.
        parts: What the batches come from.
        seed: Fits the proxies, and draws what is remembered.

    Raises:
        ConfigError: There is no such loss, it rejects its arguments or fails on a random batch, or it has other weights
            than those of classes.
    """
    from metricopt_ext.retrieval.task import embedding_loss

    made, size = criterion(inner(config)), _memory_size(config)
    if not size and isinstance(made, nn.Module):
        return embedding_loss(made)
    if model is None:
        return embedding_loss(_memory(config, made, 2) if size else made(2, 2))
    with torch.no_grad(), evaluating(model):
        embedded = [(embed(model, part.x), part.y) for part in parts[: 1 if size else None]]
    if not size:
        assert not isinstance(made, nn.Module)
        return embedding_loss(fitted_proxies(made, embedded, seed))
    x, y = embedded[0]
    memory = _memory(config, made, x.shape[1]).to(x.device)
    drawn = torch.randperm(len(y), generator=generator(seed, "memory"))[:size].to(x.device)
    for rows in drawn.split(config.classes * config.samples):
        memory(x[rows], y[rows])
    return embedding_loss(memory)


def inner(config: LossConfig) -> LossConfig:
    """The loss that a memory is for; any other as it is."""
    if config.name != MEMORY:
        return config
    params = config.params.get("params", {})
    if not isinstance(name := config.params.get("loss"), str) or not isinstance(params, dict):
        raise ConfigError(f"loss.name={MEMORY} needs loss.params={{loss: contrastive, memory_size: 1024}} or the like")
    return replace(config, name=name, params=params)


def _memory_size(config: LossConfig) -> int:
    """How many embeddings a loss remembers; 0 for one without a memory."""
    if config.name != MEMORY:
        return 0
    size, batch = config.params.get("memory_size", 1024), config.classes * config.samples
    if unknown := sorted({*config.params} - {"loss", "memory_size", "params"}):
        raise ConfigError(f"loss.params: {MEMORY} takes loss, its params and memory_size, not {unknown[0]}")
    if not isinstance(size, int) or size < batch:
        raise ConfigError(f"loss.params: memory_size is {size}; it must be at least a batch, {batch}")
    return size


def _memory(config: LossConfig, loss: nn.Module | PerClass, dimension: int) -> nn.Module:
    """An empty memory around a loss."""
    from pytorch_metric_learning.losses import CrossBatchMemory

    name = config.params["loss"]
    try:
        memory: nn.Module = CrossBatchMemory(loss, dimension, memory_size=_memory_size(config))
    except Exception as error:
        raise ConfigError(f"loss.params: a memory can't be for {name}: {error}") from error
    return memory


def criterion(config: LossConfig) -> nn.Module | PerClass:
    """The loss, or what makes it for so many classes and dimensions."""
    from pytorch_metric_learning import losses

    from metricopt_ext.retrieval.losses import RecallLoss, SmoothAPLoss

    names = [name for name in dir(losses) if name.endswith("Loss")]
    known = {_snake(name.removesuffix("Loss")): getattr(losses, name) for name in names}
    known |= {"recall": RecallLoss, "smooth_ap": SmoothAPLoss}
    if config.name not in known:
        raise ConfigError(f"loss.name={config.name!r} is none of {', '.join(sorted(known))}")
    if ours := sorted({"num_classes", "embedding_size"} & {*config.params}):
        raise ConfigError(f"loss.params: leave {' and '.join(ours)} out, which data and model tell")

    def made(classes: int, dimension: int) -> nn.Module:
        loss: nn.Module = known[config.name](num_classes=classes, embedding_size=dimension, **config.params)
        return loss

    try:
        loss = known[config.name](**config.params)
    except Exception as error:  # its parts' own errors, as of a distance that is none
        try:
            made(2, 2)
        except Exception as other:
            told = other if "num_classes" in str(error) else error
            raise ConfigError(
                f"loss: {config.name} does not take {config.params}: {brief(told)}{_parts(config)}"
            ) from error
        _try(config, made)
        return made
    if list(loss.parameters()):
        raise ConfigError(f"loss.name={config.name} has its own weights, which finetuning phi would leave untrained")
    _try(config, lambda classes, dimension: copy.deepcopy(loss))  # one may remember what it saw
    return loss  # type: ignore[no-any-return]


def _try(config: LossConfig, made: PerClass) -> None:
    """Have the loss judge random embeddings of a batch's classes, before anything is trained by it.

    Raises:
        ConfigError: It fails; the message says why.
    """
    labels = torch.arange(config.classes).repeat_interleave(config.samples)
    with seeded_streams(generator(0, "try_loss").initial_seed(), torch.device("cpu")):
        try:
            made(config.classes, TRIED)(torch.randn(len(labels), TRIED), labels).item()
        except Exception as error:
            raise ConfigError(
                f"loss.params: {config.name} with {config.params} fails on a batch of {len(labels)} random"
                f" embeddings: {brief(error)}{_parts(config)}"
            ) from error


def _parts(config: LossConfig) -> str:
    """The end of a message where a text may stand for a part of the loss that no setting can be."""
    if not any(isinstance(each, str) for each in config.params.values()):
        return ""
    return "; a distance, a reducer or a function can only be given in Python (embedding_loss): leave it out"


def _snake(name: str) -> str:
    """Turn ``FastAP`` into ``fast_ap``."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()
