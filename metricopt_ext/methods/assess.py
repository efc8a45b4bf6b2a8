"""Is it worth it? The first queries of a search say so, and count towards the search that follows."""

from collections.abc import Mapping
from pathlib import Path

from metricopt_ext.adapters.start import Start, StartLine
from metricopt_ext.errors import BudgetError
from metricopt_ext.methods.assessment import QUERIES, Assessment
from metricopt_ext.methods.evaluating import begun
from metricopt_ext.methods.guard import CONFIDENCE
from metricopt_ext.methods.pipeline import taken
from metricopt_ext.methods.run import SearchRun
from metricopt_ext.methods.strategy import Plan
from metricopt_ext.runtime import distributed
from metricopt_ext.runtime.progress import Callback
from metricopt_ext.search.strategy import SearchStrategy
from metricopt_ext.tasks.task import FinetuneTask
from metricopt_ext.tasks.undone import undone_if_cut_short
from metricopt_ext.utils.checks import check_integer
from metricopt_ext.utils.words import brief, counted


@undone_if_cut_short
def assess(
    task: FinetuneTask,
    queries: int | None = None,
    *,
    strategy: SearchStrategy | None = None,
    starts: Mapping[str, Start | StartLine] | None = None,
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
    plan = Plan.of(task, queries=None, strategy=strategy, starts=starts, guard_confidence=guard_confidence, seed=seed)
    if not plan.strategy.anytime:
        raise ValueError(
            f"what {brief(strategy)} asks first depends on its budget; assess with a search such as GuidedTrustRegion()"
        )
    check_integer(0, queries=queries)
    fixed = sum(isinstance(each, Start) for each in plan.starts.values())
    if queries < (least := (fixed + of_settings + 1) * repeats):
        beginning = f"{counted(fixed, 'start')}, settings of inference and a point of the search"
        raise BudgetError(f"{counted(queries, 'query')} are too few: {beginning} take {least}")
    task.metric.ledger.require(queries)
    with taken(plan, output_dir, resume, callback) as plan:
        log, most = plan.folder.log(task.metric), queries // repeats
        plan.callback.on_file(min(queries, log.answered * repeats))
        run = SearchRun(plan, log)
        with plan.folder.own_ledger(task.metric, queries), begun(run, plan.callback) as loop:
            for _ in loop.trials(most):
                pass
            found = distributed.on_first(lambda: run.assessment(most, loop.seconds))
        plan.callback.done()
    return found
