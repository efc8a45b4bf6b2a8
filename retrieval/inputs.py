"""What a search for neighbours takes: options, queries and their gallery, checked and of one type."""

import math
import operator
from collections.abc import Sequence
from typing import Any, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from metricopt_ext.data.arrays import is_dense
from metricopt_ext.errors import DataError
from metricopt_ext.retrieval.neighbours import Distance
from metricopt_ext.retrieval.vectors import Array, Vectors, chunks
from metricopt_ext.utils.seeding import generator
from metricopt_ext.utils.words import brief

Items = tuple[Any, Any]  # embeddings and labels


def with_match(
    labels: npt.NDArray[np.int64], item_labels: npt.NDArray[np.int64], includes_queries: bool
) -> npt.NDArray[np.int64]:
    """Rows of the queries that share their label with another gallery item."""
    classes, sizes = np.unique(item_labels, return_counts=True)
    if len(classes) == 1:
        raise DataError(
            f"the gallery must hold at least two classes, got only class {classes[0]}: any neighbour would be right"
        )
    place = np.searchsorted(classes, labels).clip(max=len(classes) - 1)
    matches = np.where(classes[place] == labels, sizes[place], 0) - includes_queries
    rows = np.flatnonzero(matches > 0)
    if len(rows) == 0:
        raise DataError(
            f"none of the {len(labels)} queries shares its label with another item of the gallery; at least one must"
        )
    return rows


def drawn_queries(rows: npt.NDArray[np.int64], size: int | None, seed: int) -> npt.NDArray[np.int64]:
    """Draw so many rows, ascending; all for None, or if there are no more."""
    if size is None:
        return rows
    order = torch.randperm(len(rows), generator=generator(seed, "recall queries")).numpy()
    return np.sort(rows[order[:size]])


def check_options(
    ks: Sequence[int], distance: str = "l2", query_subset: int | None = None, seed: int = 0
) -> tuple[int, ...]:
    """Validate `recall_at_k`'s options; returns the distinct ks.

    Raises:
        DataError: As in `recall_at_k`.
    """
    try:
        numbers = tuple(dict.fromkeys(operator.index(k) for k in ks))
    except TypeError:
        raise DataError(f"ks must be whole numbers, got {ks!r}") from None
    if not numbers or min(numbers) < 1:
        raise DataError(f"ks must be one or more numbers of neighbours of at least 1, got {list(numbers)}")
    if distance not in get_args(Distance):
        raise DataError(f"distance must be 'l2', 'ip' or 'cosine', got {distance!r}")
    for name, value in (("query_subset", query_subset), ("seed", seed)):
        if value is not None and not hasattr(value, "__index__"):
            raise DataError(f"{name} must be a whole number, got {value!r}")
    if query_subset is not None and query_subset < 1:
        raise DataError(f"query_subset must be at least 1, or None for all queries, got {query_subset}")
    if seed < 0:
        raise DataError(f"seed must be at least 0, got {seed}")
    return numbers


def check_items(embeddings: Array, labels: Array) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    """Validate embeddings and labels; returns them as contiguous float32 and int64 arrays, copied only if needed.

    Args:
        embeddings: ``n x d``.
        labels: ``n`` integers.

    Raises:
        DataError: They are not, differ in number, or are not finite; or labels are no integers.
    """
    vectors, labels = check_vectors(embeddings, labels, "", "l2")
    return _as_float32(vectors.given), labels


def check_vectors(embeddings: Array, labels: Array, whose: str, distance: str) -> tuple[Vectors, npt.NDArray[np.int64]]:
    """Validate embeddings and labels; ``whose`` is what comes before these words in messages."""
    if isinstance(embeddings, Tensor):
        dense = is_dense(embeddings)
        embeddings = embeddings.detach().resolve_conj().resolve_neg() if dense else embeddings
    else:
        dense = not hasattr(embeddings, "tocoo") and not np.ma.is_masked(embeddings)  # of SciPy's sparse arrays
        try:
            embeddings = np.asarray(embeddings)
        except ValueError as error:
            raise DataError(f"{whose}embeddings must be n x d, got rows of several lengths: {brief(error)}") from error
    if not dense:
        raise DataError(
            f"{whose}embeddings must be dense, without a mask and not quantised; give an array or tensor of all n x d"
            " numbers"
        )
    shape = tuple(embeddings.shape)
    if len(shape) != 2 or 0 in shape:
        raise DataError(f"{whose}embeddings must be n x d with n and d at least 1, got shape {shape}")
    labels = as_ids(labels, whose)
    if len(labels) != len(embeddings):
        raise DataError(f"{whose}embeddings and labels must match in number, got {len(embeddings)} and {len(labels)}")
    real = not embeddings.is_complex() if isinstance(embeddings, Tensor) else embeddings.dtype.kind in "fiub"
    if not real:
        raise DataError(f"{whose}embeddings must be real numbers, got {str(embeddings.dtype).removeprefix('torch.')}")
    largest, wrong, zero = 0.0, [], []
    for part in chunks(len(embeddings)):
        rows = _as_float32(embeddings[part])
        wrong += (np.flatnonzero(~np.isfinite(rows).all(axis=1)) + part.start).tolist()
        with np.errstate(over="ignore", invalid="ignore"):
            largest = max(largest, float(np.einsum("ij,ij->i", rows, rows).max()))
        if distance == "cosine":
            given = embeddings[part]
            some = given.any(dim=1).numpy(force=True) if isinstance(given, Tensor) else given.any(axis=1)
            zero += (np.flatnonzero(~some) + part.start).tolist()
    if wrong:
        raise DataError(
            f"{whose}embeddings must be finite in float32, got NaN or infinity in {len(wrong)} of {len(embeddings)}"
            f" rows, first in row {wrong[0]}"
        )
    if 4 * largest > np.finfo(np.float32).max:  # |x - y|^2 <= 4 max |x|^2
        raise DataError(
            f"{whose}embeddings must have squared lengths below 8e37, got {largest:g}: their distances overflow"
            " float32; scale them down"
        )
    if zero:
        raise DataError(f"{whose}embeddings must not be 0 to be compared by cosine, got 0 in row {zero[0]}")
    return Vectors(embeddings, unit=distance == "cosine"), labels


def as_ids(labels: Array, whose: str = "", what: str = "labels") -> npt.NDArray[np.int64]:
    """Return labels as int64, ``n``.

    Args:
        labels: ``n`` or ``n x 1`` integers; or floats that are whole and so small that each integer has its own.
        whose: What comes before ``what`` in messages.
        what: What they are.

    Raises:
        DataError: They are not.
    """
    bits = 53
    if isinstance(labels, Tensor):
        if not is_dense(labels):
            raise DataError(f"{whose}{what} must be dense and not quantised; give all n of them")
        if labels.is_floating_point():
            bits = 1 - round(math.log2(torch.finfo(labels.dtype).eps))
            labels = labels.double()
        labels = labels.numpy(force=True)
    else:
        labels = np.asarray(labels)
        if labels.dtype.kind == "f":
            bits = min(bits, np.finfo(labels.dtype).nmant + 1)
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.dtype.kind not in "iubf":
        names = "; np.unique(labels, return_inverse=True)[1] numbers names, of queries and galleries together"
        raise DataError(
            f"{whose}{what} must be n integers, got {labels.dtype} of shape {labels.shape}"
            + names * (labels.dtype.kind in "USO")
        )
    if labels.ndim != 1:
        row = labels.ndim == 2 and labels.shape[0] == 1
        hot = labels.ndim == 2 and not row and ((labels == 0) | (labels == 1)).all() and (labels.sum(axis=1) == 1).all()
        remedy = "labels.argmax(axis=1) counts the classes" if hot else "flatten them" if row else "choose one column"
        raise DataError(f"{whose}{what} must be n integers, one for each embedding, got shape {labels.shape}; {remedy}")
    if labels.dtype.kind == "f":
        wrong = np.flatnonzero(~((np.abs(labels) < 2.0**bits) & (labels == np.rint(labels))))  # NaN is wrong, too
        if len(wrong):
            raise DataError(
                f"{whose}{what} must be n integers, got {labels[wrong[0]]:g} in row {wrong[0]}: these floats tell whole"
                f" numbers apart below 2^{bits} only; give the {what} as integers"
            )
    if labels.dtype == np.uint64 and len(labels) and labels.max() > np.iinfo(np.int64).max:
        raise DataError(f"{whose}{what} must be below 2^63, got {labels.max()}; number the classes from 0")
    return labels.astype(np.int64, copy=False)


def _as_float32(embeddings: Array) -> npt.NDArray[np.float32]:
    if isinstance(embeddings, Tensor):
        embeddings = embeddings.detach().float().cpu().numpy()
    with np.errstate(over="ignore"):  # to infinity, which is refused
        return np.ascontiguousarray(embeddings, dtype=np.float32)


def _check_device(embeddings: Array, items: Array) -> None:
    device, other = (str(x.device) if isinstance(x, Tensor) else "cpu" for x in (embeddings, items))
    if device != other:
        raise DataError(f"queries and gallery must be on one device, got {device} and {other}")


def check_gallery(
    embeddings: Array, queries: Vectors, labels: npt.NDArray[np.int64], gallery: Any, starts_with_queries: bool
) -> tuple[Vectors, npt.NDArray[np.int64]]:
    """Validate a gallery of these queries; returns its embeddings and labels."""
    if not isinstance(gallery, tuple | list) or len(gallery) != 2:
        got = f"{len(gallery)} of them" if isinstance(gallery, tuple | list) else type(gallery).__name__
        raise DataError(f"gallery must be a pair, embeddings and their labels, got {got}; search galleries one by one")
    _check_device(embeddings, gallery[0])
    items, item_labels = check_vectors(gallery[0], gallery[1], "gallery ", "cosine" if queries.unit else "l2")
    n, dimension, other = queries.size, queries.dimension, items.dimension
    if dimension != other:
        raise DataError(f"queries and gallery must have embeddings of one dimension, got {dimension} and {other}")
    if starts_with_queries:
        same = items.size >= n and all(np.array_equal(queries.rows(part), items.rows(part)) for part in queries.parts())
        if not (same and np.array_equal(labels, item_labels[:n])):
            raise DataError(
                f"the first {n} of the gallery's {items.size} items must be the queries with their labels; they differ"
            )
    return items, item_labels
