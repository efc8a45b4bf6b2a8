"""What is told of a search's queries, and the points that f is fitted to in a long one."""

import math

import pytest
import torch
from torch import Tensor

from helpers.tensors import rand
from metricopt_ext.search import visited
from metricopt_ext.search.visited import Aim, Visited
from metricopt_ext.tasks.evaluation import Evaluation
from metricopt_ext.value.gp import GPLearner, GPValueFunction, Spectrum


def filled(points: Tensor, cost: Tensor, start: int = 0) -> Visited:
    """A search of these points, ``n x d``, that has begun at one of them."""
    return Visited(points[start], list(zip(points, map(Evaluation, cost.tolist()), strict=True)))


def bowl(points: Tensor) -> Tensor:
    return (points - 1).square().sum(1)


def test_a_metric_of_few_values_reacts_by_its_share() -> None:
    visited = Visited(torch.zeros(1), [(torch.full((1,), float(at)), Evaluation(0.5)) for at in range(6)])
    assert not visited.varies()
    assert not visited.reacts()
    visited.add([(torch.ones(1), Evaluation(0.4))])
    assert visited.varies()
    assert not visited.reacts()  # 1 of 7
    visited.add([(torch.ones(1), Evaluation(0.6))])
    assert visited.reacts()  # 2 of 8


def test_chance_is_what_halves_tell_or_else_repeats_or_else_unknown() -> None:
    found = filled(rand(3, 2), torch.arange(3.0))
    repeated = [Evaluation(1.0, noise=0.3), Evaluation(2.0, noise=0.4)]
    with_halves = Evaluation(0.5, pairs=((0.4, 0.6),))
    assert found.chance(repeated[0], repeated[1:]) == pytest.approx((0.3**2 + 0.4**2) ** 0.5)
    assert found.chance(with_halves, repeated) == math.inf  # none of the others has halves
    assert found.chance(with_halves._replace(noise=0.0), repeated) == pytest.approx((2 * 0.25 / 3) ** 0.5)
    assert found.chance(Evaluation(1.0), repeated) == math.inf


# --- Up to the limit ---------------------------------------------------------------------------------------------


def limited(monkeypatch: pytest.MonkeyPatch, judged: int, points: int) -> None:
    monkeypatch.setattr(visited, "MOST_JUDGED", judged)
    monkeypatch.setattr(visited, "MOST_POINTS", points)


# --- Beyond it ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", [0, 70, 249])
def test_beyond_it_they_are_the_first_the_best_and_the_latest(start: int) -> None:
    points = rand(250, 3)
    cost = bowl(points) + 0.3 * rand(250, seed=2)
    found = filled(points, cost, start).selected(100).tolist()
    by_cost = sorted(range(250), key=lambda at: float(cost[at]))
    expected = {start, 0, 1, by_cost[-1], *by_cost[:20]}
    latest = [at for at in reversed(range(250)) if at not in expected]
    assert found == sorted(expected | set(latest[: 100 - len(expected)]))


def test_a_point_that_f_was_not_fitted_to_is_no_best(monkeypatch: pytest.MonkeyPatch) -> None:
    """The latest costs fall along a line; f follows it to where early ones, which it does not know, are high."""
    limited(monkeypatch, 30, 30)
    line = torch.linspace(0, 1, 60, dtype=torch.float64)
    points = torch.cat([torch.tensor([-3.0]), torch.linspace(1.1, 1.4, 20), line])[:, None]
    found = filled(points, torch.cat([torch.tensor([9.0]), torch.full((20,), 5.0), -line]))
    known = found.fitted()
    assert known.tolist() == [0, *range(52, 81)]
    f = GPValueFunction.conditioned(points[known], found.cost[known], torch.eye(1), 1e-3)
    assert int(f.mean(points).argmin()) in range(1, 21)
    order = Aim(f, [], found).order()
    assert sorted(order.tolist()) == known.tolist()
    torch.testing.assert_close(f.mean(points[order]), f.mean(points[known]).sort().values)  # but for rounding


def test_hyper_parameters_are_chosen_anew_after_a_quarter_more_points_and_a_last_fit_leaves_no_trace() -> None:
    points = rand(30, 3)
    found = filled(points[:20], bowl(points[:20]))
    for count, last, chosen_at in ((20, True, None), (20, False, 20), (24, False, 20), (25, True, 20), (25, False, 25)):
        found.add([(each, Evaluation(float(bowl(each[None])))) for each in points[len(found.points) : count]])
        found.fit(GPLearner(1.0, Spectrum.flat(3)), last=last)
        assert (found.chosen[0][0] if found.chosen else None) == chosen_at
