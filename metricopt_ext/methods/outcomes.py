"""What a run made of the outcomes that its metric is made of: which is the worst, before and after."""

from collections.abc import Mapping
from dataclasses import dataclass

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

    def pairs(self, kept: str) -> dict[str, tuple[float, float | None]]:
        """Return each outcome by name: of the model as it was, and of what was kept, None if that was not asked."""
        after = self.values.get(kept, {})
        return {name: (value, after.get(name)) for name, value in self.values["start"].items()}

    def lines(self, kept: str) -> list[str]:
        """Say which is the worst of the model as it was, and of what was kept; nothing if nothing tells."""
        return [] if self.higher is None else [worst_of(self.pairs(kept), self.higher)]


def worst_of(pairs: Mapping[str, tuple[float, float | None]], higher: bool, where: str = "") -> str:
    """Say which outcome is the worst before, and after if that is known.

    Args:
        pairs: Before and after, by name.
        higher: Whether higher is better.
        where: Follows their number, as ``" on validation"``.
    """
    parts = []
    for place, when in enumerate(("before", "after")):
        known = {name: value for name, pair in pairs.items() if (value := pair[place]) is not None}
        if known:
            name = (min if higher else max)(known, key=lambda each: known[each])
            parts.append(f"{brief(name)} {decimals(known[name])} {when}")
    return f"{'lowest' if higher else 'highest'} of {len(pairs)} outcomes{where}: {', '.join(parts)}"
