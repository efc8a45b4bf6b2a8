"""Losses by which classifiers are trained."""

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from metricopt_ext.classification.predictions import output_of
from metricopt_ext.classification.targets import Target


def classification_loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    """Cross-entropy of ``n`` or ``n x c`` logits for inputs ``n x ...`` and labels ``n``."""
    x, y = batch
    return cross_entropy(model(x), y)


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of one logit per example, ``n``, or of ``n x c`` logits."""
    if logits.dim() == 1:
        return F.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype))
    return F.cross_entropy(logits, labels)


def loss_of(target: Target) -> Callable[[nn.Module, Any], Tensor]:
    """Return the loss of a model on a batch, inputs ``n x ...`` and labels, for what it predicts."""
    if target.kind == "classes":
        return classification_loss
    return lambda model, batch: target.loss(output_of(model(batch[0])), batch[1])
