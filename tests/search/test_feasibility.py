"""The probability that constraints hold, against a Gaussian process's definition, and what a search makes of it."""

from statistics import NormalDist

import pytest
import torch
from torch import Tensor

from metricopt_ext.search.feasibility import Aim, ConstrainedAim, Feasibility, log_below_zero, seen_within
from metricopt_ext.search.visited import Visited
from metricopt_ext.tasks.constraints import Limits, parse_constraints
from metricopt_ext.tasks.evaluation import Evaluation, Outcome
from metricopt_ext.value.gp import GPLearner, GPValueFunction, Spectrum, rbf

DIM = 3


def points(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, DIM, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def visited_with(bound: str, count: int = 20) -> tuple[Visited, Limits]:
    """Points with |phi - 1|^2 as the cost and their first coordinate, which a constraint bounds."""
    visited = Visited(torch.zeros(DIM, dtype=torch.float64), GPLearner(1.0, Spectrum.flat(DIM)))
    for phi in torch.cat([torch.zeros(1, DIM, dtype=torch.float64), points(count - 1)]):
        visited.add(
            phi,
            Evaluation(
                float((phi - 1).square().sum()), outcomes={"first": Outcome(float(phi[0])), "flat": Outcome(2.0)}
            ),
        )
    limits = Limits.of(parse_constraints({"first": bound, "flat": ">= 1"}, "cost"), visited.started[1])
    assert limits is not None
    return visited, limits


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


def test_it_has_a_gradient_everywhere_also_at_a_visited_point() -> None:
    visited, limits = visited_with("<= 0.5")
    aim = Feasibility().aim(f := visited.fit(last=True), visited, limits)
    phi = torch.cat([visited.phi[:2], 50 * points(2)]).requires_grad_(True)
    (gradient,) = torch.autograd.grad(aim.mean(phi).sum(), phi)
    assert gradient.isfinite().all()
    assert len(aim.excesses) == 1, "a quantity that never varies has no process"
    assert torch.equal(aim.mean(phi), f.mean(phi) - aim.log_feasible(phi))
    assert aim.dim == DIM


def test_the_best_is_one_at_which_the_constraints_hold() -> None:
    visited, limits = visited_with("<= 0.5")
    f = visited.fit(last=True)
    aim, plain = Feasibility().aim(f, visited, limits), Aim(f, visited)
    assert float(visited.phi[plain.best(), 0]) > 0.5, "f alone would go beyond the limit"
    assert float(visited.phi[aim.best(), 0]) <= 0.5
    order = aim.order().tolist()
    assert order[0] == aim.best()
    assert sorted(order) == [at for at in range(20) if float(visited.phi[at, 0]) <= 0.5]
    value = aim.mean(visited.phi[order])
    assert bool((value.diff() >= 0).all())
    assert plain.order().tolist() == visited.order(f).tolist()


def test_where_they_hold_nowhere_the_likeliest_is_the_best() -> None:
    visited, limits = visited_with("<= -4")
    aim = Feasibility().aim(visited.fit(last=True), visited, limits)
    likeliest = int(aim.log_feasible(visited.phi).argmax())
    assert aim.best() == likeliest
    assert aim.order().tolist() == [likeliest]
    assert float(visited.phi[likeliest, 0]) < float(visited.phi[:, 0].sort().values[3])


def test_an_end_that_violates_is_preferred_to_none_that_holds() -> None:
    visited, limits = visited_with("<= 0.5")
    f = visited.fit(last=True)
    aim, plain = ConstrainedAim(f, visited, limits, ()), Aim(f, visited)

    def at(cost: float, first: float) -> Evaluation:
        return Evaluation(cost, outcomes={"first": Outcome(first), "flat": Outcome(2.0)})

    assert not aim.prefers(at(0.1, 0.6), at(0.9, 0.4), 0.0)
    assert plain.prefers(at(0.1, 0.6), at(0.9, 0.4), 0.0)
    assert aim.prefers(at(0.9, 0.4), at(0.1, 0.6), 0.0)
    for first in (0.4, 0.6):
        assert aim.prefers(at(0.2, first), at(0.1, first), 0.1)
        assert not aim.prefers(at(0.2, first), at(0.1, first), 0.05)


def test_of_what_was_seen_the_least_that_the_constraints_allow_is_the_best() -> None:
    visited, limits = visited_with("<= 0.5")
    first, cost = visited.phi[:, 0], visited.cost
    at = seen_within(limits, visited)
    assert at == int(torch.where(first <= 0.5, cost, torch.inf).argmin())
    assert seen_within(None, visited) == int(cost.argmin()) != at
    visited, nowhere = visited_with("<= -9")
    assert seen_within(nowhere, visited) == int(cost.argmin())
