"""What finds phi within a budget: a search, which is asked and told, or a learner, which needs whole trainings."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from metricopt_ext.adapters.start import Start, StartLine
from metricopt_ext.errors import BudgetError
from metricopt_ext.methods.folder import RunFolder, identity_of
from metricopt_ext.methods.guard import CONFIDENCE, Verdict, deviates, held_back
from metricopt_ext.methods.result import Result
from metricopt_ext.methods.starts import Starts, all_starts
from metricopt_ext.runtime.identity import described
from metricopt_ext.runtime.progress import Callback
from metricopt_ext.search.strategy import SearchStrategy
from metricopt_ext.search.trust_region import GuidedTrustRegion
from metricopt_ext.tasks.evaluation import Evaluation, stacked_halves
from metricopt_ext.tasks.metric import Metric
from metricopt_ext.tasks.split_half import correlation_of_halves
from metricopt_ext.tasks.task import FinetuneTask
from metricopt_ext.utils.checks import check_integer
from metricopt_ext.utils.words import and_more, brief
from metricopt_ext.value.fitting import Fit


@dataclass(frozen=True)
class Tuned:
    """The outcome of tuning a start.

    Attributes:
        ends: End point phi, ``d``, of each candidate: ``"start"`` itself, ``"loss_finetune"``, and the end under what
            was learned, ``"metricopt"`` of a recipe.
        evaluations: The metric's evaluation of each of them.
        chosen: The candidate to keep.
        verdict: What the guard thinks of the best of the others than the start.
        path: The phi visited from the start to the end under what was learned, ``(T + 1) x d``.
    """

    ends: dict[str, Tensor]
    evaluations: dict[str, Evaluation]
    chosen: str
    verdict: Verdict
    path: Tensor


class LearningStrategy(ABC):
    """A strategy that learns from whole trainings of phi: `Recipe`, `Algorithm1`, `AlgorithmS1`.

    It finetunes phi under what it learned, and has the guard decide. It begins from phi = 0 alone, respects no
    constraints, and tunes no settings of inference. A subclass is a frozen dataclass of its settings.

    Attributes:
        anytime: As of `SearchStrategy`; a finished run can't go on with more queries.
        learns: The field of a `Result` that has what is learned besides f.
    """

    anytime: ClassVar[bool] = False
    learns: ClassVar[str]

    @property
    @abstractmethod
    def planned(self) -> tuple[str, int, int, int]:
        """``(unit, least, each, besides)``: what a budget is planned in, the least number of these, queries of each.

        ``besides`` are those that choose settings and tune the start.
        """

    def size(self, evaluations: int, dim: int = 0, starts: int = 1) -> dict[str, int]:
        """Return how many of what is `planned` a number of evaluations is for; dimension and starts have no say.

        Raises:
            BudgetError: It is too small; the message says how many are needed.
        """
        unit, least, each, besides = self.planned
        number = (evaluations - besides) // each
        if number < least:
            raise BudgetError(
                f"{evaluations} queries are too few for {least} {unit} of {each} queries each, and {besides}"
                f" besides: give at least {besides + least * each}, or fewer of its rounds, tasks or evals"
            )
        return {unit: number}

    def identity(self) -> dict[str, Any]:
        """Return what a run depends on, the settings by their descriptions, as JSON, to tell it from others."""
        return {name: described(value) for name, value in vars(self).items()}

    @abstractmethod
    def learn(self, task: FinetuneTask, context: "Plan") -> tuple[Any, Fit]:
        """Return what is learned besides f, and f; keep the trajectories in the run's folder."""

    @abstractmethod
    def tuned(self, task: FinetuneTask, fit: Fit, learned: Any, context: "Plan") -> Tuned:
        """Tune phi = 0 under what was learned."""

    def run(self, context: "Plan") -> Result:
        """Learn, follow what was learned, and let the guard decide; the model is left unchanged."""
        metric, store = context.task.metric, context.folder.trajectories
        with context.folder.own_ledger(metric, context.queries):
            log, ledger = context.folder.log(metric), metric.ledger
            task = context.task.judged_by(metric.logged(log))
            context.callback.on_file(log.answered * metric.repeats)
            for trajectory in store:  # its queries are booked, and told of, from the log
                for phi in trajectory.observed_phi.to(task.origin()):
                    task.evaluate(phi, "collect")
            learned, fit = self.learn(task, context)
            before = ledger.spent
            tuned = self.tuned(task, fit, learned, context)
        values, seen = tuned.evaluations, tuple(store)
        starts = [each.evaluations[0] for each in seen if each.observed[0] == 0 and each.halves is not None]
        return Result.of(
            task.metric,
            values,
            chosen=tuned.chosen,
            verdict=tuned.verdict,
            ends=tuned.ends,
            starts={"start": values["start"].value},
            started_at="start",
            candidates={"start": Start(task.origin())},
            split_half=correlation_of_halves(stacked_halves(starts)),
            points=torch.cat([each.observed_phi for each in seen]),
            costs=tuple(task.metric.normalised(cost) for each in seen for cost in each.cost.tolist()),
            queries=dict(ledger.spent_on),
            queries_per_start=ledger.spent - before,
            fit=fit,
            path=tuned.path,
            loss_finetune=values["loss_finetune"].value,
            trajectories=seen,
            **{self.learns: learned},
        )


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


class Plan:
    """What a run is asked for, all of it checked as far as it can be known before a model is trained.

    Args:
        task: Model, loss, batches and metric; of a check alone, one without a loss will do.
        queries: The budget, the metric's repeats among them; see `optimize_metric`, as for all others.
        strategy: A search or a learner; by default a guided search.
        starts: What a search may begin from. Copies are made, as the model's own phi may be among them.
        guard_confidence: How sure the guard must be.
        seed: Seed of all draws.
        endless: Whether these are the first queries of a run whose end is out of sight.

    Attributes:
        starts: The starts by name, ``"start"`` first: phi = 0.
        confidence: How sure the guard must be, at least 0.5 and below 1.
        size: What the strategy's ``size`` makes of the budget.
        folder: Keeps the run's work.
        callback: Notified of progress.

    Raises:
        ValueError, BudgetError, AdapterError: As from `optimize_metric`.
    """

    def __init__(
        self,
        task: FinetuneTask,
        *,
        queries: int,
        strategy: Strategy | None = None,
        starts: Starts | None = None,
        guard_confidence: float = CONFIDENCE,
        seed: int = 0,
        endless: bool = False,
    ) -> None:
        self.strategy: Any = GuidedTrustRegion() if strategy is None else strategy
        if not isinstance(self.strategy, SearchStrategy | LearningStrategy):
            raise ValueError(
                f"strategy is {brief(strategy)}; it must be a search, e.g. GuidedTrustRegion() or CMAES(), or a"
                " learner, e.g. Recipe(): an instance, no class"
            )
        check_integer(0, queries=queries, seed=seed)
        deviates(guard_confidence)  # refuses what is out of range
        self.task: FinetuneTask = task
        self.queries: int = queries
        self.confidence: float = guard_confidence
        self.seed: int = seed
        self.endless: bool = endless
        self.starts: dict[str, Start | StartLine] = all_starts(task, starts)
        if isinstance(strategy, LearningStrategy):
            _check_learner(task, strategy, [*self.starts][1:])
        task.metric.ledger.require(queries)
        self.size: dict[str, int] = {} if endless else self._size()
        self.folder: RunFolder = RunFolder(None, {})
        self.callback: Callback = Callback()

    def _size(self) -> dict[str, int]:
        """Return what follows from the budget, of which a query may be held back."""
        metric, said = self.task.metric, ""
        evaluations = self.queries // metric.repeats
        fixed = sum(isinstance(each, Start) for each in self.starts.values())
        try:
            size: dict[str, int] = self.strategy.size(evaluations, self.task.dim, fixed)
            if isinstance(self.strategy, SearchStrategy) and held_back(self.strategy, metric):
                said = f"; of {evaluations}, one is held back for the value of what is kept, as classes are new"
                self.strategy.size(evaluations - 1, self.task.dim, fixed)
        except BudgetError as error:
            said += f" (each an evaluation of {metric.repeats} queries: its repeats)" * (metric.repeats > 1)
            raise BudgetError(f"{error}{said}") from error
        return size

    def check(self) -> None:
        """Refuse a task that the search can't work with, or a loss that is none, before any query.

        Raises:
            AdapterError, ModuleNotFoundError: See `SearchStrategy.check` and `FinetuneTask.check_loss`.
        """
        with self.task.adapter.applied(Start(self.task.origin())):
            self.strategy.check(self.task)
            self.task.check_loss(self.seed, 2)

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
