"""What finds phi within a budget: a search, which is asked and told, or a learner, which needs whole trainings."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from metricopt_ext.methods.guard import CONFIDENCE
from metricopt_ext.methods.result import Result
from metricopt_ext.methods.run_folder import RunFolder
from metricopt_ext.search.strategy import SearchStrategy
from metricopt_ext.tasks.cached_metric import CachedMetric
from metricopt_ext.tasks.metric import Evaluation
from metricopt_ext.tasks.task import FinetuneTask
from metricopt_ext.tasks.trajectory import TrajectoryStore
from metricopt_ext.utils.checks import check_instance
from metricopt_ext.utils.progress import Watcher
from metricopt_ext.utils.words import brief

Learned = TypeVar("Learned", bound=Result, covariant=True)


@dataclass(frozen=True)
class Context:
    """What a learner works with.

    Attributes:
        task: Model, loss, batches and metric.
        queries: The budget, the metric's repeats among them.
        folder: Keeps the run's work.
        watcher: Notified of progress.
        size: What `LearningStrategy.size` makes of the budget.
        confidence: How sure the guard must be, at least 0.5 and below 1.
        seed: Seed of all draws.
    """

    task: FinetuneTask
    queries: int
    folder: RunFolder
    watcher: Watcher
    size: dict[str, int]
    confidence: float = CONFIDENCE
    seed: int = 0

    def retell(self, store: TrajectoryStore, cached: CachedMetric) -> None:
        """Book the queries of trajectories on file, which are not collected again, and tell of them."""
        metric = self.task.metric
        self.watcher.on_file((store.queries + cached.on_file) * metric.repeats)
        for trajectory in store:
            for cost in trajectory.cost.tolist():
                metric.ledger.spend("collect", metric.repeats)
                metric.tell(Evaluation(cost), "collect", on_file=True)


class LearningStrategy(ABC, Generic[Learned]):
    """A strategy that learns from whole trainings of phi: `Recipe`, `Algorithm1`, `AlgorithmS1`.

    A subclass is a frozen dataclass of its settings.
    """

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
    def run(self, context: Context) -> Learned:
        """Learn, follow what was learned, and let the guard decide; the model is left unchanged."""


Strategy = SearchStrategy | LearningStrategy[Any]


def check_strategy(strategy: Any) -> None:
    """Refuse what is no strategy.

    Raises:
        ValueError: It is a class, or something else.
    """
    if isinstance(strategy, type):
        check_instance("GuidedTrustRegion() or CMAES()", strategy=strategy)
    if not isinstance(strategy, SearchStrategy | LearningStrategy):
        raise ValueError(
            f"strategy is {brief(strategy)}; it must be a search, e.g. GuidedTrustRegion() or CMAES(), or a learner,"
            " e.g. Recipe()"
        )
