"""The last word of data that nothing was chosen by: what the guard would keep must be the best there, too."""

from collections.abc import Mapping
from dataclasses import replace

from metricopt_ext.errors import BudgetError
from metricopt_ext.methods.guard import Guard, Verdict, judge_held_out
from metricopt_ext.methods.result import Result
from metricopt_ext.tasks.cost_scale import CostScale
from metricopt_ext.tasks.metric import Metric
from metricopt_ext.tasks.split_half import UNITS
from metricopt_ext.tasks.task import FinetuneTask

CANDIDATES = 3  # at most: the model as it was, the start that the search began from, and the search's end


def check_holdout(task: FinetuneTask, metric: Metric) -> None:
    """Refuse a metric that can't judge a run on held-out data.

    Raises:
        ValueError: It is no metric, or the one that the run sees, or of another direction, or has constraints.
        BudgetError: Its ledger has too few queries left.
    """
    if not isinstance(metric, Metric):
        raise ValueError(f"holdout is {metric!r}; it must be a Metric, of data that task.metric does not see")
    if metric is task.metric or metric.function is task.metric.function:
        raise ValueError(f"holdout is {metric.name!r} itself, which the search sees; it must be of other data")
    if metric.maximize != task.metric.maximize:
        better = "higher" if metric.maximize else "lower"
        raise ValueError(f"for holdout, {metric.name!r}, {better} is better, unlike for {task.metric.name!r}")
    if _in_other_units(metric.bounds, task.metric.bounds):
        raise ValueError(
            f"holdout, {metric.name!r}, has bounds {metric.bounds}, and {task.metric.name!r} {task.metric.bounds};"
            " their gains are compared, so let both be of one unit"
        )
    if metric.constraints:
        raise ValueError(
            f"holdout, {metric.name!r}, has subject_to, which no data held out are asked for; give it to"
            f" {task.metric.name!r}, and leave a margin"
        )
    if metric.ledger.left < CANDIDATES * metric.repeats:
        needed = CANDIDATES * metric.repeats
        raise BudgetError(f"holdout takes up to {needed} queries, {metric.ledger.left} are left in its budget")


def _in_other_units(a: tuple[float, float] | None, b: tuple[float, float] | None) -> bool:
    """Whether bounds are so many times as wide as others that they must be of another unit, such as percent."""
    if a is None or b is None:
        return False
    narrow, wide = sorted((a[1] - a[0], b[1] - b[0]))
    return wide >= UNITS * narrow


def confirmed(result: Result, task: FinetuneTask, confidence: float) -> Result:
    """Return a run's result with what held-out data prefer: what the guard kept, or a candidate that it had before.

    The search has fitted phi to the data that its metric sees, both halves of them, so these can't tell what carries
    over to other classes, say. Other data can, by a comparison of two or three candidates, which owe nothing to them.
    If the metric can't tell a gain from chance, these data are what does (`judge_held_out`).

    Args:
        result: What the guard made of the run; one that kept the model as it was is returned as it is.
        task: The run's, judged on the held-out data: a query for the model as it was, for the start that a search
            began from, if that is another, and for what was kept.
        confidence: How sure to be of a gain that nothing else can tell from chance, at least 0.5 and below 1.

    Raises:
        MetricError: The metric failed.
    """
    if result.chosen == "start":
        return result
    found = {name: task.evaluate(result.start_of(name), "holdout", repr(name)) for name in values_of_candidates(result)}
    values = {name: each.value for name, each in found.items()}
    result = preferred(result, values, task.metric, confidence)
    if result.settings is None or task.settings is None:
        return result
    after = task.values_of(result.start_of(result.chosen).settings)
    return replace(result, settings=result.settings.of_kept(task.settings, after))


def values_of_candidates(result: Result) -> dict[str, float]:
    """Return what held-out data choose from, by name, with its value on the data that the search sees."""
    found = {"start": result.before, result.started_at: result.starts[result.started_at], result.chosen: result.after}
    return {name: each for name, each in found.items() if result.constrained is None or result.constrained.allows(name)}


def preferred(result: Result, aside: Mapping[str, float], metric: CostScale, confidence: float) -> Result:
    """Return a run's result with what held-out data prefer; see `confirmed`.

    Args:
        result: What the guard made of the run.
        aside: The values of `values_of_candidates` on these data; those that failed there are left out.
        metric: What the values mean.
        confidence: As in `confirmed`.
    """
    values = {name: each for name, each in values_of_candidates(result).items() if name in aside}
    chosen, verdict = best_on_holdout(values, aside, metric, result.guard, confidence)
    result = replace(result, chosen=chosen, after=values[chosen], holdout=dict(aside))
    if verdict is None:
        return result
    return replace(result, chance=verdict.chance, needed=verdict.needed, guard=verdict.guard)


def best_on_holdout(
    values: Mapping[str, float], aside: Mapping[str, float], metric: CostScale, guard: Guard, confidence: float
) -> tuple[str, Verdict | None]:
    """Return which candidate held-out data prefer, and their verdict where nothing else told chance.

    Args:
        values: The candidates' values on the data that the search sees, by name, ``"start"`` among them.
        aside: Their values on the held-out data.
        metric: What the values mean.
        guard: What told chance before.
        confidence: As in `confirmed`.
    """
    costs = {name: metric.sign * value for name, value in aside.items()}
    if guard != "none" or "start" not in costs:  # which is out of the question where it alone violates a constraint
        return min(costs, key=lambda name: costs[name]), None
    verdicts = {
        name: judge_held_out(metric.sign * (values["start"] - values[name]), costs["start"] - costs[name], confidence)
        for name in costs
        if name != "start"
    }
    if not verdicts:
        return "start", None
    best = min(verdicts, key=lambda name: (not verdicts[name].accepted, costs[name]))
    return best if verdicts[best].accepted else "start", verdicts[best]
