"""Learners: against scikit-learn, on functions that are known, and blind to what is held out."""

from collections.abc import Callable
from dataclasses import replace
from statistics import mean
from typing import Any

import pytest
import scipy.stats
import torch
from torch import Tensor

from helpers.evaluations import told
from helpers.quadratics import QuadraticLearner
from helpers.tensors import rand32
from metricopt_ext.tasks.trajectories import Trajectory
from metricopt_ext.value.fitting import fit_value_function
from metricopt_ext.value.learning import NeuralLearner
from metricopt_ext.value.observations import Observations


def folds_of(data: Observations, folds: int = 3) -> Tensor:
    return data.trajectory % folds


QUICK = NeuralLearner(iterations=15)


@pytest.mark.parametrize("learner", [QUICK, replace(QUICK, nets=1), QuadraticLearner()])
@pytest.mark.parametrize("member", [0, 2])
def test_a_member_never_sees_its_fold(
    smooth: Callable[[Tensor], Tensor], trajectories: Callable[..., list[Trajectory]], learner: Any, member: int
) -> None:
    data = Observations.of(trajectories(smooth))
    fold, new = folds_of(data), rand32(30, 6, seed=99)
    hidden = (fold == member).nonzero().squeeze(1)
    phi, cost = data.phi.clone(), data.cost.clone()
    phi[hidden] = 5 * rand32(len(hidden), 6, seed=5)
    cost[hidden] = cost[hidden.flip(0)]  # the same costs of other points: what standardises costs stays
    before = learner(data, fold, 3, seed=0).eval().members(new).detach()
    after = learner(replace(data, phi=phi, cost=cost), fold, 3, seed=0).eval().members(new).detach()
    blind = torch.arange(before.shape[1]) % 3 == member
    torch.testing.assert_close(after[:, blind], before[:, blind], rtol=1e-4, atol=1e-5)
    assert (after - before)[:, ~blind].abs().mean(0).min() > 1e-3


@pytest.mark.outcome
def test_neural_learner_learns_a_smooth_function(
    smooth: Callable[[Tensor], Tensor], trajectories: Callable[..., list[Trajectory]]
) -> None:
    data, new = Observations.of(trajectories(smooth, n=80)), 0.5 * rand32(200, 6, seed=99)
    held_out, unseen, errors = [], [], []
    for seed in range(2):
        fit = fit_value_function(data, seed=seed)
        held_out.append(fit.f.quality.spearman)
        errors.append(fit.f.quality.mae / fit.f.quality.constant_mae)
        unseen.append(scipy.stats.spearmanr(fit.f(new), smooth(new)).statistic)
    assert mean(held_out) > 0.8  # at worst 0.97 ± 0.01
    assert mean(errors) < 0.5  # at worst 0.20 ± 0.02
    assert mean(unseen) > 0.8  # at worst 0.98 ± 0.01


@pytest.mark.parametrize(("learner", "tolerance"), [(QuadraticLearner(), 1e-5), (NeuralLearner(iterations=100), 0.05)])
def test_a_large_offset_of_the_costs_changes_nothing(
    smooth: Callable[[Tensor], Tensor],
    trajectories: Callable[..., list[Trajectory]],
    learner: Any,
    tolerance: float,
) -> None:
    offset = 2.0**24  # float32 has whole numbers only from there on
    data = Observations.of(trajectories(smooth))
    moved = Observations.of([replace(each, evaluations=told(each.cost + offset)) for each in trajectories(smooth)])
    f, far = (learner(each, folds_of(each), 3, seed=0).eval() for each in (data, moved))
    new = rand32(30, 6, seed=99)
    difference = (far.members(new) - offset - f.members(new)).abs().max()
    assert difference < tolerance * data.cost.std()
    assert far.members(new).std(0).min() > 0.1 * data.cost.std()
