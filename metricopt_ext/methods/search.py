"""Ask and tell: a search whose points anybody may evaluate, in this process or elsewhere, today or tomorrow."""

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from metricopt_ext.adapters.adapter import Adapter
from metricopt_ext.adapters.start import Start, StartLine
from metricopt_ext.errors import BudgetError, MetricError
from metricopt_ext.methods.guard import CONFIDENCE, deviates
from metricopt_ext.methods.new_classes import held_back
from metricopt_ext.methods.result import Result
from metricopt_ext.methods.run_folder import RunFolder, settled
from metricopt_ext.methods.run_identity import identity_of
from metricopt_ext.methods.starts import all_starts
from metricopt_ext.methods.strategy import check_strategy, sized
from metricopt_ext.methods.trials import Trials
from metricopt_ext.search.strategy import SearchStrategy
from metricopt_ext.search.trust_region import GuidedTrustRegion
from metricopt_ext.tasks.metric import Metric
from metricopt_ext.tasks.task import FinetuneTask
from metricopt_ext.utils.checks import check_integer
from metricopt_ext.utils.words import brief, counted


class Search(Trials):
    """A search that you ask for trials and tell the metric's values (ask and tell, as in Optuna, Ax and cma).

    Its first trials are the model as trained and the other starts; then it searches from the best of them. Trials come
    in batches, and f is fitted again only once a whole batch is told, failed or given up. So the result depends neither
    on the order nor on the time of telling. `optimize_metric` is this loop on the task's own metric.

    It is for one thread. Trials of several files (`Trial.checkpoint`) are scored at once.

    Args:
        task: Model, loss and batches. Its metric's direction, bounds, name and repeats are used, but its function is
            not called. Or only an `Adapter`: without a loss all directions of phi count alike (`Result` says so).
        queries: Metric queries that may be spent, the metric's repeats among them.
        strategy: A guided or a direct search; the default is `GuidedTrustRegion`.
        starts: What it may begin from besides phi = 0, by name; a `Start` costs a query, a `StartLine` three to six.
        seed: Seed of all draws.
        output_dir: Keeps every answer, with its point; None keeps nothing.
        resume: Continue from ``output_dir``: its answers are told again, and its open trials stay open.
        guard_confidence: How sure the guard must be that a gain is not chance, at least 0.5 and below 1.
        maximize: With an adapter only: whether higher is better.
        bounds: With an adapter only: lowest and highest possible value; None if they are not known.
        name: With an adapter only: the metric's name.
        subject_to: With an adapter only: constraints on other quantities, which `tell` takes as ``also`` (`Metric`).
        gradients: With an adapter only: gradients of a loss in phi, ``m x d``, computed elsewhere; their directions
            shape f's kernel and the first design.
        new_classes: With an adapter only: whether the model will be judged on classes other than the metric's; see
            `Metric`. A result before the budget is spent has f's mean instead of the value of what is kept.

    Raises:
        ValueError: A number is out of range, or the strategy has no ask and tell, or arguments do not go together.
        BudgetError: ``queries`` is too small, or more than the ledger of the task's metric has left.
        AdapterError: The loss is no scalar, or has no gradient in phi; or a start does not fit the model.
        FileFormatError: ``output_dir`` holds another run, it holds a run and ``resume`` is False, or another process
            writes to it.

    Examples:
        >>> search = Search(task, queries=60, output_dir="out")  # doctest: +SKIP
        >>> while trials := search.ask(8):  # doctest: +SKIP
        ...     for trial in trials:
        ...         with trial.applied() as model:
        ...             search.tell(trial.id, my_scorer(model))
        >>> print(search.result())  # doctest: +SKIP
    """

    def __init__(
        self,
        task: FinetuneTask | Adapter,
        queries: int = 60,
        *,
        strategy: SearchStrategy | None = None,
        starts: Mapping[str, Start | StartLine] | None = None,
        seed: int = 0,
        output_dir: str | Path | None = None,
        resume: bool = False,
        guard_confidence: float = CONFIDENCE,
        maximize: bool | None = None,
        bounds: tuple[float, float] | None = None,
        name: str | None = None,
        subject_to: Mapping[str, str] | None = None,
        gradients: Tensor | None = None,
        new_classes: bool | None = None,
    ) -> None:
        task = _task_of(task, maximize, bounds, name, subject_to, gradients, new_classes)
        strategy = strategy or GuidedTrustRegion()
        check_search(strategy)
        check_integer(0, queries=queries, seed=seed)
        deviates(guard_confidence)  # refuses what is out of range
        if queries > task.metric.ledger.left:
            left = task.metric.ledger.left
            raise BudgetError(f"{counted(queries, 'query')} requested, {left} left in the metric's own budget")
        candidates, evaluations = all_starts(task, starts or {}), queries // task.metric.repeats
        fixed = sum(isinstance(each, Start) for each in candidates.values())
        size = sized(strategy, evaluations, task.dim, fixed, held_back(strategy, task.metric))
        with task.adapter.applied(Start(task.origin())):
            strategy.check(task)
            task.check_loss(seed, 2)
        others = {name: start for name, start in candidates.items() if name != "start"}
        identity = identity_of(strategy, task, others, seed=seed, size=size)
        task = settled(task, identity, output_dir)
        self.folder: RunFolder = RunFolder(output_dir, identity)
        self._run = ExitStack()
        self._run.enter_context(self.folder.writing(resume))
        try:
            kept = self.folder.kept_evaluations(task.metric)
            super().__init__(task, strategy, candidates, evaluations, kept, seed, guard_confidence)
        except BaseException:
            self._run.close()
            raise

    def result(self) -> Result:
        """Return what the guard makes of all that was told; what it keeps is applied to the model and written.

        It can be asked for at any time once `least_queries` were told; the search goes on as if it had not been. After
        `close`, too, if no other process has gone on in the folder.

        Raises:
            BudgetError: Too few trials were told; the message says how many are missing.
            FileFormatError: The folder was removed or replaced, or left by `close` and changed by another process; the
                model is as it was.
        """
        result = self.outcome()
        with self.folder.held(self._kept.check_unchanged):  # before the model is another
            self.task.adapter.apply(result.start_of(result.chosen))
            self.folder.keep(self.task, result)
        return result

    def close(self) -> None:
        """Leave the folder to other processes; nothing more can be told to this object."""
        self._run.close()

    def __enter__(self) -> "Search":
        """Return itself."""
        return self

    def __exit__(self, *details: Any) -> None:
        """Leave the folder to other processes."""
        self.close()


def check_search(strategy: Any) -> None:
    """Refuse what can't be asked and told.

    Raises:
        ValueError: It is a class, or a strategy that runs its own trainings.
    """
    check_strategy(strategy)
    if not isinstance(strategy, SearchStrategy):
        raise ValueError(
            f"strategy is a {type(strategy).__name__}, which has no ask and tell: it learns from whole trainings; use"
            " optimize_metric, or a search such as GuidedTrustRegion() or CMAES()"
        )


def _task_of(
    task: FinetuneTask | Adapter,
    maximize: bool | None,
    bounds: tuple[float, float] | None,
    name: str | None,
    subject_to: Mapping[str, str] | None,
    gradients: Tensor | None,
    new_classes: bool | None,
) -> FinetuneTask:
    given = {
        "maximize": maximize,
        "bounds": bounds,
        "name": name,
        "subject_to": subject_to,
        "gradients": gradients,
        "new_classes": new_classes,
    }
    if isinstance(task, FinetuneTask):
        if several := [key for key, value in given.items() if value is not None]:
            raise ValueError(f"{several[0]} is given beside a task, whose metric has its own; leave it out")
        return task
    if not isinstance(task, Adapter):
        raise ValueError(f"task is {brief(task)}; it must be a FinetuneTask, or the Adapter that attach_film returns")
    if maximize is None:
        raise ValueError("maximize is missing: say whether higher values are better, maximize=True or maximize=False")
    metric = Metric(
        _told_from_outside,
        maximize=maximize,
        bounds=bounds,
        name=name or "metric",
        subject_to=subject_to,
        new_classes=bool(new_classes),
    )
    return FinetuneTask(task, metric=metric, gradients=gradients)


def _told_from_outside(model: nn.Module) -> float:
    raise MetricError("the values of this search are told to it; it has no function to call")
