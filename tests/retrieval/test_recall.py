"""Recall@k against float64 brute force and raw FAISS, its metric and halves, and what it refuses."""

import doctest
import math
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from helpers.refusals import assert_refused, assert_warned, having

pytest.importorskip("faiss")

import faiss

from metricopt_ext.data.halves import class_draws
from metricopt_ext.errors import DataError, MetricError
from metricopt_ext.retrieval import recall
from metricopt_ext.retrieval.intervals import interval
from metricopt_ext.retrieval.recall import (
    Recall,
    hits_at_k,
    nearest,
    recall_at_k,
    recall_metric,
    recalls_on_halves,
)
from metricopt_ext.tasks.ledger import Ledger
from metricopt_ext.utils.seeding import generator

BIG = 2**24


def clusters(n: int, d: int = 8, classes: int = 20, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Overlapping clusters ``n x d``: neighbours are partly right."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(classes, size=n)
    centres = rng.standard_normal((classes, d)) * 0.8
    return (centres[labels] + rng.standard_normal((n, d))).astype(np.float32), labels


def raw_faiss(x: np.ndarray, y: np.ndarray, ks: Any, distance: str = "l2") -> dict[int, float]:
    """One search of a flat index for all queries, each with its own row taken out in a Python loop."""
    index = (faiss.IndexFlatL2 if distance == "l2" else faiss.IndexFlatIP)(x.shape[1])
    index.add(x)
    k = min(max(ks), len(x) - 1)
    sizes = np.bincount(y)
    hits = []
    for i, row in enumerate(index.search(x, k + 1)[1]):
        if sizes[y[i]] > 1:
            hits.append(y[row[row != i][:k]] == y[i])
    return {wanted: float(np.mean([row[:wanted].any() for row in hits])) for wanted in ks}


# --- The order of neighbours ------------------------------------------------------------------------------------

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


BASE, OF_CLASS = ordinary()
RNG = np.random.default_rng(1)
ANY = RNG.integers(CLASSES, size=SIZE)  # labels that tell nothing: every rank occurs
REPEATED = np.repeat(BASE[: SIZE // 10], 10, axis=0)
FAR = 1e5 * RNG.standard_normal((CLASSES, DIM))[OF_CLASS]
DATA: dict[str, tuple[Any, np.ndarray]] = {
    "ordinary": (np.float32(BASE), OF_CLASS),
    "offset": (np.float32(BASE + 5000), OF_CLASS),
    "tiny": (np.float32(BASE * 1e-25), OF_CLASS),
    "tiny in float64": (BASE * 1e-200, OF_CLASS),
    "large": (np.float32(BASE * 1e17), OF_CLASS),
    "groups far apart": (np.float32(BASE + FAR), ANY),
    "an outlier": (np.float32(outlier(1, 1e15)), OF_CLASS),
    "copies": (np.float32(REPEATED), ANY),
    "one point": (np.full((SIZE, DIM), 0.3, np.float32), ANY),
    "near copies": (np.float32(REPEATED * (1 + 1e-4 * RNG.standard_normal((SIZE, DIM)))), ANY),
    "nearer copies": (np.float32(REPEATED + 1e-6 * RNG.standard_normal((SIZE, DIM))), ANY),
    "bytes": (RNG.integers(1, 255, size=(SIZE, 6)).astype(np.uint8), ANY),
    "large integers": (RNG.integers(10**9, 10**9 + 50, size=(SIZE, 6)), ANY),
    "whole but for a digit": (RNG.integers(1, 3, size=(SIZE, 6)) + 1e-12 * RNG.standard_normal((SIZE, 6)), ANY),
    "half": (np.float16(BASE + 50), OF_CLASS),
    "bfloat16": (torch.from_numpy(BASE + 5).bfloat16(), OF_CLASS),
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
def test_equals_float64(name: str, distance: Any) -> None:
    """Where float32 can and can't tell neighbours apart; ties come in the order of rows."""
    x, y = DATA[name]
    order = in_order(x, x, distance, own=True)
    first = places(order, y, y)
    matched = np.flatnonzero(first >= 0)
    rows, hits = hits_at_k(x, y, KS, distance=distance)
    assert rows.tolist() == matched.tolist()
    assert (hits == (first[matched, None] < KS)).all()
    assert nearest(x, 7, distance=distance).tolist() == [row[:7].tolist() for row in order]

    for size in (3, 19, 300):  # FAISS calculates few queries in another way
        drawn = torch.randperm(len(matched), generator=generator(5, "recall queries")).numpy()[:size]
        part = recall_at_k(x, y, KS, distance=distance, query_subset=size, seed=5)
        assert part.at == {k: np.mean(first[matched[drawn]] < k) for k in KS}

    gallery = x[200:], y[200:]
    apart = places(in_order(x[:200], x[200:], distance, own=False), y[:200], gallery[1])
    found = recall_at_k(x[:200], y[:200], KS, gallery=gallery, distance=distance)
    assert found.at == {k: np.mean(apart[apart >= 0] < k) for k in KS}


def test_says_for_how_many_queries_float32_was_not_enough() -> None:
    assert recall_at_k(*DATA["ordinary"], KS).doubles < 10
    assert recall_at_k(*DATA["offset"], KS).doubles < 10  # as it is shifted before
    found = recall_at_k(*DATA["groups far apart"], KS)
    assert SIZE / 2 < found.doubles <= found.queries == SIZE
    x, y = DATA["groups far apart"]
    assert recall_at_k(x, y, KS, query_subset=30).doubles <= 30


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n", "d", "distance"),
    [(6110, 64, "l2"), (3000, 2, "ip")],
)
def test_chunks_give_the_recalls_of_one_raw_search(n: int, d: int, distance: Any) -> None:
    x, y = clusters(n, d, classes=n // 5)
    ks = (1, 10, 100, 1000)
    assert recall_at_k(x, y, ks, distance=distance).at == raw_faiss(x, y, ks, distance)


def test_more_duplicates_than_neighbours() -> None:
    # 50 copies of one point, each of a class whose other member is far away: no query may find itself.
    x = np.zeros((100, 4), np.float32)
    x[50:] = np.eye(4)[0] * 100 + np.arange(50)[:, None] * 10
    y = np.concatenate([np.arange(50), np.arange(50)])
    for k in (1, 5, 20):
        found = recall_at_k(x, y, (k,), gallery=(x, y), gallery_starts_with_queries=True, query_subset=100)
        assert found.at[k] == raw_faiss(x, y, (k,))[k]
        only_copies = recall_at_k(x[:50], y[:50], (k,), gallery=(x, y), gallery_starts_with_queries=True)
        assert only_copies.at == {k: 0.0}


def test_single_members_are_left_out_and_stay_in_the_gallery() -> None:
    x = np.array([[0.0], [1.0], [1.4], [10.0], [10.1]], np.float32)
    y = np.array([0, 7, 0, 1, 1])  # 7 has a single member, which stands between the two of class 0
    result = recall_at_k(x, y, (1, 2))
    assert result == Recall({1: 0.5, 2: 1.0}, queries=4, without_match=1, gallery=5)
    # A separate gallery: its lone item of class 7 is a match, its lack of class 1 leaves two queries out.
    gallery = (np.array([[0.9], [0.2]], np.float32), np.array([7, 0]))
    assert recall_at_k(x, y, (1,), gallery=gallery) == Recall({1: 2 / 3}, queries=3, without_match=2, gallery=2)


def test_k_beyond_the_gallery_is_everything() -> None:
    x, y = clusters(30, classes=3)
    found = recall_at_k(x, y, (29, 30, 1000))
    assert found.at == {29: 1.0, 30: 1.0, 1000: 1.0}
    assert found.mean == 1
    assert recall_at_k(x[:5] + 1, y[:5], (500,), gallery=(x, y)).at == {500: 1.0}


def test_labels_above_2_to_24_are_told_apart() -> None:
    x = np.array([[0.0], [1.0], [10.0], [11.0]], np.float32)
    y = np.array([BIG, BIG + 1, BIG, BIG + 1])  # equal as float32: then every neighbour would be right
    assert np.unique(y.astype(np.float32)).size == 1
    for labels in (y, torch.from_numpy(y), y.astype(np.int32), y - 2 * BIG, y + 2**61):
        assert recall_at_k(x, labels, (1, 2)).at[1] == 0.0


@pytest.mark.parametrize(
    "convert",
    [
        lambda x: torch.complex(torch.zeros(x.shape), torch.from_numpy(-x)).conj().imag,  # negative by a bit alone
        lambda x: x.astype(">f4"),
        lambda x: x.tolist(),
    ],
)
def test_kinds_of_embeddings(convert: Any) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.integers(-50, 50, size=(200, 6)).astype(np.float32), rng.integers(10, size=200)  # exact in every type
    assert recall_at_k(convert(x), torch.from_numpy(y), (1, 5)).at == recall_at_k(x, y, (1, 5)).at


def test_subset_is_exact_for_its_queries_and_fixed() -> None:
    x, y = clusters(400)
    y[:30] = np.arange(1000, 1030)  # single members, not to be drawn
    full = recall_at_k(x, y, (1, 5))
    assert (full.queries, full.without_match) == (370, 30)
    part = recall_at_k(x, y, (1, 5), query_subset=100, seed=4)
    assert (len(set(part.rows.tolist())), int(part.rows.min()) >= 30) == (100, True)
    of_all = dict(zip(full.rows.tolist(), full.places.tolist(), strict=True))
    assert part.at == {k: np.mean([of_all[row] < k for row in part.rows.tolist()]) for k in (1, 5)}
    assert (part.queries, part.without_match, part.gallery) == (100, 30, 400)
    assert recall_at_k(x, y, (1, 5), query_subset=100, seed=4) == part
    assert recall_at_k(x, y, (1, 5), query_subset=100, seed=5).at != part.at
    assert recall_at_k(x, y, (1, 5), query_subset=10**6) == full
    mean = np.mean([recall_at_k(x, y, (1,), query_subset=100, seed=seed).at[1] for seed in range(50)])
    assert mean == pytest.approx(full.at[1], abs=0.02)


def test_gallery_that_starts_with_the_queries() -> None:
    x, y = clusters(250)
    whole = recall_at_k(x, y, (1, 5, 20))
    result = recall_at_k(x[:100], y[:100], (1, 5, 20), gallery=(x, y), gallery_starts_with_queries=True)
    assert result.places.tolist() == whole.places[whole.rows < 100].tolist()
    same = recall_at_k(x, y, (1, 5), gallery=(x.copy(), y.copy()), gallery_starts_with_queries=True)
    assert same == recall_at_k(x, y, (1, 5))


def test_queries_in_the_gallery_are_counted_by_content() -> None:
    x, y = clusters(250)
    shuffled = np.random.default_rng(0).permutation(250)
    for gallery in ((x[shuffled], y[shuffled]), (x.astype(np.float64), y), (x.astype(np.float16), y[:, None])):
        with pytest.warns(UserWarning, match=having("100", "queries", "gallery")):
            found = recall_at_k(x[:100], y[:100], (1,), gallery=gallery)
        assert (found.at, found.copies) == ({1: 1.0}, 100)
    for options, count in (({"gallery": (x[93:], y[93:])}, "7"), ({"gallery": (x, y), "query_subset": 30}, "30")):
        assert_warned(lambda o=options: recall_at_k(x[:100], y[:100], (1,), **o), count, "queries")
    elsewhere = assert_warned(lambda: recall_at_k(x[:100], y[:100], (1,), gallery=(x, (y + 1) % 20)), "100", "label")
    assert elsewhere.copies == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert recall_at_k(x[:100], y[:100], (1,), gallery=(x[100:], y[100:])).copies == 0
        other = np.where(np.arange(250) < 50, (y + 1) % 20, y)  # an embedding under another label is another item
        assert recall_at_k(x[:100], y[:100], (1,), gallery=(np.where(y[:, None] == other[:, None], x + 1, x), other))
        recall_at_k(x[:100], y[:100], (1,), gallery=(x, y), gallery_starts_with_queries=True)


@pytest.mark.parametrize("distance", ["l2", "ip", "cosine"])
def test_queries_whose_embeddings_were_calculated_again_are_counted(distance: Any) -> None:
    x, y = clusters(250)
    again = x * (1 + np.random.default_rng(0).normal(size=x.shape).astype(np.float32) * 1e-6)
    if distance == "cosine":  # or scaled to length 1 for the gallery alone
        again = x / np.linalg.norm(x, axis=1, keepdims=True)
    order = np.random.default_rng(1).permutation(250)
    with pytest.warns(UserWarning, match=having("100", "queries", "gallery")):
        recall_at_k(x[:100], y[:100], (1,), gallery=(again[order], y[order]), distance=distance)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        recall_at_k(x[:100], y[:100], (1,), gallery=(again[100:], y[100:]), distance=distance)
        recall_at_k(x[:100], y[:100], (1,), gallery=(x + 0.05, y), distance=distance)
        recall_at_k(x[:100] + 1e6, y[:100], (1,), gallery=(x[100:] + 1e6, y[100:]), distance=distance)


X, Y = clusters(20, 3, classes=4)
NAN, INF, HUGE, ZERO = X.copy(), X.astype(np.float64), X.copy(), X.copy()
NAN[[4, 7], 1] = np.nan
INF[5, 0] = 1e300
HUGE[5, 0] = 3e19
ZERO[6] = 0


@pytest.mark.parametrize(
    ("arguments", "options", "names"),
    [
        ((X, Y + 0.5), {}, ("5", "0")),
        ((X, np.float32(Y + BIG)), {}, ("1.67772e+07", "2^24")),
        ((X, [f"c{each}" for each in Y]), {}, ("return_inverse=True",)),
        ((X, np.eye(4)[Y % 4]), {}, ("got", "(20, 4)")),
        ((INF, Y), {}, ("float32", "1", "20", "5")),
        ((HUGE, Y), {}, ("squared", "8e37")),
        ((X, np.arange(20)), {}, ("20", "queries")),
        ((X, Y), {"gallery": (X, Y + 100)}, ("20", "queries")),
        ((X, Y), {"gallery": (NAN, Y)}, ("gallery",)),
        ((X, Y), {"gallery": (X[:, :2], Y)}, ("3", "2")),
        ((X, Y), {"gallery": (X[:9], Y[:9]), "gallery_starts_with_queries": True}, ("20", "gallery", "9")),
        ((X, Y), {"gallery": (X, Y[::-1]), "gallery_starts_with_queries": True}, ()),
        ((X, Y), {"ks": (1, 0)}, ("1", "0")),
        ((X, Y), {"distance": "l1"}, ("distance", "'l2'", "cosine", "'l1'")),
        ((ZERO, Y), {"distance": "cosine"}, ("embeddings", "0", "6")),
    ],
)
def test_refuses_what_it_can_not_use(arguments: Any, options: Any, names: tuple[str, ...]) -> None:
    assert_refused(lambda: recall_at_k(*arguments, **{"ks": (1,), **options}), DataError, *names)


@pytest.mark.slow
def test_searches_on_a_gpu_where_faiss_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """FAISS' GPU classes are played by those of the CPU: only how they are called is tested."""
    asked: list[Any] = []

    class Resources:
        def setTempMemory(self, size: int) -> None:  # noqa: N802 (its name in FAISS)
            assert size <= 2**28  # it stays taken while the process lives

    def index(kind: Any) -> Any:
        return lambda resources, d: asked.append(resources) or kind(d)

    monkeypatch.setattr(faiss, "get_num_gpus", lambda: 1)
    monkeypatch.setattr(faiss, "StandardGpuResources", Resources, raising=False)
    monkeypatch.setattr(faiss, "GpuIndexFlatL2", index(faiss.IndexFlatL2), raising=False)
    monkeypatch.setattr(faiss, "GpuIndexFlatIP", index(faiss.IndexFlatIP), raising=False)
    x, y = clusters(3000, 64)
    for threads in (1, 2):  # FAISS lets one thread alone use resources: each has its own
        with ThreadPoolExecutor(1) as one:
            for distance in ("l2", "ip"):
                found = one.submit(recall_at_k, x, y, (1, 10), distance=distance).result()
                assert found.at == raw_faiss(x, y, (1, 10), distance)
            one.submit(recall_at_k, x, y, (2500,)).result()  # too many neighbours for a GPU
        assert (len(asked), len({*map(id, asked)})) == (2 * threads, threads)


# --- The black box ----------------------------------------------------------------------------------------------


class Moved(nn.Module):
    """Embeds by a matrix: the model whose Recall@k is asked for."""

    def __init__(self, x: np.ndarray) -> None:
        super().__init__()
        self.layer = nn.Linear(x.shape[1], 5)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.layer(x))


def in_batches(x: np.ndarray, y: np.ndarray, size: int = 64) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return list(zip(torch.from_numpy(x).split(size), torch.from_numpy(y).split(size), strict=True))


def test_metric_is_the_mean_recall_of_the_model_in_evaluation_mode() -> None:
    x, y = clusters(300)
    model = Moved(x).train()
    z = model.layer(torch.from_numpy(x)).detach()
    metric = recall_metric(in_batches(x, y), (1, 2, 4), ledger=Ledger(2))
    cost = metric.cost(model, "test")
    assert (metric.name, metric.maximize, metric.new_classes) == ("mean Recall@1,2,4", True, True)
    assert cost == pytest.approx(-recall_at_k(z, y, (1, 2, 4)).mean)
    assert metric.cost(model, "again") == cost
    assert metric.ledger.spent == 2
    assert model.training

    def embed(model: Any, inputs: torch.Tensor) -> torch.Tensor:
        return nn.functional.normalize(model.layer(inputs), dim=1)

    part, gallery = in_batches(x[:150], y[:150]), in_batches(x[150:], y[150:])
    options: dict[str, Any] = {"distance": "ip", "query_subset": 50, "seed": 3}
    own = recall_metric(part, (2,), gallery=gallery, embed=embed, new_classes=False, **options)
    z = nn.functional.normalize(z)

    def expected(rows: Any) -> float:
        return recall_at_k(z[:150][rows], y[:150][rows], (2,), gallery=(z[150:], y[150:]), **options).at[2]

    found, draws = own.evaluate(model, "test"), class_draws(torch.from_numpy(y[:150]), 3)
    assert found.value == pytest.approx(expected(slice(None)))
    for values, halves in zip(found.pairs, draws, strict=True):
        assert list(values) == pytest.approx([expected(half) for half in halves])
    assert not own.new_classes


@pytest.mark.parametrize("distance", ["l2", "ip", "cosine"])
@pytest.mark.parametrize(("classes", "ks"), [(12, (1, 3, 20)), (4, (2, 500))])
@pytest.mark.parametrize("ties", [False, True])
def test_halves_have_the_recall_of_a_search_of_their_own(
    distance: Any, classes: int, ks: tuple[int, ...], ties: bool
) -> None:
    """From one search of all, also where neighbours are tied, or of one class alone, and where none is of the half."""
    g = torch.Generator().manual_seed(classes)
    y = torch.cat([torch.arange(240) % classes, torch.tensor([900, 901])])  # two classes of a single member
    x = torch.randn(classes, 3, generator=g)[y % classes] + 0.7 * torch.randn(242, 3, generator=g)
    x[y % classes < classes // 2] += 40  # groups so far apart that the nearest may all be of the other half
    if ties:
        x = x.round() + 0.0
        x[(x == 0).all(1)] = 1.0  # the cosine needs a length
    draws = class_draws(y, 3)
    assert not isinstance(draws, str)
    whole, halves = recalls_on_halves(x, y, ks, draws, distance=distance)
    assert whole == recall_at_k(x, y, ks, distance=distance).mean
    for found, pair in zip(halves, draws, strict=True):
        assert found == tuple(recall_at_k(x[half], y[half], ks, distance=distance).mean for half in pair)


def test_a_metric_of_few_classes_says_that_it_has_no_halves() -> None:
    x, y = clusters(60)
    metric = recall_metric(in_batches(x, y % 3), (1,))
    names = ("Recall@1", "halves")
    with pytest.warns(UserWarning, match=having(*names)):
        assert metric.evaluate(nn.Identity(), "test").halves is None
    alone = np.arange(60) // 2  # a gallery with a match for the queries of a few classes alone
    metric = recall_metric(in_batches(x, alone), (1,), gallery=in_batches(x[:6], alone[:6]))
    halves = assert_warned(lambda: [metric.evaluate(nn.Identity(), "test").halves for _ in range(2)], "30", "queries")
    assert halves == [None, None]


def test_metric_refuses() -> None:
    x, y = clusters(40)
    assert_refused(lambda: recall_metric(in_batches(x, y), (0,)), DataError, "1")
    batches = iter(in_batches(x, y))
    metric = recall_metric(batches, (1,))
    metric.cost(nn.Identity(), "once")
    assert_refused(lambda: metric.cost(nn.Identity(), "twice"), MetricError, "Recall@1")
    crossed = [(torch.zeros(3, 2), torch.zeros(2, dtype=int)), (torch.zeros(2, 2), torch.ones(3, dtype=int))]
    assert_refused(lambda: recall_metric(crossed, (1,)).cost(nn.Identity(), "test"), MetricError, "0", "3", "2")
    triples = [(torch.zeros(3, 2), torch.zeros(3), torch.zeros(3))]
    assert_refused(lambda: recall_metric(triples, (1,)).cost(nn.Identity(), "test"), MetricError, "0")
    x[3] = np.nan
    assert_refused(
        lambda: recall_metric(in_batches(x, y), (1,)).cost(nn.Identity(), "test"), MetricError, "NaN", "40", "3"
    )


def test_intervals_are_wilsons_of_shares_and_normal_ones_of_other_means() -> None:
    low, high = interval(np.array([1.0] * 10))
    assert (low, high) == pytest.approx((10 / (10 + 1.959963984540054**2), 1.0), abs=1e-12)
    share = np.array([1.0] * 9 + [0.0])
    for end in interval(share):  # (share - p)^2 = z^2 p (1 - p) / n, which defines it
        assert (0.9 - end) ** 2 == pytest.approx(1.959963984540054**2 * end * (1 - end) / 10, abs=1e-12)
    values = np.array([0.25, 0.5, 0.5, 0.75])
    half = 1.959963984540054 * math.sqrt(0.125 / 3) / 2
    assert interval(values) == pytest.approx((0.5 - half, 0.5 + half), abs=1e-12)
    assert interval(np.array([0.3])) == (0.0, 1.0)  # one query tells nothing


def test_examples() -> None:
    failed, attempted = doctest.testmod(recall)
    assert attempted > failed == 0
