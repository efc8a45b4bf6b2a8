"""The network of a set of Learning Surrogate Losses (Grabocka et al., 2019), Eq. 2, with its derivative written out.

Autograd visits every small operation, which takes three times as long.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

SLOPE = 0.01  # of the leaky ReLU below 0


def forward(inputs: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return h of the mean of g, a scalar, and what the derivative needs."""
    w1, b1, w2, b2, w3, b3, w4, b4, w5, b5 = weights
    a1 = F.leaky_relu(torch.addmm(b1, inputs, w1.t()), SLOPE)
    a2 = F.leaky_relu(torch.addmm(b2, a1, w2.t()), SLOPE)
    mean = a2.mean(0)
    a3 = F.leaky_relu(torch.addmv(b3, w3, mean), SLOPE)
    a4 = F.leaky_relu(torch.addmv(b4, w4, a3), SLOPE)
    return torch.addmv(b5, w5, a4)[0], (inputs, a1, a2, mean, a3, a4, w1, w2, w3, w4, w5)


def to_weights(kept: Sequence[Tensor], gradient: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return the gradient before the first layer, ``N x 30``, and those of all weights."""
    inputs, a1, a2, mean, a3, a4, _, w2, w3, w4, w5 = kept
    d5 = gradient.reshape(1)
    d4 = _below(w5.t() @ d5, a4)
    d3 = _below(w4.t() @ d4, a3)
    d2 = _below((w3.t() @ d3 / len(inputs)).expand_as(a2), a2)
    d1 = _below(d2 @ w2, a1)
    of_g = d1.t() @ inputs, d1.sum(0), d2.t() @ a1, d2.sum(0)
    return d1, (*of_g, torch.outer(d3, mean), d3, torch.outer(d4, a3), d4, torch.outer(d5, a4), d5)


def _to_inputs(kept: Sequence[Tensor], gradient: Tensor) -> Tensor:
    """Return the gradient in the inputs, ``N x 2`` or ``N x 2C``, alone."""
    inputs, a1, a2, _, a3, a4, w1, w2, w3, w4, w5 = kept
    d3 = _below(w4.t() @ _below(w5.t() @ gradient.reshape(1), a4), a3)
    d2 = _below((w3.t() @ d3 / len(inputs)).expand_as(a2), a2)
    return _below(d2 @ w2, a1) @ w1


def _below(gradient: Tensor, activated: Tensor) -> Tensor:
    """Return the gradient before a leaky ReLU from that after it; its output has the sign of its input."""
    return torch.ops.aten.leaky_relu_backward(gradient, activated, SLOPE, True)  # type: ignore[no-any-return]


class SetNetwork(torch.autograd.Function):
    """Eq. 2 for autograd."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, *weights: Tensor) -> Tensor:
        """Return h of the mean of g."""
        loss, kept = forward(inputs, weights)
        ctx.save_for_backward(*kept)
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of inputs and weights; those of weights only if they are trained."""
        kept = ctx.saved_tensors
        if not any(ctx.needs_input_grad[1:]):
            return _to_inputs(kept, gradient), *(None,) * 10
        first, of_weights = to_weights(kept, gradient)
        return first @ kept[6], *of_weights
