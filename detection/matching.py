"""Which detections hit an object: the overlaps, and the rules of each definition in `ap50`."""

from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from metricopt_ext.detection.tables import Booleans, Floats, FoundTable, Integers, Objects, TruthTable
from metricopt_ext.errors import DataError, MetricError

Definition = Literal["voc_11_point", "voc", "coco"]
DEFINITIONS: tuple[Definition, ...] = get_args(Definition)

# VOC counts pixels from 1, both ends inside. The IoU is the same except for rounding.
ORIGIN = {"voc_11_point": np.array([1.0, 1.0, 0.0, 0.0]), "voc": np.array([1.0, 1.0, 0.0, 0.0]), "coco": np.zeros(4)}


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
    counted = found.areas >= 0 if area is None else ~beyond(found.areas, area)
    hits = np.zeros(len(found.keys), dtype=bool)
    # Where no detection has a choice, the first takes the object.
    only = np.bincount(rows, minlength=len(hits))[rows] == 1
    special = ignored if things.missed is None else ignored | things.missed
    open_to = np.ones(len(ignored), dtype=bool)
    open_to[columns[~only]] = False
    plain = open_to[columns] & ~special[columns]
    first = np.full(len(ignored), len(hits))
    np.minimum.at(first, columns[plain], rows[plain])
    best = first[first < len(hits)]
    hits[best] = counted[best] = True
    rows, columns, overlaps = rows[~plain], columns[~plain], overlaps[~plain]
    # For each other detection in turn: objects that count first, larger overlaps first, the last of equals.
    order = np.lexsort((-columns, -overlaps, ignored[columns], rows))
    decided: set[int] = set()
    taken: set[int] = set()
    crowd, passed = (set(np.flatnonzero(each).tolist()) for each in (things.crowd, ignored))
    missed = set() if things.missed is None else set(np.flatnonzero(things.missed).tolist())
    for row, column in zip(rows[order].tolist(), columns[order].tolist(), strict=True):
        if row in decided or column in taken:
            continue
        decided.add(row)
        if column in passed:
            counted[row] = False
        elif column not in missed:
            hits[row] = counted[row] = True
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
    shapes: Objects | None  # masks, if these are compared

    @staticmethod
    def of(table: FoundTable, classes: int, definition: Definition) -> "Found":
        """Sort detections for a definition; see `ap50.match`, also for what is refused."""
        images, labels, scores, boxes = table.places, table.labels, table.scores, table.boxes
        for name, finite in (("box", np.isfinite(boxes).all(1)), ("score", np.isfinite(scores))):
            if not finite.all():
                where = images[finite.argmin()]
                raise MetricError(f"the detector gave a {name} that is NaN or infinite, first in image {where}")
        if len(labels) and not 0 <= labels.min() <= labels.max() < classes:
            raise MetricError(
                f"the detector gave labels from {labels.min()} to {labels.max()};"
                f" with {classes} classes they must be in 0..{classes - 1}"
            )
        boxes = boxes + ORIGIN[definition]
        order = _by_score(labels, scores)
        keys, areas = images * classes + labels, _areas(table.areas, boxes)
        return Found(keys, boxes, areas, table.shapes).take(order)

    def take(self, rows: Any) -> "Found":
        """Return some of the rows."""
        shapes = None if self.shapes is None else self.shapes[rows]
        return Found(self.keys[rows], self.boxes[rows], self.areas[rows], shapes)


@dataclass(frozen=True, eq=False)
class Things:
    """All ground truth by image and class."""

    keys: Integers  # image * classes + label, ascending
    boxes: Floats
    ignored: Booleans  # do not count, nor are detections of them false
    crowd: Booleans  # of the ignored ones, those that COCO treats as regions
    areas: Floats  # in square pixels
    shapes: Objects | None  # masks, if these are compared
    counts: Integers  # of objects that are not ignored, images x classes
    missed: Booleans | None = None  # those that count and can't be hit

    @staticmethod
    def of(truth: TruthTable, definition: Definition) -> "Things":
        """Sort the objects for a definition."""
        shape = len(truth), len(truth.classes)
        if len(truth.labels) and not 0 <= truth.labels.min() <= truth.labels.max() < shape[1]:
            raise DataError(
                f"objects have labels from {truth.labels.min()} to {truth.labels.max()}; they count the"
                f" {len(truth.classes)} classes from 0"
            )
        keys, boxes = truth.places * len(truth.classes) + truth.labels, truth.boxes + ORIGIN[definition]
        ignored, crowd = truth.crowd, truth.crowd
        if definition != "coco":
            ignored, crowd = ignored | truth.difficult, np.zeros_like(crowd)
        order = np.argsort(keys, kind="stable")
        counts = np.bincount(keys[~ignored], minlength=shape[0] * shape[1]).reshape(shape)
        areas, shapes = _areas(truth.areas, boxes), None if truth.shapes is None else truth.shapes[order]
        missed = None if truth.missed is None else truth.missed[order]
        return Things(keys[order], boxes[order], ignored[order], crowd[order], areas[order], shapes, counts, missed)


def _areas(told: Floats, boxes: Floats) -> Floats:
    """Areas as told, or those of boxes."""
    return np.where(np.isnan(told), np.prod(boxes[:, 2:] - boxes[:, :2], axis=1), told)


def _by_score(labels: Integers, scores: npt.NDArray[Any]) -> Integers:
    """The order by class and, within it, by descending score."""
    by_class = np.argsort(labels, kind="stable")
    ends = np.flatnonzero(np.diff(labels[by_class])) + 1
    return np.concatenate([rows[np.argsort(-scores[rows], kind="stable")] for rows in np.split(by_class, ends)])


def ranks_of(keys: Integers) -> Integers:
    """The place, from 0, of each key among those equal to it."""
    order = np.argsort(keys, kind="stable")
    ranks = np.empty_like(keys)
    ranks[order] = np.arange(len(keys)) - np.searchsorted(keys[order], keys[order])
    return ranks
