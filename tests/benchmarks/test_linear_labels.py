"""Linear labels: those in between, and constant ones outside."""

import torch

from helpers.evaluations import told
from helpers.tensors import rand32
from linear_labels import LinearLabels
from metricopt_ext.tasks.trajectories import Trajectory


def test_linear_labels() -> None:
    observed, costs = torch.tensor([2, 4, 8]), torch.tensor([0.1, 0.3, 0.1], dtype=torch.float64)
    labels = LinearLabels()([Trajectory(0, 0, rand32(11, 3), torch.zeros(10), observed, told(costs))])
    expected = torch.tensor([0.1, 0.1, 0.1, 0.2, 0.3, 0.25, 0.2, 0.15, 0.1, 0.1, 0.1], dtype=torch.float64)
    torch.testing.assert_close(labels.cost, expected)
    assert labels.observed.nonzero()[:, 0].tolist() == observed.tolist()
    assert (labels.sigma == 1).all()
