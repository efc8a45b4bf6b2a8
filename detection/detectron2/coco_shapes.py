"""Masks of COCO's files in the form of Detectron2's records, as its ``load_coco_json`` has them."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from metricopt_ext.detection.coco import CocoSet
from metricopt_ext.detection.records import Annotated
from metricopt_ext.detection.shapes import mask_of, polygons_of
from metricopt_ext.errors import DataError
from metricopt_ext.utils.files import parse_json

JUDGED_BY = {"id", "area", "iscrowd"}  # what pycocotools needs of an object beside its shape


@dataclass(frozen=True)
class CocoShapes:
    """What a file says of its objects beside their boxes.

    Attributes:
        fields: Of each image, as JSON, which is short and has no shape twice: for each object its ``segmentation``
            (polygons, or pycocotools' run-length encoding), if it has one.
        left_out: Why there are no masks, or not of all objects; empty if there are.
        complete: Whether pycocotools can judge by the file itself.
    """

    fields: list[str]
    left_out: str
    complete: bool

    def into(self, records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return records with the shapes, which are theirs."""
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
    """Read the masks of a set's objects. What can't be read is left out, as detectors of boxes don't need it, and told.

    Args:
        file: The file that the set was read from.
        data: The set, or a part of it.

    Returns:
        None if no object has any.
    """
    content = parse_json(file.read_bytes())
    entries, left_out = content["annotations"], ""
    fields, any_shape = list[str](), False
    for image, rows in zip(data.images, data.rows, strict=True):
        shapes = list[dict[str, Any]]()
        for row in rows:
            entry, where, own = entries[row], f"{file}: annotation {row}", dict[str, Any]()
            if entry.get("segmentation"):
                try:
                    own["segmentation"] = _mask(entry["segmentation"], where, image)
                except DataError as error:
                    left_out = left_out or str(error)
            shapes.append(own)
        any_shape |= any(shapes)
        fields.append(json.dumps(shapes))
    if not (left_out or any_shape):
        return None
    numbers = [*data.category_ids, *(image.image_id for image in data.images)]
    whole = all(each.keys() >= JUDGED_BY for each in entries) and all(type(each) is int for each in numbers)
    return CocoShapes(fields, left_out, whole and not left_out)


def _mask(shape: Any, where: str, image: Annotated) -> Any:
    if isinstance(shape, list):
        return polygons_of(shape, where)
    encoded = mask_of(shape, where, image.height, image.width)
    return {**encoded, "counts": encoded["counts"].decode()}
