"""Images for semantic segmentation with their label maps, from two folders."""

import os
import warnings
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from metricopt_ext.classification.targets import IGNORED
from metricopt_ext.data.decoding import opened, upright
from metricopt_ext.data.images import SUFFIXES, height_and_width, read_images, reader
from metricopt_ext.data.labelled import Labelled
from metricopt_ext.errors import DataError
from metricopt_ext.utils.files import existing
from metricopt_ext.utils.words import brief, counted

IMAGES, MASKS = ("images", "JPEGImages"), ("masks", "SegmentationClass")  # names of the two folders


def load_masks(root: str | os.PathLike[str], image_size: int | None = None, classes: int = 0) -> Labelled:
    """Read ``images`` and ``masks``, or VOC's ``JPEGImages`` and ``SegmentationClass``, paired by their files' stems.

    Args:
        root: The folder of both.
        image_size: Height and width to resize to, label maps without mixing; None if all have the same size.
        classes: How many classes there are, at least as many as the largest number says; 0 for so many.

    Returns:
        Inputs ``n x 3 x h x w`` uint8, and the class of each pixel, ``n x h x w`` int64 in 0..c-1, or 255 for one that
            doesn't count; classes are named by their numbers, up to the largest.

    Raises:
        DataError: For a missing folder, label maps without an image, a map in colours or of another size than its
            image, unequal sizes without ``image_size``, or fewer than two classes or more than ``classes``.
    """
    path = existing(root)
    folders = [_folder(path, names) for names in (IMAGES, MASKS)]
    images, masks = (_by_stem(folder) for folder in folders)
    alone = [masks[stem] for stem in masks if stem not in images]
    if alone or not masks:
        raise DataError(
            f"{folders[1]}: {counted(len(alone), 'label map')} without an image of the same stem, such as"
            f" {brief(alone[0])}"
            if alone
            else f"{folders[1]} has no images of label maps"
        )
    if without := [images[stem] for stem in images if stem not in masks]:
        warnings.warn(
            f"{folders[0]}: {counted(len(without), 'image')} without a label map left out, such as {brief(without[0])}",
            stacklevel=2,
        )
    stems = sorted(masks)
    names = [images[stem] for stem in stems]
    x = read_images(folders[0], names, reader(folders[0]), image_size)
    y = torch.stack([_map(folders[1] / masks[stem], folders[0] / images[stem], x) for stem in stems])
    found = y[y != IGNORED].unique()
    if len(found) < 2:
        raise DataError(f"{folders[1]}: label maps must hold two classes, got {found.tolist()}")
    count = int(found.max()) + 1
    if classes and count > classes:
        raise DataError(f"{folders[1]}: label maps have class {count - 1}, but data.classes={classes} ends before it")
    return Labelled(x, y, tuple(map(str, range(classes or count))))


def _folder(path: Path, names: Iterable[str]) -> Path:
    for name in names:
        if (path / name).is_dir():
            return path / name
    raise DataError(f"{path} has no folder named {' or '.join(names)}; data.name=segmentation needs images and masks")


def _by_stem(folder: Path) -> dict[str, str]:
    found: dict[str, str] = {}
    for file in sorted(folder.iterdir()):
        if file.suffix.lower() in SUFFIXES and not file.name.startswith("."):
            if file.stem in found:
                raise DataError(f"{folder} has {found[file.stem]!r} and {file.name!r}; one image may have a stem")
            found[file.stem] = file.name
    return found


def _map(path: Path, image_path: Path, x: Tensor) -> Tensor:
    """One label map, ``h x w`` int64, in the size of the images as they were read."""
    from PIL import Image

    try:
        with opened(path.read_bytes()) as image:
            if image.format in ("JPEG", "MPO"):
                raise DataError("it is a JPEG, which gives pixels at edges other classes; save it as PNG")
            if image.mode not in ("1", "L", "P", "I", "I;16"):
                raise DataError(f"it has colours ({image.mode}); save the class of each pixel as a number")
            shown = np.asarray(upright(image)).astype(np.int64)
    except (DataError, OSError, ValueError) as error:
        raise DataError(f"cannot read {path} as a label map: {brief(error)}") from error
    height, width = height_and_width(image_path.parent, image_path.name, reader(image_path.parent))
    if shown.shape != (height, width):
        turned = shown.shape == (width, height)
        raise DataError(
            f"{path} has {shown.shape[1]} x {shown.shape[0]} pixels, its image {width} x {height}"
            f"{', each upright by any EXIF orientation' if turned else ''}; save the map in its image's size"
        )
    if (size := tuple(x.shape[-2:])) != shown.shape:
        small = Image.fromarray(shown.astype(np.int32)).resize((size[1], size[0]), Image.Resampling.NEAREST)
        shown = np.asarray(small).astype(np.int64)
    return torch.from_numpy(shown)
