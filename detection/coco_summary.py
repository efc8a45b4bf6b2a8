"""COCO's summary of detections: average precision and recall by IoU, size and class, as pycocotools computes them.

Each number is a mean over classes with an object of that size; AP and AR are means over the IoUs 0.5, 0.55, ..., 0.95,
too. AR is the share of objects found by the best detections of a class in an image. An object's size is its annotated
area; a detection's, that of its box. Objects of other sizes are ignored, and so is a detection of one, and one of
another size that hits nothing. How detections and objects are matched, `ap50` says.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from metricopt_ext.detection.ap50 import COCO_DETECTIONS, METRICS, RECALLS, compared, precision_at
from metricopt_ext.detection.matching import Found, Things, beyond, match_coco, ranks_of
from metricopt_ext.detection.tables import FoundLike, FoundTable, Kind, TruthLike, TruthTable
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


def _numbers() -> list[Number]:
    """COCO's twelve numbers of boxes or masks, in pycocotools' order."""
    sizes: list[tuple[str, float | None, str]] = [("s", None, "small"), ("m", None, "medium"), ("l", None, "large")]
    precisions = [("", None, "all"), ("50", 0.5, "all"), ("75", 0.75, "all"), *sizes]
    return [
        *(Number(f"AP{end}", False, iou, size, COCO_DETECTIONS) for end, iou, size in precisions),
        *(Number(f"AR{each}", True, None, "all", each) for each in (*FEW, COCO_DETECTIONS)),
        *(Number(f"AR{end}", True, iou, size, COCO_DETECTIONS) for end, iou, size in sizes),
    ]


NUMBERS = _numbers()


def summarize(
    detections: FoundLike,
    truth: TruthLike,
    kind: Kind = "bbox",
) -> Summary:
    """Return COCO's numbers of detections.

    Args:
        detections: What was found in each image of ``truth``, in the same order.
        truth: The images with their objects.
        kind: What is compared; but for boxes, both have ``shapes``.

    Raises:
        DataError: The numbers of detections and images differ.
        MetricError: What was found is not of the form that `ap50.match` needs.
    """
    if len(detections) != len(truth):
        raise DataError(f"there are detections for {len(detections)} images, but {len(truth)} images")
    classes, levels = len(truth.classes), METRICS["AP"]
    found = Found.of(FoundTable.of(detections), classes, "coco")
    things = Things.of(TruthTable.of(truth), "coco")
    found = found.take(ranks_of(found.keys) < COCO_DETECTIONS)
    pairs = compared(found, things, kind)
    ranks, labels = ranks_of(found.keys), found.keys % classes
    ends = np.searchsorted(labels, np.arange(classes + 1))
    values = {each.name: np.full((classes, len(levels)), np.nan) for each in NUMBERS}

    def tells(number: Number, size: str, place: int) -> bool:
        return number.size == size and number.iou in (None, levels[place])

    judged_classes: set[int] = set()
    for size in {each.size: None for each in NUMBERS}:
        judged = ~things.ignored & ~beyond(things.areas, SIZES[size])
        objects = np.bincount(things.keys[judged] % classes, minlength=classes)
        known = np.flatnonzero(objects)
        judged_classes = set(known.tolist()) if size == "all" else judged_classes
        for place, iou in enumerate(levels):
            counted, hits = match_coco(found, things, pairs, iou, SIZES[size])
            precision = [
                precision_at(hits[start:end][counted[start:end]], int(objects[label]), RECALLS["coco"]).mean()
                for label, start, end in zip(known, ends[known], ends[known + 1], strict=True)
            ]
            for each in NUMBERS:
                if tells(each, size, place):
                    best = hits & (ranks < each.most)
                    recalled = np.bincount(labels[best], minlength=classes)
                    values[each.name][known, place] = recalled[known] / objects[known] if each.recall else precision

    return Summary(
        {each.name: _mean(values[each.name]) for each in NUMBERS},
        {
            name: {each.name: _mean(values[each.name][label]) for each in NUMBERS}
            for label, name in enumerate(truth.classes)
            if label in judged_classes
        },
        tuple(each.line(_mean(values[each.name])) for each in NUMBERS),
    )


def _mean(values: npt.NDArray[np.float64]) -> float | None:
    """The mean of what is known."""
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else None
