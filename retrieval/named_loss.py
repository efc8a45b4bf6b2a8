"""The loss that a config names."""

import copy
import re

import torch
from torch import Tensor, nn

from metricopt_ext.errors import ConfigError
from metricopt_ext.retrieval.config import LossConfig, OwnLossConfig
from metricopt_ext.tasks.task import Loss
from metricopt_ext.utils.named import named
from metricopt_ext.utils.seeding import generator, seeded_streams
from metricopt_ext.utils.words import brief

# Wrong in versions up to 2.9, unless there are as many classes as samples of each.
WRONG = ("SmoothAPLoss",)
TRIED = 8  # dimension of the random embeddings that a loss is tried on


def build_loss(config: LossConfig) -> Loss:
    """Return the surrogate loss that the settings name, as a function of model and batch.

    It is one of pytorch-metric-learning's, or the user's own, ``MODULE:FUNCTION``, whose module runs as it is imported.

    Raises:
        ConfigError: There is no such loss, it rejects its arguments or fails on a random batch, or it has weights.
    """
    from metricopt_ext.retrieval.task import embedding_loss

    return embedding_loss(_made(config))


def _made(config: LossConfig) -> nn.Module:
    loss = Own(config) if isinstance(config, OwnLossConfig) else _known(config)
    if list(loss.parameters()):
        raise ConfigError(
            f"loss.name={config.name} has its own weights, which finetuning phi would leave untrained; train with it"
            " under a trainer, and tune there (tune_with_trainer)"
        )
    _try(config, loss)
    return loss


class Own(nn.Module):
    """A loss of the user's own, of embeddings and labels.

    Raises:
        ConfigError: As from `named`.
    """

    def __init__(self, config: OwnLossConfig) -> None:
        super().__init__()
        self.function = named("loss.name", config.name, config.folder, config.params)

    def forward(self, embeddings: Tensor, labels: Tensor, mined: None = None) -> Tensor:
        """Return the loss of a batch, ``n x d`` and ``n``; nothing is mined for it."""
        loss: Tensor = self.function(embeddings, labels)
        return loss


def _known(config: LossConfig) -> nn.Module:
    from pytorch_metric_learning import losses

    names = [name for name in dir(losses) if name.endswith("Loss") and name not in WRONG]
    known = {_snake(name.removesuffix("Loss")): getattr(losses, name) for name in names}
    if config.name not in known:
        raise ConfigError(
            f"loss.name={config.name!r} is none of {', '.join(sorted(known))}; name your own as MODULE:FUNCTION"
        )
    try:
        loss: nn.Module = known[config.name](**config.params)
    except Exception as error:  # its parts' own errors, as of a distance that is none
        raise ConfigError(
            f"loss: {config.name} does not take {config.params}: {brief(error)}{_parts(config)}"
        ) from error
    return loss


def _try(config: LossConfig, loss: nn.Module) -> None:
    """Have the loss judge random embeddings of a batch's classes, before anything is trained by it.

    Raises:
        ConfigError: It fails; the message says why.
    """
    labels = torch.arange(config.classes).repeat_interleave(config.samples)
    with seeded_streams(generator(0, "try_loss").initial_seed(), torch.device("cpu")):
        embeddings = torch.randn(len(labels), TRIED, requires_grad=True)
        try:
            value = copy.deepcopy(loss)(embeddings, labels)  # a copy, as one may remember what it saw
        except Exception as error:
            raise ConfigError(
                f"loss.params: {config.name} with {config.params} fails on a batch of {len(labels)} random"
                f" embeddings: {brief(error)}{_parts(config)}"
            ) from error
    if not isinstance(value, Tensor) or value.dim() or not value.requires_grad or not bool(value.isfinite()):
        raise ConfigError(
            f"loss.name={config.name} returned {brief(value)} for {len(labels)} embeddings and labels; it must be one"
            " finite number with a gradient"
        )


def _parts(config: LossConfig) -> str:
    """The end of a message where a text may stand for a part of the loss that no setting can be."""
    if ":" in config.name or not any(isinstance(each, str) for each in config.params.values()):
        return ""
    return "; a distance, a reducer or a function can only be given in Python (embedding_loss): leave it out"


def _snake(name: str) -> str:
    """Turn ``FastAP`` into ``fast_ap``."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()
