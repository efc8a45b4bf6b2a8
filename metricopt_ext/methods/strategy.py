"""What finds phi within a budget: a search, which is asked and told, or a learner, which needs whole trainings."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from metricopt_ext.adapters.start import Start, StartLine
from metricopt_ext.errors import BudgetError
from metricopt_ext.methods.folder import RunFolder
from metricopt_ext.methods.guard import CONFIDENCE
from metricopt_ext.methods.result import Result
from metricopt_ext.runtime.progress import Callback
from metricopt_ext.search.strategy import SearchStrategy
from metricopt_ext.tasks.metric import Metric
from metricopt_ext.tasks.task import FinetuneTask
from metricopt_ext.utils.checks import check_instance
from metricopt_ext.utils.words import brief


@dataclass(frozen=True)
class Context:
    """What a learner works with.

    Attributes:
        task: Model, loss, batches and metric.
        queries: The budget, the metric's repeats among them.
        folder: Keeps the run's work.
        callback: Notified of progress.
        size: What `LearningStrategy.size` makes of the budget.
        confidence: How sure the guard must be, at least 0.5 and below 1.
        seed: Seed of all draws.
        starts: What a strategy that takes starts may begin from besides phi = 0.
    """

    task: FinetuneTask
    queries: int
    folder: RunFolder
    callback: Callback
    size: dict[str, int]
    confidence: float = CONFIDENCE
    seed: int = 0
    starts: Mapping[str, Start | StartLine] = field(default_factory=dict)


class LearningStrategy(ABC):
    """A strategy that learns from whole trainings of phi: `Recipe`, `Algorithm1`, `AlgorithmS1`.

    A subclass is a frozen dataclass of its settings.

    Attributes:
        takes_starts: Whether a run may begin from the best of several starts.
        takes_constraints: Whether it respects what the metric is subject to.
        takes_settings: Whether it tunes settings of inference.
        grows: Whether a finished run can go on with more queries.
    """

    takes_starts: ClassVar[bool] = False
    takes_constraints: ClassVar[bool] = False
    takes_settings: ClassVar[bool] = False
    grows: bool = False

    @abstractmethod
    def size(self, evaluations: int, dim: int, starts: int = 1) -> dict[str, int]:
        """Return what follows from a number of evaluations in d dimensions; starts other than phi = 0 have no use.

        Raises:
            BudgetError: It is too small; the message says how many are needed.
        """

    def held_back(self, metric: Metric) -> int:
        """Return how many evaluations are for what is kept alone (`new_classes.held_back`)."""
        return 0

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """Return what a run depends on, as JSON, to tell it from others."""

    @abstractmethod
    def run(self, context: Context) -> Result:
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


def sized(strategy: Strategy, evaluations: int, dim: int, starts: int, held_back: int) -> dict[str, int]:
    """Return what follows from a number of evaluations, of which some are held back.

    Args:
        strategy: The strategy.
        evaluations: How many may be made.
        dim: phi's dimension.
        starts: Number of starts, phi = 0 among them.
        held_back: How many of them are for what is kept alone.

    Raises:
        BudgetError: The others are too few; the message says how many are needed.
    """
    size = strategy.size(evaluations, dim, starts)
    try:
        strategy.size(evaluations - held_back, dim, starts)
    except BudgetError as error:
        raise BudgetError(
            f"{error}; of {evaluations}, one is held back for the value of what is kept, as classes are new"
        ) from error
    return size


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
