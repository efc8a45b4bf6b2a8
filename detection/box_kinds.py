"""Which four numbers a box is written by: boxes of another kind than the expected are refused, where it shows."""

import warnings
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from metricopt_ext.detection.ap50 import IOU, match
from metricopt_ext.detection.matching import Found, Things, pairs_of
from metricopt_ext.detection.tables import Array, Booleans, FoundLike, FoundTable, Integers, TruthLike, TruthTable
from metricopt_ext.errors import DataError, MetricError

SLACK = 1.0  # pixels that a box may reach beyond its image by rounding
EXPECTED = "a bbox must be [left, top, width, height] in pixels"


def hits(found: FoundLike, truth: TruthLike) -> int:
    """Return how many detections hit an object by COCO's definition at an IoU of 0.5."""
    return int(match(found, truth, "coco").hits.sum())


def check_annotated(truth: TruthTable, where: str, expected: str = EXPECTED) -> None:
    """Reject annotated boxes that are normalised, or read from the corners of boxes as if from their sides.

    The latter shows where each box could have been written by its corners, and half of them reach beyond their images.

    Args:
        truth: The images with their boxes.
        where: The file, for the message.
        expected: How boxes must be written, for the message.

    Raises:
        DataError: Boxes are of another kind.
    """
    edges, sizes = truth.boxes.astype(np.float64), truth.sizes[truth.places]
    corners = np.concatenate([edges[:, :2], edges[:, 2:] - edges[:, :2]], axis=1)  # the numbers in the file
    refuse_normalised(corners, where, expected)
    refuse_corners(corners, sizes, where, expected=expected)


def check_found(
    numbers: Array,
    places: Integers,
    found_in: Callable[[Array], FoundTable],
    truth: TruthTable,
    where: str,
) -> None:
    """Reject detected boxes that are normalised, or hit more objects if read as of another kind.

    One warning says so where not all of them could be of the other kind, or too few objects are hit to be sure.

    Args:
        numbers: Those of each box, ``n x 4``, as in the file.
        places: The image of each, ``n``.
        found_in: Returns the detections from the edges of their boxes, ``n x 4``.
        truth: The images with their objects.
        where: The file, for the message.

    Raises:
        DataError: Boxes are of another kind.
    """
    refuse_normalised(numbers, where)
    sizes, things = truth.sizes[places], Things.of(truth, "coco")
    objects = len(truth.labels)
    fewer = hits(found_in(_from_sides(numbers)), truth)
    turned = numbers[:, [1, 0, 3, 2]]
    kinds = {
        "[left, top, right, bottom]": (numbers, 1),
        "[centre x, centre y, width, height]": (_from_centres(numbers), 2),
        "[top, left, bottom, right]": (turned, 1),
        "[top, left, height, width]": (_from_sides(turned), 2),
        "in percent of the image": (_from_sides(numbers * np.tile(sizes, 2) / 100), 2),
    }
    better = [
        (more, kind, edges)
        for kind, (edges, margin) in kinds.items()
        if margin * fewer < objects
        and margin * fewer < _most(found_in(edges), things)
        and (more := hits(found_in(edges), truth)) > margin * fewer
    ]
    if better:
        more, kind, edges = max(better, key=lambda each: each[0])
        said = f"{where}: {fewer} detections hit an object, and {more} would if bbox were {kind}; {EXPECTED}"
        if 2 * more >= objects and bool(_within(edges, sizes).all()):
            raise DataError(said)
        if 5 * more >= objects:  # fewer are hit by chance, however boxes are read
            warnings.warn(said, stacklevel=3)


def check_detected(detections: FoundLike, dataset: TruthLike) -> None:
    """Reject what a detector found if its boxes are normalised, or hit far more objects if read by their sides.

    Args:
        detections: What was found in each image.
        dataset: The images with their objects.

    Raises:
        MetricError: Boxes are of another kind.
    """
    expected = "boxes must be [left, top, right, bottom] in pixels"
    found, truth = FoundTable.of(detections), TruthTable.of(dataset)
    edges = found.boxes.astype(np.float64)
    try:
        refuse_normalised(edges, "the detector", expected)
    except DataError as error:
        raise MetricError(str(error)) from error
    fewer, objects = hits(found, truth), len(truth.labels)
    for kind, other in (
        ("[left, top, width, height]", _from_sides(edges)),
        ("[centre x, centre y, width, height]", _from_centres(edges)),
    ):
        if 2 * fewer < objects:
            more = hits(replace(found, boxes=other), truth)
            if more > 2 * fewer and 2 * more >= objects:
                raise MetricError(
                    f"{fewer} detections hit an object, and {more} would if the detector's boxes were {kind};"
                    f" {expected}"
                )


def refuse_corners(
    numbers: Array, sizes: Array, where: str, areas: Array | None = None, expected: str = EXPECTED
) -> None:
    """Reject boxes that are most likely written by their corners.

    They are where each could be, and half of them reach beyond their images if read by their sides; or where the areas
    that their file tells are those between such corners.

    Args:
        numbers: Those of each box, ``n x 4``, as in the file.
        sizes: Width and height of the image of each, ``n x 2``; 0 for unknown ones.
        where: The file, for the message.
        areas: As the file tells them, ``n``; NaN for unknown ones.
        expected: How boxes must be written, for the message.

    Raises:
        DataError: They are.
    """
    ends = numbers[:, :2] + numbers[:, 2:]
    if len(numbers) and bool((sizes > 0).all()) and bool(_within(numbers, sizes).all()):
        beyond = np.asarray((ends > sizes + SLACK).any(1))
        if 2 * int(beyond.sum()) >= len(numbers):
            raise DataError(
                f"{where}: {int(beyond.sum())} of {len(numbers)} boxes reach beyond their images, and none would as"
                f" [left, top, right, bottom]; {expected}"
            )
    if areas is not None:
        sides, between = numbers[:, 2:].prod(1), (numbers[:, 2:] - numbers[:, :2]).prod(1)
        known = areas > 0
        of_sides, of_corners = ((np.abs(area - areas) <= 1e-3 * areas)[known] for area in (sides, between))
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


def _most(table: FoundTable, things: Things) -> int:
    """The number of objects that some detection overlaps by half: no more can be hit."""
    classes = len(things.counts[0]) if len(things.counts) else 1
    found = Found(table.places * classes + table.labels, table.boxes, table.areas, None)
    _, columns, overlaps = pairs_of(found, things, pixel=0.0)
    return len(np.unique(columns[overlaps >= IOU]))


def _from_sides(numbers: Array) -> Array:
    """Edges of boxes that are written as [left, top, width, height]."""
    return np.concatenate([numbers[:, :2], numbers[:, :2] + numbers[:, 2:]], axis=1)


def _from_centres(numbers: Array) -> Array:
    """Edges of boxes that are written as [centre x, centre y, width, height]."""
    return _from_sides(np.concatenate([numbers[:, :2] - numbers[:, 2:] / 2, numbers[:, 2:]], axis=1))


def _within(edges: Array, sizes: Array) -> Booleans:
    """Which boxes have area and lie within images, of any size where it is 0."""
    ends = np.where(sizes <= 0, np.inf, sizes) + SLACK
    inside = (edges[:, :2] >= -SLACK).all(1) & (edges[:, 2:] <= ends).all(1)
    return np.asarray(inside & (edges[:, 2:] > edges[:, :2]).all(1))
