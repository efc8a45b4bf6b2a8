"""What a run did, in the metric's own units and in words."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Generic

from torch import Tensor
from typing_extensions import TypeVar

from metricopt_ext.adapters.start import Start
from metricopt_ext.methods.constrained import Constrained, besides
from metricopt_ext.methods.guard import Decision, Guard, Verdict
from metricopt_ext.methods.new_classes import KeptShare
from metricopt_ext.methods.outcomes import Outcomes
from metricopt_ext.methods.tuned_settings import TunedSettings
from metricopt_ext.search.learned import UpdateRule
from metricopt_ext.tasks.evaluation import Evaluation
from metricopt_ext.tasks.metric import Metric
from metricopt_ext.utils.words import counted, decimals
from metricopt_ext.value.fitting import Fit
from metricopt_ext.value.gp import GPValueFunction
from metricopt_ext.value.value_function import Quality, ValueFunction

KEPT = {
    "start": "the model as it was",
    "loss_finetune": "the loss-only finetune",
    "metricopt": "MetricOpt",
    "search": "the end of the search",
    "part": "a part of the way to the end of the search",
    "settings": "the tuned settings of inference",
    "learned": "the learned optimizer's end",
    "batchnorm": "BatchNorm re-estimated",
    "batchnorm_line": "BatchNorm's statistics mixed with the deployment's",
    "prior": "logits adjusted by the priors",
    "prior_twice": "logits adjusted by the priors at twice the strength",
    "prior_line": "logits adjusted by the priors as strongly as the metric prefers",
    "thresholds": "thresholds that predict each label as often as it occurs",
    "costs": "logits adjusted by what errors cost",
}


def kept(name: str) -> str:
    """Return the words for what was kept; a user's own start goes by its name."""
    return KEPT.get(name, f"the start {name!r}")


class Details:
    """What a strategy alone has to tell of a run; its own details are a frozen dataclass of this kind.

    Attributes:
        finetunes: Whether phi follows a path step by step, at no query a step, which a plot along finetuning shows.
    """

    finetunes: ClassVar[bool] = False

    def lines(self, result: "Result[Any]") -> list[str]:
        """Return what ``str`` of the result says at its end."""
        return []

    def beside(self) -> str:
        """Return what is printed next to the outcome."""
        return ""

    def products(self) -> dict[str, UpdateRule]:
        """Return what was learned besides f, by the names of its files."""
        return {}


@dataclass(frozen=True)
class SearchDetails(Details):
    """What a search has to tell.

    Attributes:
        learns: Whether it learns an f.
        plain: Whether there was no loss, so that all directions of phi counted alike.
        widened: How many times wider than probed the design had to be for the metric to react.
    """

    learns: bool
    plain: bool
    widened: float

    def lines(self, result: "Result[Any]") -> list[str]:
        """Return how far phi was moved, and how good f is."""
        lines = ["without a loss, the search treated all directions of phi alike"] if self.plain and self.learns else []
        if self.widened > 1:
            lines.append(f"the metric did not react at first, so phi was moved {self.widened:.0f} times as far")
        if self.widened < 1:
            lines.append(f"the metric reacted strongly, so phi was moved {1 / self.widened:.0f} times less far")
        if not self.learns:
            return lines
        if result.fit is None:
            return [
                *lines,
                "the metric never varied, so there is no value function: modulate more layers, or train first",
            ]
        quality = result.quality or "of unknown quality, as it predicted none of the points"
        lines.append(f"value function ({result.fit.f.kind}): {quality}")
        if result.promised is not None:
            lines.append(f"the outcomes' own losses promised {result.promised:.0%} of how they varied")
        return lines


Own = TypeVar("Own", bound=Details, default=SearchDetails)


@dataclass(frozen=True)
class Result(Generic[Own]):
    """What `optimize_metric` did, in the metric's own units.

    Attributes:
        metric: The metric's name.
        before: Metric of the model as it was given, on the data that the metric sees.
        after: Metric of the model as it is now.
        best: Metric of the best candidate; it differs from ``after`` if its gain may be due to chance.
        chosen: The candidate that was kept: ``"start"`` or another of ``ends``.
        chance: Standard deviation of the chance part of a gain; None for an unguarded run, as nothing measures it.
        optimism: How much of the gain is expected to vanish on other data, as what was kept was chosen by its metric; 0
            if nothing measures it.
        queries: Queries spent, by purpose.
        queries_per_start: Queries that another start would cost.
        ends: End point phi, ``d``, of each candidate.
        values: Metric of each candidate that the guard chose from.
        starts: Metric of each candidate that the run could begin from, ``"start"`` (phi = 0) among them.
        strengths: The t of each line's best start (`StartLine`), by name.
        started_at: The candidate that the search began from, the best of them.
        candidates: What the run could begin from.
        verdict: What the guard thinks of the best end.
        fit: f with its held-out quality, and its predictions beside the values found; None without an f.
        split_half: Correlation of the metric's halves over the points asked; NaN if it does not report halves.
        points: The phi at which the metric was asked before the guard decided, ``n x d``.
        costs: The metric there as a cost, ``n``.
        path: The run's position over time, ``m x d``, from its beginning to its end.
        details: What only its strategy reports.
        needed: What a gain must exceed, besides the optimism, for the guard to believe it; None for an unguarded run.
        guard: What told a gain from chance: ``"halves"`` of the metric's data, ``"repeats"`` of each evaluation,
            ``"held-out"`` data, or ``"none"``: the run is unguarded, and any gain was kept.
        kept_share: How much of the step to the search's end was kept, and why, if the model will be judged on classes
            other than the metric's (`Metric.new_classes`), in the metric's units; else None.
        holdout: Metric on held-out data, by candidate, the guard's own choice last; empty without such data.
        elsewhere: Other quantities than the metric (`Metric`: ``also``, ``subject_to``, a dict), by candidate and name,
            each in its own units, as far as they are known.
        outcomes: The outcomes that the metric is made of, by candidate and name; None if it is told as a number.
        constrained: How the run stands to its constraints; None without any.
        settings: What became of the settings of inference; None for a task without any.
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
    values: dict[str, float]
    starts: dict[str, float]
    started_at: str
    candidates: Mapping[str, Start]
    verdict: Verdict
    fit: Fit | None
    split_half: float
    points: Tensor
    costs: tuple[float, ...]
    path: Tensor
    details: Own
    needed: float | None = field(kw_only=True)
    guard: Guard = field(kw_only=True)
    strengths: dict[str, float] = field(kw_only=True, default_factory=dict)
    kept_share: KeptShare | None = field(kw_only=True, default=None)
    holdout: dict[str, float] = field(kw_only=True, default_factory=dict)
    elsewhere: dict[str, dict[str, float]] = field(kw_only=True, default_factory=dict)
    outcomes: Outcomes | None = field(kw_only=True, default=None)
    constrained: Constrained | None = field(kw_only=True, default=None)
    settings: TunedSettings | None = field(kw_only=True, default=None)

    def __str__(self) -> str:
        """State the outcome, its cost and whether f was to be trusted, in a few lines."""
        return "\n".join(self.lines())

    def lines(self) -> list[str]:
        """Return what ``str`` joins."""
        spent = ", ".join(f"{purpose} {n}" for purpose, n in self.queries.items())
        unguarded = ", unguarded" if self.guard == "none" else ""
        changed = f"{decimals(self.before)} -> {decimals(self.after)}{self.details.beside()}{unguarded}"
        lines = [f"{self.metric}: {changed}; kept {self.what_was_kept()}"]
        lines += [] if self.outcomes is None else self.outcomes.lines(self.chosen)
        lines += besides(self.also, self.constrained)
        lines += [] if self.settings is None else self.settings.lines()
        lines += [] if self.constrained is None else self.constrained.lines(self.chosen)
        if self.best != self.after:
            lines.append(f"the best candidate has {decimals(self.best)}, but {self.doubt()}")
        if self.holdout:
            shown = ", ".join(f"{kept(name)} {decimals(value)}" for name, value in self.holdout.items())
            lines.append(f"on the held-out data: {shown}")
        total = sum(self.queries.values())
        lines.append(f"queries: {total} ({spent}); another starting point would cost {self.queries_per_start}")
        if self.guard == "none":
            lines.append(
                "nothing tells how much of the gain is chance: let the metric return (value, (half, half)), its values"
                " on all of its data and on two random halves; or give the metric repeats, or the run a holdout"
            )
        if len(self.starts) > 1:
            shown = ", ".join(f"{name}{self._strength(name)} {decimals(value)}" for name, value in self.starts.items())
            lines.append(f"the search began from {kept(self.started_at)}, the best of the starts ({shown})")
        return lines + self.details.lines(self)

    @property
    def promised(self) -> float | None:
        """Share of how the outcomes varied that their own losses promised; None without promises."""
        f = None if self.fit is None else self.fit.f
        return f.explained if isinstance(f, GPValueFunction) else None

    @property
    def quality(self) -> Quality | None:
        """How well f predicts, with errors in the metric's own unit; None if that is not known."""
        return None if self.fit is None else self.fit.f.quality

    @property
    def broken(self) -> dict[str, float]:
        """By how much what was kept breaks each constraint that it breaks, by the constraint; empty if it breaks none.

        Then no point that was asked satisfies all.
        """
        return {} if self.constrained is None else self.constrained.excess(self.chosen)

    @property
    def also(self) -> dict[str, tuple[float, float]]:
        """Other quantities than the metric, by name: of the model as it was, and of the model as it is now."""
        before, after = (self.elsewhere.get(name, {}) for name in ("start", self.chosen))
        return {name: (value, after[name]) for name, value in before.items() if name in after}

    def start_of(self, name: str) -> Start:
        """Return one of ``ends`` as a start for `Adapter.apply`, with what its own start replaces."""
        return replace(self.candidates[name if name in self.candidates else self.started_at], phi=self.ends[name])

    def products(self) -> dict[str, ValueFunction | UpdateRule]:
        """Return what was learned, by the names of its files."""
        f: dict[str, ValueFunction | UpdateRule] = {} if self.fit is None else {"value_function": self.fit.f}
        return {**f, **self.details.products()}

    @property
    def overruled(self) -> bool:
        """Whether held-out data prefer another candidate than the guard."""
        return bool(self.holdout) and self.chosen != list(self.holdout)[-1]

    def what_was_kept(self) -> str:
        """Say what was kept, and what share of the way if it is one."""
        if self.chosen == "settings":
            start = self.start_of(self.chosen)
            replaced = len(start.tensors)
            changed = [*(["phi"] if start.phi.any() else []), *([counted(replaced, "tensor")] if replaced else [])]
            return f"{kept(self.chosen)}, with {' and '.join(changed)} of a start" if changed else kept(self.chosen)
        if self.chosen != "part" or self.kept_share is None:
            return kept(self.chosen) + self._strength(self.chosen)
        unknown = "" if self.kept_share.evaluated else " (the metric there is f's prediction, as it was not queried)"
        return f"{self.kept_share.share:.0%} of the way to the end of the search{unknown}"

    def _strength(self, name: str) -> str:
        return f" (t = {self.strengths[name]:.4g})" if name in self.strengths else ""

    def doubt(self) -> str:
        """Say why the best candidate was not kept."""
        if self.overruled:
            return "the held-out data do not confirm it"
        if self.kept_share is not None:
            return self.kept_share.doubt()
        if self.verdict.gain - self.verdict.optimism > (self.verdict.needed or 0):
            return "f, which has learned from all queries, does not expect it to be that much better"
        return with_so_little_data((self.needed or 0) + self.optimism)


def with_so_little_data(gain: float) -> str:
    """Say that a gain up to this one is not believed."""
    return (
        f"with so little data, up to {decimals(gain)} of a gain may be chance and optimism; more data would show"
        " smaller gains"
    )


def outcome(
    metric: Metric, candidates: Mapping[str, Evaluation], decision: Decision, ends: dict[str, Tensor]
) -> dict[str, Any]:
    """Return the fields of a `Result` that follow from what the guard decided.

    Args:
        metric: The run's.
        candidates: Evaluations by name, of ``"start"`` and the others that the guard chose from.
        decision: What it kept.
        ends: End point phi, ``d``, of each candidate.
    """
    verdict, outcomes = decision.verdict, Outcomes.of(metric.combination, candidates)
    made_of = set() if outcomes is None else outcomes.values["start"].keys() - metric.subject_to.keys()
    others = {name: {k: v for k, v in each.also.items() if k not in made_of} for name, each in candidates.items()}
    return {
        "metric": metric.name,
        "before": candidates["start"].value,
        "after": candidates[decision.kept].value,
        "best": min(candidates.values(), key=lambda each: each.cost).value,
        "chosen": decision.kept,
        "chance": verdict.chance,
        "optimism": verdict.optimism,
        "needed": verdict.needed,
        "ends": ends,
        "values": {name: each.value for name, each in candidates.items()},
        "guard": verdict.guard,
        "verdict": verdict,
        "outcomes": outcomes,
        "elsewhere": {name: each for name, each in others.items() if each},
    }
