"""Direct search: lower the true metric over phi itself, without a value function.

The better tool for few starts: no query goes into learning f, so one start gets further for the same number. But each
further start costs another whole search, whereas a learned f tunes it for a few queries.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from metricopt_ext.errors import BudgetError
from metricopt_ext.search.guided_es import es_direction
from metricopt_ext.tasks.metric import Evaluation
from metricopt_ext.tasks.task import FinetuneTask
from metricopt_ext.utils.checks import check_above, check_at_least, check_integer
from metricopt_ext.utils.seeding import generator
from metricopt_ext.utils.words import counted

Told = Callable[[float], None]


@dataclass(frozen=True)
class SearchResult:
    """What a direct search found.

    Attributes:
        phi: The best of all points at which the metric was evaluated, ``d``.
        evaluation: The metric's evaluation of it.
        evaluations: Those of all these points, in order, the start's first.
        curve: (queries, best cost so far), at the start and whenever the best cost fell.
    """

    phi: Tensor
    evaluation: Evaluation
    evaluations: tuple[Evaluation, ...]
    curve: tuple[tuple[int, float], ...]

    @property
    def cost(self) -> float:
        """The end's cost."""
        return self.evaluation.cost


class Search(Protocol):
    """A direct search on a task's metric: `GuidedES`, `CMAES`."""

    def least_queries(self, dim: int) -> int:
        """Return the smallest budget in d dimensions: the start, one step and its end."""
        ...

    def __call__(
        self, task: FinetuneTask, start: Tensor, queries: int, *, seed: int = 0, on_query: Told | None = None
    ) -> SearchResult:
        """Search from a start, whose cost is the first query, and return the best point seen.

        The model is left unchanged: the result's phi is not set.

        Args:
            task: Model, loss, batches and metric.
            start: phi_0, ``d``.
            queries: Budget; exactly this many evaluations are made, and booked under "search".
            seed: Seed of all draws.
            on_query: Called with each observed cost, for a progress bar.

        Raises:
            ValueError: The budget is below `least_queries`; nothing was evaluated.
            BudgetError: The metric's ledger has fewer queries left; nothing was evaluated.
            MetricError: The metric failed; the message says at which query.
        """
        ...


@dataclass(frozen=True)
class GuidedES:
    """Guided ES (paper, section 3.2, Eq. 3-4) on the metric itself.

    A step descends along Eq. 4's estimate u, at a length of its own, and along the loss; both decay linearly to 0.
    Lengths are per coordinate, |.| / sqrt(d), like the standard deviation of random starts.

    Attributes:
        pairs: Number P of antithetic pairs per step, two queries each; one more query judges the step's end.
        scale: Length s of the perturbations, above 0.
        step: Length of the first step along u, at least 0.
        loss_weight: Weight w of the loss step, at least 0.
        lr: Rate of the first loss step, at least 0.
        history: Number k of past loss gradients that half of each perturbation is confined to; 3 in the paper. 0
            searches all directions equally, which did better where the loss says little about the metric.
    """

    pairs: int = 6
    scale: float = 0.05
    step: float = 0.07
    loss_weight: float = 0.3
    lr: float = 0.1
    history: int = 0

    def __post_init__(self) -> None:
        """Check the settings.

        Raises:
            ValueError: A setting is out of range.
        """
        check_integer(1, pairs=self.pairs)
        check_integer(0, history=self.history)
        check_at_least(0, step=self.step, loss_weight=self.loss_weight, lr=self.lr)
        check_above(0, scale=self.scale)

    def least_queries(self, dim: int) -> int:
        """Return the smallest budget in d dimensions: the start, P pairs and the end."""
        return 2 * self.pairs + 2

    def __call__(
        self, task: FinetuneTask, start: Tensor, queries: int, *, seed: int = 0, on_query: Told | None = None
    ) -> SearchResult:
        """Search from a start (see `Search`)."""
        task.check_loss(seed, 1)
        cost_at = _Counted(task, start, queries, self.least_queries(task.dim), on_query)
        rng, root = generator(seed, "guided_es"), math.sqrt(task.dim)
        variance, steps = (self.scale * root) ** 2, cost_at.left // (2 * self.pairs + 1)
        phi, gradients, centres = start, start.new_zeros(0, task.dim), [start]
        for step in range(steps):
            _, gradient = task.loss_and_gradient(phi[None], seed, [0], step)
            gradients = torch.cat([gradient, gradients])[: self.history]
            u = es_direction(cost_at, phi, gradients, generator=rng, count=self.pairs, variance=variance)
            metric_step = self.step * root * normalize(u, dim=0, eps=torch.finfo(u.dtype).tiny)
            loss_step = self.loss_weight * self.lr * gradient[0]
            phi = phi - (1 - step / steps) * (loss_step + metric_step)
            centres.append(cost_at.one(phi))
        return cost_at.finish(centres)


@dataclass(frozen=True)
class CMAES:
    """CMA-ES (Hansen, 2016), from the package cma.

    Attributes:
        sigma0: First standard deviation of each coordinate, above 0.
    """

    sigma0: float = 0.1

    def __post_init__(self) -> None:
        """Check the settings.

        Raises:
            ValueError: A setting is out of range.
        """
        check_above(0, sigma0=self.sigma0)

    def least_queries(self, dim: int) -> int:
        """Return the smallest budget in d dimensions: the start, a population and its mean."""
        return self.population(dim) + 2

    def population(self, dim: int) -> int:
        """Return the size of a population in d dimensions."""
        return 4 + int(3 * math.log(dim))

    def __call__(
        self, task: FinetuneTask, start: Tensor, queries: int, *, seed: int = 0, on_query: Told | None = None
    ) -> SearchResult:
        """Search from a start (see `Search`); the mean of each population is judged too.

        Raises:
            ImportError: The package cma is missing.
        """
        cma, population = _import_cma(), self.population(task.dim)
        cost_at = _Counted(task, start, queries, self.least_queries(task.dim), on_query)
        rng, centres = generator(seed, "cma"), [start]

        def randn(*shape: int) -> np.ndarray[Any, Any]:
            return torch.randn(*shape, generator=rng, dtype=torch.float64).numpy()

        options = {"randn": randn, "seed": math.nan, "popsize": population, **QUIET}
        strategy = cma.CMAEvolutionStrategy(start.double().cpu().numpy(), self.sigma0, options)
        while cost_at.left > population:
            points = strategy.ask()
            costs = cost_at(torch.tensor(np.stack(points)).to(start))
            strategy.tell(points, costs.tolist())
            centres.append(cost_at.one(torch.tensor(strategy.mean).to(start)))
        return cost_at.finish(centres)


# -10 also keeps cma from reading options from a file in the working directory.
QUIET = {"verbose": -10, "verb_log": 0, "verb_disp": 0}


class _Counted:
    """The metric as a function of points, for one search: counts its queries and keeps the best point."""

    def __init__(self, task: FinetuneTask, start: Tensor, queries: int, least: int, on_query: Told | None) -> None:
        check_integer(0, queries=queries)
        if queries < least:
            raise ValueError(f"queries is {queries}; this search in {task.dim} dimensions needs at least {least}")
        if (asked := queries * task.metric.repeats) > task.metric.ledger.left:
            raise BudgetError(
                f"{counted(asked, 'query')} requested, {task.metric.ledger.left} left in the metric's budget"
            )
        self.task, self.queries, self.on_query = task, queries, on_query
        self.best, self.evaluations = start, list[Evaluation]()
        self.curve: list[tuple[int, float]] = []
        self.one(start)

    @property
    def spent(self) -> int:
        return len(self.evaluations)

    @property
    def left(self) -> int:
        return self.queries - self.spent

    def __call__(self, points: Tensor) -> Tensor:
        """Return the costs, ``n``, of points, ``n x d``."""
        first, costs = self.spent + 1, []
        found = self.task.evaluate_each(points, "search", lambda i: f"query {first + i} of {self.queries}")
        for point, evaluation in zip(points, found, strict=True):
            costs.append(evaluation.cost)
            self.evaluations.append(evaluation)
            if not self.curve or evaluation.cost < self.curve[-1][1]:
                self.best, self.end = point.clone(), evaluation
                self.curve.append((self.spent, evaluation.cost))
            if self.on_query is not None:
                self.on_query(evaluation.cost)
        return torch.tensor(costs, dtype=torch.float64)

    def one(self, point: Tensor) -> Tensor:
        """Evaluate one point, ``d``, and return the point."""
        self(point[None])
        return point

    def finish(self, centres: Sequence[Tensor]) -> SearchResult:
        """Spend what is left on points from the last centre to the mean of the later half of the centres."""
        last, mean = centres[-1], torch.stack(list(centres[(len(centres) - 1) // 2 :])).mean(0)
        shares = torch.linspace(0, 1, self.left + 1)[1:].tolist()
        if shares:
            self(torch.stack([torch.lerp(last, mean, share) for share in shares]))
        return SearchResult(self.best, self.end, tuple(self.evaluations), tuple(self.curve))


def _import_cma() -> Any:
    try:
        import cma
    except ImportError as error:
        raise ImportError("CMA-ES needs the package cma: pip install 'cma>=4,<5'") from error
    return cma
