"""Which four numbers a box is written by: boxes of another kind than the expected are refused, where it shows."""

from dataclasses import replace

import numpy as np

from metricopt_ext.detection.ap50 import match
from metricopt_ext.detection.tables import Array, Booleans, FoundLike, FoundTable, TruthLike, TruthTable
from metricopt_ext.errors import DataError, MetricError

SLACK = 1.0  # pixels that a box may reach beyond its image by rounding
EXPECTED = "a bbox must be [left, top, width, height] in pixels"
EDGES = "boxes must be [left, top, right, bottom] in pixels"


def check_annotated(truth: TruthTable, where: str, expected: str = EXPECTED) -> None:
    """Reject annotated boxes that are normalised, or read from the corners of boxes as if from their sides.

    `refuse_corners` says how the latter shows.

    Args:
        truth: The images with their boxes.
        where: The file, for the message.
        expected: How boxes must be written, for the message.

    Raises:
        DataError: Boxes are of another kind.
    """
    edges, sizes = truth.boxes.astype(np.float64), truth.sizes[truth.places]
    refuse_corners(_sides(edges), sizes, truth.areas, where, expected)


def check_found(numbers: Array, found: FoundTable, truth: TruthTable, where: str) -> None:
    """Reject detected boxes that are normalised, or hit more objects if read by their corners.

    Where not all of them could be corners, these must hit more than twice as many.

    Args:
        numbers: Those of each box, ``n x 4``, as in the file.
        found: The detections.
        truth: The images with their objects.
        where: The file, for the message.

    Raises:
        DataError: Boxes are of another kind.
    """
    refuse_normalised(numbers, where)
    margin = 1 if bool(_within(numbers, truth.sizes[found.places]).all()) else 2
    _refuse(found, numbers, truth, margin, f"bbox in {where} were [left, top, right, bottom]; {EXPECTED}")


def check_detected(detections: FoundLike, dataset: TruthLike) -> None:
    """Reject what a detector found if its boxes are normalised, or hit far more objects if read by their sides.

    Args:
        detections: What was found in each image.
        dataset: The images with their objects.

    Raises:
        MetricError: Boxes are of another kind.
    """
    found, truth = FoundTable.of(detections), TruthTable.of(dataset)
    edges = found.boxes.astype(np.float64)
    try:
        refuse_normalised(edges, "the detector", EDGES)
        _refuse(found, _edges(edges), truth, 2, f"the detector's boxes were [left, top, width, height]; {EDGES}")
    except DataError as error:
        raise MetricError(str(error)) from error


def _refuse(found: FoundTable, other: Array, truth: TruthTable, margin: int, what: str) -> None:
    """Reject detections of which more, by a factor, and half of the objects, are right with other boxes."""
    objects, fewer = len(truth.labels), _hits(found, truth)
    if margin * fewer >= objects:
        return
    more = _hits(replace(found, boxes=other), truth)
    if more > margin * fewer and 2 * more >= objects:
        raise DataError(f"{fewer} detections hit an object, and {more} would if {what}")


def _hits(found: FoundTable, truth: TruthTable) -> int:
    """How many detections hit an object by COCO's definition at an IoU of 0.5."""
    return int(match(found, truth, "coco").hits.sum())


def refuse_corners(numbers: Array, sizes: Array, areas: Array, where: str, expected: str = EXPECTED) -> None:
    """Reject boxes that are normalised, or most likely written by their corners.

    Corners are where each could be, and half of them reach beyond their images if read by their sides; or where the
    areas that their file tells are those between such corners.

    Args:
        numbers: Those of each box, ``n x 4``, as in the file.
        sizes: Width and height of the image of each, ``n x 2``; 0 for unknown ones.
        areas: As the file tells them, ``n``; NaN for unknown ones.
        where: The file, for the message.
        expected: How boxes must be written, for the message.

    Raises:
        DataError: They are.
    """
    refuse_normalised(numbers, where, expected)
    if len(numbers) and bool((sizes > 0).all()) and bool(_within(numbers, sizes).all()):
        beyond = np.asarray((numbers[:, :2] + numbers[:, 2:] > sizes + SLACK).any(1))
        if 2 * int(beyond.sum()) >= len(numbers):
            raise DataError(
                f"{where}: {int(beyond.sum())} of {len(numbers)} boxes reach beyond their images, and none would as"
                f" [left, top, right, bottom]; {expected}"
            )
    known = areas > 0
    products = numbers[:, 2:].prod(1), (numbers[:, 2:] - numbers[:, :2]).prod(1)
    of_sides, of_corners = ((np.abs(each - areas) <= 1e-3 * areas)[known] for each in products)
    if known.any() and of_corners.all() and not of_sides.all():
        raise DataError(
            f"{where}: the area of each of {int(known.sum())} objects is that of its bbox as [left, top, right,"
            f" bottom]; {expected}"
        )


def refuse_normalised(numbers: Array, where: str, expected: str = EXPECTED) -> None:
    """Reject boxes, ``n x 4`` as in a file, if all their numbers lie within [0, 1], and not only at its ends.

    Args:
        numbers: Those of each box.
        where: The file, for the message.
        expected: How boxes must be written, for the message.

    Raises:
        DataError: They do.
    """
    if bool(((numbers >= 0) & (numbers <= 1)).all()) and bool(((numbers > 0) & (numbers < 1)).any()):
        raise DataError(f"{where}: every bbox lies within [0, 1], as if divided by the image's size; {expected}")


def _edges(numbers: Array) -> Array:
    """Edges of boxes that are written as [left, top, width, height]."""
    return np.concatenate([numbers[:, :2], numbers[:, :2] + numbers[:, 2:]], axis=1)


def _sides(edges: Array) -> Array:
    """The numbers of boxes, [left, top, width, height]."""
    return np.concatenate([edges[:, :2], edges[:, 2:] - edges[:, :2]], axis=1)


def _within(edges: Array, sizes: Array) -> Booleans:
    """Which boxes have area and lie within images, of any size where it is 0."""
    ends = np.where(sizes <= 0, np.inf, sizes) + SLACK
    inside = (edges[:, :2] >= -SLACK).all(1) & (edges[:, 2:] <= ends).all(1)
    return np.asarray(inside & (edges[:, 2:] > edges[:, :2]).all(1))
