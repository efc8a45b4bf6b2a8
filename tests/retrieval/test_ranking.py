"""Metrics of rankings by the one contract: against loops over queries, with and without a gallery, and their halves."""

import math
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from sklearn.metrics import silhouette_score
from torch import Tensor, nn

from helpers.refusals import assert_named, assert_refused, assert_warned
from testers.metric import HalvedMetricTester, MetricTester, Told, labelled_rows

pytest.importorskip("faiss")

from metricopt_ext.data.halves import class_draws
from metricopt_ext.data.labelled import Split
from metricopt_ext.errors import ConfigError, DataError, MetricError
from metricopt_ext.retrieval.config import MetricConfig, OwnEmbedderMetricConfig
from metricopt_ext.retrieval.metrics import besides, check_searched, embedding_metric, try_metric
from metricopt_ext.retrieval.named_metric import build_metric
from metricopt_ext.retrieval.ranking import RANKED, ranking_metrics
from metricopt_ext.retrieval.recall import hits_at_k, recall_at_k, recall_metric


def relevance(x: Tensor, y: Tensor, queries: Tensor | None = None, distance: str = "l2") -> list[Any]:
    """For each query with a match: whether the others, or the gallery, are of its label, nearest first, ties by row."""
    x, y = x.double().numpy(), y.numpy()
    if distance == "cosine":
        if not x.any(axis=1).all():
            return []  # of which one has no direction
        x = x / np.linalg.norm(x, axis=1, keepdims=True)
    asked = np.ones(len(y), dtype=bool) if queries is None else queries.numpy()
    if len(set(y if queries is None else y[~asked])) < 2:
        return []  # any neighbour would be right
    found = []
    for i in np.flatnonzero(asked):
        others = np.flatnonzero(~asked) if queries is not None else np.delete(np.arange(len(y)), i)
        near = -(x[others] * x[i]).sum(axis=1) if distance == "ip" else ((x[others] - x[i]) ** 2).sum(axis=1)
        order = others[near.argsort(kind="stable")]
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
    distance: ClassVar[Any] = "l2"
    ties_by_row = True
    named_empty = ("(0, 3)",)

    def inputs(self, kind: str) -> Any:
        return labelled_rows(kind, width=3, classes=8)

    def ours(self, x: Tensor, y: Tensor) -> float:
        found = ranking_metrics(x, y, [self.name], (self.k,), distance=self.distance)
        return next(iter(found.values.values()))

    def reference(self, x: Tensor, y: Tensor) -> float:
        queries = [of_query(self.name, self.k, hits) for hits in relevance(x, y, distance=self.distance)]
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
    name, distance = "mean_reciprocal_rank", "cosine"
    kinds = ("apart", "one class", "absent class")  # where rounding of lengths decides no tie


class TestHits(RankingTester):
    """Recall@2 by the inner product, as the mean of the queries' hits."""

    name, k, distance = "recall", 2, "ip"

    def ours(self, x: Tensor, y: Tensor) -> float:
        return float(hits_at_k(x, y, (self.k,), distance=self.distance)[1].mean())


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
        halves = [
            [(half.tolist(), value) for half, value in zip(pair, values, strict=True)]
            for pair, values in zip(draws if found.pairs else (), found.pairs, strict=True)
        ]
        return Told(found.value, halves, metric.ledger.spent)


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


# --- The metrics that a config names -------------------------------------------------------------------------------

X = torch.randn(24, 3, generator=torch.Generator().manual_seed(0))
Y = torch.tensor([0] * 9 + [1] * 6 + [2] * 5 + [3] * 3 + [4])  # the last class has no pair
OWN = "sklearn.metrics:silhouette_score"


def test_an_own_function_is_given_copies_and_its_arguments(tmp_path: Path) -> None:
    metric = embedding_metric(OwnEmbedderMetricConfig(OWN, bounds=[-1.0, 1.0], kwargs={"metric": "cosine"}))
    assert metric.function(X, Y) == pytest.approx(silhouette_score(X.numpy(), Y.numpy(), metric="cosine"))
    assert (metric.name, metric.maximize, metric.bounds) == ("silhouette_score", True, (-1.0, 1.0))
    (tmp_path / "own_in_place.py").write_text(
        "def first(embeddings, labels):\n"
        "    assert str(embeddings.dtype) == 'float32' and str(labels.dtype) == 'int64'\n"
        "    value = abs(embeddings).mean() + labels.mean()\n"
        "    embeddings[:], labels[:] = 0, 0\n"
        "    return value\n"
    )
    metric = embedding_metric(OwnEmbedderMetricConfig("own_in_place:first", folder=str(tmp_path), bounds=[0.0, 9.0]))
    x, y = X.clone(), Y.clone()
    assert metric.function(x, y) == metric.function(x, y) == pytest.approx(float(X.abs().mean() + Y.double().mean()))
    assert_refused(lambda: metric.function(X[:9], Y), DataError, "9", "24")
    function = embedding_metric(OwnEmbedderMetricConfig(OWN)).function
    # below 0, and bounds say 0 to 1
    assert_refused(lambda: function(X, Y), MetricError, "silhouette_score", "bounds")


@pytest.mark.parametrize(
    ("name", "change", "names"),
    [
        ("recal", {}, ("metric.name='recal'", "ndcg")),
        ("recall", {"ks": [0]}, ("ks",)),
        (OWN, {"bounds": [-1.0, 1.0], "kwargs": {"metrics": "l2"}}, ("metrics", "(24, 5)")),
        ("sklearn.metrics:davies_bouldin_score", {}, ("bounds", "(24, 5)")),
        ("sklearn.metrics:nothing", {}, ("nothing",)),
    ],
)
def test_impossible_metrics_are_refused_before_the_work(
    name: str, change: dict[str, Any], names: tuple[str, ...]
) -> None:
    config = OwnEmbedderMetricConfig(name, **change)
    assert_refused(lambda: try_metric(config, Y, 5) or embedding_metric(config), ConfigError, *names)


@pytest.mark.parametrize("name", ["precision", "ndcg"])
def test_metrics_of_rankings_judge_all_halves_and_galleries(name: str) -> None:
    config = MetricConfig(name, ks=[2, 4])
    metric = embedding_metric(config)
    assert metric.name == ("mean precision@2,4" if name == "precision" else name)

    def expected(x: Tensor, y: Tensor, **options: Any) -> Any:
        return pytest.approx(np.mean(list(ranking_metrics(x, y, [name], (2, 4), **options).values.values())), abs=1e-12)

    halves = (torch.arange(15), torch.arange(15, 24))  # of other classes
    told = build_metric(config, Split(X, Y), halves)
    evaluation = told.evaluate(torch.nn.Identity(), "start")
    assert evaluation.value == expected(X, Y)
    assert [told.sign * cost for cost in evaluation.halves] == [expected(X[half], Y[half]) for half in halves]
    queries = Y.roll(3) % 2 == 0
    gallery = X[~queries], Y[~queries]
    against = build_metric(config, Split(X, Y), queries=queries)
    assert against.evaluate(torch.nn.Identity(), "start").value == expected(X[queries], Y[queries], gallery=gallery)


def test_what_counts_besides_is_told_by_the_same_embeddings() -> None:
    passes = []

    class Model(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            passes.append(len(x))
            return x

    config = MetricConfig(ks=[1, 2], also=["mean_average_precision_at_r", OWN], subject_to={"r_precision": ">= start"})
    part = Split(X, Y)
    metric = build_metric(config, part)
    found = metric.evaluate(Model(), "x")
    assert passes == [24]
    assert found.also == {"r_precision": embedding_metric(MetricConfig("r_precision")).function(X, Y)}
    looked = metric.look(Model())
    assert looked[OWN] == pytest.approx(silhouette_score(X.numpy(), Y.numpy()))
    average = embedding_metric(MetricConfig("mean_average_precision_at_r")).function(X, Y)
    assert looked["mean_average_precision_at_r"] == average
    test = build_metric(config, part, constrained=False)
    assert test.evaluate(Model(), "x").also == {}
    assert set(test.look(Model())) == {OWN, "mean_average_precision_at_r", "r_precision"}
    assert_refused(lambda: besides(MetricConfig(also=["recal"])), ConfigError, "metric.also", "recal")
    assert_refused(
        lambda: build_metric(config, part, queries=Y > 1, constrained=False), ConfigError, "metric.name=sklearn"
    )


@pytest.mark.parametrize("config", [MetricConfig(ks=[1, 23]), MetricConfig("r_precision", ks=[1, 23], also=["recall"])])
def test_a_k_of_all_that_is_searched_is_refused(config: MetricConfig) -> None:
    check_searched(config, "test images", 24)
    for count in (23, 5):
        with pytest.raises(ConfigError) as caught:
            check_searched(config, "test images", count)
        assert_named(caught, "metric.ks", count, "images", "test", "23")
    for name in ("r_precision", "ndcg"):
        check_searched(MetricConfig(name, ks=[1, 5000]), "test images", 5)
