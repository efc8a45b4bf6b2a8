"""LIBSVM files as labelled examples."""

import io
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from metricopt_ext.data.labelled import Labelled, Table
from metricopt_ext.data.precision import in_single_precision
from metricopt_ext.data.reading import Reading, row_numbers
from metricopt_ext.data.text_files import content_of
from metricopt_ext.errors import DataError
from metricopt_ext.utils.files import existing
from metricopt_ext.utils.words import brief, counted

StrPath = str | os.PathLike[str]

_CLASSES = 100  # of numbers that are not whole so many may be classes


def load_libsvm(paths: StrPath | Sequence[StrPath], num_features: int | None = None) -> Labelled:
    """Read files in LIBSVM (SVMlight) format, gzipped if named ``.gz``, and stack them.

    Args:
        paths: One file or several.
        num_features: Number of features d; by default the largest index found.

    Returns:
        Inputs ``n x d`` float32, and classes numbered in ascending order of their labels in the file (-1 before +1).

    Raises:
        DataError: For a file that is missing or malformed, or has more than d features; for
            numbers that float32 can't tell apart, or labels that float64 can't, or that are no classes
            but a quantity.
    """
    return in_single_precision(read_libsvm(paths, num_features))


def read_libsvm(paths: StrPath | Sequence[StrPath], num_features: int | None = None) -> Table:
    """Read files as `load_libsvm` does, with all digits of their numbers.

    Args:
        paths: As in `load_libsvm`.
        num_features: As in `load_libsvm`.

    Raises:
        DataError: As from `load_libsvm`.
    """
    from sklearn.datasets import load_svmlight_files

    files = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    named = ", ".join(map(str, files))
    texts = []
    for file in files:
        texts.append(content_of(existing(file)).encode())
    try:
        loaded = load_svmlight_files(list(map(io.BytesIO, texts)), dtype=np.float64, zero_based=True)
    except Exception as error:  # it indexes and converts whatever it reads, with errors of many types
        raise DataError(
            f"cannot read {named} as LIBSVM data: {brief(error)};"
            " a row is a label and features in order, all numbers, as 1 3:0.5 7:2"
        ) from error
    queries = any(re.search(rb"^[^#\n]*\sqid:", text, re.MULTILINE) for text in texts)
    del texts
    parts, numbers = loaded[::2], np.concatenate(loaded[1::2])
    if len(numbers) == 0:
        raise DataError(f"{named} holds no examples")

    # Indices are from 1, as LIBSVM has them, unless one of them is 0.
    first = int(all(part.indices.min() > 0 for part in parts if part.nnz))
    rows, found = len(numbers), max(part.shape[1] for part in parts) - first
    features = max(found, 1) if num_features is None else num_features
    if found > features:
        raise DataError(f"{named} must have at most {counted(features, 'feature')}, got index {found - 1 + first}")
    entries = np.concatenate([part.data for part in parts])
    with np.errstate(over="ignore"):
        rounded = entries.astype(np.float32)
    if not np.isfinite(rounded).all():
        at = entries[~np.isfinite(rounded)][0]
        raise DataError(f"{named}: feature values must be finite and below 3.4e38, got {at:g}")
    # float32, at half the memory, where it holds all numbers
    kind: Any = np.float32 if np.array_equal(rounded, entries) else np.float64
    x, above = np.zeros((rows, features), kind), 0
    for part in parts:
        placed = part.tocoo()
        x[above + placed.row, placed.col - first] = placed.data
        above += part.shape[0]

    wrong = numbers[~(np.abs(numbers) < 2.0**53)]
    if len(wrong):
        raise DataError(
            f"{named}: labels must be numbers below 2^53, beyond which float64 can't tell them apart, got"
            f" {wrong[0]:.17g}"
        )
    labels, y = np.unique(numbers, return_inverse=True)
    if len(labels) > _CLASSES and (parted := labels[labels % 1 != 0]).size:
        raise DataError(
            f"{named}: labels must be classes, but seem to be a quantity: {len(labels)} different ones, such as"
            f" {parted[0]:g}; number the classes by whole numbers"
        )
    said = f"LIBSVM data, {counted(rows, 'example')} of {counted(features, 'feature')}, indices from {first}"
    said += row_numbers(torch.from_numpy(x), first)
    if queries:
        said += "; query ids (qid) are left out"
    names = tuple(np.format_float_positional(label, trim="-") for label in labels)  # with all their digits
    sizes = [part.shape[0] for part in parts]
    rows_named = [f"row {i + 1} of {file}" for file, size in zip(files, sizes, strict=True) for i in range(size)]
    return Table(torch.from_numpy(x), torch.from_numpy(y), names, Reading(said), tuple(sizes), names=rows_named)


def load_a9a(root: StrPath) -> Labelled:
    """Read the two files of a9a (Adult), 48,842 rows of 123 features; class 1 earns more than 50,000.

    Args:
        root: Folder of ``a9a`` and ``a9a.t``, each gzipped (``.gz``) or not.

    Raises:
        DataError: For a missing or malformed file.
    """
    files = [existing(Path(root, name), Path(root, f"{name}.gz")) for name in ("a9a", "a9a.t")]
    return load_libsvm(files, 123)
