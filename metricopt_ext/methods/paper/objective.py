"""What an update rule is trained for, and the gradient of that in its weights (supplement, Eqs. 6 and 7)."""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import softplus

FLOOR = 1e-3  # added to a loss before its logarithm is taken
COST_FLOOR = 1e-2  # least size of a cost that Eq. 6 divides by: f may well predict one of 0 or below


def learned_objective(costs: Tensor, loss: Tensor, metric_weight: float = 50.0) -> Tensor:
    """Return L_opt = lambda L_metric + L_loss: a better metric and a lower loss all along the way (Eq. 6).

    L_metric = mean_t log(1 + exp(beta (m_t - m_t') / m_t)) with t' = argmin_{i < t} m_i, where the denominator is the
    size of m_t, at least `COST_FLOOR`, and beta is T/2. L_loss = mean_t (log(l_t + eps) - log(l_0 + eps)), where a loss
    below 0 counts as 0, and eps, "small" in the paper, is `FLOOR`.

    Args:
        costs: The costs m_0 ... m_T that f predicts at phi_0 ... phi_T, ``... x (T + 1)``.
        loss: The losses l_0 ... l_T there, ``... x (T + 1)``.
        metric_weight: lambda; 50 in the paper.

    Returns:
        The objective of each finetuning run, ``...``.
    """
    best, later = costs.cummin(-1).values[..., :-1], costs[..., 1:]
    metric = softplus(later.shape[-1] / 2 * (later - best) / later.abs().clamp(min=COST_FLOOR)).mean(-1).to(loss)
    logarithm = (loss.clamp(min=0) + FLOOR).log()
    return torch.add(logarithm[..., 1:].mean(-1) - logarithm[..., 0], metric, alpha=metric_weight)


def gradient_samples(
    objective: Callable[[Tensor], Tensor], weights: Tensor, noise: Tensor, std: float, *, differentiate: bool = True
) -> tuple[Tensor, Tensor]:
    """Estimate the gradient of an objective that is smoothed by Gaussian noise on the weights (Eq. 7), in two ways.

    L(w) = E_{z ~ N(0, I)} l(w + s z) has two unbiased gradient estimators: the reparameterised one, grad l(w + s z),
    which explodes where l is rough, and the score function's (evolution strategies), l(w + s z) z / s, whose variance
    does not depend on how rough l is. Both are taken from P antithetic pairs of draws.

    Args:
        objective: Returns the values, ``2 x P``, at weights, ``2 x P x W``. Both of a pair must be judged by the same
            l: the same task, start and batches.
        weights: w, ``W``.
        noise: z, ``P x W``, standard normal.
        std: s, above 0.
        differentiate: Whether to make the reparameterised estimates, for which the objective is differentiated.

    Returns:
        The reparameterised estimates, ``P x W``, NaN if they were not asked for; and the score function's, ``P x W``.
    """
    moved = weights.detach() + std * torch.stack([noise, -noise])
    with torch.set_grad_enabled(differentiate):
        values = objective(moved.requires_grad_(differentiate))
    slopes = torch.full_like(noise, math.nan)
    if differentiate:
        slopes = torch.autograd.grad(values.sum(), moved)[0].mean(0)
    above, below = values.detach()
    scores = noise * ((above - below) / (2 * std))[:, None].to(noise)
    return slopes, scores


def combine(first: Tensor, second: Tensor) -> Tensor:
    """Return the mean of two estimators of the same vector, weighted by their inverse variances, ``W``.

    So do Metz et al. (Understanding and correcting pathologies in the training of learned optimizers, ICML 2019). The
    variances are measured on the samples themselves, for each weight; where both are 0, both count the same, and a
    first estimate that is not finite counts nothing.

    Args:
        first: Its samples, ``P x W``, P at least 2.
        second: The other's, ``P x W``.
    """
    usable = first.isfinite().all(0)
    first = first.where(usable, 0.0)
    noise, other = first.var(0), second.var(0)
    total = noise + other
    share = (other / total).where(total > 0, 0.5).where(usable, 0.0)  # of the first
    return share * first.mean(0) + (1 - share) * second.mean(0)
