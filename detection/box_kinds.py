"""Which four numbers a box is written by: boxes of another kind than the expected are refused, where it shows."""

import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from metricopt_ext.detection.ap50 import match
from metricopt_ext.detection.records import Annotated, Detections, DetectionSet
from metricopt_ext.errors import DataError, MetricError

SLACK = 1.0  # pixels that a box may reach beyond its image by rounding
EXPECTED = "a bbox must be [left, top, width, height] in pixels"


def hits(found: Sequence[Detections], truth: DetectionSet) -> int:
    """Return how many detections hit an object by COCO's definition at an IoU of 0.5."""
    return int(match(found, truth, "coco").hits.sum())


def check_annotated(images: Sequence[Annotated], where: str, expected: str = EXPECTED) -> None:
    """Reject annotated boxes that are normalised, or read from the corners of boxes as if from their sides.

    The latter shows where each box could have been written by its corners, and half of them reach beyond their images.

    Args:
        images: The images with their boxes.
        where: The file, for the message.
        expected: How boxes must be written, for the message.

    Raises:
        DataError: Boxes are of another kind.
    """
    edges, sizes = _all([image.boxes for image in images]), _sizes(images)
    sizes = sizes.repeat_interleave(torch.tensor([len(image.boxes) for image in images]), dim=0)
    corners = torch.cat([edges[:, :2], edges[:, 2:] - edges[:, :2]], dim=1)  # the numbers in the file
    refuse_normalised(corners, where, expected)
    refuse_corners(corners, sizes, where, expected=expected)


def check_found(
    numbers: Tensor, places: Tensor, found_in: Callable[[Tensor], list[Detections]], truth: DetectionSet, where: str
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
    sizes = _sizes(truth.images)[places]
    objects = sum(len(image.labels) for image in truth.images)
    fewer = hits(found_in(_from_sides(numbers)), truth)
    turned = numbers[:, [1, 0, 3, 2]]
    kinds = {
        "[left, top, right, bottom]": (numbers, 1),
        "[centre x, centre y, width, height]": (_from_centres(numbers), 2),
        "[top, left, bottom, right]": (turned, 1),
        "[top, left, height, width]": (_from_sides(turned), 2),
        "in percent of the image": (_from_sides(numbers * sizes.repeat(1, 2) / 100), 2),
    }
    better = [
        (more, kind, edges)
        for kind, (edges, margin) in kinds.items()
        if margin * fewer < objects and (more := hits(found_in(edges), truth)) > margin * fewer
    ]
    if better:
        more, kind, edges = max(better, key=lambda each: each[0])
        said = f"{where}: {fewer} detections hit an object, and {more} would if bbox were {kind}; {EXPECTED}"
        if 2 * more >= objects and bool(_within(edges, sizes).all()):
            raise DataError(said)
        if 5 * more >= objects:  # fewer are hit by chance, however boxes are read
            warnings.warn(said, stacklevel=3)


def check_detected(found: Sequence[Detections], truth: DetectionSet) -> None:
    """Reject what a detector found if its boxes are normalised, or hit far more objects if read by their sides.

    Args:
        found: What was found in each image.
        truth: The images with their objects.

    Raises:
        MetricError: Boxes are of another kind.
    """
    expected = "boxes must be [left, top, right, bottom] in pixels"
    edges = _all([each.boxes for each in found])
    try:
        refuse_normalised(edges, "the detector", expected)
    except DataError as error:
        raise MetricError(str(error)) from error
    fewer, objects = hits(found, truth), sum(len(image.labels) for image in truth.images)
    counts = [len(each) for each in found]
    for kind, other in (
        ("[left, top, width, height]", _from_sides(edges)),
        ("[centre x, centre y, width, height]", _from_centres(edges)),
    ):
        if 2 * fewer < objects:
            parts = zip(found, other.split(counts), strict=True)
            more = hits([Detections(boxes, each.scores, each.labels) for each, boxes in parts], truth)
            if more > 2 * fewer and 2 * more >= objects:
                raise MetricError(
                    f"{fewer} detections hit an object, and {more} would if the detector's boxes were {kind};"
                    f" {expected}"
                )


def refuse_corners(
    numbers: Tensor, sizes: Tensor, where: str, areas: Tensor | None = None, expected: str = EXPECTED
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
        beyond = (ends > sizes + SLACK).any(1)
        if 2 * int(beyond.sum()) >= len(numbers):
            raise DataError(
                f"{where}: {int(beyond.sum())} of {len(numbers)} boxes reach beyond their images, and none would as"
                f" [left, top, right, bottom]; {expected}"
            )
    if areas is not None:
        sides, between = numbers[:, 2:].prod(1), (numbers[:, 2:] - numbers[:, :2]).prod(1)
        known = areas > 0
        of_sides, of_corners = (((area - areas).abs() <= 1e-3 * areas)[known] for area in (sides, between))
        if known.any() and of_corners.all() and not of_sides.all():
            raise DataError(
                f"{where}: the area of each of {int(known.sum())} objects is that of its bbox as [left, top, right,"
                f" bottom]; {expected}"
            )


def refuse_normalised(numbers: Tensor, where: str, expected: str = EXPECTED) -> None:
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


def _from_sides(numbers: Tensor) -> Tensor:
    """Edges of boxes that are written as [left, top, width, height]."""
    return torch.cat([numbers[:, :2], numbers[:, :2] + numbers[:, 2:]], dim=1)


def _from_centres(numbers: Tensor) -> Tensor:
    """Edges of boxes that are written as [centre x, centre y, width, height]."""
    return _from_sides(torch.cat([numbers[:, :2] - numbers[:, 2:] / 2, numbers[:, 2:]], dim=1))


def _within(edges: Tensor, sizes: Tensor) -> Tensor:
    """Which boxes have area and lie within images, of any size where it is 0."""
    ends = sizes.masked_fill(sizes <= 0, torch.inf) + SLACK
    inside = (edges[:, :2] >= -SLACK).all(1) & (edges[:, 2:] <= ends).all(1)
    return inside & (edges[:, 2:] > edges[:, :2]).all(1)


def _sizes(images: Sequence[Annotated]) -> Tensor:
    """Widths and heights, ``n x 2``."""
    return torch.tensor([(image.width, image.height) for image in images], dtype=torch.float64).reshape(-1, 2)


def _all(boxes: Sequence[Tensor]) -> Tensor:
    return torch.cat([each.double() for each in boxes] or [torch.zeros(0, 4, dtype=torch.float64)])
