"""Large-margin softmax (Liu et al., 2016): the true class must win by an angle m times as large as it is."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from metricopt_ext.classification.losses import cross_entropy
from metricopt_ext.errors import ConfigError
from metricopt_ext.utils.checks import check_integer

TINY = 1e-12  # least length of features and of a class's weights


class LargeMarginSoftmax:
    """Cross-entropy of logits of which the true class's has |W| |x| psi(theta) for |W| |x| cos(theta) (Eq. 4 to 6).

    theta is the angle between the features x that enter the last linear layer and that class's row W of its weights;
    psi(theta) = (-1)^k cos(m theta) - 2 k for theta in [k pi / m, (k + 1) pi / m]. Biases and whatever an adapter adds
    to the logits stay. A single logit of row W stands for two, of rows W / 2 and -W / 2.

    Args:
        margin: m; 1 is cross-entropy.

    Raises:
        ValueError: The margin is no integer from 1 on.
    """

    def __init__(self, margin: int = 2) -> None:
        check_integer(1, margin=margin)
        self.margin = margin

    def __call__(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        """Return the loss of a model on inputs ``n x ...`` and labels ``n``, a scalar.

        Raises:
            ConfigError: The model's last linear layer was not called once, with features ``n x d`` and a row for each
                logit.
        """
        x, labels = batch
        layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
        seen: list[Tensor] = []
        hooks = [layers[-1].register_forward_pre_hook(lambda layer, given: seen.append(given[0]))] if layers else []
        try:
            logits = model(x)
        finally:
            for hook in hooks:
                hook.remove()
        outputs = 1 if logits.dim() == 1 else logits.shape[1]
        if len(seen) != 1 or seen[0].dim() != 2 or layers[-1].out_features != outputs:
            raise ConfigError(
                "loss.name=large_margin needs a model that ends in one linear layer from features to logits;"
                " choose another loss"
            )
        return cross_entropy(self.with_margin(logits, labels, seen[0], layers[-1].weight), labels)

    def with_margin(self, logits: Tensor, labels: Tensor, features: Tensor, weight: Tensor) -> Tensor:
        """Return the logits, ``n`` or ``n x c``, with the margin: features are ``n x d``, the weight is ``c x d``."""
        if logits.dim() == 1:
            sign = 2 * labels.to(logits) - 1
            rows = sign[:, None] * weight / 2
            return logits + sign * self._change(features, rows)
        true = labels[:, None] == torch.arange(logits.shape[1], device=labels.device)
        return logits + true * self._change(features, weight[labels])[:, None]

    def _change(self, features: Tensor, rows: Tensor) -> Tensor:
        """Return |W| |x| (psi - cos), ``n``, of features and rows, ``n x d`` each."""
        length = (features.norm(dim=1) * rows.norm(dim=1)).clamp(min=TINY)
        cosine = (features * rows).sum(1) / length
        k = (cosine.detach().clamp(-1, 1).acos() * self.margin / math.pi).floor().clamp(max=self.margin - 1)
        psi = (1 - 2 * (k % 2)) * chebyshev(cosine, self.margin) - 2 * k
        change: Tensor = length * (psi - cosine)
        return change


def chebyshev(cosine: Any, degree: int) -> Any:
    """Return cos(degree x angle) of the cosine of an angle, a polynomial, whose slope is finite at the ends."""
    before, now = 1, cosine
    for _ in range(degree - 1):
        before, now = now, 2 * cosine * now - before
    return now
