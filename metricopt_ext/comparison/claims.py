"""What a comparison's numbers show: paired differences, Holm's correction, and what guards did."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from metricopt_ext.experiment.method import METHODS, Entry, Needs
from metricopt_ext.experiment.seeds import Interval, paired_interval
from metricopt_ext.utils.words import counted

OURS = "metricopt"

COLOURS = {"prior": "#b07aa1", "prior_twice": "#79437d"}  # of free starts that are no methods
SOUPS: dict[str, Needs] = {"soup_batchnorm": "inputs", "soup_prior": "scores"}  # those among them, and what they need


class Pair(NamedTuple):
    """Our method against a baseline, paired by seed; positive is better for ours.

    Attributes:
        baseline: Its name.
        budget: The baseline's queries.
        interval: The mean difference of the test metric and its 95% interval.
        p: Two-sided p-value of the paired t-test; NaN for a single seed.
        wins: Seeds on which ours is better.
        losses: Seeds on which the baseline is better.
        seeds: Seeds that have both.
    """

    baseline: str
    budget: int
    interval: Interval
    p: float
    wins: int
    losses: int
    seeds: int


def holm(p: Sequence[float]) -> list[float]:
    """Return p-values corrected for their number (Holm, 1979), in the same order; NaN stays and does not count."""
    # SciPy has no Holm, and statsmodels is a large dependency for six lines.
    known = sorted((value, i) for i, value in enumerate(p) if not math.isnan(value))
    corrected, highest = [math.nan] * len(p), 0.0
    for rank, (value, i) in enumerate(known):
        highest = max(highest, min(1.0, (len(known) - rank) * value))
        corrected[i] = highest
    return corrected


def t_test(differences: Sequence[float]) -> float:
    """Return the two-sided p-value of a mean of zero, by Student's t; NaN for fewer than two numbers."""
    from scipy.stats import ttest_1samp  # takes a second

    values = np.asarray(differences, dtype=float)
    if len(values) < 2:
        return math.nan
    if np.ptp(values) == 0:  # SciPy has NaN for zeros, and warns
        return 0.0 if values[0] else 1.0
    return float(ttest_1samp(values, 0).pvalue)


def entry_of(name: str) -> Entry:
    """Return how a method or a free start is shown."""
    renamed = {"batchnorm": "batchnorm_validation"}.get(name, name)
    colour = COLOURS.get(name, "#777777")
    other = Entry(name.replace("_", " "), colour, "free", SOUPS.get(name, "scores"), training=name in SOUPS)
    return METHODS.get(renamed, other)


def tests(content: Mapping[str, Any], name: str, budget: int) -> list[float | None] | None:
    """Return a method's or a start's test metric by seed, or None if it has no such cell.

    Args:
        content: What comparison.json holds.
        name: A method, ``"best_start"`` or a free start.
        budget: Queries; a start, free or chosen by its queries, has the same values from there on.
    """
    if name in content["starts"]:
        free: list[float | None] = content["starts"][name]["test"]
        return free
    if name == "best_start":
        best: list[float | None] = content["best_start"]["test"]
        return best if budget >= content["best_start"]["queries"] else None
    cell = content["methods"].get(name, {"cells": {}})["cells"].get(str(budget))
    return None if cell is None else cell["test"]


def baselines_of(content: Mapping[str, Any]) -> list[str]:
    """Return the names of all baselines: free starts, the best of them, and the other methods."""
    methods = (name for name in content["methods"] if name != OURS and name not in content["starts"])
    return [*content["starts"], "best_start", *methods]


def pair(content: Mapping[str, Any], baseline: str, budget: int, our_budget: int | None = None) -> Pair | None:
    """Compare ours with a baseline, or return None if no seed has both.

    Args:
        content: What comparison.json holds.
        baseline: Its name.
        budget: Its queries.
        our_budget: Ours, if they are others.
    """
    ours, theirs = tests(content, OURS, our_budget or budget), tests(content, baseline, budget)
    if ours is None or theirs is None:
        return None
    sign = 1 if content["metric"]["maximize"] else -1
    gains = [sign * (a - b) for a, b in zip(ours, theirs, strict=True) if a is not None and b is not None]
    if not gains:
        return None
    wins, losses = sum(gain > 0 for gain in gains), sum(gain < 0 for gain in gains)
    return Pair(baseline, budget, paired_interval(gains), t_test(gains), wins, losses, len(gains))


def all_pairs(content: Mapping[str, Any]) -> list[Pair]:
    """Compare ours with every baseline at every budget."""
    found = (pair(content, baseline, budget) for budget in content["budgets"] for baseline in baselines_of(content))
    return [each for each in found if each is not None]


class Judged(NamedTuple):
    """What a guard did, and what that does on test, positive being better; standard errors are None if unknown.

    Attributes:
        accepted: Whether it accepted a change.
        change: What that changed; 0 if it was refused.
        error: Its standard error.
        best: What the best candidate changes, accepted or not.
        best_error: Its standard error.
    """

    accepted: bool
    change: float
    error: float | None
    best: float
    best_error: float | None


def guard_blocks(guards: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[str]]]:
    """Say in words what guarded runs came to: of the search's step and of the whole run.

    Args:
        guards: Records of `guarded`.

    Returns:
        A heading and statements of each.
    """
    steps = [
        Judged(each["accepted"], each["accepted"] * each["change"], each["error"], each["change"], each["error"])
        for each in guards
    ]
    whole = [Judged(**each["whole"]) for each in guards]
    return [
        ("The guard on the search's step, from the start it began at to its end", guard_lines(steps)),
        ("The guard on the whole run, from the model as trained to what is kept (start or end)", guard_lines(whole)),
    ]


def guard_lines(guards: Sequence[Judged]) -> list[str]:
    """Say in words what guards came to; a refused change counts as 0."""
    if not guards:
        return ["no guarded run"]
    accepted, change = sum(each.accepted for each in guards), np.mean([each.change for each in guards])
    lines = [f"{counted(len(guards), 'guarded run')}, {accepted} accepted; mean change on test {change:+.4f}"]
    errors = [(each, each.error, each.best_error) for each in guards]
    known = [(each, a, b) for each, a, b in errors if a is not None and b is not None]
    if not known:
        return [*lines, "the standard errors of the changes on test are unknown"]
    lost = sum(each.change < -error for each, error, _ in known)
    lines.append(f"{lost} of {len(known)} ({lost / len(known):.1%}) lose more than one standard error on test")
    clear = [each for each, _, error in known if each.best > 2 * error]
    kept = sum(each.accepted for each in clear)
    share = f" ({kept / len(clear):.1%})" if clear else ""
    lines.append(
        f"{kept} of {len(clear)}{share} accepted where the best candidate gains more than two standard errors on test"
    )
    return lines


def shown(interval: Interval) -> str:
    """Format a mean difference with its interval, if there is one."""
    mean, low, high = interval
    return f"{mean:+.4f}" + ("" if math.isnan(low) else f" [{low:+.4f}, {high:+.4f}]")
