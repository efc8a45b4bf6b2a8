"""The order of neighbours against float64 brute force in numpy, where float32 can and can't tell them apart."""

from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("faiss")

from metricopt_ext.retrieval import neighbours, vectors
from metricopt_ext.retrieval.recall import hits_at_k, nearest, recall_at_k
from metricopt_ext.utils.seeding import generator

SIZE, DIM, CLASSES = 600, 16, 25
KS = (1, 3, 10, 100, 400)


def ordinary(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    labels = rng.integers(CLASSES, size=SIZE)
    return rng.standard_normal((CLASSES, DIM))[labels] + rng.standard_normal((SIZE, DIM)), labels


def outlier(scale: float, value: float) -> np.ndarray:
    x = ordinary()[0] * scale
    x[7] = value
    return x


X, Y = ordinary()
RNG = np.random.default_rng(1)
ANY = RNG.integers(CLASSES, size=SIZE)  # labels that tell nothing: every rank occurs
REPEATED = np.repeat(X[: SIZE // 10], 10, axis=0)
FAR = 1e5 * RNG.standard_normal((CLASSES, DIM))[Y]
DATA: dict[str, tuple[Any, np.ndarray]] = {
    "ordinary": (np.float32(X), Y),
    "offset": (np.float32(X + 5000), Y),
    "offset in float64": (X + 1e8, Y),
    "tiny": (np.float32(X * 1e-25), Y),
    "denormal": (np.float32(X * 1e-42), Y),
    "tiny in float64": (X * 1e-200, Y),
    "large": (np.float32(X * 1e17), Y),
    "groups far apart": (np.float32(X + FAR), ANY),
    "an outlier": (np.float32(outlier(1, 1e15)), Y),
    "a tiny scale and an outlier": (np.float32(outlier(1e-25, 1e15)), Y),
    "copies": (np.float32(REPEATED), ANY),
    "one point": (np.full((SIZE, DIM), 0.3, np.float32), ANY),
    "near copies": (np.float32(REPEATED * (1 + 1e-4 * RNG.standard_normal((SIZE, DIM)))), ANY),
    "nearer copies": (np.float32(REPEATED + 1e-6 * RNG.standard_normal((SIZE, DIM))), ANY),
    "integers": (1 + RNG.integers(3, size=(SIZE, 6)), ANY),
    "bytes": (RNG.integers(1, 255, size=(SIZE, 6)).astype(np.uint8), ANY),
    "large integers": (RNG.integers(10**9, 10**9 + 50, size=(SIZE, 6)), ANY),
    "binary": (np.float32(RNG.integers(2, size=(SIZE, 64))), ANY),
    "whole but for a digit": (RNG.integers(1, 3, size=(SIZE, 6)) + 1e-12 * RNG.standard_normal((SIZE, 6)), ANY),
    "half": (np.float16(X + 50), Y),
    "bfloat16": (torch.from_numpy(X + 5).bfloat16(), Y),
    "a line": (np.float32((1 + RNG.integers(100, size=(SIZE, 1))) / 7), ANY),
}


def in_float64(x: Any) -> np.ndarray:
    return x.double().numpy() if isinstance(x, torch.Tensor) else x.astype(np.float64)


def distances(x: Any, items: Any, distance: str) -> np.ndarray:
    """All float64 distances, ``n x m``, smallest first; the cosine as the distance of rows of length 1.

    A shift of all items changes no order of inner products, but leaves float64 more digits.
    """
    x, items = (in_float64(each) for each in (x, items))
    scale = 2.0 ** -np.round(np.log2(np.median(np.abs(items).mean(axis=1))))  # exact
    if distance == "ip":
        items = items - np.rint(np.median(items, axis=0))
    x, items = x * scale, items * scale
    if distance == "cosine":
        x, items = (each / np.linalg.norm(each, axis=1, keepdims=True) for each in (x, items))
    if distance == "ip":
        return np.stack([-(items * row).sum(axis=1) for row in x])
    return np.stack([((items - row) ** 2).sum(axis=1) for row in x])


def in_order(x: Any, items: Any, distance: str, own: bool) -> list[np.ndarray]:
    """Rows of all items in order, for each query; ties by row."""
    order = np.argsort(distances(x, items, distance), axis=1, kind="stable")
    return [row[row != i] if own else row for i, row in enumerate(order)]


def places(order: list[np.ndarray], labels: np.ndarray, item_labels: np.ndarray) -> np.ndarray:
    """Places of the first with each query's label; -1 without one."""
    hits = [item_labels[row] == label for row, label in zip(order, labels, strict=True)]
    return np.array([row.argmax() if row.any() else -1 for row in hits])


@pytest.mark.filterwarnings("ignore:.*queries are in the gallery too")
@pytest.mark.parametrize("distance", ["l2", "ip", "cosine"])
@pytest.mark.parametrize("name", DATA)
def test_equals_float64(name: str, distance: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = DATA[name]
    order = in_order(x, x, distance, own=True)
    first = places(order, y, y)
    matched = np.flatnonzero(first >= 0)
    rows, hits = hits_at_k(x, y, KS, distance=distance)
    assert rows.tolist() == matched.tolist()
    assert (hits == (first[matched, None] < KS)).all()
    assert nearest(x, 7, distance=distance).tolist() == [row[:7].tolist() for row in order]

    for size in (3, 19, 20, 300):  # FAISS calculates few queries in another way
        drawn = torch.randperm(len(matched), generator=generator(5, "recall queries")).numpy()[:size]
        for k in KS:
            part = recall_at_k(x, y, (k,), distance=distance, query_subset=size, seed=5)
            assert part.at[k] == np.mean(first[matched[drawn]] < k)

    gallery = x[200:], y[200:]
    apart = places(in_order(x[:200], x[200:], distance, own=False), y[:200], gallery[1])
    found = recall_at_k(x[:200], y[:200], KS, gallery=gallery, distance=distance)
    assert found.at == {k: np.mean(apart[apart >= 0] < k) for k in KS}

    with monkeypatch.context() as patch:  # in blocks, none of which is all of them
        for module in (neighbours, vectors):
            patch.setattr(module, "NUMBERS", 23 * x.shape[1])
        double = torch.as_tensor(x).double()
        assert (hits_at_k(double, y, KS, distance=distance)[1] == hits).all()
        assert nearest(double, 7, distance=distance).tolist() == [row[:7].tolist() for row in order]

    monkeypatch.setattr(neighbours, "_searcher", misled)  # float64 alone finds the same
    assert (hits_at_k(x, y, KS, distance=distance)[1] == hits).all()


def misled(items: Any, k: int, euclidean: bool) -> Any:
    """A search that knows nothing: the first items, at no distance."""
    return lambda queries: (np.full((len(queries), k), np.nan, np.float32), np.tile(np.arange(k), (len(queries), 1)))


def test_says_for_how_many_queries_float32_was_not_enough() -> None:
    assert recall_at_k(*DATA["ordinary"], KS).doubles < 10
    assert recall_at_k(*DATA["offset"], KS).doubles < 10  # as it is shifted before
    found = recall_at_k(*DATA["groups far apart"], KS)
    assert SIZE / 2 < found.doubles <= found.queries == SIZE
    x, y = DATA["groups far apart"]
    assert recall_at_k(x, y, KS, query_subset=30).doubles <= 30


@pytest.mark.parametrize("name", ["ordinary", "an outlier", "groups far apart", "near copies"])
@pytest.mark.parametrize("distance", ["l2", "ip"])
def test_rounding_is_within_the_bound(name: str, distance: Any) -> None:
    given = vectors.Vectors(DATA[name][0])
    search = neighbours.Search(given, given, distance, SIZE - 1, own=True)
    rows = np.arange(SIZE)
    keys, found, last = search._found(rows)
    x = search.items.double(slice(None))
    exact = -(search.queries.double(slice(None)) @ x.T) if distance == "ip" else distances(x, x, "l2")
    scale = 2.0 ** -np.round(np.log2(np.median(np.abs(x).mean(axis=1)))) if distance == "l2" else 1.0
    exact = np.take_along_axis(exact, found, axis=1) / scale**2
    lengths = vectors.lengths_of(search.queries.copy)
    for column in range(0, SIZE - 1, 50):
        low, high = search._range(keys[:, column].astype(np.float64), keys[:, column], lengths, neighbours.SINGLE)
        assert ((low <= exact[:, column]) & (exact[:, column] <= high)).all()
    assert (last >= keys[:, -1]).all()


def test_many_copies_are_calculated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbours, "MANY", 10)
    calculated: list[int] = []
    original = neighbours.Search._calculated
    monkeypatch.setattr(
        neighbours.Search, "_calculated", lambda self, i, near: calculated.append(len(near)) or original(self, i, near)
    )
    x, y = np.float32(np.tile(X[:2], (SIZE // 2, 1))), ANY
    rows, hits = hits_at_k(x, y, KS)
    first = places(in_order(x, x, "l2", own=True), y, y)
    assert (hits == (first[rows, None] < KS)).all()
    assert 0 < max(calculated) <= 10


def test_others_leave_out_the_last_where_own_is_missing() -> None:
    found = np.array([[7, 0, 5], [1, 9, 8], [4, 3, 6]])
    assert found[neighbours.others(found, np.array([0, 1, 2]))].tolist() == [7, 5, 9, 8, 4, 3]


@pytest.mark.parametrize(("k", "d"), [(1, 512), (1000, 512), (1000, 16), (1000, 1), (60_000, 512), (10**9, 8)])
def test_chunk_sizes_bound_the_neighbours(k: int, d: int) -> None:
    size, fewest = neighbours.chunk_sizes(k, d)
    assert size * (k + 1) <= 2**24 or size == 20
    if k <= 1000 and d >= 16:
        assert size % 4096 == 0  # FAISS' own blocks
        assert fewest * d >= 128_000
        assert size >= fewest
