"""What a guided search has queried, and the value functions fitted to it."""

import copy
import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from metricopt_ext.search.climb import climb_of_chance
from metricopt_ext.tasks.evaluation import Evaluation, noise_of, stacked_halves
from metricopt_ext.tasks.split_half import chance_of_gain, fault_of_halves
from metricopt_ext.utils.threads import num_threads
from metricopt_ext.value.fitting import measure_ahead
from metricopt_ext.value.gp import GPLearner, GPValueFunction, Hyperparameters
from metricopt_ext.value.value_function import Quality

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


class Visited:
    """What a search has queried, and the value functions fitted to it.

    Args:
        start: phi_0, ``d``.
        learner: Fits f; its scale is the one that was probed.

    Attributes:
        points: The visited phi, ``d`` each.
        evaluations: The metric's evaluations of them.
        ahead: For each point that f proposed, what was predicted before it was queried: by f, by the median of all
            costs, and by the best cost so far.
        widened: See `SearchResult`.
    """

    def __init__(self, start: Tensor, learner: GPLearner) -> None:
        self.start, self.learner = start, learner
        self.points: list[Tensor] = []
        self.evaluations: list[Evaluation] = []
        self.ahead: dict[int, tuple[float, float, float]] = {}
        self.widened = 1.0
        self.chosen: tuple[int, Hyperparameters] | None = None

    def add(self, point: Tensor, evaluation: Evaluation) -> None:
        """Add a queried point."""
        self.points.append(point)
        self.evaluations.append(evaluation)

    def with_more(self, evaluated: Sequence[tuple[Tensor, Evaluation]]) -> "Visited":
        """Return the same with more points, which this one does not get."""
        more = copy.copy(self)
        more.points, more.evaluations = list(self.points), list(self.evaluations)
        for point, evaluation in evaluated:
            more.add(point, evaluation)
        return more

    def of_costs(self, costs: Sequence[float]) -> "Visited":
        """Return the same points with other costs, as of another quantity, and no choice of hyper-parameters yet."""
        other = copy.copy(self)
        other.evaluations, other.chosen = [Evaluation(cost) for cost in costs], None
        return other

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
        return torch.tensor([each.cost for each in self.evaluations], dtype=torch.float64, device=self.start.device)

    def varies(self) -> bool:
        """Whether not all costs are equal."""
        return bool(self.cost.min() < self.cost.max())

    def reacts(self) -> bool:
        """Whether the metric reacts to phi: enough points have another cost than most."""
        return bool((self.cost != self.cost.mode().values).double().mean() >= REACTING)

    def selected(self, most: int) -> Tensor:
        """Return the indices, ascending, of that many points, or of all if there are no more.

        They are the start and what was asked first, the worst, the best, and the latest, which are where the search
        goes on. (Were all chosen by their cost, or by where the best is, luck in the costs would have chosen them.)
        """
        cost = self.cost
        order, rank = cost.argsort(stable=True), torch.arange(len(cost), 0, -1, device=cost.device)
        rank[(self.phi == self.start).all(dim=1)] = 0  # f is asked for the gain over it
        rank[: int(FIRST_SHARE * most)] = 0
        rank[order[-1]] = 0  # costs vary if any do
        rank[order[: int(BEST_SHARE * most)]] = 0
        return rank.argsort(stable=True)[:most].sort().values

    def fitted(self) -> Tensor:
        """Return the indices of the points that f is fitted to, ascending."""
        return self.selected(MOST_POINTS)

    @num_threads(1)
    def fit(self, *, last: bool = False) -> GPValueFunction:
        """Fit f, with new hyper-parameters if there are many more points than at the last choice.

        Args:
            last: Forget this choice: a search that goes on must not depend on where it was looked at.
        """
        phi, cost = self.phi, self.cost
        chosen, learner = self.chosen, replace(self.learner, scale=self.widened * self.learner.scale)
        if chosen is None or len(cost) >= REFIT * chosen[0]:
            at = self.selected(MOST_JUDGED)
            chosen = len(cost), learner.most_likely(phi[at], cost[at], noise_of(self.evaluations))
        if not last:
            self.chosen = chosen
        at = self.fitted()
        return learner(phi[at], cost[at], chosen[1])

    def seen(self) -> int:
        """Return the index of the point with the least cost, the first of equals."""
        return int(self.cost.argmin())

    def chance(self, evaluation: Evaluation, among: Sequence[Evaluation]) -> float:
        """Return the standard deviation of what is chance in the difference of an evaluation from others.

        It is what the metric's halves or repeats show (`chance_of_gain`), and infinite where nothing tells.
        """
        if evaluation.halves is not None and not fault_of_halves(self.evaluations):
            halves = stacked_halves([each for each in among if each.halves is not None])
            if halves is not None and len(halves):
                return chance_of_gain(evaluation, halves)
        noise = noise_of([evaluation, *among]) if evaluation.noise is not None else math.inf
        return math.sqrt(2) * noise

    def best_quarter(self) -> list[Evaluation]:
        """Return the evaluations of the best quarter of the points, of eight at least, the best first."""
        ranked = sorted(self.evaluations, key=lambda each: each.cost)
        return ranked[: max(LEAST_TELLING, math.ceil(len(ranked) / 4))]

    def best(self, f: GPValueFunction) -> int:
        """Return the index of the point with the least f, of those that f is fitted to."""
        at = self.fitted()
        return int(at[f.mean(self.phi[at]).argmin()])

    def order(self, f: GPValueFunction) -> Tensor:
        """Return the indices of the points that f is fitted to, the best by f first."""
        at = self.fitted()
        return at[f.mean(self.phi[at]).argsort()]

    def climbed(self, f: GPValueFunction, began: Tensor, end: Tensor) -> float:
        """Return the gain over where a search began, ``d``, that chance alone would have given at its end, ``d``.

        See `climb_of_chance`; 0 if the metric has no halves that tell at a point that f is fitted to.
        """
        halves = stacked_halves([self.evaluations[at] for at in self.fitted().tolist()])
        if halves is None or fault_of_halves(self.evaluations):
            return 0.0
        return climb_of_chance(f, halves, began, end)

    def predict(self, f: GPValueFunction, batch: Tensor) -> None:
        """Note what is predicted of a batch, ``m x d``, that is about to be queried."""
        constant, incumbent = float(self.cost.median()), float(self.cost.min())
        for at, predicted in enumerate(f(batch).tolist(), start=len(self.points)):
            self.ahead[at] = predicted, constant, incumbent

    def complete(self, f: GPValueFunction, end: Tensor) -> None:
        """Give f its domain around the end, ``d``, and its quality on the points that were predicted before."""
        f.set_domain(f.points, centre=end, reaching=self.start)
        f.quality = self.quality() or f.quality

    def quality(self) -> Quality | None:
        """Return how well was predicted what was queried since; None if nothing was."""
        predicted = self._predicted()
        if not predicted:
            return None
        predictions = torch.tensor([self.ahead[at] for at in predicted], dtype=torch.float64)
        return measure_ahead(predictions, self.cost[predicted].cpu(), self.started[1].cost)

    def predicted(self) -> Tensor:
        """Return what f predicted before it was queried, and what was found, ``m x 2``."""
        predicted = self._predicted()
        pairs = [(self.ahead[at][0], self.evaluations[at].cost) for at in predicted]
        return torch.tensor(pairs, dtype=torch.float64).view(-1, 2)

    def _predicted(self) -> list[int]:
        return [at for at in self.ahead if at < len(self.points)]
