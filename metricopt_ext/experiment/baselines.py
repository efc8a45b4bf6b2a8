"""The methods of a comparison: each asks the metric alone, from one beginning, and says where it stood.

Every call of the metric is one query, whoever makes it. What a query costs the model is another matter, and is counted
besides (`passes`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from metricopt_ext.adapters.start import Start, StartLine
from metricopt_ext.errors import ConfigError, MetricError
from metricopt_ext.experiment.method import METHODS, Baseline, End, Meter, Reached, Started, end_of, now
from metricopt_ext.experiment.method_config import FinetuneConfig
from metricopt_ext.experiment.passes import noticing
from metricopt_ext.experiment.run_config import RunConfig
from metricopt_ext.experiment.traced import Spent, Trace, with_budget
from metricopt_ext.methods.guard import CONFIDENCE, accepted, held_back
from metricopt_ext.methods.optimize import optimize_metric
from metricopt_ext.methods.paper.recipe import finetune
from metricopt_ext.methods.result import Result
from metricopt_ext.methods.run import Evaluating, search_results
from metricopt_ext.methods.strategy import LearningStrategy, Plan
from metricopt_ext.runtime import distributed
from metricopt_ext.runtime.progress import Callback, Within
from metricopt_ext.search.asking import Asking, labelled
from metricopt_ext.search.optimizer import LossStep
from metricopt_ext.search.stages import SettingsStage
from metricopt_ext.search.strategy import SearchResult, SearchStrategy
from metricopt_ext.search.trust_region import GuidedTrustRegion
from metricopt_ext.tasks.constraints import Limits
from metricopt_ext.tasks.evaluation import Outcome
from metricopt_ext.tasks.log import Entry, Log
from metricopt_ext.tasks.metric import Metric
from metricopt_ext.tasks.settings import Settings
from metricopt_ext.tasks.task import FinetuneTask


def without() -> Settings:
    """Say that a task has no settings of inference.

    Raises:
        ConfigError: Always.
    """
    raise ConfigError("this task has no settings of inference")


def usual_baselines(config: RunConfig, settings: Callable[[], Settings] = without) -> dict[str, Baseline]:
    """Return what every task's comparison can run, by name.

    Args:
        config: The task's settings.
        settings: Returns the settings of inference of its model.
    """
    search = config.build_strategy()
    own = metricopt(search if isinstance(search, GuidedTrustRegion) else None, config.guard.confidence)

    def best_step(task: FinetuneTask, start: Tensor, queries: int, seed: int) -> Tensor:
        return best_of_loss_finetune(task, loss_path(task, config.finetune, seed, start), queries)

    made = {name: entry.factory(config.finetune) for name, entry in METHODS.items() if entry.factory is not None}
    return {
        "loss_finetune_best": at_each_budget(best_step, least=lambda dim: 2),
        **{name: searching(each) for name, each in made.items() if isinstance(each, SearchStrategy)},
        "metricopt": own,
        "metricopt_one": told_one_number(own),
        **_with_settings(own, settings, config.guard.confidence),
    }


def _with_settings(own: Baseline, settings: Callable[[], Settings], confidence: float) -> dict[str, Baseline]:
    """Return what tunes settings of inference, by name: what is free, each alone, presets too, and then phi."""

    def free(task: FinetuneTask, started: Started, budgets: Sequence[int], seed: int) -> Iterator[Reached]:
        meter, found = Meter(task), settings()
        start = replace(started.start, settings={**found.first, **started.start.settings})
        yield from (meter.reached(start) for _ in budgets)

    return {
        "settings_free": Baseline(free),
        "settings_lines": tuning_settings(lambda: settings().limited(presets={}), confidence),
        "settings": tuning_settings(settings, confidence),
        "settings+phi": with_settings_of(own, settings),
    }


def loss_path(
    task: FinetuneTask,
    settings: FinetuneConfig,
    seed: int,
    start: Tensor | None = None,
    callback: Callback | None = None,
) -> Tensor:
    """Finetune for the loss alone from a start, by default phi = 0; returns the visited phi, ``(T + 1) x d``."""
    return finetune(task, LossStep(settings.lr), settings.steps, seed, start, callback=callback)


def best_of_loss_finetune(task: FinetuneTask, points: Tensor, evals: int) -> Tensor:
    """Evaluate the metric at evenly spaced points of a loss-only finetune and return the best, ``d`` (paper, Table 1).

    Args:
        task: The task.
        points: The visited phi, ``(T + 1) x d``.
        evals: Number of queries, both ends included; all points if that is T + 1 or more.
    """
    chosen = torch.linspace(0, len(points) - 1, min(evals, len(points))).round().long()
    costs = [task.evaluate(phi, "loss_finetune_best").cost for phi in points[chosen]]
    return points[chosen[costs.index(min(costs))]]


def metricopt(search: GuidedTrustRegion | None = None, confidence: float = CONFIDENCE) -> Baseline:
    """Make a baseline of the guided search as `optimize_metric` runs it: its starts, its points and its guard.

    Args:
        search: The search.
        confidence: How sure the guard must be, at least 0.5 and below 1.
    """
    engine = search or GuidedTrustRegion()

    def run(task: FinetuneTask, started: Started, budgets: Sequence[int], seed: int) -> Iterator[Reached]:
        starts: dict[str, Start | StartLine] = {**started.starts, **started.lines}
        starts.pop("start", None)
        numbers = [started.spent + queries for queries in budgets]
        ends = 1 + held_back(engine, task.metric)  # what each smaller budget asks for itself alone
        limited = with_budget(task, max(numbers) + (len(numbers) - 1) * ends)
        known, meter, elsewhere = on_file(started, limited), Meter(limited), 0
        given: dict[str, Any] = {"strategy": engine, "starts": starts, "guard_confidence": confidence, "seed": seed}
        plan = Plan(limited, queries=numbers[0], **given)
        for result in search_results(plan, numbers[1:], known):
            reached = now()
            spent, before = result.queries_per_start - started.spent, elsewhere
            elsewhere = limited.metric.ledger.spent - result.queries_per_start
            meter.forget_last_queries(elsewhere - before)  # a smaller budget's end, which this one has elsewhere
            end = end_of(result.start_of(result.chosen))
            yield replace(meter.reached(end), queries=spent, queries_per_start=spent, result=result)
            meter.forget_since(reached)  # what was reached is judged meanwhile

    return Baseline(run, engine.least_queries, anytime=True, constrained=True)


def told_one_number(baseline: Baseline) -> Baseline:
    """Return a baseline that is told the metric's value, not what that is made of or what losses promise of it."""

    def run(task: FinetuneTask, started: Started, budgets: Sequence[int], seed: int) -> Iterator[Reached]:
        bounded = task.metric.subject_to
        alone = noticing(task._with(metric=as_one_number(task.metric), batches_of=None))
        known = {
            name: each._replace(outcomes={other: each.outcomes[other] for other in bounded})
            for name, each in started.evaluated.items()
        }
        for reached in baseline.run(alone, replace(started, evaluated=known), budgets, seed):
            yield replace(reached, result=None)  # reports on the guard are of our own

    return replace(baseline, run=run)


def as_one_number(metric: Metric) -> Metric:
    """Return a metric that tells its value, and what it is subject to, each with its halves, and no other outcome."""
    once = metric.with_settings(repeats=1)

    def told(model: nn.Module) -> dict[str, Any]:
        found = once.judge(model)
        whole = {metric.name: Outcome(found.value, found.pairs), **found.outcomes}
        return {name: (whole[name].value, whole[name].pairs or None) for name in (metric.name, *metric.subject_to)}

    alone = Metric(told, **{**metric.settings, "also": None, "combine": None, "combined": None, "directions": None})
    return alone.with_callbacks(*metric.callbacks)


def tuning_settings(settings: Callable[[], Settings], confidence: float = CONFIDENCE) -> Baseline:
    """Make a baseline of a search over settings of inference alone, at the chosen start.

    Args:
        settings: Returns the settings; what they say of queries bounds it, whatever the budget.
        confidence: The guard's.
    """

    def run(task: FinetuneTask, started: Started, budgets: Sequence[int], seed: int) -> Iterator[Reached]:
        for queries in budgets:
            tuned = settings()
            limited, start = with_budget(task.with_settings(tuned), queries), started.start
            meter, first = Meter(limited), started.evaluated.get(started.chosen)
            if first is None or tuned.changed(tuned.first):
                first, queries = limited.evaluate(start, "settings"), queries - 1
            stage = SettingsStage(tuned, start, first, queries)
            asking = Asking(labelled(stage.batches(), "settings", "start"), Log(None, task.metric))
            with started.there(limited):
                for _ in Evaluating(limited, asking, Callback()).trials():
                    pass
            yield meter.reached((stage.best if accepted(stage, confidence) else stage.points[0]).start)

    return Baseline(run)


def with_settings_of(baseline: Baseline, settings: Callable[[], Settings]) -> Baseline:
    """Return a baseline whose task has settings of inference, at the best of the same starts."""

    def run(task: FinetuneTask, started: Started, budgets: Sequence[int], seed: int) -> Iterator[Reached]:
        found = settings()
        if found.changed(found.first):  # the starts were asked without
            started = replace(started, evaluated={})
        return baseline.run(task.with_settings(found), started, budgets, seed)

    return replace(baseline, run=run)


def on_file(started: Started, task: FinetuneTask) -> Log:
    """Return the evaluations of the starts that were asked, as a run that is resumed has them on file."""
    kept = Log(None, task.metric)
    names = ["start", *(name for name in started.starts if name != "start")]
    for id, name in enumerate(names):
        if name in started.evaluated:
            kept.append([Entry.of(id, started.starts[name]).told(started.evaluated[name], task.metric.repeats)])
    return kept


def optimizing(
    strategy: SearchStrategy | LearningStrategy,
    *,
    starts: Mapping[str, Start | StartLine] | None = None,
    confidence: float = CONFIDENCE,
    output_dir: Path | None = None,
    resume: bool = False,
    callback: Callback,
) -> Baseline:
    """Make a baseline of `optimize_metric`, at one budget and from the model as it was trained; see there.

    Args:
        strategy: How it works.
        starts: What it may begin from besides phi = 0.
        confidence: How sure the guard must be.
        output_dir: Receives what it keeps.
        resume: Continue what an interrupted run left there.
        callback: Notified of progress.
    """

    def run(task: FinetuneTask, started: Started, budgets: Sequence[int], seed: int) -> Iterator[Reached]:
        (queries,), meter = budgets, Meter(task)
        result: Result = optimize_metric(
            task,
            queries=queries,
            strategy=strategy,
            starts=starts,
            guard_confidence=confidence,
            seed=seed,
            output_dir=output_dir,
            resume=resume,
            callback=callback,
        )
        task.adapter.apply(Start(task.origin()))  # the other methods begin from the base
        end, path = end_of(result.start_of(result.chosen)), None if result.loss_finetune is None else result.path
        yield replace(meter.reached(end), queries_per_start=result.queries_per_start, path=path, result=result)

    return Baseline(run)


def searching(search: SearchStrategy) -> Baseline:
    """Make a baseline of a search on the metric.

    Args:
        search: The search.
    """
    if not search.anytime:
        each = at_each_budget(
            lambda task, start, queries, seed: searched(task, search, start, queries, seed=seed).phi,
            search.least_queries,
        )
        return replace(each, constrained=True)

    def run(task: FinetuneTask, started: Started, budgets: Sequence[int], seed: int) -> Iterator[Reached]:
        limited, stopped = with_budget(task, max(budgets)), None
        trace = Trace(limited)
        try:
            with started.there(limited) as there, limited.metric.calling(trace):
                searched(there, search, started.start.phi, max(budgets), seed=seed)
        except MetricError as error:
            stopped = error  # what was reached before counts
        for queries in budgets:
            if stopped is not None and queries > len(trace.points):
                raise stopped
            best = trace.best(queries)
            yield replace(best, end=started.standing(best.end))

    return Baseline(run, search.least_queries, anytime=True, constrained=True)


def searched(task: FinetuneTask, search: SearchStrategy, start: Tensor, queries: int, *, seed: int = 0) -> SearchResult:
    """Search on a task's own metric from a start, whose cost is the first query; returns where the search ends.

    The model is left unchanged, and nothing is guarded. The metric's log, if it has one, is of this search alone.

    Args:
        task: Model, loss, batches and metric.
        search: The search.
        start: phi_0, ``d``, of the model as it stands.
        queries: Budget; exactly this many evaluations are made, and booked under "search".
        seed: Seed of all draws.

    Raises:
        BudgetError: The budget is below `least_queries`, or the metric's ledger has fewer queries left.
        AdapterError: As from `SearchStrategy.begin`.
        MetricError: The metric failed; the message says at which query.
    """
    search.size(queries, task.dim)  # refuses too few
    task.metric.ledger.require(queries)
    search.check(task)
    there = replace(task.adapter.as_start(), phi=start)
    begun = search.begin(task, there, lambda: queries, seed=seed)
    kept = task.metric.log or Log(None, task.metric)
    asking = Asking(labelled(begun.batches(), "search", "start"), kept, task.metric.repeats)
    with task.adapter.applied(there):
        for trial in Evaluating(task, asking, Callback()).trials():
            if trial.id == 0 and (evaluation := asking.answer(0)) is not None:
                begun.limits = Limits.of(task.metric.constraints, evaluation)
        return distributed.on_first(begun.end)


def at_each_budget(
    run: Callable[[FinetuneTask, Tensor, int, int], End | None],
    least: Callable[[int], int] = lambda dim: 0,
) -> Baseline:
    """Make a baseline of a function that is run once for each budget.

    Args:
        run: ``run(task, start, queries, seed)`` returns the end, or None if it does not apply. The model is at the
            start meanwhile.
        least: See `Baseline`.
    """

    def each(task: FinetuneTask, started: Started, budgets: Sequence[int], seed: int) -> Iterator[Reached]:
        for queries in budgets:
            limited = with_budget(task, queries)
            meter = Meter(limited)
            with started.there(limited) as there:
                end = run(there, started.start.phi, queries, seed)
            if end is not None:
                yield meter.reached(started.standing(end))

    return Baseline(each, least)


def ending_at(run: Callable[[FinetuneTask], End | None]) -> Baseline:
    """Make a baseline, which takes no queries, of a function of the task that returns an end; see `at_each_budget`."""
    return at_each_budget(lambda task, *_: run(task))


def at_start(make: Callable[[FinetuneTask], Start | nn.Module | None], queries: int = 0) -> Baseline:
    """Make a baseline that ends at a start, of the model as it was trained, whatever else there is to begin from.

    Args:
        make: Makes the start of the task, or a model, whose queries are counted; None if it does not apply.
        queries: How many it asks meanwhile, at least.
    """

    def each(task: FinetuneTask, started: Started, budgets: Sequence[int], seed: int) -> Iterator[Reached]:
        limited = with_budget(task, max(budgets))
        meter, start = Meter(limited), make(limited)
        if start is not None:
            reached = meter.reached(end_of(start) if isinstance(start, Start) else start)
            yield from (reached for _ in budgets)

    return Baseline(each, least=lambda dim: queries, anytime=True)


def along_path(run: Callable[[FinetuneTask, Tensor, int], Tensor]) -> Baseline:
    """Make a baseline, which takes no queries, of a function that finetunes.

    Args:
        run: ``run(task, start, seed)`` returns the visited phi, ``(T + 1) x d``.
    """

    def each(task: FinetuneTask, started: Started, budgets: Sequence[int], seed: int) -> Iterator[Reached]:
        limited = with_budget(task, 0)
        meter = Meter(limited)
        with started.there(limited) as there:
            path = run(there, started.start.phi, seed)
        reached = replace(meter.reached(started.standing(path[-1])), path=path)
        yield from (reached for _ in budgets)

    return Baseline(each)


def notified(baseline: Baseline, title: str, callback: Callback) -> Baseline:
    """Return a baseline whose queries a callback is told of now and then.

    Args:
        baseline: The baseline.
        title: Its displayed name.
        callback: The callback, whose own queries are another method's.
    """

    def run(task: FinetuneTask, started: Started, budgets: Sequence[int], seed: int) -> Iterator[Reached]:
        shown = Within(callback, title, max(budgets) + started.spent)
        observed = task.judged_by(task.metric.with_callbacks(Spent(shown, started.spent)))
        return baseline.run(observed, started, budgets, seed)

    return replace(baseline, run=run)
