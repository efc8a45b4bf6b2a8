"""The network of a set of Learning Surrogate Losses (Grabocka et al., 2019), Eq. 2, with its derivative written out.

Autograd visits every small operation, which takes three times as long. Two networks are read into the paper: ``plain``
has a leaky ReLU after each layer but the last; ``published`` is that of the first author's code, with tanh instead,
BatchNorm over the set after g's first layer, and a leaky ReLU on the output. BatchNorm adds its weight and bias to the
weights of the five layers; it has the statistics of the set that it sees, always.
"""

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Network = Literal["plain", "published"]
NETWORKS: tuple[Network, ...] = ("plain", "published")
SLOPE = 0.01  # of the leaky ReLU below 0
OUTPUT_SLOPE = 0.2  # of the published one, TensorFlow's
EPSILON = 1e-3  # of the published BatchNorm's variance, TensorFlow's


def forward(inputs: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return h of the mean of g, a scalar, and what the derivative needs.

    Args:
        inputs: (y, yhat) of each example, ``N x 2`` or ``N x 2C``.
        weights: Weight and bias of each layer, and of BatchNorm, which makes it the published network.
    """
    w1, b1, w2, b2, w3, b3, w4, b4, w5, b5, *norm = weights
    tanh = bool(norm)
    a1 = _activated(torch.addmm(b1, inputs, w1.t()), tanh)
    hidden, *moments = torch.ops.aten.native_batch_norm(a1, *norm, None, None, True, 0.0, EPSILON) if tanh else (a1,)
    a2 = _activated(torch.addmm(b2, hidden, w2.t()), tanh)
    mean = a2.mean(0)
    a3 = _activated(torch.addmv(b3, w3, mean), tanh)
    a4 = _activated(torch.addmv(b4, w4, a3), tanh)
    output = torch.addmv(b5, w5, a4)[0]
    kept = inputs, a1, hidden, a2, mean, a3, a4, w1, w2, w3, w4, w5
    if not tanh:
        return output, kept
    loss = F.leaky_relu(output, OUTPUT_SLOPE)
    return loss, (*kept, norm[0], *moments, loss)


def to_weights(kept: Sequence[Tensor], gradient: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return the gradient before the first layer, ``N x 30``, and those of all weights."""
    inputs, a1, hidden, a2, mean, a3, a4, _, w2, w3, w4, w5, *norm = kept
    tanh = bool(norm)
    d5 = _at_output(gradient, norm)
    d4 = _below(w5.t() @ d5, a4, tanh)
    d3 = _below(w4.t() @ d4, a3, tanh)
    d2 = _below((w3.t() @ d3 / len(inputs)).expand_as(a2), a2, tanh)
    normed, *of_norm = _through_norm(d2 @ w2, a1, norm)
    d1 = _below(normed, a1, tanh)
    of_g = d1.t() @ inputs, d1.sum(0), d2.t() @ hidden, d2.sum(0)
    return d1, (*of_g, torch.outer(d3, mean), d3, torch.outer(d4, a3), d4, torch.outer(d5, a4), d5, *of_norm)


def _to_inputs(kept: Sequence[Tensor], gradient: Tensor) -> Tensor:
    """Return the gradient in the inputs, ``N x 2`` or ``N x 2C``, alone."""
    inputs, a1, _, a2, _, a3, a4, w1, w2, w3, w4, w5, *norm = kept
    tanh = bool(norm)
    d3 = _below(w4.t() @ _below(w5.t() @ _at_output(gradient, norm), a4, tanh), a3, tanh)
    d2 = _below((w3.t() @ d3 / len(inputs)).expand_as(a2), a2, tanh)
    return _below(_through_norm(d2 @ w2, a1, norm)[0], a1, tanh) @ w1


def _activated(values: Tensor, tanh: bool) -> Tensor:
    return values.tanh() if tanh else F.leaky_relu(values, SLOPE)


def _below(gradient: Tensor, activated: Tensor, tanh: bool) -> Tensor:
    """Return the gradient before an activation from that after it; a leaky ReLU's output has the sign of its input."""
    if tanh:
        return torch.ops.aten.tanh_backward(gradient, activated)  # type: ignore[no-any-return]
    return torch.ops.aten.leaky_relu_backward(gradient, activated, SLOPE, True)  # type: ignore[no-any-return]


def _at_output(gradient: Tensor, norm: Sequence[Tensor]) -> Tensor:
    """Return the gradient in the last layer's sum, ``1``."""
    gradient = gradient.reshape(1)
    return torch.where(norm[-1] > 0, gradient, OUTPUT_SLOPE * gradient) if norm else gradient


def _through_norm(gradient: Tensor, a1: Tensor, norm: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the gradient before BatchNorm, ``N x 30``, and those of its weight and bias, if there is one."""
    if not norm:
        return (gradient,)
    weight, mean, inverse, _ = norm
    whole = torch.ops.aten.native_batch_norm_backward(
        gradient, a1, weight, None, None, mean, inverse, True, EPSILON, [True, True, True]
    )
    return tuple(whole)


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
        kept, needed = ctx.saved_tensors, ctx.needs_input_grad[1:]
        if not any(needed):
            return _to_inputs(kept, gradient), *(None,) * len(needed)
        first, of_weights = to_weights(kept, gradient)
        return first @ kept[7], *of_weights
