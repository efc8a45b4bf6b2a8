"""The whole job under one query budget: learn f, finetune phi, and keep the change only if the metric agrees."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any, overload

import torch

from metricopt_ext.errors import BudgetError, FileFormatError
from metricopt_ext.methods.recipe import Recipe, Setting
from metricopt_ext.methods.result import MetricOptResult, Result
from metricopt_ext.methods.rounds import learn_in_rounds
from metricopt_ext.methods.tuning import FRESH, choose, evaluate, teller, tune_start
from metricopt_ext.search.direct import Search
from metricopt_ext.search.optimizer import LossStep, MetricOptStep
from metricopt_ext.tasks.cached_metric import CachedMetric
from metricopt_ext.tasks.metric import Ledger, Metric, stacked_halves
from metricopt_ext.tasks.rollout import Policy, collect, rollout
from metricopt_ext.tasks.split_half import chance_of_gain, split_half_correlation
from metricopt_ext.tasks.task import FinetuneTask
from metricopt_ext.tasks.trajectory import Trajectory, TrajectoryStore
from metricopt_ext.utils.files import claim, fingerprint
from metricopt_ext.utils.progress import Bars, Watcher
from metricopt_ext.value.fitting import Fit


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
    leaves in the model whichever of start, loss-only end and MetricOpt's end the metric likes best. A direct search
    (`search.CMAES`, `search.GuidedES`) spends all queries on the metric itself instead: the better tool for a single
    start. Either way the model is left at phi = 0 unless the gain is larger than chance would make it, as far as the
    metric tells (see `Metric`), so it never ends worse than it was trained on the data that the metric sees. A phi that
    it held before counts for nothing: `tune_start` goes on from one, or `Adapter.merge` it and attach anew.

    Args:
        task: Model, loss, batches and metric. What the run spends is charged to ``task.metric.ledger`` at its end;
            a failed run that keeps its work in ``output_dir`` is charged once it was resumed.
        queries: Metric queries that may be spent in all.
        strategy: A recipe for learning and following f, or a direct search.
        seed: Seed of all draws.
        output_dir: Keeps trajectories, ``value_function.safetensors`` and ``adapter.safetensors``; None keeps nothing.
        resume: Go on with what an interrupted run left in ``output_dir``; the result is the same bit for bit.
        watcher: Is told of the progress; by default a bar on the terminal.

    Returns:
        The result; the tuned phi is in the model.

    Raises:
        BudgetError: ``queries`` is too small to plan with.
        MetricError: The metric failed; finished work is in ``output_dir``.
        FileFormatError: ``output_dir`` holds another run, with other settings or of a model with other weights, or it
            holds a run and ``resume`` is False.
    """
    if watcher is None:
        with Bars() as bars:
            watcher = bars.watch(task.metric.name, queries)
            return _optimize(task, queries, strategy or Recipe(), seed, output_dir, resume, watcher)
    return _optimize(task, queries, strategy or Recipe(), seed, output_dir, resume, watcher)


def _optimize(
    task: FinetuneTask,
    queries: int,
    strategy: Recipe | Search,
    seed: int,
    output_dir: str | Path | None,
    resume: bool,
    watcher: Watcher,
) -> Result:
    folder = None if output_dir is None else Path(output_dir)
    if queries > task.metric.ledger.left:
        raise BudgetError(f"{queries} queries requested, {task.metric.ledger.left} are left in the metric's own budget")
    if isinstance(strategy, Recipe):
        result: Result = _follow_value_function(task, queries, strategy, seed, folder, resume, watcher)
    else:
        result = _search_directly(task, queries, strategy, seed, folder, resume, watcher)
    task.adapter.set_phi(result.ends[result.chosen])
    if folder is not None:
        task.adapter.save(folder / "adapter.safetensors")
    watcher.done()
    return result


def _follow_value_function(
    task: FinetuneTask, queries: int, recipe: Recipe, seed: int, folder: Path | None, resume: bool, watcher: Watcher
) -> MetricOptResult:
    tasks = recipe.tasks_per_round(queries)
    if recipe.refine is not None and recipe.refine_queries < recipe.refine.least_queries(task.dim):
        raise BudgetError(
            f"refine_queries is {recipe.refine_queries}; {recipe.refine} in {task.dim} dimensions needs at least"
            f" {recipe.refine.least_queries(task.dim)}"
        )
    store = open_store(task, recipe, tasks, seed, folder, resume)
    with _counted(task.metric, queries, folder) as (remembered, ledger):
        if len(store):
            ledger.spend("collect", store.queries)
        fit = meta_train(task, tasks=tasks, recipe=recipe, seed=seed, store=store, watcher=watcher)
        counted = task.judged_by(remembered)
        watcher.stage("choose settings")
        setting = _choose_setting(counted, fit, recipe, seed, watcher)
        before = ledger.spent
        tuned = tune_start(counted, fit, recipe=recipe, setting=setting, seed=seed, watcher=watcher)
    if folder is not None:
        fit.f.save(folder / "value_function.safetensors")
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
    )


def _search_directly(
    task: FinetuneTask, queries: int, search: Search, seed: int, folder: Path | None, resume: bool, watcher: Watcher
) -> Result:
    if queries < search.least_queries(task.dim):
        raise BudgetError(
            f"{queries} queries are too few: {search} in {task.dim} dimensions needs at least"
            f" {search.least_queries(task.dim)}"
        )
    if folder is not None:
        _refuse_mixing(folder, resume)
        claim(folder / "identity.json", {"search": repr(search), "queries": queries, **_identity(task, seed)})
    with _counted(task.metric, queries, folder) as (remembered, ledger):
        counted = task.judged_by(remembered)
        watcher.stage("search on the metric")
        found = search(counted, task.origin(), queries, seed=seed, on_query=teller(counted, watcher))
        start, *others = remembered.evaluations
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
        queries=dict(ledger.spent_on),
        queries_per_start=queries,
        ends={"start": task.origin(), "search": found.phi},
    )


def meta_train(
    task: FinetuneTask,
    *,
    tasks: int,
    recipe: Recipe | None = None,
    seed: int = 0,
    store: TrajectoryStore | None = None,
    watcher: Watcher | None = None,
) -> Fit:
    """Learn a value function from rounds of ``tasks`` trajectories (Algorithm 1, meta-training).

    The first round follows the loss alone; each later one follows the f fitted so far, with step lengths and loss
    weights drawn at random, so that f is corrected where it is going to be used.

    Args:
        task: Model, loss, batches and metric; ``rounds * tasks * evals`` queries are spent.
        tasks: Number of tasks per round.
        recipe: How to work.
        seed: Seed of all draws.
        store: Keeps the trajectories; those that it has are not collected again.
        watcher: Is told of the progress.
    """
    recipe = recipe or Recipe()
    store = TrajectoryStore() if store is None else store
    watcher = watcher or Watcher()

    def collect_round(round: int, indices: Sequence[int], fit: Fit | None) -> list[Trajectory]:
        collect(
            task,
            store,
            partial(_collection_policy, fit, recipe, seed),
            round=round,
            indices=indices,
            start_std=recipe.start_std,
            steps=recipe.steps,
            evals=recipe.evals,
            seed=seed,
            on_query=teller(task, watcher),
        )
        return [trajectory for trajectory in store if trajectory.round <= round]

    return learn_in_rounds(collect_round, recipe, tasks=tasks, seed=seed, watcher=watcher, device=task.origin().device)


def open_store(
    task: FinetuneTask, recipe: Recipe, tasks: int, seed: int, folder: Path | None, resume: bool
) -> TrajectoryStore:
    """Open the run's trajectories, refusing to mix two runs.

    Raises:
        FileFormatError: The folder holds a run and ``resume`` is False, or it holds a run with other settings or of a
            model with other weights.
    """
    if folder is None:
        return TrajectoryStore()
    _refuse_mixing(folder, resume)
    identity = {
        **asdict(recipe),
        **{name: _described(getattr(recipe, name)) for name in ("labels", "learners", "refine")},
        "tasks": tasks,
        **_identity(task, seed),
    }
    claim(folder / "identity.json", identity)  # of the evaluations too: another strategy must not be given them
    return TrajectoryStore(folder / "trajectories", identity)


def _described(part: Any) -> str:
    """Return what ``repr`` does, but functions by name: their own repr holds an address, which no other process has."""
    if isinstance(part, tuple):
        return f"({', '.join(map(_described, part))})"
    if isinstance(part, FunctionType):
        return f"{part.__module__}.{part.__qualname__}"
    return repr(part)


def _identity(task: FinetuneTask, seed: int) -> dict[str, Any]:
    context, metric = task.adapter.context, task.metric
    return {
        "seed": seed,
        "population": task.population,
        "metric": [metric.name, metric.maximize, metric.bounds],  # stored costs depend on the last two
        "adapter": [context.kind, task.dim, context.layers, context.seed],
        "weights": fingerprint(task.adapter.base_state_dict()),  # a model that was trained again has another metric
    }


def _refuse_mixing(folder: Path, resume: bool) -> None:
    kept = ("trajectories", "identity.json", "evaluations.json")
    if not resume and any((folder / name).exists() for name in kept):
        raise FileFormatError(f"{folder} holds an earlier run; resume it, or use another output folder")


@contextmanager
def _counted(metric: Metric, queries: int, folder: Path | None) -> Iterator[tuple[CachedMetric, Ledger]]:
    """Count a run in a ledger of its own, and charge the metric's own once it is over.

    A run that fails charges nothing if it has a folder: what it did comes back when it is resumed. Without one it is
    charged for what it spent. The metric that is handed out keeps its evaluations in the folder; what is collected has
    files of its own.
    """
    own, metric.ledger = metric.ledger, Ledger(queries)
    run, finished = metric.ledger, False
    try:
        yield CachedMetric(metric, None if folder is None else folder / "evaluations.json"), run
        finished = True
    finally:
        metric.ledger = own
        if finished or folder is None:
            for purpose, spent in run.spent_on.items():
                own.spend(purpose, spent)


def _collection_policy(fit: Fit | None, recipe: Recipe, seed: int, chunk: Sequence[int]) -> Policy:
    """Round 0 follows the loss; later rounds follow f, trusted or not: this is how it gets corrected."""
    if fit is None:
        return LossStep(recipe.lr)
    weight, metric_step = recipe.explored_settings(seed, chunk).to(fit.f.radius.device).unbind(1)
    return MetricOptStep(fit.f, recipe.lr, metric_step, weight, recipe.steps, even_untrusted=True)


def _choose_setting(task: FinetuneTask, fit: Fit, recipe: Recipe, seed: int, watcher: Watcher) -> Setting:
    """Try each setting from phi = 0 and a few random starts; the least mean cost wins."""
    if len(recipe.settings) == 1 or not fit.f.trusted:
        return recipe.settings[0]
    indices = range(FRESH + 1, FRESH + 1 + recipe.trials)
    starts = task.origin()[None]
    if recipe.trials:
        starts = torch.cat([starts, task.starts(recipe.start_std, seed, indices)])
    n, m = len(starts), len(recipe.settings)
    settings = torch.tensor(recipe.settings, dtype=starts.dtype, device=starts.device)
    weight, metric_step = settings.repeat_interleave(n, dim=0).unbind(1)
    policy = MetricOptStep(fit.f, recipe.lr, metric_step, weight, recipe.steps)
    trial_tasks = [FRESH + 1 + recipe.trials, *indices] * m
    points, _ = rollout(task, starts.repeat(m, 1), policy, steps=recipe.steps, seed=seed, indices=trial_tasks)
    costs: list[float] = []
    for phi in points[:, -1]:
        costs.append(evaluate(task, phi, "choose", f"choosing settings, trial {len(costs)}", watcher).cost)
    return recipe.settings[int(torch.tensor(costs).view(m, n).mean(1).argmin())]
