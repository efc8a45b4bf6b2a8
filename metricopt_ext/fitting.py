"""Fits value functions to observed trajectories and measures them on trajectories that they have not seen."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch
from scipy.stats import spearmanr
from torch import Tensor

from .errors import ValueFunctionError
from .objective import Objective, comparable_sigma, warn_of_collapse
from .observations import Observations
from .seeding import generator
from .value_function import NeuralValueFunction, Quality, RidgeValueFunction, ValueFunction


class Learner(Protocol):
    """Fits an ensemble; member m must not see the trajectories of fold ``m % folds``."""

    def __call__(self, data: Observations, fold: Tensor, folds: int, seed: int) -> ValueFunction:
        """Return the fitted f, with ``folds`` members or a multiple of that.

        Args:
            data: The observed points.
            fold: The fold of each point, ``n``, the same along a trajectory.
            folds: Number of folds, at least 2.
            seed: Seed of initial weights and mini-batches.
        """
        ...


@dataclass(frozen=True)
class NeuralLearner:
    """Fits `NeuralValueFunction` by AdamW with a one-cycle rate on batches that mix all tasks.

    Batches of one trajectory, as Algorithm 1 has them, would let BatchNorm normalise away what differs between tasks.

    Attributes:
        iterations: Steps of AdamW.
        batch_size: Observed points per step and member.
        nets: Members for each fold, which differ in their initial weights and their batches.
        lr: Peak learning rate.
        weight_decay: Decoupled weight decay; strong, because a few hundred points are all there is.
        objective: What is minimised; by default Eq. 2's regression alone.
        resolution: Sigma of labels that are all equally sure, in standard deviations of the costs.
    """

    iterations: int = 400
    batch_size: int = 256
    nets: int = 2
    lr: float = 1e-2
    weight_decay: float = 1.0
    objective: Objective = field(default=Objective(gamma=1.0, beta=0.0))
    resolution: float = 0.1

    @classmethod
    def offline(cls) -> "NeuralLearner":
        """Return the rival of Reptile in the paper's Fig. 3b: Eq. 2 on all trajectories stored offline."""
        return cls(iterations=2000, batch_size=64, nets=1, objective=Objective(gamma=10.0, beta=1.0))

    def __call__(self, data: Observations, fold: Tensor, folds: int, seed: int) -> ValueFunction:
        """Minimise the objective for all members at once."""
        rng = generator(seed, "fit")
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(rng.initial_seed())
            f = NeuralValueFunction(data.phi.shape[-1], folds * self.nets)
        f.cost_mean.copy_(data.cost.mean())
        f.cost_std.copy_(data.cost.std().clamp(min=1e-8))
        sigma = comparable_sigma(data, self.resolution)
        seen = [(fold != member % folds).nonzero().squeeze(1) for member in range(folds * self.nets)]
        optimizer = torch.optim.AdamW(f.parameters(), self.lr, weight_decay=self.weight_decay, fused=True)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, self.lr, total_steps=self.iterations)
        f.train()
        for _ in range(self.iterations):
            batch = torch.stack(
                [points[torch.randint(len(points), (self.batch_size,), generator=rng)] for points in seen], dim=1
            )
            loss = self.objective(f, data.phi[batch], data.cost[batch], sigma[batch], rng)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        f.eval()
        warn_of_collapse(f, data.phi, data.cost)
        return f


@dataclass(frozen=True)
class RidgeLearner:
    """Fits `RidgeValueFunction` in closed form on standardised features.

    Attributes:
        penalties: Candidate ridge penalties per point. Each member takes the one that predicts best across the
            trajectories it sees; points of one trajectory are too alike to be left out one by one.
        groups: Parts into which a member's trajectories are divided for that.
    """

    penalties: tuple[float, ...] = tuple(10.0**e for e in range(-4, 4))
    groups: int = 5

    def __call__(self, data: Observations, fold: Tensor, folds: int, seed: int) -> ValueFunction:
        """Fit each member to the points outside its fold."""
        f = RidgeValueFunction(data.phi.shape[-1], folds)
        features, cost = f.basis(data.phi).double(), data.cost.double()
        for member in range(folds):
            seen = fold != member
            penalty = best_penalty(features[seen], cost[seen], data.trajectory[seen] % self.groups, self.penalties)
            ((coefficients, intercept),) = ridge_path(features[seen], cost[seen], [penalty])
            f.coefficients[:, member], f.intercept[member] = coefficients, intercept
        return f


def best_penalty(x: Tensor, y: Tensor, group: Tensor, penalties: Sequence[float]) -> float:
    """Return the ridge penalty that errs least in leaving out groups of points.

    Args:
        x: Features, ``n x p``.
        y: Targets, ``n``.
        group: The group of each point, ``n``.
        penalties: The candidates; see `ridge_path`.
    """
    if len(penalties) == 1:
        return penalties[0]
    errors = torch.zeros(len(penalties), dtype=x.dtype)
    for held_out in group.unique():
        inside, outside = group != held_out, group == held_out
        if inside.sum() < 2:
            continue
        for i, (coefficients, intercept) in enumerate(ridge_path(x[inside], y[inside], penalties)):
            errors[i] += (x[outside] @ coefficients + intercept - y[outside]).abs().sum()
    return penalties[int(errors.argmin())]


def ridge_path(x: Tensor, y: Tensor, penalties: Sequence[float]) -> list[tuple[Tensor, Tensor]]:
    """Fit ridge regressions to standardised features by one decomposition for all penalties.

    Args:
        x: Features, ``n x p``.
        y: Targets, ``n``.
        penalties: Penalty per point; the squared coefficients of standardised features count ``n`` times as much.

    Returns:
        For each penalty the coefficients of the raw features, ``p``, and the intercept.
    """
    mean, std = x.mean(0), x.std(0).clamp(min=1e-12)
    z, y_centred = (x - mean) / std, y - y.mean()
    if z.shape[1] > len(z):  # the same by the smaller matrix of inner products, several times faster
        squares, u = torch.linalg.eigh(z @ z.T)
        scaled = [u @ (u.T @ y_centred / (squares.clamp(min=0) + len(z) * penalty)) for penalty in penalties]
        coefficients = [z.T @ weights / std for weights in scaled]
    else:
        u, s, vt = torch.linalg.svd(z, full_matrices=False)
        projected = u.T @ y_centred
        coefficients = [vt.T @ (s / (s**2 + len(z) * penalty) * projected) / std for penalty in penalties]
    return [(b, y.mean() - mean @ b) for b in coefficients]


@dataclass(frozen=True)
class Fit:
    """A chosen value function with what it was chosen by; of one from a file, ``Fit(f)``, nothing else is known.

    Attributes:
        f: The value function; ``f.quality`` is its held-out quality.
        candidates: Held-out quality of each kind that was fitted.
        predicted: Held-out predictions where f is used, ``m``.
        true: The costs observed there, ``m``.
        halves: The costs on two halves of the metric's data there, ``m x 2``; None if the metric does not tell them.
        half_fits: Two more value functions, fitted to the costs on one half each; none if there are no halves.
    """

    f: ValueFunction
    candidates: dict[str, Quality] = field(default_factory=dict)
    predicted: Tensor = field(default_factory=lambda: torch.empty(0))
    true: Tensor = field(default_factory=lambda: torch.empty(0))
    halves: Tensor | None = None
    half_fits: tuple[ValueFunction, ...] = ()


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute on one thread: tensors here are so small that several only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@one_thread()
def fit_value_function(
    data: Observations, learners: Sequence[Learner] | None = None, *, folds: int = 4, seed: int = 0
) -> Fit:
    """Fit each kind of value function and keep the one that predicts held-out trajectories best.

    Every trajectory is held out from some members of the ensemble: these members' predictions measure quality, and yet
    no query is spent on held-out data alone. (The mean of all is usually better than the members so measured.)

    Args:
        data: The observed points.
        learners: What to fit; by default the MLP and the diagonal quadratic ridge.
        folds: Number of folds.
        seed: Seed of folds, weights and batches.

    Raises:
        ValueFunctionError: There are fewer than two folds, fewer trajectories than folds, or all costs are equal.
    """
    if folds < 2:
        raise ValueFunctionError(f"folds is {folds}; it must be at least 2")
    trajectories = int(data.trajectory.max()) + 1
    if trajectories < folds:
        raise ValueFunctionError(f"{trajectories} trajectories can't be held out in {folds} folds; collect more tasks")
    if data.cost.min() == data.cost.max():
        raise ValueFunctionError(
            f"all {len(data.cost)} observed costs equal {float(data.cost[0]):.6g}: the metric does not react to phi;"
            " modulate more layers, or start further out (start_std)"
        )
    fold = assign_folds(data.trajectory, folds, seed)
    used = data.where_used() & data.observed
    fits = []
    for learner in learners or (NeuralLearner(), RidgeLearner()):
        f = learner(data, fold, folds, seed)
        f.set_domain(data.phi)
        of_fold = f.members(data.phi).view(len(fold), -1, folds).mean(1)
        held_out = of_fold.gather(1, fold[:, None]).squeeze(1)
        f.quality = measure(held_out[used], data.cost[used], data.trajectory[used])
        fits.append((f.quality, f, held_out[used]))
    _, best, predicted = max(fits, key=lambda fit: _merit(fit[0]))
    return Fit(best, {f.kind: quality for quality, f, _ in fits}, predicted, data.cost[used])


def assign_folds(trajectory: Tensor, folds: int, seed: int) -> Tensor:
    """Return the fold of each point, ``n``, the same along a trajectory, from the trajectory of each point, ``n``."""
    order = torch.randperm(int(trajectory.max()) + 1, generator=generator(seed, "folds"))
    return (order % folds)[trajectory]


def _merit(quality: Quality) -> tuple[bool, float]:
    """Rank first what errs less than a constant, then what ranks best; without any such, what errs least."""
    useful = quality.mae < quality.constant_mae
    return useful, quality.spearman if useful else -quality.mae


def measure(predicted: Tensor, true: Tensor, trajectory: Tensor) -> Quality:
    """Compare held-out predictions with the truth.

    Args:
        predicted: Predicted costs, ``m``.
        true: Observed costs, ``m``.
        trajectory: The trajectory of each point, ``m``.
    """
    if not predicted.isfinite().all():
        spearman = -1.0  # a diverged fit must lose against any other
    elif true.min() == true.max() or predicted.min() == predicted.max():
        spearman = 0.0
    else:
        spearman = float(spearmanr(predicted.numpy(), true.numpy()).statistic)
    return Quality(
        spearman=spearman,
        mae=float((predicted - true).abs().mean().nan_to_num(nan=math.inf)),
        constant_mae=float((true - true.median()).abs().mean()),
        points=len(true),
        trajectories=len(trajectory.unique()),
    )
