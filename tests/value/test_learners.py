"""Learners: against scikit-learn, on functions that are known, and blind to what is held out."""

import math
from collections.abc import Callable
from dataclasses import replace
from statistics import mean
from typing import Any

import numpy as np
import pytest
import scipy.stats
import sklearn.linear_model
import sklearn.model_selection
import torch
from torch import Tensor

from helpers.refusals import assert_refused
from helpers.tensors import rand32
from metricopt_ext.tasks.trajectory import Trajectory
from metricopt_ext.value.fitting import fit_value_function
from metricopt_ext.value.learners import NeuralLearner, RidgeLearner
from metricopt_ext.value.observations import Observations


def folds_of(data: Observations, folds: int = 3) -> Tensor:
    return data.trajectory % folds


def features_of(phi: Tensor) -> np.ndarray:
    return np.concatenate([phi.double().numpy(), phi.double().numpy() ** 2], 1)


@pytest.mark.parametrize("penalty", [1e-4, 1e-2, 1.0])
def test_ridge_is_scikit_learns(
    smooth: Callable[[Tensor], Tensor], trajectories: Callable[..., list[Trajectory]], penalty: float
) -> None:
    data = Observations.of(trajectories(smooth))
    fold = folds_of(data)
    f = RidgeLearner(penalties=(penalty,))(data, fold, 3, seed=0)
    new = rand32(30, 6, seed=99)
    for member in range(3):
        seen = fold != member
        x = features_of(data.phi[seen])
        centre, std = x.mean(0), x.std(0, ddof=1)
        reference = sklearn.linear_model.Ridge(alpha=len(x) * penalty)
        reference.fit((x - centre) / std, data.cost[seen].double())
        expected = reference.predict((features_of(new) - centre) / std)
        np.testing.assert_allclose(f.members(new)[:, member], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("make", "wrong", "names"),
    [
        (NeuralLearner, {"iterations": 0}, ("iterations", "0", "1")),
        (NeuralLearner, {"batch_size": 64.0}, ("batch_size", "64.0")),
        (NeuralLearner, {"nets": 0}, ("nets", "0", "1")),
        (NeuralLearner, {"lr": math.inf}, ("lr", "inf")),
        (NeuralLearner, {"weight_decay": -1.0}, ("weight_decay", "-1.0")),
        (NeuralLearner, {"resolution": 0.0}, ("resolution", "0.0")),
        (RidgeLearner, {"penalties": ()}, ("penalties",)),
        (RidgeLearner, {"penalties": (1.0, -1.0)}, ("penalty", "-1.0")),
        (RidgeLearner, {"groups": 2.5}, ("groups", "2.5")),
    ],
)
def test_impossible_settings(make: Callable[..., Any], wrong: dict[str, Any], names: tuple[str, ...]) -> None:
    assert_refused(lambda: make(**wrong), ValueError, *names)


@pytest.mark.parametrize("n", [24, 5])
@pytest.mark.parametrize("noise", [0.0, 0.3, 3.0])
def test_ridge_takes_the_penalty_that_predicts_other_trajectories_best(
    smooth: Callable[[Tensor], Tensor], trajectories: Callable[..., list[Trajectory]], noise: float, n: int
) -> None:
    data = Observations.of(trajectories(smooth, n=n))
    data = replace(data, cost=data.cost + noise * rand32(len(data.cost), seed=7))
    fold, penalties = folds_of(data), tuple(10.0 ** (e / 2) for e in range(-8, 3))
    f = RidgeLearner(penalties, groups=4)(data, fold, 3, seed=0)
    for member in range(3):
        seen = fold != member
        x, y, group = features_of(data.phi[seen]), data.cost[seen].double().numpy(), data.trajectory[seen].numpy() % 4
        errors = dict.fromkeys(penalties, 0.0)
        for penalty in penalties:
            for inside, outside in sklearn.model_selection.LeaveOneGroupOut().split(x, y, group):
                centre, std = x[inside].mean(0), x[inside].std(0, ddof=1)
                reference = sklearn.linear_model.Ridge(alpha=len(inside) * penalty)
                reference.fit((x[inside] - centre) / std, y[inside])
                errors[penalty] += np.abs(reference.predict((x[outside] - centre) / std) - y[outside]).sum()
        assert sorted(errors.values())[1] > 1.0001 * min(errors.values())  # no near-tie
        chosen = RidgeLearner((min(errors, key=lambda penalty: errors[penalty]),))(data, fold, 3, seed=0)
        assert torch.equal(f.coefficients[:, member], chosen.coefficients[:, member])  # type: ignore[index]
        assert f.intercept[member] == chosen.intercept[member]  # type: ignore[index]


def test_ridge_recovers_a_diagonal_quadratic(
    diagonal: Callable[[Tensor], Tensor], trajectories: Callable[..., list[Trajectory]]
) -> None:
    data = Observations.of(trajectories(diagonal))
    exact = RidgeLearner(penalties=(1e-10,))(data, folds_of(data), 3, seed=0)
    i = torch.arange(6)
    expected = torch.cat([0.5 - i / 4, 0.3 * (-1.0) ** i])
    np.testing.assert_allclose(exact.coefficients, expected[:, None].expand(-1, 3), atol=1e-4)  # type: ignore[arg-type]
    np.testing.assert_allclose(exact.intercept, [0.7] * 3, atol=1e-4)  # type: ignore[arg-type]
    default = RidgeLearner()(data, folds_of(data), 3, seed=0)
    new = 0.5 * rand32(50, 6, seed=99)
    np.testing.assert_allclose(default(new), diagonal(new), atol=0.01)


QUICK = NeuralLearner(iterations=15)


@pytest.mark.parametrize("learner", [QUICK, replace(QUICK, nets=1), RidgeLearner()])
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


@pytest.mark.parametrize("learner", [QUICK, RidgeLearner()])
def test_learning_is_reproducible_and_keeps_to_itself(
    smooth: Callable[[Tensor], Tensor],
    trajectories: Callable[..., list[Trajectory]],
    learner: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reseeded: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", reseeded.append)
    data = Observations.of(trajectories(smooth))
    state = torch.get_rng_state()
    first = fit_value_function(data, [learner], folds=3, seed=4).f.state_dict()
    assert torch.equal(torch.get_rng_state(), state)
    assert reseeded == []
    torch.rand(5)
    again = fit_value_function(data, [learner], folds=3, seed=4).f.state_dict()
    assert all(torch.equal(first[key], again[key]) for key in first)
    other = fit_value_function(data, [learner], folds=3, seed=5).f.state_dict()
    assert not all(torch.allclose(first[key], other[key]) for key in first)


@pytest.mark.outcome
def test_neural_learner_learns_a_smooth_function(
    smooth: Callable[[Tensor], Tensor], trajectories: Callable[..., list[Trajectory]]
) -> None:
    data, new = Observations.of(trajectories(smooth, n=80)), 0.5 * rand32(200, 6, seed=99)
    held_out, unseen, errors = [], [], []
    for seed in range(2):
        fit = fit_value_function(data, [NeuralLearner()], seed=seed)
        assert fit.f.quality == fit.candidates["neural"]
        held_out.append(fit.f.quality.spearman)
        errors.append(fit.f.quality.mae / fit.f.quality.constant_mae)
        unseen.append(scipy.stats.spearmanr(fit.f(new), smooth(new)).statistic)
    assert mean(held_out) > 0.8  # at worst 0.97 ± 0.01
    assert mean(errors) < 0.5  # at worst 0.20 ± 0.02
    assert mean(unseen) > 0.8  # at worst 0.98 ± 0.01


def test_the_offline_learner_has_the_papers_weights_of_eq_2() -> None:
    offline = NeuralLearner.offline()
    assert (offline.objective.gamma, offline.objective.beta) == (10, 1)
    assert (offline.iterations, offline.batch_size, offline.nets) == (2000, 64, 1)


@pytest.mark.outcome
def test_the_offline_learner_minimises_eq_2_on_all_trajectories(
    smooth: Callable[[Tensor], Tensor], trajectories: Callable[..., list[Trajectory]]
) -> None:
    offline = NeuralLearner.offline()
    data, learner = Observations.of(trajectories(smooth, n=80)), replace(offline, iterations=600)
    fits = [fit_value_function(data, [learner], seed=seed) for seed in range(2)]
    assert mean(fit.f.quality.spearman for fit in fits) > 0.8  # at worst 0.97 ± 0.01


@pytest.mark.outcome
def test_unsure_labels_count_less(
    smooth: Callable[[Tensor], Tensor], trajectories: Callable[..., list[Trajectory]]
) -> None:
    data = Observations.of(trajectories(smooth, n=80))
    wrong = torch.arange(len(data.cost)) % 3 == 0
    spoilt = replace(data, cost=data.cost + 5 * wrong, sigma=torch.where(wrong, 1000.0, 1.0))
    new = 0.5 * rand32(200, 6, seed=99)
    fold = torch.full_like(data.trajectory, -1)

    def error(labels: Observations, seed: int) -> float:
        f = NeuralLearner(iterations=300)(labels, fold, 1, seed)
        return float((f(new) - smooth(new)).abs().mean().detach())

    told, untold = (
        mean(error(labels, seed) for seed in range(3)) for labels in (spoilt, replace(spoilt, sigma=data.sigma))
    )
    assert told < 0.5 * untold  # at worst 0.08 against 1.30 ± 0.05


@pytest.mark.parametrize(("learner", "tolerance"), [(RidgeLearner(), 1e-5), (NeuralLearner(iterations=100), 0.05)])
def test_a_large_offset_of_the_costs_changes_nothing(
    smooth: Callable[[Tensor], Tensor],
    trajectories: Callable[..., list[Trajectory]],
    learner: Any,
    tolerance: float,
) -> None:
    offset = 2.0**24  # float32 has whole numbers only from there on
    data = Observations.of(trajectories(smooth))
    moved = Observations.of([replace(each, cost=each.cost + offset) for each in trajectories(smooth)])
    f, far = (learner(each, folds_of(each), 3, seed=0).eval() for each in (data, moved))
    new = rand32(30, 6, seed=99)
    difference = (far.members(new) - offset - f.members(new)).abs().max()
    assert difference < tolerance * data.cost.std()
    assert far.members(new).std(0).min() > 0.1 * data.cost.std()
