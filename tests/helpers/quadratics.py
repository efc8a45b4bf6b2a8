"""Diagonal quadratics as value functions: known exactly, and fitted at once."""

from dataclasses import dataclass

import torch
from torch import Tensor

from metricopt_ext.value.observations import Observations
from metricopt_ext.value.value_function import ValueFunction


class Quadratic(ValueFunction):
    """Each member is ``intercept + sum_i b_i phi_i + q_i phi_i^2``; the coefficients are b and then q, ``2d x M``."""

    kind = "quadratic"
    intercept: Tensor
    coefficients: Tensor

    def __init__(self, dim: int, members: int = 1) -> None:
        super().__init__(dim, members)
        self.register_buffer("intercept", torch.zeros(members, dtype=torch.float64))
        self.register_buffer("coefficients", torch.zeros(2 * dim, members))

    def members(self, phi: Tensor) -> Tensor:
        return (torch.cat([phi, phi**2], -1) @ self.coefficients).double() + self.intercept


@dataclass(frozen=True)
class QuadraticLearner:
    """Fits a `Quadratic` by ridge regression on standardised features; a learner that takes no time.

    Attributes:
        penalty: Of the squared coefficients, per point.
    """

    penalty: float = 1e-3

    def __call__(self, data: Observations, fold: Tensor, folds: int, seed: int) -> Quadratic:
        f = Quadratic(data.phi.shape[-1], folds)
        for member in range(folds):
            phi, cost = data.phi[fold != member].double(), data.cost[fold != member]
            features = torch.cat([phi, phi**2], -1)
            mean, std = features.mean(0), features.std(0)
            x = (features - mean) / std
            gram = x.T @ x + len(x) * self.penalty * torch.eye(x.shape[1], dtype=x.dtype)
            coefficients = torch.linalg.solve(gram, x.T @ (cost - cost.mean())) / std
            f.coefficients[:, member] = coefficients
            f.intercept[member] = cost.mean() - mean @ coefficients
        return f
