"""What a search is: it is asked for points and told what the metric is there, and never calls the metric itself.

Whoever evaluates the points, a loop in this process or a scorer elsewhere, answers a batch in any order; only once all
of it is answered does the search go on. So what it finds depends on the answers alone.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from metricopt_ext.errors import BudgetError
from metricopt_ext.runtime import distributed
from metricopt_ext.tasks.constraints import Constraint, Limits
from metricopt_ext.tasks.evaluation import Evaluation
from metricopt_ext.tasks.task import FinetuneTask
from metricopt_ext.utils.checks import check_integer
from metricopt_ext.utils.words import counted
from metricopt_ext.value.gp import GPValueFunction


@dataclass(frozen=True)
class SearchResult:
    """Where a search stands.

    Attributes:
        phi: Its end, ``d``: of a direct search the best of all points at which the metric was evaluated, of a guided
            one the point that f, all queries considered, takes for the best.
        evaluation: The metric's evaluation of it.
        evaluations: Those of the visited points, in order, the start's first. The query of a guided search's own end is
            not among them.
        curve: (queries, best cost so far), at the start and whenever the best cost fell.
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
    curve: tuple[tuple[int, float], ...]
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
    """What was found at a point of a batch.

    Attributes:
        point: Where the metric was evaluated, ``d``: what was asked, or what was in its place in an earlier sitting.
        evaluation: The metric's evaluation; None of a point that was given up.
    """

    point: Tensor
    evaluation: Evaluation | None


class Answers(tuple[Answer, ...]):
    """The answers to a batch, in its order."""

    @property
    def points(self) -> Tensor:
        """Where the metric was evaluated, ``n x d``."""
        return torch.stack([each.point for each in self])

    @property
    def known(self) -> Tensor:
        """Which points were evaluated and not given up, ``n``."""
        return torch.tensor([each.evaluation is not None for each in self])

    @property
    def costs(self) -> Tensor:
        """The costs, ``n``, float64; a point that was given up counts like the worst of its batch."""
        known = [each.evaluation.cost for each in self if each.evaluation is not None]
        worst = max(known, default=math.inf)
        costs = [worst if each.evaluation is None else each.evaluation.cost for each in self]
        return torch.tensor(costs, dtype=torch.float64)

    def points_as(self, proposed: Tensor) -> Tensor:
        """Return the points, ``n x d``, in the precision in which they were proposed: the proposals where they agree.

        Args:
            proposed: The proposals before they were rounded to phi's precision.
        """
        points = self.points
        same = (proposed.to(points) == points).all(1, keepdim=True).to(proposed.device)
        return torch.where(same, proposed, points.to(proposed))


# Yields a batch, ``n x d``, and is sent its answers; an empty batch says that there is nothing to ask right now.
Batches = Generator[Tensor, Answers, None]


class SearchState(ABC):
    """A search that has begun.

    Args:
        start: phi_0, ``d``.
        queries: Evaluations that it may ask for in all, those of what is known among them; it may be raised later.
        known: Points that were evaluated before, ``d`` each, the start among them.

    Attributes:
        start: phi_0, ``d``.
        queries: See above.
        points: The points that were evaluated, ``d`` each, in the order in which they were asked.
        evaluations: The metric's evaluations of them.
        limits: The metric's constraints, which the end respects if any point does; None without any (`Limits`).
        reached: The best along a line through the start, ``d``, which was chosen before; None without one.
    """

    start: Tensor
    queries: int
    points: list[Tensor]
    evaluations: list[Evaluation]
    limits: Limits | None = None
    reached: Tensor | None = None

    def __init__(self, start: Tensor, queries: int, known: Sequence[tuple[Tensor, Evaluation]] = ()) -> None:
        check_known(start, known)
        self.start, self.queries = start, queries
        self.points = [point for point, _ in known]
        self.evaluations = [evaluation for _, evaluation in known]
        self._batches: Batches | None = None
        self._open: Tensor = start[None][:0]
        self._answers: dict[int, Answer] = {}
        self._closed: Answers | None = Answers()  # what the search has not been sent yet
        self._started = self._broken = False  # whether it was asked before, and whether that ended by an error

    def subject_to(self, constraints: Sequence[Constraint]) -> None:
        """Respect constraints once the start is known, which is what they are relative to."""
        if constraints and self.limits is None and self.evaluations:
            at = next(at for at, point in enumerate(self.points) if torch.equal(point, self.start))
            self.limits = Limits.of(constraints, self.evaluations[at])

    @abstractmethod
    def batches(self) -> Batches:
        """The algorithm: yield one batch after another, and be sent the answers."""

    @abstractmethod
    def end(self) -> SearchResult:
        """Return where the search stands, from all that was told; it goes on as if nobody had looked."""

    def ask(self) -> Tensor:
        """Return the open batch, ``n x d``: the next one once all of the last is answered, empty if there is none."""
        if self._closed is not None:
            if self._batches is None:
                self._batches = self.batches()
            elif self._broken:
                raise RuntimeError("the search failed when it was last asked; start a new one, and tell it all values")
            closed, self._closed = self._closed, None
            self._broken = True
            try:
                self._open = self._batches.send(closed if self._started else None)  # type: ignore[arg-type]
            except StopIteration:
                self._open = self.start[None][:0]
            except BaseException:
                self._closed = closed
                raise
            self._started, self._broken = True, False
            if not len(self._open):
                self._closed = Answers()  # more queries may be granted
        return self._open

    def tell(self, index: int, evaluation: Evaluation, point: Tensor | None = None) -> None:
        """Answer a point of the open batch.

        Args:
            index: Its place in the batch.
            evaluation: The metric's evaluation.
            point: Where it was evaluated if that is another point, ``d``, as of an earlier sitting.
        """
        self._answer(index, evaluation, point)

    def give_up(self, index: int, point: Tensor | None = None) -> None:
        """Go on without an answer to a point of the open batch."""
        self._answer(index, None, point)

    def _answer(self, index: int, evaluation: Evaluation | None, point: Tensor | None) -> None:
        self._answers[index] = Answer(self._open[index] if point is None else point.to(self.start), evaluation)
        if len(self._answers) == len(self._open):
            closed = Answers(self._answers[each] for each in range(len(self._open)))
            self._answers = {}
            self._open = self.start[None][:0]
            self.close(closed)
            self._closed = closed

    def forget_open(self) -> None:
        """Forget what was told of the open batch, as by somebody who looked at `end` alone; it is told again."""
        self._answers = {}

    def close(self, answers: Answers) -> None:
        """Take a batch, all of which was answered."""
        for point, evaluation in answers:
            if evaluation is not None:
                self.note(point, evaluation)

    def note(self, point: Tensor, evaluation: Evaluation) -> None:
        """Take an evaluated point."""
        self.points.append(point)
        self.evaluations.append(evaluation)

    def answered(self) -> list[tuple[Tensor, Evaluation]]:
        """Return what was told of the open batch, in its order."""
        evaluated = (self._answers[index] for index in sorted(self._answers))
        return [(point, evaluation) for point, evaluation in evaluated if evaluation is not None]

    @property
    def left(self) -> int:
        """Evaluations that it may still ask for."""
        return self.queries - len(self.points)

    def quality(self) -> float | None:
        """Return the Spearman correlation of what f predicted with what was found; None without an f that did."""
        return None


class DirectState(SearchState):
    """A direct search that has begun, whose end is the best of the evaluated points.

    Args:
        start: phi_0, ``d``.
        queries: See `SearchState`.
        batches: The algorithm after the start was evaluated, a function of this state.
        known: What was evaluated before, the start among it; it is not asked again.
    """

    def __init__(
        self,
        start: Tensor,
        queries: int,
        batches: Callable[["DirectState"], Batches],
        known: Sequence[tuple[Tensor, Evaluation]] = (),
    ) -> None:
        super().__init__(start, queries, known)
        self._algorithm = batches

    def batches(self) -> Batches:
        """Ask for the start unless it is known, then go on by the algorithm."""
        if not self.points:
            yield self.start[None]
        yield from self._algorithm(self)

    @property
    def start_cost(self) -> float:
        """The cost at the start."""
        return self.at_start.cost

    @property
    def at_start(self) -> Evaluation:
        """The evaluation of the start."""
        return next(e for p, e in zip(self.points, self.evaluations, strict=True) if torch.equal(p, self.start))

    def towards_mean(self, centres: Sequence[Tensor]) -> Batches:
        """Spend what is left on points from the last centre to the mean of the later half of the centres."""
        last, mean = centres[-1], torch.stack(list(centres[(len(centres) - 1) // 2 :])).mean(0)
        while self.left:
            shares = torch.linspace(0, 1, self.left + 1)[1:].tolist()
            yield torch.stack([torch.lerp(last, mean, share) for share in shares])

    def end(self) -> SearchResult:
        """Return the best evaluated point, the first of equals, of those that satisfy the constraints if any do."""
        points, evaluations = list(self.points), list(self.evaluations)
        for point, evaluation in self.answered():
            points.append(point)
            evaluations.append(evaluation)
        limits = self.limits
        violates = [limits is not None and not limits.hold(each) for each in evaluations]
        best = min(range(len(points)), key=lambda at: (violates[at], evaluations[at].cost))
        curve = falls([each.cost for each in evaluations])
        return SearchResult(
            points[best], evaluations[best], tuple(evaluations), curve, torch.stack(points), len(points)
        )


def check_known(start: Tensor, known: Sequence[tuple[Tensor, Evaluation]]) -> None:
    """Refuse points that are known but for the start.

    Raises:
        ValueError: There are some, and the start is not among them.
    """
    if known and not any(torch.equal(point, start) for point, _ in known):
        raise ValueError(f"known has {counted(len(known), 'point')} without the start; add it, or leave known out")


def falls(costs: Sequence[float]) -> tuple[tuple[int, float], ...]:
    """Return (queries, best cost so far) at the first cost and whenever the best fell."""
    found, best = [], math.inf
    for queries, cost in enumerate(costs, start=1):
        if cost < best:
            best = cost
            found.append((queries, best))
    return tuple(found)


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

    @abstractmethod
    def begin(
        self,
        task: FinetuneTask,
        start: Tensor,
        queries: int,
        *,
        known: Sequence[tuple[Tensor, Evaluation]] = (),
        seed: int = 0,
    ) -> SearchState:
        """Begin a search; the task's metric is not evaluated.

        Args:
            task: Model, and loss and batches where it has them.
            start: phi_0, ``d``.
            queries: Evaluations that it may ask for, those of what is known among them.
            known: Points that were evaluated before, the start among them; without any, the start is asked first.
            seed: Seed of all draws.

        Raises:
            AdapterError: The loss is no scalar, or has no gradient in phi, or there is none and the search needs one.
        """

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
        """

    def identity(self) -> dict[str, Any]:
        """Return what the search depends on, as JSON, to tell a run from others."""
        return {"search": repr(self)}

    def __call__(self, task: FinetuneTask, start: Tensor, queries: int, *, seed: int = 0) -> SearchResult:
        """Search on a task's own metric from a start, whose cost is the first query; returns where it ends.

        The model is left unchanged: the result's phi is not set.

        Args:
            task: Model, loss, batches and metric.
            start: phi_0, ``d``.
            queries: Budget; exactly this many evaluations are made, and booked under "search".
            seed: Seed of all draws.

        Raises:
            ValueError: The budget is below `least_queries`; nothing was evaluated.
            BudgetError: The metric's ledger has fewer queries left; nothing was evaluated.
            MetricError: The metric failed; the message says at which query.
        """
        check_budget(task, queries, self.least_queries(task.dim))
        state = self.begin(task, start, queries, seed=seed)
        evaluate(task, state)
        return distributed.on_first(state.end)


def check_budget(task: FinetuneTask, queries: int, least: int) -> None:
    """Refuse a budget that a search can't do with, or that the metric's ledger has not left.

    Raises:
        ValueError: It is below the least.
        BudgetError: The ledger has fewer queries left.
    """
    check_integer(0, queries=queries)
    if queries < least:
        raise ValueError(f"queries is {queries}; this search in {task.dim} dimensions needs at least {least}")
    if (wanted := queries * task.metric.repeats) > task.metric.ledger.left:
        raise BudgetError(
            f"{counted(wanted, 'query')} requested, {task.metric.ledger.left} left in the metric's budget"
        )


def check_checkpoints(
    search: SearchStrategy,
    task: FinetuneTask,
    checkpoints: Sequence[int],
    known: int = 0,
    starts: int = 1,
    held_back: int = 0,
) -> None:
    """Refuse numbers of evaluations at which a search can't be looked at.

    Args:
        search: The search.
        task: Its metric's ledger must have the queries.
        checkpoints: The numbers.
        known: How many points are known already.
        starts: How many starts are asked for first.
        held_back: How many of each number's evaluations the search does not get.

    Raises:
        ValueError: They don't ascend, or one is below the least.
        BudgetError: The metric's ledger has fewer queries left.
    """
    if list(checkpoints) != sorted(set(checkpoints)) or not checkpoints:
        raise ValueError(f"checkpoints are {list(checkpoints)}; they must be one or more numbers that ascend")
    least = search.least_queries(task.dim, max(starts, known)) + held_back
    for queries in checkpoints:
        check_integer(0, queries=queries)
        if queries < least:
            raise ValueError(f"queries is {queries}; this search in {task.dim} dimensions needs at least {least}")
    needed = (checkpoints[-1] - known + (len(checkpoints) - 1) * (1 + held_back)) * task.metric.repeats
    if needed > task.metric.ledger.left:
        left = task.metric.ledger.left
        raise BudgetError(f"{counted(needed, 'query')} requested, {left} left in the metric's budget")


def evaluate(task: FinetuneTask, state: SearchState) -> None:
    """Ask the task's own metric until the search has nothing to ask.

    Of ranks that share the work the first alone goes on with the search, and all evaluate.

    Args:
        task: Model and metric.
        state: The search.
    """
    while True:
        state.subject_to(task.metric.constraints)
        before, points = distributed.on_first(lambda: (len(state.points), state.ask()))
        if not len(points):
            return
        for index, evaluation in enumerate(
            task.evaluate_each(points, "search", partial(_numbered, before, state.queries))
        ):
            if distributed.rank() == 0:
                state.tell(index, evaluation)


def _numbered(before: int, queries: int, index: int) -> str:
    return f"query {before + index + 1} of {queries}"
