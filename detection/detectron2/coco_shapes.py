"""Masks and keypoints of COCO's files in the form of Detectron2's records, as its ``load_coco_json`` has them."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from metricopt_ext.detection.coco import CocoSet
from metricopt_ext.detection.records import Annotated
from metricopt_ext.detection.shapes import mask_of, polygons_of
from metricopt_ext.detection.tables import is_finite
from metricopt_ext.errors import DataError
from metricopt_ext.utils.files import parse_json
from metricopt_ext.utils.words import brief

JUDGED_BY = {"id", "area", "iscrowd"}  # what pycocotools needs of an object beside its shape
SIDES = ("left", "right")


@dataclass(frozen=True)
class CocoShapes:
    """What a file says of its objects beside their boxes.

    Attributes:
        fields: Of each image, as JSON, which is short and has no shape twice: for each object its ``segmentation``
            (polygons, or pycocotools' run-length encoding) and ``keypoints``, those that it has.
        metadata: ``keypoint_names`` and ``keypoint_flip_map``, if its categories name keypoints.
        left_out: Why there are no masks or no keypoints, or not of all objects, by the field's name.
        complete: Whether pycocotools can judge by the file itself.
    """

    fields: list[str]
    metadata: dict[str, Any] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    complete: bool = False

    def into(self, records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return records with the shapes, which are theirs: Detectron2's evaluator moves keypoints in place."""
        return [
            {
                **record,
                "annotations": [
                    {**each, **own} for each, own in zip(record["annotations"], json.loads(shapes), strict=True)
                ],
            }
            for record, shapes in zip(records, self.fields, strict=True)
        ]


def read_shapes(file: Path, data: CocoSet) -> CocoShapes | None:
    """Read the masks and keypoints of a set's objects.

    Keypoints are counted from the corner of the image, as Detectron2 has them: half a pixel more than in the file. A
    keypoint's other side is known by its name (``left_eye`` and ``right_eye``). What can't be read is left out, as
    detectors of boxes don't need it, and remembered.

    Args:
        file: The file that the set was read from.
        data: The set, or a part of it.

    Returns:
        None if no object has any.
    """
    content = parse_json(Path(file).read_bytes())
    entries, left_out, metadata = content["annotations"], dict[str, str](), dict[str, Any]()
    try:
        metadata = _keypoints_of(content["categories"])
    except DataError as error:
        left_out["keypoints"] = f"{file}: {error}"
    count = len(metadata.get("keypoint_names", ()))
    fields, any_shape = list[str](), False
    for image, rows in zip(data.images, data.rows, strict=True):
        shapes = list[dict[str, Any]]()
        for row in rows:
            entry, where, own = entries[row], f"{file}: annotation {row}", dict[str, Any]()
            for name in ("segmentation", "keypoints"):
                if not entry.get(name):
                    continue
                try:
                    moved = name == "keypoints"
                    own[name] = _moved(entry[name], where, count) if moved else _mask(entry[name], where, image)
                except DataError as error:
                    left_out.setdefault(name, str(error))
            shapes.append(own)
        any_shape |= any(shapes)
        fields.append(json.dumps(shapes))
    if not (left_out or any_shape):
        return None
    numbers = [*data.category_ids, *(image.image_id for image in data.images)]
    whole = all(each.keys() >= JUDGED_BY for each in entries) and all(type(each) is int for each in numbers)
    return CocoShapes(fields, metadata, left_out, whole and not left_out)


def _mask(shape: Any, where: str, image: Annotated) -> Any:
    if isinstance(shape, list):
        return polygons_of(shape, where)
    encoded = mask_of(shape, where, image.height, image.width)
    return {**encoded, "counts": encoded["counts"].decode()}


def _moved(numbers: Any, where: str, count: int) -> list[float]:
    if not count:
        raise DataError(f"{where} has keypoints, which no category names under 'keypoints'")
    if not isinstance(numbers, list) or not all(map(is_finite, numbers)) or len(numbers) != 3 * count:
        raise DataError(
            f"{where} has the keypoints {brief(numbers)}; they must be [x, y, flag, ...] of the {count} that are named"
        )
    return [each + 0.5 if place % 3 < 2 else each for place, each in enumerate(numbers)]


def _keypoints_of(categories: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The names of keypoints, and the pairs that a flip exchanges."""
    told = [each["keypoints"] for each in categories if each.get("keypoints")]
    if not told:
        return {}
    (names, *others) = told
    if not isinstance(names, list) or not all(isinstance(each, str) for each in names) or len({*names}) < len(names):
        raise DataError(f"a category has the keypoints {brief(names)}; they must be different names")
    if any(each != names for each in others):
        raise DataError("categories name different keypoints, of which Detectron2 takes one list")
    flips = list[tuple[str, str]]()
    for name in names:
        if not any(side in name.lower() for side in SIDES):
            continue
        other = _exchanged(name)
        if other not in names:
            raise DataError(
                f"the keypoint {name!r} has no {other!r} beside it, so that it is unknown what a flip makes it"
            )
        if "left" in name.lower():
            flips.append((name, other))
    return {"keypoint_names": names, "keypoint_flip_map": flips}


def _exchanged(name: str) -> str:
    for first, second in (SIDES, SIDES[::-1]):
        for written in (str.lower, str.upper, str.capitalize):
            if written(first) in name:
                return name.replace(written(first), written(second), 1)
    return name
