"""Images with class labels, read from folders."""

import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from metricopt_ext.data.decoding import Mode, decoded, opened
from metricopt_ext.data.labelled import Labelled
from metricopt_ext.data.streamed import StreamedImages, as_inputs
from metricopt_ext.errors import DataError
from metricopt_ext.runtime.pace import followed
from metricopt_ext.utils.checks import check_at_least
from metricopt_ext.utils.files import bytes_of, existing, is_hidden, walked
from metricopt_ext.utils.words import brief, counted

Array = npt.NDArray[Any]


ImageSize = int | tuple[int, int] | Callable[[Any], Any]  # the last takes and returns a PIL image

SUFFIXES = (
    *(".bmp", ".dib", ".gif", ".jfif", ".jpe", ".jpeg", ".jpg", ".pbm", ".pgm", ".png", ".pnm", ".ppm", ".tif"),
    *(".tiff", ".webp"),
)


def load_image_folder(
    root: str | os.PathLike[str],
    image_size: ImageSize | None = None,
    limit_per_class: int | None = None,
    *,
    depth: int = 1,
    mode: Mode = "RGB",
    stream: bool = False,
) -> Labelled:
    """Read ``<class>/<file>`` images from a folder, possibly below one more folder.

    A warning tells what is not read: files without one of `SUFFIXES`, folders that links lead to once more, and further
    frames. Hidden files are left out without one.

    Args:
        root: The folder.
        image_size: Height and width to resize to, or one number for both, or a function that returns each PIL image
            in the size that all get; None if all images have the same size.
        limit_per_class: Read only this many of each class, the first by file name; at least 1.
        depth: Number of folders that name a class; 2 for ``<group>/<class>/<file>``.
        mode: ``"RGB"``, or ``"L"`` for greyscale.
        stream: Whether the images stay on disk and are read whenever they are asked for (`StreamedImages`).

    Returns:
        Inputs ``n x 3 x h x w`` uint8 (``n x 1 x h x w`` in grey), ordered by class and
            file name; classes in alphabetical order.

    Raises:
        DataError: For a missing path, no images, a class without any, another layout, an unreadable image, or
            unequal sizes without ``image_size``.
    """
    check_at_least(1, limit_per_class=limit_per_class)
    path = existing(root)
    try:
        entries, again = walked(path)
    except OSError as error:
        raise DataError(f"{path} can't be read: {brief(error)}") from error
    if again:
        warnings.warn(
            f"{path}: {counted(len(again), 'link')} to folders that are read elsewhere left out: {_few(again)}",
            stacklevel=2,
        )
    chosen, y, class_names = _chosen(path, entries, limit_per_class, depth)
    if stream:
        x = as_inputs(stream_images(path, chosen, reader(path), image_size, mode))
    else:
        x = read_images(path, chosen, reader(path), image_size, mode)
    return Labelled(x, y, class_names, names=[str(path / name) for name in chosen])


def read_images(
    path: Path,
    names: Sequence[str],
    read: Callable[[str], bytes],
    image_size: ImageSize | None = None,
    mode: Mode = "RGB",
) -> Tensor:
    """Read images, ``n x 3 x h x w`` uint8 (``n x 1 x h x w`` in grey).

    Args:
        path: The folder that holds them, for messages.
        names: Their names there, at least one.
        read: Returns the content of a file by its name there.
        image_size: As in `load_image_folder`.
        mode: As in `load_image_folder`.

    Raises:
        DataError: For an unreadable image, or unequal sizes without ``image_size``.
    """
    size = (image_size, image_size) if isinstance(image_size, int) else image_size
    several: list[str] = []
    first = _pixels(path, names[0], read, size, mode, several)
    x = np.empty((len(names), *first.shape), dtype=np.uint8)
    for i, name in enumerate(followed(names, f"read the images of {path}", len(names))):
        pixels = first if i == 0 else _pixels(path, name, read, size, mode, several)
        if pixels.shape != x.shape[1:]:
            got, others = (f"{shape[1]} x {shape[2]}" for shape in (pixels.shape, x.shape[1:]))
            raise DataError(
                f"{path}: images must all have one size, got {got} ({name}) and {others} ({names[0]}); set image_size"
            )
        x[i] = pixels
    _warn_of_frames(path, several)
    return torch.from_numpy(x)


def stream_images(
    path: Path,
    names: Sequence[str],
    read: Callable[[str], bytes],
    image_size: ImageSize | None = None,
    mode: Mode = "RGB",
) -> StreamedImages:
    """Return images that are read whenever they are asked for, as `read_images` reads them all.

    The first one is read, for the shape; of the others that each can be opened is checked, and without ``image_size``
    that all have one size.

    Args:
        path: The folder that holds them, for messages.
        names: Their names there, at least one.
        read: Returns the content of a file by its name there; called in any thread.
        image_size: As in `load_image_folder`.
        mode: As in `load_image_folder`.

    Raises:
        DataError: For an image that can't be opened, or unequal sizes without ``image_size``.
    """
    size = (image_size, image_size) if isinstance(image_size, int) else image_size
    several: list[str] = []
    first = _pixels(path, names[0], read, size, mode, several).shape

    def pixels(row: int) -> Tensor:
        found = np.array(_pixels(path, names[row], read, size, mode, []))
        if found.shape != first:
            raise DataError(
                f"{path}: images must all have one size, got {found.shape[1]} x {found.shape[2]} ({names[row]}) and"
                f" {first[1]} x {first[2]} ({names[0]}); set image_size"
            )
        return torch.from_numpy(found)

    for name in followed(names[1:], f"look at the images of {path}", len(names)):
        height, width = _height_and_width(path, name, read, several)
        if size is None and (height, width) != first[1:]:
            raise DataError(
                f"{path}: images must all have one size, got {height} x {width} ({name}) and"
                f" {first[1]} x {first[2]} ({names[0]}); set image_size"
            )
    _warn_of_frames(path, several)
    return StreamedImages.of(pixels, len(names), first)


def reader(folder: Path) -> Callable[[str], bytes]:
    """Return a function that reads a folder's files by their names in it."""
    return lambda name: bytes_of(folder / name)


def _chosen(
    path: Path, entries: Iterable[str], limit_per_class: int | None, depth: int
) -> tuple[list[str], Tensor, tuple[str, ...]]:
    """The names of the images to read, their labels and the classes' names."""
    layout = "/".join([*["<group>"] * (depth - 1), "<class>", "<file>"])
    seen = sorted(name for name in entries if not is_hidden(name))
    names = [name for name in seen if name.lower().endswith(SUFFIXES)]
    others = [name for name in seen if not name.endswith("/") and not name.lower().endswith(SUFFIXES)]
    if not names:
        more = f"; {counted(len(others), 'file')} of other names: {_few(others)}" if others else ""
        raise DataError(
            f"{path} must hold {layout} images with one of the suffixes {' '.join(SUFFIXES)}, got none{more}"
        )
    parts = [PurePosixPath(name).parts for name in names]
    below = 1 if len(parts[0]) == depth + 2 and len({part[0] for part in parts}) == 1 else 0
    for name, part in zip(names, parts, strict=True):
        if len(part) != below + depth + 1:
            raise DataError(f"{path} must hold its images as {layout}, got {name[:200]}")
    _check_no_empty_class(path, seen, parts, below, depth)
    if others:
        warnings.warn(
            f"{path}: {counted(len(others), 'file')} without the name of an image not read: {_few(others)}",
            stacklevel=3,
        )
    kept: dict[str, list[str]] = {}
    for name, part in zip(names, parts, strict=True):
        files = kept.setdefault("/".join(part[below:-1]), [])
        if limit_per_class is None or len(files) < limit_per_class:
            files.append(name)
    class_names = tuple(sorted(kept))
    chosen = [name for cls in class_names for name in kept[cls]]
    y = torch.arange(len(class_names)).repeat_interleave(torch.tensor([len(kept[cls]) for cls in class_names]))
    return chosen, y, class_names


def _check_no_empty_class(
    path: Path, seen: Sequence[str], images: Sequence[tuple[str, ...]], below: int, depth: int
) -> None:
    """Refuse class folders without an image: the others would be numbered as if they did not exist."""
    folders = {PurePosixPath(name).parts[: None if name.endswith("/") else -1] for name in seen}
    filled = {part[:-1][:end] for part in images for end in range(1, below + depth + 1)}
    at_top = {images[0][:below]}
    empty = sorted(
        "/".join(each) for each in folders - filled if below < len(each) <= below + depth and each[:below] in at_top
    )
    if empty:
        raise DataError(
            f"{path} has {counted(len(empty), 'folder')} without an image that is read: {_few(empty)}. Add images with"
            f" one of the suffixes {' '.join(SUFFIXES)}, or take such folders away"
        )


def _few(names: Sequence[str]) -> str:
    """The first of some names."""
    return ", ".join(map(brief, names[:5])) + (", ..." if len(names) > 5 else "")


def _height_and_width(path: Path, name: str, read: Callable[[str], bytes], several: list[str]) -> tuple[int, int]:
    """The size of an image upright, which is not decoded; its name is added to ``several`` if it has several frames."""
    try:
        with opened(read(name)) as image:
            width, height = image.size
            if _is_animated(image):
                several.append(name)
            orientation = image.getexif().get(0x0112, 1) if image.format != "TIFF" else 1
    except (DataError, OSError, ValueError) as error:
        raise DataError(f"{path}: cannot read {name[:200]} as an image: {brief(error)}") from error
    except Exception:  # broken EXIF data raise errors of many types, and turn nothing
        return height, width
    return (width, height) if orientation in (5, 6, 7, 8) else (height, width)


def _is_animated(image: Any) -> bool:
    # A camera's MPO has previews of the one picture as further frames.
    return getattr(image, "is_animated", False) and image.format != "MPO"


def _warn_of_frames(path: Path, names: Sequence[str]) -> None:
    if names:
        what = f"of {counted(len(names), 'image')} with several frames only the first is read"
        warnings.warn(f"{path}: {what}: {_few(names)}", stacklevel=3)


def _pixels(
    path: Path,
    name: str,
    read: Callable[[str], bytes],
    size: tuple[int, int] | Callable[[Any], Any] | None,
    mode: Mode,
    several: list[str],
) -> Array:
    """One image as ``3 x h x w`` or ``1 x h x w`` uint8; its name is added to ``several`` if it has several frames."""
    from PIL import Image

    try:
        with opened(read(name)) as image:
            if _is_animated(image):
                several.append(name)
            converted = decoded(image, mode)
    except (DataError, OSError, ValueError) as error:
        raise DataError(f"{path}: cannot read {name[:200]} as an image: {brief(error)}") from error
    if callable(size):
        converted = size(converted)
    elif size is not None and converted.size != size[::-1]:
        converted = converted.resize(size[::-1], Image.Resampling.BILINEAR)
    return np.atleast_3d(np.asarray(converted)).transpose(2, 0, 1)
