"""Metrics of whole rankings, beside their definitions written out, pytorch-metric-learning and torchmetrics."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from helpers.refusals import assert_refused, assert_warned

pytest.importorskip("faiss")

from metricopt_ext.errors import DataError
from metricopt_ext.retrieval import neighbours, ranking, vectors
from metricopt_ext.retrieval.neighbours import Distance
from metricopt_ext.retrieval.ranking import AT_K, OF_PLACES, RANKED, ranking_metrics
from metricopt_ext.retrieval.recall import recall_at_k

NAMES = [*AT_K, *OF_PLACES]
KS = (1, 3, 500)


def drawn(seed: int, whole: bool, n: int = 60, dimension: int = 3) -> tuple[Any, Any]:
    """Embeddings, of which many are at equal distances or the same, and labels, some of which occur once."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(12, size=n)
    x = rng.integers(4, size=(n, dimension)).astype(float) if whole else rng.normal(size=(n, dimension)) + 30
    x[n // 2 : n // 2 + 10] = x[:10]  # copies
    labels[0] = 90 + seed
    return x, labels


def relevance(x: Any, y: Any, items: Any, labels: Any, distance: Distance = "l2", own: bool = False) -> Iterator[Any]:
    """For each query with a match, which items are of its label, nearest first, one query after the other."""
    for i in range(len(x)):
        keys = ((items - x[i]) ** 2).sum(axis=1) if distance == "l2" else -(items * x[i]).sum(axis=1)
        order = [j for j in np.lexsort((np.arange(len(items)), keys)) if not (own and i == j)]
        found = labels[order] == y[i]
        if found.any():
            yield found


def definitions(found: Any) -> dict[str, float]:
    """The metrics of one query, item by item."""
    r, at = int(found.sum()), [int(p) + 1 for p in np.flatnonzero(found)]
    precision = [int(found[:p].sum()) / p for p in range(1, len(found) + 1)]
    return {
        **{f"recall_at_{k}": float(any(found[:k])) for k in KS},
        **{f"precision_at_{k}": sum(found[:k]) / k for k in KS},
        "mean_average_precision_at_r": sum(precision[p - 1] for p in at if p <= r) / r,
        "r_precision": sum(found[:r]) / r,
        "mean_average_precision": sum(precision[p - 1] for p in at) / r,
        "mean_reciprocal_rank": 1 / at[0],
        "ndcg": sum(1 / math.log2(1 + p) for p in at) / sum(1 / math.log2(1 + p) for p in range(1, r + 1)),
    }


def expected(queries: list[Any]) -> dict[str, Any]:
    each = [definitions(found) for found in queries]
    return {name: pytest.approx(np.mean([one[name] for one in each]), abs=1e-9) for name in each[0]}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("distance", ["l2", "ip"])
def test_all_are_their_definitions(seed: int, whole: bool, distance: Distance) -> None:
    x, y = drawn(seed, whole)
    items, labels = drawn(seed + 100, whole, n=80)
    items[:20] = x[-20:]
    for gallery in (None, (items, labels)):
        searched, classes = gallery or (x, y)
        found = ranking_metrics(x, y, NAMES, KS, gallery=gallery, distance=distance)
        queries = list(relevance(x, y, searched, classes, distance, own=gallery is None))
        assert found.values == expected(queries)
        assert (found.queries, found.without_match) == (len(queries), len(x) - len(queries))
        assert found.without_match > 0


@pytest.mark.parametrize("distance", ["l2", "cosine"])
def test_recall_is_that_of_recall_at_k(distance: Distance) -> None:
    x, y = drawn(0, whole=False)
    for options in ({}, {"query_subset": 20, "seed": 3}):
        recall = recall_at_k(x, y, KS, distance=distance, **options)
        found = ranking_metrics(x, y, ["recall"], KS, distance=distance, **options)
        assert found.values == {f"recall_at_{k}": value for k, value in recall.at.items()}
        assert (found.queries, found.without_match) == (recall.queries, recall.without_match)


@pytest.mark.parametrize("same", [True, False])
def test_pytorch_metric_learning_has_the_same(same: bool) -> None:
    pytest.importorskip("pytorch_metric_learning")
    from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator

    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(90, 4)).astype(np.float32), rng.integers(20, size=90)
    names = ("mean_average_precision_at_r", "r_precision", "mean_average_precision", "mean_reciprocal_rank")
    calculator = AccuracyCalculator(include=(*names, "precision_at_1"), k=None, device=torch.device("cpu"))
    if same:
        theirs, gallery = calculator.get_accuracy(x, y), None
    else:
        gallery = (x[40:], y[40:])
        x, y = x[:40], y[:40]
        theirs = calculator.get_accuracy(x, y, *gallery)
    found = ranking_metrics(x, y, [*names, "precision"], (1,), gallery=gallery)
    assert found.values.pop("mean_reciprocal_rank") == pytest.approx(theirs.pop("mean_reciprocal_rank"), abs=1e-7)
    assert found.values == pytest.approx(theirs, abs=1e-9)  # the one before is in float32 there


def test_torchmetrics_has_the_same() -> None:
    functional = pytest.importorskip("torchmetrics.functional.retrieval")
    x, y = drawn(3, whole=False)
    queries = [torch.from_numpy(found) for found in relevance(x, y, x, y, own=True)]
    found = ranking_metrics(x, y, NAMES, KS).values

    def theirs(name: str, **options: Any) -> Any:
        each = [getattr(functional, name)(1 / torch.arange(1.0, len(one) + 1), one, **options) for one in queries]
        return pytest.approx(float(torch.stack([value.double() for value in each]).mean()), abs=1e-6)  # float32

    assert found["mean_average_precision"] == theirs("retrieval_average_precision")
    assert found["mean_reciprocal_rank"] == theirs("retrieval_reciprocal_rank")
    assert found["r_precision"] == theirs("retrieval_r_precision")
    assert found["ndcg"] == theirs("retrieval_normalized_dcg")
    for k in KS:
        assert found[f"precision_at_{k}"] == theirs("retrieval_precision", top_k=k)
        top = min(k, len(x) - 1)
        assert found[f"recall_at_{k}"] == theirs("retrieval_hit_rate", top_k=top)


@pytest.mark.parametrize(
    ("third", "hits"),
    [(1, [1, 1, 1]), (3, [1, 1, 0])],  # a query at its class, and one at no item, which ranks by rows
)
def test_one_hot_embeddings_are_judged_by_class_as_open_metric_learning_does(third: int, hits: list[int]) -> None:
    labels = np.array([0, 1, 1])
    found = ranking_metrics(
        np.eye(8)[[0, 1, third]],
        labels,
        ["recall", "mean_average_precision"],
        (1, 500),
        gallery=(np.eye(8)[[0, 1, 1]], labels),
    )
    last = 1.0 if hits[2] else (1 / 2 + 2 / 3) / 2  # items 0, 1 and 2, of which the last two match
    assert found.values == {
        "recall_at_1": pytest.approx(sum(hits) / 3),
        "recall_at_500": 1.0,
        "mean_average_precision": pytest.approx((2 + last) / 3),
    }
    assert found.each["recall_at_1"].tolist() == hits


def test_embeddings_that_are_all_the_same_rank_by_their_rows() -> None:
    x, y = np.full((50, 3), 0.1), np.arange(50) % 5
    found = ranking_metrics(x, y, NAMES, KS)
    assert found.values == expected(list(relevance(x, y, x, y, own=True)))


def test_parts_of_the_queries_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = drawn(1, whole=False)
    whole = ranking_metrics(x, y, NAMES, KS)
    monkeypatch.setattr(ranking, "PART", 7)
    monkeypatch.setattr(neighbours, "DISTANCES", 200)  # three queries at a time
    for module in (neighbours, vectors):
        monkeypatch.setattr(module, "NUMBERS", 50)
    assert ranking_metrics(x, y, NAMES, KS) == whole


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"names": ["map"]}, ("r_precision",)),
        ({"ks": [0]}, ("ks",)),
    ],
)
def test_what_is_impossible_is_refused(options: dict[str, Any], names: tuple[str, ...]) -> None:
    x, y = drawn(0, whole=False)
    assert_refused(lambda: ranking_metrics(x, y, **options), DataError, *names)


def test_each_metric_is_described() -> None:
    assert set(RANKED) == set(NAMES) - {"recall"}


def test_queries_in_a_gallery_are_told() -> None:
    x, y = np.random.default_rng(0).normal(size=(20, 3)), np.arange(20) % 4
    assert_warned(lambda: ranking_metrics(x, y, ["ndcg"], gallery=(x, y)), "20")
