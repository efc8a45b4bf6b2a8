"""What the whole ranking of a gallery is judged by: precision@k, mean average precision and others, beside Recall@k.

All come from the exact places of a query's matches, the gallery items with its label, in the order of `recall_at_k`.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from metricopt_ext.errors import DataError
from metricopt_ext.retrieval.copies import copies_in_gallery
from metricopt_ext.retrieval.inputs import (
    check_gallery,
    check_options,
    check_vectors,
    drawn_queries,
    with_match,
)
from metricopt_ext.retrieval.intervals import interval
from metricopt_ext.retrieval.neighbours import Distance, Search, with_bar
from metricopt_ext.retrieval.vectors import Array, chunks

Integers = npt.NDArray[np.int64]

PART = 256  # queries between two steps of the progress bar

# Of the places p of a query's R matches, from 0, ascending.
OF_PLACES: dict[str, Callable[[Integers], float]] = {
    "mean_average_precision_at_r": lambda p: float(_precisions(p)[p < len(p)].sum()) / len(p),
    "r_precision": lambda p: float(np.mean(p < len(p))),
    "mean_average_precision": lambda p: float(_precisions(p).mean()),
    "mean_reciprocal_rank": lambda p: 1 / (1 + int(p[0])),
    "ndcg": lambda p: _gain(p) / _gain(np.arange(len(p))),
}
AT_K: dict[str, Callable[[Integers, int], float]] = {
    "recall": lambda p, k: float(p[0] < k),
    "precision": lambda p, k: np.count_nonzero(p < k) / k,
}
RANKED = {  # R is the number of a query's matches
    "mean_average_precision_at_r": "average precision of the R nearest, mean over queries (Musgrave et al., 2020)",
    "r_precision": "share of the R nearest that have the query's class, mean over queries",
    "mean_average_precision": "mean of the precisions at the places of a query's matches, mean over queries",
    "mean_reciprocal_rank": "1 / place, from 1, of the nearest item of the query's class, mean over queries",
    "ndcg": "discounted cumulative gain of the whole ranking, as a share of the best (Järvelin & Kekäläinen, 2002)",
    "precision": "share of the k nearest that have the query's class, mean over queries",
}


@dataclass(frozen=True)
class Ranking:
    """Metrics of the rankings of a set of queries.

    Attributes:
        values: Mean over the queries, in [0, 1], by name: ``recall_at_1``, ``precision_at_1``, ``ndcg``, ...
        intervals: Their 95% intervals, lowest and highest value; see `interval`.
        queries: Number of queries that they are means over.
        without_match: Number of queries left out because no other item has their label.
        gallery: Number of items in the gallery.
        rows: The rows of these queries, ascending.
        each: The values of each of them, by name.
    """

    values: dict[str, float]
    intervals: dict[str, tuple[float, float]]
    queries: int
    without_match: int
    gallery: int
    rows: Integers = field(repr=False, compare=False)
    each: dict[str, npt.NDArray[np.float64]] = field(repr=False, compare=False)


def ranking_metrics(
    embeddings: Array,
    labels: Array,
    names: Sequence[str] = tuple(RANKED),
    ks: Sequence[int] = (1,),
    *,
    gallery: tuple[Array, Array] | None = None,
    distance: Distance = "l2",
    query_subset: int | None = None,
    seed: int = 0,
    progress: str | None = None,
) -> Ranking:
    """Compute metrics of whole rankings exactly; which items match, ties and lone queries are those of `recall_at_k`.

    With R matches of a query at the places p_1 < ... < p_R of its ranking, from 1:

    - ``recall``: whether p_1 <= k; for each k.
    - ``precision``: how many p_i <= k, over k, also where the gallery has fewer items; for each k.
    - ``mean_reciprocal_rank``: 1 / p_1.
    - ``mean_average_precision``: (1 / R) sum_i i / p_i, over the whole gallery.
    - ``mean_average_precision_at_r``: (1 / R) sum of i / p_i over p_i <= R (Musgrave et al., A Metric Learning Reality
      Check, ECCV 2020).
    - ``r_precision``: how many p_i <= R, over R.
    - ``ndcg``: sum_i 1 / log2(1 + p_i) over the same of p_i = i (Järvelin & Kekäläinen, 2002, equations 1 to 3, by
      base 2 and without their start at the second place).

    Each query is compared with all items in float64, which takes longer than `recall_at_k`.

    Args:
        embeddings: Queries, ``n x d``, as in `recall_at_k`.
        labels: ``n`` integers.
        names: Which metrics; for each k those that have one: ``"recall"`` becomes ``recall_at_5``.
        ks: Numbers of neighbours, each at least 1.
        gallery: Embeddings ``m x d`` and labels ``m`` to be searched; None to search the queries themselves.
        distance: As in `recall_at_k`.
        query_subset: As in `recall_at_k`.
        seed: As in `recall_at_k`.
        progress: Title of a progress bar on stderr; None for no bar.

    Raises:
        DataError: As in `recall_at_k`, or an unknown name.

    Examples:
        >>> embeddings, labels = np.array([[0.0], [1.0], [3.0], [3.5]]), np.array([0, 1, 0, 1])
        >>> ranking_metrics(embeddings, labels, ["recall", "precision"], ks=(2,)).values
        {'recall_at_2': 0.5, 'precision_at_2': 0.25}
    """
    ks = check_options(ks, distance, query_subset, seed)
    check_names(names)
    columns: dict[str, Callable[[Integers], float]] = {}
    for name in names:
        if name in AT_K:
            columns |= {f"{name}_at_{k}": lambda p, of=AT_K[name], k=k: of(p, k) for k in ks}  # type: ignore[misc]
        else:
            columns[name] = OF_PLACES[name]
    queries, own = check_vectors(embeddings, labels, "", distance)
    items, item_labels = queries, own
    if gallery is not None:
        items, item_labels = check_gallery(embeddings, queries, own, gallery, False)
    rows = with_match(own, item_labels, includes_queries=gallery is None)
    chosen = drawn_queries(rows, query_subset, seed)
    if gallery is not None:
        _, said = copies_in_gallery(queries, own, items, item_labels, chosen)
        if said:
            warnings.warn(said, stacklevel=2)
    search = Search(queries, items, distance, 1, own=gallery is None)
    found = np.array(
        [
            [value(places) for value in columns.values()]
            for part in with_bar(chunks(len(chosen), PART), progress)
            for places in search.places_of_matches(chosen[part], own[chosen[part]], item_labels)
        ]
    )
    each = {name: found[:, i] for i, name in enumerate(columns)}
    values = {name: float(np.mean(column)) for name, column in each.items()}
    intervals = {name: interval(column) for name, column in each.items()}
    return Ranking(values, intervals, len(chosen), len(own) - len(rows), items.size, chosen, each)


def check_names(names: Sequence[str]) -> None:
    """Refuse a name that is no metric's.

    Raises:
        DataError: There is one.
    """
    if wrong := [name for name in names if name not in (*AT_K, *OF_PLACES)]:
        raise DataError(f"metric {wrong[0]!r} is none of {', '.join([*AT_K, *OF_PLACES])}")


def _precisions(places: Integers) -> npt.NDArray[np.float64]:
    """The precision at each match."""
    precisions: npt.NDArray[np.float64] = np.arange(1, len(places) + 1) / (places + 1)
    return precisions


def _gain(places: Integers) -> float:
    """The discounted cumulative gain of matches at these places, from 0."""
    return float((1 / np.log2(places + 2)).sum())
