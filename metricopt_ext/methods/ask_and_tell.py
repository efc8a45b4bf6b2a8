"""Ask and tell: a search whose points anybody may evaluate, in this process or elsewhere, today or tomorrow."""

import inspect
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from metricopt_ext.adapters.adapter import Adapter
from metricopt_ext.adapters.start import Start
from metricopt_ext.errors import AdapterError, MetricError
from metricopt_ext.methods.assessment import Assessment
from metricopt_ext.methods.folder import RunFolder
from metricopt_ext.methods.guard import CONFIDENCE
from metricopt_ext.methods.result import Result
from metricopt_ext.methods.run import SearchRun
from metricopt_ext.methods.starts import Starts
from metricopt_ext.methods.strategy import LearningStrategy, Plan
from metricopt_ext.search.asking import FAILED
from metricopt_ext.search.asking import Trial as Asked
from metricopt_ext.search.strategy import SearchStrategy
from metricopt_ext.tasks.evaluation import Evaluation
from metricopt_ext.tasks.metric import Metric
from metricopt_ext.tasks.settings import Value
from metricopt_ext.tasks.task import FinetuneTask
from metricopt_ext.utils.files import opened_atomically, save_checkpoint
from metricopt_ext.utils.numbers import number_of
from metricopt_ext.utils.words import brief, counted


@dataclass(frozen=True, eq=False)
class Trial:
    """A point that a search wants to know the metric at.

    Attributes:
        id: Its number, from 0.
        start: Name of the start whose model it is a point of: ``"start"`` for the model as it was trained.
        at: The model there: phi, what is in place of the model's own tensors, and settings of inference.
    """

    id: int
    start: str
    at: Start
    _task: FinetuneTask = field(repr=False)

    @property
    def phi(self) -> Tensor:
        """``d``."""
        return self.at.phi

    @property
    def settings(self) -> dict[str, Value]:
        """The settings of inference to be judged with, by name; empty of a task without any."""
        return self._task.values_of(self.at.settings)

    @contextmanager
    def applied(self) -> Iterator[nn.Module]:
        """Yield the model at this trial, in evaluation mode, its settings in force; afterwards it is as it was.

        Raises:
            AdapterError: Another trial is applied, as all share the model.
        """
        adapter = self._task.adapter
        other = adapter.context.trial
        if other not in (None, self.id):
            raise AdapterError(
                f"trial {self.id} is of the same model as trial {other}, which is applied; leave its with block"
                " first, or write both to files, trial.checkpoint(path)"
            )
        adapter.context.trial = self.id
        try:
            with self._task.at(self.at) as model:
                yield model
        finally:
            adapter.context.trial = other

    def checkpoint(self, path: str | Path) -> None:
        """Write the model at this trial as an ordinary state dict, phi merged into the weights.

        Settings of inference are no part of it (`settings`).

        Args:
            path: The file; safetensors if its name ends so, otherwise by ``torch.save``.

        Raises:
            AdapterError: phi can't be merged (`Adapter.merge`).
            OSError: The file can't be written.
        """
        adapter = self._task.adapter
        with adapter.applied(self.at):
            state = {key: value.detach().cpu().contiguous() for key, value in adapter.merged_state_dict().items()}
        if Path(path).suffix == ".safetensors":
            save_checkpoint(path, state)
        else:
            with opened_atomically(path) as file:
                torch.save(state, file)


class Search(AbstractContextManager["Search"]):
    """A search that you ask for trials and tell the metric's values (ask and tell, as in Optuna, Ax and cma).

    Its first trials are the model as trained and the other starts; then it searches from one of them. Trials come in
    batches, and f is fitted again only once a whole batch is told, failed or given up. So the result depends neither
    on the order nor on the time of telling. `optimize_metric` is this loop on the task's own metric.

    It is for one thread. Trials of several files (`Trial.checkpoint`) are scored at once.

    Args:
        task: Model, loss and batches. Its metric's direction, bounds, name and repeats are used, but its function is
            not called. Or only an `Adapter`: without a loss all directions of phi count alike.
        queries: Metric queries that may be spent, the metric's repeats among them.
        strategy: A guided or a direct search; the default is `GuidedTrustRegion`.
        starts: What it may begin from besides phi = 0, by name; a `Start` costs a query, a `StartLine` three to six.
            Or a function of the task that returns it.
        seed: Seed of all draws.
        output_dir: Keeps every answer, with its point; None keeps nothing.
        resume: Continue from ``output_dir``: its answers are told again, and its open trials stay open.
        guard_confidence: How sure the guard must be that a gain is not chance, at least 0.5 and below 1.
        gradients: With an adapter only: gradients of a loss in phi, ``m x d``, computed elsewhere; their directions
            shape f's kernel and the first design.
        of_metric: With an adapter only: arguments of `Metric` besides the function, ``maximize`` among them; ``bounds``
            are None if they are not given. `tell` takes what ``subject_to`` and ``combine`` need. Where classes are
            new, a result before the budget is spent has f's mean instead of the value of what is kept.

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
        starts: Starts | None = None,
        seed: int = 0,
        output_dir: str | Path | None = None,
        resume: bool = False,
        guard_confidence: float = CONFIDENCE,
        gradients: Tensor | None = None,
        **of_metric: Any,
    ) -> None:
        task = _task_of(task, gradients, of_metric)
        if isinstance(strategy, LearningStrategy):
            raise ValueError(
                f"strategy is a {type(strategy).__name__}, which has no ask and tell: it learns from whole trainings;"
                " use optimize_metric, or a search such as GuidedTrustRegion() or CMAES()"
            )
        plan = Plan(
            task, queries=queries, strategy=strategy, starts=starts, guard_confidence=guard_confidence, seed=seed
        )
        plan.check()
        self.folder: RunFolder = RunFolder(output_dir, plan.identity())
        self.task: FinetuneTask = task
        with ExitStack() as held:
            held.enter_context(self.folder.writing(resume))
            self._run = SearchRun(plan, self.folder.log(task.metric))
            self._held = held.pop_all()
        self._asking = self._run.asking
        self._trials: dict[int, Trial] = {}

    def ask(self, n: int = 1) -> list[Trial]:
        """Return at most ``n`` trials of the current batch that this object has not handed out yet.

        Returns:
            Fewer at the end of a batch; none while all of it is being evaluated (`open`), or once the budget is given
            out.

        Raises:
            ValueError: ``n`` is below 1.
        """
        return [self._made(each) for each in self._asking.ask(n)]

    def open(self) -> list[Trial]:
        """Return the trials that were asked for, here or in an earlier process, and not told yet."""
        return [self._made(each) for each in self._asking.open()]

    def _made(self, trial: Asked) -> Trial:
        return self._trials.setdefault(trial.id, Trial(trial.id, trial.name, trial.at, self.task))

    def tell(
        self,
        id: int,
        value: float | Mapping[str, Any],
        halves: Any = None,
        noise: float | None = None,
        outcomes: Mapping[str, Any] | None = None,
    ) -> None:
        """Tell what the metric is at a trial; it is on disk when this returns.

        Args:
            id: The trial's.
            value: The metric's value, in its own units; of a metric that `combine` makes of outcomes, these by name.
            halves: Its values on two random halves of the data, by which the guard tells a gain from chance; or on
                several pairs of halves, as many at each trial. Of outcomes each half is a dict, too.
            noise: Standard error of the value, if it is the mean of several evaluations. Of a value that is made of
                outcomes the guard alone uses it: tell each outcome's own for f.
            outcomes: Other quantities, by name: those that the metric is subject to, and any that are to be shown. Each
                is a number, or ``(value, halves)``, or ``(value, halves, noise)``, as of the metric; None where
                ``value`` has all by name, in these forms.

        Raises:
            ValueError: There is no such trial, it has another answer already, or a number is not finite, outside the
                metric's bounds, or missing although the metric is subject to it, or another trial was told another
                number of pairs, or other names. Nothing has changed then.
        """
        metric = self.task.metric
        try:
            other = isinstance(outcomes, Mapping) and not metric.combination and metric.name not in outcomes
            if outcomes is not None and not other:
                raise ValueError(
                    f"outcomes are {brief(outcomes)}; they must map names of other quantities to numbers, as"
                    " {'accuracy': 0.9}; of a metric that combine makes of them tell all as the value"
                )
            returned = (value, halves) if metric.combination else (value, halves, noise)
            told = metric.read({**metric.named(returned), **(outcomes or {})}, noisy=True)
            own = told.pop(metric.name)
            evaluation = Evaluation(own.value, told, own.pairs, own.noise, sign=metric.sign)
            if metric.combination and noise is not None:
                evaluation = evaluation._replace(noise=number_of(noise))
                evaluation.check()
        except (MetricError, TypeError) as wrong:
            raise ValueError(str(wrong)) from wrong
        before = {len(each.pairs) for each in self._asking.log.entries.values() if each.pairs}
        if own.pairs and before and len(own.pairs) not in before:
            raise ValueError(
                f"trial {id} is told {counted(len(own.pairs), 'pair')} of halves, but others {before.pop()}; divide the"
                " data in the same ways for all"
            )
        self._asking.tell(id, evaluation)

    def fail(self, id: int, reason: str = "") -> None:
        """Say that a trial's evaluation failed: it counts as a query, and the worst value of the run stands in for it.

        Args:
            id: The trial's.
            reason: Why, for the error if it is the first.

        Raises:
            ValueError: There is no such trial, it has an answer already, or it is the model as it was trained.
        """
        if id == 0:
            raise ValueError(
                "trial 0 is the model as it was trained, so its value is needed: it failed"
                f" ({reason or 'no reason given'}); fix the scorer, then tell its value"
            )
        self._asking.tell(id, FAILED)

    def give_up(self, id: int) -> None:
        """Wait for a trial no longer: it costs no query, and its batch closes without it.

        Raises:
            ValueError: There is no such trial, it has an answer already, or it is a start.
        """
        self._asking.tell(id, None)

    @property
    def spent(self) -> int:
        """Queries that were told or failed so far, the metric's repeats among them."""
        return self._asking.log.answered * self.task.metric.repeats

    @property
    def failed(self) -> int:
        """How many evaluations have failed, in earlier processes too."""
        return self._asking.log.failed

    def assessment(self, most: int) -> Assessment:
        """Return what the first trials say, as far as they were told, of whether the search is worth its queries.

        Args:
            most: How many trials.
        """
        return self._run.assessment(most)

    def result(self) -> Result:
        """Return what the guard makes of all that was told; what it keeps is applied to the model and written.

        It can be asked for at any time once `least_queries` were told, but of a search with a folder not after `close`;
        the search goes on as if it had not been.

        Raises:
            BudgetError: Too few trials were told; the message says how many are missing.
            FileFormatError: The folder was left by `close`, or replaced; the model is as it was.
            OSError: It was removed.
        """
        self.folder.check_held()  # before the model is another
        result = self._run.outcome()
        self.task.adapter.apply(result.start_of(result.chosen))
        self.folder.keep(self.task, result)
        return result

    def close(self) -> None:
        """Leave the folder to other processes; nothing more can be told to this object."""
        self._held.close()

    def __exit__(self, *details: Any) -> None:
        """Leave the folder to other processes."""
        self.close()


def _task_of(task: FinetuneTask | Adapter, gradients: Tensor | None, of_metric: dict[str, Any]) -> FinetuneTask:
    """Return the task itself; or that of an adapter, with a metric that is told (`Search`)."""
    if strange := sorted(of_metric.keys() - inspect.signature(Metric).parameters.keys()):
        raise TypeError(f"{strange[0]!r} is no argument of Search, nor of Metric")
    given = {name: each for name, each in of_metric.items() if each is not None}
    if isinstance(task, FinetuneTask):
        if gradients is not None or given:
            one = next(iter(given), "gradients")
            raise ValueError(f"{one} is given beside a task, whose metric has its own; leave it out")
        return task
    if not isinstance(task, Adapter):
        raise ValueError(f"task is {brief(task)}; it must be a FinetuneTask, or the Adapter that attach_film returns")
    if "maximize" not in given:
        raise ValueError("maximize is missing: say whether higher values are better, maximize=True or maximize=False")
    metric = Metric(_told_from_outside, **{"name": "metric", "bounds": None} | given)
    return FinetuneTask(task, metric=metric, gradients=gradients)


def _told_from_outside(model: nn.Module) -> float:
    raise MetricError("the values of this search are told to it; it has no function to call")
