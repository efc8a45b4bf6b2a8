"""Descent on a smooth function within a ball."""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import normalize

# Steps, and the length of the first in units of the ball's radius.
STEPS, FIRST_STEP = 25, 0.35


def descend(value: Callable[[Tensor], Tensor], phi: Tensor, centre: Tensor, radius: float) -> tuple[Tensor, Tensor]:
    """Minimise functions within a ball by normalised gradient steps that decay to 0.

    Args:
        value: Maps ``m x d`` to each row's own value, ``m``; differentiable.
        phi: Starts, ``m x d``.
        centre: Of the ball, ``d``; or of each row's own ball, ``m x d``.
        radius: Of the ball.

    Returns:
        The best visited points, ``m x d``, and their values, ``m``.
    """
    best, least = phi.clone(), torch.full_like(phi[:, 0], math.inf)
    for step in range(STEPS + 1):
        phi = phi.detach().requires_grad_(True)
        values = value(phi)
        (gradient,) = torch.autograd.grad(values.sum(), phi)
        with torch.no_grad():
            better = values < least
            best[better], least[better] = phi[better], values[better]
            moved = phi - FIRST_STEP * (1 - step / STEPS) * radius * normalize(gradient, dim=1)
            offset = moved - centre
            phi = centre + offset * (radius / offset.norm(dim=1, keepdim=True)).clamp(max=1)
    return best, least


def descend_each(values: Callable[[Tensor], Tensor], starts: Tensor, centre: Tensor, radius: float) -> Tensor:
    """Minimise k functions within a ball, each from s starts.

    Args:
        values: Maps ``m x d`` to what all functions are there, ``m x k``; differentiable.
        starts: Starts of each, ``k x s x d``.
        centre: Of the ball, ``d``.
        radius: Of the ball.

    Returns:
        The best point visited for each, ``k x d``.
    """
    each = torch.arange(len(starts), device=starts.device)
    own = each.repeat_interleave(starts.shape[1])[:, None]
    ends, least = descend(lambda phi: values(phi).gather(1, own)[:, 0], starts.flatten(0, 1), centre, radius)
    return ends.view_as(starts)[each, least.view(starts.shape[:2]).argmin(1)]
