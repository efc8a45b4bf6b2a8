"""COCO's summary of detections: average precision and recall by IoU, size and class, as pycocotools computes them.

Each number is a mean over classes with an object of that size; AP and AR are means over the IoUs 0.5, 0.55, ..., 0.95,
too. AR is the share of objects found by the best detections of a class in an image. An object's size is its annotated
area; a detection's, that of its box. Objects of other sizes are ignored, and so is a detection of one, and one of
another size that hits nothing. How detections and objects are matched, `ap50` says.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from metricopt_ext.detection.ap50 import COCO_DETECTIONS, METRICS, area_of_precision
from metricopt_ext.detection.matching import Found, Things, beyond, match_coco, pairs_of, ranks_of
from metricopt_ext.detection.records import Detections, DetectionSet
from metricopt_ext.errors import DataError

# Areas in square pixels of each size; an area at an end is of both sizes, as in pycocotools.
SIZES = {"all": (0.0, 1e10), "small": (0.0, 32.0**2), "medium": (32.0**2, 96.0**2), "large": (96.0**2, 1e10)}
FEW = (1, 10)  # detections by which AR is told, too


@dataclass(frozen=True)
class Number:
    """What one number of the summary is.

    Attributes:
        name: In the report.
        recall: Whether it is an average recall, rather than a precision.
        iou: The one IoU; None for the mean over COCO's.
        size: Which objects, one of `SIZES`.
        most: How many detections of a class in an image count.
    """

    name: str
    recall: bool
    iou: float | None
    size: str
    most: int

    def line(self, value: float | None) -> str:
        """Return the line that pycocotools prints, where -1 stands for a number of no object."""
        title = "Average Recall     (AR)" if self.recall else "Average Precision  (AP)"
        iou = "0.50:0.95" if self.iou is None else f"{self.iou:0.2f}"
        known = -1.0 if value is None else value
        return f" {title} @[ IoU={iou:<9} | area={self.size:>6s} | maxDets={self.most:>3d} ] = {known:0.3f}"


@dataclass(frozen=True)
class Summary:
    """COCO's numbers of some images.

    Attributes:
        numbers: Each in [0, 1], by its name; None if no object is of its size.
        per_class: The same of each class that has an object that counts.
        lines: What pycocotools prints, in its order.
    """

    numbers: dict[str, float | None]
    per_class: dict[str, dict[str, float | None]]
    lines: tuple[str, ...]


def numbers_of(most: int) -> list[Number]:
    """Return COCO's twelve numbers in pycocotools' order.

    Args:
        most: How many detections of a class in an image count, COCO's 100; with 10 or less, there are fewer numbers.
    """
    return [
        Number("AP", False, None, "all", most),
        *(Number(f"AP{100 * iou:.0f}", False, iou, "all", most) for iou in (0.5, 0.75)),
        *(Number(f"AP{size[0]}", False, None, size, most) for size in list(SIZES)[1:]),
        *(Number(f"AR{few}", True, None, "all", few) for few in (*(few for few in FEW if few < most), most)),
        *(Number(f"AR{size[0]}", True, None, size, most) for size in list(SIZES)[1:]),
    ]


def summarize(
    detections: Sequence[Detections], truth: DetectionSet, *, max_detections: int = COCO_DETECTIONS
) -> Summary:
    """Return COCO's numbers of detections.

    Args:
        detections: What was found in each image of ``truth``, in the same order.
        truth: The images with their objects.
        max_detections: How many detections of a class in an image count, at least 1.

    Raises:
        DataError: The numbers of detections and images differ.
        MetricError: What was found is not of the form that `ap50.match` needs.
    """
    if len(detections) != len(truth):
        raise DataError(f"there are detections for {len(detections)} images, but {len(truth)} images")
    classes, ious = len(truth.classes), METRICS["AP"]
    found, things = Found.of(detections, classes, "coco", rounded=False), Things.of(truth, "coco")
    found = found.take(ranks_of(found.keys) < max_detections)
    ranks, labels, pairs = ranks_of(found.keys), found.keys % classes, pairs_of(found, things, pixel=0.0)
    ends = np.searchsorted(labels, np.arange(classes + 1))
    numbers = numbers_of(max_detections)
    values = {each.name: np.full((classes, len(ious)), np.nan) for each in numbers}
    for size, area in SIZES.items():
        judged = ~things.ignored & ~beyond(things.areas, area)
        objects = np.bincount(things.keys[judged] % classes, minlength=classes)
        for place, iou in enumerate(ious):
            counted, hits = match_coco(found, things, pairs, iou, area)
            for each in numbers:
                if each.size != size or each.iou not in (None, iou):
                    continue
                for label in np.flatnonzero(objects):
                    own = slice(ends[label], ends[label + 1])
                    if each.recall:
                        value = np.count_nonzero(hits[own] & (ranks[own] < each.most)) / objects[label]
                    else:
                        value = area_of_precision(hits[own][counted[own]], int(objects[label]), "coco")
                    values[each.name][label, place] = value
    return Summary(
        {each.name: _mean(values[each.name]) for each in numbers},
        {
            name: {each.name: _mean(values[each.name][label]) for each in numbers}
            for label, name in enumerate(truth.classes)
            if not np.isnan(values["AP"][label]).all()
        },
        tuple(each.line(_mean(values[each.name])) for each in numbers),
    )


def _mean(values: npt.NDArray[np.float64]) -> float | None:
    """The mean of what is known."""
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else None
