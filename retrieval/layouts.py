"""Folders of images of classes, of queries and of a gallery."""

from collections.abc import Mapping
from pathlib import Path

import torch

from metricopt_ext.data.images import (
    ImageSize,
    load_image_folder,
)
from metricopt_ext.data.labelled import Labelled
from metricopt_ext.data.streamed import stacked
from metricopt_ext.errors import DataError
from metricopt_ext.utils.words import brief

# What folders of queries and of what they search are called, in lower case.
QUERIES, GALLERIES = ("query", "queries"), ("gallery", "index", "database")


def queries_and_gallery(root: Path) -> tuple[Path, Path] | None:
    """Return the folders of queries and of the gallery in a folder, or None if it does not hold both.

    Raises:
        DataError: It holds one of them alone, or one twice.
    """
    folders = [each for each in root.iterdir() if each.is_dir()] if root.is_dir() else []
    found = [[each for each in folders if each.name.lower() in names] for names in (QUERIES, GALLERIES)]
    if not any(found):
        return None
    if [len(each) for each in found] != [1, 1]:
        names = sorted(each.name for each in folders)
        raise DataError(f"{root} must hold one folder of queries and one of the gallery, got {brief(names)}")
    return found[0][0], found[1][0]


def joined(parts: Mapping[str, Labelled]) -> Labelled:
    """Return the examples of several sets as one, one after the other; classes of the same name are one.

    Raises:
        DataError: Their inputs are of different shapes.
    """
    names = sorted({name for part in parts.values() for name in part.class_names})
    places = {name: place for place, name in enumerate(names)}
    shapes = {name: tuple(part.x.shape[1:]) for name, part in parts.items()}
    if len({*shapes.values()}) > 1:
        raise DataError(f"images must all have one size, got {brief(shapes)}; set data.image_size")
    y = [torch.tensor([places[name] for name in part.class_names])[part.y] for part in parts.values()]
    called = [name for part in parts.values() for name in part.names]
    return Labelled(stacked([part.x for part in parts.values()]), torch.cat(y), tuple(names), names=called)


def load_class_folders(root: Path, size: ImageSize | None, stream: bool = False) -> tuple[Labelled, str]:
    """Read images of classes: ``<class>/<file>``, or ``images`` with these (CUB-200-2011).

    Args:
        root: The folder.
        size: As ``image_size`` of `load_image_folder`.
        stream: Whether the images stay on disk (`StreamedImages`).

    Returns:
        The images, and what they were taken for; empty for ``<class>/<file>``.

    Raises:
        DataError: It is of none of these layouts, or can't be read.
    """
    inner = root / "images"
    if (root / "images.txt").is_file() and (root / "image_class_labels.txt").is_file() and inner.is_dir():
        return load_image_folder(inner, size, stream=stream), f"CUB-200-2011: the classes of {inner}"
    return load_image_folder(root, size, stream=stream), ""
