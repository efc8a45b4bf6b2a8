"""Losses of rankings: exact ranks, with a gradient by blackbox differentiation."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def ranking_losses(scores: Tensor, losses: Callable[[Tensor], Tensor], lambda_val: float) -> Tensor:
    """Return the loss of each row's ranking, ``n``.

    With the ranks rk(s) of the scores s, the gradient is that of an interpolation (Rolinek et al., CVPR 2020,
    "Optimizing Rank-based Metrics with Blackbox Differentiation"), row by row:

        d loss / d s = (rk(s + lambda_val * d loss / d rk) - rk(s)) / lambda_val.

    Args:
        scores: What is ranked, ``n x m``; infinite scores rank first or last.
        losses: Turns ranks, ``n x m``, into losses, ``n``; differentiable, and each loss depends on its own row alone.
        lambda_val: How far the interpolation moves the scores, above 0.

    Returns:
        ``n``; NaN for a row with a NaN, which has no rank.
    """
    values: Tensor = _Interpolated.apply(scores, losses, lambda_val)
    return values


class _Interpolated(torch.autograd.Function):
    """The losses of rankings, ``n``, with the gradient of the blackbox interpolation with respect to the scores."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, losses: Callable[[Tensor], Tensor], lambda_val: float) -> Tensor:
        before = ranks(scores)
        with torch.enable_grad():
            before.requires_grad_(True)
            values = losses(before)
            (slope,) = torch.autograd.grad(values.sum(), before)
        if ctx.needs_input_grad[0]:
            ctx.save_for_backward((ranks(scores + lambda_val * slope) - before.detach()) / lambda_val)
        return values.detach().masked_fill(scores.isnan().any(1), torch.nan)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (interpolated,) = ctx.saved_tensors
        return gradient[:, None] * interpolated, None, None


def ranks(scores: Tensor) -> Tensor:
    """Return the rank of each entry in its row, ``n x m``, 1 for the highest; of equals, the first ranks higher."""
    order = scores.argsort(dim=1, descending=True, stable=True)
    places = torch.arange(1, scores.shape[1] + 1, dtype=scores.dtype, device=scores.device)
    return torch.empty_like(scores).scatter_(1, order, places.expand_as(scores))


def positives_up_to(ranks: Tensor, positive: Tensor) -> Tensor:
    """Return how many positives rank no lower than each entry, itself included, ``n x m``; has no gradient."""
    places = ranks.detach().long() - 1
    in_order = torch.zeros_like(positive).scatter_(1, places, positive)
    return in_order.cumsum(dim=1).gather(1, places).to(ranks.dtype)
