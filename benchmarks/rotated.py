"""Reuse of a value function on another model (paper, section 4.3): the placebo that shows whether it means anything.

The matrices that turn phi into scales and shifts are random. On a model with other matrices or other layers, the same
phi has another effect, so an f that helps there must be shown to help more than the same f rotated at random.
"""

import copy

import torch
from torch import Tensor

from metricopt_ext.utils.seeding import generator
from metricopt_ext.value.value_function import ValueFunction


class RotatedValueFunction(ValueFunction):
    """f after a random rotation Q: ``f(Q phi)``. As steep and as curved as f, but in meaningless directions.

    Args:
        f: The value function.
        seed: Seed of Q, which is uniform over the orthogonal matrices.
    """

    kind = "rotated"
    rotation: Tensor

    def __init__(self, f: ValueFunction, seed: int) -> None:
        super().__init__(f.dim, f.members_count)
        self.f = copy.deepcopy(f)
        self.quality, self.all_directions = f.quality, f.all_directions
        self.radius, self.gradient_floor = f.radius.clone(), f.gradient_floor.clone()
        self.register_buffer("rotation", random_rotation(f.dim, seed).to(f.radius))
        self.centre = f.centre @ self.rotation

    def members(self, phi: Tensor) -> Tensor:
        """Predict the cost by each member, ``... x M``, at phi, ``... x d``."""
        return self.f.members(phi @ self.rotation.T)


def random_rotation(dim: int, seed: int) -> Tensor:
    """Draw an orthogonal matrix, ``d x d``, uniformly (by QR with the signs of R's diagonal made positive)."""
    gaussian = torch.randn(dim, dim, generator=generator(seed, "rotation"), dtype=torch.float64)
    q, r = torch.linalg.qr(gaussian)
    uniform: Tensor = q * r.diagonal().sign()
    return uniform
