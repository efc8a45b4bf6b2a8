"""What a run did, in the metric's own units and in words."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from metricopt_ext.adapters.adapter import Adapter
from metricopt_ext.adapters.start import Start
from metricopt_ext.methods.guard import Constrained, Guard, KeptShare, TunedSettings, Verdict, besides
from metricopt_ext.plain import in_markdown
from metricopt_ext.search.learned import UpdateRule
from metricopt_ext.tasks.evaluation import Evaluation
from metricopt_ext.tasks.metric import Metric
from metricopt_ext.tasks.trajectories import Trajectory
from metricopt_ext.utils.words import brief, decimals
from metricopt_ext.value.fitting import Fit
from metricopt_ext.value.gp import GPValueFunction

KEPT = {
    "start": "the model as it was",
    "loss_finetune": "the loss-only finetune",
    "metricopt": "MetricOpt",
    "search": "the end of the search",
    "part": "a part of the way to the end of the search",
    "settings": "the tuned settings of inference",
    "learned": "the learned optimizer's end",
    "batchnorm": "BatchNorm re-estimated",
    "whitening": "whitened embeddings",
    "lda_whitening": "embeddings whitened within classes",
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


@dataclass(frozen=True, kw_only=True)
class Result:
    """What `optimize_metric` did, in the metric's own units.

    Attributes:
        metric: The metric's name.
        evaluations: What the metric told of each candidate that the guard chose from, by name, and of the model as it
            was given, ``"start"``: its value, and other quantities (``also``), each in its own units.
        chosen: The candidate that was kept: ``"start"`` or another of ``ends``.
        verdict: What the guard, or data held out where these alone tell chance, think of the best end.
        queries: Queries spent, by purpose.
        queries_per_start: Queries that another start would cost.
        ends: End point phi, ``d``, of each candidate.
        starts: Metric of each candidate that the run could begin from, ``"start"`` (phi = 0) among them.
        strengths: The t of each line's best start (`StartLine`), by name.
        started_at: The candidate that the search began from (`guard.chosen_start`).
        against: The candidate that its end was held against: the model as it was trained, or what is presumed.
        candidates: What the run could begin from.
        fit: f with its held-out quality, and its predictions beside the values found; None without an f.
        split_half: Correlation of the metric's halves over the points asked; NaN if it does not report halves.
        points: The phi at which the metric was asked before the guard decided, ``n x d``.
        costs: The metric there as a cost, ``n``: 0 to 1 within its bounds, the best first; without any, in its units.
        path: The run's position over time, ``m x d``, from its beginning to its end.
        kept_share: How much of the step to the search's end was kept, and why, if the model will be judged on classes
            other than the metric's (`Metric.new_classes`), in the metric's units; else None.
        holdout: Metric on held-out data, by candidate, the guard's own choice last; empty without such data.
        looked: What the metric's ``also`` has, by name, of ``"start"`` and of what was kept.
        parts: Names of the outcomes that the metric is made of, in order; empty if it is told as a number.
        higher: Whether higher is better of all these alike; None if nothing tells.
        constrained: How the run stands to its constraints; None without any.
        settings: What became of the settings of inference; None for a task without any.
        plain: Whether a search that learns had no loss, and so took all directions of phi alike.
        widened: How many times wider than probed a search's design had to be for the metric to react.
        loss_finetune: Of a learner that follows f step by step, the metric after as many steps on the loss alone; None
            of a search.
        setting: The (loss weight, metric step) by which a recipe, or Algorithm 1, followed f.
        trajectories: Those that these learned f from.
        rule: The optimizer that `AlgorithmS1` has learned.
    """

    metric: str
    evaluations: Mapping[str, Evaluation]
    chosen: str
    verdict: Verdict
    queries: dict[str, int]
    queries_per_start: int
    ends: dict[str, Tensor]
    starts: dict[str, float]
    started_at: str
    candidates: Mapping[str, Start]
    fit: Fit | None
    split_half: float
    points: Tensor
    costs: tuple[float, ...]
    path: Tensor
    parts: tuple[str, ...] = ()
    higher: bool | None = None
    against: str = "start"
    strengths: dict[str, float] = field(default_factory=dict)
    kept_share: KeptShare | None = None
    holdout: dict[str, float] = field(default_factory=dict)
    looked: dict[str, dict[str, float]] = field(default_factory=dict)
    constrained: Constrained | None = None
    settings: TunedSettings | None = None
    plain: bool = False
    widened: float = 1.0
    loss_finetune: float | None = None
    setting: tuple[float, float] | None = None
    trajectories: tuple[Trajectory, ...] = ()
    rule: UpdateRule | None = None

    @classmethod
    def of(cls, metric: Metric, evaluations: Mapping[str, Evaluation], **found: Any) -> "Result":
        """Make one of a metric's evaluations, with what these are made of.

        Args:
            metric: The run's.
            evaluations: Of ``"start"`` and the others that the guard chose from, by name.
            found: The other attributes.
        """
        if (made_by := metric.combination) is not None:
            found["parts"] = parts = made_by.names(evaluations["start"].outcomes)
            signs = {metric.outcome_sign(part) for part in parts}
            found["higher"] = signs == {-1} if signs in ({-1}, {1}) else None
        return cls(metric=metric.name, evaluations=evaluations, **found)

    def __str__(self) -> str:
        """State the outcome, its cost and whether f was to be trusted, in a few lines."""
        return "\n".join(self.lines())

    def lines(self) -> list[str]:
        """Return what ``str`` joins."""
        changed = f"{decimals(self.before)} -> {decimals(self.after)}"
        changed += "" if self.loss_finetune is None else f" (loss-only {decimals(self.loss_finetune)})"
        changed += ", unguarded" if self.guard == "none" else ""
        total, spent = sum(self.queries.values()), ", ".join(f"{purpose} {n}" for purpose, n in self.queries.items())
        lines = [
            f"{self.metric}: {changed}; kept {self.what_was_kept()}",
            *self.findings(),
            f"queries: {total} ({spent}); another starting point would cost {self.queries_per_start}",
        ]
        if self.guard == "none":
            remedy = "let the metric return (value, (half, half)), or give it repeats, or the run a holdout"
            lines.append(f"nothing tells how much of the gain is chance: {remedy}")
        if len(self.starts) > 1:
            shown = ", ".join(f"{name}{self._strength(name)} {decimals(value)}" for name, value in self.starts.items())
            lines.append(f"the search began from {kept(self.started_at)}, {self._why_there()} ({shown})")
        if self.against != "start":
            lines.append(without_verdict(self.against))
        return lines + self.on_search()

    def _why_there(self) -> str:
        broken = () if self.constrained is None else self.constrained.violated["start"]
        if broken and self.started_at != "start":
            return f"as the model as it was violates {' and '.join(broken)}"
        sign = self.evaluations["start"].sign
        best = min(sign * value for value in self.starts.values()) == sign * self.starts[self.started_at]
        untold = all(each.noise is None and not each.pairs for each in self.evaluations.values())
        return "the best by its value alone" if best and untold else "as no other surely gains on it"

    def findings(self) -> list[str]:
        """Say what became of all else than the metric, and why the best candidate was not kept."""
        lines = [] if self.higher is None else [worst_of(self.made_of, self.higher)]
        lines += besides(self.also, self.constrained)
        lines += [] if self.settings is None else self.settings.lines()
        lines += [] if self.constrained is None else self.constrained.lines(self.chosen, kept)
        if self.best != self.after:
            lines.append(f"the best candidate has {decimals(self.best)}, but {self._doubt()}")
        if self.holdout:
            shown = ", ".join(f"{kept(name)} {decimals(value)}" for name, value in self.holdout.items())
            lines.append(f"on the held-out data: {shown}")
        return lines

    def on_search(self) -> list[str]:
        """Say how far phi was moved, and how good f is."""
        lines = ["without a loss, the search treated all directions of phi alike"] if self.plain else []
        if self.widened != 1:
            lines.append(f"phi was moved {self.widened:.2g} times as far as planned, by how the metric reacted")
        if self.fit is not None:
            quality = self.fit.f.quality or "of unknown quality, as it predicted none of the points"
            lines.append(f"value function ({self.fit.f.kind}): {quality}")
        elif len({*self.costs}) == 1:
            lines.append("the metric never varied, so nothing was learned: modulate more layers, or train first")
        if self.promised is not None:
            lines.append(f"the outcomes' own losses promised {self.promised:.0%} of how they varied")
        return lines

    def to_json(self) -> dict[str, Any]:
        """Return the outcome as plain data: the numbers that `lines` tell of."""
        numbers = {"metric": self.metric, "before": self.before, "after": self.after, "best": self.best}
        return {**numbers, "kept": self.chosen, **told_of_guard(self, self.chosen), "queries": self.queries}

    def card(self, adapter: Adapter) -> str:
        """Return a card in Markdown, as model hubs show it: what was tuned, what came of it, and how it is loaded.

        Its head is what hubs read (YAML between dashes). Names are shown as text, whatever they hold.

        Args:
            adapter: What is kept, applied to the model.
        """
        name = in_markdown(type(adapter.model).__name__)
        lines = "\n".join(f"- {in_markdown(line)}" for line in self.lines())
        return (
            "---\nlibrary_name: metricopt-ext\ntags: [metricopt-ext, black-box-optimization]\n---\n\n"
            f"# {name}, tuned for {in_markdown(self.metric)}\n\n"
            f"An adapter of {adapter.dim} numbers, phi, for a frozen model, which is not included.\n\n{lines}\n\n"
            '`mo.load_run(model, "FOLDER")` applies it to the model as it was trained, and `.merge()` folds it in.\n'
        )

    @property
    def before(self) -> float:
        """Metric of the model as it was given, on the data that the metric sees."""
        return self.evaluations["start"].value

    @property
    def after(self) -> float:
        """Metric of the model as it is now."""
        return self.evaluations[self.chosen].value

    @property
    def best(self) -> float:
        """Metric of the best candidate that may be kept; not ``after`` if its gain may be due to chance."""
        limits, known = self.constrained, self.evaluations.items()
        allowed = (each for name, each in known if limits is None or limits.allows(name))
        return min(allowed, key=lambda each: each.cost).value

    @property
    def chance(self) -> float | None:
        """Standard deviation of the chance part of a gain; None for an unguarded run, as nothing measures it."""
        return self.verdict.chance

    @property
    def needed(self) -> float | None:
        """What a gain must exceed, besides the optimism, to be believed; None for an unguarded run."""
        return self.verdict.needed

    @property
    def guard(self) -> Guard:
        """What told a gain from chance: halves of the metric's data, repeats, held-out data, or none."""
        return self.verdict.guard

    @property
    def promised(self) -> float | None:
        """Share of how the outcomes varied that their own losses promised; None without promises."""
        f = None if self.fit is None else self.fit.f
        return f.explained if isinstance(f, GPValueFunction) else None

    @property
    def broken(self) -> dict[str, float]:
        """By how much what was kept breaks each constraint that it breaks, by the constraint; empty if it breaks none.

        Then no point that was asked satisfies all.
        """
        return {} if self.constrained is None else dict(self.constrained.violated[self.chosen])

    @property
    def made_of(self) -> dict[str, tuple[float, float | None]]:
        """The metric's outcomes, by name: of the model as it was, and as it is now, None if that was not asked."""
        before, after = (self.evaluations[name].also for name in ("start", self.chosen))
        return {name: (before[name], after.get(name)) for name in self.parts}

    @property
    def also(self) -> dict[str, tuple[float, float]]:
        """Other quantities than the metric, by name: of the model as it was, and of the model as it is now."""
        before, after = ({**self.evaluations[at].also, **self.looked.get(at, {})} for at in ("start", self.chosen))
        bounded = () if self.constrained is None else (each.name for each in self.constrained.limits.constraints)
        made_of = {*self.parts}.difference(bounded)
        return {name: (value, after[name]) for name, value in before.items() if name in after and name not in made_of}

    def start_of(self, name: str) -> Start:
        """Return one of ``ends`` as a start for `Adapter.apply`, with what its own start replaces."""
        return replace(self.candidates[name if name in self.candidates else self.started_at], phi=self.ends[name])

    def what_was_kept(self) -> str:
        """Say what was kept, and what share of the way if it is one."""
        if self.chosen == "part" and self.kept_share is not None:
            unknown = "" if self.kept_share.evaluated else " (where the metric is f's prediction)"
            return f"{self.kept_share.share:.0%} of the way to the end of the search{unknown}"
        start = self.start_of(self.chosen)
        elsewhere = self.chosen == "settings" and (start.tensors or start.phi.any())
        where = ", at another start than the model as it was" if elsewhere else ""
        return kept(self.chosen) + self._strength(self.chosen) + where

    def _strength(self, name: str) -> str:
        return f" (t = {self.strengths[name]:.4g})" if name in self.strengths else ""

    def _doubt(self) -> str:
        if self.holdout and self.chosen != list(self.holdout)[-1]:  # the last is the guard's own choice
            return "the held-out data do not confirm it"
        if self.kept_share is not None:
            return self.kept_share.doubt()
        if self.verdict.gain - self.verdict.optimism > (self.verdict.needed or 0):
            return "f, which has learned from all queries, does not expect it to be that much better"
        return with_so_little_data(self.verdict)


def told_of_guard(found: Any, chosen: str) -> dict[str, Any]:
    """Return what a report says of what the number is made of, of other numbers, of limits and of the guard.

    Args:
        found: A `Result`, or another that has its attributes.
        chosen: The name of what was kept.
    """
    parts = {
        part: {name: {"before": before, "after": after} for name, (before, after) in pairs.items()}
        for part, pairs in (("outcomes", found.made_of), ("also", found.also))
        if pairs
    }
    verdict, limits = found.verdict, {} if found.constrained is None else found.constrained.to_json(chosen)
    guard = {"by": verdict.guard, "chance": verdict.chance, "optimism": verdict.optimism, "needed": verdict.needed}
    return {**parts, **limits, "guard": {**guard, "held out": found.holdout}}


def without_verdict(name: str) -> str:
    """Say that the guard did not judge a start that is presumed."""
    return f"{kept(name)} had no verdict: it holds unless it is surely worse, and the end is judged against it"


def with_so_little_data(verdict: Verdict) -> str:
    """Say up to which gain none is believed."""
    gain = (verdict.needed or 0.0) + verdict.optimism
    return f"with so little data, up to {decimals(gain)} of a gain may be chance and optimism"


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
