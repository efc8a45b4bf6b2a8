"""Interpolation in time: against scikit-learn, against naive loops, and on data whose answer is known."""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel

from helpers.evaluations import told
from metricopt_ext.tasks.trajectories import Trajectory
from metricopt_ext.value.interpolation import GaussianProcess, Skill
from metricopt_ext.value.labels import GaussianProcessLabels

PLAIN = GaussianProcess(length_scale=0.3, output_scale=1.7, noise=0.02, mean=0.4, std=0.1)
PROCESSES = [
    PLAIN,
    replace(PLAIN, level_scale=2.5),
    replace(PLAIN, level_scale=0.3, noise=1e-4),
    replace(PLAIN, length_scale=0.02, mean=-3.0, std=1e3),
]


def reference(process: GaussianProcess, steps: int, observed: Any, cost: Any) -> GaussianProcessRegressor:
    kernel = ConstantKernel(process.output_scale) * RBF(process.length_scale)
    if process.level_scale:
        kernel = kernel + ConstantKernel(process.level_scale)
    regressor = GaussianProcessRegressor(kernel, alpha=process.noise, optimizer=None)
    targets = (np.asarray(cost) - process.mean) / process.std
    return regressor.fit((np.asarray(observed) / steps)[:, None], targets)


# --- Against scikit-learn --------------------------------------------------------------------------------------


@pytest.mark.parametrize("process", PROCESSES)
def test_posterior_is_sklearns(mixed: Callable[..., list[Trajectory]], process: GaussianProcess) -> None:
    trajectories = mixed()
    posteriors = process.posterior(trajectories)
    assert len(posteriors) == len(trajectories)
    for trajectory, (mean, std) in zip(trajectories, posteriors, strict=True):
        steps = len(trajectory.phi) - 1
        gp = reference(process, steps, trajectory.observed, trajectory.cost)
        expected, spread = gp.predict((np.arange(steps + 1) / steps)[:, None], return_std=True)
        assert mean.dtype == std.dtype == torch.float64
        assert not mean.requires_grad
        np.testing.assert_allclose(mean, process.mean + process.std * expected, rtol=1e-9, atol=1e-9 * process.std)
        np.testing.assert_allclose(std, process.std * spread, rtol=1e-7, atol=1e-9 * process.std)


@pytest.mark.parametrize("process", PROCESSES)
def test_log_likelihood_is_sklearns(mixed: Callable[..., list[Trajectory]], process: GaussianProcess) -> None:
    expected = 0.0
    for t in mixed():
        gp = reference(process, len(t.phi) - 1, t.observed, t.cost)
        expected += gp.log_marginal_likelihood_value_ - len(t.cost) * math.log(process.std)
    assert process.log_likelihood(mixed()) == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("process", PROCESSES)
def test_left_out_predictions_are_those_of_a_refit(
    mixed: Callable[..., list[Trajectory]], process: GaussianProcess
) -> None:
    for trajectory, predicted in zip(mixed(), process.predict_left_out(mixed()), strict=True):
        steps, times = len(trajectory.phi) - 1, trajectory.observed / (len(trajectory.phi) - 1)
        assert predicted.dtype == torch.float64
        for k in range(len(times)):
            others = [i for i in range(len(times)) if i != k]
            gp = reference(process, steps, trajectory.observed[others], trajectory.cost[others])
            expected = process.mean + process.std * gp.predict((times[k : k + 1].double())[:, None])
            np.testing.assert_allclose(predicted[k], expected[0], rtol=1e-6, atol=1e-6 * process.std)


# --- Fitting -----------------------------------------------------------------------------------------------------


@pytest.mark.outcome
@pytest.mark.parametrize("level", [0.0, 1.0, 30.0])
def test_fit_recovers_hyper_parameters(sampled: Callable[..., list[Trajectory]], level: float) -> None:
    data = sampled(300, 8, length_scale=0.15, noise=0.1, level=level)
    process = GaussianProcess.fit(data)
    assert process.length_scale == pytest.approx(0.15, rel=0.1)  # 0.148 ± 0.002
    assert process.noise_std == pytest.approx(0.1, rel=0.2)  # 0.097 ± 0.003
    assert process.std**2 * process.output_scale == pytest.approx(1, rel=0.2)  # 0.97 ± 0.04
    # 0.14 ± 0.12, 1.02 ± 0.03 and 30.0 ± 1.0
    assert process.std * math.sqrt(process.level_scale) == pytest.approx(level, rel=0.15, abs=0 if level else 0.6)


@pytest.mark.parametrize(("evals", "length_scale", "level"), [(6, 0.4, 1.0), (10, 0.06, 0.0)])
def test_no_grid_point_is_more_likely(
    sampled: Callable[..., list[Trajectory]], evals: int, length_scale: float, level: float
) -> None:
    data = sampled(12, evals, length_scale=length_scale, noise=0.02, level=level)
    fitted = GaussianProcess.fit(data)
    best = fitted.log_likelihood(data)
    grid = {
        "length_scale": (0.02, 0.06, 0.2, 0.6, 2.0),
        "output_scale": (0.1, 1.0, 10.0),
        "noise": (1e-3, 1e-2, 0.1, 1.0),
        "level_scale": (1e-3, 1.0, 30.0),
    }
    for values in itertools.product(*grid.values()):
        other = replace(fitted, **dict(zip(grid, values, strict=True)))
        assert other.log_likelihood(data) <= best + 1e-5


# --- Awkward trajectories ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("others", [[], [0.7] * 3])
def test_constant_trajectories_only(along: Callable[..., Trajectory], others: list[float]) -> None:
    data = [along(9, [0, 4, 9], [0.25] * 3, index=i) for i in range(3)]
    data += [along(9, [0, 2, 5, 9], [cost] * 4, index=9) for cost in others]
    process = GaussianProcess.fit(data)
    for trajectory, (mean, std) in zip(data, process.posterior(data), strict=True):
        assert torch.equal(mean, trajectory.cost[:1].expand(10))
        assert not std.any()
    labels = GaussianProcessLabels(always=True)(data)
    assert (labels.sigma > 0).all()
    assert not process.leave_one_out(data).skilful


@pytest.mark.parametrize("gap", [1e-15, 1e-12, 1e-6])
def test_nearly_constant_trajectories(along: Callable[..., Trajectory], gap: float) -> None:
    data = [along(20, [0, 7, 8, 20], [0.5, 0.5, 0.5 + i * gap, 0.5], index=i) for i in range(5)]
    data.append(along(20, [0, 19, 20], [0.9, 0.9, 0.9 - gap], index=5))
    labels = GaussianProcessLabels(always=True)(data)
    assert labels.cost.isfinite().all()
    assert (labels.sigma > 1e-6).all()  # in proportion to the costs, not to their rounding
    assert ((labels.cost - torch.tensor([0.5] * 5 + [0.9])[labels.trajectory]).abs() < 100 * gap + 1e-3).all()


# --- Skill ---------------------------------------------------------------------------------------------------------


@pytest.mark.outcome
@pytest.mark.parametrize("level", [0.0, 0.5, 10.0])
def test_noise_shows_no_skill(noise_only: Callable[..., list[Trajectory]], level: float) -> None:
    skills = [GaussianProcess.fit(data).leave_one_out(data) for data in (noise_only(seed, level) for seed in range(5))]
    assert np.mean([skill.skill for skill in skills]) < 0.12  # 0.02 ± 0.02
    assert sum(skill.skilful for skill in skills) < 2  # 0.14 ± 0.37


@pytest.mark.outcome
@pytest.mark.parametrize("level", [0.0, 10.0])
def test_smooth_curves_show_skill(sampled: Callable[..., list[Trajectory]], level: float) -> None:
    skills = [
        GaussianProcess.fit(data).leave_one_out(data)
        for data in (sampled(12, 8, length_scale=0.3, noise=0.05, level=level, seed=seed) for seed in range(4))
    ]
    assert all(skill.skilful for skill in skills)  # in each of 48 runs
    assert np.mean([skill.skill for skill in skills]) > 0.5  # 0.86 ± 0.02


def test_skill_is_its_definition(along: Callable[..., Trajectory], mixed: Callable[..., list[Trajectory]]) -> None:
    data = [
        replace(t, evaluations=told(t.cost + 0.1 * t.index)) for t in mixed() if len(t.cost) > 2
    ]  # with levels of their own
    skill = PLAIN.leave_one_out([*data, along(10, [0, 10], [0.1, 0.2]), along(10, [0, 5, 10], [0.3] * 3)])
    means = np.array([float(t.cost.mean()) for t in data])
    freedom = sum(len(t.cost) - 1 for t in data)
    within = sum(float(((t.cost - t.cost.mean()) ** 2).sum()) for t in data) / freedom
    between = max(means.var() - within * np.mean([1 / len(t.cost) for t in data]), 0)
    overall = float(torch.cat([t.cost for t in data]).mean())
    errors: list[list[list[float]]] = []
    for t, predicted in zip(data, PLAIN.predict_left_out(data), strict=True):
        errors.append([])
        for k in range(1, len(t.cost) - 1):
            others = np.delete(t.cost.numpy(), k)
            shrunk = overall + between / (between + within / len(others)) * (others.mean() - overall)
            errors[-1].append([abs(guess - float(t.cost[k])) for guess in (float(predicted[k]), shrunk)])
    flat = np.concatenate([np.array(of_one) for of_one in errors])
    np.testing.assert_allclose([skill.gp_mae, skill.constant_mae], flat.mean(0), rtol=1e-9)
    gains = [np.mean([e[1] - e[0] for e in of_one]) for of_one in errors]
    assert skill.gain_error == pytest.approx(np.std(gains, ddof=1) / len(gains) ** 0.5)
    assert skill.skill == pytest.approx(1 - skill.gp_mae / skill.constant_mae)


@pytest.mark.parametrize(
    ("gp", "error", "skilful"), [(0.5, 0.1, True), (0.5, 0.3, False), (0.95, 0.001, False), (1.2, 0.001, False)]
)
def test_skill_needs_size_and_certainty(gp: float, error: float, skilful: bool) -> None:
    assert Skill(gp, 1.0, error).skilful is skilful
