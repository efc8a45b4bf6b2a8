"""Value functions and their fitting, against plain networks, scikit-learn and naive loops."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats
import sklearn.linear_model
import sklearn.metrics
import sklearn.model_selection
import torch
from torch import Tensor, nn

from metricopt_ext.errors import FileFormatError, ValueFunctionError
from metricopt_ext.tasks.rollout import observation_steps
from metricopt_ext.tasks.trajectory import Trajectory
from metricopt_ext.utils.files import write_tensors
from metricopt_ext.value.fitting import fit_value_function, measure
from metricopt_ext.value.learners import NeuralLearner, RidgeLearner
from metricopt_ext.value.observations import Observations
from metricopt_ext.value.ridge import ridge_path
from metricopt_ext.value.value_function import (
    FILE_FORMAT,
    NeuralValueFunction,
    Quality,
    RidgeValueFunction,
    ValueFunction,
    load_value_function,
)

GOOD = Quality(spearman=0.9, mae=0.01, constant_mae=0.1, points=100, trajectories=40)


def rand(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def neural(dim: int = 5, members: int = 3) -> NeuralValueFunction:
    """Make an untrained f with running statistics, affine weights and cost units of its own."""
    torch.manual_seed(0)
    f = NeuralValueFunction(dim, members)
    with torch.no_grad():
        for norm in f.norms:
            norm.weight.uniform_(0.5, 1.5)
            norm.bias.uniform_(-0.5, 0.5)
            norm.running_mean.uniform_(-0.5, 0.5)
            norm.running_var.uniform_(0.5, 1.5)
        f.cost_mean.fill_(0.4)
        f.cost_std.fill_(0.3)
    return f.eval()


def ridge(dim: int = 5, members: int = 3) -> RidgeValueFunction:
    f = RidgeValueFunction(dim, members)
    f.coefficients.copy_(rand(2 * dim, members, seed=3))
    f.intercept.copy_(rand(members, seed=4))
    return f


each_kind = pytest.mark.parametrize("make", [neural, ridge])


# --- The functions -------------------------------------------------------------------------------------------


def member_network(f: NeuralValueFunction, member: int) -> nn.Sequential:
    """Copy one member's weights into an ordinary network."""
    widths, layers = (f.dim, 64, 32, 32, 16), []
    for i in range(4):
        linear, norm = nn.Linear(widths[i], widths[i + 1]), nn.BatchNorm1d(widths[i + 1])
        mine = slice(member * widths[i + 1], (member + 1) * widths[i + 1])
        linear.weight.data, linear.bias.data = f.linears[i].weight.data[member].T, f.linears[i].bias.data[member]
        for name in ("weight", "bias", "running_mean", "running_var"):
            getattr(norm, name).data = getattr(f.norms[i], name).data[mine].clone()
        layers += [linear, norm, nn.ReLU()]
    head = nn.Linear(16, 1)
    head.weight.data, head.bias.data = f.head.weight.data[member].T, f.head.bias.data[member]
    return nn.Sequential(*layers, head).train(f.training)


@pytest.mark.parametrize("members", [1, 4])
def test_widths_are_the_papers(members: int) -> None:
    f = NeuralValueFunction(7, members)
    shapes = [tuple(linear.weight.shape) for linear in [*f.linears, f.head]]
    assert shapes == [(members, a, b) for a, b in [(7, 64), (64, 32), (32, 32), (32, 16), (16, 1)]]
    assert [norm.num_features for norm in f.norms] == [members * b for b in (64, 32, 32, 16)]


@pytest.mark.parametrize("train", [False, True])
def test_a_member_is_an_ordinary_network(train: bool) -> None:
    f, phi = neural().train(train), rand(20, 5)
    networks = [member_network(f, member) for member in range(3)]
    predicted = f.members(phi)
    assert predicted.shape == (20, 3)
    for member, network in enumerate(networks):
        expected = network(phi).squeeze(1) * 0.3 + 0.4
        torch.testing.assert_close(predicted[:, member], expected, rtol=1e-4, atol=1e-5)
        for i in range(4):
            mine = f.norms[i].running_var.view(3, -1)[member]
            torch.testing.assert_close(mine, network[3 * i + 1].running_var, rtol=1e-4, atol=1e-5)
    assert len({round(p, 4) for p in predicted[0].tolist()}) == 3


def test_features_of_different_inputs_per_member() -> None:
    f, phi = neural().train(), rand(20, 3, 5)
    networks = [member_network(f, member) for member in range(3)]
    features = f.features(phi)
    assert features.shape == (20, 3, 16)
    for member, network in enumerate(networks):
        torch.testing.assert_close(features[:, member], network[:-1](phi[:, member]), rtol=1e-4, atol=1e-5)


def test_weights_are_drawn_as_linear_layers_draw() -> None:
    f = NeuralValueFunction(100, 4)
    for linear, inputs in zip(f.linears, (100, 64, 32, 32), strict=True):
        bound = inputs**-0.5
        assert linear.weight.abs().max() <= bound
        assert linear.weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.05)
        assert bound / 2 < linear.bias.abs().max() <= bound


def test_ridge_is_a_diagonal_quadratic() -> None:
    f, phi = ridge(), rand(7, 5)
    expected = np.zeros((7, 3))
    for n, m in np.ndindex(7, 3):
        expected[n, m] = f.intercept[m]
        for i in range(5):
            expected[n, m] += f.coefficients[i, m] * phi[n, i] + f.coefficients[5 + i, m] * phi[n, i] ** 2
    np.testing.assert_allclose(f.members(phi), expected, rtol=1e-4, atol=1e-5)


@each_kind
@pytest.mark.parametrize("shape", [(), (1,), (6,), (2, 3), (0,)])
def test_f_is_the_mean_of_its_members(make: Any, shape: tuple[int, ...]) -> None:
    f, phi = make(), rand(*shape, 5)
    assert f.members(phi).shape == (*shape, 3)
    assert f(phi).shape == shape
    for index in np.ndindex(*shape):
        one_by_one = f.members(phi[index])
        torch.testing.assert_close(f(phi)[index], one_by_one.sum() / 3, rtol=1e-4, atol=1e-5)


@each_kind
@pytest.mark.parametrize("shape", [(), (6,), (2, 3)])
def test_gradient_is_the_slope(make: Any, shape: tuple[int, ...]) -> None:
    f, phi = make().double(), rand(*shape, 5, dtype=torch.float64)
    with torch.no_grad():
        gradient = f.gradient(phi)
        steps = 1e-6 * torch.eye(5).double()
        slopes = torch.stack([(f(phi + e) - f(phi - e)) / 2e-6 for e in steps], -1)
    assert not gradient.requires_grad
    torch.testing.assert_close(gradient, slopes, rtol=1e-5, atol=1e-7)


@each_kind
def test_gradient_has_phis_type(make: Any) -> None:
    f, phi = make(), rand(4, 5, dtype=torch.float64)
    gradient = f.gradient(phi.clone().requires_grad_(True))
    assert gradient.dtype == torch.float64
    torch.testing.assert_close(gradient, make().double().gradient(phi), rtol=1e-4, atol=1e-5)
    assert all(p.grad is None for p in f.parameters())


@each_kind
@pytest.mark.parametrize("shape", [(4,), (3, 6), (5, 1)])
def test_phi_of_another_dimension(make: Any, shape: tuple[int, ...]) -> None:
    f = make()
    for call in (f, f.gradient):
        with pytest.raises(ValueFunctionError, match=f"dimension {shape[-1]}, this value function was fitted for 5"):
            call(torch.zeros(shape))


@each_kind
def test_domain(make: Any) -> None:
    f, phi = make().train(), rand(41, 5)
    assert f.radius == math.inf
    f.set_domain(phi)
    assert not f.training
    assert not any(p.requires_grad for p in f.parameters())
    assert float(f.radius) == pytest.approx(np.quantile(np.linalg.norm(phi, axis=1), 0.95), rel=1e-5)
    slopes = torch.stack([torch.func.grad(f)(point) for point in phi])
    assert float(f.gradient_floor) == pytest.approx(np.quantile(np.linalg.norm(slopes, axis=1), 0.1), rel=1e-4)


# --- Files ---------------------------------------------------------------------------------------------------


@each_kind
@pytest.mark.parametrize("quality", [None, GOOD])
def test_file_roundtrip(make: Any, quality: Quality | None, tmp_path: Path) -> None:
    path, f, phi = tmp_path / "f.safetensors", make(), rand(9, 5)
    f.set_domain(rand(50, 5))
    f.quality = quality
    f.save(path)
    loaded = load_value_function(path, dim=5)
    assert type(loaded) is type(f)
    assert loaded.state_dict().keys() == f.state_dict().keys()
    assert all(torch.equal(value, f.state_dict()[key]) for key, value in loaded.state_dict().items())
    assert torch.equal(loaded.members(phi), f.members(phi))
    assert (loaded.radius, loaded.gradient_floor) == (f.radius, f.gradient_floor)
    assert loaded.quality == quality
    assert loaded.trusted == (quality is not None)
    assert not loaded.training
    assert not any(p.requires_grad for p in loaded.parameters())


def test_file_of_another_dimension(tmp_path: Path) -> None:
    path = tmp_path / "f.safetensors"
    ridge().save(path)
    with pytest.raises(ValueFunctionError, match=re.escape(str(path)) + r".* dimension 5, the adapter's is 6"):
        load_value_function(path, dim=6)
    assert load_value_function(path).dim == 5


@pytest.mark.parametrize("kept", [0.0, 0.5, 0.99])
def test_truncated_file(kept: float, tmp_path: Path) -> None:
    path = tmp_path / "f.safetensors"
    neural().save(path)
    path.write_bytes(path.read_bytes()[: int(kept * path.stat().st_size)])
    with pytest.raises(FileFormatError, match=re.escape(str(path))):
        load_value_function(path)


def test_file_of_unknown_contents(tmp_path: Path) -> None:
    path = tmp_path / "f.safetensors"
    with pytest.raises(FileFormatError, match="does not exist"):
        load_value_function(path)
    write_tensors(path, {}, FILE_FORMAT, {"kind": "forest", "settings": {}})
    with pytest.raises(
        FileFormatError, match=r"unknown value function 'forest', expected one of \['neural', 'ridge'\]"
    ):
        load_value_function(path)
    write_tensors(path, {}, "another/1", {})
    with pytest.raises(FileFormatError, match="format 'another/1', expected"):
        load_value_function(path)


# --- Quality -------------------------------------------------------------------------------------------------


def test_measure_is_what_scipy_and_sklearn_say() -> None:
    true = (rand(101) * 4).round() / 4  # with ties
    predicted = true + rand(101, seed=2)
    trajectory = torch.arange(101) // 5
    quality = measure(predicted, true, trajectory)
    ranks = [scipy.stats.rankdata(x) for x in (predicted, true)]
    assert quality.spearman == pytest.approx(np.corrcoef(*ranks)[0, 1], abs=1e-6)
    assert quality.mae == pytest.approx(sklearn.metrics.mean_absolute_error(true, predicted), abs=1e-6)
    constants = [sklearn.metrics.mean_absolute_error(true, np.full(101, c)) for c in np.linspace(-4, 4, 1601)]
    assert quality.constant_mae == pytest.approx(min(constants), abs=1e-6)
    assert (quality.points, quality.trajectories) == (101, 21)


@pytest.mark.parametrize("constant", ["predicted", "true"])
def test_measure_of_constants(constant: str) -> None:
    varied, same = rand(10), torch.full((10,), 0.3)
    args = (same, varied) if constant == "predicted" else (varied, same)
    quality = measure(*args, torch.arange(10))
    assert quality.spearman == 0
    assert not quality.trusted


def test_measure_of_a_diverged_fit() -> None:
    predicted = rand(10)
    predicted[3] = math.nan
    quality = measure(predicted, rand(10), torch.arange(10))
    assert (quality.spearman, quality.mae) == (-1, math.inf)
    assert not quality.trusted


@pytest.mark.parametrize(
    ("spearman", "trajectories", "lower"),
    [(0.5, 28, 0.21681), (0.0, 103, -0.16303), (-0.5, 28, -0.70557), (0.9, 7, 0.57148), (0.9, 3, -1.0), (1.0, 0, -1.0)],
)
def test_confidence_bound(spearman: float, trajectories: int, lower: float) -> None:
    quality = replace(GOOD, spearman=spearman, trajectories=trajectories)
    assert quality.spearman_lower == pytest.approx(lower, abs=1e-5)


@pytest.mark.parametrize("spearman", [1.0, -1.0])
def test_perfect_correlation_has_a_bound(spearman: float) -> None:
    assert replace(GOOD, spearman=spearman).spearman_lower == pytest.approx(spearman, abs=1e-4)


@pytest.mark.parametrize(
    ("change", "trusted"),
    [
        ({}, True),
        ({"spearman": 0.3}, True),
        ({"spearman": 0.25}, False),
        ({"spearman": -0.9}, False),
        ({"trajectories": 3}, False),
        ({"mae": 0.1}, False),
        ({"mae": 0.2}, False),
        ({"spearman": math.nan}, False),
        ({"mae": math.nan}, False),
    ],
)
def test_trust(change: dict[str, Any], trusted: bool) -> None:
    quality = replace(GOOD, **change)
    assert quality.trusted is trusted
    f = ridge()
    assert not f.trusted
    f.quality = quality
    assert f.trusted is trusted


def test_random_predictions_are_rarely_trusted() -> None:
    trusted = [measure(rand(40, seed=i), rand(40, seed=1000 + i), torch.arange(40)).trusted for i in range(300)]
    assert sum(trusted) <= 0.05 * 300
    shrunk = [measure(0.1 * rand(40, seed=i), rand(40, seed=1000 + i), torch.arange(40)).trusted for i in range(300)]
    assert sum(shrunk) <= 0.08 * 300
    skilled = [
        measure((true := rand(40, seed=i)) + 0.5 * rand(40, seed=1000 + i), true, torch.arange(40)) for i in range(50)
    ]
    assert all(quality.trusted for quality in skilled)
    few = [replace(quality, trajectories=3) for quality in skilled]
    assert not any(quality.trusted for quality in few)


# --- Observations --------------------------------------------------------------------------------------------


def smooth(phi: Tensor) -> Tensor:
    """A cost that no diagonal quadratic follows."""
    return torch.tanh(phi[..., 0] + 2 * phi[..., 1] * phi[..., 2]) + 0.3 * phi[..., 3] ** 2


def diagonal(phi: Tensor) -> Tensor:
    i = torch.arange(phi.shape[-1])
    return 0.7 + phi @ (0.5 - i / 4).to(phi) + phi**2 @ (0.3 * (-1.0) ** i).to(phi)


def trajectories(
    cost: Any, n: int = 24, d: int = 6, evals: int = 5, rounds: int = 1, dtype: torch.dtype = torch.float32
) -> list[Trajectory]:
    made = []
    for index in range(n):
        walk = 0.5 * rand(1, d, seed=2 * index) + 0.1 * rand(21, d, seed=2 * index + 1).cumsum(0)
        observed = observation_steps(20, evals, 0, index)
        values = cost(walk[observed].double())
        made.append(Trajectory(index * rounds // n, index, walk.to(dtype), torch.zeros(20), observed, values))
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rounds", [1, 3])
def test_observations(rounds: int, dtype: torch.dtype) -> None:
    items = trajectories(diagonal, n=6, rounds=rounds, dtype=dtype)
    data = Observations.of(iter(items))
    assert data.phi.dtype == data.cost.dtype == torch.float32
    used, at = data.where_used(), 0
    for number, item in enumerate(items):
        for step, cost in zip(item.observed.tolist(), item.cost.tolist(), strict=True):
            assert torch.equal(data.phi[at], item.phi[step].float())
            assert float(data.cost[at]) == pytest.approx(cost, rel=1e-6)
            assert (int(data.trajectory[at]), int(data.round[at])) == (number, item.round)
            assert float(data.progress[at]) == pytest.approx(step / 20)
            assert bool(used[at]) == (step >= 10 and (rounds == 1 or item.round > 0))
            at += 1
    assert len(data.phi) == len(data.cost) == len(used) == at


# --- Learners ------------------------------------------------------------------------------------------------


def folds_of(data: Observations, folds: int = 3) -> Tensor:
    return data.trajectory % folds


def features_of(phi: Tensor) -> np.ndarray:
    return np.concatenate([phi.double().numpy(), phi.double().numpy() ** 2], 1)


@pytest.mark.parametrize("penalty", [1e-4, 1e-2, 1.0])
def test_ridge_is_scikit_learns(penalty: float) -> None:
    data = Observations.of(trajectories(smooth))
    fold = folds_of(data)
    f = RidgeLearner(penalties=(penalty,))(data, fold, 3, seed=0)
    new = rand(30, 6, seed=99)
    for member in range(3):
        seen = fold != member
        x = features_of(data.phi[seen])
        mean, std = x.mean(0), x.std(0, ddof=1)
        reference = sklearn.linear_model.Ridge(alpha=len(x) * penalty)
        reference.fit((x - mean) / std, data.cost[seen].double())
        expected = reference.predict((features_of(new) - mean) / std)
        np.testing.assert_allclose(f.members(new)[:, member], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("n", [24, 5])
@pytest.mark.parametrize("noise", [0.0, 0.3, 3.0])
def test_ridge_takes_the_penalty_that_predicts_other_trajectories_best(noise: float, n: int) -> None:
    data = Observations.of(trajectories(smooth, n=n))
    data = replace(data, cost=data.cost + noise * rand(len(data.cost), seed=7))
    fold, penalties = folds_of(data), tuple(10.0 ** (e / 2) for e in range(-8, 3))
    f = RidgeLearner(penalties, groups=4)(data, fold, 3, seed=0)
    for member in range(3):
        seen = fold != member
        x, y, group = features_of(data.phi[seen]), data.cost[seen].double().numpy(), data.trajectory[seen].numpy() % 4
        errors = dict.fromkeys(penalties, 0.0)
        for penalty in penalties:
            for inside, outside in sklearn.model_selection.LeaveOneGroupOut().split(x, y, group):
                mean, std = x[inside].mean(0), x[inside].std(0, ddof=1)
                reference = sklearn.linear_model.Ridge(alpha=len(inside) * penalty)
                reference.fit((x[inside] - mean) / std, y[inside])
                errors[penalty] += np.abs(reference.predict((x[outside] - mean) / std) - y[outside]).sum()
        chosen = RidgeLearner((min(errors, key=lambda penalty: errors[penalty]),))(data, fold, 3, seed=0)
        assert torch.equal(f.coefficients[:, member], chosen.coefficients[:, member])  # type: ignore[index]
        assert f.intercept[member] == chosen.intercept[member]  # type: ignore[index]


def test_ridge_recovers_a_diagonal_quadratic() -> None:
    data = Observations.of(trajectories(diagonal))
    exact = RidgeLearner(penalties=(1e-10,))(data, folds_of(data), 3, seed=0)
    i = torch.arange(6)
    expected = torch.cat([0.5 - i / 4, 0.3 * (-1.0) ** i])
    np.testing.assert_allclose(exact.coefficients, expected[:, None].expand(-1, 3), atol=1e-4)  # type: ignore[arg-type]
    np.testing.assert_allclose(exact.intercept, [0.7] * 3, atol=1e-4)  # type: ignore[arg-type]
    default = RidgeLearner()(data, folds_of(data), 3, seed=0)
    new = 0.5 * rand(50, 6, seed=99)
    np.testing.assert_allclose(default(new), diagonal(new), atol=0.01)


QUICK = NeuralLearner(iterations=15)


@pytest.mark.parametrize("learner", [QUICK, replace(QUICK, nets=1), RidgeLearner()])
@pytest.mark.parametrize("member", [0, 2])
def test_a_member_never_sees_its_fold(learner: Any, member: int) -> None:
    data = Observations.of(trajectories(smooth))
    fold, new = folds_of(data), rand(30, 6, seed=99)
    hidden = (fold == member).nonzero().squeeze(1)
    phi, cost = data.phi.clone(), data.cost.clone()
    phi[hidden] = 5 * rand(len(hidden), 6, seed=5)
    cost[hidden] = cost[hidden.flip(0)]  # the same costs of other points: what standardises costs stays
    before = learner(data, fold, 3, seed=0).eval().members(new).detach()
    after = learner(replace(data, phi=phi, cost=cost), fold, 3, seed=0).eval().members(new).detach()
    blind = torch.arange(before.shape[1]) % 3 == member
    torch.testing.assert_close(after[:, blind], before[:, blind], rtol=1e-4, atol=1e-5)
    assert (after - before)[:, ~blind].abs().mean(0).min() > 1e-3


@pytest.mark.parametrize("learner", [QUICK, RidgeLearner()])
def test_learning_is_reproducible_and_keeps_to_itself(learner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_neural_learner_learns_a_smooth_function() -> None:
    fit = fit_value_function(Observations.of(trajectories(smooth, n=80)), [NeuralLearner()])
    assert fit.f.quality == fit.candidates["neural"]
    assert fit.f.quality.spearman > 0.8
    assert fit.f.quality.mae < 0.5 * fit.f.quality.constant_mae
    assert fit.f.trusted
    new = 0.5 * rand(200, 6, seed=99)
    assert scipy.stats.spearmanr(fit.f(new), smooth(new)).statistic > 0.8


def test_the_offline_learner_minimises_eq_2_on_all_trajectories() -> None:
    offline = NeuralLearner.offline()
    assert (offline.objective.gamma, offline.objective.beta) == (10, 1)
    fit = fit_value_function(Observations.of(trajectories(smooth, n=80)), [replace(offline, iterations=600)])
    assert fit.f.quality is not None
    assert fit.f.quality.spearman > 0.8


def test_unsure_labels_count_less() -> None:
    data = Observations.of(trajectories(smooth, n=80))
    wrong = torch.arange(len(data.cost)) % 3 == 0
    spoilt = replace(data, cost=data.cost + 5 * wrong, sigma=torch.where(wrong, 1000.0, 1.0))
    new = 0.5 * rand(200, 6, seed=99)
    fold = torch.full_like(data.trajectory, -1)
    told, untold = (
        NeuralLearner(iterations=300)(d, fold, 1, 0)(new) for d in (spoilt, replace(spoilt, sigma=data.sigma))
    )
    assert (told - smooth(new)).abs().mean() < 0.5 * (untold - smooth(new)).abs().mean()


# --- Fitting -------------------------------------------------------------------------------------------------


@dataclass
class Spy:
    """Returns a given f and remembers what it was asked with."""

    f: ValueFunction
    asked: Any = None

    def __call__(self, data: Observations, fold: Tensor, folds: int, seed: int) -> ValueFunction:
        self.asked = data, fold, folds, seed
        return self.f


@pytest.mark.parametrize("folds", [2, 4, 5])
def test_folds(folds: int) -> None:
    data, spy = Observations.of(trajectories(smooth, n=11)), Spy(ridge(6, folds))
    fit_value_function(data, [spy], folds=folds, seed=3)
    seen, fold, count, seed = spy.asked
    assert seen is data
    assert (count, seed) == (folds, 3)
    by_trajectory = [set(fold[data.trajectory == t].tolist()) for t in range(11)]
    assert all(len(folds_here) == 1 for folds_here in by_trajectory)
    sizes = np.bincount([folds_here.pop() for folds_here in by_trajectory], minlength=folds)
    assert len(sizes) == folds
    assert sizes.max() - sizes.min() <= 1

    draws = []
    for other in range(5):
        fit_value_function(data, [spy], folds=folds, seed=other)
        draws.append(tuple(spy.asked[1].tolist()))
    assert len(set(draws)) > 1


@pytest.mark.parametrize(("rounds", "members"), [(1, 4), (3, 4), (3, 8)])
def test_quality_is_that_of_held_out_predictions(rounds: int, members: int) -> None:
    data, spy = Observations.of(trajectories(smooth, rounds=rounds)), Spy(ridge(6, members))
    fit = fit_value_function(data, [spy], seed=3)
    fold, predicted, true, on = spy.asked[1], [], [], []
    for i, used in enumerate(data.where_used().tolist()):
        if used:
            predicted.append(float(spy.f.members(data.phi[i])[int(fold[i]) :: 4].mean()))
            true.append(float(data.cost[i]))
            on.append(int(data.trajectory[i]))
    assert 0 < len(predicted) < len(data.phi)
    np.testing.assert_allclose(fit.predicted, predicted, rtol=1e-5)
    np.testing.assert_allclose(fit.true, true)
    quality = fit.f.quality
    assert quality is not None
    assert quality.spearman == pytest.approx(scipy.stats.spearmanr(predicted, true).statistic, abs=1e-5)
    assert quality.mae == pytest.approx(np.abs(np.subtract(predicted, true)).mean(), rel=1e-5)
    assert quality.constant_mae == pytest.approx(np.abs(np.subtract(true, np.median(true))).mean(), rel=1e-5)
    assert quality.points == len(predicted)
    assert quality.trajectories == len(set(on))
    assert float(fit.f.radius) == pytest.approx(float(data.phi.norm(dim=1).quantile(0.95)))


class Broken(RidgeValueFunction):
    kind = "broken"

    def members(self, phi: Tensor) -> Tensor:
        return super().members(phi) * math.nan


class Shifted(RidgeValueFunction):
    """Ranks as its coefficients do, with a constant error."""

    kind = "shifted"

    def members(self, phi: Tensor) -> Tensor:
        return super().members(phi) + 3


def known(kind: type[RidgeValueFunction], noise: float) -> Spy:
    """Make the coefficients of `diagonal`, less exact with more noise."""
    f = kind(6, 4)
    i = torch.arange(6)
    coefficients = torch.cat([0.5 - i / 4, 0.3 * (-1.0) ** i])[:, None]
    f.coefficients.copy_(coefficients + noise * rand(12, 4, seed=8))
    f.intercept.fill_(0.7)
    return Spy(f)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(
    ("learners", "best", "trusted"),
    [
        ([QUICK, RidgeLearner()], "ridge", True),
        ([NeuralLearner(iterations=300), known(RidgeValueFunction, 1.0)], "neural", True),
        ([known(Shifted, 0.0), known(RidgeValueFunction, 0.1)], "ridge", True),  # useful before well ranked
        ([known(Shifted, 0.0), known(RidgeValueFunction, 1.0)], "ridge", False),  # none useful: the smaller error
        ([known(Broken, 0.0), RidgeLearner()], "ridge", True),
        ([known(Broken, 0.0), known(RidgeValueFunction, 2.0)], "ridge", False),
    ],
)
def test_the_better_kind_is_kept(learners: Sequence[Any], best: str, trusted: bool, reverse: bool) -> None:
    fit = fit_value_function(Observations.of(trajectories(diagonal)), learners[::-1] if reverse else learners)
    assert fit.f.kind == best
    assert len(fit.candidates) == 2
    assert fit.f.quality == fit.candidates[best]
    assert fit.f.trusted is trusted


@pytest.mark.parametrize("reverse", [False, True])
def test_of_two_useful_ones_the_better_ranking_is_kept(reverse: bool) -> None:
    exact, near = known(RidgeValueFunction, 0.0), known(RidgeValueFunction, 0.1)
    exact.f.intercept += 0.3  # type: ignore[operator]
    data = Observations.of(trajectories(diagonal))
    alone = [fit_value_function(data, [spy]).f.quality for spy in (exact, near)]
    assert alone[0].spearman > alone[1].spearman
    assert alone[1].mae < alone[0].mae < alone[0].constant_mae
    assert fit_value_function(data, [near, exact][:: -1 if reverse else 1]).f is exact.f


def test_both_kinds_are_fitted_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NeuralLearner.__init__, "__defaults__", (5, *NeuralLearner.__init__.__defaults__[1:]))  # type: ignore[index]
    fit = fit_value_function(Observations.of(trajectories(diagonal)))
    assert set(fit.candidates) == {"neural", "ridge"}
    assert fit.f.members_count == 4


@pytest.mark.parametrize("per_trajectory", [False, True])
def test_noise_is_rarely_trusted(per_trajectory: bool) -> None:
    def noisy(item: Trajectory, rng: torch.Generator) -> Trajectory:
        noise = torch.rand(1 if per_trajectory else len(item.cost), generator=rng, dtype=torch.float64)
        return replace(item, cost=noise.expand(len(item.cost)))

    items, trusted = trajectories(smooth), []
    for seed in range(60):
        rng = torch.Generator().manual_seed(seed)
        data = Observations.of([noisy(item, rng) for item in items])
        trusted.append(fit_value_function(data, [RidgeLearner()], seed=seed).f.trusted)
    assert sum(trusted) <= 6


@pytest.mark.parametrize(("n", "folds"), [(3, 4), (1, 2)])
def test_too_few_trajectories(n: int, folds: int) -> None:
    data = Observations.of(trajectories(smooth, n=n))
    with pytest.raises(ValueFunctionError, match=f"{n} trajectories can't be held out in {folds} folds"):
        fit_value_function(data, [RidgeLearner()], folds=folds)


@pytest.mark.parametrize("folds", [0, 1])
def test_too_few_folds(folds: int) -> None:
    with pytest.raises(ValueFunctionError, match=f"folds is {folds}; it must be at least 2"):
        fit_value_function(Observations.of(trajectories(smooth)), [RidgeLearner()], folds=folds)


def test_constant_costs() -> None:
    data = Observations.of(trajectories(lambda phi: torch.full((len(phi),), 0.125)))
    with pytest.raises(ValueFunctionError, match=r"all 120 observed costs equal 0\.125: .* does not react to phi"):
        fit_value_function(data, [RidgeLearner()])


def test_fitted_in_double_precision_models() -> None:
    data = Observations.of(trajectories(diagonal, dtype=torch.float64))
    fit = fit_value_function(data, [QUICK, RidgeLearner()])
    assert fit.f.gradient(rand(3, 6, dtype=torch.float64)).dtype == torch.float64


@pytest.mark.parametrize(("n", "p"), [(40, 7), (12, 30), (20, 20)])
def test_ridge_paths_are_scikit_learns(n: int, p: int) -> None:
    x, y = rand(n, p, seed=1).double() * 3 + 1, rand(n, seed=2).double()
    penalties = [1e-4, 0.1, 10.0]
    scale = x.std(0).numpy()
    z = (x.numpy() - x.mean(0).numpy()) / scale
    for (coefficients, intercept), penalty in zip(ridge_path(x, y, penalties), penalties, strict=True):
        reference = sklearn.linear_model.Ridge(alpha=penalty * n).fit(z, y.numpy())
        np.testing.assert_allclose(coefficients.numpy(), reference.coef_ / scale, rtol=1e-6, atol=1e-9)
        np.testing.assert_allclose((x @ coefficients + intercept).numpy(), reference.predict(z), rtol=1e-6)
