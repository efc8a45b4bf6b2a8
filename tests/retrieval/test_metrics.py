"""What embeddings are judged by, beside definitions and scikit-learn, and which settings are refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import silhouette_score
from torch import Tensor

from helpers.refusals import assert_named, assert_refused

pytest.importorskip("faiss")
pytest.importorskip("pytorch_metric_learning")

from metricopt_ext.data.labelled import Split
from metricopt_ext.errors import ConfigError, DataError, MetricError
from metricopt_ext.retrieval.config import MetricConfig, OwnEmbedderMetricConfig
from metricopt_ext.retrieval.metrics import besides, check_searched, embedding_metric, try_metric
from metricopt_ext.retrieval.named_metric import build_metric
from metricopt_ext.retrieval.ranking import RANKED, ranking_metrics

X = torch.randn(24, 3, generator=torch.Generator().manual_seed(0))
Y = torch.tensor([0] * 9 + [1] * 6 + [2] * 5 + [3] * 3 + [4])  # the last class has no pair
OWN = "sklearn.metrics:silhouette_score"


def ranked(embeddings: Tensor, labels: Tensor) -> list[tuple[np.ndarray, int]]:
    """For each query of a class with others: whether the R nearest have its label, and R."""
    x, y = embeddings.double().numpy(), labels.numpy()
    found = []
    for i in range(len(x)):
        others = np.delete(np.arange(len(x)), i)
        size = int((y[others] == y[i]).sum())
        if size:
            nearest = others[np.linalg.norm(x[others] - x[i], axis=1).argsort()][:size]
            found.append((y[nearest] == y[i], size))
    return found


def test_r_precision_and_average_precision_against_their_definitions() -> None:
    queries = ranked(X, Y)
    assert len(queries) == 23
    precision = np.mean([hits.mean() for hits, _ in queries])
    average = np.mean([(hits * hits.cumsum() / np.arange(1, size + 1)).sum() / size for hits, size in queries])
    for name, expected in (("r_precision", precision), ("mean_average_precision_at_r", average)):
        metric = embedding_metric(MetricConfig(name))
        assert metric.function(X, Y) == pytest.approx(expected, abs=1e-12)
        assert (metric.name, metric.maximize, metric.bounds) == (name, True, (0.0, 1.0))
        assert "nearest" in metric.description


def test_an_own_function_is_given_embeddings_and_labels() -> None:
    metric = embedding_metric(OwnEmbedderMetricConfig(OWN, bounds=[-1.0, 1.0], kwargs={"metric": "cosine"}))
    assert metric.function(X, Y) == pytest.approx(silhouette_score(X.numpy(), Y.numpy(), metric="cosine"))
    assert (metric.name, metric.maximize, metric.bounds) == ("silhouette_score", True, (-1.0, 1.0))


def test_an_own_function_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "own_embedding_scores.py").write_text(
        "def spread(embeddings, labels, power=1):\n"
        "    assert str(embeddings.dtype) == 'float32' and str(labels.dtype) == 'int64'\n"
        "    return abs(embeddings).mean() ** power\n"
    )
    settings: dict[str, Any] = {"folder": str(tmp_path), "maximize": False, "kwargs": {"power": 2}, "bounds": [0, 9]}
    metric = embedding_metric(OwnEmbedderMetricConfig("own_embedding_scores:spread", **settings))
    assert not metric.maximize
    assert metric.function(X, Y) == pytest.approx(float(X.abs().mean()) ** 2, rel=1e-5)


def test_an_own_function_may_work_in_place(tmp_path: Path) -> None:
    (tmp_path / "own_in_place.py").write_text(
        "def first(embeddings, labels):\n"
        "    value = abs(embeddings).mean() + labels.mean()\n"
        "    embeddings[:], labels[:] = 0, 0\n"
        "    return value\n"
    )
    metric = embedding_metric(OwnEmbedderMetricConfig("own_in_place:first", folder=str(tmp_path), bounds=[0.0, 9.0]))
    x, y = X.clone(), Y.clone()
    assert metric.function(x, y) == metric.function(x, y) > 1


@pytest.mark.parametrize(
    ("name", "change", "names"),
    [
        (
            "recal",
            {},
            ("metric.name='recal'", "ndcg"),
        ),
        ("recall", {"ks": [0]}, ("ks",)),
        (OWN, {"bounds": [1.0, -1.0]}, ("metric.bounds",)),
        ("sklearn.metrics:nothing", {}, ("nothing",)),
        ("no_such_module:score", {}, ("no_such_module",)),
    ],
)
def test_impossible_settings_are_refused(name: str, change: dict[str, Any], names: tuple[str, ...]) -> None:
    assert_refused(lambda: embedding_metric(OwnEmbedderMetricConfig(name, **change)), ConfigError, *names)


def test_an_own_function_is_tried_before_the_work() -> None:
    try_metric(OwnEmbedderMetricConfig(OWN, bounds=[-1.0, 1.0]), Y, 5)
    try_metric(MetricConfig(), torch.zeros(2), 5)  # a known one is not
    for config, names in (
        (OwnEmbedderMetricConfig("sklearn.metrics:davies_bouldin_score"), ("bounds", "(0, 1)")),
        (
            OwnEmbedderMetricConfig(OWN, bounds=[-1.0, 1.0], kwargs={"metrics": "l2"}),
            ("metrics",),
        ),
    ):
        with pytest.raises(ConfigError) as caught:
            try_metric(config, Y, 5)
        assert_named(caught, "(24, 5)", *names)


@pytest.mark.parametrize("name", ["r_precision", OWN])
def test_what_are_no_embeddings_of_these_labels_is_refused(name: str) -> None:
    function = embedding_metric(MetricConfig(name)).function
    assert_refused(lambda: function(X[:9], Y), DataError, "9", "24")
    assert_refused(
        lambda: function(torch.where(torch.arange(24)[:, None] == 3, torch.nan, X), Y), DataError, "NaN", "1", "24"
    )


def test_a_value_that_is_none_is_refused() -> None:
    assert_refused(
        lambda: embedding_metric(MetricConfig("r_precision")).function(X[:3], torch.arange(3)),
        DataError,
        "3",
        "queries",
    )
    function = embedding_metric(OwnEmbedderMetricConfig(OWN)).function
    # below 0, and bounds say 0 to 1
    assert_refused(lambda: function(X, Y), MetricError, "silhouette_score", "bounds")


@pytest.mark.parametrize("name", RANKED)
def test_metrics_of_rankings_judge_all_halves_and_galleries(name: str) -> None:
    config = MetricConfig(name, ks=[2, 4])
    metric = embedding_metric(config)
    assert metric.name == ("mean precision@2,4" if name == "precision" else name)

    def expected(x: Tensor, y: Tensor, **options: Any) -> Any:
        return pytest.approx(np.mean(list(ranking_metrics(x, y, [name], (2, 4), **options).values.values())), abs=1e-12)

    halves = (torch.arange(15), torch.arange(15, 24))  # of other classes
    told = build_metric(config, Split(X, Y), halves)
    evaluation = told.evaluate(torch.nn.Identity(), "start")
    assert told.to_value(evaluation.cost) == expected(X, Y)
    assert [told.to_value(cost) for cost in evaluation.halves] == [expected(X[half], Y[half]) for half in halves]
    queries = Y.roll(3) % 2 == 0
    gallery = X[~queries], Y[~queries]
    against = build_metric(config, Split(X, Y), queries=queries)
    assert against.to_value(against.cost(torch.nn.Identity(), "start")) == expected(
        X[queries], Y[queries], gallery=gallery
    )


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
    assert test.evaluate(Model(), "x").also is None
    assert set(test.look(Model())) == {OWN, "mean_average_precision_at_r", "r_precision"}
    assert_refused(lambda: besides(MetricConfig(also=["recal"])), ConfigError, "metric.also", "recal")
    assert_refused(
        lambda: build_metric(config, part, queries=Y > 1, constrained=False), ConfigError, "metric.name=sklearn"
    )


@pytest.mark.parametrize(
    "config",
    [
        MetricConfig(ks=[1, 23]),
        MetricConfig("r_precision", ks=[1, 23], also=["recall"]),
    ],
)
def test_a_k_of_all_that_is_searched_is_refused(config: MetricConfig) -> None:
    check_searched(config, "test images", 24)
    for count in (23, 5):
        with pytest.raises(ConfigError) as caught:
            check_searched(config, "test images", count)
        assert_named(caught, "metric.ks", count, "images", "test", "23")
    for name in ("r_precision", "ndcg"):
        check_searched(MetricConfig(name, ks=[1, 5000]), "test images", 5)
