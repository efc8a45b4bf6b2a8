"""Embeddings that search each other, mixed with their neighbours: each query as if it were new, one after the other."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from helpers.refusals import assert_refused

pytest.importorskip("faiss")

from metricopt_ext.data.halves import class_draws
from metricopt_ext.errors import DataError
from metricopt_ext.retrieval import left_out, post_processing
from metricopt_ext.retrieval.left_out import LeftOut, ahead_of_first
from metricopt_ext.retrieval.post_processing import augmented
from metricopt_ext.retrieval.recall import recall_at_k, recalls_left_out, recalls_on_halves
from metricopt_ext.utils.seeding import generator

KS = (1, 2, 4)


def clusters(n: int = 36, d: int = 6, classes: int = 9) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(3)
    y = torch.arange(n) % classes
    x = torch.randn(classes, d, generator=rng, dtype=torch.float64)[y]
    return x + 0.8 * torch.randn(n, d, generator=rng, dtype=torch.float64), y


def one_by_one(x: Tensor, k: int, distance: str) -> list[tuple[Tensor, Tensor]]:
    """For each query, the others from the nearest on, and their distances: of a gallery that never had the query."""
    found = []
    for i in range(len(x)):
        others = torch.tensor([j for j in range(len(x)) if j != i])
        gallery, query = normalize(augmented(x[others], k)), x[i : i + 1]
        if distance == "cosine":
            query = normalize(query)
        far = -(gallery @ query[0]) if distance == "ip" else (gallery - query).square().sum(1)
        order = far.argsort(stable=True)
        found.append((others[order], far[order]))
    return found


@pytest.mark.parametrize("distance", ["l2", "ip", "cosine"])
@pytest.mark.parametrize("k", [3, 4, 34, 35, 80])
def test_each_query_is_new(k: int, distance: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    x, _ = clusters()
    monkeypatch.setattr(left_out, "DISTANCES", 10 * len(x))  # 10 queries at a time
    expected = one_by_one(x, k, distance)
    rows = np.arange(3, 36)
    parts = list(LeftOut(x, k, distance).keys(rows))
    assert [part.stop - part.start for part, _ in parts] == [10, 10, 10, 3]
    keys = np.concatenate([each for _, each in parts])
    for i, key in zip(rows, keys, strict=True):
        assert key[i] == math.inf
        assert np.argsort(key, kind="stable")[:-1].tolist() == expected[i][0].tolist()


def test_that_a_gallery_knows_its_queries_would_help_them() -> None:
    x, _ = clusters(120, classes=30)
    whole = normalize(augmented(x, 4))
    # The mean similarity of a query to what it was mixed into is higher, as it is in it.
    keys = np.concatenate([each for _, each in LeftOut(x, 4, "cosine").keys(np.arange(120))])
    known = -(normalize(x) @ whole.T).numpy()
    reached = np.isfinite(keys) & (np.abs(known - keys) > 1e-12)
    assert reached.sum() == 4 * 120
    assert (known[reached] < keys[reached]).mean() > 0.9


@pytest.mark.parametrize("subset", [None, 20])
def test_recalls_are_of_the_queries_and_halves_of_what_is_in_them(subset: int | None) -> None:
    x, y = clusters()
    y = torch.where(torch.arange(36) == 7, 77, y)  # without a match
    draws = class_draws(y, 0)
    assert not isinstance(draws, str)
    told = recalls_left_out(x, y, KS, draws, 4, "l2", subset, 5)
    rows = [i for i in range(36) if i != 7]
    if subset:
        # The same queries as those of the plain recall with the seed: those that it can be told by.
        chosen = torch.randperm(35, generator=generator(5, "recall queries"))[:subset]
        rows = sorted(rows[i] for i in chosen.tolist())
    expected = one_by_one(x, 4, "l2")

    def mean(members: set[int]) -> float:
        own = [i for i in rows if i in members]
        places = []
        for i in own:
            near = [j for j in expected[i][0].tolist() if j in members]
            places.append([bool(y[j] == y[i]) for j in near].index(True))
        return float(np.mean([np.mean([place < k for place in places]) for k in KS]))

    assert told == pytest.approx(mean(set(range(36))), abs=1e-12)
    assert told.halves is not None
    assert len(told.halves) == len(draws)
    for halves, pair in zip(draws, told.halves, strict=True):
        assert pair == pytest.approx([mean(set(half.tolist())) for half in halves], abs=1e-12)
    assert 0.2 < told < 0.98


def test_with_weights_of_0_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(post_processing, "POWER", 200.0)
    x, y = clusters()
    x = normalize(x)
    draws = class_draws(y, 0)
    assert not isinstance(draws, str)
    told = recalls_left_out(x, y, KS, draws, 4, "l2")
    value, pairs = recalls_on_halves(x, y, KS, draws)
    assert told == pytest.approx(value, abs=1e-12)
    np.testing.assert_allclose(np.array(told.halves), np.array(pairs), rtol=0, atol=1e-12)
    assert value == recall_at_k(x, y, KS).mean


def test_of_equal_keys_the_first_comes_first() -> None:
    keys = np.array([[1.0, 0.0, 1.0, 1.0, 2.0]])
    matches = np.array([[False, False, True, True, True]])
    assert ahead_of_first(keys, matches).tolist() == [[True, True, False, False, False]]


def test_no_halves_are_said_why_and_zeros_are_refused() -> None:
    x, y = clusters()
    assert recalls_left_out(x, y, KS, "why", 4, "l2").halves == "why"
    assert recalls_left_out(x, y, KS, [], 4, "l2").halves is None
    x[3] = 0
    assert_refused(lambda: recalls_left_out(x, y, KS, [], 4, "l2"), DataError, "0")
