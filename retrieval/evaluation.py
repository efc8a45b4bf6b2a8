"""A set of queries judged against one gallery, as `tools/evaluate_recall.py` reports it."""

import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from metricopt_ext.errors import DataError
from metricopt_ext.experiment.style import print_table
from metricopt_ext.retrieval.inputs import Items
from metricopt_ext.retrieval.intervals import interval
from metricopt_ext.retrieval.ranking import ranking_metrics
from metricopt_ext.retrieval.recall import recall_at_k

TITLES = {  # in the table
    "mean_average_precision": "mAP",
    "mean_average_precision_at_r": "mAP@R",
    "mean_reciprocal_rank": "MRR",
    "ndcg": "NDCG",
    "r_precision": "R-prec",
}


class Search(NamedTuple):
    """What is searched by what.

    Attributes:
        name: Its name in the table.
        queries: The queries.
        items: The gallery; None if it is the queries.
        augmentation: As in `recall_at_k`.
    """

    name: str
    queries: Items
    items: Items | None
    augmentation: int = 0


@dataclass(frozen=True)
class Row:
    """What was found in one gallery, as in the report.

    Attributes:
        gallery: The gallery's file, or the model's in a run; ``"the queries"`` without one.
        size: Number of items in it.
        queries: Number of queries that the recalls are averaged over.
        without_match: Number of queries left out because no other item of the gallery has their label.
        recall: Recall in [0, 1] for each k.
        mean: Mean of the recalls.
        metrics: Those of --metrics, in [0, 1], by name, e.g. ``precision_at_1``.
        intervals: 95% intervals over queries, by name: ``recall_at_1``, ..., ``mean``, and those of the metrics.
        seconds: Duration of the search.
        doubles: Number of queries whose neighbours float32 could not tell apart; float64 did.
        copies: Number of queries that are in the gallery with their label, and find themselves.
    """

    gallery: str
    size: int
    queries: int
    without_match: int
    recall: dict[int, float]
    mean: float
    metrics: dict[str, float]
    intervals: dict[str, tuple[float, float]]
    seconds: float
    doubles: int
    copies: int


def evaluated(search: Search, ks: Sequence[int], names: Sequence[str] = (), **options: Any) -> Row:
    """Search one gallery, and print what there is to note.

    Args:
        search: What is searched.
        ks: Numbers of neighbours.
        names: Metrics beside recall, as in `ranking_metrics`.
        options: ``distance``, ``query_subset`` and ``seed`` of `recall_at_k`.

    Raises:
        DataError: As from `recall_at_k` and `ranking_metrics`; or metrics of embeddings with an augmentation.
    """
    started, ks = time.perf_counter(), tuple(dict.fromkeys(ks))
    names = [name for name in names if name != "recall"]  # which is always there
    arguments: dict[str, Any] = {"gallery": search.items, "progress": search.name, **options}
    if names and search.augmentation:
        raise DataError(
            f"{search.name} was judged with a database augmentation of {search.augmentation}, each query left out of"
            " what it finds; only recall is known of that: leave --metrics out"
        )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.simplefilter("ignore", DeprecationWarning)  # of the packages that search
        recall = recall_at_k(*search.queries, ks, augmentation=search.augmentation, **arguments)
        ranked = ranking_metrics(*search.queries, names, ks, **arguments).each if names else {}
    for said in dict.fromkeys(str(each.message) for each in caught):
        print(f"note: {search.name}: {said}")
    seconds = time.perf_counter() - started
    hits = {f"recall_at_{k}": (recall.places < k).astype(np.float64) for k in ks}
    each = {**hits, "mean": np.mean(list(hits.values()), axis=0), **ranked}
    return Row(
        search.name,
        recall.gallery,
        recall.queries,
        recall.without_match,
        recall.at,
        recall.mean,
        {name: float(np.mean(values)) for name, values in ranked.items()},
        {name: interval(values) for name, values in each.items()},
        seconds,
        recall.doubles,
        recall.copies,
    )


def print_rows(rows: list[Row], searched: str) -> None:
    """Print a line for each gallery, or whatever else is searched, and the intervals of its numbers."""
    recalls, shown = [f"R@{k}" for k in rows[0].recall], []
    titles = {name: TITLES.get(name, name.replace("precision_at_", "P@")) for name in rows[0].metrics}
    for row in rows:
        counts = [str(count) for count in (row.size, row.queries, row.without_match)]
        values = [f"{value:.4f}" for value in (*row.recall.values(), row.mean, *row.metrics.values())]
        shown.append([row.gallery, *counts, *values, f"{row.seconds:.1f}"])
    header = [searched, "items", "queries", "no match", *recalls, "mean", *titles.values(), "seconds"]
    print_table(header, shown)
    titles = {f"recall_at_{k}": f"R@{k}" for k in rows[0].recall} | {"mean": "mean"} | titles
    for row in rows:
        ranges = ", ".join(f"{titles[name]} {low:.4f} to {high:.4f}" for name, (low, high) in row.intervals.items())
        print(f"95% intervals over queries, {row.gallery}: {ranges}")
