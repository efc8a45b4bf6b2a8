"""Recall@k against naive numpy, raw FAISS and pytorch-metric-learning, and what it refuses."""

import copy
import doctest
import importlib
import sys
import threading
import tracemalloc
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import normalize

from helpers.refusals import assert_named, assert_refused, assert_warned, having

pytest.importorskip("faiss")
pytest.importorskip("pytorch_metric_learning")

import faiss
from pytorch_metric_learning import losses, testers, trainers
from pytorch_metric_learning.distances import CosineSimilarity
from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator
from pytorch_metric_learning.utils.inference import CustomKNN, FaissKNN
from pytorch_metric_learning.utils.logging_presets import HookContainer

from metricopt_ext.data.halves import class_draws, class_halves
from metricopt_ext.errors import DataError, MetricError
from metricopt_ext.retrieval import accuracy, inputs, neighbours, recall, vectors
from metricopt_ext.retrieval.accuracy import RecallCalculator
from metricopt_ext.retrieval.recall import Recall, hits_at_k, recall_at_k, recall_metric, recalls_on_halves
from metricopt_ext.tasks.ledger import Ledger

BIG = 2**24


def clusters(n: int, d: int = 8, classes: int = 20, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Overlapping clusters ``n x d``: neighbours are partly right."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(classes, size=n)
    centres = rng.standard_normal((classes, d)) * 0.8
    return (centres[labels] + rng.standard_normal((n, d))).astype(np.float32), labels


def naive(
    x: np.ndarray, y: np.ndarray, ks: Any, gallery: Any = None, distance: str = "l2", own: Any = None, tied: str = ""
) -> dict[int, float]:
    """The definition, one query after the other, in float64; among ties the rightly labelled come "first" or "last"."""
    items, item_labels = (x, y) if gallery is None else gallery
    own = range(len(x)) if gallery is None else own
    firsts = []
    for i, (query, label) in enumerate(zip(x.astype(np.float64), y, strict=True)):
        far = -(items @ query) if distance != "l2" else ((items - query) ** 2).sum(axis=1)
        if distance == "cosine":
            far /= np.linalg.norm(items, axis=1)
        others = [j for j in range(len(items)) if own is None or j != own[i]]
        right = {"": False, "first": item_labels != label, "last": item_labels == label}[tied]
        others.sort(key=lambda j, far=far, right=right: (far[j], right[j] if tied else 0))
        ranks = [place for place, j in enumerate(others) if item_labels[j] == label]
        if ranks:
            firsts.append(ranks[0])
    return {k: float(np.mean([first < k for first in firsts])) for k in ks}


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


@pytest.mark.parametrize("distance", ["l2", "ip", "cosine"])
def test_hits_are_those_of_the_definition(distance: Any) -> None:
    x, y = clusters(120, classes=50)
    rows, hits = hits_at_k(x, y, (1, 5, 200), distance=distance)
    assert rows.tolist() == [i for i in range(120) if (y == y[i]).sum() > 1]
    assert 0 < len(rows) < 120
    for column, expected in zip(hits.T, naive(x, y, (1, 5, 200), distance=distance).values(), strict=True):
        assert column.mean() == expected
    near = x if distance != "cosine" else x / np.linalg.norm(x, axis=1, keepdims=True)
    far = -(near @ near.T) if distance != "l2" else ((near[:, None] - near) ** 2).sum(2)
    np.fill_diagonal(far, np.inf)
    assert hits[:, 0].tolist() == (y[far[rows].argmin(1)] == y[rows]).tolist()
    assert_refused(lambda: hits_at_k(x, y, ()), DataError, "ks")


@pytest.mark.parametrize("distance", ["l2", "ip", "cosine"])
@pytest.mark.parametrize("separate", [False, True])
def test_equals_the_definition(distance: Any, separate: bool) -> None:
    x, y = clusters(500)
    gallery = (x[300:], y[300:]) if separate else None
    x, y = x[:300], y[:300]
    ks = (1, 2, 4, 16, 64)
    result = recall_at_k(x, y, ks, gallery=gallery, distance=distance)
    expected = naive(x, y, ks, gallery, distance)
    assert result.at == pytest.approx(expected, abs=1e-12)
    assert 0.1 < expected[1] < expected[4] < 0.9999
    assert result == Recall(result.at, queries=300, without_match=0, gallery=200 if separate else 300)
    assert result.mean == pytest.approx(np.mean(list(expected.values())))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n", "d", "distance"),
    [(4100, 64, "l2"), (6110, 64, "l2"), (6110, 64, "ip"), (8300, 16, "l2"), (3000, 2, "ip")],
)
def test_chunks_give_the_recalls_of_one_raw_search(n: int, d: int, distance: Any) -> None:
    x, y = clusters(n, d, classes=n // 5)
    ks = (1, 10, 100, 1000)
    assert recall_at_k(x, y, ks, distance=distance).at == raw_faiss(x, y, ks, distance)


def test_small_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = clusters(700, 32)
    whole = recall_at_k(x, y, (1, 5, 50))
    for held in (1, 100 * 51, 333 * 51):  # 20, 100 and 333 queries at a time
        monkeypatch.setattr(neighbours, "NEIGHBOURS", held)
        assert recall_at_k(x, y, (1, 5, 50)) == whole


def test_memory_does_not_grow_with_the_neighbours_of_all_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbours, "NEIGHBOURS", 2**17)
    monkeypatch.setattr(neighbours, "DISTANCES", 2**16)
    for module in (neighbours, vectors):
        monkeypatch.setattr(module, "NUMBERS", 2**12)
    x, y = clusters(4000, 32, classes=100)
    recall_at_k(x, y, (1,))
    tracemalloc.start()
    recall_at_k(x, y, (1, 1000))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**17 * 40 < 4000 * 1001 * 12 / 8  # an eighth of indices and distances for all


@pytest.mark.slow
def test_ties_come_in_the_order_of_their_rows() -> None:
    rng = np.random.default_rng(3)
    x = rng.integers(3, size=(300, 3)).astype(np.float32)  # 27 points, each some 11 times
    y = rng.integers(6, size=300)
    for distance in ("l2", "ip"):
        ks = (1, 3, 10, 50, 200)
        worst, best = (naive(x, y, ks, distance=distance, tied=tied) for tied in ("last", "first"))
        assert worst[3] < best[3]
        for chosen in (ks, *[(k,) for k in ks]):
            found = recall_at_k(x, y, chosen, distance=distance).at
            assert found == pytest.approx(naive(x, y, chosen, distance=distance), abs=1e-12)


def test_own_row_is_removed_by_its_index() -> None:
    # Two duplicates of unlike label: whoever drops the first neighbour finds one of the two itself.
    x = np.array([[0.0], [0.0], [5.0], [9.0]], np.float32)
    y = np.array([0, 1, 0, 1])
    assert recall_at_k(x, y, (1, 2)).at == {1: 0.0, 2: 0.5}  # 5.0 finds one 0.0 of either label in two, 9.0 finds 5.0
    assert recall_at_k(x[:, [0, 0]] + 1, y, (3,)).at == {3: 1.0}


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
    assert recall_at_k(x, y, (1, 29, 30, 1000)).at == pytest.approx({**naive(x, y, (1, 29)), 30: 1.0, 1000: 1.0})
    assert recall_at_k(x[:5] + 1, y[:5], (500,), gallery=(x, y)).at == {500: 1.0}


def test_labels_above_2_to_24_are_told_apart() -> None:
    x = np.array([[0.0], [1.0], [10.0], [11.0]], np.float32)
    y = np.array([BIG, BIG + 1, BIG, BIG + 1])  # equal as float32: then every neighbour would be right
    assert np.unique(y.astype(np.float32)).size == 1
    for labels in (y, torch.from_numpy(y), y.astype(np.int32), y - 2 * BIG, y + 2**61):
        assert recall_at_k(x, labels, (1, 2)).at[1] == 0.0
    assert RecallCalculator(ks=(1,)).get_accuracy(x, y) == {"recall_at_1": 0.0}


@pytest.mark.parametrize(
    "convert",
    [
        torch.from_numpy,
        lambda x: torch.from_numpy(x).requires_grad_(),
        lambda x: torch.from_numpy(x).double().t().contiguous().t(),
        lambda x: torch.from_numpy(x).bfloat16(),
        lambda x: torch.from_numpy(x).half(),
        lambda x: torch.complex(torch.zeros(x.shape), torch.from_numpy(-x)).conj().imag,  # negative by a bit alone
        lambda x: x.astype(np.float64),
        lambda x: x.astype(np.int16),
        np.asfortranarray,
        lambda x: np.repeat(x, 2, axis=1)[:, ::2],
        lambda x: x.tolist(),
    ],
)
def test_kinds_of_embeddings(convert: Any) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.integers(-50, 50, size=(200, 6)).astype(np.float32), rng.integers(10, size=200)  # exact in every type
    given = convert(x)
    kept = copy.deepcopy(given) if not isinstance(given, torch.Tensor) else given.detach().clone()
    assert recall_at_k(given, torch.from_numpy(y), (1, 5)).at == recall_at_k(x, y, (1, 5)).at
    same = torch.equal if isinstance(given, torch.Tensor) else np.array_equal
    assert same(kept, given)


def test_contiguous_float32_is_not_copied() -> None:
    x, y = clusters(50)
    assert inputs.check_items(x, y)[0] is x
    assert np.shares_memory(inputs.check_items(torch.from_numpy(x), y)[0], x)
    for given in (x, torch.from_numpy(x)):
        assert np.shares_memory(vectors.Frame(vectors.Vectors(given)).copy, x)


def test_subset_is_exact_for_its_queries_and_fixed() -> None:
    x, y = clusters(400)
    y[:30] = np.arange(1000, 1030)  # single members, not to be drawn
    full = recall_at_k(x, y, (1, 5))
    assert (full.queries, full.without_match) == (370, 30)

    searched: list[np.ndarray] = []
    original = neighbours._searcher

    def spy(*arguments: Any) -> Any:
        search = original(*arguments)
        return lambda queries: searched.append(queries) or search(queries)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(neighbours, "_searcher", spy)
        part = recall_at_k(x, y, (1, 5), query_subset=100, seed=4)
    (queries,) = searched
    rows = [int(np.flatnonzero((x == query).all(axis=1))[0]) for query in queries]
    assert len(set(rows)) == 100
    assert min(rows) >= 30
    assert part.at == pytest.approx(naive(x[rows], y[rows], (1, 5), (x, y), own=rows), abs=1e-12)
    assert (part.queries, part.without_match, part.gallery) == (100, 30, 400)

    assert recall_at_k(x, y, (1, 5), query_subset=100, seed=4) == part
    assert recall_at_k(x, y, (1, 5), query_subset=100, seed=5).at != part.at
    assert recall_at_k(x, y, (1, 5), query_subset=370).at == full.at
    assert recall_at_k(x, y, (1, 5), query_subset=10**6) == full
    mean = np.mean([recall_at_k(x, y, (1,), query_subset=100, seed=seed).at[1] for seed in range(50)])
    assert mean == pytest.approx(full.at[1], abs=0.02)


def test_gallery_that_starts_with_the_queries() -> None:
    x, y = clusters(250)
    queries = x[:100], y[:100]
    result = recall_at_k(*queries, (1, 5, 20), gallery=(x, y), gallery_starts_with_queries=True)
    assert result.at == pytest.approx(naive(*queries, (1, 5, 20), (x, y), own=range(100)), abs=1e-12)
    same = recall_at_k(x, y, (1, 5), gallery=(x.copy(), y.copy()), gallery_starts_with_queries=True)
    assert same == recall_at_k(x, y, (1, 5))


def test_queries_in_the_gallery_are_counted_by_content() -> None:
    x, y = clusters(250)
    names = ("100", "queries", "gallery")
    shuffled = np.random.default_rng(0).permutation(250)
    copies = [
        (x, y),
        (x[shuffled], y[shuffled]),
        (x.astype(np.float64), y.astype(np.int32)),
        (x.astype(np.float16), y[:, None]),
        (np.asfortranarray(x), y.astype(np.float32)),
    ]
    for gallery in copies:
        with pytest.warns(UserWarning, match=having("100", *names)):
            found = recall_at_k(x[:100], y[:100], (1,), gallery=gallery)
        assert (found.at, found.copies) == ({1: 1.0}, 100)
    assert_warned(
        lambda: recall_at_k(torch.from_numpy(x[:100]).bfloat16(), y[:100], (1,), gallery=(torch.from_numpy(x), y)),
        "100",
        *names,
    )
    assert_warned(lambda: recall_at_k(x[:100], y[:100], (1,), gallery=(x[93:], y[93:])), "7", *names)
    assert_warned(lambda: recall_at_k(x[:100], y[:100], (1,), gallery=(x, y), query_subset=30), "30", "queries")
    zero = np.zeros((2, 2), np.float32)
    assert_warned(lambda: recall_at_k(zero, np.arange(2), (1,), gallery=(-zero, np.arange(2))), "2", "queries")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert recall_at_k(x[:100], y[:100], (1,), gallery=(x[100:], y[100:])).copies == 0
        other = np.where(np.arange(250) < 50, (y + 1) % 20, y)  # an embedding under another label is another item
        assert recall_at_k(x[:100], y[:100], (1,), gallery=(np.where(y[:, None] == other[:, None], x + 1, x), other))
        recall_at_k(x[:100], y[:100], (1,), gallery=(x, y), gallery_starts_with_queries=True)


@pytest.mark.parametrize("kind", [">f4", ">f2", np.longdouble, np.uint16])
def test_a_gallery_may_be_an_array_of_any_type(kind: Any) -> None:
    rng = np.random.default_rng(0)
    x, items = (rng.integers(40, size=(n, 3)).astype(kind) for n in (20, 30))
    y, labels = rng.integers(4, size=20), rng.integers(4, size=30)
    items[:2], labels[:2] = x[:2], y[:2]
    found = []
    for change in (kind, np.float64):
        with pytest.warns(UserWarning, match=having("20", "queries", "gallery")):
            found.append(recall_at_k(x.astype(change), y, (1, 2), gallery=(items.astype(change), labels)))
    assert found[0] == found[1]


def test_queries_in_the_gallery_under_other_labels_are_counted() -> None:
    x, y = clusters(250)
    with pytest.warns(UserWarning, match=having("100", "queries", "gallery")):
        assert recall_at_k(x[:100], y[:100], (1,), gallery=(x, (y + 1) % 20)).copies == 0


@pytest.mark.parametrize("distance", ["l2", "ip", "cosine"])
def test_queries_whose_embeddings_were_calculated_again_are_counted(distance: Any) -> None:
    x, y = clusters(250)
    again = x * (1 + np.random.default_rng(0).normal(size=x.shape).astype(np.float32) * 1e-6)
    if distance == "cosine":  # or scaled to length 1 for the gallery alone
        again = x / np.linalg.norm(x, axis=1, keepdims=True)
    order = np.random.default_rng(1).permutation(250)
    with pytest.warns(UserWarning, match=having("100", "queries", "gallery")) as caught:
        recall_at_k(x[:100], y[:100], (1,), gallery=(again[order], y[order]), distance=distance)
    assert int(str(caught[0].message).split()[2]) > 60
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        recall_at_k(x[:100], y[:100], (1,), gallery=(again[100:], y[100:]), distance=distance)
        recall_at_k(x[:100], y[:100], (1,), gallery=(x + 0.05, y), distance=distance)
        recall_at_k(x[:100] + 1e6, y[:100], (1,), gallery=(x[100:] + 1e6, y[100:]), distance=distance)


@pytest.mark.parametrize(
    "convert",
    [
        lambda y: y[:, None],
        lambda y: torch.from_numpy(y)[:, None],
        lambda y: torch.from_numpy(y)[:, None].float(),
        lambda y: y.astype(np.float32),
        lambda y: y.astype(np.float16),
        lambda y: torch.from_numpy(y).bfloat16(),
        lambda y: y.astype(np.float64)[:, None],
        lambda y: y.tolist(),
        lambda y: y.astype(">u8"),
    ],
)
def test_kinds_of_labels(convert: Any) -> None:
    x, y = clusters(120)
    assert recall_at_k(x, convert(y), (1, 5)) == recall_at_k(x, y, (1, 5))
    found = recall_at_k(x[:50], y[:50], (1,), gallery=(x[50:], convert(y[50:])))
    assert found == recall_at_k(x[:50], y[:50], (1,), gallery=(x[50:], y[50:]))


def test_largest_floats_that_are_integers() -> None:
    x, y = clusters(60, classes=5)
    for labels, top in ((np.float32(y), BIG), (np.float64(y), 2**53), (np.float16(y), 2**11)):
        labels[labels == 4] = top - 1
        assert recall_at_k(x, labels, (1,)) == recall_at_k(x, y, (1,))


X, Y = clusters(20, 3, classes=4)
NAN, INF, HUGE, ZERO = X.copy(), X.astype(np.float64), X.copy(), X.copy()
NAN[[4, 7], 1] = np.nan
INF[5, 0] = 1e300
HUGE[5, 0] = 3e19
ZERO[6] = 0


@pytest.mark.parametrize(
    ("arguments", "options", "names"),
    [
        ((X, Y[:7]), {}, ("20", "7")),
        ((X[:0], Y[:0]), {}, ("embeddings", "1", "(0, 3)")),
        ((X[:, :0], Y), {}, ("(20, 0)",)),
        ((X[:, 0], Y), {}, ("(20,)",)),
        (
            (X, Y + 0.5),
            {},
            ("5", "0"),
        ),
        ((X, np.float32(Y + BIG)), {}, ("1.67772e+07", "2^24")),
        ((X, torch.from_numpy(Y + BIG).float()), {}, ("2^24",)),
        (
            (X, torch.from_numpy(Y + 256).bfloat16()),
            {},
            ("0", "2^8"),
        ),
        ((X, np.float16(Y + 2048)), {}, ("2^11",)),
        ((X, np.where(Y > 0, Y, np.nan)), {}, ("nan",)),
        ((X, np.uint64(Y) + np.uint64(2**63)), {}, ("labels", "2^63", "9223372036854775811")),
        (
            (X, np.stack([Y, Y], 1)),
            {},
            ("(20, 2)",),
        ),
        ((X, Y[None]), {}, ("(1, 20)",)),
        ((np.ma.masked_less(X, X.mean()), Y), {}, ("embeddings",)),
        ((torch.from_numpy(X).to_sparse(), Y), {}, ()),
        ((torch.from_numpy(X).to("meta"), Y), {}, ()),
        ((X, torch.from_numpy(Y).to("meta")), {}, ()),
        (([[1.0, 2.0], [3.0]], [0, 1]), {}, ("embeddings",)),
        ((X, Y), {"gallery": [(X, Y), (X, Y)]}, ("gallery",)),
        ((X, Y), {"query_subset": 2.5}, ("query_subset", "2.5")),
        ((X, Y), {"seed": "a"}, ("seed", "'a'")),
        ((X, [f"c{each}" for each in Y]), {}, ("return_inverse=True",)),
        ((X, np.eye(4)[Y % 4]), {}, ("got", "(20, 4)")),
        ((X, np.array(list("abcdefghijklmnopqrst"))), {}, ("U1",)),
        ((X.astype(np.complex64), Y), {}, ("embeddings", "complex64")),
        ((torch.from_numpy(X).to(torch.complex64), Y), {}, ("embeddings", "complex64")),
        ((X.astype(object), Y), {}, ("embeddings",)),
        ((NAN, Y), {}, ("NaN", "20", "4")),
        ((torch.from_numpy(NAN), Y), {}, ("NaN", "20", "4")),
        ((INF, Y), {}, ("float32", "1", "20", "5")),
        ((HUGE, Y), {}, ("squared", "8e37")),
        ((X, Y * 0 + 7), {}, ("7",)),
        ((X, np.arange(20)), {}, ("20", "queries")),
        ((X, Y), {"gallery": (X, Y + 100)}, ("20", "queries")),
        ((X, Y), {"gallery": (X, Y[:5])}, ("gallery", "20", "5")),
        ((X, Y), {"gallery": (NAN, Y)}, ("gallery",)),
        ((X, Y), {"gallery": (X[:, :2], Y)}, ("3", "2")),
        ((X, Y), {"gallery": (torch.from_numpy(X).to("meta"), Y)}, ("device", "meta")),
        ((X, Y), {"gallery": (X, None)}, ("gallery",)),
        ((X, Y), {"gallery": (X, Y, X, Y)}, ("gallery", "4")),
        ((X, Y), {"gallery": X[:2]}, ("gallery",)),
        ((X, Y), {"gallery": (X[:9], Y[:9]), "gallery_starts_with_queries": True}, ("20", "gallery", "9")),
        ((X, Y), {"gallery": (X[::-1], Y[::-1]), "gallery_starts_with_queries": True}, ()),
        ((X, Y), {"gallery": (X, Y[::-1]), "gallery_starts_with_queries": True}, ()),
        ((X, Y), {"ks": (1, 0)}, ("1", "0")),
        ((X, Y), {"ks": ()}, ("1",)),
        ((X, Y), {"ks": (1.5,)}, ("(1.5,)",)),
        ((X, Y), {"ks": 5}, ("5",)),
        ((X, Y), {"distance": "l1"}, ("distance", "'l2'", "cosine", "'l1'")),
        ((ZERO, Y), {"distance": "cosine"}, ("embeddings", "0", "6")),
        ((X, Y), {"distance": "cosine", "gallery": (ZERO, Y)}, ("gallery", "0")),
        ((X, Y), {"seed": -1}, ("seed", "0", "-1")),
        ((X, Y), {"query_subset": 0}, ("query_subset", "1", "queries", "0")),
    ],
)
def test_refuses_what_it_can_not_use(arguments: Any, options: Any, names: tuple[str, ...]) -> None:
    assert_refused(lambda: recall_at_k(*arguments, **{"ks": (1,), **options}), DataError, *names)


def test_largest_lengths_that_do_not_overflow() -> None:
    x, y = clusters(100)
    scale = np.float32(8e18 / np.linalg.norm(x, axis=1).max())
    for distance in ("l2", "ip", "cosine"):
        assert recall_at_k(x * scale, y, (1, 5), distance=distance).at == naive(x, y, (1, 5), distance=distance)


def test_progress_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    x, y = clusters(4500, 64)
    recall_at_k(x, y, (1,), progress="my [/red]gallery[1] :key:")
    out, err = capsys.readouterr()
    assert out == ""
    assert "my [/red]gallery[1] :key:" in err  # neither markup nor an emoji
    assert "100%" in err
    recall_at_k(x, y, (1,))
    assert capsys.readouterr() == ("", "")


@pytest.mark.slow
def test_searches_on_a_gpu_where_faiss_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """FAISS' GPU classes are played by those of the CPU: only how they are called is tested."""
    asked: list[Any] = []

    class Resources:
        made = 0

        def __init__(self) -> None:
            Resources.made += 1

        def setTempMemory(self, size: int) -> None:  # noqa: N802 (its name in FAISS)
            assert size <= 2**28  # it stays taken while the process lives

    def index(kind: Any) -> Any:
        return lambda resources, d: asked.append(resources) or kind(d)

    monkeypatch.setattr(neighbours, "_GPU", threading.local())
    monkeypatch.setattr(faiss, "get_num_gpus", lambda: 1)
    monkeypatch.setattr(faiss, "StandardGpuResources", Resources, raising=False)
    monkeypatch.setattr(faiss, "GpuIndexFlatL2", index(faiss.IndexFlatL2), raising=False)
    monkeypatch.setattr(faiss, "GpuIndexFlatIP", index(faiss.IndexFlatIP), raising=False)
    x, y = clusters(3000, 64)
    for distance in ("l2", "ip"):
        assert recall_at_k(x, y, (1, 10), distance=distance).at == raw_faiss(x, y, (1, 10), distance)
    assert [type(each) for each in asked] == [Resources] * 2
    recall_at_k(x, y, (2500,))
    assert len(asked) == 2  # too many neighbours for a GPU
    assert Resources.made == 1
    with ThreadPoolExecutor(1) as other:
        other.submit(recall_at_k, x, y, (1,)).result()
    assert Resources.made == 2  # FAISS lets one thread alone use them


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


def test_metric_is_the_mean_recall_of_the_model() -> None:
    x, y = clusters(300)
    model = Moved(x).train()
    embedded = model.layer(torch.from_numpy(x)).detach().numpy()
    ledger = Ledger(2)
    metric = recall_metric(in_batches(x, y), (1, 2, 4), ledger=ledger)
    cost = metric.cost(model, "test")
    assert metric.name == "mean Recall@1,2,4"
    assert metric.maximize
    assert cost == pytest.approx(1 - np.mean(list(naive(embedded, y, (1, 2, 4)).values())))
    assert metric.cost(model, "again") == cost
    assert ledger.spent == 2
    assert model.training
    assert recall_metric([], (5,)).name == "Recall@5"


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("subset", [None, 40])
def test_the_metric_tells_halves_by_class(separate: bool, subset: int | None) -> None:
    x, y = clusters(300)
    torch.manual_seed(0)  # with some weights, both halves happen to have the same recall
    model = Moved(x)
    z = model.layer(torch.from_numpy(x)).detach()
    labels = torch.from_numpy(y)
    batches, gallery = in_batches(x[:200], y[:200]), in_batches(x[200:], y[200:])
    metric = recall_metric(batches, (1, 3), gallery=gallery if separate else None, query_subset=subset, seed=5)
    told = metric.evaluate(model, "test").halves
    halves = class_halves(labels[:200], 5)
    assert not isinstance(halves, str)
    assert not set(y[halves[0]]) & set(y[halves[1]])
    items = (z[200:], labels[200:]) if separate else None
    options: dict[str, Any] = {"gallery": items, "query_subset": subset, "seed": 5}
    assert told == tuple(1 - recall_at_k(z[half], labels[half], (1, 3), **options).mean for half in halves)
    assert told is not None
    assert told[0] != told[1]
    backwards = recall_metric(list(reversed(batches)), (1, 3), gallery=gallery if separate else None, seed=5)
    if subset is None:  # the division depends on the classes alone
        assert backwards.evaluate(model, "test").halves == pytest.approx(told, abs=1e-12)


@pytest.mark.parametrize("distance", ["l2", "ip", "cosine"])
@pytest.mark.parametrize(("classes", "ks"), [(12, (1,)), (12, (1, 3, 20)), (4, (2, 500)), (60, (1, 2, 4))])
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


def test_queries_whose_neighbours_are_of_the_other_half_are_searched_in_their_own() -> None:
    """Two classes lie within a crowd of the other half's: not one of their nearest is of their half."""
    g = torch.Generator().manual_seed(0)
    y = torch.cat([torch.arange(4).repeat_interleave(100), torch.tensor([4, 4, 5, 5, 6, 6, 7, 7])])
    x = 0.1 * torch.randn(408, 4, generator=g)
    x[400:] *= torch.tensor([1.0, 40, 1, 40, 1, 40, 1, 40])[:, None]
    first = torch.arange(400)
    draws = [(first, torch.arange(400, 408))]
    whole, halves = recalls_on_halves(x, y, (1, 2), draws)
    assert whole == recall_at_k(x, y, (1, 2)).mean
    assert list(halves) == [tuple(recall_at_k(x[half], y[half], (1, 2)).mean for half in draws[0])]


def test_halves_with_a_part_of_a_class_are_refused() -> None:
    x, y = torch.randn(12, 3), torch.arange(12) % 4
    assert_refused(lambda: recalls_on_halves(x, y, (1,), [(torch.arange(6), torch.arange(6, 12))]), DataError)
    assert_refused(
        lambda: recalls_on_halves(x, y, (1,), [((y == 0).nonzero().flatten(), (y > 0).nonzero().flatten())]), DataError
    )


def test_the_metric_divides_its_classes_several_times_and_says_that_others_are_meant() -> None:
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(120, 5, generator=g), torch.arange(120) % 12
    metric = recall_metric([(x, y)], ks=(1, 3), seed=2)
    assert metric.new_classes
    assert not recall_metric([(x, y)], new_classes=False).new_classes
    found, draws = metric.evaluate(nn.Identity(), "test"), class_draws(y, 2)
    assert len(draws) == 8
    for costs, halves in zip(found.pairs, draws, strict=True):
        assert costs == tuple(1 - recall_at_k(x[half], y[half], (1, 3)).mean for half in halves)  # type: ignore[index]


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


def test_metric_with_gallery_subset_and_own_embedding() -> None:
    x, y = clusters(400)
    model = Moved(x)

    def embed(model: Any, inputs: torch.Tensor) -> torch.Tensor:
        return nn.functional.normalize(model.layer(inputs), dim=1)

    metric = recall_metric(
        in_batches(x[:150], y[:150]),
        (2,),
        gallery=in_batches(x[150:], y[150:]),
        embed=embed,
        distance="ip",
        query_subset=50,
        seed=3,
    )
    z = embed(model, torch.from_numpy(x)).detach()
    expected = recall_at_k(z[:150], y[:150], (2,), gallery=(z[150:], y[150:]), distance="ip", query_subset=50, seed=3)
    assert metric.to_value(metric.cost(model, "test")) == pytest.approx(expected.at[2])
    assert expected.queries == 50


def test_metric_refuses() -> None:
    x, y = clusters(40)
    assert_refused(lambda: recall_metric(in_batches(x, y), (0,)), DataError, "1")
    batches = iter(in_batches(x, y))
    metric = recall_metric(batches, (1,))
    metric.cost(nn.Identity(), "once")
    assert_refused(lambda: metric.cost(nn.Identity(), "twice"), MetricError, "Recall@1")
    crossed = [(torch.zeros(3, 2), torch.zeros(2, dtype=int)), (torch.zeros(2, 2), torch.ones(3, dtype=int))]
    assert_refused(lambda: recall_metric(crossed, (1,)).cost(nn.Identity(), "test"), MetricError, "0", "3", "2")
    for batches, name in (
        (
            [(torch.zeros(3, 2), torch.zeros(3), torch.zeros(3))],
            "0",
        ),
        ([{"x": torch.zeros(3, 2)}], "0"),
        (torch.utils.data.TensorDataset(torch.zeros(3, 2), torch.zeros(3)), "0"),
    ):
        with pytest.raises(MetricError) as caught:
            recall_metric(batches, (1,)).cost(nn.Identity(), "test")
        assert_named(caught, name)
    x[3] = np.nan
    assert_refused(
        lambda: recall_metric(in_batches(x, y), (1,)).cost(nn.Identity(), "test"), MetricError, "NaN", "40", "3"
    )


def test_calculator_agrees_with_the_function_and_with_its_base() -> None:
    x, y = clusters(300)
    y[:5] = np.arange(500, 505)  # single members
    calculator = RecallCalculator(ks=(1, 10, 100, 1000), device=torch.device("cpu"))
    names = ["recall_at_1", "recall_at_10", "recall_at_100", "recall_at_1000"]
    assert sorted(calculator.get_curr_metrics()) == names
    values = calculator.get_accuracy(torch.from_numpy(x), torch.from_numpy(y))
    assert sorted(values) == names
    expected = recall_at_k(x, y, (1, 10, 100, 1000)).at
    assert values == {f"recall_at_{k}": value for k, value in expected.items()}

    own = ("precision_at_1", "mean_average_precision_at_r")
    base = AccuracyCalculator(include=own, k=100, device=torch.device("cpu"))
    for gallery in ((), (x, y, True), (x[100:], y[100:], False)):
        queries = (x[:100], y[:100]) if gallery else (x, y)
        theirs = base.get_accuracy(*queries, *gallery)
        both = RecallCalculator(("recall_at_1", *own), ks=(1, 2), k=100, device=torch.device("cpu"))
        found = both.get_accuracy(*queries, *gallery)
        assert found["recall_at_1"] == pytest.approx(theirs["precision_at_1"])
        assert {name: found[name] for name in own} == theirs
        assert sorted(both.get_curr_metrics()) == sorted(found) == sorted(("recall_at_1", *own))


def test_calculator_passes_its_options_on() -> None:
    x, y = clusters(300)
    calculator = RecallCalculator(("recall_at_3", "precision_at_1"), ks=(1, 3), distance="ip", k=5)
    values = calculator.get_accuracy(x, y)
    assert values["recall_at_3"] == recall_at_k(x, y, (3,), distance="ip").at[3]
    inner = AccuracyCalculator(("precision_at_1",), k=5, knn_func=FaissKNN(index_init_fn=faiss.IndexFlatIP))
    assert values["precision_at_1"] == inner.get_accuracy(x, y)["precision_at_1"]
    assert list(RecallCalculator(ks=(1, 3)).get_accuracy(x, y, include=("recall_at_3",))) == ["recall_at_3"]
    assert list(RecallCalculator(exclude=("recall_at_3",), ks=(1, 3)).get_accuracy(x, y)) == ["recall_at_1"]
    assert list(RecallCalculator(("precision_at_1",), ks=(1,), k=5).get_accuracy(x, y)) == ["precision_at_1"]


def test_cosine_is_pytorch_metric_learning_s() -> None:
    x, y = clusters(300)
    x *= np.exp(np.random.default_rng(1).standard_normal((300, 1))).astype(np.float32)
    gallery = x[100:], y[100:]
    for knn in (CustomKNN(CosineSimilarity()), None):  # of the embeddings as they are, and its default, scaled before
        scaled = x if knn else normalize(torch.from_numpy(x))
        own = ("precision_at_1", "mean_average_precision_at_r")
        base = AccuracyCalculator(own, k=200, knn_func=knn, device=torch.device("cpu"))
        theirs = base.get_accuracy(scaled[:100], y[:100], scaled[100:], y[100:])
        calculator = RecallCalculator(("recall_at_1", *own), ks=(1,), distance="cosine", k=200)
        found = calculator.get_accuracy(x[:100], y[:100], *gallery)
        assert found.pop("recall_at_1") == pytest.approx(theirs["precision_at_1"])
        assert found == pytest.approx(theirs)
    assert theirs["precision_at_1"] != recall_at_k(x[:100], y[:100], (1,), gallery=gallery).at[1]


class Pairs(torch.utils.data.Dataset[Any]):
    """Two views of each of 40 examples in 8 classes."""

    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(0)
        self.y = torch.arange(40) % 8
        self.views = [torch.eye(8)[self.y] + 0.3 * torch.randn(40, 8, generator=draw) for _ in range(2)]

    def __len__(self) -> int:
        return 40

    def __getitem__(self, i: int) -> Any:
        return self.views[0][i], self.views[1][i], self.y[i]


def test_under_a_tester_of_two_streams() -> None:
    found = []
    for calculator in (AccuracyCalculator(("precision_at_1",), k=1), RecallCalculator(ks=(1,))):
        tester = testers.GlobalTwoStreamEmbeddingSpaceTester(accuracy_calculator=calculator, dataloader_num_workers=0)
        values = tester.test({"val": Pairs()}, 0, nn.Identity())["val"]
        found.append(next(value for name, value in values.items() if "at_1" in name))
    assert found == [pytest.approx(0.8), pytest.approx(0.8)]


def test_own_metrics_tell_large_labels_apart() -> None:
    x, y = clusters(300)
    calculator = RecallCalculator(("precision_at_1", "r_precision"), k="max_bin_count", device=torch.device("cpu"))
    for gallery in ((), (x[100:], y[100:])):
        large = (gallery[0], gallery[1] + BIG) if gallery else ()
        expected = calculator.get_accuracy(x[:100], y[:100], *gallery)
        assert calculator.get_accuracy(x[:100], y[:100] + BIG, *large) == expected
        assert calculator.get_accuracy(x[:100], y[:100, None], *gallery) == expected


def test_calculator_refuses() -> None:
    assert_refused(lambda: RecallCalculator().get_accuracy(X, Y, reference_labels=Y), DataError, "reference_labels")
    assert_refused(lambda: RecallCalculator().get_accuracy(X, Y, X), DataError, "reference", "reference_labels")
    assert_refused(lambda: RecallCalculator(ks=(0,)), DataError, "1", "0")
    assert_refused(lambda: RecallCalculator(("recall_at_5",), ks=(7,)), ValueError, "recall_at_7")
    assert_refused(lambda: RecallCalculator().get_accuracy(NAN, Y), DataError, "NaN", "2", "20")
    assert_refused(lambda: RecallCalculator().get_accuracy(X, Y, X[::-1], Y[::-1], True), DataError, "queries")


def test_primary_metric_of_testers_and_hooks(tmp_path: Path, records: Any) -> None:
    x, y = clusters(120, classes=6)
    y += BIG  # neighbouring labels are the same float32
    data = list(zip(torch.from_numpy(x), y.tolist(), strict=True))
    trunk = nn.Linear(8, 4)
    hooks = HookContainer(records, primary_metric="recall_at_10", validation_split_name="val", log_freq=10**9)
    calculator = RecallCalculator(ks=(1, 10), device=torch.device("cpu"))
    tester = testers.GlobalEmbeddingSpaceTester(
        end_of_testing_hook=hooks.end_of_testing_hook,
        accuracy_calculator=calculator,
        dataloader_num_workers=0,
        data_device=torch.device("cpu"),
    )
    seen: list[dict[str, Any]] = []
    evaluate = hooks.end_of_epoch_hook(tester, {"val": data}, str(tmp_path))

    def end_of_epoch(trainer: Any) -> Any:
        go_on = evaluate(trainer)
        embeddings = nn.functional.normalize(trunk(torch.from_numpy(x)))
        expected = recall_at_k(embeddings, y, (1, 10)).at
        assert tester.all_accuracies["val"]["recall_at_1_level0"] == expected[1]
        assert hooks.get_curr_primary_metric(tester, "val") == expected[10]
        seen.append(expected)
        return go_on

    trainers.MetricLossOnly(
        models={"trunk": trunk},
        optimizers={"trunk_optimizer": torch.optim.SGD(trunk.parameters(), lr=0.3)},
        batch_size=60,
        loss_funcs={"metric_loss": losses.ContrastiveLoss()},
        dataset=data,
        data_device=torch.device("cpu"),
        dataloader_num_workers=0,
        end_of_epoch_hook=end_of_epoch,
    ).train(num_epochs=3)
    best = max(range(3), key=lambda epoch: seen[epoch][10])
    assert hooks.get_best_epoch_and_accuracy(tester, "val") == (best + 1, seen[best][10])
    assert (tmp_path / f"trunk_best{best + 1}.pth").is_file()

    # A gallery of several splits: the tester puts the queries first.
    other = list(zip(torch.from_numpy(x + 1), y.tolist(), strict=True))
    tester.end_of_testing_hook = None
    splits = [("val", ["other", "val"])]
    found = tester.test({"val": data, "other": other}, 1, trunk, splits_to_eval=splits)["val"]["recall_at_1_level0"]
    both = torch.from_numpy(np.concatenate([x, x + 1]))
    embeddings = nn.functional.normalize(trunk(both)).detach().numpy()
    items = (embeddings, np.concatenate([y, y]))
    expected = recall_at_k(embeddings[:120], y, (1,), gallery=items, gallery_starts_with_queries=True).at
    assert found == pytest.approx(expected[1], abs=1e-12)


@pytest.mark.parametrize(
    ("missing", "module", "names"),
    [
        ("faiss", "neighbours", ("pip install 'faiss-cpu",)),
        *[
            ("pytorch_metric_learning", module, ("pip install 'pytorch-metric-learning<3",))
            for module in ("accuracy", "task")
        ],
    ],
)
def test_says_what_to_install(
    missing: str, module: str, names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in {missing, *(name for name in sys.modules if name.startswith(f"{missing}."))}:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, f"metricopt_ext.retrieval.{module}", raising=False)
    assert_refused(lambda: importlib.import_module(f"metricopt_ext.retrieval.{module}"), ImportError, *names)


@pytest.mark.parametrize("module", [recall, accuracy])
def test_examples(module: Any) -> None:
    failed, attempted = doctest.testmod(module)
    assert attempted > 0
    assert failed == 0
