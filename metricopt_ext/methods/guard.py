"""The guard: keep a change only if its gain exceeds chance and the optimism of having chosen the best of many.

How large chance is shows in three ways: two halves of the metric's data, repeats of an evaluation, or data held out
from the search. Of a metric that is a plain number nothing is known, and every gain is believed. Halves that can't be
of two halves of data count for none (`fault_of_halves`).

Where a model will be judged on other classes than the metric's (`Metric.new_classes`), chance is not all: a search also
climbs what is its classes' own. Of an end that is kept, a share of the way is kept then, or nothing
(`new_classes.kept_share`). With few classes, 30 say, that mends it only in part.
"""

import math
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Literal, NamedTuple, SupportsFloat

import torch
from torch import Tensor

from metricopt_ext.runtime import distributed
from metricopt_ext.search.visited import ranked
from metricopt_ext.tasks.constraints import Limits
from metricopt_ext.tasks.evaluation import Evaluation, noise_of, stacked_halves, stacked_pairs
from metricopt_ext.tasks.split_half import TELLING, chance_of_gain, fault_of_halves, reliability_of, repeats_agree
from metricopt_ext.utils.words import brief

# What tells a gain from chance.
Guard = Literal["halves", "repeats", "held-out", "none"]

# How sure the guard must be, one-sided, that a gain is not chance.
CONFIDENCE = 0.93

# How sure it must be of the best along a line, which is the luckiest of about six points, and moves one number alone.
LINE_CONFIDENCE = 0.85

# As likely as not: the gain that is expected is above 0.
EXPECTED = 0.5

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
        candidates: How many there were to choose from.
        needed: What a gain must exceed besides the optimism; None if chance is unknown.
        predicted: The gain as f sees it, all points considered; infinite if there is no f to ask.
        guard: What tells chance.
        by_f: Whether f's gain alone decides, unless the queries show a loss beyond chance.
    """

    gain: float
    optimism: float
    chance: float | None
    reliability: float
    candidates: int
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
            for, or if no start was kept; and else over the start.
        otherwise: What is kept where the end is not, for other reasons (`kept_share`).
    """

    kept: str
    verdict: Verdict
    otherwise: str = "start"


def decide(
    candidates: Mapping[str, Evaluation],
    visited: Sequence[Evaluation],
    confidence: float = CONFIDENCE,
    predicted: Callable[[str], float] = lambda kept: math.inf,
    climbed: float = 0.0,
    lines: Collection[str] = (),
) -> Decision:
    """Keep the start that a search began from, the best along a line, or the search's end.

    What has to be made sure of is that the model is not worse than it was. So the end is held against the model as it
    was trained, or against what is presumed in its place. What else to keep is then a choice between changes: the one
    that is expected to be better is made. Between start and end, or start and line, f knows best, which has smoothed
    all that was asked; without an f, the gain less its optimism counts. The line's best had few directions to be lucky
    in: the end must gain on it by both.

    Args:
        candidates: Evaluations by name: of what the end is held against, of the start that the search began from
            (`chosen_start`) unless it is the same, of the best along each line if there are any, and of the search's
            end.
        visited: Those of the points that the end was chosen from.
        confidence: How sure to be that the end gains on the first, at least 0.5 and below 1; of a line's best at most
            `LINE_CONFIDENCE` is asked.
        predicted: The gain of the search's end over another candidate as f sees it, by that one's name, in units of the
            cost; infinite if there is no f to ask, as about a start with other tensors.
        climbed: What of the end's gain on what it is held against is optimism at least, as the search would have
            gained as much in chance alone (`CLIMBED`). It does not count where what is kept otherwise gains by the
            end's own confidence: then the model is better than it was, and the end is a choice by expectation.
        lines: Names of the candidates that are the best along a line.
    """
    candidates, visited = _with_halves(candidates, visited)
    trained, *_, end = candidates
    kept = start_to_keep(candidates, visited, confidence, predicted, lines)
    if kept != trained and judge(candidates[trained], candidates[kept], visited, confidence).accepted:
        climbed = 0.0
    verdict = judge(candidates[trained], candidates[end], visited, confidence, predicted(trained), climbed)
    if verdict.accepted and kept in lines:
        verdict = judge(candidates[kept], candidates[end], visited, EXPECTED, predicted(kept))
    elif verdict.accepted and kept != trained:
        verdict = _between(candidates[kept], candidates[end], visited, predicted(kept))
    return Decision(end if verdict.accepted else kept, verdict, kept)


def start_to_keep(
    candidates: Mapping[str, Evaluation],
    visited: Sequence[Evaluation],
    confidence: float = CONFIDENCE,
    predicted: Callable[[str], float] = lambda kept: math.inf,
    lines: Collection[str] = (),
) -> str:
    """Return the name of what is kept where a search's end is not: where it began, or the best along a line.

    Args are those of `decide`.
    """
    trained, *others, _ = candidates
    kept = next((name for name in others if name not in lines), trained)
    for name in (each for each in others if each in lines):
        if not judge(candidates[trained], candidates[name], visited, min(confidence, LINE_CONFIDENCE)).accepted:
            continue
        if kept != trained:
            ends = predicted(kept), predicted(name)
            by_f = ends[0] - ends[1] if all(map(math.isfinite, ends)) else math.inf
            if not _between(candidates[kept], candidates[name], visited, by_f).accepted:
                continue
        kept = name
    return kept


def chosen_start(
    evaluated: Mapping[str, Evaluation],
    presumed: Collection[str] = (),
    limits: Limits | None = None,
    confidence: float = CONFIDENCE,
    among: Collection[Evaluation] | None = None,
) -> str:
    """Return the name of the start that a search begins from: none is taken from another by its value alone.

    One after another, a start is taken if it surely gains on the one before (`surely_gains`); one that is presumed, if
    the one before does not surely gain on it. What satisfies all constraints comes before what does not.

    Args:
        evaluated: Evaluations by name, of the model as it was trained first.
        presumed: Names of those that are presumed (`Start`).
        limits: The metric's constraints; None without any.
        confidence: How sure to be, at least 0.5 and below 1.
        among: What tells chance besides (`surely_gains`); by default all of them.
    """
    kept, *others = evaluated
    among = evaluated.values() if among is None else among
    for name in others:
        before, after = evaluated[kept], evaluated[name]
        (broke, _), (breaks, _) = ranked(before, limits), ranked(after, limits)
        if broke != breaks:
            taken = broke
        elif name in presumed:
            taken = not surely_gains(after, before, among, confidence)
        else:
            taken = surely_gains(before, after, among, confidence)
        kept = name if taken else kept
    return kept


def surely_gains(
    before: Evaluation, after: Evaluation, among: Collection[Evaluation], confidence: float = CONFIDENCE
) -> bool:
    """Whether what was made without asking the metric gains on another beyond chance; of a plain number any gain does.

    Nothing was chosen for its value, so no part of the gain is optimism. Chance is that of the two's own halves, in all
    divisions; these may be one, and tell little: so it is no less than what all that was asked says of a gain of this
    size. Where the metric is undefined on a half of one of the two, nobody is sure.

    Args:
        before: One evaluation.
        after: The other.
        among: Those of everything that was asked.
        confidence: How sure to be, at least 0.5 and below 1.
    """
    gain, told = before.cost - after.cost, [each for each in among if each.pairs]
    if before.pairs and after.pairs:
        chance = max(chance_of_gain(before, [after]), _chance_by_size(before, told, gain))
    elif told:
        return False
    else:
        chance = math.sqrt(2) * noise_of([before, after, *among])
    return gain > deviates(confidence) * chance


def _between(before: Evaluation, after: Evaluation, visited: Sequence[Evaluation], by_f: float) -> Verdict:
    """Judge which of two changes is expected to be better, by f's gain where there is an f.

    Only what the queries show to be worse by more than a deviation of chance is not better, whatever f says: f may be
    off by more than what a metric without chance tells.
    """
    return replace(judge(before, after, visited, EXPECTED, by_f), by_f=math.isfinite(by_f))


def decide_among(
    ends: Mapping[str, Evaluation],
    visited: Sequence[Evaluation],
    confidence: float = CONFIDENCE,
    overstated: Mapping[str, float] | None = None,
) -> Decision:
    """Keep the model as it was, or the best of the ends of several ways to finetune it.

    Args:
        ends: Evaluations by name: of the model as it was first, then of each end.
        visited: Those made before, where finetuning goes.
        confidence: How sure to be that the end gains on the model as it was, at least 0.5 and below 1.
        overstated: By how much the gain of some ends is known to be overstated, by name; see `judge`.
    """
    ends, visited = _with_halves(ends, visited)
    was, *others = ends
    chosen_from = [*visited, *(ends[name] for name in others)]

    def verdict_on(name: str) -> Verdict:
        known = (overstated or {}).get(name, 0.0)
        return judge(ends[was], ends[name], chosen_from, confidence, overstated=known)

    verdicts = {name: verdict_on(name) for name in others}
    best = max(others, key=lambda name: verdicts[name].gain - verdicts[name].optimism)
    return Decision(best if verdicts[best].accepted else was, verdicts[best])


def _with_halves(
    candidates: Mapping[str, Evaluation], visited: Sequence[Evaluation]
) -> tuple[Mapping[str, Evaluation], Sequence[Evaluation]]:
    """Return the evaluations without halves, and say so, if all of them together show that these are none.

    Of repeats that tell nothing it is only said: `judge` finds out by itself.
    """
    told = [*candidates.values(), *visited]
    if repeats_agree(told) and distributed.rank() == 0:
        warnings.warn(
            "the metric's repeats always agree, so they don't tell a gain from chance and are not used; let it return"
            " its values on two random halves of its data, or give a holdout",
            stacklevel=4,
        )
    fault = fault_of_halves(told)
    if not fault:
        return candidates, visited
    if distributed.rank() == 0:
        warnings.warn(
            f"the metric's halves {fault}, so they don't tell a gain from chance and are not used; let them be its"
            " values on two random halves of its data",
            stacklevel=4,
        )
    without = {name: each._replace(pairs=()) for name, each in candidates.items()}
    return without, [each._replace(pairs=()) for each in visited]


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

    Args:
        start: The evaluation of the start.
        end: The evaluation of the end.
        visited: Those of the points that it was chosen from.
        confidence: How sure to be, at least 0.5 and below 1.
        predicted: f's cost at the start less f's cost at the end, if there is an f.
        overstated: An optimism that is known otherwise, as from `optimism_of_gain`; the larger counts.
    """
    gain, certainty = start.cost - end.cost, deviates(confidence)
    ranked = sorted(visited or [end], key=lambda each: each.cost)
    chance = _by_halves(start, ranked, gain) or _by_repeats(start, end, ranked)
    if chance is None:
        return Verdict(gain, overstated, None, 1.0, len(visited), None, predicted, "none")
    costs = torch.tensor([each.cost for each in chance.ranked], dtype=torch.float64)
    best = _best(costs)
    largest = chance.deviation * math.sqrt(2 * math.log(max(1, len(costs))))
    optimism = max(
        min((1 - chance.reliability(count)) * max(0.0, float(costs[:count].mean()) - end.cost), largest)
        for count in (best, len(costs))
    )
    return Verdict(
        gain,
        max(optimism, overstated),
        chance.deviation,
        chance.reliability(best),
        len(visited),
        certainty * chance.deviation,
        predicted,
        chance.guard,
    )


def judge_held_out(seen: float, held_out: float, confidence: float = CONFIDENCE) -> Verdict:
    """Judge a gain that nothing but data held out from the search can tell from chance.

    The two gains are two samples of one: chance is the standard error of their mean, which has to exceed it by the
    quantile of Student's t with one degree of freedom. At 0.93 they may differ by a factor of about 1.6.

    Args:
        seen: The gain on the data that the search sees.
        held_out: The gain on the others.
        confidence: How sure to be, at least 0.5 and below 1.
    """
    deviates(confidence)  # refuses what is out of range
    chance = abs(seen - held_out) / 2
    needed = math.tan(math.pi * (confidence - 0.5)) * chance
    return Verdict((seen + held_out) / 2, 0.0, chance, 1.0, 1, needed, guard="held-out")


class _Chance(NamedTuple):
    """How large chance is: its standard deviation in a gain, and the share of some best points' variance that isn't."""

    guard: Guard
    ranked: Sequence[Evaluation]  # the points that tell, the best first
    deviation: float
    reliability: Callable[[int], float]  # of the first so many


def _best(ranked: Sequence[Evaluation] | Tensor) -> int:
    return max(LEAST, math.ceil(SHARE * len(ranked)))


def _by_halves(start: Evaluation, ranked: Sequence[Evaluation], gain: float) -> _Chance | None:
    """Return what two halves of the metric's data tell of chance, or None without them.

    The deviation is the larger of two estimates. One is `chance_of_gain` over the best visited points, where the end
    lies; but these resemble each other, and a metric that is nearly perfect may have no difference between halves
    there. So the other takes all points: the variance of a gain is assumed proportional to its size, as of a share of
    examples.
    """
    ranked = [each for each in ranked if each.halves is not None]  # the metric may be undefined on a half of some
    halves = stacked_halves(ranked)
    if start.halves is None or halves is None or not ranked:
        return None
    deviation = max(chance_of_gain(start, ranked[: _best(ranked)]), _chance_by_size(start, ranked, gain))
    return _Chance("halves", ranked, deviation, lambda count: reliability_of(halves[:count]))


def _chance_by_size(start: Evaluation, points: Sequence[Evaluation], gain: float) -> float:
    """Return the standard deviation of the chance part of a gain whose variance is proportional to its size."""
    pairs = stacked_pairs([start, *points])
    assert pairs is not None
    gains = pairs[0] - pairs[1:]
    # Summed over the points, as is their size.
    variance = (gains[..., 0] - gains[..., 1]).square().sum() / 4 / pairs.shape[1]
    size = (start.cost - torch.tensor([each.cost for each in points], dtype=torch.float64)).abs().sum()
    return math.sqrt(float(variance / size) * abs(gain)) if size > 0 else 0.0


def _by_repeats(start: Evaluation, end: Evaluation, ranked: Sequence[Evaluation]) -> _Chance | None:
    """Return what repeats of the evaluations tell of chance, or None without them.

    A few repeats hardly show the noise of one evaluation, so all of them are pooled. Start and end have it both.
    """
    ranked = [each for each in ranked if each.noise is not None]
    if start.noise is None or end.noise is None or not ranked or repeats_agree([start, end, *ranked]):
        return None
    noise = noise_of([start, end, *ranked])
    costs = torch.tensor([each.cost for each in ranked], dtype=torch.float64)
    return _Chance("repeats", ranked, math.sqrt(2) * noise, lambda count: reliability_under(noise, costs[:count]))


def reliability_under(noise: float, costs: Tensor) -> float:
    """Return the share of the variance of costs, ``n``, that is not noise of a standard deviation."""
    if noise == 0:
        return 1.0
    if len(costs) < TELLING or (variance := float(costs.var())) == 0:
        return 0.0
    return max(0.0, 1 - noise**2 / variance)
