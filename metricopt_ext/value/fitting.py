"""Fits value functions to observed trajectories and measures them on trajectories that they have not seen."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from metricopt_ext.errors import ValueFunctionError
from metricopt_ext.tasks.evaluation import Evaluation
from metricopt_ext.utils.checks import check_integer
from metricopt_ext.utils.seeding import generator
from metricopt_ext.utils.threads import num_threads
from metricopt_ext.utils.words import counted
from metricopt_ext.value.learners import Learner, NeuralLearner
from metricopt_ext.value.observations import Observations
from metricopt_ext.value.value_function import Quality, ValueFunction


@dataclass(frozen=True)
class Fit:
    """A chosen value function and what it was chosen by; for one loaded from a file, ``Fit(f)``, only f is known.

    Attributes:
        f: The value function; ``f.quality`` is its held-out quality.
        candidates: Held-out quality of each kind that was fitted.
        predicted: Held-out predictions where f is used, ``m``.
        true: The costs observed there, ``m``.
        visited: The metric's evaluations there, ``m``, and what they tell of chance.
        half_fits: Two more value functions, fitted to the costs on one half each; none if there are no halves.
    """

    f: ValueFunction
    candidates: dict[str, Quality] = field(default_factory=dict)
    predicted: Tensor = field(default_factory=lambda: torch.empty(0))
    true: Tensor = field(default_factory=lambda: torch.empty(0))
    visited: tuple[Evaluation, ...] = ()
    half_fits: tuple[ValueFunction, ...] = ()


@num_threads(1)
def fit_value_function(
    data: Observations, learners: Sequence[Learner] | None = None, *, folds: int = 4, seed: int = 0
) -> Fit:
    """Fit each kind of value function and keep the one that predicts held-out trajectories best.

    Every trajectory is held out from some members of the ensemble: their predictions measure quality without
    spending queries on held-out data alone. (The mean of all is usually better than the members measured this way.)

    Args:
        data: The observed points.
        learners: What to fit; by default the MLP.
        folds: Number of folds.
        seed: Seed of folds, weights and batches.

    Raises:
        ValueError: ``folds`` or ``seed`` is not an integer.
        ValueFunctionError: There are fewer than two folds, fewer trajectories than folds, or all costs are equal.
    """
    check_integer(0, folds=folds)
    if folds < 2:
        raise ValueFunctionError(f"folds is {folds}; it must be at least 2")
    trajectories = int(data.trajectory.max()) + 1
    if trajectories < folds:
        raise ValueFunctionError(
            f"{counted(trajectories, 'trajectory')} can't be held out in {folds} folds; collect more tasks"
        )
    if data.cost.min() == data.cost.max():
        raise ValueFunctionError(
            f"all {len(data.cost)} observed costs equal {float(data.cost[0]):.6g}: the metric does not react to phi;"
            " modulate more layers, or start further out (start_std); a model that scores nothing must be trained first"
        )
    fold = assign_folds(data.trajectory, folds, seed)
    used = data.where_used() & data.observed
    fits = []
    for learner in learners or (NeuralLearner(),):
        f = learner(data, fold, folds, seed)
        f.set_domain(data.phi)
        f.signature = data.signature
        of_fold = f.members(data.phi).view(len(fold), -1, folds).mean(1)
        held_out = of_fold.gather(1, fold[:, None]).squeeze(1)
        f.quality = measure(held_out[used], data.cost[used], data.trajectory[used])
        fits.append((f.quality, f, held_out[used]))
    _, best, predicted = max(fits, key=lambda fit: _merit(fit[0]))
    return Fit(best, {f.kind: quality for quality, f, _ in fits}, predicted, data.cost[used])


def assign_folds(trajectory: Tensor, folds: int, seed: int) -> Tensor:
    """Return the fold of each point, ``n``, given its trajectory, ``n``; points of one trajectory share a fold."""
    order = torch.randperm(int(trajectory.max()) + 1, generator=generator(seed, "folds"))
    return (order % folds)[trajectory]


def _merit(quality: Quality) -> tuple[bool, float]:
    """Prefer fits that err less than a constant, then the best rank correlation; if none does, the smallest error."""
    useful = quality.mae < quality.constant_mae
    return useful, quality.spearman if useful else -quality.mae


def measure(predicted: Tensor, true: Tensor, trajectory: Tensor) -> Quality:
    """Compare held-out predictions with the truth.

    Args:
        predicted: Predicted costs, ``m``.
        true: Observed costs, ``m``.
        trajectory: The trajectory of each point, ``m``.
    """
    error, best = (predicted - true).abs().nan_to_num(nan=math.inf), _best_quarter(predicted)
    return Quality(
        spearman=_spearman(predicted, true),
        mae=float(error.mean()),
        constant_mae=float((true - true.median()).abs().mean()),
        points=len(true),
        trajectories=len(trajectory.unique()),
        near_mae=float(error[best].mean()),
        headroom=float(true.median() - true[best].mean()),
    )


def measure_ahead(predicted: Tensor, true: Tensor, start: float) -> Quality:
    """Compare what was predicted before each query of a search with what it found.

    Args:
        predicted: Predictions by f, by the median of the costs so far and by the best of them, ``m x 3``.
        true: The costs that were found, ``m``.
        start: The cost of the search's start, where f is followed from.
    """
    f, best = predicted[:, 0], _best_quarter(predicted[:, 0])
    mae, constant_mae, incumbent_mae = (predicted - true[:, None]).abs().mean(0).tolist()
    return Quality(
        spearman=_spearman(f, true),
        mae=mae,
        constant_mae=constant_mae,
        points=len(true),
        trajectories=len(true),  # each is the minimum of a sample of its own
        near_mae=float((f - true)[best].abs().mean()),
        headroom=start - float(true[best].mean()),
        incumbent_mae=incumbent_mae,
    )


def _best_quarter(predicted: Tensor) -> Tensor:
    return predicted.argsort(stable=True)[: math.ceil(len(predicted) / 4)]


def _spearman(predicted: Tensor, true: Tensor) -> float:
    if not predicted.isfinite().all():
        return -1.0  # a diverged fit must lose to any other
    if true.min() == true.max() or predicted.min() == predicted.max():
        return 0.0
    from scipy.stats import spearmanr  # takes a second

    return float(spearmanr(predicted.numpy(), true.numpy()).statistic)
