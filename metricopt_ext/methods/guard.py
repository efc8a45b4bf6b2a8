"""The guard: keep a change only if its gain exceeds chance and the optimism of having chosen the best of many."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import torch
from torch import Tensor

from metricopt_ext.tasks.metric import Evaluation, stacked_halves
from metricopt_ext.tasks.split_half import chance_of_gain

# How sure the guard must be, one-sided, that a gain is not chance.
CONFIDENCE = 0.93

# How sure it must be of a start that a search begins from. It is one of few, and was made without asking the metric.
START_CONFIDENCE = 0.6

# As likely as not: the gain that is expected is above 0.
EXPECTED = 0.5

# The candidates that the end is compared with: the best of the visited points, this share of them and at least so many.
SHARE, LEAST = 1 / 4, 8


def deviates(confidence: float) -> float:
    """Return how many standard deviations of chance a gain has to exceed at a confidence in [0.5, 1).

    Raises:
        ValueError: The confidence is out of range.
    """
    if not 0.5 <= confidence < 1:
        raise ValueError(f"guard_confidence is {confidence!r}; it must be at least 0.5 and below 1")
    return NormalDist().inv_cdf(confidence)


@dataclass(frozen=True)
class Verdict:
    """What the guard thinks of a gain, all in units of the cost.

    Attributes:
        gain: By how much the candidate's cost is lower.
        optimism: How much of it is expected to be lost on other data, as the candidate was chosen for its cost.
        chance: Standard deviation of the chance part of what is left; if the metric reports no halves, of what repeats
            show of it, and 0 without these.
        reliability: Share of the variance among the best candidates that is not chance, in [0, 1]; 1 if unknown.
        candidates: How many there were to choose from.
        needed: What a gain must exceed besides the optimism.
        predicted: The gain as f sees it, all points considered; infinite if there is no f to ask.
    """

    gain: float
    optimism: float
    chance: float
    reliability: float
    candidates: int
    needed: float
    predicted: float = math.inf

    @property
    def accepted(self) -> bool:
        """Whether the gain is to be believed."""
        return min(self.gain, self.predicted) - self.optimism > self.needed


@dataclass(frozen=True)
class Decision:
    """What the guard kept of a run.

    Attributes:
        kept: Its name among the candidates.
        verdict: What the guard thinks of the search's end: over the model as it was trained if that is what it was
            refused for, or if no start was kept; and else over the start.
    """

    kept: str
    verdict: Verdict


def decide(
    candidates: Mapping[str, Evaluation],
    visited: Sequence[Evaluation],
    confidence: float = CONFIDENCE,
    predicted: Callable[[str], float] = lambda kept: math.inf,
) -> Decision:
    """Keep the model as it was trained, the start that the search began from, or the search's end.

    What has to be made sure of is that the model is not worse than it was. So the end is held against the model as it
    was trained. Start or end is then a choice between two changes: the one that is expected to be better is made.

    Args:
        candidates: Evaluations by name: of the model as it was trained, of the start that the search began from unless
            it is the same, and of its end.
        visited: Those of the points that the end was chosen from.
        confidence: How sure to be that the end gains on the model as it was trained, at least 0.5 and below 1; of a
            start at most `START_CONFIDENCE` is asked.
        predicted: The gain of the search's end over another candidate as f sees it, by that one's name, in units of the
            cost; infinite if there is no f to ask. No f is asked about the other candidates.
    """
    trained, *starts, end = candidates
    kept = trained
    for name in starts:
        sure = min(confidence, START_CONFIDENCE)
        kept = name if judge(candidates[trained], candidates[name], visited, sure).accepted else kept
    verdict = judge(candidates[trained], candidates[end], visited, confidence, predicted(trained))
    if verdict.accepted and kept != trained:
        verdict = judge(candidates[kept], candidates[end], visited, EXPECTED, predicted(kept))
    return Decision(end if verdict.accepted else kept, verdict)


def judge(
    start: Evaluation,
    end: Evaluation,
    visited: Sequence[Evaluation],
    confidence: float = CONFIDENCE,
    predicted: float = math.inf,
) -> Verdict:
    """Judge the gain of an end over a start, from what the two halves of the metric's data say.

    The start may have been unlucky, or chosen as the luckiest of several, and so may the end. Where there is an f, it
    has smoothed both over their neighbours: the smaller of the observed and of f's gain counts.

    Chance is the larger of two estimates. One is `chance_of_gain` over the best visited points, where the end lies; but
    these resemble each other, and a metric that is nearly perfect may have no difference between halves there. So the
    other takes all points: the variance of a gain is assumed proportional to its size, as of a share of examples.

    Among some points, part of the variance is chance: the correlation r of the halves there, stepped up to all data as
    2r / (1 + r) (Spearman-Brown), is the share that is not. The end was chosen for its cost, so what sets it apart from
    their mean counts only by that share (Kelley's regression to the mean); the rest is optimism, though no more than
    the largest of so many draws of chance is expected to be. The best visited points and all of them are such points;
    the larger optimism counts.

    Args:
        start: The evaluation of the start.
        end: The evaluation of the end.
        visited: Those of the points that it was chosen from.
        confidence: How sure to be, at least 0.5 and below 1.
        predicted: f's cost at the start less f's cost at the end, if there is an f.
    """
    gain, certainty = start.cost - end.cost, deviates(confidence)
    ranked = sorted(visited, key=lambda each: each.cost)
    halves = stacked_halves(ranked)
    if start.halves is None or halves is None or len(ranked) < 3:
        noise = math.hypot(start.noise or 0.0, end.noise or 0.0)
        return Verdict(gain, 0.0, noise, 1.0, len(visited), certainty * noise, predicted)
    costs = torch.tensor([each.cost for each in ranked], dtype=torch.float64)
    best = max(LEAST, math.ceil(SHARE * len(ranked)))
    chance = max(chance_of_gain(start, halves[:best]), _chance_by_size(start, costs, halves, gain))
    largest = chance * math.sqrt(2 * math.log(len(visited)))
    optimism = max(
        min((1 - reliability_of(halves[:count])) * max(0.0, float(costs[:count].mean()) - end.cost), largest)
        for count in (best, len(ranked))
    )
    return Verdict(gain, optimism, chance, reliability_of(halves[:best]), len(visited), certainty * chance, predicted)


def _chance_by_size(start: Evaluation, costs: Tensor, halves: Tensor, gain: float) -> float:
    """Return the standard deviation of the chance part of a gain whose variance is proportional to its size."""
    assert start.halves is not None
    gains = torch.tensor(start.halves, dtype=torch.float64) - halves
    variance = (gains[:, 0] - gains[:, 1]).square().sum() / 4  # summed over the points, as is their size
    size = (start.cost - costs).abs().sum()
    return math.sqrt(float(variance / size) * abs(gain)) if size > 0 else 0.0


def reliability_of(halves: Tensor) -> float:
    """Return the share of the variance of costs on all data that is not chance, from their halves, ``n x 2``."""
    if (halves.std(0) == 0).any():
        return 0.0
    r = float(torch.corrcoef(halves.T)[0, 1])
    return max(0.0, 2 * r / (1 + r)) if r > -1 else 0.0
