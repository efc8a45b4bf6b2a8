"""What constraints on other quantities mean for the guard: what violates one is not kept, and it is said."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from metricopt_ext.methods.guard import Decision
from metricopt_ext.search.visited import ranked
from metricopt_ext.tasks.constraints import Constraint, Limits
from metricopt_ext.tasks.evaluation import Evaluation
from metricopt_ext.utils.words import decimals


@dataclass(frozen=True)
class Constrained:
    """How a run stands to its constraints.

    Attributes:
        limits: The constraints, with their bounds in the quantities' own units.
        violated: What each candidate violates, by name; what was refused for it among them.
        excesses: By how much each candidate is beyond each of the limits, by name, as far as it was asked.
        holding: Number of points that were asked and satisfy all.
        evaluated: Number of points that were evaluated.
    """

    limits: Limits
    violated: Mapping[str, tuple[Constraint, ...]]
    excesses: Mapping[str, tuple[float, ...]]
    holding: int
    evaluated: int

    @classmethod
    def of(
        cls, limits: Limits | None, candidates: Mapping[str, Evaluation], evaluated: Sequence[Evaluation]
    ) -> "Constrained | None":
        """Return how a run stands, None without constraints.

        Args:
            limits: The constraints.
            candidates: What the guard chose from, by name.
            evaluated: All that was evaluated.
        """
        if limits is None:
            return None
        violated = {  # what was not asked, as f's mean stands in, is not known to satisfy any
            name: limits.violated(each) if each.outcomes else limits.constraints for name, each in candidates.items()
        }
        excesses = {name: limits.excesses(each) for name, each in candidates.items() if each.outcomes}
        return cls(limits, violated, excesses, sum(map(limits.hold, evaluated)), len(evaluated))

    def allows(self, name: str) -> bool:
        """Whether a candidate may be kept: what satisfies all, or the model as it was trained where nothing does."""
        return not self.violated[name] or (name == "start" and all(self.violated.values()))

    def excess(self, name: str) -> dict[str, float]:
        """Return by how much a candidate breaks each constraint that it violates, in the quantity's own unit."""
        broken = set(self.violated[name])
        pairs = zip(self.limits.constraints, self.excesses.get(name, ()), strict=False)
        return {str(each): number for each, number in pairs if each in broken}

    def bound(self, name: str) -> str:
        """Return the bound on a quantity with its number, e.g. ``">= 0.845"``; empty if it has none."""
        for each, number in zip(self.limits.constraints, self.limits.numbers, strict=True):
            if each.name == name:
                return f"{'>=' if each.at_least else '<='} {decimals(number)}"
        return ""

    def lines(self, chosen: str, called: Callable[[str], str]) -> list[str]:
        """Say what the constraints decided; nothing if all candidates satisfy them.

        Args:
            chosen: What was kept, by name.
            called: Returns the words for a candidate (`result.kept`).
        """
        lines = [
            f"{called(name)} violates {' and '.join(map(str, each))}, so it can't be kept"
            for name, each in self.violated.items()
            if each and name not in ("start", chosen)
        ]
        if broken := self.broken(chosen):
            said = " and ".join(map(str, self.limits.constraints))
            return [f"none of {self.evaluated} points that were asked satisfies {said}: what is kept {broken}"]
        if self.violated["start"] and chosen != "start":
            said = " and ".join(map(str, self.violated["start"]))
            lines.append(f"the model as it was violates {said}, so the best that satisfies it is kept, gain or not")
        return lines

    def to_json(self, chosen: str) -> dict[str, Any]:
        """Return the limits as plain data, and by how much what was kept breaks those that it breaks."""
        return {"subject to": self.limits.texts(), "broken": self.excess(chosen)}

    def broken(self, name: str) -> str:
        """Say what a candidate violates, and by how much; empty if it satisfies all."""
        excess = self.excess(name)
        return f"violates {excess_in_words(excess)} on the metric's data" if excess else ""


def excess_in_words(excess: Mapping[str, float]) -> str:
    """Say by how much each constraint is broken; see `Constrained.excess`."""
    return " and ".join(f"{limit} by {decimals(by)}" for limit, by in excess.items())


def besides(also: Mapping[str, tuple[float, float]], constrained: Constrained | None) -> list[str]:
    """Say what became of other quantities than the metric, in a line; none without any.

    Args:
        also: Before and after, by name.
        constrained: How the run stands to its constraints; None without any.
    """

    def shown(name: str) -> str:
        before, after = also[name]
        bound = "" if constrained is None else constrained.bound(name)
        return f"{name} {decimals(before)} -> {decimals(after)}" + (f" ({bound})" if bound else "")

    return [f"besides: {', '.join(map(shown, also))}"] if also else []


def decide_within(
    limits: Limits | None,
    candidates: Mapping[str, Evaluation],
    on_end: Callable[[Mapping[str, Evaluation]], Decision],
    on_starts: Callable[[Mapping[str, Evaluation]], Decision],
) -> Decision:
    """Decide among the candidates that satisfy the constraints; the model as it was trained is kept where none does.

    Where that model violates one, the best that satisfies all is kept, whether or not its metric gains.

    Args:
        limits: The constraints; None without any. What was observed counts.
        candidates: Evaluations by name: of the model as it was trained first, and of the search's end last.
        on_end: Decides among candidates of which the last is the search's end, as `decide` does.
        on_starts: Decides among candidates without it.
    """
    trained, *_, end = candidates
    holding = {name: each for name, each in candidates.items() if limits is None or limits.hold(each)}
    if trained not in holding:  # what satisfies all comes before any gain
        otherwise = min(holding.keys() - {end}, key=lambda name: holding[name].cost, default=trained)
        kept = min(holding, key=lambda name: holding[name].cost, default=trained)
        return Decision(kept, on_end(candidates).verdict, otherwise)
    if end in holding and end != trained:
        return on_end(holding)
    if len(holding) > 1:  # a start that the search began from
        return on_starts(holding)
    return Decision(trained, on_end(candidates).verdict)


def best_of(evaluated: Mapping[str, Evaluation], limits: Limits | None) -> str:
    """Return the name of the best evaluation, the first of equals."""
    return min(evaluated, key=lambda name: ranked(evaluated[name], limits))
