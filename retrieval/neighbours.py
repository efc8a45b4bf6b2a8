"""The nearest neighbours of embeddings, in the order of float64.

FAISS searches in float32. What that can't tell apart, by a bound of its rounding, is compared in float64: the
candidates that FAISS found or, where these may not be all, every item.
"""

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any, Literal

import numpy as np

from metricopt_ext.retrieval.vectors import (
    CHUNK,
    NUMBERS,
    Doubles,
    Flags,
    Frame,
    Integers,
    Singles,
    Vectors,
    chunks,
    fingerprints,
    lengths_of,
)
from metricopt_ext.utils.extras import install

try:
    import faiss
except ImportError as error:
    raise ImportError(f"Recall@k needs FAISS: {install('faiss')}, or faiss-gpu for a GPU") from error

Distance = Literal["l2", "ip", "cosine"]

# With fewer numbers in its queries (rows times dimension), FAISS doesn't use BLAS: slower, and rounded differently.
# Older versions need 20 rows.
FEWEST_NUMBERS, FEWEST_ROWS = 128_000, 20
NEIGHBOURS = 2**24  # held at once, about 30 bytes each
GPU_LARGEST_K = 2048  # of FAISS' GPU indices
GPU_BYTES = 2**28  # that FAISS keeps on the GPU for its sums, in place of 1.5 GiB
DISTANCES = 2**24  # in float64, held at once
MANY = 1024  # items of which it is worth while to tell copies apart
SINGLE, DOUBLE = 2.0**-24, 2.0**-53  # unit roundoffs
SMALLEST = 2.0**-126  # of float32's normal numbers; a library may take smaller ones for 0


class Search:
    """Finds neighbours by their exact distances; of items at one distance, the first comes first.

    A common shift changes no distance, and a shift of the items not the order of inner products.

    Args:
        queries: What searches, ``n x d``.
        items: What is searched, ``m x d``.
        distance: As in `recall_at_k`; the cosine is compared as the distance of rows of length 1, which cancels less.
        k: Largest number of neighbours.
        own: Whether the queries are the first n items; they are not their own neighbours.
    """

    def __init__(self, queries: Vectors, items: Vectors, distance: Distance, k: int, own: bool) -> None:
        self.euclidean, self.own = distance != "ip", own
        self.items = Frame(items)
        if self.euclidean:
            self.queries = self.items if queries is items else Frame(queries, like=self.items)
        else:
            same = queries is items and not self.items.centre.any()
            self.queries = self.items if same else Frame(queries, shifted=False)
        self.longest = max(float(lengths_of(self.items.single(part)).max()) for part in items.parts())
        largest = max(float(lengths_of(self.queries.single(part)).max()) for part in queries.parts())
        self.room = math.inf  # above which no whole number occurs in a distance
        if 4 * max(self.longest, largest) ** 2 < 1 / DOUBLE and self.items.whole() and self.queries.whole():
            self.room = 4 * max(self.longest, largest) ** 2
        k = min(k, items.size - own)
        count = k + own + max(4, k // 32)  # some more, which tell where the last of the k ends
        if k + own <= GPU_LARGEST_K:
            count = min(count, GPU_LARGEST_K)
        self.all_found = count >= items.size
        self.count = min(count, items.size)
        self._search = _searcher(self.items, self.count, self.euclidean)

    def ranks(
        self, rows: Integers, labels: Integers, item_labels: Integers, ks: Sequence[int]
    ) -> tuple[Integers, Flags, Flags]:
        """Find the place, from 0, of the nearest item with each query's label.

        Args:
            rows: Which queries search, ``b``.
            labels: Their labels; each has an item of its label besides itself.
            item_labels: Labels of the items, ``m``.
            ks: What the places are for: each is below the same of these as the exact place.

        Returns:
            The places, ``b``; which of them float32 left open; and which of these `ranks_among_all` must find.
        """
        keys, found, last = self._found(rows)
        hits = item_labels[found] == labels[:, None]
        hit, places = hits.any(axis=1), hits.argmax(axis=1)
        key = np.where(hit, keys[np.arange(len(rows)), places], last)
        low, high = self._range(key, last, lengths_of(self.queries.single(rows)), SINGLE)
        undecided = np.zeros(len(rows), dtype=np.bool_)
        for k in ks:
            if k <= keys.shape[1]:
                after = keys[:, k] > high if k < keys.shape[1] else np.full(len(rows), self.all_found)
                undecided |= ~((keys[:, k - 1] < low) | (hit & after))
        left = undecided & ~(hit & ((high < last) | (np.isfinite(high) & self.all_found)))
        places = np.where(hit, places, np.iinfo(np.int64).max)
        for i in np.flatnonzero(undecided & ~left):
            start, end = np.searchsorted(keys[i], low[i]), np.searchsorted(keys[i], high[i], side="right")
            near = found[i, start:end]
            exact = keys[i, start:end] if low[i] == high[i] else self._exact_keys(rows[i], near)
            places[i] = start + _place(exact, near, hits[i, start:end])
        return places, undecided, left

    def ranks_among_all(self, rows: Integers, labels: Integers, item_labels: Integers) -> Integers:
        """Find the exact places by the float64 distances of all items; arguments as for `ranks`."""
        order = np.argsort(item_labels, kind="stable")
        starts, ends = (np.searchsorted(item_labels, labels, side=side, sorter=order) for side in ("left", "right"))
        places = np.empty(len(rows), dtype=np.int64)
        for i, (keys, offset, length) in enumerate(self._among_all(rows)):
            key = keys[order[starts[i] : ends[i]]].min()
            low, high = self._range(key, key + offset, length, DOUBLE)
            near = np.flatnonzero(keys <= high)
            outside = np.count_nonzero(keys[near] < low)
            near = near[keys[near] >= low]
            exact = keys[near] if low == high else self._exact_keys(rows[i], near)
            places[i] = outside + _place(exact, near, item_labels[near] == labels[i])
        return places

    def places_of_matches(self, rows: Integers, labels: Integers, item_labels: Integers) -> Iterator[Integers]:
        """Find the exact places, from 0, ascending, of all items with each query's label, by float64 distances.

        Args:
            rows: Which queries search, ``b``.
            labels: Their labels, ``b``.
            item_labels: Labels of the items, ``m``.
        """
        order = np.argsort(item_labels, kind="stable")
        starts, ends = (np.searchsorted(item_labels, labels, side=side, sorter=order) for side in ("left", "right"))
        for i, (keys, offset, length) in enumerate(self._among_all(rows)):
            matches = order[starts[i] : ends[i]]
            matches = matches[np.isfinite(keys[matches])]  # without the query itself
            yield self._places(rows[i], keys, matches, offset, length)

    def _places(self, row: int, keys: Doubles, matches: Integers, offset: float, length: float) -> Integers:
        """Places of some items, ascending, by float64 keys of all; infinite ones are of no item."""
        by_key = np.sort(keys[matches])
        low, high = self._range(by_key, by_key + offset, length, DOUBLE)
        first = np.flatnonzero(np.append(True, low[1:] > np.maximum.accumulate(high)[:-1]))  # of groups that may mix
        ends = np.append(first[1:], len(by_key))
        ascending, places = np.sort(keys), np.empty(len(by_key), dtype=np.int64)
        lows = np.minimum.reduceat(low, first)
        highs = np.maximum.reduceat(high, first)
        ahead, up_to = np.searchsorted(ascending, lows), np.searchsorted(ascending, highs, side="right")
        of_class = np.zeros(len(keys), dtype=np.bool_)
        of_class[matches] = True
        for start, end, least, most, before, after in zip(first, ends, lows, highs, ahead, up_to, strict=True):
            if after - before == end - start:  # nothing else is near
                places[start:end] = before + np.arange(end - start)
                continue
            near = np.flatnonzero((keys >= least) & (keys <= most))
            exact = keys[near] if least == most else self._exact_keys(row, near)
            places[start:end] = before + np.flatnonzero(of_class[near[np.lexsort((near, exact))]])
        return places

    def nearest(self, rows: Integers, k: int) -> Integers:
        """Find the k nearest items of queries, ``b x k``, nearest first; k is at most the search's."""
        keys, found, last = self._found(rows)
        _, high = self._range(keys[:, k - 1], last, lengths_of(self.queries.single(rows)), SINGLE)
        result = np.empty((len(rows), k), dtype=np.int64)
        sure = (high < last) | (np.isfinite(high) & self.all_found)
        for i in np.flatnonzero(sure):
            result[i] = self._in_order(rows[i], found[i, keys[i] <= high[i]])[:k]
        for i, (items, offset, length) in zip(np.flatnonzero(~sure), self._among_all(rows[~sure]), strict=True):
            key = np.partition(items, k - 1)[k - 1]
            _, farthest = self._range(key, key + offset, length, DOUBLE)
            result[i] = self._in_order(rows[i], np.flatnonzero(items <= farthest))[:k]
        return result

    def ahead_of_match(
        self, rows: Integers, labels: Integers, item_labels: Integers, k: int
    ) -> tuple[Integers, Flags, Flags]:
        """Find what is nearer than the nearest item with each query's label.

        Args:
            rows: Which queries search, ``b``.
            labels: Their labels.
            item_labels: Labels of the items, ``m``.
            k: How many neighbours are looked at, at least; at most the search's.

        Returns:
            Items, ``b x c``; which of them are ahead of the first with the label, all items if it is one of the k
            nearest, and else those of the k nearest; and whether it is, ``b``.
        """
        keys, found, last = self._found(rows)
        hits = item_labels[found] == labels[:, None]
        hit, places = hits.any(axis=1), hits.argmax(axis=1)
        key = np.where(hit, keys[np.arange(len(rows)), places], last)
        low, high = self._range(key, last, lengths_of(self.queries.single(rows)), SINGLE)
        ahead = keys < low[:, None]
        near = ~ahead & (keys <= high[:, None])
        matched = hit & ((high < last) | (np.isfinite(high) & self.all_found))
        for i in np.flatnonzero(matched & (near.sum(axis=1) > 1)):
            columns = np.flatnonzero(near[i])
            items = found[i, columns]
            exact = keys[i, columns] if low[i] == high[i] else self._exact_keys(rows[i], items)
            order = np.lexsort((items, exact))
            ahead[i, columns[order[: int(hits[i, columns[order]].argmax())]]] = True
        if len(slow := np.flatnonzero(~matched)):
            found[slow, :k] = nearest = self.nearest(rows[slow], k)
            same = item_labels[nearest] == labels[slow, None]
            ahead[slow], matched[slow] = False, same.any(axis=1)
            ahead[slow, :k] = ~np.logical_or.accumulate(same, axis=1)
        return found, ahead, matched

    def _found(self, rows: Integers) -> tuple[Singles, Integers, Doubles]:
        """FAISS' keys, ascending, and rows, ``b x c``, without the query itself; and the key that no other is below."""
        keys, found = self._search(self.queries.single(rows))
        last = keys[:, -1].astype(np.float64)
        if self.own:
            keep = others(found, rows)
            found = found[keep].reshape(len(rows), -1)  # one after the other takes less memory
            keys = keys[keep].reshape(len(rows), -1)
        return keys, found, last

    def _among_all(self, rows: Integers) -> Iterator[tuple[Doubles, float, float]]:
        """Float64 keys of all items for one query after the other; what lacks to distances, and the query's length."""
        for part in chunks(len(rows), max(1, DISTANCES // self.items.vectors.size)):
            queries = self.queries.double(rows[part])
            lengths = np.linalg.norm(queries, axis=1)
            left = np.hstack([-2 * queries, np.ones((len(queries), 1))]) if self.euclidean else -queries
            keys = np.empty((len(queries), self.items.vectors.size))
            for some in self.items.vectors.parts():
                right = self.items.double(some)
                if self.euclidean:
                    right = np.hstack([right, np.einsum("ij,ij->i", right, right)[:, None]])
                keys[:, some] = left @ right.T
            if self.own:
                keys[np.arange(len(queries)), rows[part]] = np.inf
            yield from zip(keys, lengths**2 if self.euclidean else np.zeros(len(queries)), lengths, strict=True)

    def _range(self, key: Any, last: Any, length: Any, unit: float) -> tuple[Any, Any]:
        """Lowest and highest key that an item's may not be told apart from, for keys up to ``last``.

        The error of a sum of d products is below gamma(d) |x| |y| in whatever order they are added (Higham, 2002, 3.1).
        An item y at a distance r of x is no longer than |x| + r, so a few long items leave the others' bound as it is.
        """
        c = (self.items.vectors.dimension + 8) * unit  # and the rounding of the coordinates and of the last sums
        if self.room < 1 / unit:  # all that is added is a whole number, without rounding
            return key, key
        if c > 0.02:
            return key - np.inf, key + np.inf
        c /= 1 - c
        root = math.sqrt(c)
        reach = self.longest
        slack = (1 + 2 * root / (1 - root)) ** 2  # for items at the range's own end
        with np.errstate(invalid="ignore", over="ignore"):
            if self.euclidean:
                radius = (np.sqrt(np.maximum(last, 0)) + 2 * root * length) / (1 - root)
                error = slack * c * (length + np.minimum(reach, length + radius)) ** 2
            else:
                error = c * length * reach
            doubt = 2.02 * error + (8 * self.items.vectors.dimension + 16) * SMALLEST * (unit == SINGLE)
            return key - doubt, key + doubt

    def _exact_keys(self, row: int, near: Integers) -> Doubles:
        """Keys of some items by a formula that does not cancel; each is calculated once for all copies of an item."""
        if len(near) < MANY:
            return self._calculated(row, near)
        distinct, place = np.unique(self._first_copy[near], return_inverse=True)
        return self._calculated(row, distinct)[place]

    @cached_property
    def _first_copy(self) -> Integers:
        """The first item with the same content as each, ``m``."""
        _, first, place = np.unique(fingerprints(self.items.vectors), return_index=True, return_inverse=True)
        return first[place]

    def _calculated(self, row: int, near: Integers) -> Doubles:
        query, keys = self.queries.exact(np.array([row])), np.empty(len(near))
        for part in chunks(len(near), max(1, NUMBERS // self.items.vectors.dimension)):
            if self.euclidean:
                keys[part] = ((self.items.exact(near[part]) - query) ** 2).sum(axis=1)
            else:
                keys[part] = -(self.items.double(near[part]) * query).sum(axis=1)  # what all share is left out
        return keys

    def _in_order(self, row: int, near: Integers) -> Integers:
        return near[np.lexsort((near, self._exact_keys(row, near)))]


def _place(keys: Any, rows: Integers, hits: Flags) -> int:
    """How many items are before the first hit, by key and then by row."""
    key = keys[hits].min()
    ties = keys == key
    return int(np.count_nonzero(keys < key) + np.count_nonzero(rows[ties] < rows[ties & hits].min()))


def ranks_of_first(
    queries: Vectors,
    labels: Integers,
    chosen: Integers,
    items: Vectors,
    item_labels: Integers,
    includes_queries: bool,
    ks: Sequence[int],
    distance: Distance,
    progress: str | None = None,
) -> tuple[Integers, int]:
    """Find the place, from 0, of the nearest item with the label of each chosen query.

    Args:
        queries: ``n x d``.
        labels: Their labels, ``n``.
        chosen: Which of them search, ``b``; each has an item of its label besides itself.
        items: ``m x d``.
        item_labels: Their labels, ``m``.
        includes_queries: Whether the queries are the first n items.
        ks: What the places are for: each is below the same of these as the exact place.
        distance: As in `recall_at_k`.
        progress: Title of a progress bar; None for no bar.

    Returns:
        The places, ``b``, and how many of them float32 left open.
    """
    search = Search(queries, items, distance, max(ks), includes_queries)
    places = np.empty(len(chosen), dtype=np.int64)
    undecided, left = (np.zeros(len(chosen), dtype=np.bool_) for _ in range(2))
    for part in with_bar(chunks(len(chosen), *chunk_sizes(search.count, queries.dimension)), progress):
        rows = chosen[part]
        places[part], undecided[part], left[part] = search.ranks(rows, labels[rows], item_labels, ks)
    again = np.flatnonzero(left)
    if len(again):
        for part in with_bar(chunks(len(again), CHUNK), progress and f"{progress}, in float64"):
            rows = chosen[again[part]]
            places[again[part]] = search.ranks_among_all(rows, labels[rows], item_labels)
    return places, int(undecided.sum())


def _searcher(items: Frame, k: int, euclidean: bool) -> Callable[[Singles], tuple[Singles, Integers]]:
    """A function from queries ``b x d`` to keys and rows of their k nearest items, ``b x k``, keys ascending."""
    metric = faiss.METRIC_L2 if euclidean else faiss.METRIC_INNER_PRODUCT
    if faiss.get_num_gpus() > 0 and k <= GPU_LARGEST_K:
        index = (faiss.GpuIndexFlatL2 if euclidean else faiss.GpuIndexFlatIP)(gpu_resources(), items.vectors.dimension)
        index.add(items.copy)
        search: Callable[[Singles, int], Any] = index.search
    else:
        # IndexFlat's search without the index, which would hold a copy of all items.
        def search(queries: Singles, k: int) -> Any:
            return faiss.knn(queries, items.copy, k, metric)

    def keyed(queries: Singles) -> tuple[Singles, Integers]:
        keys, rows = search(queries, k)
        return (keys, rows) if euclidean else (np.negative(keys, out=keys), rows)

    return keyed


_GPU = threading.local()  # FAISS' resources must not be used by two threads at a time


def gpu_resources() -> Any:
    """Return this thread's handle of FAISS on a GPU, made once: that takes longer than to search a thousand rows."""
    if not hasattr(_GPU, "resources"):
        _GPU.resources = faiss.StandardGpuResources()
        _GPU.resources.setTempMemory(GPU_BYTES)
    return _GPU.resources


def others(found: Integers, own: Integers) -> Flags:
    """Mark all but each query's own row among the rows found, ``b x (k + 1)``, k in each row."""
    keep: Flags = found != own[:, None]
    # With more than k + 1 duplicates of a query, its own row may be missing: all are then neighbours, one too many.
    keep[keep.all(axis=1), -1] = False
    return keep


def chunk_sizes(k: int, dimension: int) -> tuple[int, int]:
    """How many queries to search at once, and the fewest that merit their own search."""
    fewest = max(FEWEST_ROWS, -(-FEWEST_NUMBERS // dimension))
    size = CHUNK * min(4, -(-fewest // CHUNK))
    return min(size, max(FEWEST_ROWS, NEIGHBOURS // (k + 1))), fewest


def with_bar(parts: list[slice], title: str | None) -> Iterator[slice]:
    """Show a bar on the terminal's error stream while the chunks are worked on; none without a title."""
    if title is None:
        yield from parts
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    named = TextColumn("{task.description}", markup=False)  # a path may contain brackets
    with Progress(
        named, BarColumn(), TaskProgressColumn(), TimeRemainingColumn(), console=Console(stderr=True)
    ) as progress:
        yield from progress.track(parts, description=title)
