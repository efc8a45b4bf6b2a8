"""The end of a search: what the guard keeps of it, as a result."""

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from metricopt_ext.methods.guard import Began, Constrained, TunedSettings, decided, preferred
from metricopt_ext.methods.result import Result
from metricopt_ext.search.strategy import SearchResult
from metricopt_ext.tasks.evaluation import Evaluation, stacked_halves
from metricopt_ext.tasks.metric import Metric
from metricopt_ext.tasks.split_half import UNITS, correlation_of_halves
from metricopt_ext.tasks.task import FinetuneTask
from metricopt_ext.value.fitting import Fit


def guarded(began: Began, end: SearchResult, part: tuple[Tensor, Evaluation] | None = None, besides: int = 0) -> Result:
    """Keep the start that the search began from, or a line's best, if it gains on phi = 0; or the end (`decide`).

    Args:
        began: Where the search began, and what the guard has to know.
        end: Where it stands.
        part: The point of the share that is kept, ``d``, and its evaluation, if it was asked for; else f's mean stands
            in.
        besides: Evaluations that were made for the ends of earlier sittings.
    """
    task, starts, evaluated, stage = began.task, began.starts, began.evaluated, began.stage
    decision, candidates = decided(began, end), began.candidates(end)
    ends, share = {name: each.phi for name, each in starts.items()} | {"search": end.phi}, decision.share
    if share is not None and 0 < share.share < 1:
        share = replace(share, evaluated=part is not None)
        ends["part"], candidates["part"] = part or _by_f(task.metric, end, share.point(began.at.phi, end.phi))
    tried = [] if stage is None else [each.evaluation for each in stage.points[1:]]
    others = [*began.elsewhere, *(each for each in tried if each is not evaluated[began.name])]
    last = [end.evaluation] if end.queries > len(end.evaluations) else []  # a guided search's own
    constrained = Constrained.of(began.limits, candidates, [*others, *end.evaluations, *last])
    allowed = {name: each for name, each in candidates.items() if constrained is None or constrained.allows(name)}
    if share is not None and share.share < 1:
        better = "part" in allowed and allowed["part"].cost < candidates[decision.otherwise].cost
        decision = replace(decision, kept="part" if better else decision.otherwise)
    costs = torch.tensor([math.inf, *(each.cost for each in end.evaluations)], dtype=torch.float64)
    lower = end.points[costs[1:] < costs.cummin(0).values[:-1]]  # than all before
    kept = starts.get(decision.kept, began.at)
    evaluations = len(others) + end.queries + (part is not None) + besides
    queries = {"starts": len(began.points)} | ({} if stage is None else {"settings": len(tried)})
    queries["search"] = evaluations - sum(queries.values())
    return Result.of(
        task.metric,
        {"start": candidates["start"]} | allowed,
        chosen=decision.kept,
        verdict=decision.verdict,
        ends=ends,
        queries={name: number * task.metric.repeats for name, number in queries.items()},
        queries_per_start=evaluations * task.metric.repeats,
        starts={name: each.value for name, each in evaluated.items()},
        strengths=dict(began.lines),
        started_at=began.name,
        against=began.against,
        fit=None if end.f is None else Fit(end.f, end.predicted[:, 0], end.predicted[:, 1]),
        points=end.points,
        split_half=correlation_of_halves(stacked_halves(end.evaluations)),
        costs=tuple(task.metric.normalised(each.cost) for each in end.evaluations),
        path=torch.stack([began.at.phi, *lower, end.phi, *([ends["part"]] if decision.kept == "part" else [])]),
        candidates=starts,
        plain=end.learns and task.probing().loss is None and task.gradients is None,
        widened=end.widened,
        kept_share=share,
        constrained=constrained,
        settings=None if stage is None else TunedSettings.of(stage, task.values_of(kept.settings)),
    )


def _by_f(metric: Metric, end: SearchResult, point: Tensor) -> tuple[Tensor, Evaluation]:
    """Return a point, ``d``, and what f takes its cost for, within the metric's bounds."""
    assert end.f is not None
    low, high = metric.bounds or (-math.inf, math.inf)
    value = metric.sign * float(end.f(point[None])[0])
    return point, Evaluation(min(max(value, low), high), sign=metric.sign)


def check_holdout(task: FinetuneTask, metric: Metric) -> None:
    """Refuse a metric that can't judge a run on held-out data.

    Raises:
        ValueError: It is no metric, or the one that the run sees, or of another direction, or has constraints.
        BudgetError: Its ledger has too few queries left.
    """
    if not isinstance(metric, Metric):
        raise ValueError(f"holdout is {metric!r}; it must be a Metric, of data that task.metric does not see")
    seen, fault = task.metric, ""
    widths = sorted(each.bounds[1] - each.bounds[0] for each in (metric, seen) if each.bounds is not None)
    if metric.function is seen.function:
        fault = "is what the search sees; it must be of other data"
    elif metric.maximize != seen.maximize:
        fault = f"has {'higher' if metric.maximize else 'lower'} for better, unlike {seen.name!r}"
    elif len(widths) == 2 and widths[1] >= UNITS * widths[0]:  # as of percent beside shares
        fault = f"has bounds {metric.bounds}, {seen.name!r} {seen.bounds}; gains are compared: give both in one unit"
    elif task.settings is not None and not task.settings.judges(metric):
        fault = "is not judged by the task's settings of inference; make these of both metrics"
    elif metric.constraints:
        fault = f"has subject_to, which no data held out are asked for; give it to {seen.name!r}, and leave a margin"
    if fault:
        raise ValueError(f"holdout, {metric.name!r}, {fault}")
    metric.ledger.require(3 * metric.repeats, "holdout")  # model as it was, start of the search and its end, at most


def confirmed(result: Result, judged: Callable[[str], float], confidence: float, task: FinetuneTask | None) -> Result:
    """Return a run's result with what held-out data prefer: what the guard kept, or a candidate that it had before.

    The search has fitted phi to the data that its metric sees, both halves of them, so these can't tell what carries
    over to other classes, say. Other data can, by a comparison of two or three candidates, which owe nothing to them.
    If the metric can't tell a gain from chance, these data are what does (`preferred`).

    Args:
        result: What the guard made of the run; one that kept the model as it was is returned as it is.
        judged: ``judged(name)`` returns a candidate's value on the held-out data; it is asked for the model as it was,
            for the start that a search began from, if that is another, and for what was kept.
        confidence: How sure to be of a gain that nothing else can tell from chance, at least 0.5 and below 1.
        task: The run's, for its settings of inference; None without any.
    """
    if result.chosen == "start":
        return result
    names, constrained = dict.fromkeys(("start", result.started_at, result.chosen)), result.constrained
    values = {name: result.evaluations[name].value for name in names if constrained is None or constrained.allows(name)}
    aside, maximize = {name: judged(name) for name in values}, result.evaluations["start"].sign < 0
    chosen, verdict = preferred(values, aside, maximize, result.guard, confidence)
    result = replace(result, chosen=chosen, verdict=verdict or result.verdict, holdout=aside)
    if result.settings is None or task is None or task.settings is None:
        return result
    after = task.values_of(result.start_of(chosen).settings)
    return replace(result, settings=replace(result.settings, after=after, factor=task.settings.factor(after)))
