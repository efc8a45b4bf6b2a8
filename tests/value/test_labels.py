"""Labels at all steps: where they come from and how sure they are."""

from collections.abc import Callable
from dataclasses import replace

import torch

from metricopt_ext.tasks.trajectories import Trajectory
from metricopt_ext.value.interpolation import GaussianProcess, GaussianProcessLabels
from metricopt_ext.value.observations import Observations


def assert_dense(labels: Observations, data: list[Trajectory]) -> None:
    """Check everything but label and sigma."""
    first = 0
    for number, t in enumerate(data):
        rows = slice(first, first + len(t.phi))
        first += len(t.phi)
        assert torch.equal(labels.phi[rows], t.phi)
        assert (labels.trajectory[rows] == number).all()
        assert (labels.round[rows] == t.round).all()
        torch.testing.assert_close(labels.progress[rows], torch.linspace(0, 1, len(t.phi)))
        assert labels.observed[rows].nonzero().squeeze(1).tolist() == t.observed.tolist()
    assert len(labels.phi) == len(labels.cost) == len(labels.sigma) == len(labels.observed) == first
    assert labels.sigma.dtype == labels.phi.dtype == torch.float32
    assert labels.cost.dtype == torch.float64
    asked, sparse = labels.observed, Observations.of(data)
    for name in ("phi", "cost", "trajectory", "round", "progress"):
        assert torch.equal(getattr(labels, name)[asked], getattr(sparse, name))


def test_gaussian_process_labels(mixed: Callable[..., list[Trajectory]]) -> None:
    data = [replace(t, round=t.index // 3) for t in mixed()]
    process = GaussianProcess(data)
    labels = GaussianProcessLabels()(data)
    assert_dense(labels, data)
    posteriors = process.posterior(data)
    means, stds = (torch.cat([p[i] for p in posteriors]) for i in (0, 1))
    dense = ~labels.observed
    torch.testing.assert_close(labels.cost[dense], means[dense])
    torch.testing.assert_close(labels.sigma[dense], (stds**2 + process.noise_std**2).sqrt()[dense].float())
    torch.testing.assert_close(
        labels.sigma[labels.observed], torch.full((int(labels.observed.sum()),), process.noise_std)
    )
    assert labels.sigma[dense].min() >= labels.sigma[labels.observed].max()


def test_labels_as_printed(sampled: Callable[..., list[Trajectory]], along: Callable[..., Trajectory]) -> None:
    """RBF alone, sigma without the noise: the posterior's at every step, above 0 where nothing varies too."""
    data = [
        *sampled(4, 5, length_scale=0.3, noise=0.05, level=1.0),
        along(40, [0, 5, 10, 20, 40], [0.4, 0.4, 0.4, 0.4, 0.4], index=9),
    ]
    process = GaussianProcess(data, levels=False)
    labels = GaussianProcessLabels(levels=False, noisy=False)(data)
    assert_dense(labels, data)
    posteriors = process.posterior(data)
    means, stds = (torch.cat([p[i] for p in posteriors]) for i in (0, 1))
    torch.testing.assert_close(labels.cost[~labels.observed], means[~labels.observed])
    least = 0.01 * process.std
    torch.testing.assert_close(labels.sigma, stds.clamp(min=least).float())
    torch.testing.assert_close(labels.sigma[-41:], torch.full((41,), least))
