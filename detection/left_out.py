"""95% intervals of COCO's numbers over images, by a jackknife that leaves out a group of images at a time.

The images are taken as independent, and dealt into 20 groups at random. With v_g the number without group g and v the
mean of those, the standard error is sqrt((G - 1) / G sum (v_g - v)^2), and the interval is Student's with G - 1 degrees
of freedom (Efron and Tibshirani, An Introduction to the Bootstrap, 1993, Eq. 11.5; by groups, Shao and Tu, The
Jackknife and Bootstrap, 1995, Sec. 2.3). Which detection hits which object is decided within an image, and so once.
"""

import math
from itertools import pairwise

import numpy as np

from metricopt_ext.detection.ap50 import RECALLS
from metricopt_ext.detection.tables import Booleans, Floats, Integers

GROUPS = 20
# Student's 0.975 quantile with 1, 2, ..., 19 degrees of freedom.
STUDENT = (
    *(12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281),
    *(2.2010, 2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930),
)


def groups_of(images: int) -> Integers:
    """Return the group of each image: as many as there are images, at most `GROUPS`."""
    return np.random.default_rng(0).permutation(images) % max(1, min(GROUPS, images))


def interval(value: float | None, without: Floats, low: float = 0.0, high: float = 1.0) -> tuple[float, float] | None:
    """Return the 95% interval of a number; None where it is not known without each group, or is the same.

    Args:
        value: The number of all images.
        without: The number without each group.
        low: The lowest value that it can have.
        high: The highest.
    """
    n = len(without)
    if value is None or n < 2 or np.isnan(without).any():
        return None
    half = STUDENT[n - 2] * math.sqrt((n - 1) ** 2 / n) * float(without.std(ddof=1))
    if half == 0:  # nothing was missed, or found: that says little of other images
        return None
    return max(low, value - half), min(high, value + half)


def precision_without(
    hits: Booleans, labels: Integers, groups: Integers, objects: Integers, recalls: Floats = RECALLS["coco"]
) -> Floats:
    """Return COCO's average precision of each class without each group, ``c x g``; NaN for one of no object.

    Args:
        hits: Whether each detection that counts hits an object, ``n``; by class and, within it, by descending score.
        labels: Their classes, ``n``.
        groups: The groups of their images, ``n``.
        objects: How many objects of a class there are without each group, ``c x g``.
        recalls: Those at which precision is told, ascending.
    """
    classes, count = objects.shape
    best, kept = _best_without(hits, labels, groups, count)
    # The hits that are left without a group, by group; and where those of a class begin among them, and their number.
    places, rows = np.nonzero(kept.T)
    own = labels[hits]
    left = np.zeros((classes, count), dtype=np.int64)
    np.add.at(left, own, kept)
    of_groups = left.sum(axis=0)
    first = np.cumsum(of_groups) - of_groups + np.cumsum(left, axis=0) - left
    # Precision at a recall is the best one from the hit on that reaches it.
    numbers, inverse = np.unique(objects, return_inverse=True)
    least = np.stack([np.searchsorted(np.arange(each + 1) / max(each, 1), recalls) for each in numbers])
    needed = np.maximum(least, 1)[inverse.reshape(objects.shape)]
    reached = needed <= left[..., None]
    at = (first[..., None] + needed - 1)[reached]
    precision = np.zeros(reached.shape)
    precision[reached] = best[rows[at], places[at]]
    found: Floats = np.where(objects > 0, precision.mean(axis=2), np.nan)
    return found


def recall_without(hits: Booleans, labels: Integers, groups: Integers, objects: Integers) -> Floats:
    """Return the recall of each class without each group, ``c x g``; see `precision_without`."""
    classes, count = objects.shape
    own = np.bincount(labels[hits] * count + groups[hits], minlength=classes * count).reshape(classes, count)
    left = own.sum(axis=1, keepdims=True) - own
    found: Floats = np.divide(left, objects, out=np.full(objects.shape, np.nan), where=objects > 0)
    return found


def _best_without(hits: Booleans, labels: Integers, groups: Integers, count: int) -> tuple[Floats, Booleans]:
    """The best precision at each of h hits or at a later one of its class without each group; and which are left."""
    ends = np.flatnonzero(hits)
    own = labels[ends]
    kept: Booleans = groups[ends][:, None] != np.arange(count)
    following: Integers = np.cumsum(hits) - hits  # the hit up to which a detection counts: itself or the next
    known = np.asarray(following < len(ends))
    known[known] = own[following[known]] == labels[known]  # of its own class
    cells = following[known] * count + groups[known]
    found = np.bincount(cells, minlength=len(ends) * count).reshape(-1, count)
    found = np.cumsum(found.sum(axis=1, keepdims=True) - found, axis=0)
    right = np.cumsum(kept, axis=0)
    best = np.zeros(found.shape)
    starts = np.flatnonzero(np.diff(own, prepend=-1)).tolist()
    for start, end in pairwise([*starts, len(own)]):
        before = (found[start - 1], right[start - 1]) if start else (0, 0)
        among, hit = found[start:end] - before[0], right[start:end] - before[1]
        precision = np.divide(hit, among, out=np.zeros(hit.shape), where=among > 0)
        best[start:end] = np.maximum.accumulate(precision[::-1], axis=0)[::-1]
    return best, kept
