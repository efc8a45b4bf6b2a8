"""Labels by linear interpolation, an ablation of `Recipe` and `Algorithm1`."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from metricopt_ext.tasks.trajectories import Trajectory
from metricopt_ext.value.observations import Observations


@dataclass(frozen=True)
class LinearLabels:
    """Labels all steps by linear interpolation in time, all equally certain: what the paper argues against."""

    def __call__(self, trajectories: Sequence[Trajectory]) -> Observations:
        """Return labels at all steps; before the first and after the last observation they are constant."""
        parts = []
        for t in trajectories:
            steps = torch.arange(len(t.phi))
            cost = torch.from_numpy(np.interp(steps.numpy(), t.observed.numpy(), t.cost.numpy()))
            parts.append(Observations.along(t, steps, cost, torch.ones(len(steps))))
        return Observations.joined(parts)
