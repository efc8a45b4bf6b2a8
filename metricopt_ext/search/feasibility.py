"""Where constraints hold: a Gaussian process for each, and the probability that all do, which a guided search heeds.

A proposal minimises f less the logarithm of that probability, as expected improvement is weighted by it in Gelbart et
al. (2014) and Gardner et al. (2014): far inside, the constraints cost nothing; far outside nothing makes up for them.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from metricopt_ext.search.visited import Visited
from metricopt_ext.tasks.constraints import Limits
from metricopt_ext.tasks.evaluation import Evaluation
from metricopt_ext.value.gp import GPValueFunction, Hyperparameters


class Aim:
    """What a guided search goes for: the least f.

    Args:
        f: The value function.
        visited: What it was fitted to.
    """

    def __init__(self, f: GPValueFunction, visited: Visited) -> None:
        self.f, self.visited, self.dim = f, visited, f.dim

    def mean(self, phi: Tensor) -> Tensor:
        """Return what is to be minimised at phi, ``m x d``, in f's standardised units, ``m``, float64."""
        return self.f.mean(phi)

    def deviations(self, count: int, generator: torch.Generator) -> Callable[[Tensor], Tensor]:
        """Draw deviations of samples of f; see `GPValueFunction.deviations`."""
        return self.f.deviations(count, generator)

    def best(self) -> int:
        """Return the index of the visited point to go on from."""
        return self.visited.best(self.f)

    def order(self) -> Tensor:
        """Return the indices of visited points whose mean may be the end, the best first."""
        return self.visited.order(self.f)

    def prefers(self, evaluation: Evaluation, other: Evaluation, slack: float) -> bool:
        """Whether an evaluation is as good as another one, up to a slack in cost."""
        return evaluation.cost <= other.cost + slack


class ConstrainedAim(Aim):
    """The least f where constraints hold; where they hold at no point so far, the point at which they most likely do.

    Args:
        f: The value function.
        visited: What it was fitted to.
        limits: The constraints.
        excesses: For each constraint that varies, the process of how far beyond its limit phi is.
    """

    def __init__(
        self, f: GPValueFunction, visited: Visited, limits: Limits, excesses: tuple[GPValueFunction, ...]
    ) -> None:
        super().__init__(f, visited)
        self.limits, self.excesses = limits, excesses

    def mean(self, phi: Tensor) -> Tensor:
        """Return f less the log-probability that the constraints hold; see `Aim`."""
        return self.f.mean(phi) - self.log_feasible(phi)

    def log_feasible(self, phi: Tensor) -> Tensor:
        """Return the logarithm of the probability that all constraints hold at phi, ``m x d``, as if independent."""
        found = torch.zeros(len(phi), dtype=torch.float64, device=phi.device)
        for excess in self.excesses:
            found = found + log_below_zero(excess, phi.double())
        return found

    def best(self) -> int:
        """Return the index of the best by f where constraints hold, or else where they most likely do."""
        return int(self._ranked()[0])

    def order(self) -> Tensor:
        """Return the indices of the points at which constraints hold, the best by f first; else the likeliest alone."""
        ranked = self._ranked()
        holding = [at for at in ranked.tolist() if self.limits.hold(self.visited.evaluations[at])]
        return torch.tensor(holding, device=ranked.device) if holding else ranked[:1]

    def prefers(self, evaluation: Evaluation, other: Evaluation, slack: float) -> bool:
        """Whether an evaluation is as good as another one, and satisfies the constraints unless neither does."""
        holds, other_holds = self.limits.hold(evaluation), self.limits.hold(other)
        return holds > other_holds or (holds == other_holds and super().prefers(evaluation, other, slack))

    def _ranked(self) -> Tensor:
        """Return the indices of the points that f is fitted to, those at which constraints hold first."""
        visited = self.visited
        at = visited.fitted()
        phi, holds = visited.phi[at], [self.limits.hold(visited.evaluations[each]) for each in at.tolist()]
        violates = ~torch.tensor(holds, device=at.device)
        value = torch.where(violates.all(), -self.log_feasible(phi), self.mean(phi))
        order = value.argsort(stable=True)
        return at[order[violates[order].long().argsort(stable=True)]]


def seen_within(limits: Limits | None, visited: Visited) -> int:
    """Return the index of the point with the least cost of those that satisfy the constraints, or of all if none do."""
    if limits is None:
        return visited.seen()
    holding = [at for at, each in enumerate(visited.evaluations) if limits.hold(each)]
    return min(holding, key=lambda at: visited.evaluations[at].cost) if holding else visited.seen()


def log_below_zero(excess: GPValueFunction, phi: Tensor) -> Tensor:
    """Return the log-probability that what is observed at phi, ``m x d``, is at most 0, ``m``; differentiable."""
    cross = torch.linalg.solve_triangular(excess.root(), excess.kernel(phi).T, upper=False)
    variance = excess.variance * ((1 - cross.square().sum(0)).clamp(min=0) + excess.noise)
    limit = -excess.cost_mean / excess.cost_std
    found: Tensor = torch.special.log_ndtr((limit - excess.mean(phi)) / variance.sqrt())
    return found


@dataclass(frozen=True)
class Feasibility:
    """Fits the processes of constraints as f is fitted: by the same learner, to the same points.

    Attributes:
        chosen: The hyper-parameters of each, and of how many points they were chosen.
    """

    chosen: dict[int, tuple[int, Hyperparameters] | None] = field(default_factory=dict)

    def aim(self, f: GPValueFunction, visited: Visited, limits: Limits, *, last: bool = False) -> ConstrainedAim:
        """Return what a search goes for, given all that was visited.

        Args:
            f: The value function.
            visited: What it was fitted to.
            limits: The constraints.
            last: See `Visited.fit`.
        """
        excesses = list[GPValueFunction]()
        beyond = [limits.excesses(each) for each in visited.evaluations]
        for number in range(len(limits.constraints)):
            seen = visited.of_costs([each[number] for each in beyond])
            if seen.varies():
                seen.chosen = self.chosen.get(number)
                excesses.append(seen.fit(last=last))
                self.chosen[number] = seen.chosen
        return ConstrainedAim(f, visited, limits, tuple(excesses))
