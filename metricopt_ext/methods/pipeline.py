"""The whole job under one query budget: find a better phi, and keep the change only if the metric agrees."""

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import overload

from metricopt_ext.adapters.adapter import Adapter
from metricopt_ext.adapters.start import Start
from metricopt_ext.errors import BudgetError
from metricopt_ext.methods.guard import CONFIDENCE, Decision, decide, decide_among, deviates
from metricopt_ext.methods.guided import guided_results
from metricopt_ext.methods.kept_aside import check_kept_aside, confirmed
from metricopt_ext.methods.paper import Algorithm1
from metricopt_ext.methods.recipe import Recipe, Setting
from metricopt_ext.methods.result import LearnedResult, MetricOptResult, Result, SearchRun, outcome
from metricopt_ext.methods.rounds import meta_train
from metricopt_ext.methods.run_folder import KEPT_ASIDE, RunFolder, identity_of
from metricopt_ext.methods.siblings.algorithm_s1 import AlgorithmS1
from metricopt_ext.methods.starts import all_starts
from metricopt_ext.methods.tuning import (
    FRESH,
    choose_setting,
    evaluate_ends,
    finetune,
    query_callback,
    tune_start,
)
from metricopt_ext.search.direct import Search
from metricopt_ext.search.optimizer import LossStep
from metricopt_ext.search.trust_region import GuidedTrustRegion
from metricopt_ext.search.update_rule import UpdateRule
from metricopt_ext.tasks.cached_metric import CachedMetric
from metricopt_ext.tasks.metric import Metric
from metricopt_ext.tasks.split_half import evaluations_where_used, split_half_correlation
from metricopt_ext.tasks.task import FinetuneTask
from metricopt_ext.tasks.trajectory import TrajectoryStore
from metricopt_ext.tasks.undone import undone_if_cut_short
from metricopt_ext.utils import ranks
from metricopt_ext.utils.checks import check_instance, check_integer
from metricopt_ext.utils.identity import fingerprint_of_code
from metricopt_ext.utils.progress import Watcher, watched
from metricopt_ext.utils.words import counted
from metricopt_ext.value.fitting import Fit
from metricopt_ext.value.value_function import ValueFunction


@overload
def optimize_metric(
    task: FinetuneTask,
    *,
    queries: int,
    strategy: GuidedTrustRegion | None = None,
    starts: Mapping[str, Start] | None = None,
    guard_confidence: float = CONFIDENCE,
    kept_aside: Metric | None = None,
    seed: int = 0,
    output_dir: str | Path | None = None,
    resume: bool = False,
    watcher: Watcher | None = None,
) -> SearchRun: ...


@overload
def optimize_metric(
    task: FinetuneTask,
    *,
    queries: int,
    strategy: Recipe | Algorithm1,
    starts: None = None,
    guard_confidence: float = CONFIDENCE,
    kept_aside: Metric | None = None,
    seed: int = 0,
    output_dir: str | Path | None = None,
    resume: bool = False,
    watcher: Watcher | None = None,
) -> MetricOptResult: ...


@overload
def optimize_metric(
    task: FinetuneTask,
    *,
    queries: int,
    strategy: AlgorithmS1,
    starts: None = None,
    guard_confidence: float = CONFIDENCE,
    kept_aside: Metric | None = None,
    seed: int = 0,
    output_dir: str | Path | None = None,
    resume: bool = False,
    watcher: Watcher | None = None,
) -> LearnedResult: ...


@overload
def optimize_metric(
    task: FinetuneTask,
    *,
    queries: int,
    strategy: Search,
    starts: None = None,
    guard_confidence: float = CONFIDENCE,
    kept_aside: Metric | None = None,
    seed: int = 0,
    output_dir: str | Path | None = None,
    resume: bool = False,
    watcher: Watcher | None = None,
) -> Result: ...


@undone_if_cut_short
def optimize_metric(
    task: FinetuneTask,
    *,
    queries: int,
    strategy: GuidedTrustRegion | Recipe | Algorithm1 | AlgorithmS1 | Search | None = None,
    starts: Mapping[str, Start] | None = None,
    guard_confidence: float = CONFIDENCE,
    kept_aside: Metric | None = None,
    seed: int = 0,
    output_dir: str | Path | None = None,
    resume: bool = False,
    watcher: Watcher | None = None,
) -> Result:
    """Finetune a frozen model's phi for its metric within a number of metric queries.

    By default a guided trust-region search learns f from every query and follows it (`GuidedTrustRegion`), from the
    best of the starts on. A `Recipe` learns f from rounds of finetuning instead: the tool for many starts, as each
    further one then costs a few queries (`tune_start`); `Algorithm1` does so as the paper prints it, and `AlgorithmS1`
    learns the optimizer of phi with f. A direct search (`CMAES`, `GuidedES`) does without f. In each case the guard has
    the last word: the model is left at phi = 0 unless the gain exceeds chance, as halves of the metric's data, repeats
    or ``kept_aside`` show it. Without any of these the run is unguarded, and says so: the best on the data that the
    metric sees is kept (`Result.guard`). Any start that was applied before is ignored: continue from it by
    ``starts={"mine": adapter.as_start()}``, or `Adapter.merge` it and attach a new adapter.

    Processes that have joined (`ranks.joined`), under torchrun or in a process group of your own, each call this with
    the same arguments: they share the evaluations and rollouts, and all return what one would (docs/scale.md).

    After an error, or Ctrl-C at any moment, the model has the phi, modes, hooks and weights that it had before.

    Args:
        task: Model, loss, batches and metric. What the run spends is charged to ``task.metric.ledger`` at its end;
            a failed run that keeps its work in ``output_dir`` is charged once resumed.
        queries: Total metric queries that may be spent, the metric's repeats among them.
        strategy: A guided search, a recipe for learning and following f, one of the paper's algorithms, or a direct
            search.
        starts: Of a guided search, what it may begin from besides phi = 0, by name; each costs a query.
        guard_confidence: How sure the guard must be that a gain is not chance, at least 0.5 and below 1.
        kept_aside: The metric on data that ``task.metric`` does not see. What the guard would keep is kept only if it
            is the best there, too (`Result.aside`); two or three queries at the end, of this metric's own ledger.
        seed: Seed of all draws.
        output_dir: Keeps what was collected, ``value_function.safetensors``, ``update_rule.safetensors`` of
            `AlgorithmS1` and, last, ``adapter.safetensors`` with all that was kept (`load_run`); None keeps nothing.
        resume: Continue what an interrupted run left in ``output_dir``; the result is the same bit for bit.
        watcher: Notified of progress; by default a bar on the terminal, or plain lines where there is none.

    Returns:
        The result; what was kept is applied to the model, phi and what its start replaced (`Adapter.apply`).

    Raises:
        ValueError: A number is out of range, or ``strategy`` is a class, or has no use for ``starts``, or a start has a
            name that is taken, or ``kept_aside`` is no metric of other data.
        AdapterError: The loss is no scalar, or has no gradient in phi; or a start does not fit the model.
        BudgetError: ``queries`` is too small to plan with.
        MetricError: The metric failed; finished work is in ``output_dir``.
        WeightsError: The metric or the loss changed the model's parameters without a trace; they are put back.
        UnguardedError: The metric requires a guard (`Metric`), and nothing could tell a gain from chance. No query
            counts, unless all of them were needed to see that its halves are none.
        FileFormatError: ``output_dir`` holds another run, with other settings or model weights, it holds a run and
            ``resume`` is False, or another process writes to it.
        OSError: ``output_dir`` can't be written to, as where the disk is full; what was written before is in it.
        RankError: The metric has another value on another rank, waits for the other ranks itself, or a rank has ended.
    """
    strategy = strategy or GuidedTrustRegion()
    size = check_plan(
        task.adapter,
        task.metric,
        queries=queries,
        strategy=strategy,
        starts=starts,
        guard_confidence=guard_confidence,
        seed=seed,
    )
    starts = all_starts(task, starts or {})  # copies, as the model's own phi may be among them
    del starts["start"]
    if kept_aside is not None:
        check_kept_aside(task, kept_aside, starts or {})
        task = task.judged_by(task.metric.guarded_otherwise()) if task.metric.require_guard else task
    kept = output_dir is not None or ranks.several()
    identity = identity_of(strategy, task, starts or {}, seed=seed, size=size) if kept else {}
    if kept and kept_aside is not None:
        identity["kept aside"] = [fingerprint_of_code(kept_aside.function), guard_confidence]
    with ExitStack() as run:
        run.enter_context(ranks.sharing({"queries": queries, **identity}))
        folder = RunFolder(output_dir, identity)
        run.enter_context(folder.writing(resume))
        shown = run.enter_context(watched(watcher, task.metric.name, queries))
        base = run.enter_context(ExitStack())
        base.enter_context(task.adapter.applied(Start(task.origin())))
        base.enter_context(task.keeping_weights())
        if isinstance(strategy, GuidedTrustRegion):
            result: Result = _guided(task, queries, strategy, starts or {}, guard_confidence, seed, folder, shown)
        elif isinstance(strategy, Recipe):
            result = _follow(task, queries, strategy, size["tasks"], guard_confidence, seed, folder, shown)
        elif isinstance(strategy, Algorithm1):
            result = _as_printed(task, queries, strategy, size["tasks"], guard_confidence, seed, folder, shown)
        elif isinstance(strategy, AlgorithmS1):
            result = _learn_optimizer(
                task, queries, strategy, size["iterations"], guard_confidence, seed, folder, shown
            )
        else:
            result = _search_directly(task, queries, strategy, guard_confidence, seed, folder, shown)
        if kept_aside is not None:
            shown.stage("data kept aside")
            result = confirmed(result, task.judged_by(folder.cached(kept_aside, KEPT_ASIDE)), guard_confidence)
        result = ranks.on_first(lambda: result)
        base.close()
        task.adapter.apply(result.start_of(result.chosen))
        folder.keep(task, _learned_by(result))
        shown.outcome(f"{result.metric} {result.before:.4f} -> {result.after:.4f}")
        shown.done()
    return result


def check_plan(
    adapter: Adapter,
    metric: Metric,
    *,
    queries: int,
    strategy: GuidedTrustRegion | Recipe | Algorithm1 | AlgorithmS1 | Search | None = None,
    starts: Mapping[str, Start] | None = None,
    guard_confidence: float = CONFIDENCE,
    seed: int = 0,
) -> dict[str, int]:
    """Check what `optimize_metric` would be asked for, as far as it can be known before a model is trained.

    Args:
        adapter: Has phi's dimension; one that is attached for this alone will do.
        metric: Has the budget.
        queries: See `optimize_metric`, as for all others.
        strategy: The strategy.
        starts: The starts, only counted here.
        guard_confidence: The guard's confidence.
        seed: The seed.

    Returns:
        Sizes that follow from the budget.

    Raises:
        ValueError, BudgetError: As from `optimize_metric`.
    """
    strategy = strategy or GuidedTrustRegion()
    check_integer(0, queries=queries, seed=seed)
    deviates(guard_confidence)  # refuses what is out of range
    if not isinstance(strategy, (Recipe, Algorithm1, AlgorithmS1)):
        check_instance("GuidedTrustRegion() or CMAES()", strategy=strategy)
    if starts and not isinstance(strategy, GuidedTrustRegion):
        raise ValueError(f"starts are {list(starts)}; only a GuidedTrustRegion begins from the best of several")
    if queries > metric.ledger.left:
        asked = counted(queries, "query")
        raise BudgetError(f"{asked} requested, {metric.ledger.left} left in the metric's own budget")
    try:
        return _size(strategy, adapter.dim, queries // metric.repeats, len(starts or ()))
    except BudgetError as error:
        if metric.repeats == 1:
            raise
        raise BudgetError(f"{error} (each an evaluation of {metric.repeats} queries: its repeats)") from error


def _learned_by(result: Result) -> dict[str, ValueFunction | UpdateRule]:
    """Return what a run has learned, by the name of its file."""
    if isinstance(result, LearnedResult):
        return {"value_function": result.learned.f, "update_rule": result.learned.rule}
    if isinstance(result, (MetricOptResult, SearchRun)) and result.fit is not None:
        return {"value_function": result.fit.f}
    return {}


def _size(
    strategy: GuidedTrustRegion | Recipe | Algorithm1 | AlgorithmS1 | Search, dim: int, evaluations: int, starts: int
) -> dict[str, int]:
    """Return what follows from a number of evaluations, or say that it is too small."""
    if isinstance(strategy, Recipe):
        return {"tasks": strategy.tasks_per_round(evaluations, dim)}
    if isinstance(strategy, Algorithm1):
        return {"tasks": strategy.tasks(evaluations)}
    if isinstance(strategy, AlgorithmS1):
        return {"iterations": strategy.iterations(evaluations)}
    if evaluations < (least := strategy.least_queries(dim) + starts):
        raise BudgetError(f"{evaluations} queries are too few: {strategy} in {dim} dimensions needs at least {least}")
    return {"queries": evaluations}


def _guided(
    task: FinetuneTask,
    queries: int,
    search: GuidedTrustRegion,
    starts: Mapping[str, Start],
    confidence: float,
    seed: int,
    folder: RunFolder,
    watcher: Watcher,
) -> SearchRun:
    with folder.counted(task.metric, queries) as cached:
        watcher.on_file(cached.on_file * task.metric.repeats)
        (result,) = guided_results(
            task.judged_by(cached), [queries], search, starts=starts, confidence=confidence, seed=seed, watcher=watcher
        )
    return result


def _follow(
    task: FinetuneTask,
    queries: int,
    recipe: Recipe,
    tasks: int,
    confidence: float,
    seed: int,
    folder: RunFolder,
    watcher: Watcher,
) -> MetricOptResult:
    with folder.counted(task.metric, queries) as cached:
        store, ledger = folder.trajectories, cached.ledger
        _retell(task, store, cached, watcher)
        fit = meta_train(task, tasks=tasks, recipe=recipe, seed=seed, store=store, watcher=watcher)
        counted = task.judged_by(cached)
        watcher.stage("choose settings")
        setting = choose_setting(counted, fit, recipe, seed, watcher)
        before = ledger.spent
        tuned = tune_start(
            counted, fit, recipe=recipe, setting=setting, guard_confidence=confidence, seed=seed, watcher=watcher
        )
    return MetricOptResult(
        **outcome(task.metric, tuned.evaluations, Decision(tuned.chosen, tuned.verdict), tuned.ends),
        queries=dict(ledger.spent_on),
        queries_per_start=ledger.spent - before,
        loss_finetune=task.metric.to_value(tuned.evaluations["loss_finetune"].cost),
        setting=setting,
        split_half=split_half_correlation(list(store)),
        fit=fit,
        trajectories=tuple(store),
    )


def _as_printed(
    task: FinetuneTask,
    queries: int,
    algorithm: Algorithm1,
    tasks: int,
    confidence: float,
    seed: int,
    folder: RunFolder,
    watcher: Watcher,
) -> MetricOptResult:
    with folder.counted(task.metric, queries) as cached:
        store, ledger, counted = folder.trajectories, cached.ledger, task.judged_by(cached)
        _retell(task, store, cached, watcher)
        watcher.stage("meta-train")
        f = algorithm.meta_train(task, tasks=tasks, seed=seed, store=store, on_query=query_callback(task, watcher))
        if f.quality is not None:
            watcher.quality(store.queries, f.quality.spearman)
        watcher.stage("meta-test")
        start = task.origin()
        loss_only = finetune(task, algorithm.loss_only(), algorithm.steps, seed)[-1]
        followed = algorithm.meta_test(task, f, start, seed=seed, index=FRESH)[-1]
        before, ends = ledger.spent, {"start": start, "loss_finetune": loss_only, "metricopt": followed}
        asked = evaluate_ends(counted, ends, watcher)
    decision = decide_among(asked, evaluations_where_used(list(store)), confidence)
    return MetricOptResult(
        **outcome(task.metric, asked, decision, ends),
        queries=dict(ledger.spent_on),
        queries_per_start=ledger.spent - before,
        loss_finetune=task.metric.to_value(asked["loss_finetune"].cost),
        setting=Setting(0.0, algorithm.metric_rate),
        split_half=split_half_correlation(list(store)),
        fit=Fit(f),
        trajectories=tuple(store),
    )


def _learn_optimizer(
    task: FinetuneTask,
    queries: int,
    algorithm: AlgorithmS1,
    iterations: int,
    confidence: float,
    seed: int,
    folder: RunFolder,
    watcher: Watcher,
) -> LearnedResult:
    with folder.counted(task.metric, queries) as cached:
        store, ledger, counted = folder.trajectories, cached.ledger, task.judged_by(cached)
        _retell(task, store, cached, watcher)
        learned = algorithm.meta_train(
            task, iterations=iterations, seed=seed, store=store, checkpoint=folder.joint_training, watcher=watcher
        )
        before = ledger.spent
        watcher.stage("meta-test")
        path = algorithm.meta_test(counted, learned.rule, task.origin(), seed=seed)
        loss_only = finetune(task, LossStep(algorithm.lr), algorithm.steps, seed)[-1]
        ends = {"start": task.origin(), "loss_finetune": loss_only, "learned": path[-1]}
        asked = evaluate_ends(counted, ends, watcher)
    decision = decide_among(asked, evaluations_where_used(list(store)), confidence)
    return LearnedResult(
        **outcome(task.metric, asked, decision, ends),
        queries=dict(ledger.spent_on),
        queries_per_start=ledger.spent - before,
        loss_finetune=task.metric.to_value(asked["loss_finetune"].cost),
        path=path,
        learned=learned,
    )


def _retell(task: FinetuneTask, store: TrajectoryStore, cached: CachedMetric, watcher: Watcher) -> None:
    """Book the queries of trajectories on file, which are not collected again, and notify the watcher of them."""
    repeats = task.metric.repeats
    watcher.on_file((store.queries + cached.on_file) * repeats)
    told = query_callback(task, watcher)
    for trajectory in store:
        for cost in trajectory.cost.tolist():
            task.metric.ledger.spend("collect", repeats)
            told(cost)


def _search_directly(
    task: FinetuneTask,
    queries: int,
    search: Search,
    confidence: float,
    seed: int,
    folder: RunFolder,
    watcher: Watcher,
) -> Result:
    with folder.counted(task.metric, queries) as cached:
        counted = task.judged_by(cached)
        watcher.on_file(cached.on_file * task.metric.repeats)
        watcher.stage("search on the metric")
        evaluations = queries // task.metric.repeats
        found = search(counted, task.origin(), evaluations, seed=seed, on_query=query_callback(counted, watcher))
    start, *visited = found.evaluations
    candidates = {"start": start, "search": found.evaluation}
    ends = {"start": task.origin(), "search": found.phi}
    return Result(
        **outcome(task.metric, candidates, decide(candidates, visited, confidence), ends),
        queries=dict(cached.ledger.spent_on),
        queries_per_start=evaluations * task.metric.repeats,
    )
