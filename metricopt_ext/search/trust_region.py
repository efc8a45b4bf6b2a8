"""Guided trust-region search: a value function fitted to every query so far proposes the next ones.

This is the paper's idea, a learned f with loss gradients guiding the search (Eq. 3), for few queries. Eq. 3 searches
the span of the last loss gradients; here the spectrum of loss gradients all around shapes f's kernel and first design.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize

from metricopt_ext.errors import BudgetError
from metricopt_ext.search.direct import SearchResult, Told
from metricopt_ext.search.probe import Probe, probe
from metricopt_ext.search.visited import Visited
from metricopt_ext.tasks.metric import Evaluation
from metricopt_ext.tasks.task import FinetuneTask
from metricopt_ext.utils import ranks
from metricopt_ext.utils.checks import check_above, check_at_least, check_integer
from metricopt_ext.utils.seeding import generator
from metricopt_ext.utils.threads import num_threads
from metricopt_ext.utils.words import counted
from metricopt_ext.value.gp import GPLearner, GPValueFunction

# Descent on a posterior sample: steps, their first length in units of the region's radius, starts for each proposal.
STEPS, FIRST_STEP, STARTS = 25, 0.35, 3

# The end is the mean of an eighth of the visited points, the best by f, at least 2 and at most 16.
END_SHARE, LEAST_END, MOST_END = 1 / 8, 2, 16

# The design is widened up to this many times what was probed while the metric hardly reacts.
WIDEST = 64.0


@dataclass(frozen=True)
class SearchEnd(SearchResult):
    """Where a guided trust-region search stands after a number of queries.

    It is no search for the best point seen: ``phi`` is the point that f, all queries considered, takes for the best.

    Attributes:
        queries: That number, the end's own query included; one fewer if the metric never varied, as there is no end to
            ask for then.
        f: The value function, with its domain and quality; None if the metric never varied.
        points: The visited phi, ``n x d``, in the order of ``evaluations``, which the end's own may not be among.
        predicted: What f predicted before it was queried, and what was found, ``m x 2``.
        widened: How many times wider than probed the design had to be for the metric to react; 1 if not at all.
    """

    queries: int
    f: GPValueFunction | None
    points: Tensor
    predicted: Tensor
    widened: float

    def gain_over(self, point: Tensor) -> float:
        """Return by how much f takes the end to be better than a point, ``d``, in units of the cost; 0 without f."""
        if self.f is None:
            return 0.0
        there, here = self.f.mean(torch.stack([point, self.phi])).tolist()
        return float(there - here) * float(self.f.cost_std)


@dataclass(frozen=True)
class GuidedTrustRegion:
    """Guided trust-region search.

    1. Query the start, and a first design: antithetic pairs, drawn from the spectrum of loss gradients (`probe`). While
       the metric hardly reacts, query another, twice as wide.
    2. Fit f, a Gaussian process (`GPLearner`), to all queries so far.
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

    def least_queries(self, dim: int) -> int:
        """Return the smallest budget in d dimensions: the start, a design, a point that f proposes, and the end."""
        return self.design_size(dim) + 3

    def __call__(
        self, task: FinetuneTask, start: Tensor, queries: int, *, seed: int = 0, on_query: Told | None = None
    ) -> SearchEnd:
        """Search from a start (see `direct.Search`)."""
        (end,) = self.ends(task, start, [queries], seed=seed, on_query=on_query)
        return end

    def ends(
        self,
        task: FinetuneTask,
        start: Tensor,
        checkpoints: Sequence[int],
        *,
        known: Sequence[tuple[Tensor, Evaluation]] = (),
        seed: int = 0,
        on_query: Told | None = None,
        on_quality: Told | None = None,
    ) -> Iterator[SearchEnd]:
        """Search from a start, and yield the end that a search of each number of queries has.

        What is queried does not depend on how many queries follow, so one run has the ends of all. Each checkpoint
        before the last costs a query more, that of its own end.

        Args:
            task: Model, loss, batches and metric.
            start: phi_0, ``d``.
            checkpoints: Numbers of evaluations, ascending; what is known counts among them.
            known: Points that were queried before, the start among them; without any, the start is the first query.
            seed: Seed of all draws.
            on_query: Called with each observed cost.
            on_quality: Called after each batch that f proposed with the Spearman correlation of all that was predicted
                before it was queried.

        Raises:
            ValueError: A number is below `least_queries`, or they don't ascend, or ``known`` lacks the start; nothing
                was evaluated.
            BudgetError: The metric's ledger has fewer queries left; nothing was evaluated.
            AdapterError: The loss is no scalar, or has no gradient in phi.
            MetricError: The metric failed; the message says at which query.
        """
        self._check_budget(task, checkpoints, len(known))
        if known and not any(torch.equal(point, start) for point, _ in known):
            raise ValueError(f"known has {counted(len(known), 'point')} without the start; add it, or leave known out")
        seen = probe(task, start, seed)
        visited = Visited(start, GPLearner(seen.scale, seen.spectrum))

        def query(points: Tensor) -> Iterator[Evaluation]:
            first = len(visited.points) + 1
            where = f"query {{}} of {checkpoints[-1]}".format
            for evaluation in task.evaluate_each(points, "search", lambda i: where(first + i)):
                if on_query is not None:
                    on_query(evaluation.cost)
                yield evaluation

        for point, evaluation in known or zip([start], query(start[None]), strict=True):
            visited.add(point, evaluation)
        proposals, proposed = self._proposals(visited, seen, generator(seed, "trust_region")), start[:0]
        for queries in checkpoints:
            while (left := queries - 1 - len(visited.points)) > 0:
                if not len(proposed):
                    proposed = ranks.on_first(lambda: next(proposals).to(start))
                batch, proposed = proposed[:left], proposed[left:]
                for point, evaluation in zip(batch, query(batch), strict=True):
                    visited.add(point, evaluation)
                if on_quality is not None and (quality := visited.quality()) is not None:
                    on_quality(quality.spearman)
            end = self._end(visited, query)
            if end.f is not None:
                end.f.signature = task.adapter.signature
            yield end

    def _check_budget(self, task: FinetuneTask, checkpoints: Sequence[int], known: int) -> None:
        if list(checkpoints) != sorted(set(checkpoints)) or not checkpoints:
            raise ValueError(f"checkpoints are {list(checkpoints)}; they must be one or more numbers that ascend")
        least = self.least_queries(task.dim) + max(0, known - 1)
        for queries in checkpoints:
            check_integer(0, queries=queries)
            if queries < least:
                raise ValueError(f"queries is {queries}; this search in {task.dim} dimensions needs at least {least}")
        asked = (checkpoints[-1] - known + len(checkpoints) - 1) * task.metric.repeats
        if asked > task.metric.ledger.left:
            left = task.metric.ledger.left
            raise BudgetError(f"{counted(asked, 'query')} requested, {left} left in the metric's budget")

    def _proposals(self, visited: Visited, seen: Probe, rng: torch.Generator) -> Iterator[Tensor]:
        """Yield the points to query, ``m x d``, without end; all must be in ``visited`` before the next are drawn."""
        root = seen.spectrum.root(1.0)

        def design(points: int) -> Tensor:
            drawn = torch.randn(points // 2, len(root), generator=rng, dtype=torch.float64).to(root)
            offsets = visited.widened * seen.scale * drawn @ root.T
            return visited.start + torch.cat([offsets, -offsets])

        yield design(self.design_size(len(root)))
        while not visited.reacts():
            visited.widened = min(WIDEST, 2 * visited.widened)
            yield design(self.batch + self.batch % 2)
        unit = visited.widened * seen.scale * math.sqrt(len(root))
        radius, centre, began = self.radius, -1, 0
        while True:
            f, latest = visited.fit(), centre
            centre = int(f.mean(visited.phi).argmin())
            if latest >= 0:
                success = centre != latest and centre >= began
                radius *= self.grow if success else self.shrink
                radius = min(max(radius, self.least_radius), self.largest_radius)
            began, batch = len(visited.points), self._batch(f, visited.phi[centre], radius * unit, rng)
            visited.predict(f, batch)
            yield batch

    @num_threads(1)  # the tensors are small
    def _batch(self, f: GPValueFunction, centre: Tensor, radius: float, rng: torch.Generator) -> Tensor:
        """Return the next points, ``batch x d``: minima, in the region, of f plus tau times a sample's deviation."""
        own = torch.arange(self.batch).repeat_interleave(STARTS)
        tau = self.boldness * own / max(1, self.batch - 1)
        deviations = f.deviations(self.batch, rng)
        offsets = normalize(torch.randn(len(own), f.dim, generator=rng, dtype=torch.float64), dim=1)
        offsets *= 0.7 * radius
        offsets[::STARTS] *= 0.1  # the first start of each point is close to the centre
        own, tau, offsets = (each.to(centre.device) for each in (own, tau, offsets))

        def value(phi: Tensor) -> Tensor:
            return f.mean(phi) + tau * deviations(phi).gather(1, own[:, None]).squeeze(1)

        ends, values = descend(value, centre + offsets, centre, radius)
        best = values.view(self.batch, STARTS).argmin(1) + STARTS * torch.arange(self.batch, device=values.device)
        return ends[best]

    def _end(self, visited: Visited, query: Callable[[Tensor], Iterator[Evaluation]]) -> SearchEnd:
        """Ask whether the mean of the best points by f is as good as the best of them."""
        f = ranks.on_first(lambda: visited.fit(last=True)) if visited.varies() else None
        if f is None:
            point, evaluation = visited.begun
        else:
            order = f.mean(visited.phi).argsort()
            share = int(END_SHARE * len(order))
            mean = visited.phi[order[: min(max(share, LEAST_END), MOST_END)]].mean(0).to(visited.start)
            point, evaluation = visited.points[int(order[0])], visited.evaluations[int(order[0])]
            (asked,) = query(mean[None])
            if asked.cost <= evaluation.cost + f.noise_std:
                point, evaluation = mean, asked
            visited.complete(f, point)
        curve, best = [], math.inf
        for queries, each in enumerate(visited.evaluations, start=1):
            if each.cost < best:
                best = each.cost
                curve.append((queries, best))
        return SearchEnd(
            phi=point,
            evaluation=evaluation,
            evaluations=tuple(visited.evaluations),
            curve=tuple(curve),
            queries=len(visited.points) + (f is not None),
            f=f,
            points=torch.stack(visited.points),
            predicted=visited.predicted(),
            widened=visited.widened,
        )


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
