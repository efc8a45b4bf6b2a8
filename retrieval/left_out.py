"""Embeddings that search each other, mixed with their neighbours, as if each query were new.

A gallery item that was mixed with a query knows the query, which no deployment has in its gallery. So what each query
finds is made without it: of an item that has the query among its nearest neighbours, the next one takes its place.
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from metricopt_ext.retrieval.neighbours import DISTANCES, Distance
from metricopt_ext.retrieval.post_processing import mixed, neighbours, unit
from metricopt_ext.retrieval.vectors import chunks

Doubles = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]


class LeftOut:
    """What each of some embeddings finds among the others, augmented without it; in float64.

    Args:
        embeddings: ``n x d``, n at least 2, on the CPU, as `each_alone` returns them.
        augmentation: With how many of its neighbours each is mixed.
        distance: What is compared, as in `recall_at_k`.

    Raises:
        DataError: An embedding is 0.
    """

    def __init__(self, embeddings: Tensor, augmentation: int, distance: Distance) -> None:
        self.x, self.distance, size = embeddings.detach().double(), distance, len(embeddings)
        k = min(augmentation, size - 1)
        near = neighbours(self.x, min(k + 1, size - 1))
        self.items = unit(mixed(self.x, self.x, near[:, :k]))
        # Pairs of an item and a query among its neighbours, sorted by the query: both, and the neighbours without it.
        queries = near[:, :k].flatten()
        order = queries.argsort(stable=True)
        self.of_query = queries[order].numpy()
        self.changed = torch.arange(size).repeat_interleave(k)[order]
        rest = near[self.changed]
        self.rest = rest[rest != queries[order][:, None]].view(len(order), -1)

    def keys(self, rows: Integers) -> Iterator[tuple[slice, Doubles]]:
        """Yield parts of some queries, ``b``, with the keys of all items, ``b' x n``: the nearest has the least.

        A query's own key is infinite.
        """
        for part in chunks(len(rows), max(1, DISTANCES // len(self.x))):
            asked = torch.from_numpy(rows[part])
            start, end = (np.searchsorted(self.of_query, rows[part], side=side) for side in ("left", "right"))
            # Of each query of the part in turn: the pairs, and its place in the part.
            counts = end - start
            place = torch.from_numpy(np.repeat(np.arange(len(asked)), counts))
            offsets = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)
            pairs = torch.from_numpy(np.repeat(start, counts) + offsets)
            changed = self.changed[pairs]
            without = unit(mixed(self.x[changed], self.x, self.rest[pairs]))
            yield part, self._keys(asked, place, changed, without).numpy()

    def _keys(self, asked: Tensor, place: Tensor, changed: Tensor, without: Tensor) -> Tensor:
        queries, items = self.x[asked], self.items
        if self.distance == "cosine":
            queries, items, without = (unit(each) for each in (queries, items, without))
        keys = -(queries @ items.T)
        keys[place, changed] = -(queries[place] * without).sum(1)
        if self.distance == "l2":
            lengths = items.square().sum(1).expand(len(queries), -1).clone()
            lengths[place, changed] = without.square().sum(1)
            keys = 2 * keys + lengths
        keys[torch.arange(len(asked)), asked] = torch.inf
        return keys


def order_left_out(embeddings: Tensor, augmentation: int, distance: Distance, k: int) -> Integers:
    """Return the k nearest others of each, ``n x k``, as if it were new (`LeftOut`); of equal ones the first rows."""
    parts = LeftOut(embeddings, augmentation, distance).keys(np.arange(len(embeddings)))
    return np.concatenate([keys.argsort(axis=1, kind="stable")[:, :k] for _, keys in parts])


def ahead_of_first(keys: Doubles, matches: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Return which items come before the first that matches, ``b x n``; of equal keys the first in their order does.

    Args:
        keys: ``b x n``.
        matches: ``b x n``, at least one in each row.
    """
    among = np.where(matches, keys, np.inf)
    first = among.argmin(axis=1)
    key = among[np.arange(len(keys)), first][:, None]
    ahead: npt.NDArray[np.bool_] = (keys < key) | ((keys == key) & (np.arange(keys.shape[1]) < first[:, None]))
    return ahead
