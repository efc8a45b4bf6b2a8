"""How much of a metric is due to chance, judged by its values on two halves of its data.

A metric sees a sample. What differs between two halves of the sample will differ again on the next one, and the best of
many models on a small sample is partly the luckiest: its gain is optimistic. Halves come free with a query (see
`Metric`); they show how large chance gains are, and a value function fitted to one half shows on the other how
optimistic its gains are.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from metricopt_ext.tasks.evaluation import Evaluation, stacked_halves, stacked_pairs
from metricopt_ext.tasks.trajectories import Trajectory

# Points from which on their costs tell how much of what sets them apart is chance; of fewer, all of it may be.
TELLING = 3

# Points from which on, and correlation from which on, the halves' mean and the value tell whether both have one unit.
LINEAR, ALIGNED = 8, 0.95

# By how much their units must differ: halves in percent move 100 times as far.
UNITS = 10

# What moves by less than this share of the value's spread does not move: single precision's resolution.
RESOLUTION = 1e-7


def fault_of_halves(evaluations: Sequence[Evaluation]) -> str:
    """Say what shows that a metric's halves are not of two halves of its data; empty if nothing does.

    Gains on two halves of a sample differ by chance, somewhere at least: examples differ. If at all points a half moves
    just as the other or as the whole, no example tells them apart, and all would seem to be free of chance. Halves
    whose mean moves with the whole, but against it or many times as far, are in another unit.

    Args:
        evaluations: Those of all points; points without halves don't count, and fewer than `TELLING` show nothing.
    """
    told = [each for each in evaluations if each.halves is not None]
    halves, whole = stacked_halves(told), torch.tensor([each.cost for each in told], dtype=torch.float64)
    if halves is None or len(told) < TELLING or whole.min() == whole.max():
        return ""  # a metric that never varies has halves that don't, too
    first, second = halves.T
    if _still(first, whole) and _still(second, whole):
        return "are constant, though its value is not"
    if _still(first - second, whole):
        return "always move alike"
    if _still(first - whole, whole) or _still(second - whole, whole):
        return "are not both of halves: one always moves as the value does"
    if len(told) < LINEAR:
        return ""
    mean, moved = (first + second) / 2, whole - whole.mean()
    if not float(torch.corrcoef(torch.stack([mean, whole]))[0, 1].abs()) >= ALIGNED:  # NaN of a mean that is constant
        return ""
    times = float((mean - mean.mean()) @ moved / moved.square().sum())  # 1 for halves of a mean over examples
    if times < 0:
        return "move against its value, as if they were costs"
    return "" if 1 / UNITS < times < UNITS else f"move {times:.3g} times as far as its value, as in another unit"


def repeats_agree(evaluations: Sequence[Evaluation]) -> bool:
    """Whether a metric's repeats are the same at all points, though its value is not: it has no noise of that kind.

    Then they say nothing of chance, which is that of its examples.

    Args:
        evaluations: Those of all points; points without repeats don't count, and fewer than `TELLING` show nothing.
    """
    told = [each for each in evaluations if each.noise is not None]
    return len(told) >= TELLING and not any(each.noise for each in told) and len({each.cost for each in told}) > 1


def _still(costs: Tensor, whole: Tensor) -> bool:
    """Whether costs, ``n``, don't vary, measured by how others do."""
    return float(costs.max() - costs.min()) <= RESOLUTION * float(whole.max() - whole.min())


def correlation_of_halves(halves: Tensor | None) -> float:
    """Return the Spearman correlation of costs on two halves, ``n x 2``, in [-1, 1].

    Near 0 over random phi the metric says nothing about other data of its kind, and no method can help. NaN for fewer
    than 3, if one never varies, or if they always move alike.
    """
    if halves is None or len(halves) < TELLING:
        return math.nan
    a, b = halves.T
    if a.min() == a.max() or b.min() == b.max() or _still(a - b, a):
        return math.nan
    from scipy.stats import spearmanr  # takes a second

    return float(spearmanr(a.numpy(), b.numpy()).statistic)


def chance_of_gain(start: Evaluation, elsewhere: Sequence[Evaluation]) -> float:
    """Return the standard deviation of the chance part of a gain over a start, in units of the cost.

    A gain on all data is the mean of its two halves' gains. Were it the same everywhere, these would agree: half the
    root mean square of their difference, over all divisions of the data, estimates how far chance moves the mean.

    Args:
        start: The evaluation of the start.
        elsewhere: Those of points to compare with, ideally those that finetuning visits.

    Returns:
        The standard deviation; 0 if one lacks halves, as nothing is then known about chance.
    """
    pairs = stacked_pairs([start, *elsewhere])
    if pairs is None or not elsewhere:
        return 0.0
    gains = pairs[0] - pairs[1:]
    return float((gains[..., 0] - gains[..., 1]).square().mean().sqrt() / 2)


def reliability_of(halves: Tensor, lowered: float = 0.0) -> float:
    """Return the share of the variance of costs on all data that is not chance, from their halves, ``n x 2``.

    Of m outcomes, ``n x 2 x m``, it is that of all together, each about its own mean.

    It is the correlation r of the halves, stepped up to all data as 2r / (1 + r) (Spearman-Brown); 0 for fewer than
    `TELLING` points.

    Args:
        halves: The costs.
        lowered: By how many of its standard errors, ``1 / sqrt(n - 3)``, r is lowered as Fisher's z.
    """
    if halves.dim() == 3:
        halves = (halves - halves.mean(0)).transpose(1, 2)
    flat = halves.reshape(-1, 2)
    if len(halves) < TELLING or (flat.std(0) == 0).any():
        return 0.0
    r = float(torch.corrcoef(flat.T)[0, 1])
    if lowered:
        bounded = min(max(r, -1 + RESOLUTION), 1 - RESOLUTION)  # z is infinite at 1
        r = math.tanh(math.atanh(bounded) - lowered / math.sqrt(max(1, len(halves) - 3)))
    return max(0.0, 2 * r / (1 + r)) if r > -1 else 0.0


def evaluations_where_used(trajectories: Sequence[Trajectory]) -> tuple[Evaluation, ...]:
    """Return the evaluations, ``m``, that were made where finetuning goes.

    That is along the second half of on-policy trajectories, or of all trajectories while none is on-policy.
    """
    on_policy = [t for t in trajectories if t.round > 0] or trajectories
    return tuple(
        evaluation
        for t in on_policy
        for step, evaluation in zip(t.observed.tolist(), t.evaluations, strict=True)
        if 2 * step >= len(t.phi) - 1
    )


def seen_on_half(trajectories: Sequence[Trajectory], half: int) -> list[Trajectory]:
    """Return the trajectories as judged by a metric that has only one half (0 or 1) of the data."""
    return [
        replace(t, evaluations=tuple(Evaluation(cost) for cost in t.halves[:, half].tolist()))
        for t in trajectories
        if t.halves is not None
    ]


def optimism_of_gain(crossed: Sequence[Evaluation]) -> float:
    """Return how much larger the gain of following f is on the data that f was fitted to than on other data.

    An end found with half the data is better on its own half than on the other by the optimism of half the data: what
    chance added on the one and, just as much, what it cost on the other. The mean over both halves cancels out one half
    being harder than the other. Optimism is inversely proportional to the amount of data (as in Akaike's criterion), so
    on all data it is half of that mean: a quarter of the sum.

    Args:
        crossed: The evaluations of two ends, found with an f fitted to the first and to the second half; empty if
            there are no such ends.

    Returns:
        What to subtract from the gain, in units of the cost; 0 without such ends or if one lacks halves, never below 0.
    """
    apart = [a.halves[1 - half] - a.halves[half] for half, a in enumerate(crossed) if a.halves is not None]
    return max(0.0, sum(apart) / 4) if len(apart) == len(crossed) else 0.0
