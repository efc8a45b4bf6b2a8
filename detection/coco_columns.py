"""COCO's JSON files read in columns, without an object for each entry: a tenth of the time, by msgspec.

This is for files of boxes whose entries tell what they usually do. All else is left to `coco_entries.Objects`, which
knows how to read it, or what to say of it: names in place of ids, other types of numbers, an unknown key, NaN.
"""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import msgspec
import numpy as np
from msgspec import Raw, Struct
from typing_extensions import override

from metricopt_ext.detection.coco_entries import Entries
from metricopt_ext.detection.ids import Id
from metricopt_ext.detection.tables import LARGEST, Booleans, Floats, Integers, Kind
from metricopt_ext.utils.files import JSON_LEVELS, parse_json

Box = tuple[float, float, float, float]
FLAGS = (0, 1, None)  # False and True are the first two
FEW = JSON_LEVELS // 2  # brackets that can't be nested too deeply


class _Entry(Struct, forbid_unknown_fields=True, gc=False):
    image_id: int | str
    category_id: int | str
    bbox: Box
    id: int | str | None = None
    area: float | None = None
    iscrowd: int | bool | None = None
    segmentation: Raw = Raw()
    keypoints: Raw = Raw()
    num_keypoints: int | None = None


class _Annotation(_Entry):
    ignore: int | bool | None = None


class _Detection(_Entry, kw_only=True):
    score: float
    file_name: str | None = None


class Columns(Entries):
    """Entries of a file, all of which tell ids and a box; see `Entries`.

    Args:
        rows: The entries.
        what: What each is, with its file.
    """

    def __init__(self, rows: Sequence[Any], what: str) -> None:
        self.what = what
        self._ids = {key: [getattr(row, key) for row in rows] for key in ("image_id", "category_id", "id")}
        self._boxes = np.fromiter(chain.from_iterable(row.bbox for row in rows), np.float64, 4 * len(rows))
        self._scores = np.array([getattr(row, "score", 0.0) for row in rows], dtype=np.float64)
        self._areas = np.array([row.area for row in rows], dtype=np.float64)  # NaN for None
        self._crowds = np.array([row.iscrowd for row in rows], dtype=bool)

    def usual(self) -> bool:
        """Whether all numbers are within their bounds."""
        numbers = (self._boxes, self._scores)
        return all(bool((np.abs(each) <= LARGEST).all()) for each in numbers)

    @override
    def __len__(self) -> int:
        return len(self._scores)

    @override
    def named(self) -> Booleans:
        return np.zeros(len(self), dtype=bool)

    @override
    def called(self, row: int) -> str:
        return str(self._ids["category_id"][row])

    @override
    def distinct(self, key: str, rows: Booleans | None = None) -> dict[Id, str]:
        ids = self._some(key, rows)
        first = dict(zip(reversed(ids), range(len(ids) - 1, -1, -1), strict=True))  # the first comes last, and stays
        return {value: f"{self.what} {first[value]}" for value in dict.fromkeys(ids)}

    @override
    def places(self, key: str, places: Mapping[Id, int], rows: Booleans | None = None) -> Integers:
        ids = self._some(key, rows)
        return np.fromiter((places.get(value, -1) for value in ids), np.int64, len(ids))

    @override
    def shapes(self, kind: Kind, images: Integers, ids: Sequence[Id], sizes: Integers) -> None:
        return None

    @override
    def boxes(self) -> Floats:
        return self._boxes.reshape(-1, 4)

    @override
    def extents(self, kind: Kind, shapes: Sequence[Any] | None) -> tuple[Floats, Floats]:
        boxes = self.boxes()
        return boxes, boxes[:, 2] * boxes[:, 3]

    @override
    def scores(self) -> Floats:
        return self._scores

    @override
    def areas(self) -> Floats:
        return np.where(np.abs(self._areas) <= LARGEST, self._areas, np.nan)

    @override
    def crowds(self, rows: Booleans) -> Booleans:
        return self._crowds & rows

    @override
    def ids(self) -> list[Any]:
        return self._ids["id"]

    def _some(self, key: str, rows: Booleans | None) -> list[Id]:
        """The ids of all or of no entries: the rows are those with a name or those without."""
        return self._ids[key] if rows is None or rows.all() else []


def detections_of(data: bytes, what: str) -> Columns | None:
    """Return the detections of a file of results; None if they are not as usual."""
    try:
        rows = msgspec.json.decode(data, type=list[_Detection])
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):  # the last, of a key
        return None
    columns = Columns(rows, what) if rows and _is_shallow(data, rows, 1) else None
    return columns if columns is not None and columns.usual() else None


def annotations_of(data: bytes, what: str) -> tuple[dict[str, Any], Columns] | None:
    """Return the annotations of a file, and what it holds besides; None if they are not as usual."""
    try:
        parts = msgspec.json.decode(data, type=dict[str, Raw])
        listed = parts.pop("annotations", Raw(b"null"))
        rows = msgspec.json.decode(listed, type=list[_Annotation])
        # One level is around them all.
        others = {key: parse_json(b"[" + bytes(part) + b"]")[0] for key, part in parts.items()}
    except (msgspec.MsgspecError, RecursionError, ValueError):
        return None
    if not rows or not _is_shallow(bytes(listed), rows, 1) or any(row.iscrowd not in FLAGS for row in rows):
        return None
    columns = Columns(rows, what)
    return (others, columns) if columns.usual() else None


def _is_shallow(data: bytes, rows: Sequence[Any], around: int) -> bool:
    """Whether nothing is nested more deeply than JSON may be, as what is read in passing could be."""
    if data.count(b"[") + data.count(b"{") == around + 2 * len(rows):  # of the list, and of each entry and its box
        return True
    inner = (bytes(each) for row in rows for each in (row.segmentation, row.keypoints))
    deep = [each for each in inner if each.count(b"[") + each.count(b"{") > FEW]
    try:
        for each in deep:
            parse_json(b"[[[" + each + b"]]]")
    except ValueError:
        return False
    return True
