"""What finds phi within a budget: a search, which is asked and told, or a learner, which needs whole trainings."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from metricopt_ext.adapters.start import Start, StartLine
from metricopt_ext.errors import BudgetError
from metricopt_ext.methods.folder import RunFolder, identity_of
from metricopt_ext.methods.guard import CONFIDENCE, deviates, held_back
from metricopt_ext.methods.result import Result
from metricopt_ext.methods.starts import all_starts
from metricopt_ext.runtime.progress import Callback
from metricopt_ext.search.strategy import SearchStrategy
from metricopt_ext.search.trust_region import GuidedTrustRegion
from metricopt_ext.tasks.metric import Metric
from metricopt_ext.tasks.task import FinetuneTask
from metricopt_ext.utils.checks import check_instance, check_integer
from metricopt_ext.utils.words import and_more, brief


class LearningStrategy(ABC):
    """A strategy that learns from whole trainings of phi: `Recipe`, `Algorithm1`, `AlgorithmS1`.

    It begins from phi = 0 alone, respects no constraints, and tunes no settings of inference. A subclass is a frozen
    dataclass of its settings.

    Attributes:
        anytime: As of `SearchStrategy`; a finished run can't go on with more queries.
    """

    anytime: ClassVar[bool] = False

    @abstractmethod
    def size(self, evaluations: int, dim: int, starts: int = 1) -> dict[str, int]:
        """Return what follows from a number of evaluations in d dimensions; starts other than phi = 0 have no use.

        Raises:
            BudgetError: It is too small; the message says how many are needed.
        """

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """Return what a run depends on, as JSON, to tell it from others."""

    @abstractmethod
    def run(self, context: "Plan") -> Result:
        """Learn, follow what was learned, and let the guard decide; the model is left unchanged."""


def check_constraints(metric: Metric, who: str) -> None:
    """Refuse constraints where nothing respects them.

    Args:
        metric: The metric.
        who: What does not, for the message.

    Raises:
        ValueError: It has some.
    """
    if metric.subject_to:
        raise ValueError(
            f"metric {metric.name!r} is subject to {', '.join(map(str, metric.constraints))}, which {who} can't"
            " respect; search by GuidedTrustRegion() or CMAES(), or give these quantities as also= alone"
        )


Strategy = SearchStrategy | LearningStrategy


@dataclass(frozen=True)
class Plan:
    """What a run is asked for, all of it checked (`of`), and where it keeps and tells what it finds.

    Attributes:
        task: Model, loss, batches and metric.
        queries: The budget, the metric's repeats among them.
        strategy: A search or a learner.
        starts: What a search may begin from, ``"start"`` first: phi = 0.
        confidence: How sure the guard must be, at least 0.5 and below 1.
        seed: Seed of all draws.
        size: What the strategy's ``size`` makes of the budget.
        endless: Whether it is of the first queries of a run whose end is out of sight.
        folder: Keeps the run's work.
        callback: Notified of progress.
    """

    task: FinetuneTask
    queries: int
    strategy: Any
    starts: Mapping[str, Start | StartLine]
    confidence: float
    seed: int
    size: dict[str, int]
    endless: bool = False
    folder: RunFolder = field(default_factory=lambda: RunFolder(None, {}))
    callback: Callback = field(default_factory=Callback)

    @classmethod
    def of(
        cls,
        task: FinetuneTask,
        *,
        queries: int,
        strategy: Strategy | None = None,
        starts: Mapping[str, Start | StartLine] | None = None,
        guard_confidence: float = CONFIDENCE,
        seed: int = 0,
        endless: bool = False,
    ) -> "Plan":
        """Check what `optimize_metric` is asked for, as far as it can be known before a model is trained.

        Args:
            task: Has phi's dimension, and the metric's budget; one without a loss will do.
            queries: See `optimize_metric`, as for all others.
            strategy: The strategy; by default a guided search.
            starts: The starts, of which copies are made, as the model's own phi may be among them.
            guard_confidence: The guard's confidence.
            seed: The seed.
            endless: Whether these are the first queries of a run whose end is out of sight.

        Raises:
            ValueError, BudgetError, AdapterError: As from `optimize_metric`.
        """
        strategy = GuidedTrustRegion() if strategy is None else strategy
        if isinstance(strategy, type):
            check_instance("GuidedTrustRegion() or CMAES()", strategy=strategy)
        if not isinstance(strategy, SearchStrategy | LearningStrategy):
            raise ValueError(
                f"strategy is {brief(strategy)}; it must be a search, e.g. GuidedTrustRegion() or CMAES(), or a"
                " learner, e.g. Recipe()"
            )
        check_integer(0, queries=queries, seed=seed)
        deviates(guard_confidence)  # refuses what is out of range
        candidates = all_starts(task, {} if starts is None else starts)
        if isinstance(strategy, LearningStrategy):
            _check_learner(task, strategy, [*candidates][1:])
        task.metric.ledger.require(queries)
        fixed = sum(isinstance(each, Start) for each in candidates.values())
        size = {} if endless else _sized(task, queries, strategy, fixed)
        return cls(task, queries, strategy, candidates, guard_confidence, seed, size, endless)

    def identity(self, **besides: Any) -> dict[str, Any]:
        """Return what tells the run from others (`identity_of`), with what it depends on besides."""
        settings = {**self.strategy.identity(), **({} if self.strategy.anytime else self.size), **besides}
        starts = {name: start for name, start in self.starts.items() if name != "start"}
        return identity_of(settings, self.task, starts, self.seed)


def _check_learner(task: FinetuneTask, strategy: LearningStrategy, starts: list[str]) -> None:
    """Refuse what a search alone has a use for."""
    who = type(strategy).__name__
    if starts:
        raise ValueError(f"starts are {starts}; only a search begins from one of several")
    if task.settings is not None and task.settings.queries:
        raise ValueError(
            f"the task has settings of inference, {and_more(task.settings.names)}, which {who} does not tune; search by"
            " GuidedTrustRegion() or CMAES(), or leave them out by task.with_settings(None)"
        )
    check_constraints(task.metric, who)


def _sized(task: FinetuneTask, queries: int, strategy: Strategy, starts: int) -> dict[str, int]:
    """Return what follows from a budget, of which some queries may be held back."""
    repeats, said = task.metric.repeats, ""
    try:
        size = strategy.size(queries // repeats, task.dim, starts)
        if isinstance(strategy, SearchStrategy) and held_back(strategy, task.metric):
            said = f"; of {queries // repeats}, one is held back for the value of what is kept, as classes are new"
            strategy.size(queries // repeats - 1, task.dim, starts)
    except BudgetError as error:
        if repeats > 1:
            said += f" (each an evaluation of {repeats} queries: its repeats)"
        raise BudgetError(f"{error}{said}") from error
    return size
