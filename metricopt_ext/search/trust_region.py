"""Guided trust-region search: a value function fitted to every query so far proposes the next ones.

This is the paper's idea, a learned f with loss gradients guiding the search (Eq. 3), for few queries. Eq. 3 searches
the span of the last loss gradients; here the spectrum of loss gradients all around shapes f's kernel and first design.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

from metricopt_ext.search.feasibility import Aim, Feasibility
from metricopt_ext.search.probe import check_dim, probe
from metricopt_ext.search.strategy import (
    Answers,
    Batches,
    SearchResult,
    SearchState,
    SearchStrategy,
    check_checkpoints,
    check_known,
    evaluate,
    falls,
)
from metricopt_ext.search.visited import Visited
from metricopt_ext.tasks.metric import Evaluation
from metricopt_ext.tasks.task import FinetuneTask
from metricopt_ext.utils import ranks
from metricopt_ext.utils.checks import check_above, check_at_least, check_integer
from metricopt_ext.utils.seeding import generator
from metricopt_ext.utils.threads import num_threads
from metricopt_ext.value.gp import GPLearner, GPValueFunction

# Descent on a posterior sample: steps, their first length in units of the region's radius, starts for each proposal.
STEPS, FIRST_STEP, STARTS = 25, 0.35, 3

# The end is the mean of an eighth of the visited points, the best by f, at least 2 and at most 16.
END_SHARE, LEAST_END, MOST_END = 1 / 8, 2, 16

# The design is widened up to this many times what was probed while the metric hardly reacts. Where nothing was probed,
# it is narrowed, down to so many times, while most of its points lose more than a share of what the start is worth.
WIDEST, NARROWEST, FAR = 64.0, 1 / 64, 0.25


@dataclass(frozen=True)
class GuidedTrustRegion(SearchStrategy):
    """Guided trust-region search.

    1. Query the start, and a first design: antithetic pairs, drawn from the spectrum of loss gradients (`probe`). While
       the metric hardly reacts, query another, twice as wide. Without a loss all directions are alike, and while most
       points are far worse than the start, query another, half as wide.
    2. Fit f, a Gaussian process (`GPLearner`), to all queries so far, or to a selection of very many (`Visited`).
    3. The trust region is a ball around the visited point with the least f. It grows when that point is a new one, and
       shrinks when it is not.
    4. Query a batch: in the region, each point minimises f plus tau times the deviation of its own posterior sample,
       tau from 0 (f's own minimum) to 1. Go on with 2.

    The end is the mean of the best visited points by f, if the last query finds it no worse than the best of them.
    Radii are per coordinate, |phi| / sqrt(d), in units of the probed scale.

    Attributes:
        design: Largest number of points of the first design, at least 4.
        batch: Queries between two fits.
        radius: First radius of the region.
        least_radius: Its least.
        largest_radius: Its largest.
        grow: Factor on it after success.
        shrink: Factor on it after failure.
        boldness: Largest tau.
    """

    anytime: ClassVar[bool] = True
    design: int = 12
    batch: int = 8
    radius: float = 1.0
    least_radius: float = 0.2
    largest_radius: float = 3.0
    grow: float = 1.3
    shrink: float = 0.8
    boldness: float = 1.0

    def __post_init__(self) -> None:
        """Check the settings.

        Raises:
            ValueError: A setting is out of range.
        """
        check_integer(4, design=self.design)
        check_integer(1, batch=self.batch)
        check_above(0, radius=self.radius, least_radius=self.least_radius, shrink=self.shrink)
        check_at_least(self.least_radius, largest_radius=self.largest_radius)
        check_at_least(1, grow=self.grow)
        check_at_least(0, boldness=self.boldness)

    def design_size(self, dim: int) -> int:
        """Return the number of points of the first design in d dimensions, an even one."""
        return max(4, min(self.design, dim // 2) // 2 * 2)

    def least_queries(self, dim: int, starts: int = 1) -> int:
        """Return the smallest budget in d dimensions: the starts, a design, a point that f proposes, and the end."""
        return self.design_size(dim) + 2 + starts

    def check(self, task: FinetuneTask) -> None:
        """Refuse a phi whose matrices do not fit into the memory (see `SearchStrategy`)."""
        check_dim(task.dim, task.origin().device)

    def begin(
        self,
        task: FinetuneTask,
        start: Tensor,
        queries: int,
        *,
        known: Sequence[tuple[Tensor, Evaluation]] = (),
        seed: int = 0,
    ) -> "GuidedState":
        """Begin a search (see `SearchStrategy`)."""
        return GuidedState(self, task, start, queries, known, seed)

    def __call__(self, task: FinetuneTask, start: Tensor, queries: int, *, seed: int = 0) -> SearchResult:
        """Search on a task's own metric (see `SearchStrategy`)."""
        (end,) = self.ends(task, start, [queries], seed=seed)
        return end

    def ends(
        self,
        task: FinetuneTask,
        start: Tensor,
        checkpoints: Sequence[int],
        *,
        known: Sequence[tuple[Tensor, Evaluation]] = (),
        seed: int = 0,
    ) -> Iterator[SearchResult]:
        """Search from a start, and yield the end that a search of each number of queries has.

        What is queried does not depend on how many queries follow, so one run has the ends of all. Each checkpoint
        before the last costs a query more, that of its own end.

        Args:
            task: Model, loss, batches and metric.
            start: phi_0, ``d``.
            checkpoints: Numbers of evaluations, ascending; what is known counts among them.
            known: Points that were queried before, the start among them; without any, the start is the first query.
            seed: Seed of all draws.

        Raises:
            ValueError: A number is below `least_queries`, or they don't ascend, or ``known`` lacks the start; nothing
                was evaluated.
            BudgetError: The metric's ledger has fewer queries left; nothing was evaluated.
            AdapterError: The loss is no scalar, or has no gradient in phi.
            MetricError: The metric failed; the message says at which query.
        """
        check_checkpoints(self, task, checkpoints, len(known))
        state = self.begin(task, start, checkpoints[0], known=known, seed=seed)
        for queries in checkpoints:
            state.queries = queries
            evaluate(task, state)
            yield ranks.on_first(state.end)


class GuidedState(SearchState):
    """A guided search that has begun.

    The end of each budget is a query of its own, which the search that goes on does not know.

    Args:
        search: Its settings.
        task: Model, and loss and batches where it has them.
        start: phi_0, ``d``.
        queries: See `SearchState`, as for ``known``.
        known: What was evaluated before.
        seed: Seed of all draws.
    """

    def __init__(
        self,
        search: GuidedTrustRegion,
        task: FinetuneTask,
        start: Tensor,
        queries: int,
        known: Sequence[tuple[Tensor, Evaluation]] = (),
        seed: int = 0,
    ) -> None:
        super().__init__(start, queries)
        check_known(start, known)
        self.search, self.signature = search, task.adapter.signature
        self.probe, self.rng = probe(task, start, seed), generator(seed, "trust_region")
        self.visited = Visited(start, GPLearner(self.probe.scale, self.probe.spectrum))
        self.points, self.evaluations = self.visited.points, self.visited.evaluations
        for point, evaluation in known:
            self.note(point, evaluation)
        self.unprobed, self._bounded = task.loss is None, task.metric.bounds is not None
        self.feasibility = Feasibility()
        self._ending: _Ending | None = None

    @property
    def at_stake(self) -> float:
        """What the start's cost is from that of the worst model; its own size where that has no bounds."""
        cost = self.visited.begun[1].cost
        return 1 - cost if self._bounded else abs(cost)

    def batches(self) -> Batches:
        """Ask for the start, then for what f proposes, and last for the end; again if there are more queries."""
        if not self.points:
            yield self.start[None]
        proposals, proposed = self._proposals(), self.start[None][:0]
        while True:
            queries = self.queries
            while (left := queries - 1 - len(self.points)) > 0:
                if not len(proposed):
                    proposed = next(proposals).to(self.start)
                batch, proposed = proposed[:left], proposed[left:]
                yield batch
            if self.visited.varies():
                self._ending = _Ending(f := self.visited.fit(last=True), self._mean_of_best(self._aim(f, last=True)))
                yield self._ending.mean[None]
            while self.queries == queries:
                yield self.start[None][:0]
            self._ending = None

    def close(self, answers: Answers) -> None:
        """Take a batch; the end's own query is kept apart."""
        if self._ending is not None and answers:
            self._ending = self._ending._replace(mean=answers[0].point, asked=answers[0].evaluation)
        else:
            super().close(answers)

    def note(self, point: Tensor, evaluation: Evaluation) -> None:
        """Take an evaluated point."""
        self.visited.add(point, evaluation)

    def quality(self) -> float | None:
        """Return the Spearman correlation of what f predicted with what was found; None if f predicted nothing yet."""
        quality = self.visited.quality()
        return None if quality is None else quality.spearman

    def _proposals(self) -> Iterator[Tensor]:
        """Yield the points to query, ``m x d``, without end; all must be in ``visited`` before the next are drawn."""
        search, visited, seen = self.search, self.visited, self.probe
        root = seen.spectrum.root(1.0)

        def design(points: int) -> Tensor:
            drawn = torch.randn(points // 2, len(root), generator=self.rng, dtype=torch.float64).to(root)
            offsets = visited.widened * seen.scale * drawn @ root.T
            return visited.start + torch.cat([offsets, -offsets])

        yield (points := design(search.design_size(len(root))))
        while (overshoots := self._overshoots(len(points))) or not visited.reacts():
            visited.widened = visited.widened / 2 if overshoots else min(WIDEST, 2 * visited.widened)
            yield (points := design(search.batch + search.batch % 2))
        unit = visited.widened * seen.scale * math.sqrt(len(root))
        radius, centre, began = search.radius, -1, 0
        while True:
            f, latest = visited.fit(), centre
            aim = self._aim(f)
            centre = aim.best()
            if latest >= 0:
                success = centre != latest and centre >= began
                radius *= search.grow if success else search.shrink
                radius = min(max(radius, search.least_radius), search.largest_radius)
            began, batch = len(visited.points), self._batch(aim, visited.phi[centre], radius * unit)
            visited.predict(f, batch)
            yield batch

    def _overshoots(self, latest: int) -> bool:
        """Whether the scale was not probed and most of the latest design's points are far worse than the start.

        Args:
            latest: Number of points of the design.
        """
        if not self.unprobed or self.visited.widened <= NARROWEST:
            return False
        far = self.visited.cost[-latest:] - self.visited.begun[1].cost > FAR * self.at_stake
        return 2 * int(far.sum()) > latest

    def _aim(self, f: GPValueFunction, visited: Visited | None = None, *, last: bool = False) -> Aim:
        """Return what the search goes for: f's least, where the constraints hold if there are any."""
        visited = visited or self.visited
        return Aim(f, visited) if self.limits is None else self.feasibility.aim(f, visited, self.limits, last=last)

    @num_threads(1)  # the tensors are small
    def _batch(self, f: Aim, centre: Tensor, radius: float) -> Tensor:
        """Return the next points, ``batch x d``: minima, in the region, of f plus tau times a sample's deviation."""
        batch = self.search.batch
        own = torch.arange(batch).repeat_interleave(STARTS)
        tau = self.search.boldness * own / max(1, batch - 1)
        deviations = f.deviations(batch, self.rng)
        offsets = normalize(torch.randn(len(own), f.dim, generator=self.rng, dtype=torch.float64), dim=1)
        offsets *= 0.7 * radius
        offsets[::STARTS] *= 0.1  # the first start of each point is close to the centre
        own, tau, offsets = (each.to(centre.device) for each in (own, tau, offsets))

        def value(phi: Tensor) -> Tensor:
            return f.mean(phi) + tau * deviations(phi).gather(1, own[:, None]).squeeze(1)

        ends, values = descend(value, centre + offsets, centre, radius)
        best = values.view(batch, STARTS).argmin(1) + STARTS * torch.arange(batch, device=values.device)
        return ends[best]

    def _mean_of_best(self, aim: Aim) -> Tensor:
        """Return the mean of the best visited points by f, ``d``, of those that satisfy the constraints."""
        order = aim.order()
        share = int(END_SHARE * len(order))
        return self.visited.phi[order[: min(max(share, LEAST_END), MOST_END)]].mean(0).to(self.start)

    def end(self) -> SearchResult:
        """Return the mean of the best points by f if it was asked for and is as good as the best of them, or that."""
        visited = self.visited.with_more([] if self._ending is not None else self.answered())
        if not visited.varies():
            f, (point, evaluation) = None, visited.begun
        else:
            f = self._ending.f if self._ending is not None else visited.fit(last=True)
            aim = self._aim(f, visited, last=True)
            best = aim.best()
            point, evaluation = visited.points[best], visited.evaluations[best]
            asked = None if self._ending is None else self._ending.asked
            if self._ending is not None and asked is not None and aim.prefers(asked, evaluation, f.noise_std):
                point, evaluation = self._ending.mean, asked
            visited.complete(f, point)
            f.signature = self.signature
        return SearchResult(
            phi=point,
            evaluation=evaluation,
            evaluations=tuple(visited.evaluations),
            curve=falls([each.cost for each in visited.evaluations]),
            points=torch.stack(visited.points),
            queries=len(visited.points) + (self._ending is not None and self._ending.asked is not None),
            learns=True,
            f=f,
            predicted=visited.predicted(),
            widened=visited.widened,
        )


class _Ending(NamedTuple):
    """The end of a budget: f of all points, the mean of the best of them by f, ``d``, and what was found there."""

    f: GPValueFunction
    mean: Tensor
    asked: Evaluation | None = None


def descend(value: Callable[[Tensor], Tensor], phi: Tensor, centre: Tensor, radius: float) -> tuple[Tensor, Tensor]:
    """Minimise functions within a ball by normalised gradient steps that decay to 0.

    Args:
        value: Maps ``m x d`` to each row's own value, ``m``; differentiable.
        phi: Starts, ``m x d``.
        centre: Of the ball, ``d``.
        radius: Of the ball.

    Returns:
        The best visited points, ``m x d``, and their values, ``m``.
    """
    best, least = phi.clone(), torch.full_like(phi[:, 0], math.inf)
    for step in range(STEPS + 1):
        phi = phi.detach().requires_grad_(True)
        values = value(phi)
        (gradient,) = torch.autograd.grad(values.sum(), phi)
        with torch.no_grad():
            better = values < least
            best[better], least[better] = phi[better], values[better]
            moved = phi - FIRST_STEP * (1 - step / STEPS) * radius * normalize(gradient, dim=1)
            offset = moved - centre
            phi = centre + offset * (radius / offset.norm(dim=1, keepdim=True)).clamp(max=1)
    return best, least
