"""A metric's verdict, and what several tell together."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from metricopt_ext.tasks.evaluation import Evaluation, noise_of, stacked_pairs
from metricopt_ext.tasks.metric import Metric


@pytest.mark.parametrize("pairs", [[(0.5, 1.0), (0.25, 0.75)], torch.tensor([[0.5, 1.0], [0.25, 0.75]]).numpy()])
def test_several_pairs_of_halves_are_one_query_and_the_first_counts_where_one_is_meant(pairs: Any) -> None:
    metric = Metric(lambda: (0.75, pairs), maximize=True)
    found = metric.evaluate(nn.Identity(), "x")
    assert found == Evaluation(0.25, (0.5, 0.0), pairs=((0.5, 0.0), (0.75, 0.25)))
    assert metric.ledger.spent == 1
    assert found.without_halves() == Evaluation(0.25)
    one = Metric(lambda: (0.75, pairs[:1]), maximize=True).evaluate(nn.Identity(), "x")
    assert one == Evaluation(0.25, (0.5, 0.0))
    stacked = stacked_pairs([found, found])
    assert stacked is not None
    assert stacked.tolist() == [[[0.5, 0.0], [0.75, 0.25]]] * 2
    assert stacked_pairs([found, Evaluation(0.5)]) is None
    alone = stacked_pairs([one])
    assert alone is not None
    assert alone.tolist() == [[[0.5, 0.0]]]


def test_noise_is_pooled_over_evaluations() -> None:
    evaluations = [Evaluation(0.5, None, 0.3), Evaluation(0.1, None, 0.4), Evaluation(0.2)]
    assert noise_of(evaluations) == pytest.approx(math.sqrt((0.09 + 0.16) / 2))
    assert noise_of(evaluations[2:]) == noise_of([]) == 0.0
