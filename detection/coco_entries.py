"""The entries of COCO's JSON files: what each tells of an object or a detection, checked."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from metricopt_ext.detection.ids import Id, distinct, number
from metricopt_ext.detection.tables import LARGEST, LONGEST_SIDE, Booleans, Floats, Integers, Kind, is_finite
from metricopt_ext.errors import DataError
from metricopt_ext.utils.words import brief

FLAGS = {None: False, 0: False, 1: True, "": False, "0": False, "1": True}  # False and True are 0 and 1


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

    def named(self) -> Booleans:
        """Return which have a class's name, ``n``."""
        return np.array([get(entry, "category_name") is not None for entry, _ in self.entries], dtype=bool)

    def called(self, row: int) -> str:
        """Return the name or the id of one's class."""
        entry, _ = self.entries[row]
        return str(entry.get("category_name") or entry.get("category_id"))

    def distinct(self, key: str, rows: Booleans | None = None) -> dict[Id, str]:
        """Return the different ids under a key, of all or of some rows, each with where it is first found."""
        return distinct(self._some(rows), key)

    def places(self, key: str, places: Mapping[Id, int], rows: Booleans | None = None) -> Integers:
        """Return what the ids under a key stand for, of all or of some rows; -1 for an unknown one."""
        return np.array([places.get(entry[key], -1) for entry, _ in self._some(rows)], dtype=np.int64)

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

    def extents(self, kind: Kind, shapes: Sequence[Any] | None) -> tuple[Floats, Floats]:
        """Return the numbers of detections' boxes, ``n x 4``, and their areas, ``n``."""
        every = shapes or [None] * len(self.entries)
        found = [_extent(*entry, kind, shape) for entry, shape in zip(self.entries, every, strict=True)]
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

    def _some(self, rows: Booleans | None) -> Sequence[tuple[Any, str]]:
        return self.entries if rows is None else [self.entries[i] for i in np.flatnonzero(rows)]


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
    side = number(value) if type(value) in (int, float, str) else value
    if type(side) is int and 1 <= side <= LONGEST_SIDE:
        return side
    if shown:
        raise DataError(f"{what} has the {key} {brief(value)}; it must be an integer from 1 to {LONGEST_SIDE}")
    return 0


def box_of(entry: Any, where: str) -> list[float]:
    """Return the numbers of a box; of an object with polygons alone, those of the box around them.

    Raises:
        DataError: They are not four finite numbers, or those of another kind of box.
    """
    box, mode, shape = (get(entry, key) for key in ("bbox", "bbox_mode", "segmentation"))
    if mode not in (None, 1, "XYWH_ABS", "BoxMode.XYWH_ABS"):
        raise DataError(f"{where} has the bbox_mode {brief(mode)}; bbox must be [left, top, width, height] in pixels")
    if box in (None, []) and shape:
        return _around(shape, where)
    if not isinstance(box, list) or len(box) != 4 or not all(map(is_finite, box)):
        rotated = "; rotated boxes are of another kind" if isinstance(box, list) and len(box) == 5 else ""
        raise DataError(
            f"{where} has the bbox {brief(box)}; it must be 4 finite numbers, each at most {LARGEST:.0e}{rotated}"
        )
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


def _extent(entry: Any, where: str, kind: Kind, shape: Any) -> tuple[list[float], float]:
    """A detection's box and area; without a box, those of its mask, as pycocotools' loadRes has them."""
    if get(entry, "bbox") not in (None, []):
        box = box_of(entry, where)
        return box, box[2] * box[3]
    from metricopt_ext.detection.shapes import box_around, mask_of, pixels_of

    told = get(entry, "segmentation")
    if kind == "segm" or (kind == "bbox" and isinstance(told, dict)):
        mask = shape if kind == "segm" else mask_of(told, where)
        return box_around(mask), pixels_of(mask)
    box = box_of(entry, where)
    return box, box[2] * box[3]


def area_of(entry: Any) -> float:
    """Return the area that an annotation tells, NaN if it tells none."""
    area = get(entry, "area")
    return float(area) if is_finite(area) else math.nan


def _around(polygons: Any, where: str) -> list[float]:
    """The box of polygons, each ``[x, y, x, y, ...]``, or of a mask."""
    if isinstance(polygons, dict):
        from metricopt_ext.detection.shapes import box_around, mask_of

        return box_around(mask_of(polygons, where))
    whole = [each for each in polygons if isinstance(each, list)] if isinstance(polygons, list) else []
    numbers = [coordinate for each in whole for coordinate in each]
    if len(whole) != len(polygons) or any(len(each) % 2 for each in whole) or not all(map(is_finite, numbers)):
        raise DataError(f"{where} has no bbox, and its segmentation is no list of polygons; AP50 is of boxes")
    x, y = ([coordinate for each in whole for coordinate in each[axis::2]] for axis in (0, 1))
    if not x:
        raise DataError(f"{where} has no bbox, and no polygon in its segmentation; AP50 is of boxes")
    return [float(min(x)), float(min(y)), float(max(x) - min(x)), float(max(y) - min(y))]


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
    if isinstance(value, list | dict) or value not in FLAGS:
        raise DataError(f"{where} has {brief(value)} as {key}; it must be 0 or 1")
    return FLAGS[value]
