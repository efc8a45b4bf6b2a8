"""Approximate search beside exact search, and indexes of the user's own."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.refusals import assert_named, assert_refused

pytest.importorskip("faiss")

import faiss

from metricopt_ext.errors import DataError
from metricopt_ext.retrieval.approximate import Index, built, read_index, recall_by_index
from metricopt_ext.retrieval.recall import nearest, recall_at_k
from metricopt_ext.retrieval.vectors import Vectors


def drawn(n: int, seed: int = 0, dimension: int = 8) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    y = rng.integers(40, size=n)
    return (rng.normal(size=(n, dimension)) + 0.3 * y[:, None] % 7).astype(np.float32), y


@pytest.mark.parametrize("distance", ["l2", "ip", "cosine"])
@pytest.mark.parametrize("separate", [False, True])
def test_an_index_that_searches_all_is_exact(distance: Any, separate: bool) -> None:
    x, y = drawn(200)
    gallery = drawn(150, 1) if separate else None
    exact = recall_at_k(x, y, (1, 5), gallery=gallery, distance=distance)
    recall, overlap = recall_by_index(x, y, (1, 5), "ivf", 50, gallery=gallery, distance=distance)
    assert recall == exact
    assert overlap.sample == 50
    assert overlap.found == {1: 1.0, 5: 1.0}
    assert overlap.recall == overlap.exact
    recall, overlap = recall_by_index(x, y, (1, 500), "hnsw", gallery=gallery, distance=distance, query_subset=90)
    assert (recall.queries, overlap.sample) == (90, 90)
    assert overlap.exact == recall_at_k(x, y, (1, 500), gallery=gallery, distance=distance, query_subset=90).at
    assert overlap.found[1] > 0.9


def test_what_an_index_misses_is_told() -> None:
    kind = "ivf"
    x, y = drawn(3000, dimension=32)
    recall, overlap = recall_by_index(x, y, (1, 10), kind, 200, seed=3)
    _, found = built(kind, Vectors(x), "l2", 10).faiss.search(x, 11)
    assert list(recall.rows) == list(range(3000))
    assert recall.at[1] == np.mean([y[next(j for j in row if j != i)] == y[i] for i, row in enumerate(found)])
    near = nearest(x, 10)
    shares = [np.isin(near[i], [j for j in row if j != i][:10]).mean() for i, row in enumerate(found)]
    error = 3 * np.std(shares) / np.sqrt(200)
    assert abs(overlap.found[10] - np.mean(shares)) <= error
    assert overlap.found[10] < 1
    whole = recall_by_index(x, y, (10,), kind, 3000)[1]
    assert whole.found == {10: pytest.approx(np.mean(shares))}
    assert whole.exact == recall_at_k(x, y, (10,)).at


def written(path: Path, x: Any, kind: str = "Flat", metric: int = faiss.METRIC_L2) -> Path:
    index = faiss.index_factory(x.shape[1], kind, metric)
    index.train(x)
    index.add(x)
    faiss.write_index(index, str(path))
    return path


@pytest.mark.parametrize("kind", ["Flat", "IVF4,Flat", "HNSW16", "PCA8,Flat", "SQfp16"])
@pytest.mark.parametrize("distance", ["l2", "ip"])
def test_an_index_of_the_user_s_own_is_a_gallery(tmp_path: Path, kind: str, distance: Any) -> None:
    (x, y), (items, labels) = drawn(100), drawn(300, 1)
    metric = faiss.METRIC_L2 if distance == "l2" else faiss.METRIC_INNER_PRODUCT
    index = read_index(written(tmp_path / "own.faiss", items, kind, metric), 8, distance, 300)
    recall, overlap = recall_by_index(x, y, (1, 10), None, gallery=(index, labels), distance=distance)
    exact = recall_at_k(x, y, (1, 10), gallery=(items, labels), distance=distance)
    assert recall.gallery == 300
    assert overlap.sample == 0
    assert recall.at == (exact.at if kind == "Flat" else {k: pytest.approx(v, abs=0.3) for k, v in exact.at.items()})


def test_an_index_that_can_not_be_right_is_refused(tmp_path: Path) -> None:
    items, labels = drawn(50)
    path = written(tmp_path / "own.faiss", items)
    for change, names in (
        ({"dimension": 9}, ("dimension", "9", "queries", "8")),
        ({"distance": "ip"}, ("l2", "--distance", "ip")),
        ({"distance": "cosine"}, ("1",)),
        ({"size": 51}, ("50", "51", "gallery")),
        ({"path": tmp_path / "none"}, ()),
    ):
        with pytest.raises(DataError) as caught:
            read_index(**{"path": path, "dimension": 8, "distance": "l2", "size": 50, **change})
        assert_named(caught, *names)
    whole = path.read_bytes()
    for length in (0, 3, 36, 37, 60, len(whole) - 1):
        path.write_bytes(whole[:length])
        assert_refused(lambda: read_index(path, 8, "l2", 50), DataError, "FAISS")
    numbered = faiss.IndexIDMap(faiss.IndexFlatL2(8))
    numbered.add_with_ids(items, np.arange(50) + 7)
    assert_refused(
        lambda: recall_by_index(items, labels, (30,), None, gallery=(Index(numbered, "mine"), labels)),
        DataError,
        "mine",
        "55",
    )
    assert_refused(lambda: recall_by_index(items, labels, (1,), "lsh"), DataError, "lsh")
