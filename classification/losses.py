"""Losses by which classifiers are trained."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from metricopt_ext.classification.predictions import output_of
from metricopt_ext.classification.targets import Target
from metricopt_ext.errors import ConfigError
from metricopt_ext.utils.checks import check_above


def classification_loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    """Cross-entropy of ``n`` or ``n x c`` logits for inputs ``n x ...`` and labels ``n``."""
    x, y = batch
    return cross_entropy(output_of(model(x)), y)


def cross_entropy(logits: Tensor, labels: Tensor, reduction: str = "mean") -> Tensor:
    """Cross-entropy of one logit per example, ``n``, or of ``n x c`` logits; with ``"none"`` of each example, ``n``."""
    if logits.dim() == 1:
        return F.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype), reduction=reduction)
    return F.cross_entropy(logits, labels, reduction=reduction)


class CostSensitive:
    """Cross-entropy in which an example counts by its class's weight, 1 on average over the classes.

    Args:
        weights: One for each class, above 0.

    Raises:
        ValueError: They are none.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        if len(weights) < 2:
            raise ValueError(f"weights is {weights!r}; it must be a number for each class")
        check_above(0, **{f"weights[{i}]": weight for i, weight in enumerate(weights)})
        self.weights = torch.tensor(weights, dtype=torch.float64) * (len(weights) / sum(weights))

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of ``n`` or ``n x c`` logits and labels ``n``, a scalar.

        Raises:
            ConfigError: There are other classes than weights.
        """
        classes = 2 if logits.dim() == 1 else logits.shape[1]
        if classes != len(self.weights):
            raise ConfigError(f"the loss has {len(self.weights)} weights, and the data {classes} classes")
        each = cross_entropy(logits, labels, reduction="none")
        return (self.weights.to(logits)[labels] * each).mean()


def loss_of(target: Target) -> Callable[[nn.Module, Any], Tensor]:
    """Return the loss of a model on a batch, inputs ``n x ...`` and labels, for what it predicts."""
    if target.kind == "classes":
        return classification_loss
    return lambda model, batch: target.loss(output_of(model(batch[0])), batch[1])
