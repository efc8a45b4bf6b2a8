"""Which detections hit an object: the overlaps, and the rules of each definition in `ap50`."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import torch

from metricopt_ext.detection.records import Annotated, Detections, DetectionSet, as_array
from metricopt_ext.errors import MetricError

Definition = Literal["voc_11_point", "voc", "coco"]
DEFINITIONS: tuple[Definition, ...] = get_args(Definition)

# VOC counts pixels from 1, both ends inside. The IoU is the same except for rounding.
ORIGIN = {"voc_11_point": np.array([1.0, 1.0, 0.0, 0.0]), "voc": np.array([1.0, 1.0, 0.0, 0.0]), "coco": np.zeros(4)}


Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
Objects = npt.NDArray[np.object_]
Booleans = npt.NDArray[np.bool_]
Pairs = tuple[Integers, Integers, Floats]  # of detections and objects: their rows, and their overlap in [0, 1]


def match_voc(found: "Found", things: "Things", pairs: Pairs, iou: float) -> tuple[Booleans, Booleans]:
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


def match_coco(
    found: "Found", things: "Things", pairs: Pairs, iou: float, area: tuple[float, float] | None = None
) -> tuple[Booleans, Booleans]:
    """Which detections count, and which hit an object.

    Objects beyond a range of areas don't count, nor does a detection of one, nor one beyond it that hits nothing.
    """
    rows, columns, overlaps = pairs
    near = overlaps >= iou
    rows, columns, overlaps = rows[near], columns[near], overlaps[near]
    ignored = things.ignored if area is None else things.ignored | beyond(things.areas, area)
    # For each detection in turn: objects that count first, larger overlaps first, the last of equals.
    order = np.lexsort((-columns, -overlaps, ignored[columns], rows))
    counted = found.areas >= 0 if area is None else ~beyond(found.areas, area)
    hits = np.zeros(len(found.keys), dtype=bool)
    decided: set[int] = set()
    taken: set[int] = set()
    crowd, passed = (set(np.flatnonzero(each).tolist()) for each in (things.crowd, ignored))
    for row, column in zip(rows[order].tolist(), columns[order].tolist(), strict=True):
        if row in decided or column in taken:
            continue
        decided.add(row)
        hits[row] = counted[row] = column not in passed
        if column not in crowd:
            taken.add(column)
    return counted, hits


def beyond(areas: Floats, area: tuple[float, float]) -> Booleans:
    """Return which areas are out of a range, whose ends are in it."""
    return (areas < area[0]) | (areas > area[1])


def pairs_of(found: "Found", things: "Things", pixel: float) -> Pairs:
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
class Found:
    """All detections, by class and, within it, by descending score."""

    keys: Integers  # image * classes + label
    boxes: Floats
    areas: Floats  # in square pixels
    shapes: Objects  # masks or keypoints, if these are compared

    @staticmethod
    def of(detections: Sequence[Detections], classes: int, definition: Definition, rounded: bool) -> "Found":
        """Sort detections for a definition; see `ap50.match`, also for what is refused."""
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
        shapes = _shapes(detections)
        return Found(images * classes + labels, boxes, _areas(detections, boxes), shapes).take(order)

    def take(self, rows: Any) -> "Found":
        """Return some of the rows."""
        return Found(self.keys[rows], self.boxes[rows], self.areas[rows], self.shapes[rows])


@dataclass(frozen=True, eq=False)
class Things:
    """All ground truth by image and class."""

    keys: Integers  # image * classes + label, ascending
    boxes: Floats
    ignored: Booleans  # do not count, nor are detections of them false
    crowd: Booleans  # of the ignored ones, those that COCO treats as regions
    areas: Floats  # in square pixels
    shapes: Objects  # masks or keypoints, if these are compared
    counts: Integers  # of objects that are not ignored, images x classes

    @staticmethod
    def of(truth: DetectionSet, definition: Definition) -> "Things":
        """Sort the objects for a definition."""
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
        areas, shapes = _areas(truth.images, boxes), _shapes(truth.images)
        return Things(keys[order], boxes[order], ignored[order], crowd[order], areas[order], shapes[order], counts)


def _joined(parts: Sequence[torch.Tensor]) -> npt.NDArray[Any]:
    return as_array(torch.cat(list(parts))) if parts else np.zeros(0)


def _areas(images: Sequence[Annotated] | Sequence[Detections], boxes: Floats) -> Floats:
    """Areas as told, or those of boxes."""
    of_boxes = np.prod(boxes[:, 2:] - boxes[:, :2], axis=1)
    told = _joined([torch.full((len(each.labels),), math.nan) if each.areas is None else each.areas for each in images])
    return np.where(np.isnan(told), of_boxes, told)


def _shapes(images: Sequence[Annotated] | Sequence[Detections]) -> Objects:
    listed = [shape for each in images for shape in each.shapes or [None] * len(each.labels)]
    return np.fromiter(listed, dtype=object, count=len(listed))


def _by_score(labels: Integers, scores: npt.NDArray[Any], *, stable: bool) -> Integers:
    """The order by class and, within it, by descending score."""
    by_class = np.argsort(labels, kind="stable")
    ends = np.flatnonzero(np.diff(labels[by_class])) + 1
    kind: Literal["stable"] | None = "stable" if stable else None
    return np.concatenate([rows[np.argsort(-scores[rows], kind=kind)] for rows in np.split(by_class, ends)])


def ranks_of(keys: Integers) -> Integers:
    """The place, from 0, of each key among those equal to it."""
    order = np.argsort(keys, kind="stable")
    ranks = np.empty_like(keys)
    ranks[order] = np.arange(len(keys)) - np.searchsorted(keys[order], keys[order])
    return ranks
