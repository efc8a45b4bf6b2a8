"""What a run did, in the metric's own units and in words."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from metricopt_ext.adapters.start import Start
from metricopt_ext.methods.guard import Decision, Guard, Verdict, check_guarded
from metricopt_ext.methods.recipe_settings import Setting
from metricopt_ext.search.update_rule import UpdateRule
from metricopt_ext.tasks.metric import Evaluation, Metric
from metricopt_ext.tasks.trajectory import Trajectory
from metricopt_ext.value.fitting import Fit
from metricopt_ext.value.value_function import ValueFunction

KEPT = {
    "start": "the model as it was",
    "loss_finetune": "the loss-only finetune",
    "metricopt": "MetricOpt",
    "adapted": "MetricOpt with f adapted",
    "refined": "MetricOpt, refined on the metric",
    "search": "the end of the search",
    "learned": "the learned optimizer's end",
    "batchnorm": "BatchNorm re-estimated",
    "prior": "logits adjusted by the priors",
    "prior_twice": "logits adjusted by the priors, twice as strongly",
}


def kept(name: str) -> str:
    """Return the words for what was kept; a user's own start goes by its name."""
    return KEPT.get(name, f"the start {name!r}")


@dataclass(frozen=True)
class Result:
    """What `optimize_metric` did, in the metric's own units.

    Attributes:
        metric: The metric's name.
        before: Metric of the model as it was given, on the data that the metric sees.
        after: Metric of the model as it is now.
        best: Metric of the best candidate; it differs from ``after`` if its gain may be due to chance.
        chosen: The candidate that was kept: ``"start"`` or another of ``ends``.
        chance: Standard deviation of the chance part of a gain; None of an unguarded run, as nothing tells.
        optimism: How much of the gain is expected to be lost on other data, as what was kept was chosen for its metric;
            0 if nothing tells.
        queries: Queries spent, by purpose.
        queries_per_start: Queries that another start would cost.
        ends: End point phi, ``d``, of each candidate.
        needed: What a gain must exceed, besides the optimism, for the guard to believe it; None of an unguarded run.
        guard: What told a gain from chance: ``"halves"`` of the metric's data, ``"repeats"`` of each evaluation,
            ``"held-out"`` data, or ``"none"``: the run is unguarded, and any gain was kept.
        aside: Metric on data kept aside, by candidate, what the guard would have kept last; empty without such data.
    """

    metric: str
    before: float
    after: float
    best: float
    chosen: str
    chance: float | None
    optimism: float
    queries: dict[str, int]
    queries_per_start: int
    ends: dict[str, Tensor]
    needed: float | None = field(kw_only=True)
    guard: Guard = field(kw_only=True)
    aside: dict[str, float] = field(kw_only=True, default_factory=dict)

    def __str__(self) -> str:
        """State the outcome, its cost and whether f was to be trusted, in a few lines."""
        return "\n".join(self.lines())

    def lines(self) -> list[str]:
        """Return what ``str`` joins."""
        spent = ", ".join(f"{purpose} {n}" for purpose, n in self.queries.items())
        unguarded = ", unguarded" if self.guard == "none" else ""
        changed = f"{self.before:.4f} -> {self.after:.4f}{self.beside()}{unguarded}"
        lines = [f"{self.metric}: {changed}; kept {kept(self.chosen)}"]
        if self.best != self.after:
            lines.append(f"the best candidate has {self.best:.4f}, but {self.doubt()}")
        if self.aside:
            shown = ", ".join(f"{kept(name)} {value:.4f}" for name, value in self.aside.items())
            lines.append(f"on the data kept aside: {shown}")
        total = sum(self.queries.values())
        lines.append(f"queries: {total} ({spent}); {self.queries_per_start} for each further start")
        if self.guard == "none":
            lines.append(
                "how much of a gain is chance, nobody can tell; let the metric return (value, (half, half)), its values"
                " on all of its data and on two random halves of them, or give it repeats if it is noisy, or the run"
                " data that the search does not see"
            )
        return lines

    def start_of(self, name: str) -> Start:
        """Return one of ``ends`` as a start for `Adapter.apply`, with all that belongs to its phi."""
        return Start(self.ends[name])

    def products(self) -> dict[str, ValueFunction | UpdateRule]:
        """Return what was learned, by the names of its files."""
        return {}

    @property
    def overruled(self) -> bool:
        """Whether data kept aside prefer another candidate than the guard."""
        return bool(self.aside) and self.chosen != list(self.aside)[-1]

    def doubt(self) -> str:
        """Say why the best candidate was not kept."""
        if self.overruled:
            return "the data kept aside do not confirm it"
        return (
            f"with so little data up to {(self.needed or 0) + self.optimism:.4f} of a gain may be chance and optimism."
            " Use more data to see smaller gains"
        )

    def beside(self) -> str:
        """Return what is printed next to the outcome."""
        return ""


def outcome(
    metric: Metric, candidates: Mapping[str, Evaluation], decision: Decision, ends: dict[str, Tensor]
) -> dict[str, Any]:
    """Return the fields of a `Result` that follow from what the guard decided.

    Args:
        metric: The run's.
        candidates: Evaluations by name, of ``"start"`` and the others that the guard chose from.
        decision: What it kept.
        ends: End point phi, ``d``, of each candidate.

    Raises:
        UnguardedError: The metric requires a guard, but nothing told a gain from chance.
    """
    verdict = decision.verdict
    check_guarded(metric, verdict)
    return {
        "metric": metric.name,
        "before": metric.to_value(candidates["start"].cost),
        "after": metric.to_value(candidates[decision.kept].cost),
        "best": metric.to_value(min(each.cost for each in candidates.values())),
        "chosen": decision.kept,
        "chance": None if verdict.chance is None else verdict.chance * metric.scale,
        "optimism": verdict.optimism * metric.scale,
        "needed": None if verdict.needed is None else verdict.needed * metric.scale,
        "ends": ends,
        "guard": verdict.guard,
    }


@dataclass(frozen=True)
class MetricOptResult(Result):
    """What `optimize_metric` did by learning and following a value function.

    Attributes:
        loss_finetune: Metric after the same number of steps on the loss alone.
        setting: The (loss weight, metric step) used.
        split_half: Correlation of the metric's halves over random phi; NaN if it does not report them.
        fit: The value function with its held-out quality.
        trajectories: The trajectories it was learned from.
    """

    loss_finetune: float
    setting: Setting
    split_half: float
    fit: Fit
    trajectories: tuple[Trajectory, ...]

    def products(self) -> dict[str, ValueFunction | UpdateRule]:
        """Return what was learned, by the names of its files."""
        return {"value_function": self.fit.f}

    def lines(self) -> list[str]:
        """Return what ``str`` joins."""
        halves = "" if math.isnan(self.split_half) else f"; the metric's halves correlate at {self.split_half:.2f}"
        return [*super().lines(), f"value function ({self.fit.f.kind}): {self.fit.f.quality}{halves}"]

    def beside(self) -> str:
        """Return what is printed next to the outcome."""
        return f" (loss-only {self.loss_finetune:.4f})"


@dataclass(frozen=True)
class SearchRun(Result):
    """What a search did.

    Attributes:
        starts: Metric of each candidate that the search could begin from, ``"start"`` (phi = 0) among them.
        begun_at: The candidate that it began from, the best of them.
        fit: f, a Gaussian process, with its quality on what it predicted before each query; its predictions and what
            was found. None without an f.
        learns: Whether the search learns an f.
        plain: Whether there was no loss, so that all directions of phi counted alike.
        verdict: What the guard thinks of the search's end; of the start that it began from if the metric never varied.
        split_half: Correlation of the metric's halves over the visited phi; NaN if it does not report them.
        points: The visited phi, ``n x d``.
        costs: The metric there as a cost, ``n``.
        widened: How many times wider than probed the design had to be for the metric to react.
        candidates: What the search could begin from.
    """

    starts: dict[str, float]
    begun_at: str
    fit: Fit | None
    learns: bool
    plain: bool
    verdict: Verdict
    split_half: float
    points: Tensor
    costs: tuple[float, ...]
    widened: float
    candidates: Mapping[str, Start]

    def products(self) -> dict[str, ValueFunction | UpdateRule]:
        """Return what was learned, by the names of its files."""
        return {} if self.fit is None else {"value_function": self.fit.f}

    def doubt(self) -> str:
        """Say why the best candidate was not kept."""
        by_queries = self.verdict.gain - self.verdict.optimism > (self.verdict.needed or 0)
        if by_queries and not self.overruled:
            return "f, which knows all points that were asked, does not expect it to be that much better"
        return super().doubt()

    def start_of(self, name: str) -> Start:
        """Return an end as a start, with what the start replaces that it belongs to."""
        return replace(self.candidates[self.begun_at if name == "search" else name], phi=self.ends[name])

    def path(self) -> Tensor:
        """Return where the search stood, ``m x d``: where it began, each point that was the best so far, its end."""
        best, stood = math.inf, [self.ends[self.begun_at]]
        for point, cost in zip(self.points, self.costs, strict=True):
            if cost < best:
                best = cost
                stood.append(point)
        return torch.stack([*stood, self.ends["search"]])

    def lines(self) -> list[str]:
        """Return what ``str`` joins."""
        lines = super().lines()
        if len(self.starts) > 1:
            shown = ", ".join(f"{name} {value:.4f}" for name, value in self.starts.items())
            lines.append(f"the search began from {kept(self.begun_at)}, the best of the starts ({shown})")
        if self.plain and self.learns:
            lines.append("without a loss, all directions of phi counted alike")
        if self.widened > 1:
            lines.append(f"the metric did not react at first, so phi was moved {self.widened:.0f} times as far")
        if self.widened < 1:
            lines.append(f"the metric reacted strongly, so phi was moved {1 / self.widened:.0f} times less far")
        if not self.learns:
            return lines
        if self.fit is None:
            lines.append("the metric never varied, so there is no value function: modulate more layers, or train first")
        else:
            quality = self.fit.f.quality or "of unknown quality, as it predicted none of the points"
            lines.append(f"value function ({self.fit.f.kind}): {quality}")
        return lines
