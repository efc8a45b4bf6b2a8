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

import numpy as np

from metricopt_ext.detection.matching import (
    DEFINITIONS,
    Definition,
    Found,
    Pairs,
    Things,
    match_coco,
    match_voc,
    pairs_of,
    ranks_of,
)
from metricopt_ext.detection.tables import (
    Booleans,
    Floats,
    FoundLike,
    FoundTable,
    Integers,
    Kind,
    TruthLike,
    TruthTable,
)
from metricopt_ext.errors import DataError
from metricopt_ext.utils.words import counted

IOU = 0.5
# The IoUs that each metric is the mean over, as pycocotools writes them.
METRICS: dict[str, tuple[float, ...]] = {
    "AP50": (IOU,),
    "AP": tuple(np.linspace(0.5, 0.95, 10).tolist()),
    "AP75": (0.75,),
}
COCO_DETECTIONS = 100  # of one class in one image, by default
# Where the worst detection has a higher score, worse ones were left out; down to the second they are worth writing.
CUT, LOW_SCORE = 0.01, 0.0005
# Written as in the reference code: other forms differ in the last bit, which matters at a recall of 0.3.
RECALLS = {"voc_11_point": np.arange(0.0, 1.1, 0.1), "coco": np.linspace(0.0, 1.0, 101)}


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

        It is the same as if only these images had been matched. An image counts as often as it is given.

        Raises:
            DataError: None of the images has an object that counts.
        """
        times = self._times(images)
        repeated = times[self.images]
        hits, objects = np.repeat(self.hits, repeated), times @ self.objects
        ends = np.searchsorted(np.repeat(self.labels, repeated), np.arange(len(self.classes) + 1))
        per_class = {
            name: area_of_precision(hits[ends[label] : ends[label + 1]], int(objects[label]), self.definition)
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
    detections: FoundLike,
    truth: TruthLike,
    definition: Definition,
) -> AveragePrecision:
    """Return the AP50 of detections; see `match`."""
    return match(detections, truth, definition).average_precision()


def match(
    detections: FoundLike,
    truth: TruthLike,
    definition: Definition,
) -> Matches:
    """Decide for each detection whether it hit an object.

    Args:
        detections: What was found in each image of ``truth``, in the same order.
        truth: The images with their objects.
        definition: See the module, at an IoU of 0.5.

    Raises:
        DataError: The numbers of detections and images differ, or the definition is unknown.
        MetricError: A box is not given by four numbers, a box or score is NaN or infinite, or a label is not one of the
            set's.
    """
    (matches,) = _match_at((IOU,), detections, truth, definition)
    return matches


def beyond_limit(detections: FoundLike) -> int:
    """Return how many detections COCO's definition does not count, as others of their class in the image are better."""
    found = FoundTable.of(detections)
    classes = int(found.labels.max(initial=0)) + 1
    return int((ranks_of(found.places * classes + found.labels) >= COCO_DETECTIONS).sum())


def told_beyond_limit(cut: int) -> str:
    """Return in words how many detections are beyond the limit; empty if none are."""
    said = f"COCO does not count {counted(cut, 'detection')} beyond the {COCO_DETECTIONS} best of a class in an image"
    return said if cut else ""


def told_cut(detections: FoundLike) -> str:
    """Return in words that detections look cut by a threshold, by their lowest score; empty if they don't."""
    scores = FoundTable.of(detections).scores
    if not len(scores) or (lowest := float(scores.min())) <= CUT:
        return ""
    return (
        f"the lowest score is {lowest:.3g}: detections look cut by a threshold, which can only lower an average"
        f" precision; keep those down to {LOW_SCORE:g}"
    )


def match_for(
    metric: str, detections: FoundLike, truth: TruthLike, definition: Definition, kind: Kind = "bbox"
) -> list[Matches]:
    """Decide at each IoU of a metric, one of `METRICS`, for each detection whether it hit an object; see `match`.

    Masks, which both then have as ``shapes``, are compared by COCO's definition alone, as in pycocotools.
    """
    return _match_at(METRICS[metric], detections, truth, definition, kind)


def mean_over_ious(matches: Sequence[Matches], images: Sequence[int] | None = None) -> float:
    """Return the mean of the average precision at several IoUs, of some images or all, in [0, 1].

    Raises:
        DataError: None of the images has an object that counts.
    """
    return float(np.mean([each.average_precision(images).mean for each in matches]))


def compared(found: Found, things: Things, kind: Kind, pixel: float = 0.0) -> Pairs:
    """Return each detection with each object of its image and class (`pairs_of`)."""
    if kind == "bbox":
        return pairs_of(found, things, pixel)
    from metricopt_ext.detection.shapes import mask_pairs

    return mask_pairs(found, things)


def _match_at(
    ious: Sequence[float],
    detections: FoundLike,
    truth: TruthLike,
    definition: Definition,
    kind: Kind = "bbox",
) -> list[Matches]:
    """As `match`, at each IoU."""
    if definition not in DEFINITIONS:
        raise DataError(f"definition must be one of {', '.join(DEFINITIONS)}, got {definition!r}")
    if kind != "bbox" and definition != "coco":
        raise DataError(f"{kind} are compared by COCO's definition, not by {definition!r}; set definition='coco'")
    if len(detections) != len(truth):
        raise DataError(f"there are detections for {len(detections)} images, but {len(truth)} images")
    found = Found.of(FoundTable.of(detections), len(truth.classes), definition)
    things = Things.of(TruthTable.of(truth), definition)
    if definition == "coco":
        found = found.take(ranks_of(found.keys) < COCO_DETECTIONS)
    pairs = compared(found, things, kind, pixel=0.0 if definition == "coco" else 1.0)
    decide = match_coco if definition == "coco" else match_voc
    matches = []
    for iou in ious:
        counted, hits = decide(found, things, pairs, iou)
        images, labels = np.divmod(found.keys[counted], len(truth.classes))
        matches.append(Matches(definition, truth.classes, things.counts, images, labels, hits[counted]))
    return matches


def area_of_precision(hits: Booleans, objects: int, definition: Definition) -> float:
    """Return the average precision of one class, from its detections by descending score."""
    if definition == "voc":
        recall, best = _curve(hits, objects)
        return float(np.sum(np.diff(recall, prepend=0.0) * best))
    return float(np.mean(precision_at(hits, objects, RECALLS[definition])))


def precision_at(hits: Booleans, objects: int, recalls: Floats) -> Floats:
    """Return the precision of one class at some recalls, from its detections by descending score."""
    recall, best = _curve(hits, objects)
    precision: Floats = np.append(best, 0.0)[np.searchsorted(recall, recalls)]
    return precision


def _curve(hits: Booleans, objects: int) -> tuple[Floats, Floats]:
    """The recall after each detection, and the best precision at it or at a higher one."""
    found = np.cumsum(hits)
    precision = found / np.arange(1, len(hits) + 1)
    return found / objects, np.maximum.accumulate(precision[::-1])[::-1]
