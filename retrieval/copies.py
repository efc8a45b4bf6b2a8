"""Copies: queries that are in their gallery too, where each finds itself, and items that are there twice."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from metricopt_ext.retrieval.inputs import Items, as_ids
from metricopt_ext.retrieval.vectors import SAMPLE, Array, Vectors, fingerprints

# What is calculated again differs by far less than this part of the embeddings' standard deviation. With fewer
# dimensions, different embeddings are as near to each other by chance.
STEPS, FEWEST_DIMENSIONS = 512, 8


def copies_in_gallery(queries: Vectors, labels: Any, items: Vectors, item_labels: Any, chosen: Any) -> tuple[int, str]:
    """How many of the chosen queries occur in the gallery, content and label, and what to say; empty for nothing.

    Copies may be of lower precision. What is calculated again differs in its last digits, which few coordinates show.
    """
    floats = [dtype for dtype in map(_dtype, (queries.given, items.given)) if dtype.is_floating_point]
    coarse = max(floats, key=lambda dtype: torch.finfo(dtype).eps, default=None)
    count = f"of {len(chosen)} queries"
    remedy = (
        "leave them out of the gallery (recall_at_k takes one that starts with all queries, too:"
        " gallery_starts_with_queries=True)"
    )
    own, theirs = (fingerprints(Vectors(each.given), coarse) for each in (queries, items))
    same, other = _found_again(own[chosen], labels[chosen], theirs, item_labels)
    if same:
        return same, (
            f"{same} {count} are in the gallery too, the same embedding with the same label: they find themselves, so"
            f" recall is too high; {remedy}"
        )
    if 2 * other > len(chosen):
        return 0, (
            f"{other} {count} are in the gallery under another label: they find themselves, so recall is too low;"
            " number the classes of queries and gallery alike, and leave queries out of the gallery"
        )
    if queries.dimension < FEWEST_DIMENSIONS:
        return 0, ""
    sample = items.rows(np.linspace(0, items.size - 1, min(items.size, SAMPLE)).astype(np.int64))
    if not (spread := float(sample.std(axis=0).mean())):
        return 0, ""
    grid = sample.mean(axis=0), spread / STEPS
    own, theirs = (fingerprints(each, grid=grid) for each in (queries, items))
    near, _ = _found_again(own[chosen], labels[chosen], theirs, item_labels)
    if near < len(chosen) / 10:
        return 0, ""
    return 0, (
        f"at least {near} {count} are in the gallery too, nearly the same embedding with the same label, as if"
        f" calculated again: they find themselves, so recall is too high; {remedy}"
    )


def _dtype(given: Array) -> torch.dtype:
    """The type of embeddings: of an array's the one that torch has, whatever the byte order; float64 is the finest."""
    if isinstance(given, Tensor):
        return given.dtype
    kinds = {2: torch.float16, 4: torch.float32}
    return kinds.get(given.dtype.itemsize, torch.float64) if given.dtype.kind == "f" else torch.int64


def _found_again(own: Any, labels: Any, theirs: Any, item_labels: Any) -> tuple[int, int]:
    """How many queries' contents, by fingerprints, are in the gallery with the query's label, and with others alone."""
    known, content = set(zip(theirs.tolist(), item_labels.tolist(), strict=True)), set(theirs.tolist())
    pairs = list(zip(own.tolist(), labels.tolist(), strict=True))
    same = sum(pair in known for pair in pairs)
    return same, sum(pair[0] in content for pair in pairs) - same


def equal_items(queries: Items, items: Items) -> bool:
    """Whether embeddings and labels are the same, whatever their types."""
    if tuple(queries[0].shape) != tuple(items[0].shape) or len(items[0].shape) != 2 or 0 in items[0].shape:
        return False
    if not np.array_equal(as_ids(queries[1]), as_ids(items[1], "gallery ")):
        return False
    own, theirs = Vectors(queries[0]), Vectors(items[0])
    return all(np.array_equal(own.rows(part), theirs.rows(part)) for part in own.parts())


def repeated(items: Items) -> int:
    """Return how many items have a copy, embedding and label, among the others."""
    shape = tuple(items[0].shape)
    if len(shape) != 2 or 0 in shape or tuple(items[1].shape)[:1] != shape[:1]:
        return 0  # which is refused
    known = np.column_stack([fingerprints(Vectors(items[0])).view(np.int64), as_ids(items[1])])
    _, counts = np.unique(known, axis=0, return_counts=True)
    return int(counts[counts > 1].sum())
