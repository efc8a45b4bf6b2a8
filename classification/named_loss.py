"""The loss that a config names."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from metricopt_ext.classification.config import ClassificationConfig, OwnLossConfig
from metricopt_ext.classification.losses import CostSensitive, cross_entropy, loss_of
from metricopt_ext.classification.predictions import predict
from metricopt_ext.classification.targets import Target
from metricopt_ext.data.labelled import Split
from metricopt_ext.errors import ConfigError
from metricopt_ext.utils.modes import evaluating
from metricopt_ext.utils.named import named
from metricopt_ext.utils.words import brief

ScoreLoss = Callable[[Tensor, Tensor], Tensor]  # (logits ``n`` or ``n x c``, labels ``n``) -> scalar
TRIED = 32  # examples that a loss of the user's own is tried on


def named_loss(config: ClassificationConfig, target: Target) -> Callable[[nn.Module, Any], Tensor]:
    """Return the loss of a model on a batch, inputs ``n x ...`` and labels ``n``, that the settings name.

    Raises:
        ConfigError: There is no such loss, or it does not take its arguments.
    """
    if config.loss is None:
        return loss_of(target)
    made = _made(config)
    return lambda model, batch: made(model(batch[0]), batch[1])


def try_loss(config: ClassificationConfig, model: nn.Module, part: Split) -> None:
    """Have a loss of the user's own judge an untrained model, before anything is trained by it.

    Args:
        config: The settings.
        model: The model.
        part: Train examples; a few are taken.

    Raises:
        ConfigError: It fails, or returns no finite number that the logits have a gradient of.
    """
    assert config.loss is not None
    few = part.take(torch.linspace(0, len(part) - 1, min(TRIED, len(part))).round().long().to(part.y.device))
    with torch.no_grad(), evaluating(model):
        logits = predict(model, few.x)
    logits.requires_grad_()
    shown = (
        f"loss.name={config.loss.name} as FUNCTION(logits, labels), logits of shape"
        f" {tuple(logits.shape)} and labels of shape {tuple(few.y.shape)}"
    )
    try:
        loss = _made(config)(logits, few.y)
    except Exception as error:
        raise ConfigError(f"{shown}, fails: {type(error).__name__}: {brief(error)}; see loss.params") from error
    if not isinstance(loss, Tensor) or loss.dim() or not loss.requires_grad or not bool(loss.isfinite()):
        raise ConfigError(f"{shown}, returned {brief(loss)}; it must be one finite number with a gradient")


def _made(config: ClassificationConfig) -> Any:
    assert config.loss is not None
    name, params = config.loss.name, dict(config.loss.params)
    if isinstance(config.loss, OwnLossConfig):
        made = named("loss.name", name, config.loss.folder, params)
        if isinstance(made, nn.Module) and list(made.parameters()):
            raise ConfigError(f"loss.name={name} has its own weights, which finetuning phi would leave untrained")
        return made
    known: dict[str, Callable[..., Any]] = {
        "cost_sensitive": CostSensitive,
        "cross_entropy": lambda: cross_entropy,
    }
    if name not in known:
        raise ConfigError(
            f"loss.name={name!r} is none of {', '.join(known)}; name your own function as MODULE:FUNCTION, e.g."
            " torch.nn:CrossEntropyLoss"
        )
    try:
        return known[name](**params)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"loss: {name} does not take {params}: {error}") from error
