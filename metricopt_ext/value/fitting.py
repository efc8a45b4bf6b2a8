"""Fits value functions to observed trajectories and measures them on trajectories that they have not seen."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from metricopt_ext.errors import ValueFunctionError
from metricopt_ext.tasks.evaluation import Evaluation
from metricopt_ext.utils.checks import check_integer
from metricopt_ext.utils.seeding import generator
from metricopt_ext.utils.threads import num_threads
from metricopt_ext.utils.words import counted
from metricopt_ext.value.learning import Learner, NeuralLearner
from metricopt_ext.value.observations import Observations
from metricopt_ext.value.value_function import Quality, ValueFunction

NOWHERE = torch.empty(0)


@dataclass(frozen=True)
class Fit:
    """A value function and how it did on held-out points; for one loaded from a file, ``Fit(f)``, only f is known.

    Attributes:
        f: The value function; ``f.quality`` is its held-out quality.
        predicted: Held-out predictions where f is used, ``m``.
        true: The costs observed there, ``m``.
        visited: The metric's evaluations there, ``m``, and what they tell of chance.
        half_fits: Two more value functions, fitted to the costs on one half each; none if there are no halves.
    """

    f: ValueFunction
    predicted: Tensor = NOWHERE
    true: Tensor = NOWHERE
    visited: tuple[Evaluation, ...] = ()
    half_fits: tuple[ValueFunction, ...] = ()


DEFAULT = NeuralLearner()


@num_threads(1)
def fit_value_function(data: Observations, learner: Learner = DEFAULT, *, folds: int = 4, seed: int = 0) -> Fit:
    """Fit a value function to all trajectories, and measure it on each while that was held out.

    Every trajectory is held out from some members of the ensemble: their predictions measure quality without
    spending queries on held-out data alone. (The mean of all is usually better than the members measured this way.)

    Args:
        data: The observed points.
        learner: What fits it.
        folds: Number of folds, at least 2.
        seed: Seed of folds, weights and batches.

    Raises:
        ValueError: ``folds`` or ``seed`` is out of range.
        ValueFunctionError: There are fewer trajectories than folds, or all costs are equal.
    """
    check_integer(2, folds=folds)
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
    f = learner(data, fold, folds, seed)
    f.set_domain(data.phi)
    f.signature = data.signature
    used = data.where_used()
    of_fold = f.members(data.phi).view(len(fold), -1, folds).mean(1)
    predicted, true = of_fold.gather(1, fold[:, None]).squeeze(1)[used], data.cost[used]
    f.quality = measure(predicted, true, data.trajectory[used])
    return Fit(f, predicted, true)


def assign_folds(trajectory: Tensor, folds: int, seed: int) -> Tensor:
    """Return the fold of each point, ``n``, given its trajectory, ``n``; points of one trajectory share a fold."""
    order = torch.randperm(int(trajectory.max()) + 1, generator=generator(seed, "folds"))
    return (order % folds)[trajectory]


def measure(
    predicted: Tensor, true: Tensor, trajectory: Tensor, ahead: tuple[Tensor, Tensor, float] | None = None
) -> Quality:
    """Compare held-out predictions, or what was predicted before each query of a search, with the truth.

    Args:
        predicted: Predicted costs, ``m``.
        true: Observed costs, ``m``.
        trajectory: The trajectory of each point, ``m``; in a search each point is one of its own.
        ahead: Of a search, what the median of the costs and the best of them were before each query, ``m`` each, and
            the cost of its start, where f is followed from; None for the median of these points, as a start too.
    """
    constant, incumbent, start = ahead or (true.median(), None, float(true.median()))
    error = (predicted - true).abs().nan_to_num(nan=math.inf)
    best = predicted.argsort(stable=True)[: math.ceil(len(predicted) / 4)]
    return Quality(
        spearman=_spearman(predicted, true),
        mae=float(error.mean()),
        constant_mae=float((constant - true).abs().mean()),
        points=len(true),
        trajectories=len(trajectory.unique()),
        near_mae=float(error[best].mean()),
        headroom=start - float(true[best].mean()),
        incumbent_mae=None if incumbent is None else float((incumbent - true).abs().mean()),
    )


def _spearman(predicted: Tensor, true: Tensor) -> float:
    if not predicted.isfinite().all():
        return -1.0  # of a diverged fit
    if true.min() == true.max() or predicted.min() == predicted.max():
        return 0.0
    from scipy.stats import spearmanr  # takes a second

    return float(spearmanr(predicted.numpy(), true.numpy()).statistic)
