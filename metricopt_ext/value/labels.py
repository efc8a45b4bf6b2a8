"""Labels for the steps between metric queries (MetricOpt, "Metric interpolation")."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from metricopt_ext.tasks.trajectories import Trajectory
from metricopt_ext.value.interpolation import BOUNDS, GaussianProcess
from metricopt_ext.value.observations import Observations, common_signature


@dataclass(frozen=True)
class LinearLabels:
    """Labels all steps by linear interpolation in time, all equally certain: what the paper argues against."""

    def __call__(self, trajectories: Sequence[Trajectory]) -> Observations:
        """Return labels at all steps; before the first and after the last observation they are constant."""
        means = [
            torch.from_numpy(np.interp(np.arange(len(t.phi)), t.observed.numpy(), t.cost.numpy())) for t in trajectories
        ]
        return _dense(trajectories, means, [torch.ones(len(mean)) for mean in means], 1.0)


@dataclass(frozen=True)
class GaussianProcessLabels:
    """Labels all steps by a Gaussian process if it recovers left-out observations, otherwise only the observed points.

    Attributes:
        always: Label all steps in any case, as the paper does.
        levels: Let the kernel be RBF plus a constant, the level of each trajectory; otherwise RBF alone, as printed.
        noisy: Let sigma be that of a further observation; otherwise that of the metric itself, as printed.
    """

    always: bool = False
    levels: bool = True
    noisy: bool = True

    def __call__(self, trajectories: Sequence[Trajectory]) -> Observations:
        """Return the labels, of all steps or of the observed ones.

        An interpolated label is as uncertain as another observation at that step would be. An observed one keeps its
        cost, and its uncertainty is the noise. Without ``noisy``, sigma is the posterior's standard deviation at every
        step, observed ones included, but at least that of the least noise in `interpolation.BOUNDS`.
        """
        process = GaussianProcess.fit(trajectories, levels=self.levels)
        if not (self.always or process.leave_one_out(trajectories).skilful):
            return Observations.of(trajectories)
        means, stds = zip(*process.posterior(trajectories), strict=True)
        if not self.noisy:
            least = process.std * BOUNDS["noise"][0] ** 0.5
            return _dense(trajectories, means, [std.clamp(min=least) for std in stds], None)
        sigmas = [(std.square() + process.noise_std**2).sqrt() for std in stds]
        return _dense(trajectories, means, sigmas, process.noise_std)


def _dense(
    trajectories: Sequence[Trajectory],
    costs: Sequence[Tensor],
    sigmas: Sequence[Tensor],
    observed_sigma: float | None,
) -> Observations:
    """Gather all steps, ``T + 1`` labels and sigmas for each trajectory.

    Observed costs replace their labels, and the sigma of observed ones replaces theirs, if one is given.
    """
    counts = torch.tensor([len(t.phi) for t in trajectories])
    first = counts.cumsum(0) - counts
    places = torch.cat([start + t.observed for start, t in zip(first, trajectories, strict=True)])
    observed = torch.zeros(int(counts.sum()), dtype=torch.bool)
    cost, sigma = torch.cat(list(costs)), torch.cat(list(sigmas))
    observed[places] = True
    cost[places] = torch.cat([t.cost for t in trajectories])
    if observed_sigma is not None:
        sigma[places] = observed_sigma
    return Observations(
        phi=torch.cat([t.phi for t in trajectories]).float(),
        cost=cost.double(),
        sigma=sigma.float(),
        trajectory=torch.arange(len(trajectories)).repeat_interleave(counts),
        round=torch.tensor([t.round for t in trajectories]).repeat_interleave(counts),
        progress=torch.cat([torch.arange(len(t.phi)) / (len(t.phi) - 1) for t in trajectories]),
        observed=observed,
        signature=common_signature(trajectories),
    )
