"""Images with class labels: read from folders and zip files, and varied for training."""

import io
import os
import zipfile
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from metricopt_ext.data.labelled import Labelled
from metricopt_ext.errors import DataError
from metricopt_ext.utils.checks import check_at_least
from metricopt_ext.utils.files import existing

Array = npt.NDArray[Any]

Mode = Literal["RGB", "L"]

_SUFFIXES = {".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}


def load_image_folder(
    path_or_zip: str | os.PathLike[str],
    image_size: int | tuple[int, int] | None = None,
    limit_per_class: int | None = None,
    *,
    depth: int = 1,
    mode: Mode = "RGB",
) -> Labelled:
    """Read ``<class>/<file>`` images from a folder or a zip file, possibly below one more folder.

    Args:
        path_or_zip: The folder or the zip file; files without an image suffix are skipped.
        image_size: Height and width to resize to, or one number for both; None if all images have the same size.
        limit_per_class: Read only this many of each class, the first by file name; at least 1.
        depth: Number of folders that name a class; 2 for ``<group>/<class>/<file>``.
        mode: ``"RGB"``, or ``"L"`` for greyscale.

    Returns:
        Inputs ``n x 3 x h x w`` uint8 (``n x 1 x h x w`` in grey), ordered by class and
            file name; classes in alphabetical order.

    Raises:
        DataError: For a missing path, no images, another layout, an unreadable image, or unequal sizes without
            ``image_size``.
    """
    check_at_least(1, limit_per_class=limit_per_class)
    path = existing(path_or_zip)
    if path.is_dir():
        found = (Path(top, name) for top, _, names in os.walk(path, followlinks=True) for name in names)
        entries = (file.relative_to(path).as_posix() for file in found)
        return _decode(path, entries, reader(path), image_size, limit_per_class, depth, mode)
    try:
        with zipfile.ZipFile(path) as archive:
            return _decode(path, archive.namelist(), archive.read, image_size, limit_per_class, depth, mode)
    except zipfile.BadZipFile as error:
        raise DataError(f"{path} must be a folder or a zip file: {error}") from error


def read_images(
    path: Path,
    names: Sequence[str],
    read: Callable[[str], bytes],
    image_size: int | tuple[int, int] | None = None,
    mode: Mode = "RGB",
) -> Tensor:
    """Read images, ``n x 3 x h x w`` uint8 (``n x 1 x h x w`` in grey).

    Args:
        path: The folder or zip file that holds them, for messages.
        names: Their names there, at least one.
        read: Returns the content of a file by its name there.
        image_size: As in `load_image_folder`.
        mode: As in `load_image_folder`.

    Raises:
        DataError: For an unreadable image, or unequal sizes without ``image_size``.
    """
    size = (image_size, image_size) if isinstance(image_size, int) else image_size
    x = np.empty((len(names), *_pixels(path, names[0], read, size, mode).shape), dtype=np.uint8)
    for i, name in enumerate(names):
        pixels = _pixels(path, name, read, size, mode)
        if pixels.shape != x.shape[1:]:
            got, first = (f"{shape[1]} x {shape[2]}" for shape in (pixels.shape, x.shape[1:]))
            raise DataError(
                f"{path}: images must all have one size, got {got} ({name}) and {first} ({names[0]}); set image_size"
            )
        x[i] = pixels
    return torch.from_numpy(x)


def reader(folder: Path) -> Callable[[str], bytes]:
    """Return a function that reads a folder's files by their names in it."""
    return lambda name: (folder / name).read_bytes()


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


def _decode(
    path: Path,
    entries: Iterable[str],
    read: Callable[[str], bytes],
    image_size: int | tuple[int, int] | None,
    limit_per_class: int | None,
    depth: int,
    mode: Mode,
) -> Labelled:
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
    x = read_images(path, chosen, read, image_size, mode)
    y = torch.arange(len(class_names)).repeat_interleave(torch.tensor([len(kept[cls]) for cls in class_names]))
    return Labelled(x, y, class_names)


def _is_image(name: str) -> bool:
    path = PurePosixPath(name)
    hidden = any(part.startswith(".") or part == "__MACOSX" for part in path.parts)
    return path.suffix.lower() in _SUFFIXES and not hidden


def _pixels(path: Path, name: str, read: Callable[[str], bytes], size: tuple[int, int] | None, mode: Mode) -> Array:
    """One image as ``3 x h x w`` or ``1 x h x w`` uint8."""
    from PIL import Image

    bomb = Image.DecompressionBombError
    try:
        with Image.open(io.BytesIO(read(name))) as image:
            converted = image.convert(mode)
    except (OSError, SyntaxError, ValueError, RuntimeError, zlib.error, zipfile.BadZipFile, bomb) as error:
        raise DataError(f"{path}: cannot read {name} as an image: {error}") from error
    if size is not None and converted.size != size[::-1]:
        converted = converted.resize(size[::-1], Image.Resampling.BILINEAR)
    return np.atleast_3d(np.asarray(converted)).transpose(2, 0, 1)
