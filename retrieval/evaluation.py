"""A set of queries judged against one gallery, as `tools/evaluate_recall.py` reports it."""

import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from metricopt_ext.errors import DataError
from metricopt_ext.experiment.style import print_table
from metricopt_ext.retrieval.inputs import Items, as_ids
from metricopt_ext.retrieval.intervals import difference_interval, interval
from metricopt_ext.retrieval.neighbours import Distance
from metricopt_ext.retrieval.ranking import class_means, ranking_metrics
from metricopt_ext.retrieval.recall import Recall, recall_at_k

Values = dict[str, npt.NDArray[Any]]

LOWEST = 5  # classes that are shown
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
        classes: The names of the classes by label; None if they have none.
        other: Other embeddings of the same items, which these are compared with; None without.
    """

    name: str
    queries: Items
    items: Items | None
    classes: Sequence[str] | None = None
    other: "Search | None" = None

    def reversed(self) -> "Search":
        """Return the gallery's search for the queries."""
        assert self.items is not None
        other = self.other and self.other.reversed()._replace(name=self.other.name)
        return Search(f"the queries, from {self.name}", self.items, self.queries, self.classes, other)


@dataclass(frozen=True)
class Options:
    """How searches are judged.

    Attributes:
        ks: Numbers of neighbours.
        names: Metrics beside recall, as in `ranking_metrics`.
        distance: As in `recall_at_k`.
        query_subset: As in `recall_at_k`.
        seed: As in `recall_at_k`.
        per_class: Whether each class is judged alone, too.
    """

    ks: Sequence[int]
    names: Sequence[str] = ()
    distance: Distance = "l2"
    query_subset: int | None = None
    seed: int = 0
    per_class: bool = False


@dataclass(frozen=True)
class Row:
    """What was found in one gallery, as in the report, which leaves out what is None.

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
        classes: The same numbers of each class alone, by its name.
        against: What other embeddings of the same items have: ``values``, and ``differences`` of ours from them with
            their 95% ``intervals`` over queries, by name.
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
    classes: dict[str, dict[str, float]] | None = None
    against: dict[str, Any] | None = None

    def report(self) -> dict[str, Any]:
        """Return what the report has of it."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def evaluated(search: Search, options: Options) -> Row:
    """Search one gallery, and print what there is to note.

    Args:
        search: What is searched.
        options: How it is judged.

    Raises:
        DataError: As from `recall_at_k` and `ranking_metrics`; the other embeddings are not of the same items.
    """
    started = time.perf_counter()
    recall, each = _judged(search, options)
    seconds = time.perf_counter() - started
    metrics = [name for name in each if name not in ("mean", *(f"recall_at_{k}" for k in recall.at))]
    classes = None
    if options.per_class:
        means = class_means(each, as_ids(search.queries[1])[recall.rows])
        classes = {search.classes[label] if search.classes else str(label): of for label, of in means.items()}
    against = None
    if search.other is not None:
        theirs, others = _judged(search.other, options)
        if not np.array_equal(theirs.rows, recall.rows):
            raise DataError(f"{search.other.name} is not of the same queries and galleries; their labels differ")
        differences = {name: values - others[name] for name, values in each.items()}
        against = {
            "embeddings": search.other.name,
            "values": {name: float(np.mean(values)) for name, values in others.items()},
            "differences": {name: float(np.mean(values)) for name, values in differences.items()},
            "intervals": {name: difference_interval(values) for name, values in differences.items()},
        }
    return Row(
        search.name,
        recall.gallery,
        recall.queries,
        recall.without_match,
        recall.at,
        recall.mean,
        {name: float(np.mean(each[name])) for name in metrics},
        {name: interval(values) for name, values in each.items()},
        seconds,
        recall.doubles,
        recall.copies,
        classes,
        against,
    )


def _judged(search: Search, options: Options) -> tuple[Recall, Values]:
    """The recalls, and all values of each query by name: the recalls, their mean, and the metrics."""
    arguments: dict[str, Any] = {
        "gallery": search.items,
        "distance": options.distance,
        "query_subset": options.query_subset,
        "seed": options.seed,
    }
    ks = tuple(dict.fromkeys(options.ks))
    names = [name for name in options.names if name != "recall"]  # which is always there
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        recall = recall_at_k(*search.queries, ks, progress=search.name, **arguments)
        ranked: Values = {}
        if names:
            ranked = ranking_metrics(*search.queries, names, ks, progress=search.name, **arguments).each
    for said in dict.fromkeys(str(each.message) for each in caught if each.category is UserWarning):
        print(f"note: {search.name}: {said}")
    hits = {f"recall_at_{k}": (recall.places < k).astype(np.float64) for k in ks}
    return recall, {**hits, "mean": np.mean(list(hits.values()), axis=0), **ranked}


def print_rows(rows: list[Row], searched: str) -> None:
    """Print a line for each gallery, or whatever else is searched, and the intervals of its numbers."""
    recalls, shown = [f"R@{k}" for k in rows[0].recall], []
    titles = {name: TITLES.get(name, _title(name)) for name in rows[0].metrics}
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
    for row in rows:
        _print_besides(row, titles)


def _print_besides(row: Row, titles: dict[str, str]) -> None:
    """Print what was asked for beside the numbers of a row: its classes, and other embeddings."""
    if row.classes is not None:
        means = {name: values["mean"] for name, values in row.classes.items()}
        each = ", ".join(f"{name} {means[name]:.4f}" for name in sorted(means, key=means.__getitem__)[:LOWEST])
        print(f"{row.gallery}: mean recall by class, the lowest of {len(row.classes)}: {each}")
    if row.against is not None:
        differences, ends = row.against["differences"], row.against["intervals"]
        each = ", ".join(
            f"{titles[name]} {differences[name]:+.4f} ({low:+.4f} to {high:+.4f})" for name, (low, high) in ends.items()
        )
        print(f"{row.gallery}, less {row.against['embeddings']} (95% intervals over queries): {each}")


def _title(name: str) -> str:
    """The short name of a metric at k."""
    start, _, k = name.rpartition("_at_")
    return f"{TITLES.get(start, {'precision': 'P', 'found': 'found'}.get(start, start))}@{k}"
