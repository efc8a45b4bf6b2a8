"""Metrics whose embeddings come in batches, beside those of all at once."""

import json
from typing import Any

import numpy as np
import pytest
import torch

from helpers.refusals import assert_refused, having

pytest.importorskip("faiss")

from metricopt_ext.errors import DataError
from metricopt_ext.retrieval.accumulated import RankingMetrics
from metricopt_ext.retrieval.ranking import AT_K, OF_PLACES, ranking_metrics

NAMES, KS = [*AT_K, *OF_PLACES], (1, 4)


def drawn(n: int, seed: int) -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(n, 3)), rng.integers(6, size=n), rng.integers(3, size=n)


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("across", [False, True])
def test_batches_are_judged_as_one(separate: bool, across: bool) -> None:
    metric = RankingMetrics(NAMES, KS, distance="cosine")
    for seed in (0, 1):  # two epochs
        metric.reset()
        x, y, seen = drawn(50, seed)
        items, labels, theirs = drawn(40, seed + 10)
        for part in (slice(0, 30), slice(30, 50)):
            metric.update(torch.from_numpy(x[part]), y[part], cameras=seen[part] if across else None)
            if separate:
                cameras = torch.from_numpy(theirs[part]) if across else None
                metric.update(items[part], torch.from_numpy(labels[part]), cameras=cameras, gallery=True)
        gallery = (items, labels) if separate else None
        cameras = (seen, theirs if separate else seen) if across else None
        expected = ranking_metrics(x, y, NAMES, KS, gallery=gallery, cameras=cameras, distance="cosine")
        assert metric.compute() == expected.values
        assert metric.ranking == expected


def test_rows_that_come_again_count_once_and_tell_the_order() -> None:
    x, y, _ = drawn(30, 0)
    x[7] = x[20]  # at one distance of all others
    metric, order = RankingMetrics(NAMES, KS), np.random.default_rng(1).permutation(30)
    for rows in (order[:10], order[10:], order[:6]):  # the last are there to fill a batch
        metric.update(x[rows], y[rows], rows=rows)
    assert metric.compute() == ranking_metrics(x, y, NAMES, KS).values


def test_what_does_not_fit_is_refused() -> None:
    x, y, seen = drawn(30, 0)
    metric = RankingMetrics(["recall"], (1,))
    assert_refused(metric.compute, DataError, "queries")
    assert_refused(lambda: metric.update(x, y[1:]), DataError, "(30, 3)", "29")
    metric.update(x, y, cameras=seen)
    metric.update(x, y, gallery=True)
    assert_refused(metric.compute, DataError, "cameras", "gallery")
    metric.update(x, y)
    assert_refused(metric.compute, DataError, "cameras", "queries")
    metric.reset()
    metric.update(x, y)
    metric.update(x[:, :2], y)
    assert_refused(metric.compute, DataError, "queries", "2", "3")
    assert_refused(lambda: RankingMetrics(["map"]), DataError, "map")


# Each of two processes has its share of a data set of an odd size, as a DistributedSampler deals it.
SHARES = """
import json
import numpy as np
from metricopt_ext.retrieval.accumulated import RankingMetrics
from torch import distributed

distributed.init_process_group("gloo")
rng = np.random.default_rng(0)
x, y = rng.normal(size=(31, 3)), rng.integers(6, size=31)
rows = (np.arange(16) * 2 + distributed.get_rank()) % 31
metric = RankingMetrics(["recall", "ndcg"], (1, 4))
metric.update(x[rows], y[rows], rows=rows)
print(json.dumps(metric.compute()))
distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_processes_judge_their_shares_together(forked: Any) -> None:
    x, y, _ = drawn(31, 0)
    printed = [json.loads(line) for line in forked(SHARES, 2).splitlines() if line.startswith("{")]
    assert printed == 2 * [ranking_metrics(x, y, ["recall", "ndcg"], (1, 4)).values]


def test_a_buffer_may_be_filled_again() -> None:
    """What was given is kept, not what became of it."""
    x, y, _ = drawn(30, 0)
    metric = RankingMetrics(NAMES, KS)
    buffer, numbers, tensor = np.empty((10, 3)), np.empty(10, dtype=np.int64), torch.empty(10, 3, dtype=torch.float64)
    for start in (0, 10, 20):
        part = slice(start, start + 10)
        buffer[:], numbers[:] = x[part], y[part]
        tensor.copy_(torch.from_numpy(x[part]))
        metric.update(tensor if start else buffer, numbers)
    assert metric.compute() == ranking_metrics(x, y, NAMES, KS).values


def test_arrays_of_another_byte_order_and_reversed_ones_are_read() -> None:
    x, y, _ = drawn(30, 0)
    metric = RankingMetrics(NAMES, KS)
    metric.update(x[::-1].astype(">f8"), y[::-1].astype(">i4"))
    metric.update(x[::-1], y[::-1], gallery=True)
    with pytest.warns(UserWarning, match=having("30", "queries", "gallery")):
        assert metric.compute()["recall_at_1"] == 1
