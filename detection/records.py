"""Annotated images and detections, in the form shared by all parts of the detection tools."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from metricopt_ext.data.decoding import decoded, opened, upright
from metricopt_ext.errors import DataError
from metricopt_ext.utils.files import bytes_of
from metricopt_ext.utils.words import brief


@dataclass(frozen=True, eq=False)
class Annotated:
    """One image with its ground truth.

    Boxes are ``(left, top, right, bottom)`` in pixels of the image, as edges: the first pixel lies between 0 and 1, so
    a box's width is ``right - left``. (VOC's files count pixels from 1, with both ends inside the box.)

    Attributes:
        image_id: Identifies the image in its set; COCO's are integers, VOC's file names without suffix.
        path: The image file.
        width: Width in pixels; 0 where the annotation does not tell.
        height: Height in pixels; 0 where the annotation does not tell.
        boxes: ``n x 4`` floats, as annotated: they may reach beyond the image, see `inside`.
        labels: Classes, ``n`` integers: indices into the set's classes.
        difficult: VOC's flag, ``n`` booleans.
        crowd: COCO's flag, ``n`` booleans.
        areas: COCO's areas of the objects in square pixels, ``n``, NaN where none is told; None for those of boxes.
        shapes: Masks (`shapes`) if these are compared, ``n``; None for boxes.
    """

    image_id: str | int
    path: Path
    width: int
    height: int
    boxes: Tensor
    labels: Tensor
    difficult: Tensor
    crowd: Tensor
    areas: Tensor | None = None
    shapes: Sequence[Any] | None = None

    def load(self) -> Tensor:
        """Return the image, ``3 x height x width``, uint8 RGB, rotated as its EXIF orientation says (`decoded`).

        Raises:
            DataError: The file is missing, truncated, not an image, of values without a known white, or, once rotated,
                of a different size from its annotation.
        """
        try:
            with opened(bytes_of(self.path)) as image:
                pixels = np.array(decoded(image, "RGB"))
        except (DataError, OSError, ValueError) as error:
            raise DataError(f"{self.path} can't be read as an image: {brief(error)}") from error
        if self.width and self.height and pixels.shape[:2] != (self.height, self.width):
            turned = pixels.shape[:2] == (self.width, self.height)
            raise DataError(
                f"{self.path} is {pixels.shape[1]} x {pixels.shape[0]} pixels, but its annotation says"
                f" {self.width} x {self.height}" + " (an EXIF orientation is applied first)" * turned
            )
        return torch.from_numpy(pixels).permute(2, 0, 1).contiguous()

    def with_size(self) -> "Annotated":
        """Return the same with the size that the image itself has, if the annotation does not tell.

        Raises:
            DataError: The file is missing, or not an image.
        """
        if self.width and self.height:
            return self
        try:
            with opened(bytes_of(self.path)) as image:
                width, height = upright(image).size
        except (DataError, OSError, ValueError) as error:
            raise DataError(f"{self.path} can't be read as an image: {brief(error)}") from error
        return replace(self, width=width, height=height)


def inside(boxes: Tensor, width: int, height: int) -> tuple[Tensor, Tensor]:
    """Return what lies within an image of some boxes, ``n x 4``, and which of them have area there, ``n`` booleans.

    This is what a detector is trained on. An evaluation counts boxes as they are annotated, as its references do.

    Args:
        boxes: The boxes, ``n x 4``; one that is not a number has no area.
        width: Width of the image in pixels; 0 for an unknown one, which clips nothing.
        height: Height of the image in pixels; 0 for an unknown one.
    """
    ends = boxes.new_tensor([width or math.inf, height or math.inf])
    clipped = boxes.clamp(min=0).minimum(ends.repeat(2))
    return clipped, (clipped[:, 2:] > clipped[:, :2]).all(1)


@dataclass(frozen=True, eq=False)
class DetectionSet:
    """Annotated images of one set of classes.

    Attributes:
        classes: Names of the classes; labels are indices into them.
        images: The images.
    """

    classes: tuple[str, ...]
    images: Sequence[Annotated] = field(default_factory=list)

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.images)

    def subset(self, indices: Sequence[int]) -> "DetectionSet":
        """Return the images at some positions."""
        return DetectionSet(self.classes, [self.images[index] for index in indices])


@dataclass(frozen=True, eq=False)
class Detections:
    """What a detector found in one image.

    Attributes:
        boxes: ``n x 4`` floats, see `Annotated`.
        scores: Confidences, ``n`` floats.
        labels: Classes, ``n`` integers.
        areas: In square pixels, ``n``; None for those of boxes.
        shapes: Masks (`shapes`) if these are compared, ``n``; None for boxes.
    """

    boxes: Tensor
    scores: Tensor
    labels: Tensor
    areas: Tensor | None = None
    shapes: Sequence[Any] | None = None

    def __len__(self) -> int:
        """Return the number of detections."""
        return len(self.scores)


def as_array(tensor: Tensor) -> npt.NDArray[Any]:
    """Return a tensor's content on the CPU; bfloat16, which NumPy does not have, as float32, exactly."""
    return (tensor.float() if tensor.dtype is torch.bfloat16 else tensor).numpy(force=True)
