"""Direct search: lower the true metric over phi itself, without a value function.

The better tool for few starts: no query goes into learning f, so one start gets further for the same number. But each
further start costs another whole search, whereas a learned f tunes it for a few queries.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from metricopt_ext.search.guided_es import antithetic, estimated_direction, orthonormal_basis, perturbations
from metricopt_ext.search.strategy import Batches, Begun, SearchStrategy
from metricopt_ext.tasks.evaluation import Evaluation
from metricopt_ext.tasks.task import FinetuneTask
from metricopt_ext.utils.checks import check_above, check_at_least, check_integer
from metricopt_ext.utils.extras import require
from metricopt_ext.utils.seeding import generator


@dataclass(frozen=True)
class GuidedES(SearchStrategy):
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

    def least_queries(self, dim: int, starts: int = 1) -> int:
        """Return the smallest budget in d dimensions: the starts, P pairs and the end."""
        return 2 * self.pairs + 1 + starts

    def check(self, task: FinetuneTask) -> None:
        """Refuse a task without a loss, or whose loss fails (see `SearchStrategy`)."""
        task.loss_and_gradient(task.origin()[None], 0, [0], 0)  # which says why

    def batches(self, task: FinetuneTask, seed: int, search: Begun) -> Batches:
        """Step along u and the loss, and last towards the mean of the later centres (see `SearchStrategy`)."""
        rng, root = generator(seed, "guided_es"), math.sqrt(task.dim)
        variance, steps = (self.scale * root) ** 2, search.left // (2 * self.pairs + 1)
        phi, gradients, centres = search.start, search.start.new_zeros(0, task.dim), [search.start]
        for step in range(steps):
            _, gradient = task.loss_and_gradient(phi[None], seed, [0], step)
            gradients = torch.cat([gradient, gradients])[: self.history]
            delta = perturbations(*orthonormal_basis(gradients), self.pairs, variance**0.5, rng)
            answers = yield from search.ask(antithetic(phi, delta))
            above, below = answers.points.chunk(2)
            costs = [each.cost for each in answers.evaluations] or [0.0] * len(answers)
            u = estimated_direction((above - below) / 2, torch.tensor(costs, dtype=torch.float64), variance)
            metric_step = self.step * root * normalize(u, dim=0, eps=torch.finfo(u.dtype).tiny)
            loss_step = self.loss_weight * self.lr * gradient[0]
            phi = phi - (1 - step / steps) * (loss_step + metric_step)
            phi = (yield from search.ask(phi[None])).points[0]
            centres.append(phi)
        mean = torch.stack(centres[steps // 2 :]).mean(0)  # of the later half
        while search.left:  # spend what is left on the way there
            shares = torch.linspace(0, 1, search.left + 1)[1:].tolist()
            yield from search.ask(torch.stack([torch.lerp(phi, mean, share) for share in shares]))


class AskTell(NamedTuple):
    """An optimizer.

    Attributes:
        ask: Returns the points that it wants to know, ``n x d``, float64.
        tell: Gets all of them, or those that the metric was asked for in their place, and the metric's evaluations
            there. A point that was given up counts like the worst of them.
    """

    ask: Callable[[], Tensor]
    tell: Callable[[Tensor, Sequence[Evaluation]], None]


class AskTellStrategy(SearchStrategy):
    """A search by an (ask, tell) pair."""

    anytime: ClassVar[bool] = True

    @abstractmethod
    def pair(self, search: Begun, seed: int) -> AskTell:
        """Make the optimizer of a search that has begun, whose start is evaluated."""

    def least_queries(self, dim: int, starts: int = 1) -> int:
        """Return the smallest budget: the starts and one point."""
        return starts + 1

    def batches(self, task: FinetuneTask, seed: int, search: Begun) -> Batches:
        """Ask for what the optimizer does, and tell it (see `SearchStrategy`)."""
        ask, tell = self.pair(search, seed)
        while True:
            proposed = ask()
            answers = yield from search.ask(proposed)
            if evaluations := answers.evaluations:
                tell(answers.points_as(proposed), evaluations)


@dataclass(frozen=True)
class CMAES(AskTellStrategy):
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

    def least_queries(self, dim: int, starts: int = 1) -> int:
        """Return the smallest budget in d dimensions: the starts and a population, whose size is cma's own."""
        return starts + 4 + int(3 * math.log(dim))

    def check(self, task: FinetuneTask) -> None:
        """Refuse to search without the package (see `SearchStrategy`)."""
        require("cma")

    def pair(self, search: Begun, seed: int) -> AskTell:
        """Make the optimizer (see `AskTellStrategy`)."""
        import cma

        rng = np.random.RandomState(generator(seed, "cma").initial_seed() % 2**32)
        # Below -9, verbose also keeps cma from reading options from a file in the working directory.
        options = {"randn": rng.randn, "seed": math.nan, "verbose": -10, "verb_log": 0, "verb_disp": 0}
        strategy = cma.CMAEvolutionStrategy(search.start.double().cpu().numpy(), self.sigma0, options)

        def tell(points: Tensor, evaluations: Sequence[Evaluation]) -> None:
            strategy.tell([*points.numpy()], [each.cost for each in evaluations])

        return AskTell(lambda: torch.tensor(np.stack(strategy.ask())), tell)


@dataclass(frozen=True)
class RandomSearch(AskTellStrategy):
    """The start, then independent Gaussian points around it, the least that any other search must beat.

    Attributes:
        std: Standard deviation of each coordinate, above 0.
    """

    std: float = 0.1

    def __post_init__(self) -> None:
        """Check the settings.

        Raises:
            ValueError: A setting is out of range.
        """
        check_above(0, std=self.std)

    def pair(self, search: Begun, seed: int) -> AskTell:
        """Draw all points that may be asked for at once, the first n of them the same for every budget."""
        rng, start = generator(seed, "random_search"), search.start.double().cpu()

        def ask() -> Tensor:
            # One row at a time: torch draws other numbers for a matrix with other rows.
            noise = [torch.randn(len(start), generator=rng, dtype=torch.float64) for _ in range(max(1, search.left))]
            return start + self.std * torch.stack(noise)

        return AskTell(ask, lambda points, evaluations: None)
