"""Guided trust-region search: a value function fitted to every query so far proposes the next ones.

This is the paper's idea, a learned f with loss gradients guiding the search (Eq. 3), for few queries. Eq. 3 searches
the span of the last loss gradients; here the spectrum of loss gradients all around shapes f's kernel and first design.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

from metricopt_ext.adapters.start import Start
from metricopt_ext.search.descent import descend
from metricopt_ext.search.feasibility import Aim, Feasibility, seen_within
from metricopt_ext.search.probe import probe
from metricopt_ext.search.strategy import Answers, Batches, Begun, SearchResult, SearchStrategy, falls
from metricopt_ext.search.visited import Visited
from metricopt_ext.tasks.evaluation import Evaluation
from metricopt_ext.tasks.task import FinetuneTask
from metricopt_ext.utils.checks import check_integer
from metricopt_ext.utils.seeding import generator
from metricopt_ext.utils.threads import num_threads
from metricopt_ext.value.gp import GPLearner, GPValueFunction

# From how many points each proposal's own posterior sample is descended.
STARTS = 3

# The end is the mean of an eighth of the visited points, the best by f, at least 2 and at most 16.
END_SHARE, LEAST_END, MOST_END = 1 / 8, 2, 16

# Scales of the first design's pairs, in turn, in units of the probed scale. At the full scale outputs move by 0.3 of
# their spread, which near an optimum hardly ever improves: a smaller pair does, and says how far to go.
SCALES = (1.0, 1 / 2, 1 / 4)

# Largest number of points of the first design.
DESIGN = 6

# The first radius is so many times the scale of the pair that holds the best point: what gained there may go on. It is
# at most LARGEST_FIRST. A success makes it larger by a factor, a failure smaller, between two bounds.
FIRST_RADIUS, LARGEST_FIRST, LEAST_RADIUS, LARGEST_RADIUS, GROW, SHRINK = 1.5, 1.0, 0.2, 3.0, 1.3, 0.8

# The design is widened up to this many times what was probed while the metric hardly reacts. It is narrowed, down to so
# many times, while none of its points gains, and its smallest pairs lose, on average, more than a share of what the
# start is worth, and than so many deviations of chance. As loss grows with the square of the scale, the largest pair
# loses a third. On four tasks such pairs lost at most .015, and .02 to .5 in 10 of 12 runs with a scale of four times
# that. A cost without bounds has no worst, so it must grow by more of its size.
WIDEST, NARROWEST, FAR, FAR_UNBOUNDED, BEYOND = 64.0, 1 / 64, 0.02, 0.25, 2.0

# A point is one of a design if it is off by at most this share of its distance: one on file may be rounded otherwise.
OFF_DESIGN = 1e-3


@dataclass(frozen=True)
class GuidedTrustRegion(SearchStrategy):
    """Guided trust-region search.

    1. Query the start.
    2. Query a first design around the best so far: antithetic pairs of `SCALES`, drawn from the spectrum of loss
       gradients (`probe`; without a loss all directions are alike). While the metric hardly reacts, query another,
       twice as wide; while even the smallest pair is far worse, another, as wide as that pair.
    3. Fit f, a Gaussian process (`GPLearner`), to all queries so far, or to a selection of very many (`Visited`).
    4. The trust region is a ball around the visited point with the least f. Its first radius is `FIRST_RADIUS` times
       the scale of the pair that holds the best point, or the least scale if none gained. It grows when the centre is a
       new point, and shrinks when it is not.
    5. Query a batch: in the region, each point minimises f plus tau times the deviation of its own posterior sample,
       tau from 0 (f's own minimum) to 1. Go on with 3.

    The end is the mean of the best visited points by f, if the last query finds it no worse than the best of them, up
    to f's noise, or up to chance if the metric's halves or repeats show less. A point that was seen to be better than
    either by more than such chance is the end.
    Radii are per coordinate, |phi| / sqrt(d), in units of the probed scale.

    Attributes:
        batch: Queries between two fits.
    """

    anytime: ClassVar[bool] = True
    keeps_shares: ClassVar[bool] = True
    batch: int = 4

    def __post_init__(self) -> None:
        """Check the settings.

        Raises:
            ValueError: The batch is below 1.
        """
        check_integer(1, batch=self.batch)

    def design_size(self, dim: int) -> int:
        """Return the number of points of the first design in d dimensions, an even one."""
        return max(4, min(DESIGN, dim // 2) // 2 * 2)

    def least_queries(self, dim: int, starts: int = 1) -> int:
        """Return the smallest budget in d dimensions: the starts, a design, a point that f proposes, and the end."""
        return self.design_size(dim) + 2 + starts

    def begin(
        self,
        task: FinetuneTask,
        start: Start,
        budget: Callable[[], int],
        *,
        known: Sequence[tuple[Tensor, Evaluation]] = (),
        seed: int = 0,
    ) -> "GuidedSearch":
        """Begin a search (see `SearchStrategy`)."""
        return GuidedSearch(self, task, start, budget, known, seed)


class GuidedSearch(Begun):
    """A guided search that has begun.

    What is queried does not depend on the budget, but for the end of each, a query of its own, which the search that
    goes on does not know.

    Args:
        search: Its settings.
        task: Model, and loss and batches where it has them.
        start: See `Begun`, as for ``budget`` and ``known``.
        budget: How many evaluations it may ask for.
        known: What was evaluated before.
        seed: Seed of all draws.
    """

    def __init__(
        self,
        search: GuidedTrustRegion,
        task: FinetuneTask,
        start: Start,
        budget: Callable[[], int],
        known: Sequence[tuple[Tensor, Evaluation]] = (),
        seed: int = 0,
    ) -> None:
        super().__init__(start, budget, known)
        self.search, self.signature = search, task.adapter.signature
        self.probe, self.rng = probe(task, self.start, seed), generator(seed, "trust_region")
        self.visited = Visited(self.start, GPLearner(self.probe.scale, self.probe.spectrum))
        self.visited.points, self.visited.evaluations = self.points, self.evaluations
        self.narrows, self._bounded = True, task.metric.bounds is not None
        self.feasibility = Feasibility()
        self._ending: _Ending | None = None

    @property
    def far(self) -> float:
        """By how much the cost of a point that is far worse exceeds the start's, chance aside."""
        cost = self.visited.started[1].cost
        return FAR * (1 - cost) if self._bounded else FAR_UNBOUNDED * abs(cost)

    def batches(self) -> Batches:
        """Ask for the start, then for what f proposes, and last for the end; again if there are more queries."""
        if not self.points:
            yield from self.ask(self.start[None])
        proposals, proposed = self._proposals(), self.start[None][:0]
        while True:
            budget = self.budget()
            while (left := self.left - 1) > 0:
                if not len(proposed):
                    proposed = next(proposals).to(self.start)
                batch, proposed = proposed[:left], proposed[left:]
                yield from self.ask(batch)
            if self.visited.varies():
                self._ending = _Ending(f := self.visited.fit(last=True), self._mean_of_best(self._aim(f, last=True)))
                ((at, evaluation),) = yield self.starts(self._ending.mean[None])
                self._ending = self._ending._replace(mean=at.phi, evaluated=evaluation)
            while self.budget() == budget:
                yield []
            self._ending = None

    def quality(self) -> float | None:
        """Return the Spearman correlation of what f predicted with what was found; None if f predicted nothing yet."""
        quality = self.visited.quality()
        return None if quality is None else quality.spearman

    def _proposals(self) -> Iterator[Tensor]:
        """Yield the points to query, ``m x d``, without end; all must be in ``visited`` before the next are drawn."""
        search, visited = self.search, self.visited
        yield (design := self._design(search.design_size(len(self.start)), SCALES)).points
        while (far := self._is_too_far(design)) or not visited.reacts():
            narrower = visited.widened * min(design.least, SCALES[1])
            visited.widened = narrower if far else min(WIDEST, 2 * visited.widened)
            design = self._design(search.batch + search.batch % 2, SCALES if far else SCALES[:1])
            yield design.points
        unit = visited.widened * self.probe.scale * math.sqrt(len(self.start))
        radius, centre, began = self._first_radius(design), -1, 0
        while True:
            f, latest = visited.fit(), centre
            aim = self._aim(f)
            centre = aim.best()
            if latest >= 0:
                success = centre != latest and centre >= began
                radius *= GROW if success else SHRINK
                radius = min(max(radius, LEAST_RADIUS), LARGEST_RADIUS)
            began, batch = len(visited.points), self._batch(aim, visited.phi[centre], radius * unit)
            visited.predict(f, batch)
            yield batch

    def _design(self, points: int, scales: Sequence[float]) -> "_Design":
        """Draw antithetic pairs around the best point so far, of some scales in turn."""
        root = self.probe.spectrum.root(1.0)
        drawn = torch.randn(points // 2, len(root), generator=self.rng, dtype=torch.float64).to(root)
        of_pairs = torch.tensor([scales[pair % len(scales)] for pair in range(points // 2)]).to(root)
        offsets = self.visited.widened * self.probe.scale * of_pairs[:, None] * drawn @ root.T
        best = seen_within(self.limits, self.visited)
        drawn_at = self.visited.points[best] + torch.cat([offsets, -offsets])
        return _Design(drawn_at, of_pairs.repeat(2), best, len(self.visited.points))

    def _is_too_far(self, design: "_Design") -> bool:
        """Whether no point of a design gains on what it was drawn around, and even its smallest pairs are far worse.

        The mean of a pair's losses is their curvature alone: what the one side gains by a slope, the other loses.
        """
        visited = self.visited
        if not self.narrows or visited.widened * design.least < NARROWEST:
            return False
        proposed, centre = design.proposed(visited), visited.evaluations[design.centre]
        near = [visited.evaluations[at] for at, scale in proposed.items() if scale == design.least]
        if not near or min(visited.evaluations[at].cost for at in proposed) < centre.cost:
            return False
        chance = visited.chance(centre, near)
        far = max(self.far, BEYOND * chance if math.isfinite(chance) else 0.0)
        return mean(each.cost for each in near) - centre.cost > far

    def _first_radius(self, design: "_Design") -> float:
        """Return the first radius, from the last design: around it if that was as wide as the metric reacts."""
        if self.visited.widened > 1:
            return LARGEST_FIRST
        scale = design.proposed(self.visited).get(seen_within(self.limits, self.visited), SCALES[-1])
        return min(LARGEST_FIRST, max(LEAST_RADIUS, FIRST_RADIUS * scale))

    def _aim(self, f: GPValueFunction, visited: Visited | None = None, *, last: bool = False) -> Aim:
        """Return what the search goes for: f's least, where the constraints hold if there are any."""
        visited = visited or self.visited
        return Aim(f, visited) if self.limits is None else self.feasibility.aim(f, visited, self.limits, last=last)

    @num_threads(1)  # the tensors are small
    def _batch(self, f: Aim, centre: Tensor, radius: float) -> Tensor:
        """Return the next points, ``batch x d``: minima, in the region, of f plus tau times a sample's deviation."""
        batch = self.search.batch
        own = torch.arange(batch).repeat_interleave(STARTS)
        tau = own / max(1, batch - 1)
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

    def end(self, answers: Answers = Answers()) -> SearchResult:  # noqa: B008 (a tuple)
        """Return the mean of the best points by f if it was asked for and is as good as the best of them, or that."""
        visited = self.visited.with_more([] if self._ending is not None else answers.evaluated)
        if not visited.varies():
            f, (point, evaluation) = None, visited.started
        else:
            f = self._ending.f if self._ending is not None else visited.fit(last=True)
            aim = self._aim(f, visited, last=True)
            best, seen = aim.best(), seen_within(self.limits, visited)
            point, evaluation = visited.points[best], visited.evaluations[best]
            chance = visited.chance(evaluation, visited.best_quarter())
            slack = min(f.noise_std, chance)
            evaluated = None if self._ending is None else self._ending.evaluated
            if self._ending is not None and evaluated is not None and aim.prefers(evaluated, evaluation, slack):
                point, evaluation = self._ending.mean, evaluated
            if visited.evaluations[seen].cost < evaluation.cost - chance:  # never where nothing tells chance
                point, evaluation = visited.points[seen], visited.evaluations[seen]
            visited.complete(f, point)
            f.signature = self.signature
        began = self.start if self.reached is None else self.reached
        return SearchResult(
            phi=point,
            evaluation=evaluation,
            evaluations=tuple(visited.evaluations),
            curve=falls([each.cost for each in visited.evaluations]),
            points=torch.stack(visited.points),
            queries=len(visited.points) + (self._ending is not None and self._ending.evaluated is not None),
            learns=True,
            f=f,
            predicted=visited.predicted(),
            widened=visited.widened,
            known=None if f is None else visited.fitted(),
            climbed=0.0 if f is None else visited.climbed(f, began, point),
        )


class _Design(NamedTuple):
    """A design: points, ``n x d``, each one's scale, ``n``, and the indices of their centre and of the first."""

    points: Tensor
    scales: Tensor
    centre: int
    began: int

    @property
    def least(self) -> float:
        """The scale of the smallest pairs."""
        return float(self.scales.min())

    def proposed(self, visited: Visited) -> dict[int, float]:
        """Return the scales of those points that were answered, by their indices among the visited ones.

        Some may have been given up, others told meanwhile; one on file may be rounded otherwise.
        """
        found = {}
        for at in range(self.began, len(visited.points)):
            apart = (self.points - visited.points[at]).norm(dim=1)
            nearest = int(apart.argmin())
            if apart[nearest] <= OFF_DESIGN * (self.points[nearest] - visited.points[self.centre]).norm():
                found[at] = float(self.scales[nearest])
        return found


class _Ending(NamedTuple):
    """The end of a budget: f of all points, the mean of the best of them by f, ``d``, and what was found there."""

    f: GPValueFunction
    mean: Tensor
    evaluated: Evaluation | None = None
