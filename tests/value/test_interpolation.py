"""Interpolation in time: against scikit-learn, against naive loops, and on data whose answer is known."""

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel

from metricopt_ext.tasks.trajectories import Trajectory
from metricopt_ext.value.interpolation import GaussianProcess, GaussianProcessLabels


def reference(process: GaussianProcess, trajectory: Trajectory) -> GaussianProcessRegressor:
    smooth, *level = getattr(process.kernel, "kernels", [process.kernel])
    kernel = ConstantKernel(smooth.outputscale.item()) * RBF(smooth.base_kernel.lengthscale.item())
    if level:
        kernel = kernel + ConstantKernel(level[0].constant.item())
    targets = (trajectory.cost.numpy() - process.mean) / process.std
    times = trajectory.observed.double()[:, None] / (len(trajectory.phi) - 1)
    return GaussianProcessRegressor(kernel, alpha=process.likelihood.noise.item(), optimizer=None).fit(times, targets)


# --- Against scikit-learn --------------------------------------------------------------------------------------


@pytest.mark.parametrize("levels", [False, True])
def test_posterior_and_likelihood_are_sklearns(mixed: Callable[..., list[Trajectory]], levels: bool) -> None:
    trajectories = mixed()
    process = GaussianProcess(trajectories, levels=levels)
    posteriors, likelihoods = process.posterior(trajectories), []
    assert len(posteriors) == len(trajectories)
    for trajectory, (mean, std) in zip(trajectories, posteriors, strict=True):
        steps = len(trajectory.phi) - 1
        gp = reference(process, trajectory)
        expected, spread = gp.predict((np.arange(steps + 1) / steps)[:, None], return_std=True)
        assert mean.dtype == std.dtype == torch.float64
        assert not mean.requires_grad
        np.testing.assert_allclose(mean, process.mean + process.std * expected, rtol=1e-9, atol=1e-9 * process.std)
        np.testing.assert_allclose(std, process.std * spread, rtol=1e-6, atol=1e-8 * process.std)
        likelihoods.append(gp.log_marginal_likelihood_value_)
    points = sum(len(t.cost) for t in trajectories)
    assert process.log_likelihood == pytest.approx(sum(likelihoods) / points, rel=1e-9)


# --- Fitting -----------------------------------------------------------------------------------------------------


@pytest.mark.outcome
@pytest.mark.parametrize("level", [0.0, 1.0, 30.0])
def test_fit_recovers_hyper_parameters(sampled: Callable[..., list[Trajectory]], level: float) -> None:
    data = sampled(300, 8, length_scale=0.15, noise=0.1, level=level)
    process = GaussianProcess(data)
    smooth, constant = process.kernel.kernels
    assert smooth.base_kernel.lengthscale.item() == pytest.approx(0.15, rel=0.1)  # 0.148 ± 0.002
    assert process.noise_std == pytest.approx(0.1, rel=0.2)  # 0.097 ± 0.003
    assert process.std**2 * smooth.outputscale.item() == pytest.approx(1, rel=0.2)  # 0.97 ± 0.04
    # 0.14 ± 0.12, 1.02 ± 0.03 and 30.0 ± 1.0
    found = process.std * math.sqrt(constant.constant.item())
    assert found == pytest.approx(level, rel=0.15, abs=0 if level else 0.6)


@pytest.mark.parametrize(("evals", "length_scale", "level"), [(6, 0.4, 1.0), (10, 0.06, 0.0)])
def test_no_grid_point_is_more_likely(
    sampled: Callable[..., list[Trajectory]], evals: int, length_scale: float, level: float
) -> None:
    data = sampled(12, evals, length_scale=length_scale, noise=0.02, level=level)
    process = GaussianProcess(data)
    times = torch.stack([t.observed.double() / (len(t.phi) - 1) for t in data])
    squares = (times[:, :, None] - times[:, None]).square()
    targets = (torch.stack([t.cost for t in data]) - process.mean) / process.std
    grid = itertools.product((0.02, 0.06, 0.2, 0.6, 2.0), (0.1, 1.0, 10.0), (1e-3, 1e-2, 0.1, 1.0), (1e-3, 1.0, 30.0))
    for length, scale, noise, constant in grid:
        covariance = scale * torch.exp(-squares / (2 * length**2)) + constant + noise * torch.eye(evals).double()
        other = torch.distributions.MultivariateNormal(torch.zeros(evals).double(), covariance).log_prob(targets)
        assert float(other.mean()) / evals <= process.log_likelihood + 1e-6


# --- Awkward trajectories ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("others", [[], [0.7] * 3])
def test_constant_trajectories_only(along: Callable[..., Trajectory], others: list[float]) -> None:
    data = [along(9, [0, 4, 9], [0.25] * 3, index=i) for i in range(3)]
    data += [along(9, [0, 2, 5, 9], [cost] * 4, index=9) for cost in others]
    process = GaussianProcess(data)
    for trajectory, (mean, std) in zip(data, process.posterior(data), strict=True):
        assert torch.equal(mean, trajectory.cost[:1].expand(10))
        assert not std.any()
    labels = GaussianProcessLabels()(data)
    assert (labels.sigma > 0).all()


@pytest.mark.parametrize("gap", [1e-15, 1e-12, 1e-6])
def test_nearly_constant_trajectories(along: Callable[..., Trajectory], gap: float) -> None:
    data = [along(20, [0, 7, 8, 20], [0.5, 0.5, 0.5 + i * gap, 0.5], index=i) for i in range(5)]
    data.append(along(20, [0, 19, 20], [0.9, 0.9, 0.9 - gap], index=5))
    labels = GaussianProcessLabels()(data)
    assert labels.cost.isfinite().all()
    assert (labels.sigma > 1e-6).all()  # in proportion to the costs, not to their rounding
    assert ((labels.cost - torch.tensor([0.5] * 5 + [0.9])[labels.trajectory]).abs() < 100 * gap + 1e-3).all()
