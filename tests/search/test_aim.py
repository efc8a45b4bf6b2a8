"""The probability that constraints hold, against a Gaussian process's definition, and what a search makes of it."""

from statistics import NormalDist

import numpy as np
import pytest
import torch
from torch import Tensor

from metricopt_ext.search.visited import Aim, Visited, log_below_zero
from metricopt_ext.tasks.constraints import Limits, parse_constraints
from metricopt_ext.tasks.evaluation import Evaluation, Outcome
from metricopt_ext.value.gp import GPLearner, GPValueFunction, Spectrum, rbf

DIM = 3


def points(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, DIM, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def visited_with(bound: str, count: int = 20) -> Visited:
    """Points with |phi - 1|^2 as the cost and their first coordinate, which a constraint bounds."""

    def evaluation(phi: Tensor) -> Evaluation:
        outcomes = {"first": Outcome(float(phi[0])), "flat": Outcome(2.0)}
        return Evaluation(float((phi - 1).square().sum()), outcomes=outcomes)

    start = torch.zeros(DIM, dtype=torch.float64)
    visited = Visited(start, [(phi, evaluation(phi)) for phi in (start, *points(count - 1))])
    visited.limits = Limits.of(parse_constraints({"first": bound, "flat": ">= 1"}, "cost"), visited.started[1])
    return visited


def aim_of(visited: Visited) -> Aim:
    return visited.fit(GPLearner(1.0, Spectrum.flat(DIM)), last=True)


def unlimited(visited: Visited) -> Visited:
    """The same without constraints."""
    other = visited.with_more([])
    other.limits = None
    return other


def test_the_probability_is_the_process_own() -> None:
    phi, new = points(9), points(5, seed=1)
    values = phi[:, 0] + 0.3 * phi[:, 1].square()
    excess = GPValueFunction.conditioned(phi, values, 0.4 * torch.eye(DIM, dtype=torch.float64), 0.05)
    found = log_below_zero(excess, new)
    cross = rbf(0.4 * new, 0.4 * phi)
    inverse = torch.linalg.inv(rbf(0.4 * phi, 0.4 * phi) + 0.05 * torch.eye(9, dtype=torch.float64))
    share = 1 - (cross @ inverse * cross).sum(1) + 0.05  # of what is observed, in units of the process's variance
    deviation = excess.cost_std * (excess.variance * share).sqrt()
    means = excess.cost_mean + excess.cost_std * excess.mean(new)
    for at, (mean, std) in enumerate(zip(means.tolist(), deviation.tolist(), strict=True)):
        assert float(found[at].exp()) == pytest.approx(NormalDist(mean, std).cdf(0.0), abs=1e-9)


@pytest.mark.parametrize(("bound", "sign"), [("<= 0.5", 1), (">= -0.5", -1)])
def test_what_is_promised_of_a_bounded_quantity_tells_where_it_holds(bound: str, sign: int) -> None:
    """It rises along the first axis: the excess is the promise, in the limit's direction, and what is left of it."""
    visited, new = visited_with(bound), points(5, seed=1)
    first = visited.phi[:, 0] + 0.3 * (3 * visited.phi[:, 1]).sin()
    visited.evaluations = [
        each._replace(outcomes={**each.outcomes, "first": Outcome(value)})
        for each, value in zip(visited.evaluations, first.tolist(), strict=True)
    ]
    visited.promised = {"first": torch.eye(DIM, dtype=torch.float64)[0]}
    aim = aim_of(visited)
    (excess,) = aim.excesses
    slope, _ = np.polyfit(visited.phi[:, 0].numpy(), first.numpy(), 1)
    rest = sign * (first - slope * visited.phi[:, 0]) - 0.5
    process = GPValueFunction.conditioned(visited.phi, rest, excess.transform, excess.noise)
    means = process.members(new)[:, 0] + sign * slope * new[:, 0]
    stds = process.cost_std * (process.variance * (process.unknown(new) + process.noise))[:, 0].sqrt()
    expected = [NormalDist(*each).cdf(0.0) for each in zip(means.tolist(), stds.tolist(), strict=True)]
    assert aim.log_feasible(new).exp().tolist() == pytest.approx(expected, abs=1e-9)
    far = 100 * torch.eye(DIM, dtype=torch.float64)[:1]
    assert float(aim.log_feasible(-sign * far)) == pytest.approx(0, abs=1e-6)
    assert float(aim.log_feasible(sign * far)) < -100


def test_it_has_a_gradient_everywhere_also_at_a_visited_point() -> None:
    visited = visited_with("<= 0.5")
    aim = aim_of(visited)
    phi = torch.cat([visited.phi[:2], 50 * points(2)]).requires_grad_(True)
    (gradient,) = torch.autograd.grad(aim.mean(phi).sum(), phi)
    assert gradient.isfinite().all()
    assert len(aim.excesses) == 1, "a quantity that never varies has no process"
    assert torch.equal(aim.mean(phi), aim.f.mean(phi) - aim.log_feasible(phi))


def test_the_best_is_one_at_which_the_constraints_hold() -> None:
    visited = visited_with("<= 0.5")
    aim, plain = aim_of(visited), aim_of(unlimited(visited))
    order, by_f = aim.order().tolist(), plain.order().tolist()
    assert float(visited.phi[by_f[0], 0]) > 0.5, "f alone would go beyond the limit"
    assert float(visited.phi[order[0], 0]) <= 0.5
    assert sorted(order) == [at for at in range(20) if float(visited.phi[at, 0]) <= 0.5]
    value = aim.mean(visited.phi[order])
    assert bool((value.diff() >= 0).all())
    assert by_f == plain.f.mean(visited.phi).argsort().tolist()
    assert torch.equal(plain.mean(visited.phi), aim.f.mean(visited.phi))


def test_where_they_hold_nowhere_the_likeliest_is_the_best() -> None:
    visited = visited_with("<= -4")
    aim = aim_of(visited)
    likeliest = int(aim.log_feasible(visited.phi).argmax())
    assert aim.order().tolist() == [likeliest]
    assert float(visited.phi[likeliest, 0]) < float(visited.phi[:, 0].sort().values[3])


def test_an_end_that_violates_is_preferred_to_none_that_holds() -> None:
    visited = visited_with("<= 0.5")
    plain = unlimited(visited)

    def at(cost: float, first: float) -> Evaluation:
        return Evaluation(cost, outcomes={"first": Outcome(first), "flat": Outcome(2.0)})

    assert not visited.as_good(at(0.1, 0.6), at(0.9, 0.4), 0.0)
    assert plain.as_good(at(0.1, 0.6), at(0.9, 0.4), 0.0)
    assert visited.as_good(at(0.9, 0.4), at(0.1, 0.6), 0.0)
    for first in (0.4, 0.6):
        assert visited.as_good(at(0.2, first), at(0.1, first), 0.1)
        assert not visited.as_good(at(0.2, first), at(0.1, first), 0.05)


def test_of_what_was_seen_the_least_that_the_constraints_allow_is_the_best() -> None:
    visited = visited_with("<= 0.5")
    first, cost = visited.phi[:, 0], visited.cost
    at = visited.best_seen()
    assert at == int(torch.where(first <= 0.5, cost, torch.inf).argmin())
    assert unlimited(visited).best_seen() == int(cost.argmin()) != at
    assert visited_with("<= -9").best_seen() == int(cost.argmin())
