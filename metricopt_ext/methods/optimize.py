"""The whole job under one query budget: find a better phi, and keep the change only if the metric agrees."""

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from metricopt_ext.adapters.start import Start
from metricopt_ext.errors import BudgetError, MetricError
from metricopt_ext.methods.assessment import QUERIES, Assessment
from metricopt_ext.methods.ending import check_holdout, confirmed
from metricopt_ext.methods.folder import HOLDOUT, RunFolder
from metricopt_ext.methods.guard import CONFIDENCE, held_back
from metricopt_ext.methods.result import Result
from metricopt_ext.methods.run import SearchRun, begun, search_results
from metricopt_ext.methods.starts import Starts
from metricopt_ext.methods.strategy import LearningStrategy, Plan, Strategy
from metricopt_ext.runtime import distributed
from metricopt_ext.runtime.identity import fingerprint_of_code
from metricopt_ext.runtime.progress import Callback, check_callback, progress_of
from metricopt_ext.search.strategy import SearchStrategy
from metricopt_ext.tasks.metric import Metric
from metricopt_ext.tasks.task import FinetuneTask
from metricopt_ext.tasks.undone import undone_if_cut_short
from metricopt_ext.utils.words import brief, counted


@undone_if_cut_short
def optimize_metric(
    task: FinetuneTask,
    *,
    queries: int,
    strategy: Strategy | None = None,
    starts: Starts | None = None,
    guard_confidence: float = CONFIDENCE,
    holdout: Metric | None = None,
    seed: int = 0,
    output_dir: str | Path | None = None,
    resume: bool = False,
    callback: Callback | None = None,
) -> Result:
    """Finetune a frozen model's phi for its metric within a number of metric queries.

    By default a guided trust-region search learns f from every query and follows it (`GuidedTrustRegion`), from the
    start that surely gains (`guard.chosen_start`). A `Recipe` instead learns f from rounds of finetuning: use it for
    many starts, as each further one then costs a few queries (`tune_start`). `Algorithm1` does so as printed in the
    paper, and `AlgorithmS1` learns phi's optimizer with f. A direct search (`CMAES`, `GuidedES`) needs no f. In each
    case the guard has the last word: a change is kept only if its gain exceeds chance, as shown by halves of the
    metric's data, repeats or ``holdout``. Without any of these the run is unguarded, and says so: the best on the data
    that the metric sees is kept (`Result.guard`). A start applied before is ignored: continue from it with
    ``starts={"mine": adapter.as_start()}``, or `Adapter.merge` it and attach a new adapter.

    Processes that have joined (`distributed.joined`), under torchrun or in a process group of your own, each call this
    with the same arguments: they share the evaluations, and all return what one would (docs/scale.md).

    After an error, or Ctrl-C at any moment, the model has the phi, modes, hooks and weights that it had before.

    Args:
        task: Model, loss, batches and metric. What the run spends is charged to ``task.metric.ledger`` at its end;
            a failed run that keeps its work in ``output_dir`` is charged once resumed.
        queries: Most metric queries to spend, including the metric's repeats. With ``resume``, a guided or another
            anytime search goes on with more than it had; the end of each earlier number is a query besides.
        strategy: A guided search, a recipe for learning and following f, one of the paper's algorithms, or a direct
            search.
        starts: For a search, what it may begin from besides phi = 0, by name: a `Start` costs a query, a `StartLine`
            three to six; all lines together at most a third. Or a function of the task that returns it.
        guard_confidence: How sure the guard must be that a gain is not chance, at least 0.5 and below 1.
        holdout: The metric on data that ``task.metric`` does not see. The guard's choice is kept only if it is the best
            there, too (`Result.holdout`). This takes two or three queries at the end, from this metric's own ledger.
        seed: Seed of all draws.
        output_dir: Keeps what was collected, ``value_function.safetensors``, ``update_rule.safetensors`` of
            `AlgorithmS1`, ``inference.yaml`` of a task with settings (`load_inference`) and, last,
            ``adapter.safetensors`` with all that was kept (`load_run`); None keeps nothing.
        resume: Continue what an interrupted run left in ``output_dir``; the result is the same bit for bit.
        callback: Notified of progress; by default a bar on the terminal, or plain lines where there is none.

    Returns:
        The result; what was kept is applied to the model, phi and what its start replaced (`Adapter.apply`).

    Raises:
        ValueError: A number is out of range, or ``strategy`` is a class, or has no use for ``starts``, or a start has a
            name that is taken, or ``holdout`` is no metric of other data, or ``strategy`` can't respect what the
            metric is subject to, or does not tune the task's settings.
        AdapterError: The loss is no scalar, or has no gradient in phi; or a start does not fit the model.
        BudgetError: ``queries`` is too small to plan with.
        MetricError: The metric failed; finished work is in ``output_dir``.
        WeightsError: The metric or the loss changed the model's parameters without a trace; they are put back.
        FileFormatError: ``output_dir`` holds another run, with other settings or model weights, it holds a run and
            ``resume`` is False, or another process writes to it.
        OSError: ``output_dir`` can't be written to, as where the disk is full; what was written before is in it.
        RankError: The metric has another value on another rank, waits for the other ranks itself, or a rank has ended.
    """
    plan = Plan(task, queries=queries, strategy=strategy, starts=starts, guard_confidence=guard_confidence, seed=seed)
    besides: dict[str, Any] = {}
    if holdout is not None:
        check_holdout(task, holdout)
        besides = {"holdout": [fingerprint_of_code(holdout.function), guard_confidence]}
    with taken(plan, output_dir, resume, callback, **besides):
        with task.keeping_weights():
            looked = distributed.on_first(lambda: task.look(Start(task.origin())))  # first: what fails costs nothing
            result = (_learned if isinstance(plan.strategy, LearningStrategy) else _searched)(plan)
            if holdout is not None:
                plan.callback.stage("held-out data")
                aside = task.judged_by(holdout.logged(plan.folder.log(holdout, HOLDOUT)))

                def judged(name: str) -> float:
                    return aside.evaluate(result.start_of(name), "holdout", repr(name)).value

                result = distributed.on_first(lambda: confirmed(result, judged, plan.confidence, task))
            result = distributed.on_first(lambda: looked_at(result, task, looked))
        task.adapter.apply(result.start_of(result.chosen))
        plan.folder.keep(task, result)
        plan.callback.outcome(result.before, result.after)
        plan.callback.done()
    return result


@undone_if_cut_short
def assess(
    task: FinetuneTask,
    queries: int | None = None,
    *,
    strategy: SearchStrategy | None = None,
    starts: Starts | None = None,
    guard_confidence: float = CONFIDENCE,
    seed: int = 0,
    output_dir: str | Path | None = None,
    resume: bool = False,
    callback: Callback | None = None,
) -> Assessment:
    """Say with a few queries whether finetuning for the metric is worth more of them, and what else would do.

    The queries are those that `optimize_metric` asks first with the same arguments: the starts, settings of inference
    if the task has any, then the search's design. With an ``output_dir`` they count towards it: ``optimize_metric(...,
    output_dir=output_dir, resume=True)`` continues as if it had asked them itself, bit for bit. It refuses the folder
    if its own queries are too few for as many settings, or for as many points on lines that replace tensors. The model
    is left as it was.

    For a metric of pure noise it says ``"do not"`` in at least 95 of 100 runs. For one that has neither halves nor
    repeats, or never varies, it says ``"undecided"``.

    Args:
        task: Model, loss, batches and metric. What is spent is charged to ``task.metric.ledger``; with an
            ``output_dir``, by the run that goes on with it.
        queries: How many, including the metric's repeats; more than the starts, including phi = 0, and the settings of
            inference need. By default 12, plus as many as the task's settings may need.
        strategy: The search that would follow, whose queries don't depend on its budget; by default a guided one.
        starts: What it may begin from besides phi = 0, by name; a `Start` costs a query, a `StartLine` up to six.
            Or a function of the task that returns it.
        guard_confidence: How sure the guard must be that a gain is not chance, at least 0.5 and below 1.
        seed: Seed of all draws.
        output_dir: Keeps the evaluations; None keeps nothing.
        resume: Continue an assessment or a run in ``output_dir``; queries on file are not asked again.
        callback: Notified of progress; by default a bar on the terminal, or plain lines where there is none.

    Returns:
        The assessment, in the metric's own units.

    Raises:
        ValueError: A number is out of range, or the strategy's first queries depend on its budget, or a start has a
            name that is taken.
        BudgetError: ``queries`` is too small, or more than the metric's ledger has left.
        AdapterError, MetricError, WeightsError, FileFormatError, OSError, RankError: As from `optimize_metric`.

    Examples:
        >>> found = assess(task, starts={"batchnorm": batchnorm_start(task, x_val)})  # doctest: +SKIP
        >>> print(found)  # doctest: +SKIP
        >>> if found.recommendation == "search":  # doctest: +SKIP
        ...     optimize_metric(task, queries=found.search_queries)
    """
    repeats, of_settings = task.metric.repeats, 0 if task.settings is None else task.settings.queries
    queries = QUERIES + of_settings * repeats if queries is None else queries
    confidence = guard_confidence
    plan = Plan(
        task, queries=queries, strategy=strategy, starts=starts, guard_confidence=confidence, seed=seed, endless=True
    )
    if not plan.strategy.anytime:
        raise ValueError(
            f"what {brief(strategy)} asks first depends on its budget; assess with a search such as GuidedTrustRegion()"
        )
    fixed = sum(isinstance(each, Start) for each in plan.starts.values())
    if queries < (least := (fixed + of_settings + 1) * repeats):
        beginning = f"{counted(fixed, 'start')}, settings of inference and a point of the search"
        raise BudgetError(f"{counted(queries, 'query')} are too few: {beginning} take {least}")
    with taken(plan, output_dir, resume, callback):
        log, most = plan.folder.log(task.metric), queries // repeats
        plan.callback.on_file(min(queries, log.answered * repeats))
        plan.check()
        run = SearchRun(plan, log)
        with plan.folder.own_ledger(task.metric, queries), begun(run, plan.callback) as loop:
            for _ in islice(loop.trials(), most):
                pass
            found = distributed.on_first(partial(run.assessment, most))
        plan.callback.done()
    return found


def _learned(plan: Plan) -> Result:
    """Have the first of the ranks run a learner, whose queries all of them book."""
    result: Result = distributed.on_first(lambda: plan.strategy.run(plan))
    if distributed.rank() > 0:
        plan.task.metric.ledger.charge(result.queries)
    return result


def _searched(plan: Plan) -> Result:
    """Search, and tell what is on file again."""
    metric, log = plan.task.metric, plan.folder.log(plan.task.metric)
    plan.callback.on_file(log.answered * metric.repeats)
    *earlier, _ = log.sit(plan.queries // metric.repeats)
    if earlier:
        before = counted(earlier[-1] * metric.repeats, "query")
        plan.callback.say(f"it goes on from {before}, whose end is a query besides")
    besides = len(earlier) * (1 + held_back(plan.strategy, metric)) * metric.repeats
    with plan.folder.own_ledger(metric, plan.queries + besides):
        (result,) = search_results(plan, kept=log)
    return result


@contextmanager
def taken(
    plan: Plan, output_dir: str | Path | None, resume: bool, callback: Callback | None, **besides: Any
) -> Iterator[None]:
    """Take a run's folder and callback, which its plan has from then on.

    Args:
        plan: The plan.
        output_dir: As of `optimize_metric`, as for the rest.
        resume: Whether to continue what is in the folder.
        callback: Notified of progress.
        besides: What the run depends on besides (`Plan.identity`).
    """
    check_callback(callback)
    task, kept = plan.task, output_dir is not None or distributed.several()
    identity = plan.identity(**besides) if kept else {}
    with distributed.sharing({"queries": plan.queries, **identity}), ExitStack() as run:
        plan.folder = RunFolder(output_dir, identity)
        run.enter_context(plan.folder.writing(resume))
        plan.callback = run.enter_context(progress_of(callback, task.metric.name, plan.queries))
        run.enter_context(task.metric.calling(plan.callback.answered))
        if task.chosen:
            plan.callback.say(task.chosen)
        yield


def looked_at(result: Result, task: FinetuneTask, before: dict[str, float]) -> Result:
    """Return a result with what the metric's ``also`` has of the model as it was trained and of what was kept.

    Functions that fail at the end leave out what they would have told, with a warning: the run is done by then.

    Args:
        result: The run's.
        task: Has the adapter and the metric; its ledger is not charged.
        before: What they have of the model as it was trained.
    """
    after = before
    if before and result.chosen != "start":
        try:
            after = task.look(result.start_of(result.chosen))
        except MetricError as error:
            warnings.warn(f"{error}; so it is not known of the model as it is now", stacklevel=2)
            after = {}
    return replace(result, looked={"start": before, result.chosen: after})
