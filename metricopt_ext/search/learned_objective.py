"""What a learned optimizer is trained for: a better metric and a lower loss all along the way (supplement B, Eq. 6)."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import softplus

from metricopt_ext.utils.checks import check_above, check_at_least


def metric_term(costs: Tensor, sharpness: float, floor: float) -> Tensor:
    """Return L_metric = mean_t log(1 + exp(beta (m_t - m_t') / m_t)) with t' = argmin_{i < t} m_i, ``...`` (Eq. 6).

    The denominator is the size of m_t, at least ``floor``: a value function may well predict a cost of 0 or below.

    Args:
        costs: Predicted costs m_0 ... m_T, ``... x (T + 1)``.
        sharpness: beta.
        floor: Least denominator.
    """
    best = costs.cummin(-1).values[..., :-1]
    later = costs[..., 1:]
    return softplus(sharpness * (later - best) / later.abs().clamp(min=floor)).mean(-1)


def loss_term(loss: Tensor, offset: float) -> Tensor:
    """Return L_loss = mean_t (log(l_t + eps) - log(l_0 + eps)), ``...`` (Eq. 6).

    Args:
        loss: Losses l_0 ... l_T, ``... x (T + 1)``; what is below 0 counts as 0.
        offset: eps.
    """
    logarithm = (loss.clamp(min=0) + offset).log()
    return logarithm[..., 1:].mean(-1) - logarithm[..., 0]


@dataclass(frozen=True)
class LearnedObjective:
    """L_opt = lambda L_metric + L_loss (Eq. 6).

    Attributes:
        metric_weight: lambda; 50 in the paper.
        sharpness: beta; None for the paper's T/2.
        loss_offset: eps, "small" in the paper.
        cost_floor: Least size of a cost that another is divided by, in units of the cost.
    """

    metric_weight: float = 50.0
    sharpness: float | None = None
    loss_offset: float = 1e-3
    cost_floor: float = 1e-2

    def __post_init__(self) -> None:
        """Reject what the terms are not defined for.

        Raises:
            ValueError: A value is out of range; the message gives it.
        """
        check_at_least(0, metric_weight=self.metric_weight)
        check_above(0, sharpness=self.sharpness, loss_offset=self.loss_offset, cost_floor=self.cost_floor)

    def __call__(self, costs: Tensor, loss: Tensor) -> Tensor:
        """Return the objective of each finetuning run, ``...``.

        Args:
            costs: The costs that f predicts at phi_0 ... phi_T, ``... x (T + 1)``.
            loss: The losses there, ``... x (T + 1)``.
        """
        sharpness = (costs.shape[-1] - 1) / 2 if self.sharpness is None else self.sharpness
        metric = metric_term(costs, sharpness, self.cost_floor).to(loss)
        return torch.add(loss_term(loss, self.loss_offset), metric, alpha=self.metric_weight)
