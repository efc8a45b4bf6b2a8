"""The whole job under one query budget: learn f, finetune phi, and keep the change only if the metric agrees."""

from pathlib import Path
from typing import overload

from metricopt_ext.errors import BudgetError
from metricopt_ext.methods.recipe import Recipe
from metricopt_ext.methods.result import MetricOptResult, Result
from metricopt_ext.methods.rounds import meta_train
from metricopt_ext.methods.run_folder import RunFolder, identity_of
from metricopt_ext.methods.tuning import choose, choose_setting, query_callback, tune_start
from metricopt_ext.search.direct import Search
from metricopt_ext.tasks.metric import stacked_halves
from metricopt_ext.tasks.split_half import chance_of_gain, split_half_correlation
from metricopt_ext.tasks.task import FinetuneTask
from metricopt_ext.utils.checks import check_instance, check_integer
from metricopt_ext.utils.progress import Watcher, watched
from metricopt_ext.utils.words import counted


@overload
def optimize_metric(
    task: FinetuneTask,
    *,
    queries: int,
    strategy: Recipe | None = None,
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
    strategy: Search,
    seed: int = 0,
    output_dir: str | Path | None = None,
    resume: bool = False,
    watcher: Watcher | None = None,
) -> Result: ...


def optimize_metric(
    task: FinetuneTask,
    *,
    queries: int,
    strategy: Recipe | Search | None = None,
    seed: int = 0,
    output_dir: str | Path | None = None,
    resume: bool = False,
    watcher: Watcher | None = None,
) -> Result:
    """Finetune a frozen model's phi for its metric within a number of metric queries.

    By default it learns f from rounds of trajectories, chooses how boldly to follow it, finetunes from phi = 0, and
    leaves in the model whichever of start, loss-only end and MetricOpt's end scores best on the metric. A direct search
    (`direct.CMAES`, `direct.GuidedES`) spends all queries on the metric itself instead: the better tool for a single
    start. Either way the model is left at phi = 0 unless the gain exceeds chance, as far as the metric reveals it (see
    `Metric`), so on the data that the metric sees it never ends up worse than it was trained. Any phi that it held
    before is ignored: continue from it by `tune_start`, or `Adapter.merge` it and attach a new adapter.

    Args:
        task: Model, loss, batches and metric. What the run spends is charged to ``task.metric.ledger`` at its end;
            a failed run that keeps its work in ``output_dir`` is charged once resumed.
        queries: Total metric queries that may be spent.
        strategy: A recipe for learning and following f, or a direct search.
        seed: Seed of all draws.
        output_dir: Keeps trajectories, ``value_function.safetensors`` and ``adapter.safetensors``; None keeps nothing.
        resume: Continue what an interrupted run left in ``output_dir``; the result is the same bit for bit.
        watcher: Notified of progress; by default a bar on the terminal, or plain lines where there is none.

    Returns:
        The result; the tuned phi is in the model.

    Raises:
        ValueError: ``queries`` or ``seed`` is not an integer of at least 0, or ``strategy`` is a class.
        AdapterError: The loss is no scalar, or has no gradient in phi.
        BudgetError: ``queries`` is too small to plan with.
        MetricError: The metric failed; finished work is in ``output_dir``.
        FileFormatError: ``output_dir`` holds another run, with other settings or model weights, or it holds a run and
            ``resume`` is False.
    """
    strategy = strategy or Recipe()
    check_integer(0, queries=queries, seed=seed)
    if not isinstance(strategy, Recipe):
        check_instance("Recipe() or CMAES()", strategy=strategy)
    if queries > task.metric.ledger.left:
        asked = counted(queries, "query")
        raise BudgetError(f"{asked} requested, {task.metric.ledger.left} left in the metric's own budget")
    if isinstance(strategy, Recipe):
        size = {"tasks": strategy.tasks_per_round(queries, task.dim)}
    elif queries >= (least := strategy.least_queries(task.dim)):
        size = {"queries": queries}
    else:
        raise BudgetError(f"{queries} queries are too few: {strategy} in {task.dim} dimensions needs at least {least}")
    folder = RunFolder(output_dir, identity_of(strategy, task, seed=seed, size=size), resume)
    with watched(watcher, task.metric.name, queries) as shown:
        if isinstance(strategy, Recipe):
            result: Result = _follow_value_function(task, queries, strategy, size["tasks"], seed, folder, shown)
        else:
            result = _search_directly(task, queries, strategy, seed, folder, shown)
        task.adapter.set_phi(result.ends[result.chosen])
        folder.keep(task, result.fit.f if isinstance(result, MetricOptResult) else None)
        shown.outcome(f"{result.metric} {result.before:.4f} -> {result.after:.4f}")
        shown.done()
    return result


def _follow_value_function(
    task: FinetuneTask, queries: int, recipe: Recipe, tasks: int, seed: int, folder: RunFolder, watcher: Watcher
) -> MetricOptResult:
    with folder.counted(task.metric, queries) as cached:
        store, ledger = folder.trajectories, cached.ledger
        if len(store):
            ledger.spend("collect", store.queries)
        fit = meta_train(task, tasks=tasks, recipe=recipe, seed=seed, store=store, watcher=watcher)
        counted = task.judged_by(cached)
        watcher.stage("choose settings")
        setting = choose_setting(counted, fit, recipe, seed, watcher)
        before = ledger.spent
        tuned = tune_start(counted, fit, recipe=recipe, setting=setting, seed=seed, watcher=watcher)
    value = {name: task.metric.to_value(evaluation.cost) for name, evaluation in tuned.evaluations.items()}
    return MetricOptResult(
        metric=task.metric.name,
        before=value["start"],
        after=value[tuned.chosen],
        best=value[tuned.best],
        chosen=tuned.chosen,
        chance=tuned.chance * task.metric.scale,
        queries=dict(ledger.spent_on),
        queries_per_start=ledger.spent - before,
        ends=tuned.ends,
        optimism=tuned.optimism * task.metric.scale,
        loss_finetune=value["loss_finetune"],
        setting=setting,
        split_half=split_half_correlation(list(store)),
        fit=fit,
        trajectories=tuple(store),
        reports_halves=tuned.evaluations["start"].halves is not None,
    )


def _search_directly(
    task: FinetuneTask, queries: int, search: Search, seed: int, folder: RunFolder, watcher: Watcher
) -> Result:
    with folder.counted(task.metric, queries) as cached:
        counted = task.judged_by(cached)
        watcher.stage("search on the metric")
        found = search(counted, task.origin(), queries, seed=seed, on_query=query_callback(counted, watcher))
    start, *others = cached.evaluations
    costs = {"start": start, "search": start._replace(cost=found.cost)}
    chance = chance_of_gain(start, stacked_halves(others))
    chosen, value = choose(costs, chance), task.metric.to_value
    return Result(
        metric=task.metric.name,
        before=value(start.cost),
        after=value(costs[chosen].cost),
        best=value(found.cost),
        chosen=chosen,
        chance=chance * task.metric.scale,
        optimism=0.0,
        queries=dict(cached.ledger.spent_on),
        queries_per_start=queries,
        ends={"start": task.origin(), "search": found.phi},
        reports_halves=start.halves is not None,
    )
