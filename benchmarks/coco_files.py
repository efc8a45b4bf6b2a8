"""Annotated images and detections in COCO's JSON formats, written for its own tools, and read back."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from metricopt_ext.detection.coco import CocoSet
from metricopt_ext.detection.coco_tables import read_found
from metricopt_ext.detection.records import Detections, DetectionSet
from metricopt_ext.detection.tables import Kind
from metricopt_ext.utils.files import write_atomically


def read_detections(
    results: str | Path,
    dataset: DetectionSet,
    *,
    kind: Kind = "bbox",
) -> list[Detections]:
    """Read COCO's results format: a list of ``{image_id, category_id, bbox: [x, y, width, height], score}``.

    An image is identified by its ``image_id`` in the set: VOC's are strings, the file names without suffix. A class is
    identified by its ``category_id``, which counts the classes from 1 in sets not read from COCO's format. Ids are
    those of the set, as they are written there; a float such as 1.0 is an integer.

    Args:
        results: The JSON file.
        dataset: The images that the detections are of.
        kind: ``"segm"`` to read masks, too: `Detections.shapes`.

    Returns:
        The detections in each image of the set, in float64 and in the file's order.

    Raises:
        DataError: The file is truncated or not a list in this format, has an unknown image or
            category, a box or score that is not a finite number, or boxes of another kind (`box_kinds`).
    """
    table = read_found(results, dataset, kind=kind)
    counts = np.bincount(table.places, minlength=len(table)).tolist()
    parts = [torch.from_numpy(each).split(counts) for each in (table.boxes, table.scores, table.labels, table.areas)]
    ends = np.cumsum(counts).tolist()
    shapes = [
        None if table.shapes is None else list(table.shapes[end - count : end])
        for count, end in zip(counts, ends, strict=True)
    ]
    return [Detections(*each) for each in zip(*parts, shapes, strict=True)]


def write_coco(path: str | Path, dataset: DetectionSet) -> Path:
    """Write annotations in COCO's format, for its own tools; returns the file.

    Images whose ids are not integers, such as VOC's, are numbered from 1. To write matching detections, give
    `write_detections` what `read_coco` reads from the file. Difficult objects become ordinary objects, as the format
    has no such flag.
    """
    numbered = not all(isinstance(image.image_id, int) for image in dataset.images)
    category_ids = _category_ids(dataset)
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    for place, image in enumerate(dataset.images):
        key = place + 1 if numbered else image.image_id
        images.append({"id": key, "file_name": image.path.name, "width": image.width, "height": image.height})
        for box, label, crowd in zip(image.boxes.tolist(), image.labels.tolist(), image.crowd.tolist(), strict=True):
            bbox = _xywh(box)
            annotations.append(
                {
                    "id": len(annotations) + 1,
                    "image_id": key,
                    "category_id": category_ids[label],
                    "bbox": bbox,
                    "area": bbox[2] * bbox[3],
                    "iscrowd": int(crowd),
                }
            )
    categories = [{"id": key, "name": name} for key, name in zip(category_ids, dataset.classes, strict=True)]
    return _write(path, {"images": images, "annotations": annotations, "categories": categories})


def write_detections(path: str | Path, detections: Sequence[Detections], dataset: DetectionSet) -> Path:
    """Write detections in COCO's results format, by the set's own ids; returns the file.

    Args:
        path: The JSON file.
        detections: What was found in each image of the set.
        dataset: The images.
    """
    category_ids = _category_ids(dataset)
    return _write(
        path,
        [
            {"image_id": image.image_id, "category_id": category_ids[label], "bbox": _xywh(box), "score": score}
            for image, found in zip(dataset.images, detections, strict=True)
            for box, score, label in zip(
                found.boxes.tolist(), found.scores.tolist(), found.labels.tolist(), strict=True
            )
        ],
    )


def _category_ids(dataset: DetectionSet) -> tuple[int | str, ...]:
    return dataset.category_ids if isinstance(dataset, CocoSet) else tuple(range(1, len(dataset.classes) + 1))


def _xywh(box: list[float]) -> list[float]:
    return [box[0], box[1], box[2] - box[0], box[3] - box[1]]


def _write(path: str | Path, content: Any) -> Path:
    write_atomically(path, json.dumps(content).encode())  # on one line: results of a large set have millions of numbers
    return Path(path)
