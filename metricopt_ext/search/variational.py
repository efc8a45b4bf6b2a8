"""Gradients of an objective that is smoothed by Gaussian noise on the weights (supplement B, Eq. 7).

L(w) = E_{z ~ N(0, I)} l(w + s z) has two unbiased gradient estimators: the reparameterised one, grad l(w + s z), which
explodes where l is rough, and the score function's (evolution strategies), l(w + s z) z / s, whose variance does not
depend on how rough l is. Metz et al. (Understanding and correcting pathologies in the training of learned optimizers,
ICML 2019) weigh them by their inverse variances.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Samples(NamedTuple):
    """Gradient estimates from P antithetic pairs of draws.

    Attributes:
        reparameterised: ``P x W``; None if they were not asked for.
        score: ``P x W``.
        values: The objective at w + s z and at w - s z, ``2 x P``.
    """

    reparameterised: Tensor | None
    score: Tensor
    values: Tensor


def gradient_samples(
    objective: Callable[[Tensor], Tensor], weights: Tensor, noise: Tensor, std: float, *, differentiate: bool = True
) -> Samples:
    """Estimate the gradient of the smoothed objective from each antithetic pair, in both ways.

    Args:
        objective: Returns the values, ``2 x P``, at weights, ``2 x P x W``. Both of a pair must be judged by the same
            l: the same task, start and batches.
        weights: w, ``W``.
        noise: z, ``P x W``, standard normal.
        std: s, above 0.
        differentiate: Whether to make the reparameterised estimates, for which the objective is differentiated.
    """
    moved = weights.detach() + std * torch.stack([noise, -noise])
    with torch.set_grad_enabled(differentiate):
        values = objective(moved.requires_grad_(differentiate))
    slope = None
    if differentiate:
        (gradient,) = torch.autograd.grad(values.sum(), moved)
        slope = gradient.mean(0)
    values = values.detach()
    score = noise * ((values[0] - values[1]) / (2 * std))[:, None].to(noise)
    return Samples(slope, score, values)


def combine(first: Tensor, second: Tensor) -> Tensor:
    """Return the mean of two estimators of the same vector, weighted by their inverse variances, ``W``.

    The variances are measured on the samples themselves, for each weight; where both are 0, both count the same, and a
    first estimate that is not finite counts nothing.

    Args:
        first: Its samples, ``P x W``, P at least 2.
        second: The other's, ``P x W``.
    """
    usable = first.isfinite().all(0)
    first = first.where(usable, torch.zeros_like(first))
    noise, other = first.var(0), second.var(0)
    total = noise + other
    share = (other / total).where(total > 0, torch.full_like(total, 0.5))  # of the first
    share = share.where(usable, torch.zeros_like(share))
    return share * first.mean(0) + (1 - share) * second.mean(0)
