"""Images with class labels: read from folders and zip files, and varied for training."""

import io
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Literal, TypedDict

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from metricopt_ext.data.archives import MEMBER_BYTES, open_zip
from metricopt_ext.data.labelled import MAX_BYTES, Labelled, check_bytes
from metricopt_ext.errors import DataError, MetricOptError
from metricopt_ext.utils.checks import check_at_least
from metricopt_ext.utils.files import existing, read_bounded
from metricopt_ext.utils.words import brief

if TYPE_CHECKING:
    from PIL import Image

Array = npt.NDArray[Any]


class Limits(TypedDict):
    """What files of images may take, as arguments of the loaders; see `load_image_folder`."""

    max_bytes: int
    max_pixels: int


Mode = Literal["RGB", "L"]
ImageSize = int | tuple[int, int] | Callable[[Any], Any]  # the last takes and returns a PIL image

# Most pixels of one picture, unless a caller allows more; decoding takes up to 12 bytes for each. A
# camera's have up to 100 million; PIL itself refuses twice its 89 million.
MAX_PIXELS = 50_000_000

# What PIL may take a file for, whatever its name is: all that are decoded within PIL. It would run Ghostscript on EPS.
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")

# How `PIL.Image.Transpose` turns a picture upright, by its EXIF orientation.
_TURNS = {
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}

_SUFFIXES = {".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}


def load_image_folder(
    path_or_zip: str | os.PathLike[str],
    image_size: ImageSize | None = None,
    limit_per_class: int | None = None,
    *,
    depth: int = 1,
    mode: Mode = "RGB",
    max_bytes: int = MAX_BYTES,
    max_pixels: int = MAX_PIXELS,
) -> Labelled:
    """Read ``<class>/<file>`` images from a folder or a zip file, possibly below one more folder.

    Args:
        path_or_zip: The folder or the zip file; files without an image suffix are skipped.
        image_size: Height and width to resize to, or one number for both, or a function that returns each PIL image
            in the size that all get; None if all images have the same size.
        limit_per_class: Read only this many of each class, the first by file name; at least 1.
        depth: Number of folders that name a class; 2 for ``<group>/<class>/<file>``.
        mode: ``"RGB"``, or ``"L"`` for greyscale.
        max_bytes: Most bytes of all images in memory, and of all files that are read from a zip file.
        max_pixels: Most pixels of an image as it is stored.

    Returns:
        Inputs ``n x 3 x h x w`` uint8 (``n x 1 x h x w`` in grey), ordered by class and
            file name; classes in alphabetical order.

    Raises:
        DataError: For a missing path, no images, another layout, an unreadable image, unequal sizes without
            ``image_size``, or more bytes or pixels than allowed.
    """
    check_at_least(1, limit_per_class=limit_per_class)
    path = existing(path_or_zip)
    if path.is_dir():
        found = (Path(top, name) for top, _, names in os.walk(path, followlinks=True) for name in names)
        entries = (file.relative_to(path).as_posix() for file in found)
        chosen, y, class_names = _chosen(path, entries, limit_per_class, depth)
        x = read_images(path, chosen, reader(path), image_size, mode, max_bytes=max_bytes, max_pixels=max_pixels)
        return Labelled(x, y, class_names)
    with open_zip(path, max_bytes) as archive:
        chosen, y, class_names = _chosen(path, archive.names(), limit_per_class, depth)
        x = read_images(path, chosen, archive.read, image_size, mode, max_bytes=max_bytes, max_pixels=max_pixels)
    return Labelled(x, y, class_names)


def read_images(
    path: Path,
    names: Sequence[str],
    read: Callable[[str], bytes],
    image_size: ImageSize | None = None,
    mode: Mode = "RGB",
    *,
    max_bytes: int = MAX_BYTES,
    max_pixels: int = MAX_PIXELS,
) -> Tensor:
    """Read images, ``n x 3 x h x w`` uint8 (``n x 1 x h x w`` in grey).

    Args:
        path: The folder or zip file that holds them, for messages.
        names: Their names there, at least one.
        read: Returns the content of a file by its name there.
        image_size: As in `load_image_folder`.
        mode: As in `load_image_folder`.
        max_bytes: As in `load_image_folder`, of all images in memory.
        max_pixels: As in `load_image_folder`.

    Raises:
        DataError: For an unreadable image, unequal sizes without ``image_size``, or more bytes or pixels than allowed.
    """
    size = (image_size, image_size) if isinstance(image_size, int) else image_size
    first = _pixels(path, names[0], read, size, mode, max_pixels)
    check_bytes(path, len(names) * first.nbytes, max_bytes)
    x = np.empty((len(names), *first.shape), dtype=np.uint8)
    for i, name in enumerate(names):
        pixels = first if i == 0 else _pixels(path, name, read, size, mode, max_pixels)
        if pixels.shape != x.shape[1:]:
            got, others = (f"{shape[1]} x {shape[2]}" for shape in (pixels.shape, x.shape[1:]))
            raise DataError(
                f"{path}: images must all have one size, got {got} ({name}) and {others} ({names[0]}); set image_size"
            )
        x[i] = pixels
    return torch.from_numpy(x)


def reader(folder: Path) -> Callable[[str], bytes]:
    """Return a function that reads a folder's files by their names in it."""
    return lambda name: read_bounded(folder / name, MEMBER_BYTES)


@contextmanager
def opened(content: bytes, max_pixels: int = MAX_PIXELS) -> Iterator["Image.Image"]:
    """Open an image of one of `FORMATS`, not yet decoded, to decode it.

    Args:
        content: The file's.
        max_pixels: Most pixels that it may have.

    Raises:
        DataError: It is no such image, can't be decoded, or has more pixels; the message does not name the file.
    """
    from PIL import Image

    try:
        with Image.open(io.BytesIO(content), formats=FORMATS) as image:
            pixels = image.width * image.height
            if pixels > max_pixels:
                raise DataError(
                    f"it has {image.width} x {image.height} pixels, more than {max_pixels}; if that is right,"
                    " raise max_pixels"
                )
            yield image
    except MetricOptError:
        raise
    except Exception as error:  # PIL's plugins raise errors of many types
        raise DataError(brief(error)) from error


def upright(image: "Image.Image") -> "Image.Image":
    """Return a picture rotated as its EXIF orientation says."""
    from PIL import ExifTags
    from PIL.Image import Transpose

    if image.format == "TIFF":  # PIL rotates these itself, and some versions keep the orientation
        return image
    try:
        orientation = image.getexif().get(ExifTags.Base.Orientation)
    except Exception:  # broken EXIF data raise errors of many types; Detectron2 ignores them too
        return image
    # Not `ImageOps.exif_transpose`: it rewrites the EXIF data, which fails if a field is odd.
    return image.transpose(Transpose[_TURNS[orientation]]) if orientation in _TURNS else image


def flip_and_shift(x: Tensor, rng: torch.Generator, pixels: int = 4) -> Tensor:
    """Mirror half of the images, ``n x c x h x w``, and shift each by up to ``pixels``, padding with zeros."""
    n, _, height, width = x.shape
    mirrored = torch.rand(n, generator=rng).to(x.device) < 0.5
    x = torch.where(mirrored[:, None, None, None], x.flip(-1), x)
    offset = torch.randint(2 * pixels + 1, (2, n), generator=rng).to(x.device)
    rows = offset[0, :, None] + torch.arange(height, device=x.device)
    columns = offset[1, :, None] + torch.arange(width, device=x.device)
    padded = F.pad(x, (pixels,) * 4).movedim(1, -1)
    image = torch.arange(n, device=x.device)[:, None, None]
    return padded[image, rows[:, :, None], columns[:, None, :]].movedim(-1, 1)


def _chosen(
    path: Path, entries: Iterable[str], limit_per_class: int | None, depth: int
) -> tuple[list[str], Tensor, tuple[str, ...]]:
    """The names of the images to read, their labels and the classes' names."""
    layout = "/".join([*["<group>"] * (depth - 1), "<class>", "<file>"])
    names = sorted(name for name in entries if _is_image(name))
    if not names:
        raise DataError(f"{path} must hold {layout} images, got none")
    parts = [PurePosixPath(name).parts for name in names]
    below = 1 if len(parts[0]) == depth + 2 and len({part[0] for part in parts}) == 1 else 0
    for name, part in zip(names, parts, strict=True):
        if len(part) != below + depth + 1:
            raise DataError(f"{path} must hold its images as {layout}, got {name}")
    kept: dict[str, list[str]] = {}
    for name, part in zip(names, parts, strict=True):
        files = kept.setdefault("/".join(part[below:-1]), [])
        if limit_per_class is None or len(files) < limit_per_class:
            files.append(name)
    class_names = tuple(sorted(kept))
    chosen = [name for cls in class_names for name in kept[cls]]
    y = torch.arange(len(class_names)).repeat_interleave(torch.tensor([len(kept[cls]) for cls in class_names]))
    return chosen, y, class_names


def _is_image(name: str) -> bool:
    path = PurePosixPath(name)
    hidden = any(part.startswith(".") or part == "__MACOSX" for part in path.parts)
    return path.suffix.lower() in _SUFFIXES and not hidden


def _pixels(
    path: Path,
    name: str,
    read: Callable[[str], bytes],
    size: tuple[int, int] | Callable[[Any], Any] | None,
    mode: Mode,
    max_pixels: int,
) -> Array:
    """One image as ``3 x h x w`` or ``1 x h x w`` uint8."""
    from PIL import Image

    try:
        with opened(read(name), max_pixels) as image:
            converted = image.convert(mode)
    except (DataError, OSError, ValueError) as error:
        raise DataError(f"{path}: cannot read {name[:200]} as an image: {brief(error)}") from error
    if callable(size):
        converted = size(converted)
    elif size is not None and converted.size != size[::-1]:
        converted = converted.resize(size[::-1], Image.Resampling.BILINEAR)
    return np.atleast_3d(np.asarray(converted)).transpose(2, 0, 1)
