"""Adam as a step rule of rollouts, an ablation of `Recipe`."""

import torch
from torch import Tensor

from metricopt_ext.methods.algorithm1 import LossOptimizer
from metricopt_ext.tasks.trajectories import Policy


class AdamPolicy:
    """A step rule that is given Adam's directions in place of the loss gradients; it has state, one for each rollout.

    Args:
        policy: The step rule, `optimizer.MetricOptStep` or `optimizer.LossStep`; its ``lr`` is Adam's.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.adam = LossOptimizer("adam", 1.0)
        self.past: list[Tensor] = []

    def __call__(self, phi: Tensor, history: Tensor, step: int) -> Tensor:
        """Return the next phi, ``n x d``, given its loss gradients so far, ``n x k x d``."""
        self.past = [*self.past, self.adam.step(history[..., -1, :])][-history.shape[-2] :]
        return self.policy(phi, torch.stack(self.past, -2), step)
