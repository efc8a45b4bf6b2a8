"""Labels for the steps between metric queries: Gaussian processes over time (MetricOpt, "Metric interpolation")."""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from metricopt_ext.tasks.trajectories import Trajectory
from metricopt_ext.utils.threads import num_threads
from metricopt_ext.value.observations import Observations

with warnings.catch_warnings():
    warnings.simplefilter("ignore", FutureWarning)  # linear_operator compiles with torch.jit
    import gpytorch


# The marginal likelihood has several maxima, such as a short length scale without noise and a long one with noise.
LENGTH_SCALE_STARTS = (0.05, 0.2, 0.8)

LEAST_NOISE = 1e-4  # variance of an observation, in standardised units


@dataclass(frozen=True)
class GaussianProcessLabels:
    """Labels all steps by a Gaussian process, as the paper does; observed ones keep their cost.

    Attributes:
        levels: Let the kernel be RBF plus a constant, the level of each trajectory; otherwise RBF alone, as printed.
        noisy: Let sigma be that of a further observation, the noise included, and at observed steps the noise;
            otherwise it is that of the metric itself at every step, as printed, but at least that of `LEAST_NOISE`.
    """

    levels: bool = True
    noisy: bool = True

    def __call__(self, trajectories: Sequence[Trajectory]) -> Observations:
        """Return labels at all steps."""
        process = GaussianProcess(trajectories, levels=self.levels)
        parts = []
        for t, (cost, sigma) in zip(trajectories, process.posterior(trajectories), strict=True):
            if self.noisy:
                sigma = (sigma.square() + process.noise_std**2).sqrt()
                sigma[t.observed] = process.noise_std
            else:
                sigma = sigma.clamp(min=process.std * math.sqrt(LEAST_NOISE))
            cost[t.observed] = t.cost
            parts.append(Observations.along(t, torch.arange(len(cost)), cost, sigma))
        return Observations.joined(parts)


class GaussianProcess:
    """The metric along a trajectory as a smooth function of time t = step / T, with one prior for all trajectories.

    The covariance of two points of one trajectory is an RBF kernel plus a constant: each trajectory's unknown level,
    integrated out. With one mean for all, the RBF would have to explain differing levels, and become too long;
    subtracting the mean of a few points would hide its uncertainty. Where levels do not differ, the likelihood puts the
    constant near 0, which leaves the standard RBF process.

    The hyper-parameters maximise the exact marginal likelihood, summed over trajectories (Rasmussen & Williams, Eq.
    5.8): the 5 to 10 points of one trajectory do not determine a length scale; those of all do. Constant trajectories
    are left out, as they would make the others look smoother than they are.

    Args:
        trajectories: At least one.
        levels: Whether the kernel has the constant; without it, it is the paper's, RBF alone.

    Attributes:
        mean: Mean of the observed costs.
        std: Their standard deviation within trajectories, the unit of all that is fitted.
        kernel: The fitted covariance, a gpytorch kernel.
        likelihood: The fitted noise, a gpytorch likelihood.
        noise_std: Standard deviation of an observation, in units of the cost.
        log_likelihood: Of the costs in units of ``std``, the mean over the points.
    """

    @num_threads(1)
    def __init__(self, trajectories: Sequence[Trajectory], *, levels: bool = True) -> None:
        varying = [t for t in trajectories if not _is_constant(t)] or trajectories
        level, self.mean, self.std = _moments(varying)
        fits = [self._fit(varying, length, level if levels else None) for length in LENGTH_SCALE_STARTS]
        self.log_likelihood, self.kernel, self.likelihood = max(fits, key=lambda fit: fit[0])
        self.noise_std = self.std * math.sqrt(self.likelihood.noise.item())

    def _fit(self, trajectories: Sequence[Trajectory], length: float, level: float | None) -> tuple[float, Any, Any]:
        """Climb to a maximum of the likelihood; return the mean of its logarithm over the points, kernel and noise.

        This uses torch's L-BFGS: scipy's L-BFGS-B loses more time to threads that wait for each other.
        """
        # The bounds keep every covariance matrix well conditioned; a length scale of 3 is already a parabola in [0, 1].
        smooth = gpytorch.kernels.RBFKernel(lengthscale_constraint=_LogInterval(0.01, 3.0))
        kernel = gpytorch.kernels.ScaleKernel(smooth, outputscale_constraint=_LogInterval(1e-3, 1e3)).double()
        smooth.lengthscale, kernel.outputscale = length, 1.0
        if level is not None:
            constant = gpytorch.kernels.ConstantKernel(constant_constraint=_LogInterval(1e-6, 1e7)).double()
            constant.constant = torch.tensor(level, dtype=torch.float64)
            kernel = kernel + constant
        likelihood = gpytorch.likelihoods.GaussianLikelihood(noise_constraint=_LogInterval(LEAST_NOISE, 10.0)).double()
        likelihood.noise = 0.1

        counts = [len(t.cost) for t in trajectories]
        alike = [[t for t in trajectories if len(t.cost) == count] for count in sorted(set(counts))]
        models = [_Curves(*self._data(group), kernel, likelihood) for group in alike]
        parameters = [*kernel.parameters(), *likelihood.parameters()]
        optimizer = torch.optim.LBFGS(parameters, max_iter=50, line_search_fn="strong_wolfe")

        def loss() -> Tensor:
            optimizer.zero_grad()
            total: Tensor = -torch.stack([model.log_likelihood() for model in models]).sum() / sum(counts)
            total.backward()
            return total

        optimizer.step(loss)
        return -loss().item(), kernel, likelihood

    @num_threads(1)
    @torch.no_grad()
    def posterior(self, trajectories: Sequence[Trajectory]) -> list[tuple[Tensor, Tensor]]:
        """Return mean and standard deviation of each trajectory's noise-free metric at steps 0 ... T.

        Three or more observations that are all equal are treated as a known constant.

        Returns:
            The mean and std of each trajectory, each ``T + 1``, float64, in units of the cost.
        """
        posteriors = []
        for t in trajectories:
            if _is_constant(t):
                posteriors.append((t.cost[:1].repeat(len(t.phi)), torch.zeros(len(t.phi), dtype=torch.float64)))
                continue
            model = _Curves(*self._data([t]), self.kernel, self.likelihood).eval()
            with gpytorch.settings.debug(False):  # it takes the points themselves for a mistake
                predicted = model(_times(t, torch.arange(len(t.phi)))[None])
            variance = predicted.lazy_covariance_matrix.diagonal(dim1=-2, dim2=-1).clamp(min=0)
            posteriors.append((self.mean + self.std * predicted.mean[0], self.std * variance[0].sqrt()))
        return posteriors

    def _data(self, trajectories: Sequence[Trajectory]) -> tuple[Tensor, Tensor]:
        """Stack times, ``n x K x 1``, and standardised costs, ``n x K``."""
        times = torch.stack([_times(t, t.observed) for t in trajectories])
        return times, (torch.stack([t.cost for t in trajectories]) - self.mean) / self.std


class _Curves(gpytorch.models.ExactGP):  # type: ignore[misc]
    """Independent trajectories with as many points each, of mean 0, under one kernel and one noise."""

    def __init__(self, times: Tensor, targets: Tensor, kernel: Any, likelihood: Any) -> None:
        super().__init__(times, targets, likelihood)
        self.kernel = kernel

    def log_likelihood(self) -> Any:
        """Return the total log marginal likelihood."""
        return self.likelihood(self(*self.train_inputs)).log_prob(self.train_targets).sum()

    def forward(self, times: Tensor) -> gpytorch.distributions.MultivariateNormal:
        return gpytorch.distributions.MultivariateNormal(torch.zeros_like(times[..., 0]), self.kernel(times))


class _LogInterval(gpytorch.constraints.Interval):  # type: ignore[misc]
    """Bounds of a positive number: the raw parameter says by a sigmoid where between them its logarithm is."""

    def transform(self, tensor: Tensor) -> Tensor:
        return torch.lerp(*self._logarithms(), tensor.sigmoid()).exp()

    def inverse_transform(self, transformed_tensor: Tensor) -> Tensor:
        low, high = self._logarithms()
        # Away from the bounds, where no gradient would lead back.
        return ((transformed_tensor.log() - low) / (high - low)).logit(eps=0.01)

    def _logarithms(self) -> tuple[Tensor, Tensor]:
        return self.lower_bound.log(), self.upper_bound.log()


def _moments(trajectories: Sequence[Trajectory]) -> tuple[float, float, float]:
    """Return the variance between levels in units of ``std ** 2``, the mean of all costs, and std within trajectories.

    Where nothing varies within trajectories, std is a small fraction of the spread between them, or 1 if there is none.
    """
    means = torch.stack([t.cost.mean() for t in trajectories])
    counts = torch.tensor([len(t.cost) for t in trajectories]).double()
    away = torch.cat([t.cost - mean for t, mean in zip(trajectories, means, strict=True)])
    between, within = float(means.var(correction=0)), float(away.square().sum() / (counts - 1).sum().clamp(min=1))
    std = max(math.sqrt(within), 1e-3 * math.sqrt(between)) or 1.0
    level = max(between - within * float((1 / counts).mean()), 0.0)
    return level / std**2, float((means * counts).sum() / counts.sum()), std


def _times(trajectory: Trajectory, steps: Tensor) -> Tensor:
    """Return the times of some steps, ``K x 1``."""
    return steps.double()[:, None] / (len(trajectory.phi) - 1)


def _is_constant(trajectory: Trajectory) -> bool:
    """Whether all observations are equal; two equal ones say nothing about what lies between them."""
    return len(trajectory.cost) > 2 and bool(trajectory.cost.min() == trajectory.cost.max())
