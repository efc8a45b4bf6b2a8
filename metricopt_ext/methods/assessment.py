"""Whether finetuning for a metric is worth its queries: what the first points of a search say, and what to do.

All of it is told by points that a search asks anyway, the free starts among them, with the guard's own formulas.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist, mean
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from metricopt_ext.adapters.adapter import Adapter
from metricopt_ext.adapters.start import Start
from metricopt_ext.methods.guard import (
    CONFIDENCE,
    EXPECTED,
    Guard,
    Verdict,
    judge,
    reliability_under,
)
from metricopt_ext.tasks.constraints import Limits
from metricopt_ext.tasks.evaluation import Evaluation, noise_of, stacked_pairs
from metricopt_ext.tasks.metric import Metric
from metricopt_ext.tasks.split_half import TELLING, fault_of_halves, reliability_of, repeats_agree
from metricopt_ext.utils.words import counted, decimals

# How many queries tell: those of the starts, and of a first design or the better part of it.
QUERIES = 12

# How likely halves that have nothing in common may agree as well as they do, where the guard would keep a gain, and
# where it would not. On noise it would in 5% of runs, and in 1.5% at this level (1,200 simulated runs of 12 points).
LEVEL, LEVEL_REFUSED = 0.05, 0.02

# A gain of so many deviations of chance shows that there is something besides chance, however few points agree. Of
# twelve points an F test sees more than orders of halves do: these need the help, and noise passes in 2 to 4% of runs.
PLAIN: Mapping[Guard, float] = {"halves": 1.8, "repeats": 3.0}

# Orders of the points that halves' agreement is compared with.
ORDERS = 2000

# A gain so many times as large as any that was seen, for which chance by size is the larger of the guard's estimates.
VERY_LARGE = 1e12

# More data than so many times as many is no advice.
MOST_DATA = 16.0

# A search is advised to have queries in steps of so many, and at most so many: from 150 on the limit is not the search.
STEP, MOST_QUERIES = 10, 300

Kind = Literal["trained", "settings", "offsets", "batchnorm", "phi"]
Recommendation = Literal[
    "settings of inference",
    "a threshold or offsets",
    "BatchNorm on the deployment's inputs",
    "more validation data",
    "search",
    "do not",
    "undecided",
]
RECOMMENDATIONS: tuple[Recommendation, ...] = get_args(Recommendation)
CHEAP: Mapping[Kind, Recommendation] = {
    "settings": "settings of inference",
    "offsets": "a threshold or offsets",
    "batchnorm": "BatchNorm on the deployment's inputs",
}


class Evaluated(NamedTuple):
    """A point that the metric was asked at.

    Attributes:
        name: The start's; empty for a point of the search's own.
        kind: What it changes in the model as it was trained, or in the start that the search began from: nothing,
            settings of inference, offsets of the logits alone, BatchNorm's statistics alone, or phi.
        evaluation: The metric's evaluation.
    """

    name: str
    kind: Kind
    evaluation: Evaluation


@dataclass(frozen=True)
class Assessment:
    """What the first points of a search say of a task, in the metric's own units.

    Attributes:
        metric: The metric's name.
        before: Metric of the model as it was trained.
        queries: Metric queries that it is told by.
        guard: What tells a gain from chance; of ``"none"`` nobody can say what a gain is worth.
        reliability: Share of the variance among the points that is not chance, in [0, 1]; NaN if nothing tells, or
            nothing varies.
        smallest: The smallest gain over ``before`` that the guard could accept with these data, at its confidence; the
            optimism of having chosen the best of many comes on top. None if nothing tells.
        best_start: Name of the best free start that satisfies the metric's constraints; empty without any.
        headroom: By how much it is better than ``before``; 0 without any start.
        headroom_chance: Standard deviation of the chance part of that; None if nothing tells.
        found: By how much the best of all points that satisfy them, or that of ``before``, is better than ``before``.
        seconds: Seconds that a query took; NaN if all were on file.
        recommendation: What to do.
        reason: Why, in a sentence.
        search_queries: How many queries to search with, these among them; None unless that is advised.
        data: How many times as much validation data would do, above 1; None unless that is advised.
    """

    metric: str
    before: float
    queries: int
    guard: Guard
    reliability: float
    smallest: float | None
    best_start: str
    headroom: float
    headroom_chance: float | None
    found: float
    seconds: float
    recommendation: Recommendation
    reason: str
    search_queries: int | None = None
    data: float | None = None

    def __str__(self) -> str:
        """State it in a few lines."""
        return "\n".join(self.lines())

    def lines(self) -> list[str]:
        """Return what ``str`` joins."""
        first, last = self.brief()
        if self.guard == "none" or math.isnan(self.reliability):
            return [first, last]
        return [first, f"{100 * self.reliability:.0f}% of the variance between points is not chance", last]

    def brief(self) -> list[str]:
        """Return what a run says of it: what was found, and what to do."""
        found = [f"{self.metric} {decimals(self.before)} as trained"]
        if self.best_start:
            chance = "" if self.headroom_chance is None else f" (±{decimals(self.headroom_chance)} by chance)"
            found.append(f"best free start {self.best_start} {decimals(self.headroom, '+')}{chance}")
        each = "" if math.isnan(self.seconds) else f" ({self.seconds:.3g} s each)"
        found.append(f"best of {counted(self.queries, 'query')} {decimals(self.found, '+')}{each}")
        if self.smallest is not None:
            found.append(f"the guard needs {decimals(self.smallest)}")
        return ["; ".join(found), f"worth it? {self.advice}: {self.reason}"]

    @property
    def advice(self) -> str:
        """The recommendation with its number."""
        if self.search_queries is not None:
            return f"search with {counted(self.search_queries, 'query')}"
        if self.data is not None:
            return f"more validation data, {self.data:.1f} times as much"
        return self.recommendation


def kind_of(adapter: Adapter, point: Start, started: Start | None = None) -> Kind:
    """Return what a point changes: a start in the model as it was trained, another in the start of its search.

    Args:
        adapter: Knows which coordinates are offsets of the logits. Where all are, the search's own points are a
            search's, as any other.
        point: phi, and what its start replaces.
        started: Where the search began whose own point it is; None of a start.
    """

    def beyond_offsets(moved: Tensor) -> bool:
        moved = moved.clone()
        moved[adapter.offsets] = 0
        return bool(moved.any())

    if started is not None:
        moved = point.phi - started.phi
        alone = len(moved[adapter.offsets]) == len(moved)
        return "phi" if alone or beyond_offsets(moved) or not moved.any() else "offsets"
    weights = any(name in point.tensors for name, _ in adapter.model.named_parameters())
    if weights or beyond_offsets(point.phi) or (point.tensors and point.phi.any()):
        return "phi"
    if point.settings:
        return "settings"
    return "batchnorm" if point.tensors else "offsets" if point.phi.any() else "trained"


def assessed(
    metric: Metric,
    evaluated: Sequence[Evaluated],
    dim: int,
    *,
    confidence: float = CONFIDENCE,
    least: int = 0,
    seconds: float = math.nan,
    besides: int = 0,
    limits: Limits | None = None,
) -> Assessment:
    """Assess a task by what its metric was told to be.

    1. Is there anything but chance? If the metric were noise, its halves would agree as well in any order of the
       points (a permutation test, `LEVEL`), or repeats would explain the variance between points (an F test).
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
        seconds: Seconds that a query took.
        besides: How many evaluations were spent on settings of inference that are not among the points.
        limits: The metric's constraints; None without any.
    """
    evaluated = _with_halves([each for each in evaluated if not each.evaluation.failed])
    trained, points = evaluated[0].evaluation, [each.evaluation for each in evaluated]
    allowed = [each for each in evaluated[1:] if limits is None or limits.hold(each.evaluation)]
    best: dict[Kind, Evaluated] = {}
    for each in allowed:
        if each.kind not in best or each.evaluation.cost < best[each.kind].evaluation.cost:
            best[each.kind] = each
    verdicts = {kind: judge(trained, each.evaluation, points, confidence) for kind, each in best.items()}
    starts = [each for each in allowed if each.name]
    start = min(starts, key=lambda each: each.evaluation.cost, default=None)
    of_start = None if start is None else judge(trained, start.evaluation, points, confidence)
    lowest = min(each.cost for each in (trained, *(each.evaluation for each in allowed)))
    guard: Guard = judge(trained, points[-1], points, confidence).guard if len(points) > 1 else "none"
    known = guard != "none"
    advised = _advised(metric, evaluated, best, verdicts, guard, dim, least, besides)
    return Assessment(
        metric=metric.name,
        before=trained.value,
        queries=(len(evaluated) + besides) * metric.repeats,
        guard=guard,
        reliability=_reliability(points, guard) if known else math.nan,
        smallest=smallest_gain(trained, points, confidence) if known else None,
        best_start="" if start is None else start.name,
        headroom=0.0 if of_start is None else of_start.gain,
        headroom_chance=None if of_start is None or of_start.chance is None else of_start.chance,
        found=trained.cost - lowest,
        seconds=seconds,
        recommendation=advised.recommendation,
        reason=advised.reason,
        search_queries=advised.queries,
        data=advised.data,
    )


class _Advised(NamedTuple):
    recommendation: Recommendation
    reason: str
    queries: int | None = None
    data: float | None = None


def _advised(
    metric: Metric,
    evaluated: Sequence[Evaluated],
    best: Mapping[Kind, Evaluated],
    verdicts: Mapping[Kind, Verdict],
    guard: Guard,
    dim: int,
    least: int,
    besides: int,
) -> _Advised:
    """Return what to do, and why."""
    points = [each.evaluation for each in evaluated]
    n, shown = counted(len(evaluated), "point"), f"{metric.name} "
    if len(points) < TELLING:
        return _Advised("undecided", f"{n} of phi and its starts are too few to tell: ask more queries")
    if len({each.cost for each in points}) < 2:
        return _Advised("undecided", f"{shown}has one value at all of {n}: modulate more layers, or train first")
    if guard == "none":
        remedy = "let the metric return (value, (half, half))"
        if repeats_agree(points):
            return _Advised("undecided", f"a gain can't be told from chance, as repeats always agree: {remedy}")
        return _Advised("undecided", f"a gain can't be told from chance: {remedy}, or give it repeats")

    if not verdicts:
        others = counted(len(evaluated) - 1, "other point")
        return _Advised("do not", f"none of {others} than the model as it was satisfies the constraints")

    def plain(verdict: Verdict) -> bool:
        return verdict.gain - verdict.optimism > PLAIN[verdict.guard] * (verdict.chance or 0.0)

    kept = {kind: each for kind, each in verdicts.items() if each.accepted}
    level = LEVEL if kept else LEVEL_REFUSED
    if by_chance(points, guard, metric.repeats) >= level and not any(map(plain, kept.values())):
        return _Advised("do not", f"the differences between {n} may be chance alone")
    reliability = _reliability(points, guard)
    search = _Advised(
        "search",
        f"a point that it asked gains {_gain(metric, verdicts.get('phi'))}, and the guard would keep that",
        queries_to_search(len(evaluated) + besides, dim, reliability, least + besides) * metric.repeats,
    )
    cheap = max((kind for kind in kept if kind in CHEAP), key=lambda kind: kept[kind].gain, default=None)
    if cheap is not None:
        there = best[cheap]
        better = "phi" in best and judge(there.evaluation, best["phi"].evaluation, points, EXPECTED).accepted
        if better:
            return search._replace(
                reason=f"one point gains {_gain(metric, verdicts['phi'])};"
                f" {_called(there)}, which is cheaper, gains {_gain(metric, kept[cheap])}"
            )
        return _Advised(CHEAP[cheap], f"{_called(there)} gains {_gain(metric, kept[cheap])}, and no other point more")
    if "phi" in kept:
        return search
    kind = max(verdicts, key=lambda kind: verdicts[kind].gain - verdicts[kind].optimism)
    verdict = verdicts[kind]
    luck = luckiest(len(_distinct(points))) * (verdict.chance or 0.0)
    if verdict.gain > max(verdict.optimism, luck) and (more := times_the_data(verdict)) <= MOST_DATA:
        gain = _gain(metric, verdict)
        return _Advised("more validation data", f"{_called(best[kind])} gains {gain}, which may be chance", data=more)
    return _Advised("do not", f"none of {n} gains more than by chance")


def luckiest(n: int) -> float:
    """Return what the largest of n standard normal draws is expected to be (Blom, 1958, to 0.02)."""
    return NormalDist().inv_cdf((n - 0.375) / (n + 0.25))


def _called(evaluated: Evaluated) -> str:
    return f"the start {evaluated.name!r}" if evaluated.name else "a visited point"


def _gain(metric: Metric, verdict: Verdict | None) -> str:
    return "" if verdict is None else decimals(verdict.gain)


def _with_halves(evaluated: Sequence[Evaluated]) -> list[Evaluated]:
    """Return the points, without halves if these can't be of two halves of data."""
    if not fault_of_halves([each.evaluation for each in evaluated]):
        return list(evaluated)
    return [each._replace(evaluation=each.evaluation._replace(pairs=())) for each in evaluated]


def _distinct(points: Sequence[Evaluation]) -> list[Evaluation]:
    """Return each evaluation once: a start that changes no prediction has the same, and no news."""
    return list({(each.value, each.pairs, each.noise): each for each in reversed(points)}.values())[::-1]


def _reliability(points: Sequence[Evaluation], guard: Guard) -> float:
    """Return the share of the variance among the points that is not chance; NaN if they don't vary."""
    if len({each.cost for each in points}) < 2:
        return math.nan
    if guard == "halves":
        pairs = stacked_pairs([each for each in _distinct(points) if each.halves is not None])
        assert pairs is not None
        return mean(reliability_of(halves) for halves in pairs.unbind(1))
    costs = torch.tensor([each.cost for each in points], dtype=torch.float64)
    return reliability_under(noise_of(points), costs)


def by_chance(points: Sequence[Evaluation], guard: Guard, repeats: int = 1) -> float:
    """Return how likely points that differ by chance alone would be as much alike on both halves, or in repeats.

    Args:
        points: The evaluations.
        guard: What tells chance, ``"halves"`` or ``"repeats"``.
        repeats: Calls of each evaluation; 1 where the noise was told, by nobody knows how many calls: two at least.

    Returns:
        A p-value: of halves, the share of all orders of one half (of `ORDERS` random ones and the order itself) in
        which its covariance with the other is as large, summed over the pairs of halves; of repeats, that of Fisher's
        F.
    """
    points = _distinct(points)
    if guard == "repeats":
        noise = noise_of(points)
        if noise == 0:
            return 0.0
        from scipy.stats import f  # takes a second

        variance = float(torch.tensor([each.cost for each in points], dtype=torch.float64).var())
        return float(f.sf(variance / noise**2, len(points) - 1, len(points) * max(1, repeats - 1)))
    halves = stacked_pairs([each for each in points if each.halves is not None])
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

    def needed(gain: float) -> float:
        end = trained._replace(value=trained.value - trained.sign * gain)
        return judge(trained, end, points, confidence).needed or 0.0

    large = VERY_LARGE * max(abs(trained.cost - each.cost) for each in points)
    return max(needed(0.0), needed(large) ** 2 / large if large else 0.0)


def times_the_data(verdict: Verdict) -> float:
    """Return with how many times as much data the guard would keep a gain that it refuses; infinite for none.

    With m times the data chance shrinks with the root of m, and optimism with m itself: the least m with
    gain - optimism / m > needed / sqrt(m).
    """
    gain, needed = verdict.gain, verdict.needed or 0.0
    if gain <= 0:
        return math.inf
    return ((needed + math.sqrt(needed**2 + 4 * gain * verdict.optimism)) / (2 * gain)) ** 2


def queries_to_search(spent: int, dim: int, reliability: float, least: int = 0) -> int:
    """Return a number of evaluations for a search: one for each slope of f, more if part of what they tell is chance.

    Args:
        spent: Those that were made.
        dim: Dimension of phi.
        reliability: Share of the variance that is not chance, in [0, 1].
        least: The fewest that it can do with.
    """
    most = max(MOST_QUERIES, spent, least)
    wanted = math.inf if reliability <= 0 else max(least, spent + dim / reliability)
    return most if wanted >= most else STEP * math.ceil(wanted / STEP)
