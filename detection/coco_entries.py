"""The entries of COCO's JSON files: what each tells of an object or a detection, checked."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from metricopt_ext.detection.ids import Id, distinct, number
from metricopt_ext.detection.tables import LARGEST, LONGEST_SIDE, Booleans, Floats, Integers, Kind, is_finite
from metricopt_ext.errors import DataError
from metricopt_ext.utils.words import brief

FLAGS = (None, 0, 1)  # False and True are 0 and 1


class Entries:
    """Objects or detections of a file, ``n``. What is asked for is checked, and a wrong one refused by its place.

    Args:
        content: The list of entries.
        what: What each is, with its file.
    """

    def __init__(self, content: Sequence[Any], what: str) -> None:
        self.entries = [(each, f"{what} {i}") for i, each in enumerate(content)]

    def __len__(self) -> int:
        """Return n."""
        return len(self.entries)

    def distinct(self, key: str) -> dict[Id, str]:
        """Return the different ids under a key, each with where it is first found."""
        return distinct(self.entries, key)

    def places(self, key: str, places: Mapping[Id, int]) -> Integers:
        """Return what the ids under a key stand for; -1 for an unknown one."""
        return np.array([places.get(entry[key], -1) for entry, _ in self.entries], dtype=np.int64)

    def shapes(self, kind: Kind, images: Integers, ids: Sequence[Id], sizes: Integers) -> list[Any] | None:
        """Return their masks, in their images, which have these ids and sizes; None for boxes.

        One of an unknown image, -1, has None.
        """
        if kind == "bbox":
            return None
        shapes = list[Any]()
        for (entry, where), place in zip(self.entries, images.tolist(), strict=True):
            if place < 0:
                shapes.append(None)
                continue
            width, height = sizes[place].tolist()
            shapes.append(_mask(entry, where, ids[place], width, height))
        return shapes

    def boxes(self) -> Floats:
        """Return the numbers of their boxes, ``n x 4``."""
        return np.array([box_of(*each) for each in self.entries], dtype=np.float64).reshape(-1, 4)

    def extents(self, shapes: Sequence[Any] | None) -> tuple[Floats, Floats]:
        """Return the numbers of detections' boxes, ``n x 4``, and their areas, ``n``."""
        every = shapes or [None] * len(self.entries)
        found = [_extent(*entry, shape) for entry, shape in zip(self.entries, every, strict=True)]
        boxes = np.array([box for box, _ in found], dtype=np.float64).reshape(-1, 4)
        return boxes, np.array([area for _, area in found], dtype=np.float64)

    def scores(self) -> Floats:
        """Return their scores, ``n``."""
        return np.array([_score(*each) for each in self.entries], dtype=np.float64)

    def areas(self) -> Floats:
        """Return their areas, ``n``, NaN for those that are not told."""
        return np.array([area_of(entry) for entry, _ in self.entries], dtype=np.float64)

    def crowds(self, rows: Booleans) -> Booleans:
        """Return whether they are regions of several objects, ``n``; of some rows alone."""
        chosen = zip(self.entries, rows.tolist(), strict=True)
        return np.array([own and flag_of(entry, "iscrowd", where) for (entry, where), own in chosen], dtype=bool)

    def ids(self) -> list[Any]:
        """Return their own ids, ``n``; None for one without."""
        return [get(entry, "id") for entry, _ in self.entries]


def get(entry: Any, key: str) -> Any:
    """Return an entry's value under a key, None if it has none."""
    return entry.get(key) if isinstance(entry, dict) else None


def side_of(entry: Any, key: str, what: str, shown: bool) -> int:
    """Return an image's width or height in pixels, 0 if it is not said, or wrong where the image is not shown.

    Raises:
        DataError: It is wrong, and the image is shown.
    """
    value = entry.get(key)
    if value is None:
        return 0
    side = number(value)
    if type(side) is int and 1 <= side <= LONGEST_SIDE:
        return side
    if shown:
        raise DataError(f"{what} has the {key} {brief(value)}; it must be an integer from 1 to {LONGEST_SIDE}")
    return 0


def box_of(entry: Any, where: str) -> list[float]:
    """Return the numbers of a box.

    Raises:
        DataError: They are not four finite numbers, or those of another kind of box.
    """
    box, mode = get(entry, "bbox"), get(entry, "bbox_mode")
    if mode not in (None, 1, "XYWH_ABS", "BoxMode.XYWH_ABS"):
        raise DataError(f"{where} has the bbox_mode {brief(mode)}; bbox must be [left, top, width, height] in pixels")
    if not isinstance(box, list) or len(box) != 4 or not all(map(is_finite, box)):
        raise DataError(f"{where} has the bbox {brief(box)}; it must be 4 finite numbers, each at most {LARGEST:.0e}")
    return [float(each) for each in box]


def _mask(entry: Any, where: str, image_id: Id, width: int, height: int) -> Any:
    from metricopt_ext.detection.shapes import mask_of

    if not (width and height):
        raise DataError(f"{where}'s image {brief(image_id)} has no width and height, which masks need")
    if get(entry, "segmentation") is None:
        raise DataError(
            f"{where} has no segmentation, which --iou-type segm (kind='segm') and metric.name=segm/AP50 compare; name"
            " a file with masks, or compare boxes"
        )
    return mask_of(entry["segmentation"], where, height, width)


def _extent(entry: Any, where: str, mask: Any) -> tuple[list[float], float]:
    """A detection's box and area; without a box, those of its mask, as pycocotools' loadRes has them."""
    if mask is not None and get(entry, "bbox") in (None, []):
        from metricopt_ext.detection.shapes import box_around, pixels_of

        return box_around(mask), pixels_of(mask)
    box = box_of(entry, where)
    return box, box[2] * box[3]


def area_of(entry: Any) -> float:
    """Return the area that an annotation tells, NaN if it tells none."""
    area = get(entry, "area")
    return float(area) if is_finite(area) else math.nan


def _score(entry: Any, where: str) -> float:
    score = get(entry, "score")
    if not is_finite(score):
        raise DataError(f"{where} has the score {brief(score)}; it must be a finite number")
    return float(score)


def flag_of(entry: Any, key: str, where: str) -> bool:
    """Return an annotation's flag, False if it is not said.

    Raises:
        DataError: It is neither 0 nor 1.
    """
    value = get(entry, key)
    if value not in FLAGS:
        raise DataError(f"{where} has {brief(value)} as {key}; it must be 0 or 1")
    return bool(value)
