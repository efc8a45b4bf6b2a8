"""What a run made of the outcomes that its metric is made of: which is the worst, before and after."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from metricopt_ext.tasks.combine import Combination
from metricopt_ext.tasks.evaluation import Evaluation
from metricopt_ext.utils.words import brief, decimals


@dataclass(frozen=True)
class Outcomes:
    """The outcomes that a metric is made of, in their own units.

    Attributes:
        values: Each one's value by candidate (`Result.ends`) and name, in the order in which they are combined; of the
            candidates that were asked.
        higher: Whether higher is better, of all alike; None if nothing tells.
    """

    values: Mapping[str, Mapping[str, float]]
    higher: bool | None

    @classmethod
    def of(cls, combination: Combination | None, candidates: Mapping[str, Evaluation]) -> "Outcomes | None":
        """Return those of evaluations by name; None of a metric that is told as a number."""
        if combination is None:
            return None
        values = {
            each: {name: found.outcomes[name].value for name in combination.names(found.outcomes)}
            for each, found in candidates.items()
            if found.outcomes
        }
        names = list(next(iter(values.values())))
        known = {combination.directions.get(name) for name in names}
        of_function = known.pop() if len(known) == 1 else None
        return cls(values, of_function if callable(combination.combine) else combination.sign < 0)

    def changes(self, kept: str) -> dict[str, tuple[float, float]]:
        """Return each outcome before and after, by name; none if what was kept was not asked."""
        before, after = self.values["start"], self.values.get(kept, {})
        return {name: (before[name], after[name]) for name in before if name in after}

    def lines(self, kept: str) -> list[str]:
        """Say which is the worst of the model as it was, and of what was kept, in a line; none if nothing tells."""
        return said(self.values["start"], self.values.get(kept, {}), self.higher)

    def to_json(self, kept: str) -> dict[str, Any]:
        """Return what a report says of each: before, and after if it is known."""
        before, after = self.values["start"], self.values.get(kept, {})
        return {name: {"before": before[name], "after": after.get(name)} for name in before}


def worst(values: Mapping[str, float], higher: bool) -> str:
    """Return the name of the worst value, the first of equals."""
    return (min if higher else max)(values, key=lambda name: values[name])


def said(before: Mapping[str, float], after: Mapping[str, float], higher: bool | None, where: str = "") -> list[str]:
    """Say which outcome is the worst, before and after, in a line; none if nothing tells which is worse.

    Args:
        before: Values by name.
        after: The same; empty if they are not known.
        higher: Whether higher is better.
        where: Follows their number, as ``" on validation"``.
    """
    if higher is None:
        return []
    parts = []
    for when, values in (("before", before), ("after", after)):
        if values:
            name = worst(values, higher)
            parts.append(f"{brief(name)} {decimals(values[name])} {when}")
    return [f"{'lowest' if higher else 'highest'} of {len(before)}{where}: {', '.join(parts)}"]
