"""Recall@k: the share of queries for which any of the k nearest others has the query's label.

`recall_at_k` computes it from embeddings, `recall_metric` makes a black-box metric of a model from it. The search is
FAISS' exact one: on the CPU or, if FAISS was built for GPUs and finds one, on the GPU (hide it with
``CUDA_VISIBLE_DEVICES=`` to keep its memory for the model).
"""

import operator
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from metricopt_ext.errors import DataError
from metricopt_ext.retrieval.neighbours import (
    Array,
    Distance,
    chunk_sizes,
    chunks,
    ranks_of_first,
    searcher,
    without_own,
)
from metricopt_ext.tasks.metric import Ledger, Metric
from metricopt_ext.utils.seeding import generator


@dataclass(frozen=True)
class Recall:
    """Recall@k of a set of queries.

    Attributes:
        at: Recall in [0, 1] for each k, in the order given.
        queries: Number of queries that the recalls are averaged over.
        without_match: Number of queries left out because no other item of the gallery has their label. To count them
            as misses (all queries searched, no subset), multiply by ``queries / (queries + without_match)``.
        gallery: Number of items in the gallery.
    """

    at: dict[int, float]
    queries: int
    without_match: int
    gallery: int

    @property
    def mean(self) -> float:
        """Mean over the values of k, in [0, 1]."""
        return statistics.fmean(self.at.values())


def recall_at_k(
    embeddings: Array,
    labels: Array,
    ks: Sequence[int] = (1, 10, 100, 1000),
    *,
    gallery: tuple[Array, Array] | None = None,
    gallery_starts_with_queries: bool = False,
    distance: Distance = "l2",
    query_subset: int | None = None,
    seed: int = 0,
    progress: str | None = None,
) -> Recall:
    """Compute Recall@k exactly: a query is a hit if any of its k nearest gallery items has its label.

    - A query is not its own neighbour. It is recognised by its row, not by its distance, so its duplicates remain
      neighbours.
    - A query whose label no other gallery item has (the single member of a class) can't be a hit at any k. It is left
      out of the mean, as in pytorch-metric-learning, and counted in `Recall.without_match`; it stays in the gallery.
    - Items at equal distance come in the order in which FAISS returns them. That order may depend on the largest k, on
      the FAISS version and on the device: a recall is defined up to ties at its k-th place.
    - If k exceeds the number of other gallery items, all of them are searched, and the recall is 1.
    - Distances are float32, as FAISS computes them, whatever the type of the embeddings; neighbours whose distances
      differ by no more than float32's rounding may swap places.

    Memory beyond the arguments: a float32 copy of embeddings that are of another type, not contiguous, on a GPU or
    compared by cosine, and about 250 MB for the neighbours of a few thousand queries at a time (400 MB if d is below
    32).

    Args:
        embeddings: Queries, ``n x d``, real and finite; a tensor on any device or an array.
        labels: Their labels, ``n`` integers, compared as int64.
        ks: Numbers of neighbours, each at least 1.
        gallery: Embeddings ``m x d`` and labels ``m`` to be searched; None to search the queries themselves.
        gallery_starts_with_queries: Whether the first n items of ``gallery`` are the queries.
        distance: ``"l2"`` (Euclidean, smallest first), ``"ip"`` (inner product, largest first) or ``"cosine"`` (cosine
            similarity, largest first). For embeddings of length 1 all three give the same order, up to rounding;
            pytorch-metric-learning's testers scale all embeddings to it unless told otherwise.
        query_subset: Search only this many queries, against the full gallery: exact for these queries and
            proportionally cheaper. They are drawn from the queries that have a match; all if there are no more.
        seed: Draws the subset, at least 0; with the same labels it is always the same subset.
        progress: Title of a progress bar on stderr; None for no bar.

    Raises:
        DataError: No embeddings, or not one label for each; embeddings of another dimension or device than the
            gallery's, NaN or infinite, with distances that overflow float32, or of length 0 for the cosine; labels that
            are not integers; a gallery of a single class; no query with a match; queries that the gallery does not
            start with; k or the subset below 1; an unknown distance; a negative seed.

    Example:
        >>> recall_at_k(np.array([[0.0], [1.0], [3.0], [3.5]]), np.array([0, 1, 0, 1]), ks=(1, 2)).at
        {1: 0.0, 2: 0.5}
    """
    ks = check_options(ks, distance, query_subset, seed)
    queries, labels = check_items(embeddings, labels, "", distance)
    if gallery is None:
        items, item_labels = queries, labels
    else:
        _check_device(embeddings, gallery[0])
        items, item_labels = check_items(*gallery, "gallery ", distance)
        _check_gallery(queries, labels, items, item_labels, gallery_starts_with_queries)
    includes_queries = gallery is None or gallery_starts_with_queries

    matched = _with_match(labels, item_labels, includes_queries)
    chosen = matched
    if query_subset is not None:
        order = torch.randperm(len(matched), generator=generator(seed, "recall queries")).numpy()
        chosen = np.sort(matched[order[:query_subset]])

    ranks = ranks_of_first(queries, labels, chosen, items, item_labels, includes_queries, max(ks), distance, progress)
    recalls = {wanted: float(np.mean(ranks < wanted)) for wanted in ks}
    return Recall(recalls, queries=len(chosen), without_match=len(labels) - len(matched), gallery=len(items))


def hits_at_k(
    embeddings: Array, labels: Array, ks: Sequence[int], *, distance: Distance = "l2"
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Return which queries are hits when each searches all others; the mean of a column is `recall_at_k`.

    Args:
        embeddings: ``n x d``, as in `recall_at_k`.
        labels: ``n`` integers.
        ks: Numbers of neighbours, each at least 1.
        distance: As in `recall_at_k`.

    Returns:
        The rows of the m queries whose label another item has, ascending, and whether each is a hit, ``m x len(ks)``.

    Raises:
        DataError: As in `recall_at_k`.
    """
    ks = check_options(ks, distance, None, 0)
    queries, own = check_items(embeddings, labels, "", distance)
    rows = _with_match(own, own, includes_queries=True)
    ranks = ranks_of_first(queries, own, rows, queries, own, True, max(ks), distance)
    return rows, ranks[:, None] < np.array(ks)


def nearest(embeddings: Array, k: int, *, distance: Distance = "l2") -> npt.NDArray[np.int64]:
    """Find the k nearest other embeddings of each, ``n x k`` rows, nearest first; exact, as in `recall_at_k`.

    Args:
        embeddings: ``n x d``, real and finite, n above k; a tensor on any device or an array.
        k: Number of neighbours, at least 1.
        distance: As in `recall_at_k`.

    Raises:
        DataError: As in `recall_at_k`, for the embeddings.
    """
    items, _ = check_items(embeddings, np.arange(len(embeddings)), "", distance)
    search, own = searcher(items, k + 1, distance), np.arange(len(items))
    parts = chunks(len(items), *chunk_sizes(k, items.shape[1]))
    return np.concatenate([without_own(search(items[part]), own[part]) for part in parts])


def recall_metric(
    batches: Iterable[tuple[Any, Tensor]],
    ks: Sequence[int] = (1,),
    *,
    gallery: Iterable[tuple[Any, Tensor]] | None = None,
    embed: Callable[[nn.Module, Any], Tensor] | None = None,
    distance: Distance = "l2",
    query_subset: int | None = None,
    seed: int = 0,
    ledger: Ledger | None = None,
) -> Metric:
    """Make a black-box metric of a model's mean Recall@k, in [0, 1], higher is better.

    Args:
        batches: Pairs of inputs and labels, such as a DataLoader's. They are iterated at each metric query, so a
            generator won't work; with ``query_subset``, their order must stay the same.
        ks: Numbers of neighbours; the metric is the mean of their recalls.
        gallery: Batches of a separate gallery; None to search the queries themselves.
        embed: ``embed(model, inputs)`` returns embeddings ``n x d``; by default the model is called with the inputs
            on the device of its parameters.
        distance: As in `recall_at_k`, which also describes ties and classes with a single member.
        query_subset: As in `recall_at_k`.
        seed: As in `recall_at_k`.
        ledger: Counts the metric queries.

    Raises:
        DataError: For impossible ``ks``, distance, subset or seed. The metric raises whatever `recall_at_k` does.

    Example:
        >>> batches = [(torch.tensor([[0.0], [1.0], [3.0], [3.5]]), torch.tensor([0, 1, 0, 1]))]
        >>> metric = recall_metric(batches, ks=(1, 2))
        >>> metric.name, metric.to_value(metric.cost(nn.Identity(), "example"))
        ('mean Recall@1,2', 0.25)
    """
    ks = check_options(ks, distance, query_subset, seed)
    embed = embed or _call

    def mean_recall(model: nn.Module) -> float:
        queries = _embed_all(model, batches, embed)
        items = None if gallery is None else _embed_all(model, gallery, embed)
        recall = recall_at_k(*queries, ks, gallery=items, distance=distance, query_subset=query_subset, seed=seed)
        return recall.mean

    name = ("mean " if len(ks) > 1 else "") + "Recall@" + ",".join(map(str, ks))
    return Metric(mean_recall, maximize=True, name=name, ledger=ledger)


def _call(model: nn.Module, inputs: Any) -> Tensor:
    parameter = next(model.parameters(), None)
    output: Tensor = model(inputs if parameter is None else inputs.to(parameter.device))
    return output


def _embed_all(
    model: nn.Module, batches: Iterable[tuple[Any, Tensor]], embed: Callable[[nn.Module, Any], Tensor]
) -> tuple[Tensor, Tensor]:
    """Embeddings ``n x d`` and labels ``n`` of all batches, on the CPU."""
    pairs = [(embed(model, inputs).detach().cpu(), torch.as_tensor(labels).cpu()) for inputs, labels in batches]
    if not pairs:
        raise DataError("there are no batches to embed; they must be iterable anew at each metric query")
    return torch.cat([pair[0] for pair in pairs]), torch.cat([pair[1] for pair in pairs])


def _with_match(
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


def check_options(ks: Sequence[int], distance: str, query_subset: int | None, seed: int) -> tuple[int, ...]:
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
    if query_subset is not None and query_subset < 1:
        raise DataError(f"query_subset must be at least 1, or None for all queries, got {query_subset}")
    if seed < 0:
        raise DataError(f"seed must be at least 0, got {seed}")
    return numbers


def check_items(
    embeddings: Array, labels: Array, whose: str = "", distance: Distance = "l2"
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    """Validate embeddings and labels; returns them as contiguous float32 and int64 arrays, copied only if needed.

    Args:
        embeddings: ``n x d``.
        labels: ``n`` integers.
        whose: What comes before "embeddings" in messages.
        distance: For ``"cosine"``, embeddings are scaled to length 1.

    Raises:
        DataError: They are not, differ in number, or are not finite; or labels are no integers.
    """
    embeddings = embeddings.detach() if isinstance(embeddings, Tensor) else np.asarray(embeddings)
    labels = labels.numpy(force=True) if isinstance(labels, Tensor) else np.asarray(labels)
    shape = tuple(embeddings.shape)
    if len(shape) != 2 or 0 in shape:
        raise DataError(f"{whose}embeddings must be n x d with n and d at least 1, got shape {shape}")
    if labels.ndim != 1 or labels.dtype.kind not in "iub":
        raise DataError(
            f"{whose}labels must be n integers, got {labels.dtype} of shape {labels.shape};"
            " floats can't tell ids above 2^24 apart"
        )
    if len(labels) != len(embeddings):
        raise DataError(f"{whose}embeddings and labels must match in number, got {len(embeddings)} and {len(labels)}")
    vectors = _as_float32(embeddings, whose)
    largest, wrong = 0.0, []
    for part in chunks(len(vectors)):
        wrong += (np.flatnonzero(~np.isfinite(vectors[part]).all(axis=1)) + part.start).tolist()
        with np.errstate(over="ignore", invalid="ignore"):
            largest = max(largest, float(np.einsum("ij,ij->i", vectors[part], vectors[part]).max()))
    if wrong:
        raise DataError(
            f"{whose}embeddings must be finite in float32, got NaN or infinity in {len(wrong)} of {len(vectors)} rows,"
            f" first in row {wrong[0]}"
        )
    if 4 * largest > np.finfo(np.float32).max:  # |x - y|^2 <= 4 max |x|^2
        raise DataError(
            f"{whose}embeddings must have squared lengths below 8e37, got {largest:g}: their distances overflow"
            " float32; scale them down"
        )
    if distance == "cosine":
        vectors = _to_unit_length(vectors, whose)
    return vectors, labels.astype(np.int64, copy=False)


def _to_unit_length(vectors: npt.NDArray[np.float32], whose: str) -> npt.NDArray[np.float32]:
    scaled = np.empty_like(vectors)
    for part in chunks(len(vectors)):
        rows = vectors[part].astype(np.float64)  # whose squares neither overflow nor vanish
        lengths = np.linalg.norm(rows, axis=1, keepdims=True)
        if not lengths.all():
            row = part.start + int(lengths.argmin())
            raise DataError(f"{whose}embeddings must not be 0 to be compared by cosine, got 0 in row {row}")
        scaled[part] = rows / lengths
    return scaled


def _as_float32(embeddings: Array, whose: str) -> npt.NDArray[np.float32]:
    if isinstance(embeddings, Tensor) and embeddings.device.type == "cpu" and embeddings.dtype != torch.bfloat16:
        embeddings = embeddings.numpy()
    real = not embeddings.is_complex() if isinstance(embeddings, Tensor) else embeddings.dtype.kind in "fiub"
    if not real:
        raise DataError(f"{whose}embeddings must be real numbers, got {embeddings.dtype}")
    if isinstance(embeddings, np.ndarray) and embeddings.dtype == np.float32 and embeddings.flags.c_contiguous:
        return embeddings
    vectors = np.empty(tuple(embeddings.shape), dtype=np.float32)
    for part in chunks(len(vectors)):  # no second copy of everything on the way, in particular on the GPU
        rows = embeddings[part]
        with np.errstate(over="ignore"):  # caught below, as infinity
            vectors[part] = rows.float().cpu().numpy() if isinstance(rows, Tensor) else rows
    return vectors


def _check_device(embeddings: Array, items: Array) -> None:
    device, other = (str(x.device) if isinstance(x, Tensor) else "cpu" for x in (embeddings, items))
    if device != other:
        raise DataError(f"queries and gallery must be on one device, got {device} and {other}")


def _check_gallery(queries: Any, labels: Any, items: Any, item_labels: Any, starts_with_queries: bool) -> None:
    n, dimension, other = len(queries), queries.shape[1], items.shape[1]
    if dimension != other:
        raise DataError(f"queries and gallery must have embeddings of one dimension, got {dimension} and {other}")
    if not starts_with_queries:
        return
    same = len(items) >= n and all(np.array_equal(queries[part], items[part]) for part in chunks(n))
    if not (same and np.array_equal(labels, item_labels[:n])):
        raise DataError(
            f"the first {n} of the gallery's {len(items)} items must be the queries with their labels; they differ"
        )
