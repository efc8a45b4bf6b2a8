"""Recall@k: the share of queries for which any of the k nearest others has the query's label.

`recall_at_k` computes it from embeddings, `recall_metric` makes a black-box metric of a model from it. FAISS searches
in float32: on the CPU or, if FAISS was built for GPUs and finds one, on the GPU (hide it with ``CUDA_VISIBLE_DEVICES=``
to keep its memory for the model). What float32 can't tell apart is compared in float64.
"""

import math
import operator
import statistics
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from metricopt_ext.data.halves import class_draws
from metricopt_ext.errors import DataError
from metricopt_ext.retrieval.judged import JudgedEmbeddings, Processing
from metricopt_ext.retrieval.left_out import LeftOut, ahead_of_first
from metricopt_ext.retrieval.neighbours import (
    SAMPLE,
    Array,
    Distance,
    Search,
    Vectors,
    chunk_sizes,
    chunks,
    fingerprints,
    ranks_of_first,
)
from metricopt_ext.retrieval.post_processing import PostProcessing
from metricopt_ext.tasks.evaluation import Pairs
from metricopt_ext.tasks.halved import Halved, with_halves
from metricopt_ext.tasks.ledger import Ledger
from metricopt_ext.tasks.metric import Metric
from metricopt_ext.utils.seeding import generator
from metricopt_ext.utils.words import brief

# What is calculated again differs by far less than this part of the embeddings' standard deviation. With fewer
# dimensions, different embeddings are as near to each other by chance.
STEPS, FEWEST_DIMENSIONS = 512, 8

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
    queries at a time (400 MB if d is below 32). Where the copy would take more than 1 GiB, 256 MiB of it are held at a
    time. Arrays may be memory-mapped (``np.load(path, mmap_mode="r")``).

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
        progress: Title of a progress bar on stderr; None for no bar.

    Raises:
        DataError: No embeddings, or not one label for each; embeddings of another dimension or device than the
            gallery's, NaN or infinite, with distances that overflow float32, or of length 0 for the cosine; labels that
            are not integers; a gallery that is no pair, or of a single class; no query with a match; queries that the
            gallery does not start with; k or the subset below 1; an unknown distance; a negative seed.

    Example:
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
    ks = check_options(ks, distance, None, 0)
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
    ks = check_options(ks, distance, None, 0)
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
    post: PostProcessing,
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
        post: How they are mixed.
        distance: What is compared, as in `recall_at_k`; the cosine if ``post`` says so.
        query_subset: As in `recall_at_k`.
        seed: As in `recall_at_k`.

    Raises:
        DataError: As from `recalls_on_halves`.
    """
    _, own = check_vectors(embeddings, labels, "", "cosine")
    rows = drawn_queries(with_match(own, own, includes_queries=True), query_subset, seed)
    halves = [] if isinstance(pairs, str) else [half for pair in pairs for half in _members(own, pair)]
    of_half = np.stack([np.ones(len(own), dtype=np.bool_), *halves], 1).astype(np.float32)
    before = np.empty((len(rows), of_half.shape[1]))
    for part, keys in LeftOut(embeddings, post, post.distance or distance).keys(rows):
        matches = own[rows[part], None] == own
        matches[np.arange(len(matches)), rows[part]] = False
        before[part] = ahead_of_first(keys, matches).astype(np.float32) @ of_half

    def mean(number: int) -> float:
        places = before[of_half[rows, number] > 0, number]
        return statistics.fmean(float(np.mean(places < k)) for k in ks) if len(places) else math.nan

    values = tuple((mean(1 + number), mean(2 + number)) for number in range(0, len(halves), 2))
    return Halved(mean(0), pairs if isinstance(pairs, str) else values or None)


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
    embeddings: Array, k: int, *, gallery: Array | None = None, distance: Distance = "l2"
) -> npt.NDArray[np.int64]:
    """Find the k nearest other embeddings of each, ``n x k`` rows, nearest first; exact, as in `recall_at_k`.

    Args:
        embeddings: ``n x d``, real and finite, n above k; a tensor on any device or an array.
        k: Number of neighbours, at least 1.
        gallery: What they are searched in, ``m x d``, m at least k; None for the embeddings themselves.
        distance: As in `recall_at_k`.

    Raises:
        DataError: As in `recall_at_k`, for the embeddings.
    """
    items, own = check_vectors(embeddings, np.arange(len(embeddings)), "", distance)
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

    Example:
        >>> batches = [(torch.tensor([[0.0], [1.0], [3.0], [3.5]]), torch.tensor([0, 1, 0, 1]))]
        >>> metric = recall_metric(batches, ks=(1, 2))
        >>> metric.name, metric.to_value(metric.cost(nn.Identity(), "example"))
        ('mean Recall@1,2', 0.25)
    """
    ks = check_options(ks, distance, query_subset, seed)
    embed = embed or _call

    def embedded(model: nn.Module) -> Embedded:
        queries = _embed_all(model, batches, embed)
        return Embedded(queries, None if gallery is None else _embed_all(model, gallery, embed))

    def mean_recall(found: Embedded, processing: Processing) -> Any:
        post, labels = processing.post, found.labels
        draws, compared = class_draws(labels, seed), "l2" if post.distance == "l2" else distance
        if post.mixes and found.gallery is None:
            alone = processing.alone(found.queries[0])
            return recalls_left_out(alone, labels, ks, draws, post, compared, query_subset, seed)
        queries, items = found.queries[0], found.gallery
        if items is None:
            queries = processing.of(queries)
        elif post.acts:
            whole = processing.of(found.all, torch.arange(len(queries) + len(items[0])) < len(queries))
            queries, items = whole[: len(queries)], (whole[len(queries) :], items[1])
        if items is None and query_subset is None and not isinstance(draws, str):
            return Halved(*recalls_on_halves(queries, labels, ks, draws, distance=compared))

        def value_on(half: Tensor | None) -> float:
            rows = slice(None) if half is None else half
            options: dict[str, Any] = {"distance": compared, "query_subset": query_subset, "seed": seed}
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
        embeddings = embeddings.detach()
        dense = embeddings.layout == torch.strided
    else:
        dense = not hasattr(embeddings, "tocoo") and not np.ma.is_masked(embeddings)  # of SciPy's sparse arrays
        try:
            embeddings = np.asarray(embeddings)
        except ValueError as error:
            raise DataError(f"{whose}embeddings must be n x d, got rows of several lengths: {brief(error)}") from error
    if not dense:
        raise DataError(
            f"{whose}embeddings must be dense, without a mask; give an array or tensor of all n x d numbers"
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
