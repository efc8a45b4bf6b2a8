"""What a search has queried, and the value functions fitted to it."""

import copy
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple, Self, TypeAlias

import torch
from torch import Tensor

from metricopt_ext.tasks.combine import Combination
from metricopt_ext.tasks.constraints import Limits
from metricopt_ext.tasks.evaluation import Evaluation, noise_of
from metricopt_ext.tasks.split_half import chance_of_gain, fault_of_halves
from metricopt_ext.utils.threads import num_threads
from metricopt_ext.value.gp import GPLearner, GPValueFunction, Hyperparameters

# Hyper-parameters are chosen anew once there are this many times as many points as at the last time.
REFIT = 1.25

# Hyper-parameters are judged by at most so many points, which takes half a second (1,500 took a quarter of a minute),
# and f is fitted to at most so many, a twentieth of a second. Of these, so large shares are the first and the best.
MOST_JUDGED, MOST_POINTS = 500, 1500
FIRST_SHARE, BEST_SHARE = 1 / 50, 1 / 5

# Evaluations, at least, that tell how large chance is near the best; fewer have too few differences.
LEAST_TELLING = 8

# The metric reacts to phi if this share of the points have another cost than most.
REACTING = 0.25

# Points that were evaluated, ``d`` each.
Known: TypeAlias = Sequence[tuple[Tensor, Evaluation]]


def ranked(evaluation: Evaluation, limits: Limits | None) -> tuple[bool, float]:
    """Return what is least of the best evaluation: one that violates a constraint is behind all that violate none."""
    return limits is not None and not limits.hold(evaluation), evaluation.cost


class Visited:
    """What a search has queried, and the value functions fitted to it.

    Args:
        start: phi_0, ``d``.
        known: What was evaluated before, the start among it; empty if nothing was.

    Attributes:
        points: The visited phi, ``d`` each, in the order in which they were asked.
        evaluations: The metric's evaluations of them.
        limits: The metric's constraints; None without any.
        combination: How outcomes make the metric; None of a metric that is a number.
        promised: Along which direction, ``d``, an outcome rises by what its own loss promises, by the outcome's name.
        chosen: The hyper-parameters of f, 0, and of each constraint's process, from 1 on, and of how many points they
            were chosen.
    """

    limits: Limits | None = None
    combination: Combination | None = None

    def __init__(self, start: Tensor, known: Known = ()) -> None:
        self.start: Tensor = start
        self.points: list[Tensor] = [point for point, _ in known]
        self.evaluations: list[Evaluation] = [evaluation for _, evaluation in known]
        self.promised: dict[str, Tensor] = {}
        self.chosen: dict[int, tuple[int, Hyperparameters]] = {}

    def add(self, evaluated: Known) -> None:
        """Add queried points."""
        self.points += [point for point, _ in evaluated]
        self.evaluations += [evaluation for _, evaluation in evaluated]

    def with_more(self, evaluated: Known) -> Self:
        """Return the same with more points, which this one does not get."""
        more = copy.copy(self)
        more.points, more.evaluations = list(self.points), list(self.evaluations)
        more.add(evaluated)
        return more

    @property
    def started(self) -> tuple[Tensor, Evaluation]:
        """The start and its evaluation."""
        return next((p, e) for p, e in zip(self.points, self.evaluations, strict=True) if torch.equal(p, self.start))

    @property
    def phi(self) -> Tensor:
        """The visited points, ``n x d``, float64."""
        return torch.stack(self.points).double()

    @property
    def cost(self) -> Tensor:
        """Their costs, ``n``, float64."""
        return self._numbers([each.cost for each in self.evaluations])

    def _numbers(self, numbers: Iterable[float]) -> Tensor:
        return torch.tensor(list(numbers), dtype=torch.float64, device=self.start.device)

    def varies(self) -> bool:
        """Whether not all costs are equal."""
        return bool(self.cost.min() < self.cost.max())

    def reacts(self) -> bool:
        """Whether the metric reacts to phi: enough points have another cost than most."""
        return bool((self.cost != self.cost.mode().values).double().mean() >= REACTING)

    def holds(self, evaluation: Evaluation) -> bool:
        """Whether an evaluation satisfies the constraints."""
        return self.limits is None or self.limits.hold(evaluation)

    def best_seen(self) -> int:
        """Return the index of the least cost, the first of equals, where the constraints hold if they do anywhere."""
        return min(range(len(self.points)), key=lambda at: ranked(self.evaluations[at], self.limits))

    def as_good(self, evaluation: Evaluation, other: Evaluation, slack: float) -> bool:
        """Whether an evaluation is as good as another one, up to a slack in cost; violating constraints is worse."""
        return ranked(evaluation, self.limits) <= (not self.holds(other), other.cost + slack)

    def chance(self, evaluation: Evaluation, among: Sequence[Evaluation]) -> float:
        """Return the standard deviation of what is chance in the difference of an evaluation from others.

        It is what the metric's halves or repeats show (`chance_of_gain`), and infinite where nothing tells.
        """
        halved = [each for each in among if each.halves is not None]
        if evaluation.halves is not None and halved and not fault_of_halves(self.evaluations):
            return chance_of_gain(evaluation, halved)
        noise = noise_of([evaluation, *among]) if evaluation.noise is not None else math.inf
        return math.sqrt(2) * noise

    def best_quarter(self) -> list[Evaluation]:
        """Return the evaluations of the best quarter of the points, of eight at least, the best first."""
        ranked = sorted(self.evaluations, key=lambda each: each.cost)
        return ranked[: max(LEAST_TELLING, math.ceil(len(ranked) / 4))]

    def selected(self, most: int, cost: Tensor) -> Tensor:
        """Return the indices, ascending, of that many points, or of all if there are no more.

        They are the start and what was asked first, the worst, the best, and the latest, which are where the search
        goes on. (Were all chosen by their cost, or by where the best is, luck in the costs would have chosen them.)

        Args:
            most: How many.
            cost: What is least of the best, ``n``.
        """
        order, rank = cost.argsort(stable=True), torch.arange(len(cost), 0, -1, device=cost.device)
        rank[(self.phi == self.start).all(dim=1)] = 0  # f is asked for the gain over it
        rank[: int(FIRST_SHARE * most)] = 0
        rank[order[-1]] = 0  # costs vary if any do
        rank[order[: int(BEST_SHARE * most)]] = 0
        return rank.argsort(stable=True)[:most].sort().values

    def fitted(self) -> Tensor:
        """Return the indices of the points that f is fitted to, ascending."""
        return self.selected(MOST_POINTS, self.cost)

    @num_threads(1)
    def fit(self, learner: GPLearner, *, last: bool = False) -> "Aim":
        """Fit f to the metric's outcomes, and a process to how far beyond each limit phi is, by the same learner.

        Hyper-parameters are new if there are many more points than at the last choice.

        Args:
            learner: Fits each.
            last: Forget this choice: a search that goes on must not depend on where it was looked at.
        """
        excesses = list[GPValueFunction]()
        if self.limits is not None:
            beyond = zip(*map(self.limits.excesses, self.evaluations), strict=True)
            for number, (limit, each) in enumerate(zip(self.limits.constraints, beyond, strict=True), start=1):
                if min(each) < max(each):
                    signs = {limit.name: -1 if limit.at_least else 1}
                    excesses.append(self._fit(number, learner, last, self._numbers(each)[:, None], signs, None))
        if (made := self.combination) is None:
            return Aim(self._fit(0, learner, last, self.cost[:, None], {}, None), excesses, self)
        signs = dict.fromkeys(made.names(self.evaluations[0].outcomes), made.sign)
        costs, made = made.costs(self.evaluations).to(self.start.device), replace(made, combined=tuple(signs))
        return Aim(self._fit(0, learner, last, costs, signs, made), excesses, self)

    def _fit(
        self, key: int, learner: GPLearner, last: bool, costs: Tensor, signs: dict[str, int], made: Combination | None
    ) -> GPValueFunction:
        """Fit a value function.

        Args:
            key: Its key in `chosen`.
            learner: Fits it.
            last: See `fit`.
            costs: The outcomes' costs, ``n x m``.
            signs: Whether a cost rises with its outcome, 1, or falls, -1, by the outcome's name; empty of a metric that
                is a number.
            made: How the outcomes make the metric.
        """
        phi, chosen, promised = self.phi, self.chosen.get(key), None
        least = costs[:, 0] if made is None else self.cost  # of the best points
        if signs.keys() & self.promised:
            none = torch.zeros_like(self.start)  # of an outcome whose loss promises nothing
            promised = torch.stack([sign * self.promised.get(name, none) for name, sign in signs.items()]).double()
        if chosen is None or len(phi) >= REFIT * chosen[0]:
            noises = [noise_of([each.outcomes[name] for each in self.evaluations]) for name in signs]
            least_noise = self._numbers(noises or [noise_of(self.evaluations)])
            at = self.selected(MOST_JUDGED, least)
            chosen = len(phi), learner.most_likely(phi[at], costs[at], least_noise, promised)
        if not last:
            self.chosen[key] = chosen
        at = self.selected(MOST_POINTS, least)
        return learner(phi[at], costs[at], chosen[1], combination=made, promised=promised)


class Aim(NamedTuple):
    """What a guided search goes for: the least f where constraints hold; if they do nowhere, where they likeliest do.

    A proposal minimises f less the logarithm of the probability that all hold, as expected improvement is weighted by
    it in Gelbart et al. (2014) and Gardner et al. (2014): far inside, the constraints cost nothing; far outside nothing
    makes up for them.

    Attributes:
        f: The value function.
        excesses: For each constraint that varies, the process of how far beyond its limit phi is.
        visited: What they were fitted to.
    """

    f: GPValueFunction
    excesses: Sequence[GPValueFunction]
    visited: Visited

    def mean(self, phi: Tensor) -> Tensor:
        """Return what is to be minimised at phi, ``m x d``, in f's standardised units, ``m``, float64."""
        return self.f.mean(phi) - self.log_feasible(phi)

    def log_feasible(self, phi: Tensor) -> Tensor:
        """Return the logarithm of the probability that all constraints hold at phi, ``m x d``, as if independent."""
        none = torch.zeros(len(phi), dtype=torch.float64, device=phi.device)
        return sum((log_below_zero(excess, phi.double()) for excess in self.excesses), none)

    def order(self) -> Tensor:
        """Return the indices of the points that f is fitted to and where constraints hold, the best first.

        If they hold at none, it is the one where they likeliest do.
        """
        at = self.visited.fitted()
        phi = self.visited.phi[at]
        holds = [self.visited.holds(self.visited.evaluations[each]) for each in at.tolist()]
        if not any(holds):
            return at[self.log_feasible(phi).neg().argsort(stable=True)[:1]]
        order = self.mean(phi).argsort(stable=True)
        return at[order[torch.tensor(holds, device=at.device)[order]]]


def log_below_zero(excess: GPValueFunction, phi: Tensor) -> Tensor:
    """Return the log-probability that what is observed at phi, ``m x d``, is at most 0, ``m``; differentiable."""
    variance = (excess.variance * (excess.unknown(phi) + excess.noise))[:, 0]
    limit = -excess.cost_mean / excess.cost_std
    found: Tensor = torch.special.log_ndtr((limit - excess.mean(phi)) / variance.sqrt())
    return found
