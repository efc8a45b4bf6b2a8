"""Labelled examples from files of arrays: x and y of .npz, .pt, .safetensors or .parquet files."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from metricopt_ext.data.arrays import TABLES, array_names, holds_several, read_array
from metricopt_ext.data.labelled import Labelled, Table
from metricopt_ext.data.reading import Reading, row_numbers
from metricopt_ext.errors import DataError
from metricopt_ext.utils.words import brief, counted

PARTS = {"train": "train", "validation": "val", "test": "test"}  # what follows x_ and y_ in a file of all parts
MOST = 1000  # classes


def parts_in(path: Path) -> tuple[str, ...]:
    """Return the parts that a file has inputs of, as ``x_train``.

    Raises:
        DataError: The file can't be read.
    """
    if not (path.is_file() and holds_several(path)):
        return ()
    names = array_names(path)
    return tuple(part for part, own in PARTS.items() if f"x_{own}" in names)


def read_arrays(paths: Sequence[Path], parts: Sequence[str] = ()) -> list[Labelled | Table]:
    """Read inputs and labels of files, one set for each.

    Inputs are ``n x d`` numbers, or images: ``n x h x w`` or ``n x h x w x c`` or ``n x c x h x w`` uint8, or floats in
    the last order. Labels are ``n`` or ``n x 1`` integers or text.

    Args:
        paths: The files.
        parts: Of each the part whose arrays are read, as ``x_train``; empty for ``x`` and ``y``.

    Raises:
        DataError: A file can't be read, or lacks one of the arrays; shapes or types are others; labels are no classes.
    """
    read = list[Labelled | Table]()
    for path, part in zip(paths, parts or [""] * len(paths), strict=True):
        if path.suffix.lower() in TABLES:
            raise DataError(f"{path} is a table of text; data.name=csv reads it, with data.target=COLUMN")
        if not holds_several(path):
            raise DataError(f"{path} must be a .npz, .pt, .safetensors or .parquet file with x and y")
        own = f"_{PARTS[part]}" if part else ""
        x, y = read_array(path, f"x{own}"), np.asarray(read_array(path, f"y{own}"))
        read.append(labelled(path, x if isinstance(x, Tensor) else torch.from_numpy(np.asarray(x)), y))
    return read


def labelled(path: Path | str, x: Tensor, y: npt.NDArray[Any]) -> Labelled | Table:
    """Return inputs and labels, as `read_arrays` takes them, with the names of the classes.

    Args:
        path: Where they are from, for messages.
        x: Inputs.
        y: Labels.

    Raises:
        DataError: Shapes or types are others, or labels are no classes.
    """
    labels = y[:, 0] if y.ndim == 2 and y.shape[1] == 1 else y
    if labels.ndim != 1 or len(labels) != len(x) or len(x) == 0:
        raise DataError(f"{path} must have one label for each of its {counted(len(x), 'input')}, got shape {y.shape}")
    names, numbers = _classes(path, labels)
    rows = [f"row {i} of {path}" for i in range(len(x))]
    if x.dim() == 2:
        if x.is_complex() or (x.is_floating_point() and bool(x.isinf().any())):
            raise DataError(f"{path} must have finite real numbers, got {x.dtype}")
        kept = x if x.dtype == torch.float32 else x.double()
        found = f"arrays of {path}, {counted(len(x), 'row')} of {counted(x.shape[1], 'feature')}{row_numbers(x)}"
        return Table(kept, numbers, names, Reading(found), names=rows)
    return Labelled(images(path, x), numbers, names, names=rows)


def _classes(path: Path | str, labels: npt.NDArray[Any]) -> tuple[tuple[str, ...], Tensor]:
    """The classes' names, in numeric or alphabetical order, and the place of each label."""
    if labels.dtype.kind == "f" and np.array_equal(labels, np.rint(labels)) and (np.abs(labels) < 2**24).all():
        labels = labels.astype(np.int64)
    if labels.dtype.kind == "O":
        kinds = {str if isinstance(each, str) else type(each) for each in labels}
        if len(kinds) > 1:
            shown = " and ".join(sorted(kind.__name__ for kind in kinds))
            raise DataError(f"{path} has labels of several types, {shown}; make all of them text, or all integers")
        labels = np.array(labels.tolist())
    if labels.dtype.kind not in "iubU":
        raise DataError(f"{path} must have integers or text as labels, got {labels.dtype}")
    values, places = np.unique(labels, return_inverse=True)
    if len(values) > MOST:
        raise DataError(f"{path} must have classes as labels, got {len(values)} different ones")
    return tuple(map(str, values.tolist())), torch.from_numpy(places.reshape(-1).astype(np.int64))


def images(path: Path | str, x: Tensor) -> Tensor:
    """Return images as ``n x c x h x w``, uint8 or float32; see `labelled`."""
    if x.dtype == torch.uint8 and x.dim() == 3:
        return x[:, None].contiguous()
    if x.dtype == torch.uint8 and x.dim() == 4:
        first, last = (x.shape[axis] in (1, 3) for axis in (1, 3))
        if first and last and x.shape[1] != x.shape[3]:
            raise DataError(f"{path} has images of shape {tuple(x.shape)}, whose channels may come first or last")
        if last and not first:
            return x.permute(0, 3, 1, 2).contiguous()
        if first:
            return x.contiguous()
    if x.is_floating_point() and x.dim() == 4 and x.shape[1] in (1, 3):
        return x.float()
    raise DataError(
        f"{path} has inputs of {x.dtype} and shape {brief(tuple(x.shape))}; they must be n x d numbers, uint8 images"
        " n x h x w, n x h x w x c or n x c x h x w, or float images n x c x h x w"
    )
