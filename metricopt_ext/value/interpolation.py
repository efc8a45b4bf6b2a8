"""Labels for the steps between metric queries: Gaussian processes over time (MetricOpt, "Metric interpolation")."""

import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.func import functional_call

from metricopt_ext.tasks.trajectories import Trajectory
from metricopt_ext.utils.threads import num_threads

with warnings.catch_warnings():
    warnings.simplefilter("ignore", FutureWarning)  # linear_operator compiles with torch.jit
    import gpytorch


R = TypeVar("R")

# Bounds of the hyper-parameter search, in standardised units. They keep every covariance matrix well conditioned;
# a length scale of 3 is already a parabola over times in [0, 1].
BOUNDS = {
    "length_scale": (0.01, 3.0),
    "output_scale": (1e-3, 1e3),
    "noise": (1e-4, 10.0),
    "level_scale": (1e-6, 1e7),
}

# The marginal likelihood has several maxima, such as a short length scale without noise and a long one with noise.
LENGTH_SCALE_STARTS = (0.05, 0.2, 0.8)


@dataclass(frozen=True)
class Skill:
    """How well interpolation recovers observations left out one by one, in units of the cost.

    Only observations between two others of the same trajectory count, as labels are never extrapolated, and
    constant trajectories do not count.

    Attributes:
        gp_mae: Mean absolute error of the Gaussian process.
        constant_mae: The same for each trajectory's level: the mean of its other points, shrunk towards the mean of all
            trajectories as far as their spread suggests. A Gaussian process does no better if time explains nothing.
        gain_error: Standard error of ``constant_mae - gp_mae`` over the trajectories; infinite for fewer than two.
    """

    gp_mae: float
    constant_mae: float
    gain_error: float

    @property
    def skill(self) -> float:
        """Share of the level's error that the Gaussian process avoids, at most 1; 0 is no skill."""
        return 1 - self.gp_mae / self.constant_mae if self.constant_mae > 0 else 0.0

    @property
    def skilful(self) -> bool:
        """Whether time explains something: a tenth of the error is avoided, beyond luck (2 standard errors)."""
        return self.skill > 0.1 and self.constant_mae - self.gp_mae > 2 * self.gain_error


@dataclass(frozen=True)
class GaussianProcess:
    """The metric along a trajectory as a smooth function of time t = step / T, with one prior for all trajectories.

    The covariance of two points of one trajectory is ``output_scale exp(-(t - t')^2 / (2 length_scale^2)) +
    level_scale``. The level is each trajectory's unknown mean, integrated out. With one mean for all, the RBF would
    have to explain differing levels, and become too long; subtracting the mean of a few points would hide its
    uncertainty. Where levels do not differ, the likelihood puts ``level_scale`` near 0, which leaves the standard RBF
    process.

    Attributes:
        length_scale: Length scale of the RBF kernel.
        output_scale: Its variance, in units of ``std ** 2``, as are the next two.
        noise: Variance of an observation.
        level_scale: Variance between the levels of trajectories, at least 0.
        mean: Mean of all observed costs.
        std: Standard deviation of observed costs within trajectories.
    """

    length_scale: float
    output_scale: float
    noise: float
    level_scale: float = 0.0
    mean: float = 0.0
    std: float = 1.0

    @classmethod
    @num_threads(1)
    def fit(cls, trajectories: Sequence[Trajectory], *, levels: bool = True) -> "GaussianProcess":
        """Maximise the exact marginal likelihood, summed over trajectories (Rasmussen & Williams, Eq. 5.8).

        The 5 to 10 points of one trajectory do not determine a length scale; those of all do. Constant trajectories
        are left out: they would make the others look smoother than they are.

        Args:
            trajectories: At least one.
            levels: Whether to fit ``level_scale``; without it the kernel is the paper's, RBF alone.
        """
        varying = [t for t in trajectories if not _is_constant(t)] or trajectories
        level, mean, std = _moments(varying)
        start = cls(0.2, 1.0, 0.1, level if levels else 0.0, mean, std)
        names = [name for name in BOUNDS if levels or name != "level_scale"]
        fits = [replace(start, length_scale=length)._climb(varying, names) for length in LENGTH_SCALE_STARTS]
        return max(fits, key=lambda process: process.log_likelihood(varying))

    @num_threads(1)
    def log_likelihood(self, trajectories: Sequence[Trajectory]) -> float:
        """Return the log marginal likelihood of all observed costs."""
        model = _Model(self)
        with _exact():
            standardised = sum(float(model(*data)) for data in self._batches(trajectories))
        return standardised - math.log(self.std) * sum(len(t.cost) for t in trajectories)

    @num_threads(1)
    def posterior(self, trajectories: Sequence[Trajectory]) -> list[tuple[Tensor, Tensor]]:
        """Return mean and standard deviation of each trajectory's noise-free metric at steps 0 ... T.

        Three or more observations that are all equal are treated as a known constant.

        Returns:
            The mean and std of each trajectory, each ``T + 1``, float64, in units of the cost.
        """
        model = _Model(self)

        def compute(batch: Sequence[Trajectory]) -> Iterable[tuple[Tensor, Tensor]]:
            times, targets = self._data(batch)
            grid = torch.stack([_times(t, torch.arange(len(t.phi))) for t in batch])[..., None]
            mean, variance = model.posterior(times, targets, grid)
            return zip(self.mean + self.std * mean, self.std * variance.sqrt(), strict=True)

        posteriors = _in_batches(trajectories, compute)
        for row, trajectory in enumerate(trajectories):
            if _is_constant(trajectory):
                mean, std = posteriors[row]
                posteriors[row] = torch.full_like(mean, float(trajectory.cost[0])), torch.zeros_like(std)
        return posteriors

    @num_threads(1)
    def predict_left_out(self, trajectories: Sequence[Trajectory]) -> list[Tensor]:
        """Predict each observed cost from the others of its trajectory.

        Returns:
            The K predictions of each trajectory, float64, in units of the cost.
        """
        model = _Model(self)

        def compute(batch: Sequence[Trajectory]) -> Iterable[Tensor]:
            times, targets = self._data(batch)
            return list(self.mean + self.std * model.left_out(times, targets))

        return _in_batches(trajectories, compute)

    def leave_one_out(self, trajectories: Sequence[Trajectory]) -> Skill:
        """Measure how well left-out observations are recovered; hyper-parameters stay as they are."""
        used = [t for t in trajectories if len(t.cost) > 2 and not _is_constant(t)]
        if not used:
            return Skill(0.0, 0.0, math.inf)
        gp = self.predict_left_out(used)
        errors = []  # per trajectory: Gaussian process and level, each per inner point
        level, mean, _ = _moments(used)
        for predicted, trajectory in zip(gp, used, strict=True):
            cost, others = trajectory.cost, len(trajectory.cost) - 1
            shrinkage = level / (level + 1 / others)
            constant = mean + shrinkage * ((cost.sum() - cost) / others - mean)
            errors.append((torch.stack([predicted, constant]) - cost)[:, 1:-1].abs())
        gp_mae, constant_mae = torch.cat(errors, 1).mean(1).tolist()
        gains = torch.stack([(error[1] - error[0]).mean() for error in errors])
        gain_error = float(gains.std()) / math.sqrt(len(used)) if len(used) > 1 else math.inf
        return Skill(gp_mae, constant_mae, gain_error)

    @property
    def noise_std(self) -> float:
        """Standard deviation of an observation, in units of the cost."""
        return self.std * math.sqrt(self.noise)

    def _data(self, batch: Sequence[Trajectory]) -> tuple[Tensor, Tensor]:
        """Stack times, ``n x K x 1``, and standardised costs, ``n x K``."""
        targets = torch.stack([t.cost for t in batch]).double()
        return torch.stack([_times(t, t.observed) for t in batch])[..., None], (targets - self.mean) / self.std

    def _batches(self, trajectories: Sequence[Trajectory]) -> list[tuple[Tensor, Tensor]]:
        return [self._data([trajectories[row] for row in rows]) for rows in _alike(trajectories, lambda t: len(t.cost))]

    def _climb(self, trajectories: Sequence[Trajectory], names: Sequence[str]) -> "GaussianProcess":
        """Climb from these hyper-parameters to a maximum of the likelihood in those that are named.

        It is by L-BFGS, bounded by a sigmoid.

        This uses torch's L-BFGS: scipy's L-BFGS-B loses more time to threads that wait for each other.
        """
        model, batches, points = _Model(self), self._batches(trajectories), sum(len(t.cost) for t in trajectories)
        low, high = torch.tensor([BOUNDS[name] for name in names], dtype=torch.float64).log().unbind(1)
        start = torch.tensor([getattr(self, name) for name in names], dtype=torch.float64).log()
        free = ((start - low) / (high - low)).logit(eps=0.01).requires_grad_()
        optimizer = torch.optim.LBFGS([free], max_iter=50, line_search_fn="strong_wolfe")

        def logarithms() -> Tensor:
            return low + (high - low) * free.sigmoid()

        def loss() -> Tensor:
            optimizer.zero_grad()
            raw = {
                _RAW[name]: v.view_as(model.get_parameter(_RAW[name]))
                for name, v in zip(names, logarithms(), strict=True)
            }
            total: Tensor = -torch.stack([functional_call(model, raw, data) for data in batches]).sum() / points
            total.backward()
            return total

        with _exact(gradients=True):
            optimizer.step(loss)
        return replace(self, **dict(zip(names, logarithms().exp().tolist(), strict=True)))


# The raw parameter of `_Model` for each hyper-parameter.
_RAW = {
    "length_scale": "smooth.base_kernel.raw_lengthscale",
    "output_scale": "smooth.raw_outputscale",
    "noise": "likelihood.noise_covar.raw_noise",
    "level_scale": "level.raw_constant",
}


class _Model(gpytorch.Module):  # type: ignore[misc]
    """A `GaussianProcess` in standardised units for n trajectories; raw parameters are logarithms.

    It does without `gpytorch.models.ExactGP`, which computes the covariance of all pairs of test points.
    """

    def __init__(self, process: GaussianProcess) -> None:
        def positive() -> Any:
            return gpytorch.constraints.Positive(torch.exp, torch.log)

        super().__init__()
        self.smooth = gpytorch.kernels.ScaleKernel(
            gpytorch.kernels.RBFKernel(lengthscale_constraint=positive()), outputscale_constraint=positive()
        )
        self.level = gpytorch.kernels.ConstantKernel(constant_constraint=positive())
        self.likelihood = gpytorch.likelihoods.GaussianLikelihood(noise_constraint=positive())
        self.double()
        for name, raw in _RAW.items():
            value = getattr(process, name)
            self.get_parameter(raw).data.fill_(math.log(value) if value else -math.inf)

    def kernel(self, times: Tensor, others: Tensor) -> Any:
        """Return the covariance of noise-free metrics, ``n x K x L``, lazily; times are ``n x K x 1``."""
        return (self.smooth + self.level)(times, others)

    def observations(self, times: Tensor) -> Any:
        """Return the prior distribution of observations."""
        prior = gpytorch.distributions.MultivariateNormal(torch.zeros_like(times[..., 0]), self.kernel(times, times))
        return self.likelihood(prior)

    def forward(self, times: Tensor, targets: Tensor) -> Tensor:
        """Return the total log marginal likelihood of targets, ``n x K``."""
        total: Tensor = self.observations(times).log_prob(targets).sum()
        return total

    def posterior(self, times: Tensor, targets: Tensor, grid: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and variance at a grid, ``n x L`` (Rasmussen & Williams, Algorithm 2.1)."""
        root = self.observations(times).lazy_covariance_matrix.cholesky()
        cross = root.solve(self.kernel(times, grid).to_dense())
        mean = (cross * root.solve(targets[..., None])).sum(-2)
        variance = self.kernel(grid, grid).diagonal(dim1=-2, dim2=-1) - cross.square().sum(-2)
        return mean, variance.clamp(min=0)

    def left_out(self, times: Tensor, targets: Tensor) -> Tensor:
        """Return the mean of each target given the others, ``n x K`` (Rasmussen & Williams, Eq. 5.12)."""
        inverse = torch.cholesky_inverse(self.observations(times).lazy_covariance_matrix.cholesky().to_dense())
        return targets - (inverse @ targets[..., None]).squeeze(-1) / inverse.diagonal(dim1=-2, dim2=-1)


@contextmanager
def _exact(*, gradients: bool = False) -> Iterator[None]:
    """Make gpytorch factorise matrices of any size; by default it uses iterative solvers for large ones."""
    with torch.set_grad_enabled(gradients), gpytorch.settings.max_cholesky_size(1_000_000):
        yield


def _in_batches(trajectories: Sequence[Trajectory], compute: Callable[[Sequence[Trajectory]], Iterable[R]]) -> list[R]:
    """Apply a batched computation to trajectories of one shape at a time; return the results in the given order."""
    results: dict[int, R] = {}
    with _exact():
        for rows in _alike(trajectories, lambda t: (len(t.cost), len(t.phi))):
            batch = [trajectories[row] for row in rows]
            results.update(zip(rows, compute(batch), strict=True))
    return [results[row] for row in range(len(trajectories))]


def _alike(trajectories: Sequence[Trajectory], key: Callable[[Trajectory], Hashable]) -> list[list[int]]:
    """Group trajectories of equal shape, so that batches need no padding; return their positions."""
    groups: dict[Hashable, list[int]] = defaultdict(list)
    for row, trajectory in enumerate(trajectories):
        groups[key(trajectory)].append(row)
    return list(groups.values())


def _moments(trajectories: Sequence[Trajectory]) -> tuple[float, float, float]:
    """Return the variance between levels in units of ``std ** 2``, the mean of all costs, and std within trajectories.

    Where nothing varies within trajectories, std is a small fraction of the spread between them, or 1 if there is none.
    """
    means = torch.stack([t.cost.mean() for t in trajectories])
    squares = torch.stack([(t.cost - t.cost.mean()).square().sum() for t in trajectories]).sum()
    counts = torch.tensor([float(len(t.cost)) for t in trajectories], dtype=torch.float64)
    between = float(means.var(correction=0))
    within = float(squares / (counts - 1).sum().clamp(min=1))
    mean = float((means * counts).sum() / counts.sum())
    std = max(math.sqrt(within), 1e-3 * math.sqrt(between)) or 1.0
    level = max(between - within * float((1 / counts).mean()), 0.0)
    return level / std**2, mean, std


def _times(trajectory: Trajectory, steps: Tensor) -> Tensor:
    return steps.double() / (len(trajectory.phi) - 1)


def _is_constant(trajectory: Trajectory) -> bool:
    """Whether all observations are equal; two equal ones say nothing about what lies between them."""
    return len(trajectory.cost) > 2 and bool(trajectory.cost.min() == trajectory.cost.max())
