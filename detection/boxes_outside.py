"""Boxes that reach beyond their images: an evaluation counts them, and a training clips them or leaves them out."""

import warnings
from collections.abc import Sequence

import numpy as np

from metricopt_ext.detection.tables import Array, Integers, TruthTable
from metricopt_ext.utils.words import brief

# Pixels that a box may reach beyond its image unnoticed: files that round to two decimals are off by as much.
ROUNDING = 0.01
NAMED = 5  # files listed in a warning


def warn_of_boxes_outside(where: object, truth: TruthTable, names: Sequence[str]) -> None:
    """Warn, once for a set, of boxes that an evaluation counts and that a training clips or leaves out.

    Args:
        where: The set, for the message.
        truth: Its images.
        names: How to call each of them.
    """
    warn_of_boxes(where, truth.boxes, truth.sizes[truth.places], names, truth.places)


def warn_of_boxes(
    where: object, boxes: Array, sizes: Integers, names: Sequence[str], places: Integers | None = None
) -> None:
    """Warn of boxes as `warn_of_boxes_outside` does.

    Args:
        where: The set, for the message.
        boxes: All boxes of the set, ``m x 4``.
        sizes: Width and height of the image of each, ``m x 2``; 0 for an unknown one.
        names: How to call each image.
        places: The image of each box, ``m``; by default one of its own.
    """
    ends = np.tile(np.where(sizes == 0, np.inf, sizes), 2)
    cut = np.minimum(np.maximum(boxes.astype(np.float64), 0), ends)
    flat, outside = (~(each[:, 2:] > each[:, :2]).all(1) for each in (boxes, cut))
    partly = (np.abs(cut - boxes) > ROUNDING).any(1) & ~outside
    kinds = (
        (flat, "without area, left out of training"),
        (outside & ~flat, "outside the image, left out of training"),
        (partly, "partly outside the image, clipped for training"),
    )
    told = [(np.flatnonzero(rows), what) for rows, what in kinds]
    places = np.arange(len(boxes)) if places is None else places
    said = [f"{len(rows)} {what} ({shown_files([names[i] for i in places[rows]])})" for rows, what in told if len(rows)]
    if said:
        warnings.warn(f"boxes in {where}: {'; '.join(said)}; an evaluation counts them as they are", stacklevel=3)


def shown_files(names: Sequence[str]) -> str:
    """Return the names of a few files for a warning, each once, and how many more there are."""
    distinct = list(dict.fromkeys(names))
    shown = [name if len(name) <= 80 and name.isprintable() else brief(name) for name in distinct[:NAMED]]
    return ", ".join(shown) + (f" and {len(distinct) - NAMED} more files" if len(distinct) > NAMED else "")
