"""What a search would climb in chance alone, on chance whose climb is known."""

import math

import pytest
import torch
from torch import Tensor

from helpers.tensors import rand
from metricopt_ext.search.climb import LOWERED, climb_of_chance
from metricopt_ext.tasks.combine import Combination, Combine
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


# --- Of several outcomes -----------------------------------------------------------------------------------------


def of_outcomes(
    combine: Combine, slopes: Tensor, *, sign: int = 1, true: float = 0.0, points: int = 60, level: Tensor | None = None
) -> tuple[GPValueFunction, Tensor]:
    """f of as many bowls as there are slopes, ``m x d``, along which each one's halves differ; cf. `fitted`.

    Args:
        true: By how much of the bowl both halves move; of nothing that they agree on they are not sure.
        level: Each bowl's cost at the start, ``m``.
    """
    dim = slopes.shape[1]
    phi = rand(points, dim, seed=0)
    phi[0] = 0
    costs = phi.square().sum(1)[:, None] + (torch.zeros(len(slopes)) if level is None else level)
    chosen = Hyperparameters(0.0, 5.6, (1e-3,) * len(slopes))
    f = GPLearner(1.0, Spectrum.flat(dim))(phi, costs, chosen, combination=Combination(combine, sign))
    apart = phi @ slopes.T
    return f, torch.stack([apart, -apart], 1) + true * costs[:, None]


def orthogonal(count: int, dim: int) -> Tensor:
    """Slopes of length 0.3, all at right angles."""
    return 0.3 * torch.linalg.qr(rand(dim, dim, seed=3))[0][:count]


def climb(f: GPValueFunction, halves: Tensor, radius: float = 1.0) -> float:
    end = radius * torch.nn.functional.normalize(rand(f.dim, seed=9), dim=0)
    return climb_of_chance(f, halves, f.points[0], end)


@pytest.mark.parametrize("combine", ["worst", "mean"])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_single_outcome_climbs_as_a_metric_that_is_a_number(combine: Combine, sign: int) -> None:
    plain, halves = fitted(3, 40)
    f, same = of_outcomes(combine, slope(3)[None], sign=sign, points=40)
    torch.testing.assert_close(same, halves, rtol=0, atol=1e-12)
    end = torch.nn.functional.normalize(rand(3, seed=9), dim=0)
    assert torch.equal(plain.points, f.points)
    expected = climb_of_chance(plain, halves, plain.points[0], end)
    assert climb_of_chance(f, same, f.points[0], end) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("sign", [1, -1])
def test_chance_of_a_worst_is_climbed_where_all_fall_together(count: int, sign: int) -> None:
    """Slopes at right angles let the worst of m fall by 1 / sqrt(m) of what each alone could."""
    f, halves = of_outcomes("worst", orthogonal(count, 6), sign=sign)
    assert climb(f, halves, 0.8) == pytest.approx(0.8 * 0.3 / math.sqrt(count), rel=0.05)


def test_what_one_gains_as_another_loses_is_not_climbed() -> None:
    """Outcomes whose chance is opposite: no way lets the worst of both fall, nor their mean."""
    slopes = torch.stack([slope(3), -slope(3)])
    alone, _ = fitted(3, 60)
    whole = float(slope(3).norm())
    assert whole > 0.15
    for combine in ("worst", "mean"):
        f, halves = of_outcomes(combine, slopes)
        assert climb(f, halves) < 0.05 * whole
    assert climb(alone, of_outcomes("mean", slope(3)[None])[1]) == pytest.approx(whole, rel=0.02)


def test_chance_of_what_is_not_the_worst_is_not_climbed() -> None:
    """Only the other outcome's would be, and that has less."""
    level = torch.tensor([5.0, 0.0])
    for own, other in ((0.02, 0.5), (0.5, 0.02)):
        slopes = torch.stack([own * slope(3), other * slope(3, 1)])
        f, halves = of_outcomes("worst", slopes, level=level)
        assert climb(f, halves) == pytest.approx(float(slopes[0].norm()), rel=0.05)


@pytest.mark.parametrize("combine", ["worst", "mean"])
@pytest.mark.parametrize("sign", [1, -1])
def test_the_order_of_outcomes_does_not_matter(combine: Combine, sign: int) -> None:
    """But for draws of where f is sure, by its noise of a thousandth."""
    slopes, order = torch.stack([slope(3), 2 * slope(3, 1), 0.2 * slope(3, 2)]), [2, 0, 1]
    (f, halves), (other, permuted) = (
        of_outcomes(combine, each, sign=sign, true=0.2) for each in (slopes, slopes[order])
    )
    assert torch.equal(permuted, halves[..., order])
    found = climb(f, halves)
    assert found > 0.03
    assert climb(other, permuted) == pytest.approx(found, rel=0.05)


@pytest.mark.parametrize("count", [2, 5])
@pytest.mark.parametrize("combine", ["worst", "mean"])
@pytest.mark.parametrize("true", [0.0, 0.3])
def test_equal_outcomes_climb_as_one(count: int, combine: Combine, true: float) -> None:
    one, halves = of_outcomes(combine, slope(3)[None], true=true)
    several, more = of_outcomes(combine, slope(3).expand(count, -1), true=true)
    assert climb(several, more) == pytest.approx(climb(one, halves), rel=0.05)


def test_a_mean_of_outcomes_climbs_the_mean_of_their_chance() -> None:
    slopes = torch.stack([slope(3), slope(3, 1), slope(3, 2)])
    f, halves = of_outcomes("mean", slopes)
    assert climb(f, halves) == pytest.approx(float(slopes.mean(0).norm()), rel=0.02)


@pytest.mark.parametrize("combine", ["worst", "mean"])
def test_outcomes_without_chance_or_distance_climb_nothing(combine: Combine) -> None:
    """A difference that is the same everywhere is none of phi's."""
    f, halves = of_outcomes(combine, torch.zeros(3, 4, dtype=torch.float64), true=1.0)
    halves[:, 0] += torch.tensor([0.1, -0.2, 0.0], dtype=torch.float64)
    assert climb(f, halves) == pytest.approx(0, abs=1e-12)  # a sum of three is not quite what they are
    f, halves = of_outcomes(combine, orthogonal(3, 4))
    assert climb_of_chance(f, halves, f.points[0], f.points[0]) == 0


@pytest.mark.parametrize("combine", ["worst", "mean"])
def test_halves_that_have_nothing_in_common_let_some_be_climbed(combine: Combine) -> None:
    f, _ = of_outcomes(combine, orthogonal(3, 4))
    halves = 0.2 * rand(60, 2, 3, seed=8)
    assert climb(f, halves) > 0.01


def test_what_halves_agree_on_holds_chance_of_a_mean_back() -> None:
    """As of one outcome: g' H^-1 g by the share that they agree on, with a quarter left to descent's steps."""
    slopes = torch.stack([slope(2), slope(2, 1)])
    f, halves = of_outcomes("mean", slopes, true=1.0, points=200)
    expected = float(slopes.mean(0).square().sum()) / (2 * reliability_of(halves, LOWERED))
    assert expected < 0.5 * 2 * float(slopes.mean(0).norm())
    assert climb(f, halves, 2.0) == pytest.approx(expected, rel=0.25)
