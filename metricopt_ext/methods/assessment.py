"""Whether finetuning for a metric is worth its queries: what the first points of a search say, and what to do.

All of it is told by points that a search asks anyway, the free starts among them, with the guard's own formulas.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist, mean
from typing import NamedTuple

import torch
from torch import Tensor

from metricopt_ext.adapters.adapter import Adapter
from metricopt_ext.adapters.start import Start
from metricopt_ext.methods.guard import CONFIDENCE, EXPECTED, Guard, judge, reliability_under
from metricopt_ext.tasks.constraints import Limits
from metricopt_ext.tasks.evaluation import Evaluation, noise_of, stacked_pairs
from metricopt_ext.tasks.metric import Metric
from metricopt_ext.tasks.split_half import TELLING, fault_of_halves, reliability_of
from metricopt_ext.utils.words import counted, decimals

# How many queries tell: those of the starts, and of a first design or the better part of it.
QUERIES = 12

# How likely halves that have nothing in common may agree as well as they do.
LEVEL = 0.03

# A gain of so many deviations of chance shows that there is something besides chance, however few points agree. Noise
# passes the one or the other in about 4% of runs by halves, and in less than 1% by repeats (800 simulated runs of 12
# points, of each kind of noise).
PLAIN: Mapping[Guard, float] = {"halves": 1.8, "repeats": 3.0}

# Orders of the points that halves' agreement is compared with.
ORDERS = 2000

# A gain so many times as large as any that was seen, for which chance by size is the larger of the guard's estimates.
VERY_LARGE = 1e12

# A search is advised to have queries in steps of so many, and at most so many: from 150 on the limit is not the search.
STEP, MOST_QUERIES = 10, 300

# What to do, by the kind of the point that holds the gain (`kind_of`), where that is cheaper than a search.
CHEAP = {
    "settings": "settings of inference",
    "offsets": "a threshold or offsets",
    "batchnorm": "BatchNorm on the deployment's inputs",
}
RECOMMENDATIONS = (*CHEAP.values(), "more validation data", "search", "do not", "undecided")


class Evaluated(NamedTuple):
    """A point that the metric was asked at.

    Attributes:
        name: The start's; empty for a point of the search's own.
        kind: What it changes in the model as it was trained, or in the start that the search began from: nothing
            (``"trained"``), ``"settings"`` of inference, ``"offsets"`` of the logits alone, the statistics of
            ``"batchnorm"`` alone, or ``"phi"``.
        evaluation: The metric's evaluation.
    """

    name: str
    kind: str
    evaluation: Evaluation


@dataclass(frozen=True)
class Assessment:
    """What the first points of a search say of a task, in the metric's own units.

    Attributes:
        metric: The metric's name.
        before: Metric of the model as it was trained.
        queries: Metric queries that it is told by.
        reliability: Share of the variance among the points that is not chance, in [0, 1]; NaN if nothing tells.
        smallest: The smallest gain over ``before`` that the guard could accept with these data, at its confidence; the
            optimism of having chosen the best of many comes on top. None if nothing tells.
        best_start: Name of the best free start that satisfies the metric's constraints; empty without any.
        headroom: By how much it is better than ``before``; 0 without any start.
        found: By how much the best of all points that satisfy them, or that of ``before``, is better than ``before``.
        recommendation: What to do, one of `RECOMMENDATIONS`.
        reason: Why, in a sentence.
        search_queries: How many queries to search with, these among them; None unless that is advised.
        data: How many times as much validation data would do, above 1; None unless that is advised.
    """

    metric: str
    before: float
    queries: int
    reliability: float
    smallest: float | None
    best_start: str
    headroom: float
    found: float
    recommendation: str
    reason: str
    search_queries: int | None = None
    data: float | None = None

    def __str__(self) -> str:
        """State it in a few lines."""
        return "\n".join(self.lines())

    def lines(self) -> list[str]:
        """Return what ``str`` joins: what was found, and what to do."""
        start = f"best free start {self.best_start} {decimals(self.headroom, '+')}; " if self.best_start else ""
        best = f"best of {counted(self.queries, 'query')} {decimals(self.found, '+')}"
        needs = "" if self.smallest is None else f"; the guard needs {decimals(self.smallest)}"
        queries = "" if self.search_queries is None else f" with {counted(self.search_queries, 'query')}"
        data = "" if self.data is None else f", {self.data:.3g} times as much"
        return [
            f"{self.metric} {decimals(self.before)} as trained; {start}{best}{needs}",
            f"worth it? {self.recommendation}{queries}{data}: {self.reason}",
        ]


def kind_of(adapter: Adapter, point: Start, started: Start | None = None) -> str:
    """Return what a point changes: a start in the model as it was trained, another in the start of its search.

    Args:
        adapter: Knows which coordinates are offsets of the logits. Where all are, the search's own points are a
            search's, as any other.
        point: phi, and what its start replaces.
        started: Where the search began whose own point it is; None of a start.
    """
    moved = point.phi if started is None else point.phi - started.phi
    offsets = moved[adapter.offsets]
    offsets_alone = bool(moved.any()) and int(offsets.count_nonzero()) == int(moved.count_nonzero())
    if started is not None:
        return "offsets" if offsets_alone and len(offsets) < len(moved) else "phi"
    weights = any(name in point.tensors for name, _ in adapter.model.named_parameters())
    if weights or (moved.any() and (point.tensors or not offsets_alone)):
        return "phi"
    if point.settings:
        return "settings"
    return "batchnorm" if point.tensors else "offsets" if offsets_alone else "trained"


def assessed(
    metric: Metric,
    evaluated: Sequence[Evaluated],
    dim: int,
    *,
    confidence: float = CONFIDENCE,
    least: int = 0,
    besides: int = 0,
    limits: Limits | None = None,
) -> Assessment:
    """Assess a task by what its metric was told to be.

    1. Is there anything but chance? If the metric were noise, its halves would agree as well in any order of the
       points (a permutation test, `LEVEL`). A gain of many deviations of chance shows it, too (`PLAIN`).
    2. Which gains would the guard keep (`judge`)? If that of an offset or of BatchNorm, and no other point is expected
       to be better, that is all. If only another point's, a search.
       What violates a constraint shows chance, but is no gain.
    3. If none, but one gains more than the luckiest of so many points is expected to: with how many times the data,
       chance shrinking with the root of their number, would the guard keep it?

    Args:
        metric: Its units, and how often it is repeated.
        evaluated: The points, the model as it was trained first; those that failed don't count.
        dim: Dimension of phi.
        confidence: The guard's, at least 0.5 and below 1.
        least: The fewest evaluations that a search can do with.
        besides: How many evaluations were spent on settings of inference that are not among the points.
        limits: The metric's constraints; None without any.
    """
    evaluated = [each for each in evaluated if not each.evaluation.failed]
    if fault_of_halves([each.evaluation for each in evaluated]):  # they can't be of two halves of data
        evaluated = [each._replace(evaluation=each.evaluation._replace(pairs=())) for each in evaluated]
    trained, points = evaluated[0].evaluation, [each.evaluation for each in evaluated]
    allowed = [each for each in evaluated[1:] if limits is None or limits.hold(each.evaluation)]
    allowed.sort(key=lambda each: each.evaluation.cost)
    best = {each.kind: each for each in reversed(allowed)}
    verdicts = {kind: judge(trained, each.evaluation, points, confidence) for kind, each in best.items()}
    start = next((each for each in allowed if each.name), evaluated[0]._replace(name=""))
    to_start = judge(trained, start.evaluation, points, confidence)
    # Each evaluation once: a start that changes no prediction has the same, and no news.
    distinct = list({(each.value, each.pairs, each.noise): each for each in reversed(points)}.values())[::-1]
    halves = stacked_pairs([each for each in distinct if each.pairs])
    reliability, n = _reliability(points, halves, to_start.guard), counted(len(points), "point")

    def said(recommendation: str, reason: str, data: float | None = None) -> Assessment:
        to_search = queries_to_search(len(points) + besides, dim, reliability, least + besides) * metric.repeats
        return Assessment(
            metric=metric.name,
            before=trained.value,
            queries=(len(points) + besides) * metric.repeats,
            reliability=reliability,
            smallest=None if to_start.guard == "none" else smallest_gain(trained, points, confidence),
            best_start=start.name,
            headroom=to_start.gain,
            found=max(trained.cost - each.evaluation.cost for each in (evaluated[0], *allowed)),
            recommendation=recommendation,
            reason=reason,
            search_queries=to_search if recommendation == "search" else None,
            data=data,
        )

    def gains(kind: str) -> str:
        name = best[kind].name
        return f"{f'the start {name!r}' if name else 'a visited point'} gains {decimals(verdicts[kind].gain)}"

    if len(points) < TELLING:
        return said("undecided", f"{n} of phi and its starts are too few to tell: ask more queries")
    if len({each.cost for each in points}) == 1:
        return said("undecided", f"{metric.name} has one value at all of {n}: modulate more layers, or train first")
    if to_start.guard == "none":
        remedy = "let the metric return (value, (half, half)), or give it repeats"
        return said("undecided", f"a gain can't be told from chance: {remedy}")
    kept = {kind: each for kind, each in verdicts.items() if each.accepted}
    plain = any(each.gain - each.optimism > PLAIN[each.guard] * (each.chance or 0.0) for each in kept.values())
    if not plain and by_chance(halves) >= LEVEL:
        return said("do not", f"the differences between {n} may be chance alone")

    cheap = max((kind for kind in kept if kind in CHEAP), key=lambda kind: kept[kind].gain, default=None)
    if cheap is not None:
        if "phi" in best and judge(best[cheap].evaluation, best["phi"].evaluation, points, EXPECTED).accepted:
            return said("search", f"{gains('phi')}, more than what is cheaper: {gains(cheap)}")
        return said(CHEAP[cheap], f"{gains(cheap)}, and no other point more")
    if "phi" in kept:
        return said("search", gains("phi"))

    if verdicts:
        kind = max(verdicts, key=lambda kind: verdicts[kind].gain - verdicts[kind].optimism)
        verdict, draws = verdicts[kind], len(distinct)
        # What the largest of so many standard normal draws is expected to be (Blom, 1958, to 0.02).
        luck = NormalDist().inv_cdf((draws - 0.375) / (draws + 0.25)) * (verdict.chance or 0.0)
        gain, optimism, needed = verdict.gain, verdict.optimism, verdict.needed or 0.0
        if gain > max(optimism, luck):
            # Of m times the data, chance shrinks with the root of m, and optimism with m itself: the least m with
            # gain - optimism / m > needed / sqrt(m).
            more = ((needed + math.sqrt(needed**2 + 4 * gain * optimism)) / (2 * gain)) ** 2
            return said("more validation data", f"{gains(kind)}, which may be chance", more)
    return said("do not", f"none of {n} that may be kept gains more than by chance")


def _reliability(points: Sequence[Evaluation], halves: Tensor | None, guard: Guard) -> float:
    """Return the share of the variance among the points that is not chance; NaN if nothing tells."""
    if guard == "halves" and halves is not None:
        return mean(map(reliability_of, halves.unbind(1)))
    costs = torch.tensor([each.cost for each in points], dtype=torch.float64)
    return reliability_under(noise_of(points), costs) if guard == "repeats" else math.nan


def by_chance(halves: Tensor | None) -> float:
    """Return how likely points that differ by chance alone would be as much alike on both halves; 1 without halves.

    Args:
        halves: The costs on p pairs of halves, ``n x p x 2``.

    Returns:
        A p-value: the share of all orders of one half (of `ORDERS` random ones and the order itself) in which its
        covariance with the other is as large, summed over the pairs of halves.
    """
    if halves is None or len(halves) < TELLING:
        return 1.0
    first, second = (halves - halves.mean(0)).unbind(-1)  # n x pairs
    rng = torch.Generator().manual_seed(0)
    orders = torch.rand(ORDERS, len(second), generator=rng).argsort(dim=1)
    found = float((first * second).sum())
    as_large = torch.einsum("onp,np->o", second[orders], first) >= found - 1e-12 * abs(found)
    return (1 + int(as_large.sum())) / (1 + ORDERS)


def smallest_gain(trained: Evaluation, points: Sequence[Evaluation], confidence: float = CONFIDENCE) -> float:
    """Return the smallest gain over the trained model that exceeds what the guard needs.

    What it needs is a constant or, where chance grows with the gain's size, c sqrt(gain) if that is larger (`judge`).
    A gain exceeds the latter from c^2 on; of a very large one it is the larger, which tells c.

    Args:
        trained: The evaluation of the model as it was trained.
        points: Those of all points.
        confidence: The guard's.
    """
    large = VERY_LARGE * (max(abs(trained.cost - each.cost) for each in points) or 1.0)
    ends = [trained._replace(value=trained.value - trained.sign * gain) for gain in (0.0, large)]
    constant, by_size = (judge(trained, end, points, confidence).needed or 0.0 for end in ends)
    return max(constant, by_size**2 / large)


def queries_to_search(spent: int, dim: int, reliability: float, least: int = 0) -> int:
    """Return a number of evaluations for a search: one for each slope of f, more if part of what they tell is chance.

    Args:
        spent: Those that were made.
        dim: Dimension of phi.
        reliability: Share of the variance that is not chance, in [0, 1]; NaN if it is not known.
        least: The fewest that it can do with.
    """
    most = max(MOST_QUERIES, spent, least)
    wanted = spent + dim / reliability if reliability > 0 else most
    return min(most, STEP * math.ceil(max(least, wanted) / STEP))
