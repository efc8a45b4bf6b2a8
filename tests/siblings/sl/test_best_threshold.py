"""The cost at a batch's best threshold, against all thresholds tried one by one."""

import numpy as np
import pytest
import torch
from sklearn.metrics import f1_score
from torch import Tensor

from helpers.refusals import assert_refused
from metricopt_ext.siblings.sl.best_threshold import lowest_cost
from metricopt_ext.siblings.sl.set_loss import UniversalTraining
from metricopt_ext.tasks.batch_metric import BatchMetric


def f1(scores: Tensor, labels: Tensor) -> float:
    return float(f1_score(labels, scores > 0, zero_division=0))


@pytest.mark.parametrize(("size", "tied"), [(100, False), (40, True), (10, False)])
@pytest.mark.parametrize("count", [100, 7])  # no percentile but the first is at a score
def test_it_is_the_lowest_of_percentiles(size: int, tied: bool, count: int) -> None:
    rng = np.random.default_rng(size)
    scores = rng.integers(-3, 4, size).astype(float) if tied else rng.normal(size=size)
    labels = (scores + rng.normal(size=size) > 1).astype(int)
    labels[0] = 1
    at = np.percentile(scores, np.arange(count) * 100 / count)
    expected = min(1 - f1_score(labels, scores >= each, zero_division=0) for each in at)
    metric = BatchMetric(f1, maximize=True)
    found = lowest_cost(metric, torch.from_numpy(scores), torch.from_numpy(labels), count, "test")
    assert found == pytest.approx(expected, abs=1e-12)
    assert metric.ledger.spent_on == {"test": count}


def test_a_single_threshold_which_judges_all_scores_alike_is_refused() -> None:
    metric, scores, labels = BatchMetric(f1, maximize=True), torch.tensor([-1.0, 1.0]), torch.tensor([0, 1])
    assert lowest_cost(metric, scores, labels, 2, "test") < lowest_cost(metric, -scores, labels, 2, "test")
    assert_refused(lambda: lowest_cost(metric, scores, labels, 1, "test"), ValueError, "thresholds", "1", "0", "100")
    assert_refused(lambda: UniversalTraining(thresholds=1), ValueError, "thresholds", "1", "0", "100")
    assert metric.ledger.spent_on == {"test": 4}


def test_without_thresholds_and_for_classes_it_is_one_query_of_the_scores() -> None:
    seen = []
    metric = BatchMetric(lambda scores, labels: seen.append(scores) or 0.25, maximize=False)  # type: ignore[func-returns-value]
    one, several, labels = torch.tensor([0.5, -1.0]), torch.eye(2), torch.tensor([1, 0])
    assert lowest_cost(metric, one, labels, 0, "test") == lowest_cost(metric, several, labels, 100, "test") == 0.25
    assert [each.tolist() for each in seen] == [one.tolist(), several.tolist()]
