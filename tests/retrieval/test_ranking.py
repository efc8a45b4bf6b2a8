"""Metrics of rankings by the one contract: against loops over queries, with and without a gallery, and their halves."""

import math
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from helpers.refusals import assert_refused, assert_warned
from testers.metric import HalvedMetricTester, MetricTester, Told, labelled_rows

pytest.importorskip("faiss")

from metricopt_ext.data.halves import class_draws
from metricopt_ext.errors import DataError
from metricopt_ext.retrieval.ranking import RANKED, ranking_metrics
from metricopt_ext.retrieval.recall import recall_at_k, recall_metric


def relevance(x: Tensor, y: Tensor, queries: Tensor | None = None) -> list[Any]:
    """For each query with a match: whether the others, or the gallery, are of its label, nearest first, ties by row."""
    x, y = x.double().numpy(), y.numpy()
    asked = np.ones(len(y), dtype=bool) if queries is None else queries.numpy()
    if len(set(y if queries is None else y[~asked])) < 2:
        return []  # any neighbour would be right
    found = []
    for i in np.flatnonzero(asked):
        others = np.flatnonzero(~asked) if queries is not None else np.delete(np.arange(len(y)), i)
        order = others[((x[others] - x[i]) ** 2).sum(axis=1).argsort(kind="stable")]
        if (y[order] == y[i]).any():
            found.append(y[order] == y[i])
    return found


def of_query(name: str, k: int, hits: Any) -> float:
    """A metric of one query by its definition, item by item; from the R-th place on for those of R matches."""
    r, at = int(hits.sum()), [int(place) + 1 for place in np.flatnonzero(hits)]
    precision = {place: float(hits[:place].sum()) / place for place in at}
    return {
        "recall": lambda: float(hits[:k].any()),
        "precision": lambda: float(hits[:k].sum()) / k,
        "mean_average_precision_at_r": lambda: sum(precision[p] for p in at if p <= r) / r,
        "mean_average_precision": lambda: sum(precision.values()) / r,
        "r_precision": lambda: float(hits[:r].sum()) / r,
        "mean_reciprocal_rank": lambda: 1 / at[0],
        "ndcg": lambda: sum(1 / math.log2(1 + p) for p in at) / sum(1 / math.log2(1 + p) for p in range(1, r + 1)),
    }[name]()


class RankingTester(MetricTester):
    """Rows are embeddings and labels; the loop above is the reference."""

    name: ClassVar[str]
    k: ClassVar[int] = 1
    ties_by_row = True
    named_empty = ("(0, 3)",)

    def inputs(self, kind: str) -> Any:
        return labelled_rows(kind, width=3, classes=8)

    def ours(self, x: Tensor, y: Tensor) -> float:
        return next(iter(ranking_metrics(x, y, [self.name], (self.k,)).values.values()))

    def reference(self, x: Tensor, y: Tensor) -> float:
        queries = [of_query(self.name, self.k, hits) for hits in relevance(x, y)]
        return float(np.mean(queries)) if queries else math.nan


class TestPrecisionAt5(RankingTester):
    name, k = "precision", 5


class TestMapAtR(RankingTester):
    name = "mean_average_precision_at_r"


class TestMap(RankingTester):
    name = "mean_average_precision"


class TestRPrecision(RankingTester):
    name = "r_precision"


class TestReciprocalRank(RankingTester):
    name = "mean_reciprocal_rank"


class TestNdcg(RankingTester):
    name = "ndcg"


class TestNdcgOfAGallery(RankingTester):
    """A third column says which rows are queries; the others are their gallery."""

    name = "ndcg"

    def inputs(self, kind: str) -> Any:
        def with_queries(x: Tensor, y: Tensor, rng: np.random.Generator) -> tuple[Tensor, ...]:
            return x, y, torch.from_numpy(np.append(rng.random(len(y) - 1) < 0.4, True))

        return labelled_rows(kind, width=3, classes=5, of=with_queries)

    def ours(self, x: Tensor, y: Tensor, queries: Tensor) -> float:
        of_label = queries[: len(y)]
        gallery = x[~queries], y[~of_label]
        return ranking_metrics(x[queries], y[of_label], [self.name], gallery=gallery).values[self.name]

    def reference(self, x: Tensor, y: Tensor, queries: Tensor) -> float:
        found = [of_query(self.name, self.k, hits) for hits in relevance(x, y, queries)]
        return float(np.mean(found)) if found else math.nan


class TestRecall(HalvedMetricTester, RankingTester):
    """At 3, and the black box of a model that gives these embeddings."""

    name, k = "recall", 3
    apart_by_class = True

    def ours(self, x: Tensor, y: Tensor) -> float:
        return recall_at_k(x, y, (self.k,)).at[self.k]

    def told(self, x: Tensor, y: Tensor) -> Told:
        metric = recall_metric([(x[:11], y[:11]), (x[11:], y[11:])], (self.k,), seed=5)
        found, draws = metric.evaluate(nn.Identity(), "drawn"), class_draws(y, 5)
        pairs = found.pairs or (() if found.halves is None else (found.halves,))
        halves = [
            [(half.tolist(), metric.to_value(cost)) for half, cost in zip(pair, costs, strict=True)]
            for pair, costs in zip(draws if pairs else (), pairs, strict=True)
        ]
        return Told(metric.to_value(found.cost), halves, metric.ledger.spent)


def test_more_queries_than_are_searched_at_once() -> None:
    """And the same Recall as the search by FAISS; a class of one item is left out and counted."""
    rng = torch.Generator().manual_seed(0)
    x, y = torch.randn(700, 4, generator=rng).double(), torch.randint(90, (700,), generator=rng)
    y[0] = 1000
    names = ["recall", "precision", "mean_average_precision_at_r", "ndcg"]
    found, queries = ranking_metrics(x, y, names, (2, 800)), relevance(x, y)
    for name in names[2:]:
        assert found.values[name] == pytest.approx(np.mean([of_query(name, 0, hits) for hits in queries]), abs=1e-9)
    for k in (2, 800):
        assert found.values[f"recall_at_{k}"] == recall_at_k(x, y, (k,)).at[k]
        precision = np.mean([of_query("precision", k, hits) for hits in queries])
        assert found.values[f"precision_at_{k}"] == pytest.approx(precision, abs=1e-9)
    assert (found.queries, found.without_match) == (len(queries), 700 - len(queries))
    some, recall = (
        ranking_metrics(x, y, ["recall"], query_subset=20, seed=3),
        recall_at_k(x, y, (1,), query_subset=20, seed=3),
    )
    assert some.values["recall_at_1"] == recall.at[1]


@pytest.mark.slow
def test_torchmetrics_has_the_same() -> None:
    functional = pytest.importorskip("torchmetrics.functional.retrieval")
    rng = torch.Generator().manual_seed(0)
    x, y = torch.randn(60, 3, generator=rng).double(), torch.randint(12, (60,), generator=rng)
    queries = [torch.from_numpy(hits) for hits in relevance(x, y)]
    found = ranking_metrics(x, y, [*RANKED, "recall"], (3,)).values

    def theirs(name: str, **options: Any) -> Any:
        each = [getattr(functional, name)(1 / torch.arange(1.0, 60), hits, **options) for hits in queries]
        return pytest.approx(float(torch.stack(each).double().mean()), abs=1e-6)  # float32

    assert found["mean_average_precision"] == theirs("retrieval_average_precision")
    assert found["mean_reciprocal_rank"] == theirs("retrieval_reciprocal_rank")
    assert found["r_precision"] == theirs("retrieval_r_precision")
    assert found["ndcg"] == theirs("retrieval_normalized_dcg")
    assert found["precision_at_3"] == theirs("retrieval_precision", top_k=3)
    assert found["recall_at_3"] == theirs("retrieval_hit_rate", top_k=3)


def test_impossible_options_are_refused_and_copies_of_queries_told() -> None:
    x, y = np.random.default_rng(0).normal(size=(20, 3)), np.arange(20) % 4
    assert_refused(lambda: ranking_metrics(x, y, ["map"]), DataError, "map", "r_precision")
    assert_refused(lambda: ranking_metrics(x, y, ks=[0]), DataError, "ks")
    assert_warned(lambda: ranking_metrics(x, y, ["ndcg"], gallery=(x, y)), "20")
