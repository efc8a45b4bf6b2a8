"""Annotated images and detections in COCO's JSON formats."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from metricopt_ext.detection.coco_tables import read_truth
from metricopt_ext.detection.records import Annotated, DetectionSet
from metricopt_ext.detection.tables import Kind
from metricopt_ext.errors import DataError


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


def category_ids_of(dataset: DetectionSet) -> tuple[int | str, ...]:
    """Return how a set's file numbers its classes; empty if it is not in COCO's format."""
    return dataset.category_ids if isinstance(dataset, CocoSet) else ()
