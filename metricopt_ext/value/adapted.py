"""Adaptation of a value function to a new start, from a few metric queries along that start's finetuning."""

import torch
from torch import Tensor

from metricopt_ext.value.value_function import ValueFunction

# Noise variance relative to the correction's variance: the points lie close together and the metric is not smooth.
NOISE = 0.1


class AdaptedValueFunction(ValueFunction):
    """f plus a smooth correction: the posterior mean of a Gaussian process on f's errors at some points.

    Training f's weights further on the points of a single path, as Reptile would, changed f everywhere and made
    finetuning worse on toy problems whose optimum is known; this correction fades away from the points. The process has
    mean 0, f's data radius as length scale and the mean square of the errors as variance.

    Args:
        f: The fitted value function, of any kind.
        phi: Points of the new start, ``n x d``.
        cost: Their costs, ``n``; the caller has counted the queries.

    Attributes:
        quality: Taken from ``f``, as are the domain and the signature.
    """

    kind = "adapted"
    has_file = False
    points: Tensor
    weights: Tensor

    def __init__(self, f: ValueFunction, phi: Tensor, cost: Tensor) -> None:
        super().__init__(f.dim, f.members_count)
        self.f = f
        self.signature = f.signature
        self.take_domain(f)
        points = phi.detach().to(f.radius)
        with torch.no_grad():
            error = cost.to(points.device).double() - f(points)
        self.register_buffer("points", points)
        gram = self.kernel(points).double() + NOISE * torch.eye(len(points), device=points.device)
        self.register_buffer("weights", torch.linalg.solve(gram, error).to(points))  # the variance cancels
        self.eval().requires_grad_(False)

    def kernel(self, phi: Tensor) -> Tensor:
        """Return the correlation between the correction at phi, ``m x d``, and at the points, ``m x n``."""
        return torch.exp(-((phi[:, None] - self.points).square().sum(-1)) / (2 * self.radius**2))

    def members(self, phi: Tensor) -> Tensor:
        """Predict the cost by each member, ``... x M``, at phi, ``... x d``."""
        correction = self.kernel(phi.reshape(-1, self.dim)) @ self.weights
        return self.f.members(phi) + correction.view(*phi.shape[:-1], 1)
