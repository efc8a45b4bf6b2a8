"""What a search is: a generator of batches of starts, which is sent what the metric is there and never calls it.

Whoever evaluates a batch, a loop in this process or a scorer elsewhere (`Asking`), may do so in any order: the search
goes on once all of it is answered. So what it finds depends on the answers alone.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple, TypeAlias

import torch
from torch import Tensor

from metricopt_ext.adapters.start import Start
from metricopt_ext.errors import BudgetError
from metricopt_ext.search.visited import Known, Visited
from metricopt_ext.tasks.evaluation import Evaluation
from metricopt_ext.tasks.task import FinetuneTask
from metricopt_ext.value.gp import GPValueFunction
from metricopt_ext.value.value_function import Quality

# Returns how many evaluations a search may ask for in all, those of what was known among them; that may grow.
Budget: TypeAlias = Callable[[], int]


@dataclass(frozen=True)
class SearchResult:
    """Where a search stands.

    Attributes:
        phi: Its end, ``d``: of a direct search the best of all points at which the metric was evaluated, of a guided
            one the point that f, all queries considered, takes for the best.
        evaluation: The metric's evaluation of it.
        evaluations: Those of the visited points, in order, the start's first. The query of a guided search's own end is
            not among them.
        points: The visited points, ``n x d``.
        queries: How many evaluations were made.
        learns: Whether the search learns an f.
        f: The value function, with its domain and quality; None without one, also if the metric never varied.
        predicted: What f predicted before it was queried, and what was found, ``m x 2``.
        widened: How many times wider than probed the design had to be for the metric to react, or, below 1, for it not
            to be ruined; 1 if neither.
        known: Which of the visited points f was fitted to, ascending indices; None for all of them, or without an f.
        climbed: What a search would have gained in chance alone, as far from the start, or from the best along a line
            through it, as its end is, as a cost (`climb_of_chance`); 0 without an f, or if the metric's halves don't
            tell.
    """

    phi: Tensor
    evaluation: Evaluation
    evaluations: tuple[Evaluation, ...]
    points: Tensor
    queries: int
    learns: bool = False
    f: GPValueFunction | None = None
    predicted: Tensor = field(default_factory=lambda: torch.zeros(0, 2, dtype=torch.float64))
    widened: float = 1.0
    known: Tensor | None = None
    climbed: float = 0.0

    @property
    def cost(self) -> float:
        """The end's cost."""
        return self.evaluation.cost

    def gain_over(self, point: Tensor) -> float:
        """Return by how much f takes the end to be better than a point, ``d``, in units of the cost.

        It is 0 if f could not be learned, and infinite if there is none to ask.
        """
        if self.f is None:
            return 0.0 if self.learns else math.inf
        there, here = self.f.mean(torch.stack([point, self.phi])).tolist()
        return float(there - here) * float(self.f.cost_std)


class Answer(NamedTuple):
    """What was found at a start of a batch.

    Attributes:
        at: Where the metric was evaluated: what was asked, or what was in its place in an earlier sitting.
        evaluation: The metric's evaluation; None of a start that was given up.
    """

    at: Start
    evaluation: Evaluation | None


class Answers(tuple[Answer, ...]):
    """The answers to a batch, in its order."""

    @property
    def points(self) -> Tensor:
        """The phi at which the metric was evaluated, ``n x d``."""
        return torch.stack([each.at.phi for each in self])

    @property
    def evaluated(self) -> list[tuple[Tensor, Evaluation]]:
        """Each phi that was evaluated, ``d``, with the metric's evaluation."""
        return [(each.at.phi, each.evaluation) for each in self if each.evaluation is not None]

    @property
    def evaluations(self) -> list[Evaluation]:
        """The evaluations; for a point that was given up the worst of the others stands in. Empty if all were."""
        worst = max((each for _, each in self.evaluated), key=lambda each: each.cost, default=None)
        return [] if worst is None else [each.evaluation or worst for each in self]

    def points_as(self, proposed: Tensor) -> Tensor:
        """Return the points, ``n x d``, in the precision in which they were proposed: the proposals where they agree.

        Args:
            proposed: The proposals before they were rounded to phi's precision.
        """
        points = self.points
        same = (proposed.to(points) == points).all(1, keepdim=True).to(proposed.device)
        return torch.where(same, proposed, points.to(proposed))


# Yields a batch and is sent its answers; an empty batch says that there is nothing to ask unless more may be spent.
Batches = Generator[list[Start], Answers, None]


class Begun(Visited):
    """A search that has begun; by default its end is the best of the evaluated points.

    Args:
        start: Where it begins, phi_0 with its tensors and settings, which all that it asks for has too.
        budget: Returns how many evaluations it may ask for.
        known: Points that were evaluated before, ``d`` each, the start's phi among them; they are not asked again.
        algorithm: What it asks after the start was evaluated, a function of this object.

    Attributes:
        reached: The best along a line through the start, ``d``, which was chosen before; without one the start.
    """

    def __init__(self, start: Start, budget: Budget, known: Known, algorithm: "Algorithm") -> None:
        super().__init__(start.phi, known)
        self.at: Start = start
        self.budget: Budget = budget
        self.reached: Tensor = start.phi
        self._algorithm = algorithm

    def batches(self) -> Batches:
        """Yield the start unless it is known, then what the algorithm asks, and be sent the answers; never ends."""
        if not self.points:
            yield from self.ask(self.start[None])
        yield from self._algorithm(self)
        while True:
            yield []

    def end(self, answers: Answers = Answers()) -> SearchResult:  # noqa: B008 (a tuple)
        """Return where the search stands, from all that it was sent; it goes on as if nobody had looked.

        That is the best evaluated point, the first of equals, of those that satisfy the constraints if any do.

        Args:
            answers: What is known of the batch that it waits for.
        """
        now = self.with_more(answers.evaluated)
        point, best = now.points[now.best_seen()], now.evaluations[now.best_seen()]
        return SearchResult(point, best, tuple(now.evaluations), torch.stack(now.points), len(now.points))

    def ask(self, points: Tensor) -> Generator[list[Start], Answers, Answers]:
        """Ask for points, ``n x d``, note what is found there, and return it; what can't be spent yet is waited for."""
        answers = Answers()
        yield from self.waiting()
        while len(answers) < len(points):
            more = yield self.starts(points[len(answers) :][: self.left])
            self.add(more.evaluated)
            answers = Answers((*answers, *more))
            yield from self.waiting()
        return answers

    def waiting(self) -> Batches:
        """Yield empty batches until more may be asked for."""
        while self.left <= 0:
            yield []

    def starts(self, points: Tensor) -> list[Start]:
        """Return points, ``n x d``, as what the metric is asked for."""
        return [replace(self.at, phi=point) for point in points.to(self.start)]

    @property
    def left(self) -> int:
        """Evaluations that it may still ask for."""
        return self.budget() - len(self.points)

    def quality(self) -> Quality | None:
        """Return how well f predicted what was queried since; None without an f, or if it predicted nothing yet."""
        return None


# What a search asks for, once it has begun.
Algorithm: TypeAlias = Callable[[Any], Batches]


class SearchStrategy(ABC):
    """A way to search phi on a task's metric: `GuidedTrustRegion`, `CMAES`, `GuidedES` and others.

    A subclass is a frozen dataclass of its settings.

    Attributes:
        anytime: Whether its queries are the same whatever the budget, so that one run serves all budgets.
        keeps_shares: Whether its result has an f by which a part of the way to its end may be kept (`kept_share`).
    """

    anytime: ClassVar[bool] = False
    keeps_shares: ClassVar[bool] = False

    @abstractmethod
    def least_queries(self, dim: int, starts: int = 1) -> int:
        """Return the smallest budget in d dimensions.

        Args:
            dim: d.
            starts: Number of starts whose cost is asked first, phi = 0 among them.
        """

    def begin(self, task: FinetuneTask, start: Start, budget: Budget, *, known: Known = (), seed: int = 0) -> Begun:
        """Begin a search; the task's metric is not evaluated.

        Whoever drives it has the model stand at the start, here and whenever its next batch is asked for.

        Args:
            task: Model, and loss and batches where it has them.
            start: Where it begins.
            budget: Returns how many evaluations it may ask for.
            known: Points that were evaluated before, the start's phi among them; without any, it is asked first.
            seed: Seed of all draws.

        Raises:
            AdapterError: The loss is no scalar, or has no gradient in phi.
        """
        return Begun(start, budget, known, partial(self.batches, task, seed))

    def batches(self, task: FinetuneTask, seed: int, search: Begun) -> Batches:
        """Yield what a search asks after its start was evaluated, and be sent the answers."""
        raise NotImplementedError

    def size(self, evaluations: int, dim: int, starts: int = 1) -> dict[str, int]:
        """Return what follows from a number of evaluations in d dimensions.

        Raises:
            BudgetError: It is too small; the message says how many are needed.
        """
        if evaluations < (least := self.least_queries(dim, starts)):
            needed = f"{type(self).__name__} in {dim} dimensions of phi needs at least {least}"
            raise BudgetError(f"{evaluations} queries are too few: {needed}")
        return {"queries": evaluations}

    def check(self, task: FinetuneTask) -> None:  # noqa: B027 (a search may have nothing to refuse)
        """Refuse a task that the search can't work with, before any query.

        Raises:
            AdapterError: It needs a loss, and there is none.
            ModuleNotFoundError: It needs a package that is missing.
        """

    def identity(self) -> dict[str, Any]:
        """Return what the search depends on, as JSON, to tell a run from others."""
        return {"search": repr(self)}
