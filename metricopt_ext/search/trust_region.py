"""Guided trust-region search: a value function fitted to every query so far proposes the next ones.

This is the paper's idea, a learned f with loss gradients guiding the search (Eq. 3), for few queries. Eq. 3 searches
the span of the last loss gradients; here the spectrum of loss gradients all around shapes f's kernel and first design.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import mean
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import normalize

from metricopt_ext.adapters.start import Start
from metricopt_ext.search.climb import climb_of_chance
from metricopt_ext.search.descent import descend_each
from metricopt_ext.search.probe import probe
from metricopt_ext.search.strategy import Answers, Batches, Begun, Budget, SearchResult, SearchStrategy
from metricopt_ext.search.visited import Aim, Known
from metricopt_ext.tasks.combine import costs_on_pairs
from metricopt_ext.tasks.evaluation import Evaluation
from metricopt_ext.tasks.split_half import fault_of_halves
from metricopt_ext.tasks.task import FinetuneTask
from metricopt_ext.utils.checks import check_integer
from metricopt_ext.utils.seeding import generator
from metricopt_ext.utils.threads import num_threads
from metricopt_ext.value.fitting import measure
from metricopt_ext.value.value_function import Quality

# From how many points each proposal's own posterior sample is descended.
STARTS = 3

# The end is the mean of an eighth of the visited points, the best by f, at least 2 and at most 16.
END_SHARE, LEAST_END, MOST_END = 1 / 8, 2, 16

# Scales of the first design's pairs, in turn, in units of the probed scale. At the full scale outputs move by 0.3 of
# their spread, which near an optimum hardly ever improves: a smaller pair does, and says how far to go.
SCALES: Sequence[float] = (1.0, 1 / 2, 1 / 4)

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

    def begin(self, task: FinetuneTask, start: Start, budget: Budget, *, known: Known = (), seed: int = 0) -> Begun:
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

    Attributes:
        widened: See `SearchResult`.
        ahead: What was predicted of each point that f proposed before it was queried, by the point's index: by f, by
            the median of all costs, and by the best cost so far.
    """

    def __init__(
        self, search: GuidedTrustRegion, task: FinetuneTask, start: Start, budget: Budget, known: Known, seed: int
    ) -> None:
        super().__init__(start, budget, known, GuidedSearch._asked)
        self.search, self.task, self.combination = search, task, task.metric.combination
        self.signature = task.adapter.signature
        self.learner, self.rng = probe(task, self.start, seed), generator(seed, "trust_region")
        self.widened = 1.0
        self.ahead: dict[int, tuple[float, float, float]] = {}
        self._ending: list[tuple[Tensor, Evaluation]] | None = None  # once its own end is asked for, what is there

    @property
    def left(self) -> int:
        """Evaluations that it may still ask for; the last of the budget is for its end."""
        return super().left - 1

    def waiting(self) -> Batches:
        """Ask for the end once nothing else may be asked for, and wait until more may."""
        while self.left <= 0:
            budget = self.budget()
            if self.varies():
                order = self._aim(last=True).order()
                best = order[: min(max(int(END_SHARE * len(order)), LEAST_END), MOST_END)]
                self._ending = []
                self._ending = (yield self.starts(self.phi[best].mean(0)[None])).evaluated
            while self.budget() == budget:
                yield []
            self._ending = None

    def _asked(self) -> Batches:
        """Ask for designs, then for what f proposes."""
        self.promised = self.task.promised(self.start)
        pairs, scales = self.search.design_size(len(self.start)) // 2, SCALES
        while True:
            centre, began = self.best_seen(), len(self.points)
            of_pairs = [scales[pair % len(scales)] for pair in range(pairs)]
            answers = yield from self.ask(self._design(self.points[centre], of_pairs))
            told = [scale for scale, each in zip(2 * of_pairs, answers, strict=True) if each.evaluation is not None]
            near = [at for at, scale in enumerate(told, start=began) if scale == min(of_pairs)]
            gains = any(each.cost < self.evaluations[centre].cost for each in self.evaluations[began:])
            far = not gains and self._is_far(centre, near, min(of_pairs))
            if not far and self.reacts():
                break
            self.widened = self.widened * min(*of_pairs, SCALES[1]) if far else min(WIDEST, 2 * self.widened)
            pairs, scales = (self.search.batch + 1) // 2, SCALES if far else SCALES[:1]
        unit = self.widened * self.learner.scale * math.sqrt(len(self.start))
        # Around the last design if that was as wide as the metric reacts, else as wide as the pair of the best point.
        scale = told[self.best_seen() - began] if self.best_seen() >= began else SCALES[-1]
        radius = LARGEST_FIRST if self.widened > 1 else min(LARGEST_FIRST, FIRST_RADIUS * scale)
        centre, began = -1, 0
        while True:
            aim, latest = self._aim(), centre
            centre = int(aim.order()[0])
            if latest >= 0:
                success = centre != latest and centre >= began
                radius = min(max(radius * (GROW if success else SHRINK), LEAST_RADIUS), LARGEST_RADIUS)
            began, batch = len(self.points), self._batch(aim, self.phi[centre], radius * unit)
            constant, incumbent = float(self.cost.median()), float(self.cost.min())
            for at, predicted in enumerate(aim.f(batch).tolist(), start=began):
                self.ahead[at] = predicted, constant, incumbent
            yield from self.ask(batch)

    def _design(self, centre: Tensor, of_pairs: Sequence[float]) -> Tensor:
        """Draw antithetic pairs of these scales around a point, ``d``: those on one side, then those opposite."""
        root = self.learner.spectrum.root(1.0)
        drawn = torch.randn(len(of_pairs), len(root), generator=self.rng, dtype=torch.float64).to(root)
        offsets = self.widened * self.learner.scale * torch.tensor(of_pairs).to(root)[:, None] * drawn @ root.T
        return centre + torch.cat([offsets, -offsets])

    def _is_far(self, centre: int, near: Sequence[int], least: float) -> bool:
        """Whether even the smallest pairs of a design, of which none gains, are far worse than its centre.

        The mean of a pair's losses is their curvature alone: what the one side gains by a slope, the other loses.
        """
        if not near or self.widened * least < NARROWEST:
            return False
        own, around, worst = self.evaluations[centre], [self.evaluations[at] for at in near], self.task.metric.worst
        start = self.started[1].value
        far = FAR_UNBOUNDED * abs(start) if worst is None else FAR * abs(start - worst)
        chance = self.chance(own, around)
        beyond = BEYOND * chance if math.isfinite(chance) else 0.0
        return mean(each.cost for each in around) - own.cost > max(far, beyond)

    def _aim(self, *, last: bool = False) -> Aim:
        """Fit what the search goes for to all that was visited (see `Visited.fit`)."""
        return self.fit(replace(self.learner, scale=self.widened * self.learner.scale), last=last)

    @num_threads(1)  # the tensors are small
    def _batch(self, aim: Aim, centre: Tensor, radius: float) -> Tensor:
        """Return the next points, ``batch x d``: minima, in the region, of f plus tau times a sample's deviation."""
        batch = self.search.batch
        tau = (torch.arange(batch) / max(1, batch - 1)).to(centre.device)
        deviations = aim.f.deviations(batch, self.rng)
        offsets = normalize(torch.randn(batch, STARTS, len(centre), generator=self.rng, dtype=torch.float64), dim=2)
        offsets *= 0.7 * radius
        offsets[:, 0] *= 0.1  # the first start of each point is close to the centre

        def values(phi: Tensor) -> Tensor:
            return aim.mean(phi)[:, None] + tau * deviations(phi)

        return descend_each(values, centre + offsets.to(centre.device), centre, radius)

    def _predicted(self) -> tuple[Tensor, Tensor]:
        """Return what is `ahead` of the points that are visited by now, ``3 x m``, and their costs, ``m``."""
        at = [each for each in self.ahead if each < len(self.points)]
        return torch.tensor([self.ahead[each] for each in at], dtype=torch.float64).view(-1, 3).T, self.cost[at].cpu()

    def quality(self) -> Quality | None:
        """Return how well was predicted what was queried since; None if nothing was."""
        (f, constant, incumbent), true = self._predicted()
        if not len(true):
            return None
        return measure(f, true, torch.arange(len(true)), (constant, incumbent, self.started[1].cost))

    def end(self, answers: Answers = Answers()) -> SearchResult:  # noqa: B008 (a tuple)
        """Return the mean of the best points by f if it was asked for and is as good as the best of them, or that."""
        now = self.with_more(answers.evaluated if self._ending is None else [])
        own = self._ending or []
        predicted, true = now._predicted()
        result = SearchResult(
            *now.started,
            tuple(now.evaluations),
            torch.stack(now.points),
            len(now.points) + len(own),
            learns=True,
            predicted=torch.stack([predicted[0], true], 1),
            widened=self.widened,
        )
        if not now.varies():
            return result
        aim = now._aim(last=True)
        visited = list(zip(now.points, now.evaluations, strict=True))
        point, evaluation = visited[int(aim.order()[0])]
        chance = now.chance(evaluation, now.best_quarter())
        for mean_of_best, there in own:
            if now.as_good(there, evaluation, min(aim.f.noise_std(point), chance)):
                point, evaluation = mean_of_best, there
        seen = visited[now.best_seen()]
        if seen[1].cost < evaluation.cost - chance:  # never where nothing tells chance
            point, evaluation = seen
        aim.f.set_domain(aim.f.points, centre=point, reaching=self.start)
        aim.f.quality, aim.f.signature = now.quality() or aim.f.quality, self.signature
        fitted = now.fitted()
        pairs = costs_on_pairs([now.evaluations[at] for at in fitted], self.combination)
        climbed = 0.0
        if pairs is not None and not fault_of_halves(now.evaluations):
            climbed = climb_of_chance(aim.f, pairs[:, 0], self.reached, point)
        return replace(result, phi=point, evaluation=evaluation, f=aim.f, known=fitted, climbed=climbed)
