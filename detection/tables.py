"""Annotated images and detections as tables: a row for each object or detection, in place of a record for each image.

They are what AP is computed from. NumPy does for them, without torch; `records` has the same by image, in tensors.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Union

import numpy as np
import numpy.typing as npt

from metricopt_ext.errors import DataError, MetricError
from metricopt_ext.utils.words import brief

if TYPE_CHECKING:
    from torch import Tensor

    from metricopt_ext.detection.records import Detections, DetectionSet

Kind = Literal["bbox", "segm"]
KINDS: dict[Kind, str] = {"bbox": "bbox", "segm": "segmentation"}  # what an entry must have

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
Objects = npt.NDArray[np.object_]
Booleans = npt.NDArray[np.bool_]
Array = npt.NDArray[Any]

# Pixels on the longest side of an image that an annotation may tell of; float32 still counts them one by one.
LONGEST_SIDE = 1 << 24
LARGEST = 1e30  # of a coordinate or score: sums of two are finite in float32


@dataclass(frozen=True, eq=False)
class TruthTable:
    """Annotated images of one set of classes; see `records.Annotated` for what each is.

    Attributes:
        classes: Names of the classes.
        category_ids: How a file in COCO's format numbers the classes; empty for other sets.
        image_ids: Identifies each of the k images.
        names: The image's file, with its folders; empty where it is not known.
        sizes: Width and height of each image in pixels, ``k x 2``; 0 where unknown.
        places: The image of each object, ``m``, ascending.
        boxes: ``m x 4`` floats.
        labels: ``m`` integers.
        difficult: ``m`` booleans.
        crowd: ``m`` booleans.
        areas: In square pixels, ``m``; NaN where none is told.
        shapes: Masks, ``m``; None for boxes.
        missed: Which can't be hit, ``m``, as pycocotools has those with the id 0; None for none.
        rows: Which annotation of COCO's file each object is, ``m``; None of other sets.
    """

    classes: tuple[str, ...]
    category_ids: tuple[int | str, ...]
    image_ids: Sequence[int | str]
    names: Sequence[str]
    sizes: Integers
    places: Integers
    boxes: Array
    labels: Integers
    difficult: Booleans
    crowd: Booleans
    areas: Floats
    shapes: Objects | None = None
    missed: Booleans | None = None
    rows: Integers | None = None

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.image_ids)

    @staticmethod
    def of(dataset: "TruthLike") -> "TruthTable":
        """Return the table of records, or what is one.

        Raises:
            DataError: A record's parts are not of one length, its boxes not of four finite numbers, or its labels no
                integers.
        """
        if isinstance(dataset, TruthTable):
            return dataset
        images = dataset.images
        counts = [len(image.labels) for image in images]
        for image, n in zip(images, counts, strict=True):
            boxes_fit = image.boxes.shape == (n, 4) or not (n or image.boxes.numel())
            if not (boxes_fit and len(image.difficult) == len(image.crowd) == n):
                raise DataError(
                    f"image {brief(image.image_id)} has boxes of shape {tuple(image.boxes.shape)}, {n} labels,"
                    f" {len(image.difficult)} as difficult and {len(image.crowd)} as crowd; they must be n x 4, n, n, n"
                )
        told = any(image.areas is not None for image in images)
        boxes, labels = _joined([image.boxes.reshape(-1, 4) for image in images]).reshape(-1, 4), _labels(images)
        places = np.repeat(np.arange(len(images)), counts)
        if not (finite := np.isfinite(boxes).all(1)).all():
            row = int(finite.argmin())
            where = f"image {brief(images[places[row]].image_id)}"
            raise DataError(f"{where} has the box {brief(boxes[row].tolist())}; its edges must be finite")
        return TruthTable(
            dataset.classes,
            getattr(dataset, "category_ids", ()),
            [image.image_id for image in images],
            [image.path.as_posix() if image.path and image.path.name else "" for image in images],
            np.array([(image.width, image.height) for image in images], dtype=np.int64).reshape(-1, 2),
            places,
            boxes,
            labels,
            _joined([image.difficult for image in images]).astype(bool),
            _joined([image.crowd for image in images]).astype(bool),
            _areas(images, counts) if told else np.full(sum(counts), np.nan),
            _shapes(images),
        )


@dataclass(frozen=True, eq=False)
class FoundTable:
    """Detections in some images; see `records.Detections` for what each is.

    Attributes:
        images: Number of images.
        places: The image of each detection, ``n``, ascending.
        boxes: ``n x 4`` floats.
        scores: ``n`` floats.
        labels: ``n`` integers.
        areas: In square pixels, ``n``, NaN for those of boxes.
        shapes: Masks, ``n``; None for boxes.
    """

    images: int
    places: Integers
    boxes: Array
    scores: Array
    labels: Integers
    areas: Floats
    shapes: Objects | None = None

    def __len__(self) -> int:
        """Return the number of images, as a list of records has it."""
        return self.images

    @staticmethod
    def of(detections: "FoundLike") -> "FoundTable":
        """Return the table of records, or what is one.

        Raises:
            DataError: Labels are no integers.
            MetricError: A record's parts are not of one length, or its boxes not of four numbers.
        """
        if isinstance(detections, FoundTable):
            return detections
        for image, found in enumerate(detections):
            n = (len(found),)
            boxes_fit = found.boxes.shape == (*n, 4) or not (len(found) or found.boxes.numel())
            if not (boxes_fit and found.labels.shape == found.scores.shape == n):
                raise MetricError(
                    f"the detector gave boxes of shape {tuple(found.boxes.shape)} and labels of shape"
                    f" {tuple(found.labels.shape)} for scores of shape {tuple(found.scores.shape)}, first in image"
                    f" {image}; they must be n x 4 (left, top, right, bottom), n and n"
                )
        counts = [len(found) for found in detections]
        told = any(found.areas is not None for found in detections)
        return FoundTable(
            len(detections),
            np.repeat(np.arange(len(counts)), counts),
            _joined([found.boxes.reshape(-1, 4) for found in detections]).reshape(-1, 4),
            _joined([found.scores for found in detections]),
            _labels(detections),
            _areas(detections, counts) if told else np.full(sum(counts), np.nan),
            _shapes(detections),
        )

    def take(self, rows: Any) -> "FoundTable":
        """Return some of the rows, in another order if they stay by image."""
        parts = {name: getattr(self, name)[rows] for name in ("places", "boxes", "scores", "labels", "areas")}
        return replace(self, shapes=None if self.shapes is None else self.shapes[rows], **parts)


TruthLike = Union["DetectionSet", TruthTable]
FoundLike = Union["Sequence[Detections]", FoundTable]


def as_objects(shapes: Sequence[Any]) -> Objects:
    """Return an array of objects, whatever they hold."""
    return np.fromiter(shapes, dtype=object, count=len(shapes))


def _joined(parts: "Sequence[Tensor]") -> Array:
    if not parts:
        return np.zeros(0)
    import torch

    from metricopt_ext.detection.records import as_array

    return as_array(torch.cat(list(parts)))


def _labels(records: Sequence[Any]) -> Integers:
    found = _joined([record.labels for record in records])
    with np.errstate(invalid="ignore"):  # NaN is refused
        labels = found.astype(np.int64)
    if (wrong := labels != found).any():
        raise DataError(f"labels must be integers, got {found[wrong][0]:g}")
    return labels


def _areas(records: Sequence[Any], counts: Sequence[int]) -> Floats:
    import torch

    unknown = (torch.full((count,), torch.nan, dtype=torch.float64) for count in counts)
    return _joined(
        [each if own.areas is None else own.areas for own, each in zip(records, unknown, strict=True)]
    ).astype(np.float64)


def _shapes(records: Sequence[Any]) -> Objects | None:
    if all(each.shapes is None for each in records):
        return None
    return as_objects([shape for each in records for shape in each.shapes or [None] * len(each.labels)])


def is_finite(value: Any) -> bool:
    """Whether a value that a file holds is a number that a coordinate, area or score can be."""
    return type(value) in (int, float) and abs(value) <= LARGEST  # NaN is not
