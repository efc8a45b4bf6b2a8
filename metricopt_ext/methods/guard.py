"""The guard: keep a change only if its gain exceeds chance and the optimism of having chosen the best of many.

How large chance is shows in three ways: two halves of the metric's data, repeats of an evaluation, or data held out
from the search. Of a metric that is a plain number nothing is known, and every gain is believed. Halves that can't be
of two halves of data count for none (`fault_of_halves`).

Where a model will be judged on other classes than the metric's (`Metric.new_classes`), chance is not all: a search also
climbs what is its classes' own. Of an end that is kept, a share of the way is kept then, or nothing (`kept_share`).
With few classes, 30 say, that mends it only in part.

How a run stands to its constraints, and what became of its settings, is said here too, as the guard respects the ones
and judges the others.
"""

import math
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any, Literal, NamedTuple, SupportsFloat

import torch
from torch import Tensor

from metricopt_ext.adapters.start import Start
from metricopt_ext.runtime import distributed
from metricopt_ext.search.descent import descend
from metricopt_ext.search.stages import SETTINGS, Point, SettingsStage
from metricopt_ext.search.strategy import SearchResult, SearchStrategy
from metricopt_ext.search.visited import ranked
from metricopt_ext.tasks.combine import costs_on_pairs
from metricopt_ext.tasks.constraints import Limits
from metricopt_ext.tasks.evaluation import Evaluation, noise_of, stacked_halves, stacked_pairs
from metricopt_ext.tasks.metric import Metric
from metricopt_ext.tasks.settings import Value, Values
from metricopt_ext.tasks.split_half import TELLING, chance_of_gain, fault_of_halves, reliability_of, repeats_agree
from metricopt_ext.tasks.task import FinetuneTask
from metricopt_ext.utils.threads import num_threads
from metricopt_ext.utils.words import brief, decimals
from metricopt_ext.value.gp import GPValueFunction

# Evaluations by the names of what was evaluated.
Named = Mapping[str, Evaluation]

# What tells a gain from chance.
Guard = Literal["halves", "repeats", "held-out", "none"]

# How sure the guard must be, one-sided, that a gain is not chance.
CONFIDENCE = 0.93

# How sure it must be of the best along a line, which is the luckiest of about six points, and moves one number alone.
LINE_CONFIDENCE = 0.85

# How sure the guard must be of tuned settings, the best of few candidates with names. At 0.75 and at 0.85 it keeps no
# more on test, on four tasks, and refuses some that gain (docs/settings.md).
SETTINGS_CONFIDENCE = 0.6

# As likely as not: the gain that is expected is above 0.
EXPECTED = 0.5

# So many divisions of the data into halves tell by themselves how large chance is.
DIVISIONS = 4

# Of what a search in chance alone would have gained (`SearchResult.climbed`), the share that counts as optimism, by
# whether outcomes make the metric. Of a number less of it is lost on other data where something is true, 0.4 to 0.8 on
# four tasks: the whole refuses more of what gains, a third more on six tasks; without any, every other search in chance
# alone is believed. Outcomes agree on what is true, which leaves little to climb: the whole refused one of 90 ends on
# three tasks, and half of the ends in chance that three quarters believes.
CLIMBED = {False: 3 / 4, True: 1.0}

# The candidates that the end is compared with: the best of the visited points, this share of them and at least so many.
SHARE, LEAST = 1 / 4, 8


def deviates(confidence: float) -> float:
    """Return how many standard deviations of chance a gain has to exceed at a confidence in [0.5, 1).

    Raises:
        ValueError: The confidence is out of range.
    """
    if not isinstance(confidence, SupportsFloat) or not 0.5 <= float(confidence) < 1:
        raise ValueError(f"guard_confidence is {brief(confidence)}; it must be at least 0.5 and below 1")
    return NormalDist().inv_cdf(confidence)


@dataclass(frozen=True)
class Verdict:
    """What the guard thinks of a gain, all in units of the cost.

    Attributes:
        gain: By how much the candidate's cost is lower.
        optimism: How much of it is expected to be lost on other data, as the candidate was chosen for its cost.
        chance: Standard deviation of the chance part of what is left; None if nothing tells.
        reliability: Share of the variance among the best candidates that is not chance, in [0, 1]; 1 if unknown.
        needed: What a gain must exceed besides the optimism; None if chance is unknown.
        predicted: The gain as f sees it, all points considered; infinite if there is no f to ask.
        guard: What tells chance.
        by_f: Whether f's gain alone decides, unless the queries show a loss beyond chance.
    """

    gain: float
    optimism: float
    chance: float | None
    reliability: float
    needed: float | None
    predicted: float = math.inf
    guard: Guard = "halves"
    by_f: bool = False

    @property
    def accepted(self) -> bool:
        """Whether the gain is to be believed; f's is a posterior mean, and so shrunk already."""
        if self.by_f:
            return self.predicted > 0 and self.gain > -(self.chance or 0.0)
        return min(self.gain - self.optimism, self.predicted) > (self.needed or 0.0)


@dataclass(frozen=True)
class Decision:
    """What the guard kept of a run.

    Attributes:
        kept: Its name among the candidates.
        verdict: What the guard thinks of the best end: over what it is held against if that is what it was refused
            for, or if no start was kept; and else over the start. Where the end violates a constraint, and a start may
            be kept instead, it is on that start.
        otherwise: What is kept where the end is not, for other reasons.
        share: How far to go towards the end, if that is kept, and the metric's classes are new (`kept_share`).
    """

    kept: str
    verdict: Verdict
    otherwise: str = "start"
    share: "KeptShare | None" = None


def decide(
    candidates: Named,
    visited: Sequence[Evaluation],
    confidence: float = CONFIDENCE,
    predicted: Callable[[str], float] = lambda name: math.inf,
    climbed: float = 0.0,
    *,
    against: str = "start",
    started: str = "start",
    lines: Collection[str] = (),
    limits: Limits | None = None,
) -> Decision:
    """Keep the start that a search began from, the best along a line, or the search's end.

    What has to be made sure of is that the model is not worse than it was. So the end is held against the model as it
    was trained, or against what is presumed in its place. What else to keep is then a choice between changes: the one
    that is expected to be better is made. Between start and end, or start and line, f knows best, which has smoothed
    all that was asked; without an f, the gain less its optimism counts. The line's best had few directions to be lucky
    in: the end must gain on it by both.

    Only what satisfies the constraints is kept. Where the model as it was trained violates one, the best that satisfies
    all is, whether or not its metric gains; where nothing satisfies them, that model is.

    Args:
        candidates: Evaluations by name: of the model as it was trained first, of the search's end last.
        visited: Those of the points that the end was chosen from.
        confidence: How sure to be that the end gains, at least 0.5 and below 1; of a line's best at most
            `LINE_CONFIDENCE` is asked.
        predicted: The gain of the search's end over another candidate as f sees it, by that one's name, in units of the
            cost; infinite if there is no f to ask, as about a start with other tensors.
        climbed: What of the end's gain on what it is held against is optimism at least, as the search would have
            gained as much in chance alone (`CLIMBED`). It does not count where what is kept otherwise gains by the
            end's own confidence: then the model is better than it was, and the end is a choice by expectation.
        against: The candidate that the end is held against: the model as it was trained, or what is presumed.
        started: The candidate that the search began from (`chosen_start`).
        lines: Names of the candidates that are the best along a line.
        limits: The constraints; None without any. What was observed counts.
    """
    told = _telling([*candidates.values(), *visited])
    candidates, visited = dict(zip(candidates, told, strict=False)), told[len(candidates) :]
    trained, *_, end = candidates
    holding = {name: each for name, each in candidates.items() if limits is None or limits.hold(each)}
    ruled = trained not in holding or len(holding) == 1  # by constraints alone
    judged = candidates if ruled else holding
    was, kept = candidates[against], started if started in judged and started not in lines else against
    for name in [each for each in judged if each in lines]:
        sure = judge(was, candidates[name], visited, min(confidence, LINE_CONFIDENCE)).accepted
        by_f = predicted(kept) - predicted(name)
        if sure and (kept == against or _between(candidates[kept], candidates[name], visited, by_f).accepted):
            kept = name
    verdict = judge(was, candidates[kept], visited, confidence)
    if end not in judged:
        return Decision(kept, verdict)
    verdict = judge(was, candidates[end], visited, confidence, predicted(against), 0.0 if verdict.accepted else climbed)
    if verdict.accepted and kept in lines:
        verdict = judge(candidates[kept], candidates[end], visited, EXPECTED, predicted(kept))
    elif verdict.accepted and kept != against:
        verdict = _between(candidates[kept], candidates[end], visited, predicted(kept))
    if not ruled:
        return Decision(end if verdict.accepted else kept, verdict, kept)
    best = [*sorted(holding, key=lambda name: holding[name].cost), trained]
    return Decision(best[0], verdict, next(name for name in best if name != end))


def _between(before: Evaluation, after: Evaluation, visited: Sequence[Evaluation], by_f: float) -> Verdict:
    """Judge which of two changes is expected to be better, by f's gain where there is one, a finite number.

    Only what the queries show to be worse by more than a deviation of chance is not better, whatever f says: f may be
    off by more than what a metric without chance tells.
    """
    known = math.isfinite(by_f)
    return replace(judge(before, after, visited, EXPECTED, by_f if known else math.inf), by_f=known)


class Began(NamedTuple):
    """Where a search began, and what the guard has to know besides the search's end.

    Attributes:
        task: Its metric's units, and whether its classes are new: then a share of the way to the end may be kept.
        starts: What the search could begin from, by name, the best of lines and tuned settings among them.
        evaluated: The metric's evaluations of them.
        name: The one that it began from.
        against: What its end is held against: the model as it was trained, or what is presumed in its place.
        points: All starts that were asked for, those on lines too.
        confidence: How sure the guard must be, at least 0.5 and below 1.
        lines: The t of those that are the best of a line, by name.
        limits: The metric's constraints; what violates one is not kept. None without any.
        stage: The stage over settings of inference; None for a task without any.
    """

    task: FinetuneTask
    starts: Mapping[str, Start]
    evaluated: Named
    name: str
    against: str
    points: Sequence[Point]
    confidence: float
    lines: Mapping[str, float] = {}
    limits: Limits | None = None
    stage: SettingsStage | None = None

    @property
    def at(self) -> Start:
        """The start that it began from."""
        return self.starts[self.name]

    @property
    def elsewhere(self) -> list[Evaluation]:
        """The evaluations that the search does not know, as they are of other tensors or settings."""
        return [each.evaluation for each in self.points if not each.start.of_the_same(self.at)]

    def candidates(self, end: SearchResult) -> dict[str, Evaluation]:
        """Return the evaluations of what the guard chooses from, by name; a search's end is the last."""
        names = ("start", self.against, self.name, *self.lines)
        return {**{name: self.evaluated[name] for name in names}, "search": end.evaluation}


def decided(began: Began, end: SearchResult) -> Decision:
    """Return what the guard decides of where a search stands and, if that is the end, how far to go towards it."""
    candidates, metric, limits = began.candidates(end), began.task.metric, began.limits
    visited = [*end.evaluations, *(began.elsewhere if began.lines else ())]

    def gain_by_f(name: str) -> float:
        known = began.starts[name].of_the_same(began.at)  # f is of the model with its tensors
        return end.gain_over(began.starts[name].phi) if known else math.inf

    against, started = began.against, began.name
    if started not in (against, SETTINGS, *began.lines):  # it was taken by what few points told of chance
        told = [*candidates.values(), *visited]
        started = started if surely_gains(candidates[against], candidates[started], told, began.confidence) else against
    climbed = CLIMBED[metric.combination is not None] * end.climbed
    decision = decide(
        candidates,
        visited,
        began.confidence,
        gain_by_f,
        climbed,
        against=against,
        started=started,
        lines=began.lines,
        limits=limits,
    )
    new = metric.new_classes and decision.kept == "search" and decision.verdict.guard == "halves"
    if new and (limits is None or limits.hold(candidates[decision.otherwise])):  # or else there is no way back
        return replace(decision, share=kept_share(end, began.at.phi))
    return decision


def decide_among(
    ends: Named, visited: Sequence[Evaluation], confidence: float, overstated: Mapping[str, float]
) -> Decision:
    """Keep the model as it was, or the best of the ends of several ways to finetune it.

    Args:
        ends: Evaluations by name: of the model as it was first, then of each end.
        visited: Those made before, where finetuning goes.
        confidence: How sure to be that the end gains on the model as it was, at least 0.5 and below 1.
        overstated: By how much the gain of some ends is known to be overstated, by name; see `judge`.
    """
    told = _telling([*ends.values(), *visited])
    (start, was), *others = zip(ends, told, strict=False)
    visited = [*told[len(ends) :], *(each for _, each in others)]
    verdicts = {
        name: judge(was, each, visited, confidence, overstated=overstated.get(name, 0.0)) for name, each in others
    }
    best = max(verdicts, key=lambda name: verdicts[name].gain - verdicts[name].optimism)
    return Decision(best if verdicts[best].accepted else start, verdicts[best])


def _telling(told: Sequence[Evaluation]) -> list[Evaluation]:
    """Return evaluations without halves, and say so, if all of them together show that these are none.

    Of repeats that tell nothing it is only said: `judge` finds out by itself.
    """
    fault = fault_of_halves(told)
    faults = ["repeats always agree"] if repeats_agree(told) else []
    faults += [f"halves {fault}"] if fault else []
    for said in faults if distributed.rank() == 0 else ():
        warnings.warn(
            f"the metric's {said}, so they don't tell a gain from chance and are not used; let it return its values on"
            " all of its data and on two random halves of it, or give a holdout",
            stacklevel=4,
        )
    return [each._replace(pairs=()) for each in told] if fault else list(told)


def chosen_start(starts: Mapping[str, Start], evaluated: Named, limits: Limits | None, confidence: float) -> str:
    """Return the name of the start that a search begins from: none is taken from another by its value alone.

    One after another, a start is taken if it surely gains on the one before (`surely_gains`); one that is presumed, if
    the one before does not surely gain on it. What satisfies all constraints comes before what does not.

    Args:
        starts: The starts to choose among by name, the model as it was trained first.
        evaluated: Evaluations by name, of these and of others, which tell chance together.
        limits: The metric's constraints; None without any.
        confidence: How sure to be, at least 0.5 and below 1.
    """
    kept, *others = starts
    for name in others:
        presumed, before, after = starts[name].presumed, evaluated[kept], evaluated[name]
        (broke, _), (breaks, _) = ranked(before, limits), ranked(after, limits)
        pair = (after, before) if presumed else (before, after)
        sure = surely_gains(*pair, evaluated.values(), confidence)
        taken = broke if broke != breaks else sure != presumed
        kept = name if taken else kept
    return kept


def surely_gains(before: Evaluation, after: Evaluation, among: Collection[Evaluation], confidence: float) -> bool:
    """Whether what was made without asking the metric gains on another beyond chance; of a plain number any gain does.

    Nothing was chosen for its value, so no part of the gain is optimism. Chance is that of the two's own halves, in all
    divisions. Where these are fewer than `DIVISIONS`, they tell little: so it is no less than what all that was asked
    says of a gain of this size. Where the metric is undefined on a half of one of the two, nobody is sure.

    Args:
        before: One evaluation.
        after: The other.
        among: Those of everything that was asked.
        confidence: How sure to be, at least 0.5 and below 1.
    """
    gain, told = before.cost - after.cost, [each for each in among if each.pairs]
    divisions = min(len(before.pairs), len(after.pairs))
    if told and not divisions:
        return False
    chance = chance_of_gain(before, [after]) if told else math.sqrt(2) * noise_of([before, after, *among])
    if 0 < divisions < DIVISIONS:
        chance = max(chance, _chance_by_size(before, told, gain))
    return gain > deviates(confidence) * chance


def judge(
    start: Evaluation,
    end: Evaluation,
    visited: Sequence[Evaluation],
    confidence: float = CONFIDENCE,
    predicted: float = math.inf,
    overstated: float = 0.0,
) -> Verdict:
    """Judge the gain of an end over a start, from what halves of the metric's data or repeats say.

    The start may have been unlucky, or chosen as the luckiest of several, and so may the end. Where there is an f, it
    has smoothed both over their neighbours: the smaller of the observed gain, less its optimism, and of f's counts.

    Among some points, part of the variance is chance, and a share, their reliability, is not. The end was chosen for
    its cost, so what sets it apart from their mean counts only by that share (Kelley's regression to the mean); the
    rest is optimism, though no more than the largest of so many draws of chance is expected to be. The best visited
    points and all of them are such points; the larger optimism counts.

    Of halves, chance is the larger of two estimates. One is `chance_of_gain` over the best visited points, where the
    end lies; but these resemble each other, and a metric that is nearly perfect may have no difference between halves
    there. So the other takes all points: the variance of a gain is assumed proportional to its size, as of a share of
    examples.

    Args:
        start: The evaluation of the start.
        end: The evaluation of the end.
        visited: Those of the points that it was chosen from.
        confidence: How sure to be, at least 0.5 and below 1.
        predicted: f's cost at the start less f's cost at the end, if there is an f.
        overstated: An optimism that is known otherwise, as from `optimism_of_gain`; the larger counts.
    """
    gain, deviations, optimism = start.cost - end.cost, deviates(confidence), overstated
    points = sorted(visited or [end], key=lambda each: each.cost)
    halved = [each for each in points if each.pairs]  # the metric may be undefined on a half of some
    repeated = [each for each in points if each.noise is not None]
    halves = stacked_halves(halved) if start.pairs and halved else None
    silent = start.noise is None or end.noise is None or not repeated or repeats_agree([start, end, *repeated])
    if halves is None and silent:
        return Verdict(gain, optimism, None, 1.0, None, predicted, "none")
    told, noise = repeated if halves is None else halved, noise_of([start, end, *repeated])
    costs = torch.tensor([each.cost for each in told], dtype=torch.float64)
    best = max(LEAST, math.ceil(SHARE * len(costs)))
    chance = math.sqrt(2) * noise  # all are pooled, as a few repeats hardly show the noise of one evaluation
    if halves is not None:
        chance = max(chance_of_gain(start, halved[:best]), _chance_by_size(start, halved, gain))

    def reliability(count: int) -> float:
        return reliability_under(noise, costs[:count]) if halves is None else reliability_of(halves[:count])

    largest = chance * math.sqrt(2 * math.log(max(1, len(costs))))
    for count in (best, len(costs)):
        lead = max(0.0, float(costs[:count].mean()) - end.cost)
        optimism = max(optimism, min((1 - reliability(count)) * lead, largest))
    guard: Guard = "repeats" if halves is None else "halves"
    return Verdict(gain, optimism, chance, reliability(best), deviations * chance, predicted, guard)


def accepted(stage: SettingsStage, confidence: float) -> bool:
    """Whether the guard believes the gain of tuned settings over those that a stage began with.

    Args:
        stage: The stage, at its end.
        confidence: The run's; at most `SETTINGS_CONFIDENCE` is asked.
    """
    visited = [each.evaluation for each in stage.points]
    return judge(visited[0], stage.best.evaluation, visited, min(confidence, SETTINGS_CONFIDENCE)).accepted


def _chance_by_size(start: Evaluation, points: Sequence[Evaluation], gain: float) -> float:
    """Return the standard deviation of the chance part of a gain whose variance is proportional to its size."""
    pairs = stacked_pairs([start, *points])
    assert pairs is not None
    gains = pairs[0] - pairs[1:]
    # Summed over the points, as is their size.
    variance = (gains[..., 0] - gains[..., 1]).square().sum() / 4 / pairs.shape[1]
    size = (start.cost - torch.tensor([each.cost for each in points], dtype=torch.float64)).abs().sum()
    return math.sqrt(float(variance / size) * abs(gain)) if size > 0 else 0.0


def reliability_under(noise: float, costs: Tensor) -> float:
    """Return the share of the variance of costs, ``n``, that is not noise of a standard deviation."""
    variance = float(costs.var()) if len(costs) >= TELLING else 0.0
    if noise == 0:
        return 1.0
    return max(0.0, 1 - noise**2 / variance) if variance else 0.0


# --- Constraints -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Constrained:
    """How a run stands to its constraints.

    Attributes:
        limits: The constraints, with their bounds in the quantities' own units.
        violated: By how much each candidate is beyond each constraint that it violates, by name and the constraint's
            text, in the quantity's own unit; NaN of what was not asked. What was refused for it is among them.
        holding: Number of points that were asked and satisfy all.
        evaluated: Number of points that were evaluated.
    """

    limits: Limits
    violated: Mapping[str, Mapping[str, float]]
    holding: int
    evaluated: int

    @classmethod
    def of(cls, limits: Limits | None, candidates: Named, evaluated: Sequence[Evaluation]) -> "Constrained | None":
        """Return how a run stands, None without constraints.

        Args:
            limits: The constraints.
            candidates: What the guard chose from, by name.
            evaluated: All that was evaluated.
        """
        if limits is None:
            return None
        unknown = dict.fromkeys(map(str, limits.constraints), math.nan)  # where f's mean stands in
        violated = {name: limits.violated(each) if each.outcomes else unknown for name, each in candidates.items()}
        return cls(limits, violated, sum(map(limits.hold, evaluated)), len(evaluated))

    def allows(self, name: str) -> bool:
        """Whether a candidate may be kept: what satisfies all, or the model as it was trained where nothing does."""
        return not self.violated[name] or (name == "start" and all(self.violated.values()))

    def lines(self, chosen: str, called: Callable[[str], str]) -> list[str]:
        """Say what the constraints decided; nothing if all candidates satisfy them.

        Args:
            chosen: What was kept, by name.
            called: Returns the words for a candidate (`result.kept`).
        """
        broken = {name: " and ".join(each) for name, each in self.violated.items() if each}
        if chosen in broken:
            said, by = " and ".join(map(str, self.limits.constraints)), excess_in_words(self.violated[chosen])
            said = f"none of {self.evaluated} points that were asked satisfies {said}"
            return [f"{said}: what is kept violates {by} on the metric's data"]
        trained = broken.pop("start", "")
        lines = [f"{called(name)} violates {said}, so it can't be kept" for name, said in broken.items()]
        if trained:
            lines.append(f"the model as it was violates {trained}, so the best that satisfies it is kept, gain or not")
        return lines

    def to_json(self, chosen: str) -> dict[str, Any]:
        """Return the limits as plain data, and by how much what was kept breaks those that it breaks."""
        return {"subject to": self.limits.texts(), "broken": dict(self.violated[chosen])}


def excess_in_words(excess: Mapping[str, float]) -> str:
    """Say by how much each constraint is broken, by its text; see `Constrained.violated`."""
    return " and ".join(f"{limit} by {decimals(by)}" for limit, by in excess.items())


def besides(also: Mapping[str, tuple[float, float]], constrained: Constrained | None) -> list[str]:
    """Say what became of other quantities than the metric, in a line; none without any.

    Args:
        also: Before and after, by name.
        constrained: How the run stands to its constraints; None without any.
    """
    limits = () if constrained is None else zip(constrained.limits.constraints, constrained.limits.numbers, strict=True)
    bounds = {each.name: f" ({'>=' if each.at_least else '<='} {decimals(number)})" for each, number in limits}
    told = [f"{name} {' -> '.join(map(decimals, pair))}{bounds.get(name, '')}" for name, pair in also.items()]
    return [f"besides: {', '.join(told)}"] if told else []


# --- Settings of inference --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TunedSettings:
    """The settings of inference before and after a run.

    Attributes:
        before: Those of the model as it was given, by name.
        after: Those that belong to what was kept.
        free: Those that were changed before anything was asked, as they can't lower the metric.
        factor: How many times as long inference takes by ``after`` as by ``before``.
        tried: What was asked: values of every setting, and the metric there, in its own units.
        untried: Whether none was tried, though some might have been.
    """

    before: dict[str, Value]
    after: dict[str, Value]
    free: dict[str, Value]
    factor: float
    tried: tuple[tuple[dict[str, Value], float], ...]
    untried: bool = False

    @classmethod
    def of(cls, stage: SettingsStage, after: dict[str, Value]) -> "TunedSettings":
        """Make one.

        Args:
            stage: What was asked.
            after: Those of what was kept, a value for each setting.
        """
        settings = stage.settings
        tried = tuple((dict(each.start.settings), each.evaluation.value) for each in stage.points)
        untried = len(tried) == 1 and settings.queries > 0
        return cls(settings.defaults, after, settings.free, settings.factor(after), tried, untried)

    @property
    def changes(self) -> dict[str, tuple[Value, Value]]:
        """What was changed, by name: before and after."""
        return _changes(self.before, self.after)

    def lines(self) -> list[str]:
        """Return what ``str`` of a result says."""
        given, tried, lines = {**self.before, **self.free}, len(self.tried) - 1, []
        if free := _in_words(_changes(self.before, given)):
            lines.append(f"settings for the metric alone, free: {free}; for deployment keep the model's own")
        if changed := _in_words(_changes(given, self.after)):
            longer = "" if abs(self.factor - 1) < 0.005 else f"; inference takes {self.factor:.2f} times as long"
            lines.append(f"settings: {changed} ({tried} tried){longer}")
        elif self.untried:
            lines.append("settings: none was tried; give the search more queries, or allow more by inference=")
        elif tried:
            lines.append(f"settings: as they were ({tried} tried)")
        return lines


def _changes(before: Values, after: Values) -> dict[str, tuple[Value, Value]]:
    return {name: (before[name], value) for name, value in after.items() if before[name] != value}


def _in_words(changes: Mapping[str, tuple[Value, Value]]) -> str:
    return ", ".join(f"{name} {shown(old)} -> {shown(new)}" for name, (old, new) in changes.items())


def shown(value: Value) -> str:
    """Return a value as it is printed."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


# --- New classes -----------------------------------------------------------------------------------------------------

# A search that follows a metric of C classes climbs what is these classes' own. For a quadratic, of the gain
# ``O = tr(H^-1 J) / C`` is lost on other classes (Takeuchi's criterion), H the curvature and J the covariance of the
# classes' gradients. Both halves of the classes have been climbed, so their agreement says nothing of it. But f can be
# conditioned on one half's values and followed to its own end, where the other half's f tells what is lost.

# The optimism is counted one and a half times: with 60 classes the estimate is about right, with 30 it is too small.
STRENGTH = 1.5

# A half's f is followed within this share of the way from start to end, around its own best point.
REACH = 0.5


def held_back(search: SearchStrategy, metric: Metric) -> int:
    """Return how many evaluations a search does not get, as one is for what is kept (`kept_share`)."""
    return int(metric.new_classes and search.keeps_shares)


@dataclass(frozen=True)
class KeptShare:
    """How far to go towards a search's end where the model will be judged on other classes, in units of the cost.

    Attributes:
        share: t in [0, 1]: ``start + t (end - start)`` is to be kept; 0 for the start.
        optimism: O, what of the gain is expected to be lost on other classes.
        gain: G, the smaller of the observed and of f's gain.
        crossed: The mean gain of one half's end as the other half's f sees it.
        evaluated: Whether the metric was evaluated at what is kept, if that is neither start nor end; else f's mean
            stands in.
    """

    share: float
    optimism: float
    gain: float
    crossed: float
    evaluated: bool = True

    def point(self, start: Tensor, end: Tensor) -> Tensor:
        """Return what is to be kept, ``d``: t of the way from start to end, ``d`` each."""
        return start + self.share * (end - start)

    def doubt(self) -> str:
        """Say why the end was not kept as it is."""
        lost = f"{self.optimism:.4f} of its gain is expected to be lost on other classes than the metric's"
        return f"{lost}, as half of these tell of an end that gains {self.crossed:.4f} on the other half"


def kept_share(end: SearchResult, start: Tensor) -> KeptShare | None:
    """Return how far to go towards a search's end, if halves of the metric's classes tell; it costs no query.

    On other classes, a step of t times the way is worth ``t (2 G - O) - t^2 G``, were the metric quadratic: t is
    best at ``1 - O / (2 G)``, James and Stein's shrinkage along a line. O is counted `STRENGTH` times. The start is
    kept if nothing is left of t, or if one half's end does not gain on the other half's f, on average.

    The end of half the classes gains more on its own f than on the other half's by twice as much as that of all
    classes would: what is lost on others is inversely proportional to their number, and so is what was gained too much.
    Where classes are few, this mends it only in part: with 60 classes O was about what was lost on others, with 30 and
    with 4 it was too small by several times. Halves have half the classes, and make other errors than all of them.

    Args:
        end: A guided search's, with an f.
        start: Where it began, ``d``; one of its points.

    Returns:
        None without an f, or if no point has halves.
    """
    if end.f is None:
        return None
    asked = list(zip(end.points, end.evaluations, strict=True))
    known = asked if end.known is None else [asked[at] for at in end.known.tolist()]
    if not any(torch.equal(point, end.phi) for point, _ in known):
        known = [*known, (end.phi, end.evaluation)]
    known = [(point, evaluation) for point, evaluation in known if evaluation.pairs]
    halves = costs_on_pairs([evaluation for _, evaluation in known], end.f.combination) if known else None
    if halves is None:
        return None
    own, other = cross_gains(end.f, torch.stack([point for point, _ in known]), halves, start, end.phi)
    started = next(evaluation for point, evaluation in asked if torch.equal(point, start))
    gain = min(started.cost - end.cost, end.gain_over(start))
    optimism, crossed = float((own - other).mean() / 2), float(other.mean())
    share = 1 - STRENGTH * optimism / (2 * gain) if min(gain, crossed) > 0 else 0.0
    return KeptShare(min(1.0, max(0.0, share)), optimism, gain, crossed)


@num_threads(1)
def cross_gains(
    f: GPValueFunction, points: Tensor, halves: Tensor, start: Tensor, end: Tensor
) -> tuple[Tensor, Tensor]:
    """Follow the f of each half of the classes to its end, and see what it gains there, and on the other half's f.

    All have f's kernel, noise and promises. Distances are those of the kernel.

    Args:
        f: The value function; of its own costs nothing is used.
        points: The visited points, ``n x d``.
        halves: The outcomes' costs there on p pairs of halves, ``n x p x 2 x m``.
        start: Where the search began, ``d``.
        end: Its end, ``d``: each f is followed within `REACH` times its distance, from the point where f is least.

    Returns:
        The gains over the start by the half's own f, ``2 p``, and by the other half's, ``2 p``, in units of the cost.
    """
    count, m = 2 * halves.shape[1], halves.shape[-1]
    z, none = (points.double() - start.double()) @ f.transform, torch.zeros_like(start[None], dtype=torch.float64)
    trend = torch.linalg.solve(f.transform, (f.trend * f.outcome_std[:, None]).T).T.repeat(count, 1)  # in z
    kernel, costs = torch.eye(len(start)).to(z), halves.to(z).flatten(1)
    of_halves = GPValueFunction.conditioned(z, costs, kernel, f.noise.repeat(count), trend=trend)

    def cost(at: Tensor) -> Tensor:  # k x d in z to k x 2p: at each point, that on each half
        outcomes = (of_halves.outcome_mean + of_halves.outcome_std * of_halves.outcomes(at)).view(len(at), count, m)
        return outcomes[..., 0] if f.combination is None else f.combination.cost(outcomes)

    best = z[cost(z).argmin(0)]
    reach = REACH * float(((end.double() - start.double()) @ f.transform).norm())
    ends, _ = descend(lambda at: cost(at).diagonal(), best, best, reach)
    gains = cost(none) - cost(ends)  # of each half's end, by each half's f
    own = torch.arange(count, device=gains.device)
    return gains[own, own], gains[own, own ^ 1]


# --- Data held out ---------------------------------------------------------------------------------------------------


def preferred(
    values: Mapping[str, float], aside: Mapping[str, float], maximize: bool, guard: Guard, confidence: float
) -> tuple[str, Verdict | None]:
    """Return which candidate held-out data prefer, and their verdict where nothing else told chance.

    Then the gains on both data are two samples of one: chance is the standard error of their mean, which has to exceed
    it by the quantile of Student's t with one degree of freedom. At 0.93 they may differ by a factor of about 1.6.

    Args:
        values: The candidates' values on the data that the search sees, by name; one at least is not ``"start"``.
        aside: Their values on the held-out data.
        maximize: Whether higher is better.
        guard: What told chance before.
        confidence: How sure to be of a gain that nothing else can tell from chance, at least 0.5 and below 1.
    """
    deviates(confidence)  # refuses what is out of range
    sign, quantile = -1 if maximize else 1, math.tan(math.pi * (confidence - 0.5))
    costs, verdicts = {name: sign * value for name, value in aside.items()}, dict[str, Verdict]()
    if guard != "none" or "start" not in costs:  # which is out of the question where it alone violates a constraint
        return min(costs, key=costs.__getitem__), None
    for name in costs:
        if name != "start":
            seen, held_out = sign * (values["start"] - values[name]), costs["start"] - costs[name]
            gain, chance = (seen + held_out) / 2, abs(seen - held_out) / 2
            verdicts[name] = Verdict(gain, 0.0, chance, 1.0, quantile * chance, guard="held-out")
    best = min(verdicts, key=lambda name: (not verdicts[name].accepted, costs[name]))
    return best if verdicts[best].accepted else "start", verdicts[best]
