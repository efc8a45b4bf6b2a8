"""A value function for few queries: a Gaussian process whose kernel knows which directions of phi move the model."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from metricopt_ext.tasks.combine import Combination
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
        noise: Each outcome's noise variance in units of its process's variance, ``m``.
    """

    exponent: float
    length: float
    noise: tuple[float, ...]


class GPValueFunction(ValueFunction):
    """Gaussian processes of the m outcomes that make a metric, and what their means make together: f.

    All have one kernel, an RBF in coordinates ``phi T``; mean, amplitude and white noise are each outcome's own. Of a
    metric that is a number, that is the only outcome. The outcomes' costs are standardised internally; all is computed
    in float64. Amplitudes and means are in closed form given the hyper-parameters (Rasmussen & Williams, section 2.7).

    Args:
        dim: Dimension d of phi.
        points: Number n of points that it is fitted to.
        outcomes: Number m of outcomes.

    Attributes:
        combination: How the outcomes make the metric; None of one that is the metric.
        explained: Share of the outcomes' variance that their losses' promises explain, in [0, 1]; None without any, and
            of an f from a file.
    """

    kind = "gp"
    all_directions = True
    transform: Tensor
    points: Tensor
    weights: Tensor
    constant: Tensor
    trend: Tensor
    variance: Tensor
    noise: Tensor
    outcome_mean: Tensor
    outcome_std: Tensor
    cost_mean: Tensor
    cost_std: Tensor

    def __init__(self, dim: int, points: int, outcomes: int = 1) -> None:
        super().__init__(dim)
        self.arguments: dict[str, int] = {"dim": dim, "points": points, "outcomes": outcomes}
        self._roots: list[tuple[Tensor, Tensor]] = []
        shapes: dict[str, tuple[int, ...]] = {"transform": (dim, dim), "points": (points, dim), "cost_mean": ()}
        shapes |= {"weights": (outcomes, points), "trend": (outcomes, dim), "cost_std": ()}
        for name in (*shapes, "constant", "variance", "noise", "outcome_mean", "outcome_std"):
            self.register_buffer(name, torch.zeros(shapes.get(name, (outcomes,)), dtype=torch.float64))
        self.explained: float | None = None

    @classmethod
    def conditioned(
        cls,
        phi: Tensor,
        costs: Tensor,
        transform: Tensor,
        noise: float | Sequence[float] | Tensor,
        combination: Combination | None = None,
        trend: Tensor | None = None,
    ) -> "GPValueFunction":
        """Condition processes of given hyper-parameters on points, ``n x d``.

        Args:
            phi: The points, ``n x d``.
            costs: Their outcomes' costs there, ``n x m``; or ``n`` of one outcome.
            transform: T, ``d x d``, the length scale included.
            noise: Noise variance in units of a process's variance; one for all outcomes, or ``m``.
            combination: See the attributes.
            trend: The slope of each outcome's prior mean in phi, ``m x d``; None for constant ones.
        """
        costs = costs.double().view(len(phi), -1)
        f = cls(phi.shape[1], *costs.shape).to(phi.device)
        f.combination = combination
        f.points, f.transform = phi.double(), transform.double().contiguous()  # as a loaded one is
        f.noise.copy_(torch.as_tensor(noise, dtype=torch.float64))
        rest = costs if trend is None else costs - f.points @ trend.T
        f.outcome_mean, f.outcome_std = rest.mean(0), _spread(rest)
        if trend is not None:
            f.trend = trend / f.outcome_std[:, None]
            f.explained = float(1 - _about_mean(rest).square().sum() / _about_mean(costs).square().sum())
        whole = (
            rest[:, 0] if combination is None else combination.cost(costs)
        )  # the only outcome's units are the cost's
        f.cost_mean, f.cost_std = whole.mean(), _spread(whole)
        targets, ones = (rest - f.outcome_mean) / f.outcome_std, torch.ones_like(f.points[:, :1])
        for own, root in f.roots():
            solved = torch.cholesky_solve(torch.cat([ones, targets[:, own]], 1), root)
            f.constant[own] = _dots(ones.expand_as(solved[:, 1:]), solved[:, 1:]) / _dots(ones, solved[:, :1])
            weights = solved[:, 1:] - f.constant[own] * solved[:, :1]
            f.weights[own] = weights.T
            f.variance[own] = _dots(targets[:, own] - f.constant[own], weights) / len(phi)
        return f

    def kernel(self, phi: Tensor) -> Tensor:
        """Return the correlation of the processes at phi, ``k x d``, and at the points, ``k x n``."""
        return rbf(phi @ self.transform, self.points @ self.transform)

    def roots(self) -> list[tuple[Tensor, Tensor]]:
        """Return, for each noise that occurs, which outcomes have it, ``m``, bool, and the Cholesky factor.

        That is of the points' covariance in units of an outcome's variance, ``n x n``.
        """
        if not self._roots or self._roots[0][1].device != self.points.device:
            covariance, one = self.kernel(self.points), torch.eye(len(self.points)).to(self.points)
            noises = self.noise.unique()
            self._roots = [(self.noise == each, torch.linalg.cholesky(covariance + each * one)) for each in noises]
        return self._roots

    def outcomes(self, phi: Tensor) -> Tensor:
        """Return the outcomes' posterior means at phi, ``k x d``, each in its standardised units, ``k x m``."""
        phi = phi.double()
        return self.constant + linear(self.kernel(phi), self.weights) + phi @ self.trend.T

    def combined(self, outcomes: Tensor) -> Tensor:
        """Return the cost, in standardised units, ``...``, of outcomes in theirs, ``... x m``."""
        if self.combination is None:
            return outcomes[..., 0]
        cost = self.combination.cost(self.outcome_mean + self.outcome_std * outcomes)
        return (cost - self.cost_mean) / self.cost_std

    def members(self, phi: Tensor) -> Tensor:
        """Predict the cost at phi, ``... x d``; the only member is what the means make, ``... x 1``."""
        mean = self.mean(phi.reshape(-1, self.dim))
        return (self.cost_mean + self.cost_std * mean).view(*phi.shape[:-1], 1)

    def mean(self, phi: Tensor) -> Tensor:
        """Return the cost at phi, ``k x d``, in standardised units, ``k``, float64."""
        return self.combined(self.outcomes(phi))

    def unknown(self, phi: Tensor) -> Tensor:
        """Return the share of each outcome's prior variance that is left at phi, ``k x d``: ``k x m``."""
        kernel = self.kernel(phi.double()).T
        left = torch.ones(kernel.shape[1], len(self.noise)).to(kernel)
        for own, root in self.roots():
            cross = torch.linalg.solve_triangular(root, kernel, upper=False)
            left = left.where(~own, (1 - cross.square().sum(0)).clamp(min=0)[:, None])
        return left

    def std(self, phi: Tensor) -> Tensor:
        """Return each outcome's standard deviation, without noise, at phi, ``k x d``, as a cost, ``k x m``."""
        return self.outcome_std * (self.variance * self.unknown(phi)).sqrt()

    def noise_std(self, phi: Tensor) -> float:
        """Return the standard deviation of an observation at phi, ``d``, in units of the cost.

        Each outcome counts as much as the cost changes with it there.
        """
        outcomes = self.outcomes(phi[None]).detach().requires_grad_(True)
        with torch.enable_grad():
            (slope,) = torch.autograd.grad(self.combined(outcomes).sum(), outcomes)
        return float(self.cost_std * (slope.square() * self.variance * self.noise).sum().sqrt())

    def outcome_deviations(
        self, count: int, generator: torch.Generator, features: int = 512
    ) -> Callable[[Tensor], Tensor]:
        """Draw posterior samples (Wilson et al., 2020: random Fourier features, corrected at the points).

        Args:
            count: Number of samples.
            generator: Source of the draws.
            features: Number of Fourier features of the prior.

        Returns:
            A function of phi, ``k x d``: each sample's deviation from the outcomes' posterior means, ``k x count x m``,
            in their standardised units. It is differentiable.
        """

        def randn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64).to(self.points.device)

        drawn = count, len(self.noise)
        frequency = randn(features, self.dim)
        phase = 2 * math.pi * torch.rand(features, generator=generator, dtype=torch.float64).to(self.points.device)
        amplitude = (randn(features, *drawn) * (2 * self.variance / features).sqrt()).flatten(1)

        def prior(phi: Tensor) -> Tensor:
            return (torch.cos((phi @ self.transform) @ frequency.T + phase) @ amplitude).view(len(phi), *drawn)

        at_points = prior(self.points) + randn(len(self.points), *drawn) * (self.variance * self.noise).sqrt()
        update = torch.empty_like(at_points)
        for own, root in self.roots():
            solved = torch.cholesky_solve(at_points[..., own].flatten(1), root)
            update[..., own] = solved.view(len(self.points), count, -1)
        update = update.flatten(1)
        return lambda phi: prior(phi.double()) - (self.kernel(phi.double()) @ update).view(len(phi), *drawn)

    def deviations(self, count: int, generator: torch.Generator) -> Callable[[Tensor], Tensor]:
        """Draw posterior samples of the cost (see `outcome_deviations`).

        Returns:
            A function of phi, ``k x d``: each sample's deviation from `mean`, ``k x count``, in standardised units.
        """
        deviations = self.outcome_deviations(count, generator)
        if self.combination is None:
            return lambda phi: deviations(phi)[..., 0]

        def of_cost(phi: Tensor) -> Tensor:
            means = self.outcomes(phi)[:, None]
            return self.combined(means + deviations(phi)) - self.combined(means)

        return of_cost


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
        self,
        phi: Tensor,
        costs: Tensor,
        previous: Hyperparameters | None = None,
        least_noise: Tensor | float = 0.0,
        combination: Combination | None = None,
        promised: Tensor | None = None,
    ) -> GPValueFunction:
        """Fit to points, ``n x d``, and their outcomes' costs, ``n x m``, or ``n`` of one outcome.

        Args:
            phi: The points, ``n x d``.
            costs: The costs, which must vary.
            previous: Hyper-parameters to keep instead of choosing them.
            least_noise: See `most_likely`.
            combination: How the outcomes make the metric; None of one that is the metric.
            promised: What the outcomes' losses promise (`trend_of`), ``m x d``; None for nothing.
        """
        chosen = previous or self.most_likely(phi, costs, least_noise, promised)
        trend = None if promised is None else trend_of(promised, phi, costs)
        return GPValueFunction.conditioned(phi, costs, self.transform(chosen), chosen.noise, combination, trend)

    def transform(self, chosen: Hyperparameters) -> Tensor:
        """Return T, ``d x d``: distances in ``phi T`` are in units of the length scale."""
        typical = self.scale * math.sqrt(2 * len(self.spectrum.weights))
        return self.spectrum.root(chosen.exponent) / (chosen.length * typical)

    def most_likely(
        self, phi: Tensor, costs: Tensor, least_noise: Tensor | float = 0.0, promised: Tensor | None = None
    ) -> Hyperparameters:
        """Return the grid's kernel of the highest marginal likelihood of all outcomes times prior, and their noises.

        Outcomes of one model resemble each other: m of them say as much as sqrt(m) that don't, so the length scale's
        prior counts as often.

        Args:
            phi: The points, ``n x d``.
            costs: The outcomes' costs, ``n x m``, or ``n`` of one outcome.
            least_noise: Standard deviation of the noise in each cost, ``m``, as far as it is known: others are not
                considered below it, unless the grid has none above.
            promised: As of a call.
        """
        phi, costs = phi.double(), costs.double().view(len(phi), -1)
        if promised is not None:
            costs = costs - phi @ trend_of(promised, phi, costs).T
        varies = _vary(costs)  # of the others nothing is to be learned
        rest, least = costs[:, varies], torch.as_tensor(least_noise).to(costs).expand(len(varies))[varies]
        ones, targets = torch.ones_like(rest[:, :1]), (rest - rest.mean(0)) / _spread(rest)
        noises = torch.tensor(NOISES, dtype=torch.float64, device=phi.device)[:, None]
        of_noise = torch.tensor([_log_normal(noise, *NOISE_PRIOR) for noise in NOISES]).to(noises)[:, None]
        scored: list[tuple[int, float, float, float, Tensor]] = []
        for exponent in self.exponents:
            for length in LENGTHS:
                z = phi @ self.transform(Hyperparameters(exponent, length, ()))
                values, vectors = torch.linalg.eigh(rbf(z, z))
                projected = vectors.T @ torch.cat([ones, targets], 1)
                scores, amplitudes = log_likelihoods(values.clamp(min=0) + noises, projected)
                enough = (amplitudes * noises).sqrt() * _spread(rest) >= least
                allowed = (scores - of_noise).where(enough | ~enough.any(0), -math.inf)
                best = allowed.max(0)
                score = float(best.values.sum()) - math.sqrt(rest.shape[1]) * _log_normal(length, *LENGTH_PRIOR)
                scored.append((int(enough.any(0).sum()), score, exponent, length, best.indices))
        _, _, exponent, length, indices = max(scored, key=lambda each: each[:2])
        noise = torch.full((len(varies),), NOISE_PRIOR[0], dtype=torch.float64)
        noise[varies.cpu()] = noises[indices, 0].cpu()
        return Hyperparameters(exponent, length, tuple(noise.tolist()))


def log_likelihoods(eigenvalues: Tensor, projected: Tensor) -> tuple[Tensor, Tensor]:
    """Return log marginal likelihoods, up to a constant, at the best amplitude and mean, and these amplitudes.

    Args:
        eigenvalues: Of the covariance in units of the amplitude, each noise included, ``k x n``.
        projected: A vector of ones and the m targets in its eigenvectors' basis, ``n x (1 + m)``.

    Returns:
        Both ``k x m``.
    """
    ones, targets = projected[:, :1], projected[:, 1:]
    precision = 1 / eigenvalues
    of_ones, of_both, of_targets = precision @ ones.square(), precision @ (ones * targets), precision @ targets.square()
    amplitudes = ((of_targets - of_both.square() / of_ones) / len(targets)).clamp(min=torch.finfo(torch.float64).tiny)
    return -0.5 * (len(targets) * amplitudes.log() + eigenvalues.log().sum(1, keepdim=True)), amplitudes


def trend_of(promised: Tensor, phi: Tensor, costs: Tensor) -> Tensor:
    """Return the slopes of the outcomes' prior means, ``m x d``: what their losses promise, times one number.

    That number is the least-squares fit to all outcomes, and at least 0.

    Args:
        promised: The gradient of each outcome's own loss, signed as its cost is; 0 of one without a loss, ``m x d``.
        phi: Points, ``n x d``.
        costs: The outcomes' costs there, ``n x m``.
    """
    expected = _about_mean(phi.double() @ promised.T)
    slope = (expected * _about_mean(costs)).sum() / expected.square().sum()
    return promised * slope.nan_to_num(0.0).clamp(min=0)


def _about_mean(values: Tensor) -> Tensor:
    return values - values.mean(0)


def _dots(a: Tensor, b: Tensor) -> Tensor:
    """Return the products of columns, ``m``, of ``n x m`` each: each summed in the order of that column alone."""
    return torch.stack([x @ y for x, y in zip(a.T, b.T, strict=True)])


def _log_normal(value: float, median: float, spread: float) -> float:
    return 0.5 * (math.log(value / median) / spread) ** 2


def _vary(costs: Tensor) -> Tensor:
    """Return which columns of ``n x m`` are not constant, ``m``."""
    return costs.amax(0) > costs.amin(0)


def _spread(costs: Tensor) -> Tensor:
    """Return the standard deviation of ``n``, or of each column of ``n x m``; 1 of what does not vary."""
    return costs.std(0).where(_vary(costs), 1.0)
