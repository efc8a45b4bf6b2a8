"""Masks of COCO's files, and how much what was found is like the objects.

Masks are pycocotools' run-length encodings, of pixels down the columns, and its own code compares them. That is C which
trusts what it is given, so all that a file says of a mask is checked first.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from metricopt_ext.detection.matching import Found, Pairs, Things
from metricopt_ext.detection.tables import Booleans, Integers
from metricopt_ext.errors import DataError
from metricopt_ext.utils.words import brief

FURTHEST = 1 << 24  # coordinate of a polygon

Mask = dict[str, Any]  # pycocotools': "size", [height, width], and "counts", bytes


def mask_of(shape: Any, where: str, height: int = 0, width: int = 0) -> Mask:
    """Return the mask that polygons, or a run-length encoding as text or numbers, tell.

    Args:
        shape: The entry's ``segmentation``.
        where: The entry, for messages.
        height: The image's, in pixels; 0 if it is not known, which does for encodings.
        width: The image's.

    Raises:
        DataError: It is neither, is cut short, is of another size than the image, or is larger than is read.
    """
    from pycocotools import mask

    if isinstance(shape, dict):
        size = _whole(shape.get("size"))
        if not (isinstance(size, list) and len(size) == 2 and all(type(each) is int and each > 0 for each in size)):
            raise DataError(f"{where} has a segmentation of the size {brief(size)}; it must be [height, width]")
        if height and width and size != [height, width]:
            raise DataError(
                f"{where} has a segmentation of the size {brief(size)}, but its image has [{height}, {width}], height"
                " and width"
            )
        runs = _runs(_whole(shape.get("counts")), where)
        if runs.min(initial=0) < 0 or int(runs.sum()) != size[0] * size[1]:
            raise DataError(
                f"{where} has a segmentation whose runs are of {int(runs.sum())} pixels, or some below 0; its size,"
                f" {size[0]} x {size[1]}, needs {size[0] * size[1]}"
            )
        made: Mask = mask.frPyObjects({"size": size, "counts": _joined(runs).tolist()}, *size)
        return made
    if not isinstance(shape, list):
        raise DataError(f"{where} has the segmentation {brief(shape)}; it must be polygons or a run-length encoding")
    if not (height and width):
        raise DataError(f"{where}'s image has no width and height, which polygons are drawn in")
    drawn: Mask = mask.merge(mask.frPyObjects(polygons_of(shape, where), height, width))
    return drawn


def polygons_of(shape: list[Any], where: str) -> list[list[float]]:
    """Return polygons, each ``[x, y, x, y, ...]``, of three corners or more; beside one such, others have no pixel.

    Raises:
        DataError: They are none.
    """
    whole = [each for each in shape if not (isinstance(each, list) and len(each) in (0, 2, 4))]
    for each in whole or shape:
        if not (isinstance(each, list) and len(each) >= 6 and len(each) % 2 == 0):
            raise DataError(f"{where} has the polygon {brief(each)}; it must be [x, y, x, y, x, y, ...] in pixels")
        if not all(type(number) in (int, float) and abs(number) <= FURTHEST for number in each):  # NaN is not
            raise DataError(f"{where} has a polygon with numbers that are not within {FURTHEST}: {brief(each)}")
    if not shape:
        raise DataError(f"{where} has no polygon in its segmentation")
    return whole


def _whole(values: Any) -> Any:
    """A list with integers in place of such floats as 5.0, which some programs write."""
    if not isinstance(values, list):
        return values
    return [int(each) if isinstance(each, float) and each.is_integer() else each for each in values]


def _joined(runs: Integers) -> Integers:
    """The same runs, with those joined that a run of no pixels parts."""
    kept = np.flatnonzero(runs)
    inside = kept % 2
    starts = np.flatnonzero(np.diff(inside, prepend=-1))
    lengths = np.add.reduceat(runs[kept], starts)
    return np.concatenate([[0], lengths]) if inside[0] else lengths


def _runs(counts: Any, where: str) -> Integers:
    """The lengths of runs of pixels, in turn outside and inside; text is pycocotools' own code for them.

    Each number is its difference from the last but one, from the fourth on, in groups of five bits, the lowest first. A
    sixth bit says that more follow, and the highest bit of the last group is the sign.
    """
    wrong = DataError(f"{where} has a segmentation with the counts {brief(counts)}; they are cut short or no encoding")
    if isinstance(counts, list):
        if not all(type(each) is int and 0 <= each < 2**32 for each in counts):
            raise wrong
        return np.array(counts, dtype=np.int64)
    if not isinstance(counts, str) or not counts.isascii():
        raise wrong
    groups = np.frombuffer(counts.encode(), dtype=np.uint8).astype(np.int64) - 48
    last = np.flatnonzero(groups & 32 == 0)
    if not len(groups) or groups.min() < 0 or groups.max() > 63 or not len(last) or last[-1] != len(groups) - 1:
        raise wrong
    first = np.concatenate([[0], last[:-1] + 1])
    sizes = last - first + 1
    if sizes.max() > 6:  # 30 bits, more than there are pixels
        raise wrong
    runs = np.add.reduceat((groups & 31) << 5 * (np.arange(len(groups)) - np.repeat(first, sizes)), first)
    runs -= np.where(groups[last] & 16, 1 << 5 * sizes, 0)
    for parity in (1, 2):
        runs[parity::2] = np.cumsum(runs[parity::2])
    return runs


def box_around(mask: Mask) -> list[float]:
    """Return the box around a mask, ``[left, top, width, height]`` in pixels."""
    from pycocotools import mask as masks

    return [float(each) for each in masks.toBbox(mask)]


def pixels_of(mask: Mask) -> float:
    """Return how many pixels a mask has."""
    from pycocotools import mask as masks

    return float(masks.area(mask))


def masks_from(pixels: Booleans) -> list[Mask]:
    """Return the masks of some pixels, ``n x h x w``."""
    from pycocotools import mask

    made: list[Mask] = [mask.encode(np.asfortranarray(each, dtype=np.uint8)) for each in pixels]
    return made


def pixels_in(masks: Sequence[Mask], height: int, width: int) -> Booleans:
    """Return the pixels of some masks of an image, ``n x height x width``."""
    from pycocotools import mask

    if not masks:
        return np.zeros((0, height, width), dtype=bool)
    read: Booleans = np.moveaxis(mask.decode(list(masks)), -1, 0).astype(bool)
    return read


def mask_pairs(found: Found, things: Things) -> Pairs:
    """Return each detection with each object of its image and class, as `matching.pairs_of` does for boxes.

    Masks overlap by their IoU; with a crowd region, by the share of the detection that lies within it.
    """
    from pycocotools import mask

    if found.shapes is None or things.shapes is None:
        raise DataError("detections and images are without masks, which kind='segm' compares")
    order = np.argsort(found.keys, kind="stable")
    rows, columns, overlaps = [], [], []
    for own in np.split(order, np.flatnonzero(np.diff(found.keys[order])) + 1) if len(order) else ():
        start, end = (int(np.searchsorted(things.keys, found.keys[own[0]], side)) for side in ("left", "right"))
        if start == end:
            continue
        objects = np.arange(start, end)
        flags = things.crowd[objects].astype(int).tolist()
        alike = mask.iou(found.shapes[own].tolist(), things.shapes[objects].tolist(), flags)
        rows.append(np.repeat(own, len(objects)))
        columns.append(np.tile(objects, len(own)))
        overlaps.append(np.asarray(alike, dtype=np.float64).reshape(-1))
    if not rows:
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64), np.zeros(0)
    return np.concatenate(rows), np.concatenate(columns), np.concatenate(overlaps)
