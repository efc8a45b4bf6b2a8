"""Annotated images and detections in COCO's JSON formats."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from metricopt_ext.detection.coco_tables import read_found, read_truth
from metricopt_ext.detection.records import Annotated, Detections, DetectionSet
from metricopt_ext.detection.tables import Kind
from metricopt_ext.errors import DataError
from metricopt_ext.utils.files import write_atomically


@dataclass(frozen=True, eq=False)
class CocoSet(DetectionSet):
    """A `DetectionSet` that remembers how its file numbers the classes.

    Attributes:
        category_ids: The id of each class, ascending.
        rows: Which annotation of the file each object of an image is.
    """

    category_ids: tuple[int | str, ...] = ()
    rows: Sequence[Sequence[int]] = ()

    def subset(self, indices: Sequence[int]) -> "CocoSet":
        """Return the images at some positions."""
        rows = [self.rows[index] for index in indices] if self.rows else ()
        return replace(self, images=[self.images[index] for index in indices], rows=rows)


def read_coco(
    annotations: str | Path,
    images_dir: str | Path | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    kind: Kind = "bbox",
) -> CocoSet:
    """Read annotated images in COCO's format: images and classes in the order of their ids, as in pycocotools.

    Boxes ``[x, y, width, height]`` become the edges ``(x, y, x + width, y + height)``, and are not clipped to their
    images: one warning says how many are outside them, or partly, which a training leaves out or clips
    (`records.inside`). Those without area are left out, with one warning, as are annotations of images that are not
    listed. (pycocotools counts boxes of area 0 as objects, so its AP50 can differ.) An area below 0 is not told.

    Args:
        annotations: The JSON file.
        images_dir: Folder of the images; None if only the boxes are needed; the images are then not looked for.
        dtype: Type of the boxes; float64 keeps all decimals of the file.
        kind: ``"segm"`` to read masks, too: `Annotated.shapes`. Boxes without area then stay.

    Raises:
        DataError: The file is truncated, not JSON of this format or without images; an id is duplicate or
            unknown; a box or size is not a number; an image is missing; a mask can't be compared.
    """

    def size_of(key: int | str, name: str) -> tuple[int, int]:
        try:
            sized = Annotated(key, Path(name), 0, 0, *nothing).with_size()
        except DataError:  # what can't be read is said when it is loaded
            return 0, 0
        return sized.width, sized.height

    none = torch.zeros(0, dtype=torch.bool)
    nothing = torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64), none, none
    table = read_truth(annotations, images_dir, kind=kind, size_of=None if images_dir is None else size_of)
    counts = np.bincount(table.places, minlength=len(table)).tolist()
    boxes, labels, crowd, difficult, areas = (
        torch.from_numpy(each).split(counts)
        for each in (table.boxes, table.labels, table.crowd, table.difficult, table.areas)
    )
    ends = np.cumsum(counts).tolist()
    images = [
        Annotated(
            key,
            Path(name),
            size[0],
            size[1],
            boxes[place].to(dtype, copy=True),
            labels[place].clone(),
            difficult[place].clone(),
            crowd[place].clone(),
            areas=areas[place].clone(),
            shapes=None if table.shapes is None else list(table.shapes[end - count : end]),
        )
        for place, (key, name, size, count, end) in enumerate(
            zip(table.image_ids, table.names, table.sizes.tolist(), counts, ends, strict=True)
        )
    ]
    assert table.rows is not None
    starts = np.cumsum([0, *counts[:-1]]).tolist()
    rows = [table.rows[start:end].tolist() for start, end in zip(starts, ends, strict=True)]
    return CocoSet(table.classes, images, table.category_ids, rows)


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


def category_ids_of(dataset: DetectionSet) -> tuple[int | str, ...]:
    """Return how a set's file numbers its classes; empty if it is not in COCO's format."""
    return dataset.category_ids if isinstance(dataset, CocoSet) else ()


def _category_ids(dataset: DetectionSet) -> tuple[int | str, ...]:
    return dataset.category_ids if isinstance(dataset, CocoSet) else tuple(range(1, len(dataset.classes) + 1))


def _xywh(box: list[float]) -> list[float]:
    return [box[0], box[1], box[2] - box[0], box[3] - box[1]]


def _write(path: str | Path, content: Any) -> Path:
    write_atomically(path, json.dumps(content).encode())  # on one line: results of a large set have millions of numbers
    return Path(path)
