"""What is told of a search's queries, and the points that f is fitted to in a long one."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from helpers.tensors import rand
from metricopt_ext.search import visited
from metricopt_ext.search.visited import Aim, Visited
from metricopt_ext.tasks.combine import Combination
from metricopt_ext.tasks.evaluation import Evaluation, Outcome
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


# --- What f is fitted to ---------------------------------------------------------------------------------------


def made_of_outcomes(sign: int, count: int = 20, noise: float | None = None) -> Visited:
    """A worst of two, ``right`` and ``left``, that are linear but for a little; ``size`` is only bounded."""
    points = rand(count, 3)
    found = Visited(points[0])
    found.combination = Combination("worst", sign, bounded=("size",))
    for point, wobble in zip(points, 0.2 * rand(count, 2, seed=2), strict=True):
        values = {"right": point[0] + wobble[0], "size": 50 * point.norm(), "left": 0.2 - 2 * point[0] + wobble[1]}
        outcomes = {name: Outcome(float(value)) for name, value in values.items()}
        if noise is not None:
            outcomes["left"] = outcomes["left"]._replace(noise=noise)
        value, _ = found.combination.value_of(outcomes)
        found.add([(point, Evaluation(value, outcomes=outcomes, sign=sign))])
    return found


@pytest.mark.parametrize("sign", [1, -1])
def test_f_is_of_the_outcomes_that_are_combined_as_costs(sign: int) -> None:
    """In the order in which they are told, and the best of f is the best of the metric."""
    found = made_of_outcomes(sign)
    f = found.fit(GPLearner(1.0, Spectrum.flat(3)), last=True).f
    values = torch.tensor([[e.outcomes[name].value for name in ("right", "left")] for e in found.evaluations])
    torch.testing.assert_close(f.outcome_mean, sign * values.double().mean(0), rtol=1e-6, atol=1e-6)
    assert f.combination is not None
    assert f.combination.combined == ("right", "left")
    whole = values.amax(1) if sign > 0 else values.amin(1)
    assert float(f.cost_mean) == pytest.approx(sign * float(whole.mean()), rel=1e-6)
    predicted = f.members(found.phi)[:, 0]
    assert float(torch.corrcoef(torch.stack([predicted, found.cost]))[0, 1]) > 0.9


@pytest.mark.parametrize("sign", [1, -1])
def test_an_outcomes_promise_is_its_own_and_turned_as_its_cost_is(sign: int) -> None:
    """Along what it promises the outcome rises, and its cost with it if lower is better; the other's has none."""
    found, along = made_of_outcomes(sign), torch.tensor([-1.0, 0.0, 0.0], dtype=torch.float64)
    found.promised = {"left": along}
    f = found.fit(GPLearner(1.0, Spectrum.flat(3)), last=True).f
    slopes = f.trend * f.outcome_std[:, None]
    assert torch.equal(slopes[0], torch.zeros(3, dtype=torch.float64))
    (left,) = np.polyfit(found.phi[:, 0].numpy(), [e.outcomes["left"].value for e in found.evaluations], 1)[:1]
    torch.testing.assert_close(slopes[1], sign * float(-left) * along, rtol=1e-9, atol=0)
    assert 1.8 < -left < 2.2
    found.promised = {"size": along, "other": along}  # which f does not read
    assert not found.fit(GPLearner(1.0, Spectrum.flat(3)), last=True).f.trend.any()


def test_noise_that_repeats_show_is_that_of_its_outcome() -> None:
    found, learner = made_of_outcomes(1, 40, noise=0.9), GPLearner(1.0, Spectrum.flat(3))
    f = found.fit(learner, last=True).f
    right, left = (f.outcome_std * (f.variance * f.noise).sqrt()).tolist()
    assert left >= 0.9
    assert right < 0.4
    plain = made_of_outcomes(1, 40).fit(learner, last=True).f
    assert float((plain.outcome_std * (plain.variance * plain.noise).sqrt())[1]) < 0.4


# --- Up to the limit ---------------------------------------------------------------------------------------------


def limited(monkeypatch: pytest.MonkeyPatch, judged: int, points: int) -> None:
    monkeypatch.setattr(visited, "MOST_JUDGED", judged)
    monkeypatch.setattr(visited, "MOST_POINTS", points)


# --- Beyond it ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", [0, 70, 249])
def test_beyond_it_they_are_the_first_the_best_and_the_latest(start: int) -> None:
    points = rand(250, 3)
    cost = bowl(points) + 0.3 * rand(250, seed=2)
    visited = filled(points, cost, start)
    found = visited.selected(100, visited.cost).tolist()
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
