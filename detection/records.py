"""Annotated images and detections, in the form shared by all parts of the detection tools."""

import lzma
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from metricopt_ext.data.archives import MEMBER_BYTES, open_zip
from metricopt_ext.data.images import MAX_PIXELS, decoded, opened
from metricopt_ext.errors import DataError
from metricopt_ext.utils.files import read_bounded
from metricopt_ext.utils.words import brief

# What reading a file raises, on disk or in a zip file: missing, corrupt, encrypted, compressed in an unknown way.
UNREADABLE = (OSError, KeyError, EOFError, RuntimeError, lzma.LZMAError, zipfile.BadZipFile, zlib.error)
# Pixels on the longest side of an image that an annotation may tell of; float32 still counts them one by one.
LONGEST_SIDE = 1 << 24


@dataclass(frozen=True, eq=False)
class Annotated:
    """One image with its ground truth.

    Boxes are ``(left, top, right, bottom)`` in pixels of the image, as edges: the first pixel lies between 0 and 1, so
    a box's width is ``right - left``. (VOC's files count pixels from 1, with both ends inside the box.)

    Attributes:
        image_id: Identifies the image in its set; COCO's are integers, VOC's file names without suffix.
        path: The image file; if there is an ``archive``, its name within that zip file.
        width: Width in pixels.
        height: Height in pixels.
        boxes: ``n x 4`` floats, of positive area.
        labels: Classes, ``n`` integers: indices into the set's classes.
        difficult: VOC's flag, ``n`` booleans.
        crowd: COCO's flag, ``n`` booleans.
        archive: The zip file that holds the image, if one does.
    """

    image_id: str | int
    path: Path
    width: int
    height: int
    boxes: Tensor
    labels: Tensor
    difficult: Tensor
    crowd: Tensor
    archive: Path | None = None

    def load(self, max_pixels: int = MAX_PIXELS) -> Tensor:
        """Return the image, ``3 x height x width``, uint8 RGB, rotated as its EXIF orientation says (`decoded`).

        Args:
            max_pixels: Most pixels that it may have.

        Raises:
            DataError: The file is missing, truncated, not an image, of values without a known white, of more pixels,
                or, once rotated, of a different size from its annotation.
        """
        try:
            with opened(self._read(), max_pixels) as image:
                pixels = np.array(decoded(image, "RGB"))
        except (DataError, OSError, ValueError) as error:
            raise DataError(f"{self.path} can't be read as an image: {brief(error)}") from error
        if pixels.shape[:2] != (self.height, self.width):
            turned = pixels.shape[:2] == (self.width, self.height)
            raise DataError(
                f"{self.path} is {pixels.shape[1]} x {pixels.shape[0]} pixels, but its annotation says"
                f" {self.width} x {self.height}" + " (an EXIF orientation is applied first)" * turned
            )
        return torch.from_numpy(pixels).permute(2, 0, 1).contiguous()

    def _read(self) -> bytes:
        if self.archive is None:
            return read_bounded(self.path, MEMBER_BYTES)
        with open_zip(self.archive) as archive:
            return archive.read(self.path.as_posix())


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
    """

    boxes: Tensor
    scores: Tensor
    labels: Tensor

    def __len__(self) -> int:
        """Return the number of detections."""
        return len(self.scores)
