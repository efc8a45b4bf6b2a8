"""AP50: the average precision of detections if a hit needs an intersection over union (IoU) of 0.5.

AP, the mean over the IoUs 0.5, 0.55, ..., 0.95, is here too: COCO's, or of another definition.

Three definitions are in use and give different values for the same detections:

- ``"voc_11_point"``, Pascal VOC 2007: the mean of the precision at the recalls 0, 0.1, ..., 1.
- ``"voc"``, Pascal VOC since 2010: the area under the precision, made monotonic, as a function of recall.
- ``"coco"``, as in pycocotools: the mean of the precision at the recalls 0, 0.01, ..., 1.

VOC: a detection is matched to the box of its class with the largest IoU (the first if several are equal), which must be
above 0.5. The best-scoring detection matched to a box is a hit, later ones are false. Difficult and crowd objects don't
count, nor are detections of them false.

COCO: of the boxes not taken by a better-scoring detection, a detection takes the one with the largest IoU (the last if
several are equal), which must be at least 0.5. In each image, the 100 best detections of each class count
(pycocotools' maxDets; `beyond_limit` counts the others). A detection that only overlaps a crowd region, by half of its
own area, is not counted, nor is one of negative area; difficult objects are treated like any others.

Detections of a class are sorted by score. Equal scores stay in the order of the images, then of the image's detections,
as in pycocotools (where the images are in the order of their ids) and in VOC's evaluation with a stable sort. A class
without an object that counts is left out of the mean; one with objects but no detections has the value 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import torch

from metricopt_ext.detection.records import Detections, DetectionSet, as_array
from metricopt_ext.errors import DataError, MetricError
from metricopt_ext.utils.words import counted

Definition = Literal["voc_11_point", "voc", "coco"]
DEFINITIONS: tuple[Definition, ...] = get_args(Definition)

IOU = 0.5
# The IoUs that each metric is the mean over, as pycocotools writes them.
METRICS: dict[str, tuple[float, ...]] = {"AP50": (IOU,), "AP": tuple(np.linspace(0.5, 0.95, 10).tolist())}
COCO_DETECTIONS = 100  # of one class in one image, by default
# Where the worst detection has a higher score, worse ones were left out; down to the second they are worth writing.
CUT, LOW_SCORE = 0.01, 0.0005
# Written as in the reference code: other forms differ in the last bit, which matters at a recall of 0.3.
RECALLS = {"voc_11_point": np.arange(0.0, 1.1, 0.1), "coco": np.linspace(0.0, 1.0, 101)}
# VOC counts pixels from 1, both ends inside. The IoU is the same except for rounding.
ORIGIN = {"voc_11_point": np.array([1.0, 1.0, 0.0, 0.0]), "voc": np.array([1.0, 1.0, 0.0, 0.0]), "coco": np.zeros(4)}

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
Booleans = npt.NDArray[np.bool_]
Pairs = tuple[Integers, Integers, Floats]  # of detections and objects: their rows, and their overlap in [0, 1]


@dataclass(frozen=True)
class AveragePrecision:
    """AP50 of some images.

    Attributes:
        mean: Mean over the classes, in [0, 1].
        per_class: AP50 of each class that has an object, by its name.
    """

    mean: float
    per_class: dict[str, float]


@dataclass(frozen=True, eq=False)
class Matches:
    """Which detections hit an object: enough to compute the AP50 of any subset of the images.

    Attributes:
        definition: See the module.
        classes: Names of the c classes.
        objects: Number of objects that count, ``images x c``.
        images: Image of each of the n detections that count, ``n``.
        labels: Their classes, ``n``, ascending.
        hits: Whether each hit an object, ``n``; within a class by descending score.
    """

    definition: Definition
    classes: tuple[str, ...]
    objects: Integers
    images: Integers
    labels: Integers
    hits: Booleans

    def average_precision(self, images: Sequence[int] | None = None) -> AveragePrecision:
        """Return the AP50 of some images, given by their positions in the set; by default of all.

        It is the same as if only these images had been matched (except with ``rounded``: its ties have no fixed order).
        An image counts as often as it is given.

        Raises:
            DataError: None of the images has an object that counts.
        """
        times = self._times(images)
        repeated = times[self.images]
        hits, objects = np.repeat(self.hits, repeated), times @ self.objects
        ends = np.searchsorted(np.repeat(self.labels, repeated), np.arange(len(self.classes) + 1))
        per_class = {
            name: _area(hits[ends[label] : ends[label + 1]], int(objects[label]), self.definition)
            for label, name in enumerate(self.classes)
            if objects[label]
        }
        if not per_class:
            raise DataError(f"none of {int(times.sum())} images has an object that counts; AP50 needs one")
        return AveragePrecision(float(np.mean(list(per_class.values()))), per_class)

    def f1(self, images: Sequence[int] | None = None) -> float:
        """Return the mean F1 of the classes that have an object, over all detections, in [0, 1].

        Of a class it is 2 h / (n + m), with h hits among n detections that count and m objects. An image counts as
        often as it is given.

        Raises:
            DataError: None of the images has an object that counts.
        """
        times = self._times(images)
        objects, found, hits = (
            times @ self.objects,
            *(
                np.bincount(self.labels, weights, len(self.classes))
                for weights in (times[self.images], times[self.images] * self.hits)
            ),
        )
        if not objects.any():
            raise DataError(f"none of {int(times.sum())} images has an object that counts; F1 needs one")
        of_classes = 2 * hits[objects > 0] / (found + objects)[objects > 0]
        return float(of_classes.mean())

    def _times(self, images: Sequence[int] | None) -> Integers:
        """How often each image counts."""
        times = np.zeros(len(self.objects), dtype=np.int64)
        np.add.at(times, np.arange(len(times)) if images is None else np.array(images, dtype=np.int64), 1)
        return times


def average_precision(
    detections: Sequence[Detections],
    truth: DetectionSet,
    definition: Definition,
    *,
    rounded: bool = False,
    max_detections: int = COCO_DETECTIONS,
) -> AveragePrecision:
    """Return the AP50 of detections; see `match`."""
    matches = match(detections, truth, definition, rounded=rounded, max_detections=max_detections)
    return matches.average_precision()


def match(
    detections: Sequence[Detections],
    truth: DetectionSet,
    definition: Definition,
    *,
    rounded: bool = False,
    max_detections: int = COCO_DETECTIONS,
) -> Matches:
    """Decide for each detection whether it hit an object.

    Args:
        detections: What was found in each image of ``truth``, in the same order.
        truth: The images with their objects.
        definition: See the module, at an IoU of 0.5.
        rounded: Round as Detectron2's VOC evaluation does, to match its value to the last bit if nothing else
            differs: scores to 3 decimals, boxes to 1, equal scores in the order that numpy's unstable sort gives.
        max_detections: How many detections of a class in an image count by COCO's definition, at least 1.

    Raises:
        DataError: The numbers of detections and images differ, the definition is unknown, or it is COCO's with
            ``rounded``.
        MetricError: A box is not given by four numbers, a box or score is NaN or infinite, or a label is not one of the
            set's.
    """
    (matches,) = _match_at((IOU,), detections, truth, definition, rounded=rounded, max_detections=max_detections)
    return matches


def beyond_limit(detections: Sequence[Detections], max_detections: int = COCO_DETECTIONS) -> int:
    """Return how many detections COCO's definition does not count, as others of their class in the image are better."""
    counts = [torch.bincount(found.labels.flatten().long().cpu()) for found in detections if len(found)]
    return sum(int((count - max_detections).clamp(min=0).sum()) for count in counts)


def told_beyond_limit(cut: int, max_detections: int = COCO_DETECTIONS) -> str:
    """Return in words how many detections are beyond the limit; empty if none are."""
    said = f"COCO does not count {counted(cut, 'detection')} beyond the {max_detections} best of a class in an image"
    return said if cut else ""


def told_cut(detections: Sequence[Detections]) -> str:
    """Return in words that detections look cut by a threshold, by their lowest score; empty if they don't."""
    scores = [found.scores for found in detections if len(found)]
    if not scores or (lowest := min(float(each.min()) for each in scores)) <= CUT:
        return ""
    return (
        f"the lowest score is {lowest:.3g}: detections look cut by a threshold, which can only lower an average"
        f" precision; keep those down to {LOW_SCORE:g}"
    )


def match_for(
    metric: str, detections: Sequence[Detections], truth: DetectionSet, definition: Definition
) -> list[Matches]:
    """Decide at each IoU of a metric, one of `METRICS`, for each detection whether it hit an object; see `match`."""
    return _match_at(METRICS[metric], detections, truth, definition)


def mean_over_ious(matches: Sequence[Matches], images: Sequence[int] | None = None) -> float:
    """Return the mean of the average precision at several IoUs, of some images or all, in [0, 1].

    Raises:
        DataError: None of the images has an object that counts.
    """
    return float(np.mean([each.average_precision(images).mean for each in matches]))


def _match_at(
    ious: Sequence[float],
    detections: Sequence[Detections],
    truth: DetectionSet,
    definition: Definition,
    *,
    rounded: bool = False,
    max_detections: int = COCO_DETECTIONS,
) -> list[Matches]:
    """As `match`, at each IoU."""
    if definition not in DEFINITIONS:
        raise DataError(f"definition must be one of {', '.join(DEFINITIONS)}, got {definition!r}")
    if rounded and definition == "coco":
        raise DataError("only VOC's definitions can be rounded as in Detectron2")
    if len(detections) != len(truth):
        raise DataError(f"there are detections for {len(detections)} images, but {len(truth)} images")
    found = _Found.of(detections, len(truth.classes), definition, rounded)
    things = _Things.of(truth, definition)
    if definition == "coco":
        found = found.take(_ranks(found.keys) < max_detections)
    pairs = _pairs(found, things, pixel=0.0 if definition == "coco" else 1.0)
    decide = _match_coco if definition == "coco" else _match_voc
    matches = []
    for iou in ious:
        counted, hits = decide(found, things, pairs, iou)
        images, labels = np.divmod(found.keys[counted], len(truth.classes))
        matches.append(Matches(definition, truth.classes, things.counts, images, labels, hits[counted]))
    return matches


def _match_voc(found: "_Found", things: "_Things", pairs: Pairs, iou: float) -> tuple[Booleans, Booleans]:
    """Which detections count, and which hit an object."""
    rows, columns, overlaps = pairs
    near = overlaps > iou
    rows, columns, overlaps = rows[near], columns[near], overlaps[near]
    order = np.lexsort((-overlaps, rows))  # stable: the first of equals
    decided, first = np.unique(rows[order], return_index=True)
    deciding = columns[order][first]

    counted, hits = np.ones(len(found.keys), dtype=bool), np.zeros(len(found.keys), dtype=bool)
    ignored = things.ignored[deciding]
    counted[decided[ignored]] = False
    # Of the detections matched to one object, the first has the best score.
    _, first = np.unique(deciding[~ignored], return_index=True)
    hits[decided[~ignored][first]] = True
    return counted, hits


def _match_coco(found: "_Found", things: "_Things", pairs: Pairs, iou: float) -> tuple[Booleans, Booleans]:
    """Which detections count, and which hit an object."""
    rows, columns, overlaps = pairs
    near = overlaps >= iou
    rows, columns, overlaps = rows[near], columns[near], overlaps[near]
    # For each detection in turn: objects before crowd regions, larger overlaps first, the last of equals.
    order = np.lexsort((-columns, -overlaps, things.crowd[columns], rows))
    counted = np.prod(found.boxes[:, 2:] - found.boxes[:, :2], axis=1) >= 0
    hits = np.zeros(len(found.keys), dtype=bool)
    taken: set[int] = set()
    crowd = set(np.flatnonzero(things.crowd).tolist())
    for row, column in zip(rows[order].tolist(), columns[order].tolist(), strict=True):
        if not hits[row] and column not in taken:
            if column in crowd:
                counted[row] = False
            else:
                hits[row] = True
                taken.add(column)
    return counted, hits


def _pairs(found: "_Found", things: "_Things", pixel: float) -> Pairs:
    """Each detection with each object of its image and class: their rows, and their overlap in [0, 1].

    The overlap is the IoU; with a crowd region, the share of the detection that lies within it. A box's width is
    ``right - left + pixel``.
    """
    start, end = (np.searchsorted(things.keys, found.keys, side) for side in ("left", "right"))
    sizes = end - start
    rows = np.repeat(np.arange(len(sizes)), sizes)
    columns = np.arange(len(rows)) + np.repeat(start - np.cumsum(sizes) + sizes, sizes)
    a, b = found.boxes[rows], things.boxes[columns]
    sides = np.minimum(a[:, 2:], b[:, 2:]) - np.maximum(a[:, :2], b[:, :2]) + pixel
    common = np.prod(np.maximum(sides, 0), axis=1)
    area, other = (np.prod(boxes[:, 2:] - boxes[:, :2] + pixel, axis=1) for boxes in (a, b))
    whole = np.where(things.crowd[columns], area, area + other - common)
    return rows, columns, np.divide(common, whole, out=np.zeros_like(common), where=common > 0)


@dataclass(frozen=True, eq=False)
class _Found:
    """All detections, by class and, within it, by descending score."""

    keys: Integers  # image * classes + label
    boxes: Floats

    @staticmethod
    def of(detections: Sequence[Detections], classes: int, definition: Definition, rounded: bool) -> "_Found":
        for image, found in enumerate(detections):
            n = (len(found),)
            boxes_fit = found.boxes.shape == (*n, 4) or not (len(found) or found.boxes.numel())
            if not (boxes_fit and found.labels.shape == found.scores.shape == n):
                raise MetricError(
                    f"the detector gave boxes of shape {tuple(found.boxes.shape)} and labels of shape"
                    f" {tuple(found.labels.shape)} for scores of shape {tuple(found.scores.shape)}, first in image"
                    f" {image}; they must be n x 4 (left, top, right, bottom), n and n"
                )
        images = np.repeat(np.arange(len(detections)), [len(found) for found in detections])
        labels = _joined([found.labels for found in detections]).astype(np.int64)
        scores = _joined([found.scores for found in detections])
        boxes = _joined([found.boxes for found in detections]).reshape(-1, 4)
        for name, finite in (("box", np.isfinite(boxes).all(1)), ("score", np.isfinite(scores))):
            if not finite.all():
                where = images[finite.argmin()]
                raise MetricError(f"the detector gave a {name} that is NaN or infinite, first in image {where}")
        if len(labels) and not 0 <= labels.min() <= labels.max() < classes:
            raise MetricError(
                f"the detector gave labels from {labels.min()} to {labels.max()};"
                f" with {classes} classes they must be in 0..{classes - 1}"
            )
        if rounded:
            boxes = boxes + ORIGIN[definition].astype(boxes.dtype)  # in the detector's precision, as in Detectron2
            boxes, scores = boxes.astype(np.float64).round(1), scores.astype(np.float64).round(3)
        else:
            boxes = boxes + ORIGIN[definition]
        order = _by_score(labels, scores, stable=not rounded)
        return _Found(images * classes + labels, boxes).take(order)

    def take(self, rows: Any) -> "_Found":
        return _Found(self.keys[rows], self.boxes[rows])


@dataclass(frozen=True, eq=False)
class _Things:
    """All ground truth by image and class."""

    keys: Integers  # image * classes + label, ascending
    boxes: Floats
    ignored: Booleans  # do not count, nor are detections of them false
    crowd: Booleans  # of the ignored ones, those that COCO treats as regions
    counts: Integers  # of objects that are not ignored, images x classes

    @staticmethod
    def of(truth: DetectionSet, definition: Definition) -> "_Things":
        shape = len(truth), len(truth.classes)
        images = np.repeat(np.arange(len(truth)), [len(image.labels) for image in truth.images])
        labels, crowd, difficult = (
            _joined([getattr(image, name) for image in truth.images]) for name in ("labels", "crowd", "difficult")
        )
        keys = images * len(truth.classes) + labels.astype(np.int64)
        boxes = _joined([image.boxes for image in truth.images]).reshape(-1, 4) + ORIGIN[definition]
        ignored, crowd = crowd.astype(bool), crowd.astype(bool)
        if definition != "coco":
            ignored, crowd = ignored | difficult.astype(bool), np.zeros_like(crowd)
        order = np.argsort(keys, kind="stable")
        counts = np.bincount(keys[~ignored], minlength=shape[0] * shape[1]).reshape(shape)
        return _Things(keys[order], boxes[order], ignored[order], crowd[order], counts)


def _joined(parts: Sequence[torch.Tensor]) -> npt.NDArray[Any]:
    return as_array(torch.cat(list(parts))) if parts else np.zeros(0)


def _by_score(labels: Integers, scores: npt.NDArray[Any], *, stable: bool) -> Integers:
    """The order by class and, within it, by descending score."""
    by_class = np.argsort(labels, kind="stable")
    ends = np.flatnonzero(np.diff(labels[by_class])) + 1
    kind: Literal["stable"] | None = "stable" if stable else None
    return np.concatenate([rows[np.argsort(-scores[rows], kind=kind)] for rows in np.split(by_class, ends)])


def _ranks(keys: Integers) -> Integers:
    """The place, from 0, of each key among those equal to it."""
    order = np.argsort(keys, kind="stable")
    ranks = np.empty_like(keys)
    ranks[order] = np.arange(len(keys)) - np.searchsorted(keys[order], keys[order])
    return ranks


def _area(hits: Booleans, objects: int, definition: Definition) -> float:
    """The average precision of one class, from its detections by descending score."""
    found = np.cumsum(hits)
    recall, precision = found / objects, found / np.arange(1, len(hits) + 1)
    best = np.maximum.accumulate(precision[::-1])[::-1]  # at this recall or a higher one
    if definition == "voc":
        return float(np.sum(np.diff(recall, prepend=0.0) * best))
    at = np.searchsorted(recall, RECALLS[definition])
    return float(np.mean(np.append(best, 0.0)[at]))
