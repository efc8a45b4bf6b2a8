"""Recall@k: the share of queries for which any of the k nearest others has the query's label.

`recall_at_k` computes it from embeddings, `recall_metric` makes a black-box metric of a model from it. FAISS searches
in float32: on the CPU or, if FAISS was built for GPUs and finds one, on the GPU (hide it with ``CUDA_VISIBLE_DEVICES=``
to keep its memory for the model). What float32 can't tell apart is compared in float64.
"""

import math
import statistics
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from metricopt_ext.data.halves import class_draws
from metricopt_ext.errors import DataError
from metricopt_ext.retrieval.copies import copies_in_gallery
from metricopt_ext.retrieval.inputs import check_gallery, check_options, check_vectors, drawn_queries, with_match
from metricopt_ext.retrieval.judged import JudgedEmbeddings, Processing
from metricopt_ext.retrieval.left_out import LeftOut, ahead_of_first, order_left_out
from metricopt_ext.retrieval.neighbours import Distance, Search, chunk_sizes, ranks_of_first
from metricopt_ext.retrieval.post_processing import PostProcessing
from metricopt_ext.retrieval.vectors import Array, Vectors, chunks
from metricopt_ext.tasks.evaluation import Pairs
from metricopt_ext.tasks.halved import Halved, with_halves
from metricopt_ext.tasks.ledger import Ledger
from metricopt_ext.tasks.metric import Metric

# Of the nearest 2 k + this many deviations, fewer than k are of one half by chance in less than one of 10,000 queries.
SPARE = 3


@dataclass(frozen=True)
class Recall:
    """Recall@k of a set of queries.

    Attributes:
        at: Recall in [0, 1] for each k, in the order given.
        queries: Number of queries that the recalls are averaged over.
        without_match: Number of queries left out because no other item of the gallery has their label. To count them
            as misses (all queries searched, no subset), multiply by ``queries / (queries + without_match)``.
        gallery: Number of items in the gallery.
        doubles: Number of queries whose neighbours float32 could not tell apart; float64 did.
        copies: Number of queries that occur in a separate gallery with their label, and find themselves.
        rows: The rows of the queries that the recalls are averaged over, ascending.
        places: The place, from 0, of each one's nearest item of its label: below k where the query is a hit at k.
    """

    at: dict[int, float]
    queries: int
    without_match: int
    gallery: int
    doubles: int = field(default=0, compare=False)
    copies: int = field(default=0, compare=False)
    rows: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64), repr=False, compare=False)
    places: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64), repr=False, compare=False)

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
    augmentation: int = 0,
    progress: str | None = None,
) -> Recall:
    """Compute Recall@k exactly: a query is a hit if any of its k nearest gallery items has its label.

    - A query is not its own neighbour. It is recognised by its row, not by its distance, so its duplicates remain
      neighbours.
    - A query whose label no other gallery item has (the single member of a class) can't be a hit at any k. It is left
      out of the mean, as in pytorch-metric-learning, and counted in `Recall.without_match`; it stays in the gallery.
    - Items at equal distance come in the order of their rows.
    - If k exceeds the number of other gallery items, all of them are searched, and the recall is 1.
    - The order is that of float64 distances of the embeddings as they are given. FAISS searches in float32; queries
      for which its rounding leaves a k open are counted in `Recall.doubles` and decided in float64, which takes up to
      ten times as long where it is all of them (embeddings in groups far from each other, or very many ties).
    - Queries that occur in a gallery that is not said to start with them find themselves: a warning counts those with
      the same label, or else those with another one or with nearly the same embedding, if they are many.

    Memory beyond the arguments: a float32 copy of embeddings that are of another type, not contiguous, on a GPU,
    compared by cosine, or far from 0 or from a length of 1, and about 250 MB for the neighbours of a few thousand
    queries at a time (400 MB if d is below 32).

    Args:
        embeddings: Queries, ``n x d``, real and finite; a tensor on any device or an array.
        labels: Their labels, ``n`` or ``n x 1`` integers, compared as int64. Floats are read as integers if they are
            whole and so small that no two integers are the same float (float32: below 2^24).
        ks: Numbers of neighbours, each at least 1.
        gallery: Embeddings ``m x d`` and labels ``m`` to be searched; None to search the queries themselves.
        gallery_starts_with_queries: Whether the first n items of ``gallery`` are the queries.
        distance: ``"l2"`` (Euclidean, smallest first), ``"ip"`` (inner product, largest first) or ``"cosine"`` (cosine
            similarity, largest first). For embeddings of length 1 all three give the same order, up to rounding;
            pytorch-metric-learning's testers scale all embeddings to it unless told otherwise.
        query_subset: Search only this many queries, against the full gallery: exact for these queries and
            proportionally cheaper. They are drawn from the queries that have a match; all if there are no more.
        seed: Draws the subset, at least 0; with the same labels it is always the same subset.
        augmentation: With how many of its neighbours each item is mixed, of embeddings on the CPU that search each
            other; each query is left out of what it finds, as if it were new (`LeftOut`). 0 for none.
        progress: Title of a progress bar on stderr; None for no bar.

    Raises:
        DataError: No embeddings, or not one label for each; embeddings of another dimension or device than the
            gallery's, NaN or infinite, with distances that overflow float32, or of length 0 for the cosine; labels that
            are not integers; a gallery that is no pair, or of a single class; no query with a match; queries that the
            gallery does not start with; k or the subset below 1; an unknown distance; a negative seed; an augmentation
            and a gallery.

    Examples:
        >>> recall_at_k(np.array([[0.0], [1.0], [3.0], [3.5]]), np.array([0, 1, 0, 1]), ks=(1, 2)).at
        {1: 0.0, 2: 0.5}
    """
    ks = check_options(ks, distance, query_subset, seed)
    queries, labels = check_vectors(embeddings, labels, "", distance)
    if gallery is None:
        items, item_labels = queries, labels
    else:
        items, item_labels = check_gallery(embeddings, queries, labels, gallery, gallery_starts_with_queries)
    includes_queries = gallery is None or gallery_starts_with_queries

    matched = with_match(labels, item_labels, includes_queries)
    chosen = drawn_queries(matched, query_subset, seed)

    if augmentation:
        if gallery is not None:
            raise DataError("a gallery is mixed with its neighbours before it is searched, not by augmentation")
        everything = np.ones((len(labels), 1), dtype=np.float32)
        places = _places_left_out(torch.as_tensor(embeddings), labels, chosen, augmentation, distance, everything)[:, 0]
        recalls = {wanted: float(np.mean(places < wanted)) for wanted in ks}
        return Recall(recalls, len(chosen), len(labels) - len(matched), items.size, rows=chosen, places=places)
    copies, said = (0, "") if includes_queries else copies_in_gallery(queries, labels, items, item_labels, chosen)
    if said:
        warnings.warn(said, stacklevel=2)
    ranks, doubles = ranks_of_first(
        queries, labels, chosen, items, item_labels, includes_queries, ks, distance, progress
    )
    recalls = {wanted: float(np.mean(ranks < wanted)) for wanted in ks}
    return Recall(recalls, len(chosen), len(labels) - len(matched), items.size, doubles, copies, chosen, ranks)


def hits_at_k(
    embeddings: Array,
    labels: Array,
    ks: Sequence[int],
    *,
    gallery: tuple[Array, Array] | None = None,
    distance: Distance = "l2",
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Return which queries are hits, as each searches all others, or a gallery; a column's mean is `recall_at_k`.

    Args:
        embeddings: ``n x d``, as in `recall_at_k`.
        labels: ``n`` integers.
        ks: Numbers of neighbours, each at least 1.
        gallery: As in `recall_at_k`.
        distance: As in `recall_at_k`.

    Returns:
        The rows of the m queries whose label another item has, ascending, and whether each is a hit, ``m x len(ks)``.

    Raises:
        DataError: As in `recall_at_k`.
    """
    ks = check_options(ks, distance)
    queries, own = check_vectors(embeddings, labels, "", distance)
    items, item_labels = queries, own
    if gallery is not None:
        items, item_labels = check_gallery(embeddings, queries, own, gallery, False)
    rows = with_match(own, item_labels, includes_queries=gallery is None)
    ranks, _ = ranks_of_first(queries, own, rows, items, item_labels, gallery is None, ks, distance)
    return rows, ranks[:, None] < np.array(ks)


def recalls_on_halves(
    embeddings: Array,
    labels: Array,
    ks: Sequence[int],
    pairs: Sequence[tuple[Tensor, Tensor]],
    *,
    distance: Distance = "l2",
) -> tuple[float, Pairs]:
    """Return mean Recall@k of all embeddings, and of each half, searched in itself, from one search of all.

    The values are those of `recall_at_k`. A half has all items of a query's class, so what comes before the first of
    them within the half is what of the half comes before it among all. A query whose nearest items are too few of its
    own half to tell is searched in the half.

    Args:
        embeddings: ``n x d``, as in `recall_at_k`.
        labels: ``n`` integers.
        ks: Numbers of neighbours, each at least 1.
        pairs: Indices of halves, ascending, of different classes each (`class_draws`).
        distance: As in `recall_at_k`.

    Raises:
        DataError: As from `recall_at_k`, for all of them or a half; or a half has some items of a class alone.
    """
    ks = check_options(ks, distance)
    items, own = check_vectors(embeddings, labels, "", distance)
    rows = with_match(own, own, includes_queries=True)
    count = min(items.size - 1, 2 * max(ks) + math.ceil(SPARE * math.sqrt(2 * max(ks))))
    search, halves = Search(items, items, distance, count, own=True), [_members(own, pair) for pair in pairs]
    before = np.empty((1 + 2 * len(pairs), len(rows)), dtype=np.int64)  # items before the first of the query's class
    matched = np.empty(len(rows), dtype=np.bool_)
    for part in chunks(len(rows), *chunk_sizes(search.count, items.dimension)):
        found, ahead, matched[part] = search.ahead_of_match(rows[part], own[rows[part]], own, count)
        before[0, part] = ahead.sum(axis=1)
        for number, members in enumerate(half for pair in halves for half in pair):
            before[1 + number, part] = (ahead & members[found]).sum(axis=1)

    def mean(places: npt.NDArray[np.int64]) -> float:
        return statistics.fmean(float(np.mean(places < k)) for k in ks)

    def on_half(number: int, half: Tensor, members: npt.NDArray[np.bool_]) -> float:
        own_rows = members[rows]
        places, unknown = before[1 + number, own_rows], ~matched[own_rows] & (before[1 + number, own_rows] < max(ks))
        if unknown.any():
            at = half.numpy(force=True)
            part = Vectors(embeddings[half.to(embeddings.device) if isinstance(embeddings, Tensor) else at], items.unit)
            chosen = np.searchsorted(at, rows[own_rows][unknown])
            places[unknown], _ = ranks_of_first(part, own[at], chosen, part, own[at], True, ks, distance)
        return mean(places)

    values = tuple(
        (on_half(2 * number, pair[0], members[0]), on_half(2 * number + 1, pair[1], members[1]))
        for number, (pair, members) in enumerate(zip(pairs, halves, strict=True))
    )
    return mean(np.where(matched, before[0], items.size)), values


def recalls_left_out(
    embeddings: Tensor,
    labels: Array,
    ks: Sequence[int],
    pairs: Sequence[tuple[Tensor, Tensor]] | str,
    augmentation: int,
    distance: Distance,
    query_subset: int | None = None,
    seed: int = 0,
) -> Halved:
    """Return mean Recall@k of embeddings that are mixed with their neighbours, each query being new (`LeftOut`).

    Those on halves are of what comes before within the half, as it was mixed with its neighbours among all.

    Args:
        embeddings: ``n x d`` on the CPU, as `each_alone` returns them.
        labels: ``n`` integers.
        ks: Numbers of neighbours, each at least 1.
        pairs: Indices of halves, of different classes each (`class_draws`); or why there are none.
        augmentation: With how many of its neighbours each is mixed.
        distance: As in `recall_at_k`.
        query_subset: As in `recall_at_k`.
        seed: As in `recall_at_k`.

    Raises:
        DataError: As from `recalls_on_halves`.
    """
    _, own = check_vectors(embeddings, labels, "", "cosine")
    rows = drawn_queries(with_match(own, own, includes_queries=True), query_subset, seed)
    halves = [] if isinstance(pairs, str) else [half for pair in pairs for half in _members(own, pair)]
    of_half = np.stack([np.ones(len(own), dtype=np.bool_), *halves], 1).astype(np.float32)
    before = _places_left_out(embeddings, own, rows, augmentation, distance, of_half)

    def mean(number: int) -> float:
        places = before[of_half[rows, number] > 0, number]
        return statistics.fmean(float(np.mean(places < k)) for k in ks) if len(places) else math.nan

    values = tuple((mean(1 + number), mean(2 + number)) for number in range(0, len(halves), 2))
    return Halved(mean(0), pairs if isinstance(pairs, str) else values or None)


def _places_left_out(
    embeddings: Tensor,
    labels: npt.NDArray[np.int64],
    rows: npt.NDArray[np.int64],
    augmentation: int,
    distance: Distance,
    of_half: npt.NDArray[np.float32],
) -> npt.NDArray[np.int64]:
    """Return how many of each half, ``n x h`` of 0 and 1, come before each query's first match, ``len(rows) x h``."""
    before = np.empty((len(rows), of_half.shape[1]), dtype=np.int64)
    for part, keys in LeftOut(embeddings, augmentation, distance).keys(rows):
        matches = labels[rows[part], None] == labels
        matches[np.arange(len(matches)), rows[part]] = False
        before[part] = ahead_of_first(keys, matches).astype(np.float32) @ of_half
    return before


def _members(labels: npt.NDArray[np.int64], pair: tuple[Tensor, Tensor]) -> list[npt.NDArray[np.bool_]]:
    """Return which items each half has, ``n`` each.

    Raises:
        DataError: One has some of a class alone, or no two classes.
    """
    members = []
    for half in pair:
        member = np.zeros(len(labels), dtype=np.bool_)
        member[half.numpy(force=True)] = True
        if len(elsewhere := labels[np.isin(labels, labels[member]) & ~member]):
            raise DataError(f"a half has some items of class {elsewhere[0]} alone; give each class to one half")
        with_match(labels[member], labels[member], includes_queries=True)  # refuses
        members.append(member)
    return members


def nearest(
    embeddings: Array, k: int, *, gallery: Array | None = None, distance: Distance = "l2", augmentation: int = 0
) -> npt.NDArray[np.int64]:
    """Find the k nearest other embeddings of each, ``n x k`` rows, nearest first; exact, as in `recall_at_k`.

    Args:
        embeddings: ``n x d``, real and finite, n above k; a tensor on any device or an array.
        k: Number of neighbours, at least 1.
        gallery: What they are searched in, ``m x d``, m at least k; None for the embeddings themselves.
        distance: As in `recall_at_k`.
        augmentation: As in `recall_at_k`.

    Raises:
        DataError: As in `recall_at_k`, for the embeddings.
    """
    items, own = check_vectors(embeddings, np.arange(len(embeddings)), "", distance)
    if augmentation and gallery is None:
        return order_left_out(torch.as_tensor(embeddings), augmentation, distance, k)
    searched = items
    if gallery is not None:
        searched, _ = check_gallery(embeddings, items, own, (gallery, np.arange(len(gallery))), False)
    search, rows = Search(items, searched, distance, k, own=gallery is None), np.arange(items.size)
    return np.concatenate(
        [search.nearest(rows[part], k) for part in chunks(items.size, *chunk_sizes(k, items.dimension))]
    )


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
    new_classes: bool = True,
) -> Metric:
    """Make a black-box metric of a model's mean Recall@k, in [0, 1], higher is better.

    It tells its values on pairs of halves of the queries, of other classes each, if there are enough (`class_draws`).
    Without a gallery each half is searched in itself. One search tells all of them, in about twice its time; with a
    gallery or a subset of the queries they are searched one by one, which takes up to 8 times as long again.

    Args:
        batches: Pairs of inputs and labels, such as a DataLoader's. They are iterated at each metric query, so a
            generator won't work; with ``query_subset``, their order must stay the same.
        ks: Numbers of neighbours; the metric is the mean of their recalls.
        gallery: Batches of a separate gallery; None to search the queries themselves.
        embed: ``embed(model, inputs)`` returns embeddings ``n x d``; by default the model is called with the inputs
            on the device of its parameters.
        distance: As in `recall_at_k`, which also describes ties and classes with a single member.
        query_subset: As in `recall_at_k`.
        seed: As in `recall_at_k`; of the halves, too.
        ledger: Counts the metric queries.
        new_classes: Whether the model will be judged on other classes than these, as usual in retrieval (`Metric`).

    Raises:
        DataError: For impossible ``ks``, distance, subset or seed. The metric raises whatever `recall_at_k` does.

    Examples:
        >>> batches = [(torch.tensor([[0.0], [1.0], [3.0], [3.5]]), torch.tensor([0, 1, 0, 1]))]
        >>> metric = recall_metric(batches, ks=(1, 2))
        >>> metric.name, metric.evaluate(nn.Identity(), "example").value
        ('mean Recall@1,2', 0.25)
    """
    ks = check_options(ks, distance, query_subset, seed)
    embed = embed or _call

    def embedded(model: nn.Module) -> Embedded:
        queries = _embed_all(model, batches, embed)
        return Embedded(queries, None if gallery is None else _embed_all(model, gallery, embed))

    def mean_recall(found: Embedded, processing: Processing) -> Any:
        post, labels = processing.post, found.labels
        draws = class_draws(labels, seed)
        if post.augmentation and found.gallery is None:
            alone = processing.alone(found.queries[0])
            return recalls_left_out(alone, labels, ks, draws, post.augmentation, distance, query_subset, seed)
        queries, items = found.queries[0], found.gallery
        if items is None:
            queries = processing.of(queries)
        elif post != PostProcessing():
            whole = processing.of(found.all, torch.arange(len(queries) + len(items[0])) < len(queries))
            queries, items = whole[: len(queries)], (whole[len(queries) :], items[1])
        if items is None and query_subset is None and not isinstance(draws, str):
            return Halved(*recalls_on_halves(queries, labels, ks, draws, distance=distance))

        def value_on(half: Tensor | None) -> float:
            rows = slice(None) if half is None else half
            options: dict[str, Any] = {"distance": distance, "query_subset": query_subset, "seed": seed}
            return recall_at_k(queries[rows], labels[rows], ks, gallery=items, **options).mean

        return with_halves(value_on, draws)

    function = JudgedEmbeddings(embedded, mean_recall, embeddings_of=lambda found: found.all, embed_inputs=embed)
    name = ("mean " if len(ks) > 1 else "") + "Recall@" + ",".join(map(str, ks))
    return Metric(function, maximize=True, name=name, ledger=ledger, new_classes=new_classes)


class Embedded(NamedTuple):
    """Embeddings and labels of a metric's data, on the CPU.

    Attributes:
        queries: ``n x d`` and ``n``.
        gallery: ``m x d`` and ``m``; None if the queries search each other.
    """

    queries: tuple[Tensor, Tensor]
    gallery: tuple[Tensor, Tensor] | None = None

    @property
    def labels(self) -> Tensor:
        """The queries' labels, ``n``."""
        return self.queries[1]

    @property
    def all(self) -> Tensor:
        """All embeddings, the gallery's last.

        Raises:
            DataError: The gallery's have another dimension than the queries'.
        """
        if self.gallery is None:
            return self.queries[0]
        dimension, other = self.queries[0].shape[1:], self.gallery[0].shape[1:]
        if dimension != other:
            raise DataError(f"queries and gallery must have embeddings of one dimension, got {dimension} and {other}")
        return torch.cat([self.queries[0], self.gallery[0]])


def _call(model: nn.Module, inputs: Any) -> Tensor:
    parameter = next(model.parameters(), None)
    output: Tensor = model(inputs if parameter is None else inputs.to(parameter.device))
    return output


def _embed_all(
    model: nn.Module, batches: Iterable[tuple[Any, Tensor]], embed: Callable[[nn.Module, Any], Tensor]
) -> tuple[Tensor, Tensor]:
    """Embeddings ``n x d`` and labels ``n`` of all batches, on the CPU."""
    pairs: list[tuple[Tensor, Tensor]] = []
    for number, batch in enumerate(batches):
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            raise DataError(
                f"batch {number} must be a pair of inputs and labels, got {type(batch).__name__}; map others"
            )
        labels = torch.as_tensor(batch[1]).cpu()
        if not labels.ndim:
            raise DataError(f"batch {number} has a single label; give batches, as a DataLoader of the data set does")
        pairs.append((embed(model, batch[0]).detach().cpu(), labels))
    for number, (embeddings, labels) in enumerate(pairs):
        if len(embeddings) != len(labels):
            raise DataError(f"batch {number} has {len(embeddings)} embeddings and {len(labels)} labels; each needs one")
    if not pairs:
        raise DataError("there are no batches to embed; they must be iterable anew at each metric query")
    return torch.cat([pair[0] for pair in pairs]), torch.cat([pair[1] for pair in pairs])
