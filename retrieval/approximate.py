"""Approximate search by FAISS' indexes, with how near it is to exact search; and the user's own index as a gallery."""

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from metricopt_ext.errors import DataError
from metricopt_ext.retrieval.inputs import (
    as_ids,
    check_gallery,
    check_options,
    check_vectors,
    drawn_queries,
    with_match,
)
from metricopt_ext.retrieval.neighbours import Distance, Search, chunk_sizes, others, with_bar
from metricopt_ext.retrieval.recall import Recall
from metricopt_ext.retrieval.vectors import Array, Integers, Vectors, chunks
from metricopt_ext.utils.files import open_regular
from metricopt_ext.utils.words import brief

try:
    import faiss
except ImportError as error:
    raise ImportError("approximate search needs FAISS: pip install 'metricopt-ext[retrieval]'") from error

KINDS = ("ivf", "hnsw")
TRAINING = 64  # rows for each list of an inverted file; FAISS asks for 39 at least
LINKS, CANDIDATES = 32, 128  # of hierarchical navigable small worlds (Malkov & Yashunin, 2018): M, ef while building
MISSING = np.iinfo(np.int64).max


@dataclass(frozen=True)
class Index:
    """An index of a gallery.

    Attributes:
        faiss: FAISS' index.
        name: What it is.
    """

    faiss: Any
    name: str


@dataclass(frozen=True)
class Overlap:
    """How near an index is to exact search.

    Attributes:
        name: What it is.
        sample: How many queries were searched exactly, too; 0 for an index without the embeddings that it was made of.
        found: For each k, the share of the k nearest items that are among the index's k, mean over the sample.
        recall: For each k, Recall@k of the sample by the index.
        exact: For each k, the exact Recall@k of the sample.
    """

    name: str
    sample: int
    found: dict[int, float]
    recall: dict[int, float]
    exact: dict[int, float]


def recall_by_index(
    embeddings: Array,
    labels: Array,
    ks: Sequence[int],
    kind: str | None,
    sample: int = 1000,
    *,
    gallery: tuple[Any, Array] | None = None,
    distance: Distance = "l2",
    query_subset: int | None = None,
    seed: int = 0,
    progress: str | None = None,
) -> tuple[Recall, Overlap]:
    """Compute Recall@k by approximate neighbours, and compare these with exact ones for a sample of the queries.

    Args:
        embeddings: As in `recall_at_k`.
        labels: As in `recall_at_k`.
        ks: As in `recall_at_k`.
        kind: ``"ivf"``, an inverted file of about 4 sqrt(m) lists, of which a sixteenth are searched (Sivic &
            Zisserman, 2003), or ``"hnsw"`` (Malkov & Yashunin, 2018); None if the gallery is an `Index`.
        sample: How many queries are searched exactly, too, at least 1.
        gallery: As in `recall_at_k`; or an `Index` in place of the embeddings, which can't be compared then.
        distance: As in `recall_at_k`.
        query_subset: As in `recall_at_k`.
        seed: As in `recall_at_k`; of the sample, too.
        progress: Title of a progress bar on stderr; None for no bar.

    Raises:
        DataError: As in `recall_at_k`; an unknown kind; a sample below 1; or an index whose items are not the labels'.
    """
    ks = check_options(ks, distance, query_subset, seed)
    if sample < 1:
        raise DataError(f"the sample must be of at least 1 query, got {sample}")
    queries, own = check_vectors(embeddings, labels, "", distance)
    given = gallery is not None and isinstance(gallery[0], Index)
    items, item_labels = queries, own
    if given:
        index, item_labels = gallery[0], as_ids(gallery[1], "gallery ")  # type: ignore[index]
    elif gallery is not None:
        items, item_labels = check_gallery(embeddings, queries, own, gallery, False)
    rows = with_match(own, item_labels, includes_queries=gallery is None)
    chosen, k = drawn_queries(rows, query_subset, seed), min(max(ks), len(item_labels) - (gallery is None))
    if not given:
        index = built(kind or "", items, distance, k)
    found = np.concatenate(
        [
            _found(index, queries, chosen[part], k, gallery is None, len(item_labels))
            for part in with_bar(chunks(len(chosen), *chunk_sizes(k, queries.dimension)), progress)
        ]
    )
    places = _places(found, own[chosen], item_labels)
    at = {each: float(np.mean(places < each)) for each in ks}
    recall = Recall(at, len(chosen), len(own) - len(rows), len(item_labels), rows=chosen, places=places)
    if given:
        return recall, Overlap(index.name, 0, {}, {}, {})
    some = np.searchsorted(chosen, drawn_queries(chosen, sample, seed))
    search = Search(queries, items, distance, k, own=gallery is None)
    near = search.nearest(chosen[some], k)
    exact = _places(near, own[chosen[some]], item_labels)
    shares = {
        each: float(np.mean([np.isin(a[:each], b[:each]).mean() for a, b in zip(near, found[some], strict=True)]))
        for each in ks
    }
    by_index, exactly = ({each: float(np.mean(p < each)) for each in ks} for p in (places[some], exact))
    return recall, Overlap(index.name, len(some), shares, by_index, exactly)


def built(kind: str, items: Vectors, distance: Distance, k: int) -> Index:
    """Return an index of embeddings, for k neighbours.

    Raises:
        DataError: An unknown kind.
    """
    metric = faiss.METRIC_INNER_PRODUCT if distance == "ip" else faiss.METRIC_L2  # rows of length 1 for the cosine
    n, d = items.size, items.dimension
    index: Any
    if kind == "ivf":
        lists = max(1, min(round(4 * math.sqrt(n)), n // 39))
        flat = faiss.IndexFlatIP(d) if distance == "ip" else faiss.IndexFlatL2(d)
        index = faiss.IndexIVFFlat(flat, d, lists, metric)
        index.nprobe = min(lists, max(8, lists // 16))
        index.train(items.rows(np.linspace(0, n - 1, min(n, TRAINING * lists)).astype(np.int64)).astype(np.float32))
        name = f"ivf, {index.nprobe} of {lists} lists"
    elif kind == "hnsw":
        index = faiss.IndexHNSWFlat(d, LINKS, metric)
        index.hnsw.efConstruction, index.hnsw.efSearch = CANDIDATES, max(CANDIDATES, 2 * k)
        name = f"hnsw, {LINKS} links, {index.hnsw.efSearch} candidates"
    else:
        raise DataError(f"index {kind!r} is none of {', '.join(KINDS)}")
    for part in items.parts():
        index.add(items.rows(part).astype(np.float32))
    return Index(index, name)


def read_index(path: Path, dimension: int, distance: Distance, size: int) -> Index:
    """Read an index of FAISS, of any kind that it can search.

    Args:
        path: The file, as ``faiss.write_index`` writes it.
        dimension: d, of the queries.
        distance: What they are compared by, ``"l2"`` or ``"ip"``.
        size: How many labels the gallery has.

    Raises:
        DataError: There is no such file, or it can't be read; or it is of another dimension, distance or size.
    """
    if distance == "cosine":
        raise DataError(f"{path} has lengths that can't be told; scale both to 1 before, and take --distance ip")
    if not path.is_file():
        raise DataError(f"{path} does not exist")
    try:
        with open_regular(path) as file:
            found, count, _, _, _, metric = struct.unpack("<iqqq?i", file.read(4 + 33)[4:])
    except Exception as error:
        raise DataError(f"{path} is not an index of FAISS ({brief(error)})") from error
    wanted = faiss.METRIC_INNER_PRODUCT if distance == "ip" else faiss.METRIC_L2
    if found != dimension:
        raise DataError(f"{path} is not an index of embeddings of dimension {dimension}, as the queries; got {found}")
    if metric != wanted:
        other = {faiss.METRIC_INNER_PRODUCT: "ip", faiss.METRIC_L2: "l2"}.get(metric, f"FAISS' metric {metric}")
        raise DataError(f"{path} compares by {other}, and --distance is {distance}")
    if count != size:
        raise DataError(f"{path} has {count} items, and there are {size} gallery labels")
    limits = hasattr(faiss, "set_deserialization_vector_byte_limit")  # not in older versions
    before = faiss.get_deserialization_vector_byte_limit() if limits else 0
    try:
        if limits:  # whatever sizes it declares
            faiss.set_deserialization_vector_byte_limit(path.stat().st_size)
        index = faiss.read_index(str(path))
    except Exception as error:
        raise DataError(f"{path} is truncated or not an index of FAISS ({brief(error)})") from error
    finally:
        if limits:
            faiss.set_deserialization_vector_byte_limit(before)
    if not index.is_trained or index.d != dimension or index.ntotal != size:
        raise DataError(f"{path} is not an index that can be searched; train it and add the gallery's items")
    return Index(index, f"{type(index).__name__} of {path}")


def _found(index: Index, queries: Vectors, rows: Integers, k: int, own: bool, size: int) -> Integers:
    """The nearest items of queries that an index finds, ``b x k``; -1 where it finds no more."""
    found: Integers
    _, found = index.faiss.search(queries.rows(rows).astype(np.float32), min(k + own, size))
    if len(wrong := found[(found >= size) | (found < -1)]):
        raise DataError(f"{index.name} finds item {wrong[0]}, but the gallery has {size}; its ids must be their rows")
    return found[others(found, rows)].reshape(len(rows), -1) if own else found


def _places(found: Integers, labels: Integers, item_labels: Integers) -> Integers:
    """The place of the first item with each query's label, from 0; a large number if there is none."""
    hits = (item_labels[found] == labels[:, None]) & (found >= 0)
    places: Integers = np.where(hits.any(axis=1), hits.argmax(axis=1), MISSING)
    return places
