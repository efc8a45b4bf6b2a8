"""What settings would give if inference might take longer: asked after a run, of what it kept, which stays as it is."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from metricopt_ext.methods.constrained import ranked
from metricopt_ext.methods.guard import CONFIDENCE
from metricopt_ext.methods.result import Result
from metricopt_ext.methods.starts import with_start
from metricopt_ext.methods.tuned_settings import accepted, shown
from metricopt_ext.search.settings_stage import SettingsState
from metricopt_ext.tasks.constraints import Limits
from metricopt_ext.tasks.evaluation import Evaluation
from metricopt_ext.tasks.settings import Settings, Values
from metricopt_ext.tasks.task import FinetuneTask
from metricopt_ext.utils.checks import check_at_least
from metricopt_ext.utils.words import decimals

# Factors on inference time: a flip with the image's size, and with three sizes.
FACTORS = (2.0, 6.0)

# What the ledger books the queries under.
PURPOSE = "more inference"


@dataclass(frozen=True)
class MoreInference:
    """What settings would give within a factor on inference time.

    Attributes:
        most: The factor that inference may take.
        factor: The one that it takes by ``settings``.
        settings: The best values that were found, one for every setting.
        changes: Those that differ from what was kept: before and after.
        before: The metric of what was kept.
        value: The metric by ``settings``, on the same data.
        tried: How many others were asked within the factor.
        sure: Whether the guard believes the gain.
        queries: Queries that it took besides those of smaller factors; of the smallest, that of what was kept too.
    """

    most: float
    factor: float
    settings: dict[str, Any]
    changes: dict[str, tuple[Any, Any]]
    before: float
    value: float
    tried: int
    sure: bool
    queries: int

    def __str__(self) -> str:
        """State it in a line."""
        if not self.changes:
            return f"within {self.most:g} times the inference: nothing gains ({self.tried} tried)"
        changes = ", ".join(f"{name} {shown(old)} -> {shown(new)}" for name, (old, new) in self.changes.items())
        doubt = "" if self.sure else "; it may be chance"
        return (
            f"within {self.most:g} times the inference: {decimals(self.before)} -> {decimals(self.value)} by {changes}"
            f" ({self.tried} tried), which takes {self.factor:.3g} times as long{doubt}"
        )


def more_inference(
    task: FinetuneTask,
    result: Result,
    *,
    most: Sequence[float] = FACTORS,
    confidence: float = CONFIDENCE,
) -> tuple[MoreInference, ...]:
    """Return what settings would give if inference might take longer than it may in a run.

    From what the run kept on, phi included, the settings are tuned again within each factor. What the run's own limit
    allows is not asked again. Nothing that was kept changes: to have it, run again with
    ``settings.limited(inference=...)``, or put the values to use by ``settings.applied``.

    Each is the best of several on the data that the metric sees, and so a little too good.

    Args:
        task: The run's. Its metric's ledger is charged: a query of what was kept, and for each factor at most
            as many as the settings allow; what several factors ask is asked once. Nothing is asked where no value
            takes longer.
        result: What the run kept.
        most: Factors on inference time, each at least 1.
        confidence: How sure the guard must be for ``sure``; of settings at most `SETTINGS_CONFIDENCE` is asked.

    Returns:
        One for each factor that allows more than the settings' own limit does, in ascending order.

    Raises:
        ValueError: A factor is below 1, or the task has no settings.
        BudgetError: The ledger has too few queries left.
        MetricError: The metric failed.

    Examples:
        >>> for each in more_inference(task, result):  # doctest: +SKIP
        ...     print(each)
        within 2 times the inference: 0.8352 -> 0.9477 by size 1 -> 1.41 (2 tried), which takes 1.99 times as long
    """
    settings = task.settings
    if settings is None:
        raise ValueError("the task has no settings of inference; give it settings=")
    for each in most:
        check_at_least(1, most=each)
    start = result.start_of(result.chosen)
    kept = settings.complete({**settings.first, **start.settings})
    factors = [each for each in sorted(set(most)) if _allows_more(settings, kept, each)]
    if not factors:
        return ()
    standing, evaluated = with_start(task, start), list[tuple[Values, Evaluation]]()

    def evaluate(values: Values) -> Evaluation:
        found = next((each for known, each in evaluated if known == values), None)
        if found is None:
            found = standing.with_values(values).evaluate(start.phi, PURPOSE)
            evaluated.append((values, found))
        return found

    first = evaluate(kept)
    trained = Evaluation(first.cost, also=result.elsewhere.get("start"))
    rank = partial(ranked, limits=Limits.of(task.metric.constraints, trained))
    found = list[MoreInference]()
    for factor in factors:
        before = len(evaluated) if found else 0
        state = SettingsState(settings.limited(inference=factor, free=False), first, rank=rank, values=kept)
        while batch := state.ask():
            for index, values in enumerate(batch):
                state.tell(index, None if settings.affords(values) else evaluate(values))
        end = state.end()
        one = MoreInference(
            most=factor,
            factor=settings.factor(end.values),
            settings=end.values,
            changes={name: (kept[name], value) for name, value in end.values.items() if value != kept[name]},
            before=task.metric.to_value(first.cost),
            value=task.metric.to_value(end.evaluation.cost),
            tried=state.spent,
            sure=accepted(end, confidence),
            queries=len(evaluated) - before,
        )
        found.append(one)
    return tuple(found)


def _allows_more(settings: Settings, kept: Values, factor: float) -> bool:
    """Whether a setting alone, or a preset, may take longer by a factor than by the settings' own limit."""
    wider = settings.limited(inference=factor, free=False)
    candidates = [settings.preset(name, kept) for name in settings.presets]
    for name in settings.alone:
        setting = settings[name]
        values = [setting.at(0.0), setting.at(1.0)] if setting.values is None else setting.values
        candidates += [{**kept, name: value} for value in values]
    return any(wider.affords(each) and not settings.affords(each) for each in candidates)
