"""A value function for few queries: a Gaussian process whose kernel knows which directions of phi move the model."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from metricopt_ext.errors import ValueFunctionError
from metricopt_ext.utils.threads import num_threads
from metricopt_ext.value.value_function import ValueFunction

# The grid on which the marginal likelihood is maximised: the length scale in units of the typical distance of two
# points, and the noise variance in units of the process's own.
LENGTHS = (0.5, 0.7, 1.0, 1.4, 2.0, 2.8, 4.0, 5.6, 8.0)
NOISES = (1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2)
EXPONENTS = (0.0, 0.5, 1.0)

# Priors of both, log-normal: median, and standard deviation of the logarithm. Ten points determine neither.
LENGTH_PRIOR, NOISE_PRIOR = (2.0, 0.7), (0.1, 2.0)

# Directions in which the loss never changes keep this share of the mean eigenvalue: the metric may still react.
LEAST_WEIGHT = 1e-4


class Spectrum(NamedTuple):
    """Which directions of phi move a model: an orthonormal basis and how much the loss reacts along it.

    Attributes:
        weights: At least 0, ``d``; only their ratios matter.
        basis: The directions as columns, ``d x d``.
    """

    weights: Tensor
    basis: Tensor

    @classmethod
    def flat(cls, dim: int, device: torch.device | None = None) -> "Spectrum":
        """Return the spectrum of knowing nothing: all directions alike."""
        ones = torch.ones(dim, dtype=torch.float64, device=device)
        return cls(ones, ones.diag())

    def root(self, exponent: float) -> Tensor:
        """Return R, ``d x d``, with ``R R^T`` the matrix of these directions, weights to a power and of mean 1."""
        weights = (self.weights / self.weights.mean()).clamp(min=LEAST_WEIGHT) ** exponent
        return self.basis * (weights / weights.mean()).sqrt()


class Hyperparameters(NamedTuple):
    """What the marginal likelihood chooses.

    Attributes:
        exponent: How strongly the spectrum shapes the kernel: 0 not at all, 1 as it is.
        length: Length scale in units of the typical distance.
        noise: Noise variance in units of the process's variance.
    """

    exponent: float
    length: float
    noise: float


class GPValueFunction(ValueFunction):
    """The posterior mean of a Gaussian process: constant mean, RBF kernel in coordinates ``phi T``, white noise.

    Costs are standardised internally; all is computed in float64. Amplitude and mean are in closed form given the
    hyper-parameters (Rasmussen & Williams, section 2.7).

    Args:
        dim: Dimension d of phi.
        points: Number n of points that it is fitted to.
    """

    kind = "gp"
    all_directions = True
    transform: Tensor
    points: Tensor
    weights: Tensor
    constant: Tensor
    variance: Tensor
    noise: Tensor
    cost_mean: Tensor
    cost_std: Tensor

    def __init__(self, dim: int, points: int) -> None:
        super().__init__(dim)
        self.arguments: dict[str, int] = {"dim": dim, "points": points}
        self._root: Tensor | None = None
        shapes = {"transform": (dim, dim), "points": (points, dim), "weights": (points,)}
        for name in (*shapes, "constant", "variance", "noise", "cost_mean", "cost_std"):
            self.register_buffer(name, torch.zeros(shapes.get(name, ()), dtype=torch.float64))

    @classmethod
    def conditioned(cls, phi: Tensor, cost: Tensor, transform: Tensor, noise: float) -> "GPValueFunction":
        """Condition a process of given hyper-parameters on points, ``n x d``, and their costs, ``n``.

        Args:
            phi: The points, ``n x d``.
            cost: Their costs, ``n``.
            transform: T, ``d x d``, the length scale included.
            noise: Noise variance in units of the process's variance.
        """
        f = cls(phi.shape[1], len(phi)).to(phi.device)
        f.points, f.transform = phi.double(), transform.double().contiguous()  # as a loaded one is
        f.cost_mean, f.cost_std = cost.double().mean(), _spread(cost)
        f.noise = torch.tensor(noise, dtype=torch.float64, device=phi.device)
        target = (cost.double() - f.cost_mean) / f.cost_std
        ones = torch.ones_like(target)
        solved = torch.cholesky_solve(torch.stack([ones, target], 1), f.root())
        f.constant = (ones @ solved[:, 1]) / (ones @ solved[:, 0])
        f.weights = solved[:, 1] - f.constant * solved[:, 0]
        f.variance = ((target - f.constant) @ f.weights) / len(target)
        return f

    def kernel(self, phi: Tensor) -> Tensor:
        """Return the correlation of the process at phi, ``m x d``, and at the points, ``m x n``."""
        return rbf(phi @ self.transform, self.points @ self.transform)

    def root(self) -> Tensor:
        """Return the Cholesky factor of the points' covariance in units of the variance, ``n x n``."""
        if self._root is None or self._root.device != self.points.device:
            covariance = self.kernel(self.points)
            covariance.diagonal().add_(self.noise)
            self._root = torch.linalg.cholesky(covariance)
        return self._root

    def members(self, phi: Tensor) -> Tensor:
        """Predict the cost at phi, ``... x d``; the only member is the posterior mean, ``... x 1``."""
        mean = self.mean(phi.reshape(-1, self.dim))
        return (self.cost_mean + self.cost_std * mean).view(*phi.shape[:-1], 1)

    def mean(self, phi: Tensor) -> Tensor:
        """Return the posterior mean at phi, ``m x d``, in standardised units, ``m``, float64."""
        return self.constant + self.kernel(phi.double()) @ self.weights

    def std(self, phi: Tensor) -> Tensor:
        """Return the standard deviation of the metric itself, without noise, at phi, ``m x d``, as a cost."""
        cross = torch.linalg.solve_triangular(self.root(), self.kernel(phi.double()).T, upper=False)
        std: Tensor = self.cost_std * (self.variance * (1 - cross.square().sum(0)).clamp(min=0)).sqrt()
        return std

    @property
    def noise_std(self) -> float:
        """Standard deviation of an observation, in units of the cost."""
        return float(self.cost_std * (self.variance * self.noise).sqrt())

    def deviations(self, count: int, generator: torch.Generator, features: int = 512) -> Callable[[Tensor], Tensor]:
        """Draw posterior samples (Wilson et al., 2020: random Fourier features, corrected at the points).

        Args:
            count: Number of samples.
            generator: Source of the draws.
            features: Number of Fourier features of the prior.

        Returns:
            A function of phi, ``m x d``: each sample's deviation from the posterior mean, ``m x count``, in
            standardised units. It is differentiable.
        """

        def randn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64).to(self.points.device)

        frequency = randn(features, self.dim)
        phase = 2 * math.pi * torch.rand(features, generator=generator, dtype=torch.float64).to(self.points.device)
        amplitude = randn(features, count) * (2 * self.variance / features).sqrt()

        def prior(phi: Tensor) -> Tensor:
            return torch.cos((phi @ self.transform) @ frequency.T + phase) @ amplitude

        noise = randn(len(self.points), count) * (self.variance * self.noise).sqrt()
        update = torch.cholesky_solve(prior(self.points) + noise, self.root())
        return lambda phi: prior(phi.double()) - self.kernel(phi.double()) @ update


def rbf(a: Tensor, b: Tensor) -> Tensor:
    """Return ``exp(-|a_i - b_j|^2 / 2)``, ``m x n``, for ``m x d`` and ``n x d``."""
    squares = a.square().sum(1)[:, None] + b.square().sum(1) - 2 * a @ b.T  # unlike cdist, smooth where a_i = b_j
    return torch.exp(-squares.clamp(min=0) / 2)


@dataclass(frozen=True)
class GPLearner:
    """Fits a `GPValueFunction`: hyper-parameters by marginal likelihood on a grid, with weak priors.

    The amplitude and the mean are in closed form, so each length scale takes one eigen-decomposition for all noises.

    Attributes:
        scale: Typical standard deviation of phi's coordinates, which the length scales are relative to.
        spectrum: The directions that the kernel may prefer.
        exponents: Candidates for how strongly.
    """

    scale: float
    spectrum: Spectrum
    exponents: Sequence[float] = EXPONENTS

    @num_threads(1)
    def __call__(
        self, phi: Tensor, cost: Tensor, previous: Hyperparameters | None = None, least_noise: float = 0.0
    ) -> GPValueFunction:
        """Fit to points, ``n x d``, and their costs, ``n``.

        Args:
            phi: The points, ``n x d``.
            cost: Their costs, ``n``.
            previous: Hyper-parameters to keep instead of choosing them.
            least_noise: See `most_likely`.

        Raises:
            ValueFunctionError: All costs are equal.
        """
        if cost.min() == cost.max():
            raise ValueFunctionError(f"all {len(cost)} costs equal {float(cost[0]):.6g}: the metric does not react")
        chosen = previous or self.most_likely(phi, cost, least_noise)
        return GPValueFunction.conditioned(phi, cost, self.transform(chosen), chosen.noise)

    def transform(self, chosen: Hyperparameters) -> Tensor:
        """Return T, ``d x d``: distances in ``phi T`` are in units of the length scale."""
        typical = self.scale * math.sqrt(2 * len(self.spectrum.weights))
        return self.spectrum.root(chosen.exponent) / (chosen.length * typical)

    def most_likely(self, phi: Tensor, cost: Tensor, least_noise: float = 0.0) -> Hyperparameters:
        """Return the grid's hyper-parameters of the highest marginal likelihood times prior.

        Args:
            phi: The points, ``n x d``.
            cost: Their costs, ``n``.
            least_noise: Standard deviation of the noise in a cost, as far as it is known: others are not considered
                below it, unless the grid has none above.
        """
        target = (cost.double() - cost.double().mean()) / _spread(cost)
        scored: list[tuple[bool, float, Hyperparameters]] = []
        for exponent in self.exponents:
            for length in LENGTHS:
                z = phi.double() @ self.transform(Hyperparameters(exponent, length, 0.0))
                values, vectors = torch.linalg.eigh(rbf(z, z))
                values, projected = values.clamp(min=0), vectors.T @ torch.stack([torch.ones_like(target), target], 1)
                for noise in NOISES:
                    score, amplitude = log_likelihood(values + noise, projected)
                    score -= _log_normal(length, *LENGTH_PRIOR) + _log_normal(noise, *NOISE_PRIOR)
                    enough = math.sqrt(amplitude * noise) * float(_spread(cost)) >= least_noise
                    scored.append((enough, score, Hyperparameters(exponent, length, noise)))
        return max(scored, key=lambda each: each[:2])[2]


def log_likelihood(eigenvalues: Tensor, projected: Tensor) -> tuple[float, float]:
    """Return the log marginal likelihood, up to a constant, at the best amplitude and mean, and that amplitude.

    Args:
        eigenvalues: Of the covariance in units of the amplitude, noise included, ``n``.
        projected: A vector of ones and the targets in its eigenvectors' basis, ``n x 2``.
    """
    ones, target = projected.unbind(1)
    mean = (ones * target / eigenvalues).sum() / (ones * ones / eigenvalues).sum()
    amplitude = ((target - mean * ones).square() / eigenvalues).mean()
    return float(-0.5 * (len(target) * amplitude.log() + eigenvalues.log().sum())), float(amplitude)


def _log_normal(value: float, median: float, spread: float) -> float:
    return 0.5 * (math.log(value / median) / spread) ** 2


def _spread(cost: Tensor) -> Tensor:
    return cost.double().std().clamp(min=torch.finfo(torch.float64).tiny)
