"""What a search would climb in chance alone, on chance whose climb is known."""

import math

import pytest
import torch
from torch import Tensor

from helpers.tensors import rand
from metricopt_ext.search.climb import LOWERED, climb_of_chance
from metricopt_ext.tasks.split_half import reliability_of
from metricopt_ext.value.gp import GPLearner, GPValueFunction, Hyperparameters, Spectrum


def fitted(
    dim: int, points: int, chance: Tensor | None = None, *, seed: int = 0, true: bool = False
) -> tuple[GPValueFunction, Tensor]:
    """f of a bowl, smooth over the points, the start first, and halves, ``n x 2 x 1``, twice a chance, ``n``, apart.

    Args:
        true: Whether the bowl is in both halves; else they agree on nothing.
    """
    phi = rand(points, dim, seed=seed)
    phi[0] = 0
    cost = phi.square().sum(1)
    f = GPLearner(1.0, Spectrum.flat(dim))(phi, cost, Hyperparameters(0.0, 5.6, (1e-3,)))
    apart = phi @ slope(dim, seed) if chance is None else chance
    return f, (torch.stack([apart, -apart], 1) + (cost[:, None] if true else 0))[..., None]


def slope(dim: int, seed: int = 0) -> Tensor:
    return 0.3 * rand(dim, seed=seed + 100)


@pytest.mark.parametrize(("dim", "points"), [(1, 8), (3, 40), (8, 60)])
@pytest.mark.parametrize("radius", [0.5, 1.5])
def test_where_nothing_is_true_chance_is_climbed_along_its_slope(dim: int, points: int, radius: float) -> None:
    """By its length times the distance, whichever way the end lies; f, of unit noise 1e-3, knows it to 2%."""
    f, halves = fitted(dim, points)
    end = radius * torch.nn.functional.normalize(rand(dim, seed=9), dim=0)
    assert climb_of_chance(f, halves, f.points[0], end) == pytest.approx(radius * float(slope(dim).norm()), rel=0.02)


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_a_bowl_of_truth_holds_chance_back(dim: int) -> None:
    """Takeuchi's g' H^-1 g, of H = 2 I times the share that the halves agree on; descent's steps leave a quarter."""
    f, halves = fitted(dim, 200, true=True)
    end = 2 * torch.nn.functional.normalize(rand(dim, seed=9), dim=0)
    expected = float(slope(dim).square().sum()) / (2 * reliability_of(halves, LOWERED))
    assert expected < 0.5 * 2 * float(slope(dim).norm())  # all that the ball would allow
    assert climb_of_chance(f, halves, f.points[0], end) == pytest.approx(expected, rel=0.25)


def test_without_chance_or_distance_nothing_is_climbed() -> None:
    f, halves = fitted(3, 40, torch.full((40,), 0.25, dtype=torch.float64))
    assert climb_of_chance(f, halves, f.points[0], f.points[1]) == 0
    f, halves = fitted(3, 40)
    assert climb_of_chance(f, halves, f.points[0], f.points[0]) == 0


@pytest.mark.outcome
def test_more_directions_are_more_to_climb() -> None:
    """Chance of deviation 0.3 at distance 1 in each direction: the chi distribution's mean, whose deviation is .71."""
    for dim in (2, 9):
        found = []
        for seed in range(20):
            f, halves = fitted(dim, 60, seed=seed)
            found.append(climb_of_chance(f, halves, f.points[0], torch.nn.functional.normalize(f.points[1], dim=0)))
        expected = 0.3 * math.sqrt(2) * math.exp(math.lgamma((dim + 1) / 2) - math.lgamma(dim / 2))
        assert sum(found) / 20 == pytest.approx(expected, abs=3 * 0.3 * 0.71 / math.sqrt(20))
