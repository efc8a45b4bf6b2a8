"""What is told of a search's queries."""

import torch

from metricopt_ext.search.visited import Visited
from metricopt_ext.tasks.metric import Evaluation
from metricopt_ext.value.gp import GPLearner, Spectrum


def test_a_metric_of_few_values_reacts_by_its_share() -> None:
    visited = Visited(torch.zeros(1), GPLearner(1.0, Spectrum.flat(1)))
    for at in range(6):
        visited.add(torch.full((1,), float(at)), Evaluation(0.5))
    assert not visited.varies()
    assert not visited.reacts()
    visited.add(torch.ones(1), Evaluation(0.4))
    assert visited.varies()
    assert not visited.reacts()  # 1 of 7
    visited.add(torch.ones(1), Evaluation(0.6))
    assert visited.reacts()  # 2 of 8


# --- The region --------------------------------------------------------------------------------------------------
