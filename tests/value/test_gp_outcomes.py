"""The process of several outcomes: each is what it would be alone, and the metric is what they make together."""

import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from scipy.stats import multivariate_normal, norm
from torch import Tensor

from helpers.tensors import rand
from metricopt_ext.tasks.combine import Combination, Combine
from metricopt_ext.value.gp import (
    EXPONENTS,
    LENGTH_PRIOR,
    LENGTHS,
    NOISE_PRIOR,
    NOISES,
    GPLearner,
    GPValueFunction,
    Hyperparameters,
    Spectrum,
    rbf,
    trend_of,
)

N, D = 20, 4
TRANSFORM = 0.4 * torch.eye(D, dtype=torch.float64) + 0.1 * rand(D, D, seed=9)
MIXED = (0.1, 0.8, 0.1)
AT = rand(7, D, seed=5)


def data(n: int = N, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Points, ``n x 4``, and three costs, each in a unit of its own, and each the largest somewhere."""
    phi = rand(n, D, seed=seed)
    bowls = torch.stack([(phi - rand(D, seed=50 + each)).square().sum(1) for each in range(3)], 1)
    units = torch.tensor([1.0, 1.6, 0.7], dtype=torch.float64)
    return phi, units * ((bowls - bowls.mean(0)) / 4 + 0.2 * rand(n, 3, seed=seed + 100))


def conditioned(
    combine: Combine | None = None, sign: int = 1, noise: Any = MIXED, outcomes: int = 3, seed: int = 0
) -> tuple[GPValueFunction, Tensor, Tensor]:
    phi, costs = data(seed=seed)
    combination = None if combine is None else Combination(combine, sign)
    return GPValueFunction.conditioned(phi, costs[:, :outcomes], TRANSFORM, noise, combination), phi, costs


def correlation(a: Tensor, b: Tensor, transform: Tensor = TRANSFORM) -> np.ndarray:
    """The kernel, naively."""
    za, zb = (a @ transform).numpy(), (b @ transform).numpy()
    return np.array([[math.exp(-0.5 * float(((x - y) ** 2).sum())) for y in zb] for x in za])


class Alone(NamedTuple):
    """The process of one outcome at `AT`, by a joint normal of all that is observed; in the outcome's own unit."""

    mean: np.ndarray
    std: np.ndarray
    variance: float
    noise: float


def alone(phi: Tensor, cost: Tensor, noise: float) -> Alone:
    y, kernel = cost.numpy(), correlation(phi, phi) + noise * np.eye(len(phi))
    inverse = np.linalg.inv(kernel)
    constant = (inverse @ y).sum() / inverse.sum()
    variance = float((y - constant) @ inverse @ (y - constant) / len(y))
    cross = correlation(AT, phi)
    mean = constant + cross @ inverse @ (y - constant)
    left = 1 - np.einsum("ij,jk,ik->i", cross, inverse, cross)
    every = torch.cat([phi, AT[:1]])
    joint = variance * (correlation(every, every) + noise * np.diag([1.0] * len(y) + [0.0]))
    seen = multivariate_normal.logpdf(y, np.full(len(y), constant), variance * kernel)
    for value in (mean[0], mean[0] + 0.3):  # Bayes' rule, by scipy
        both = multivariate_normal.logpdf([*y, value], np.full(len(y) + 1, constant), joint)
        own = norm.logpdf(value, mean[0], math.sqrt(variance * left[0]))
        assert both - seen == pytest.approx(own, abs=1e-6)
    return Alone(mean, np.sqrt(variance * left), variance, math.sqrt(variance * noise))


def all_alone(phi: Tensor, costs: Tensor, noises: tuple[float, ...] = MIXED) -> list[Alone]:
    return [alone(phi, cost, noise) for cost, noise in zip(costs.T, noises, strict=True)]


def in_own_units(f: GPValueFunction, phi: Tensor) -> np.ndarray:
    """The means of the outcomes' costs, ``k x m``."""
    return (f.outcome_mean + f.outcome_std * f.outcomes(phi)).numpy()


# --- The posterior -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("noises", [MIXED, (0.8, 0.1, 0.1), (1e-3, 3.2, 0.1), (0.2, 0.2, 0.2)])
def test_each_outcome_is_what_it_would_be_alone(noises: tuple[float, ...]) -> None:
    f, phi, costs = conditioned("worst", noise=noises)
    each = all_alone(phi, costs, noises)
    np.testing.assert_allclose(in_own_units(f, AT), np.stack([one.mean for one in each], 1), rtol=0, atol=1e-9)
    np.testing.assert_allclose(f.std(AT).numpy(), np.stack([one.std for one in each], 1), rtol=1e-8)
    left = np.stack([(one.std**2) / one.variance for one in each], 1)
    np.testing.assert_allclose(f.unknown(AT).numpy(), left, rtol=1e-8)
    assert not np.allclose(left[:, 0], left[:, 1], rtol=0.1) or len({*noises}) == 1


def test_an_outcome_among_others_is_as_the_only_one() -> None:
    f, phi, costs = conditioned("worst")
    for at, noise in enumerate(MIXED):
        single = GPValueFunction.conditioned(phi, costs[:, at], TRANSFORM, noise)
        torch.testing.assert_close(f.outcomes(AT)[:, at], single.mean(AT), rtol=0, atol=1e-12)
        torch.testing.assert_close(f.std(AT)[:, at], single.std(AT)[:, 0], rtol=1e-12, atol=0)


def test_an_outcome_that_does_not_vary_stays_what_it_is() -> None:
    phi, costs = data()
    costs[:, 1] = 0.7
    f = GPLearner(1.0, Spectrum.flat(D))(phi, costs, combination=Combination("mean", 1))
    np.testing.assert_allclose(in_own_units(f, AT)[:, 1], 0.7, rtol=1e-12)
    assert float(f.std(AT)[:, 1].max()) < 1e-9
    without = GPLearner(1.0, Spectrum.flat(D))(phi, costs[:, [0, 2]], combination=Combination("mean", 1))
    np.testing.assert_allclose(in_own_units(f, AT)[:, [0, 2]], in_own_units(without, AT), rtol=0, atol=1e-9)
    expected = (2 * without.members(AT) + 0.7) / 3
    torch.testing.assert_close(f.members(AT), expected, rtol=1e-12, atol=1e-12)


# --- What they make together -------------------------------------------------------------------------------------


def harmonic(values: Tensor) -> Tensor:
    """A harmonic mean of what is made positive; it is no function of a sum."""
    return 1 / (1 / values.exp()).mean(-1)


@pytest.mark.parametrize("sign", [1, -1])
def test_the_worst_is_that_of_the_means(sign: int) -> None:
    """The least value where higher is better, else the largest: of costs it is the largest."""
    f, phi, costs = conditioned("worst", sign)
    means = np.stack([one.mean for one in all_alone(phi, costs)], 1)
    worst = sign * (max if sign > 0 else min)(list((sign * means).T), key=lambda row: row[0])[0]
    found = f.members(AT)[:, 0].numpy()
    assert found[0] == pytest.approx(worst, abs=1e-9)
    np.testing.assert_allclose(found, means.max(1), rtol=0, atol=1e-9)
    assert len({*means.argmax(1).tolist()}) > 1  # else it would not tell the worst from one of them
    np.testing.assert_allclose(f(AT).numpy(), found, rtol=1e-5)
    assert float(f.cost_mean) == pytest.approx(float(costs.max(1).values.mean()), rel=1e-12)
    assert float(f.cost_std) == pytest.approx(float(costs.max(1).values.std()), rel=1e-12)
    np.testing.assert_allclose(f.mean(AT).numpy(), (found - float(f.cost_mean)) / float(f.cost_std), rtol=1e-9)


@pytest.mark.parametrize("sign", [1, -1])
def test_a_mean_of_equal_noises_is_the_process_of_the_mean(sign: int) -> None:
    f, phi, costs = conditioned("mean", sign, noise=0.2)
    whole = GPValueFunction.conditioned(phi, costs.mean(1), TRANSFORM, 0.2)
    torch.testing.assert_close(f.members(AT), whole.members(AT), rtol=0, atol=1e-12)
    torch.testing.assert_close(f.mean(AT), whole.mean(AT), rtol=0, atol=1e-12)
    torch.testing.assert_close(f.gradient(AT), whole.gradient(AT), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("sign", [1, -1])
def test_a_function_gets_values_in_their_own_units(sign: int) -> None:
    f, phi, costs = conditioned(harmonic, sign)
    values = sign * np.stack([one.mean for one in all_alone(phi, costs)], 1)
    expected = sign / np.exp(-values).mean(1)
    np.testing.assert_allclose(f.members(AT)[:, 0].numpy(), expected, rtol=1e-9)


@pytest.mark.parametrize(
    ("combine", "sign"), [("worst", 1), ("worst", -1), ("mean", -1), (harmonic, 1), (harmonic, -1)]
)
def test_gradients_are_finite_differences(combine: Combine, sign: int) -> None:
    f, step = conditioned(combine, sign)[0], 1e-5
    sample = f.deviations(2, torch.Generator().manual_seed(0))
    for value in (f.mean, lambda phi: sample(phi)[:, 1]):
        point = AT.clone().requires_grad_(True)
        (found,) = torch.autograd.grad(value(point).sum(), point)
        for row, column in itertools.product(range(len(AT)), range(D)):
            moved = torch.zeros_like(AT)
            moved[row, column] = step
            slope = (value(AT + moved) - value(AT - moved)).sum() / (2 * step)
            assert float(found[row, column]) == pytest.approx(float(slope), rel=1e-6, abs=1e-6)


def test_the_noise_of_an_observation_is_that_of_what_counts_there() -> None:
    """Of a mean each outcome's counts its share, of a worst that of the worst alone, of a function its slope."""
    phi, costs = data()
    each = all_alone(phi, costs)
    noises, means = np.array([one.noise for one in each]), np.stack([one.mean for one in each], 1)
    mean, worst, function = (conditioned(combine, -1)[0] for combine in ("mean", "worst", harmonic))
    slopes = np.exp(means) / 3 / np.exp(means).mean(1, keepdims=True) ** 2  # of 1 / mean(exp(cost)), values = -costs
    for at, point in enumerate(AT):
        assert mean.noise_std(point) == pytest.approx(math.sqrt((noises**2).sum()) / 3, rel=1e-9)
        assert worst.noise_std(point) == pytest.approx(noises[means[at].argmax()], rel=1e-9)
        assert function.noise_std(point) == pytest.approx(math.sqrt(((slopes[at] * noises) ** 2).sum()), rel=1e-9)


# --- Samples -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("combine", "sign"), [("worst", 1), ("worst", -1), (harmonic, -1)])
def test_a_sample_of_the_cost_is_made_of_one_of_each_outcome(combine: Combine, sign: int) -> None:
    f = conditioned(combine, sign)[0]
    drawn = f.outcome_deviations(5, torch.Generator().manual_seed(3))(AT).numpy()
    assert drawn.shape == (7, 5, 3)
    means, units = in_own_units(f, AT)[:, None], f.outcome_std.numpy()
    whole: Callable[[Any], Any] = lambda costs: f.combination.cost(torch.as_tensor(costs)).numpy()  # type: ignore[union-attr]  # noqa: E731
    expected = (whole(means + units * drawn) - whole(means)) / float(f.cost_std)
    found = f.deviations(5, torch.Generator().manual_seed(3))(AT).numpy()
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-9)
    assert np.ptp(found, axis=1).min() > 1e-3


def test_samples_are_certain_where_an_outcome_was_observed_without_noise() -> None:
    """To their noise, of all 3 x 20 x 50 draws; elsewhere they deviate, and each outcome by its own."""
    f = conditioned("worst", noise=(1e-3, 3.2, 1e-3))[0]
    drawn = f.outcome_deviations(50, torch.Generator().manual_seed(3))
    at_points, away = drawn(f.points), drawn(f.points + 0.7)
    noise = (f.variance * f.noise).sqrt()
    assert (at_points.abs().amax((0, 1)) < 5 * noise).all()
    assert (away.abs().amax((0, 1)) > 10 * noise)[[0, 2]].all()
    assert float(torch.corrcoef(away[..., [0, 2]].flatten(0, 1).T)[0, 1].abs()) < 0.3


@pytest.mark.outcome
def test_samples_of_outcomes_have_their_covariances_and_are_independent() -> None:
    """Over 4 seeds of 2,000 samples: of few features the prior is itself a little off, as of one outcome."""
    f, count = conditioned("worst")[0], 2000
    at, exact = torch.cat([AT[:2], AT[:1] + 4]), []
    cross, prior = f.kernel(at), rbf(at @ f.transform, at @ f.transform)
    for variance, noise in zip(f.variance, f.noise, strict=True):
        kernel = f.kernel(f.points) + noise * torch.eye(N, dtype=torch.float64)
        exact.append(variance * (prior - cross @ torch.linalg.solve(kernel, cross.T)))
    whole = torch.block_diag(*exact)
    found = torch.zeros_like(whole)
    for seed in range(4):
        samples = f.outcome_deviations(count, torch.Generator().manual_seed(seed), features=1024)(at)
        flat = samples.permute(2, 0, 1).flatten(0, 1)
        found += flat @ flat.T / count / 4
    scale = whole.diagonal().sqrt()
    assert ((found - whole) / (scale[:, None] * scale)).abs().max() < 0.12


# --- Hyper-parameters --------------------------------------------------------------------------------------------


class Scored(NamedTuple):
    """The likelihood of one outcome on a kernel of the grid at one noise, prior included, and that noise as a cost."""

    score: float
    std: float


def reference(
    phi: Tensor, costs: Tensor, learner: GPLearner, least: tuple[float, ...] = (0.0, 0.0, 0.0)
) -> tuple[Hyperparameters, float]:
    """The choice by brute force, each likelihood by scipy, and by how much it is ahead of all others."""

    def scored(kernel: np.ndarray, y: np.ndarray, noise: float, unit: float) -> Scored:
        noisy = kernel + noise * np.eye(len(y))
        inverse = np.linalg.inv(noisy)
        constant = (inverse @ y).sum() / inverse.sum()
        amplitude = (y - constant) @ inverse @ (y - constant) / len(y)
        likelihood = float(multivariate_normal.logpdf(y, np.full(len(y), constant), amplitude * noisy))
        median, spread = NOISE_PRIOR
        return Scored(likelihood - 0.5 * (math.log(noise / median) / spread) ** 2, unit * math.sqrt(amplitude * noise))

    found: list[tuple[int, float, Hyperparameters]] = []
    margins: dict[Hyperparameters, float] = {}
    for exponent, length in itertools.product(EXPONENTS, LENGTHS):
        kernel = correlation(phi, phi, learner.transform(Hyperparameters(exponent, length, ())))
        total, known, noises, margin = 0.0, 0, [], math.inf
        for cost, enough in zip(costs.numpy().T, least, strict=True):
            unit = float(cost.std(ddof=1))
            tried = {noise: scored(kernel, (cost - cost.mean()) / unit, noise, unit) for noise in NOISES}
            allowed = {noise: each for noise, each in tried.items() if each.std >= enough}
            known += bool(allowed)
            scores = {noise: each.score for noise, each in (allowed or tried).items()}
            likeliest = max(scores, key=lambda noise: scores[noise])
            total, noises = total + scores.pop(likeliest), [*noises, likeliest]
            margin = min([margin, *(tried[likeliest].score - each for each in scores.values())])
        median, spread = LENGTH_PRIOR
        total -= math.sqrt(costs.shape[1]) * 0.5 * (math.log(length / median) / spread) ** 2
        chosen = Hyperparameters(exponent, length, tuple(noises))
        found.append((known, total, chosen))
        margins[chosen] = margin
    best, next_best = sorted(found, key=lambda each: each[:2], reverse=True)[:2]
    ahead = math.inf if best[0] > next_best[0] else best[1] - next_best[1]
    return best[2], min(ahead, margins[best[2]])


def spectrum() -> Spectrum:
    weights = 4.0 ** -torch.arange(D, dtype=torch.float64)
    return Spectrum(weights, torch.linalg.qr(rand(D, D, seed=3))[0])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("n", [8, 20])
def test_the_grids_choice_is_that_of_brute_force(n: int, seed: int) -> None:
    """The kernel is the likeliest of all outcomes together, and each outcome's noise its own on that kernel."""
    phi, costs = data(n, seed)
    costs[:, 1] += 1.5 * rand(n, seed=seed + 200)
    learner = GPLearner(0.7, spectrum())
    chosen, ahead = reference(phi, costs, learner)
    assert ahead > 1e-6  # no near-tie
    assert learner.most_likely(phi, costs) == chosen
    f = learner(phi, costs, combination=Combination("worst", 1))
    assert torch.equal(f.transform, learner.transform(chosen))
    assert f.noise.tolist() == list(chosen.noise)


@pytest.mark.parametrize("at", [0, 1, 2])
def test_noise_that_is_known_is_the_least_of_its_own_outcome(at: int) -> None:
    """As large as two thirds of the outcome's spread: without being told, each would have less."""
    phi, costs = data()
    costs[:, 1] = phi.sin().sum(1)
    learner = GPLearner(0.7, spectrum())
    least = tuple(0.66 * float(costs[:, at].std()) * (each == at) for each in range(3))
    chosen, ahead = reference(phi, costs, learner, least)
    assert ahead > 1e-6
    assert learner.most_likely(phi, costs, torch.tensor(least)) == chosen
    assert chosen.noise[at] > learner.most_likely(phi, costs).noise[at]
    f = learner(phi, costs, least_noise=torch.tensor(least), combination=Combination("mean", 1))
    own = f.outcome_std * (f.variance * f.noise).sqrt()
    assert (own >= torch.tensor(least)).all()


def test_a_kernel_that_leaves_as_much_noise_as_is_known_comes_first() -> None:
    """Where a grid's noises can't be as large, they are chosen as if nothing were known."""
    phi, costs = data()
    learner, least = GPLearner(0.7, spectrum()), (0.0, 0.9 * float(costs[:, 1].std()), 100.0)
    chosen, ahead = reference(phi, costs, learner, least)
    assert ahead > 1e-6
    assert learner.most_likely(phi, costs, torch.tensor(least, dtype=torch.float64)) == chosen


# --- What losses promise -----------------------------------------------------------------------------------------


PROMISED = torch.stack([rand(D, seed=71), torch.zeros(D, dtype=torch.float64), 2 * rand(D, seed=73)])


def promising(slope: float, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Points, and costs that rise along what is promised, besides what nobody promised."""
    phi, costs = data(seed=seed)
    return phi, 0.3 * costs + slope * phi @ PROMISED.T


@pytest.mark.parametrize("slope", [0.02, 0.4, 5.0])
def test_the_slope_is_that_of_least_squares_over_all_outcomes(slope: float) -> None:
    """Numpy's, with an intercept for each outcome."""
    phi, costs = promising(slope, seed=4)
    expected = (phi @ PROMISED.T).numpy()
    design = np.concatenate([expected.T.reshape(-1, 1), np.kron(np.eye(3), np.ones((N, 1)))], 1)
    found = np.linalg.lstsq(design, costs.numpy().T.reshape(-1), rcond=None)[0][0]
    assert found > 0
    np.testing.assert_allclose(trend_of(PROMISED, phi, costs).numpy(), found * PROMISED.numpy(), rtol=1e-10)


def test_a_promise_that_is_not_kept_promises_nothing() -> None:
    phi, costs = promising(-2.0)
    assert torch.equal(trend_of(PROMISED, phi, costs), torch.zeros_like(PROMISED))
    assert torch.equal(trend_of(0 * PROMISED, phi, costs), torch.zeros_like(PROMISED))
    learner, chosen = GPLearner(1.0, Spectrum.flat(D)), Hyperparameters(0.0, 2.0, MIXED)
    worst = Combination("worst", 1)
    kept, plain = (learner(phi, costs, chosen, combination=worst, promised=each) for each in (PROMISED, None))
    assert (kept.explained, plain.explained) == (0.0, None)
    assert torch.equal(kept.members(AT), plain.members(AT))


@pytest.mark.parametrize("sign", [1, -1])
def test_f_of_a_promise_is_the_process_of_the_rest_besides_it(sign: int) -> None:
    phi, costs = promising(0.4)
    learner, chosen, worst = GPLearner(1.0, spectrum()), Hyperparameters(0.5, 2.0, MIXED), Combination("worst", sign)
    f = learner(phi, costs, chosen, combination=worst, promised=PROMISED)
    trend = trend_of(PROMISED, phi, costs)
    rest = GPValueFunction.conditioned(phi, costs - phi @ trend.T, learner.transform(chosen), MIXED, worst)
    means = torch.from_numpy(in_own_units(rest, AT)) + AT @ trend.T
    torch.testing.assert_close(torch.from_numpy(in_own_units(f, AT)), means, rtol=0, atol=1e-10)
    torch.testing.assert_close(f.members(AT)[:, 0], means.amax(1), rtol=0, atol=1e-10)
    torch.testing.assert_close(f.std(AT), rest.std(AT), rtol=1e-12, atol=0)
    whole = costs.amax(1)
    assert float(f.cost_std) == pytest.approx(float(whole.std()), rel=1e-12), "f's unit is the metric's, not the rest's"
    share = 1 - (costs - phi @ trend.T).var(0).sum() / costs.var(0).sum()
    assert f.explained == pytest.approx(float(share), rel=1e-9)
    assert f.explained is not None
    assert 0.05 < f.explained < 0.95
    point = AT.clone().requires_grad_(True)
    (found,) = torch.autograd.grad(f.members(point).sum(), point)
    step = 1e-5 * torch.eye(D, dtype=torch.float64)
    slopes = [(f.members(AT + each) - f.members(AT - each))[:, 0] / 2e-5 for each in step]
    torch.testing.assert_close(found, torch.stack(slopes, 1), rtol=1e-6, atol=1e-6)


def test_hyper_parameters_are_those_of_what_is_left_to_learn() -> None:
    phi, costs = promising(0.4)
    learner = GPLearner(0.7, spectrum())
    rest = costs - phi @ trend_of(PROMISED, phi, costs).T
    chosen, ahead = reference(phi, rest, learner)
    assert ahead > 1e-6
    assert learner.most_likely(phi, costs, promised=PROMISED) == chosen
    assert chosen != learner.most_likely(phi, costs)


def test_outcomes_that_go_just_as_promised_are_explained_and_known_everywhere() -> None:
    phi = rand(N, D)
    costs = torch.tensor([3.0, -1.0, 0.5], dtype=torch.float64) + 0.7 * phi @ PROMISED.T
    f = GPLearner(1.0, spectrum())(phi, costs, combination=Combination("worst", -1), promised=PROMISED)
    assert f.explained == pytest.approx(1, abs=1e-12)
    far = 100 * AT
    expected = (torch.tensor([3.0, -1.0, 0.5], dtype=torch.float64) + 0.7 * far @ PROMISED.T).amax(1)
    torch.testing.assert_close(f.members(far)[:, 0], expected, rtol=1e-9, atol=1e-9)


def test_far_from_all_points_f_goes_on_as_promised() -> None:
    """There nothing else is known: the mean of each outcome is its constant and the promise."""
    phi, costs = promising(0.4)
    f = GPLearner(0.3, spectrum())(phi, costs, combination=Combination("worst", 1), promised=PROMISED)
    trend, far = trend_of(PROMISED, phi, costs), 1e3 * AT
    constants = f.outcome_mean + f.outcome_std * f.constant
    torch.testing.assert_close(f.members(far)[:, 0], (constants + far @ trend.T).amax(1), rtol=1e-12, atol=0)
    plain = GPLearner(0.3, spectrum())(phi, costs, combination=Combination("worst", 1))
    assert float(plain.members(far).max() - plain.members(far).min()) < 1e-9
    assert float(f.members(far).max() - f.members(far).min()) > 100


def test_a_promise_of_the_only_outcome_is_in_its_own_unit() -> None:
    """As of a quantity that a constraint bounds: what f predicts of it is the rest's process besides the promise."""
    phi, costs = promising(0.4)
    own, promised = costs[:, :1], PROMISED[:1]
    learner, chosen = GPLearner(1.0, spectrum()), Hyperparameters(0.5, 2.0, (0.1,))
    f, trend = learner(phi, own, chosen, promised=promised), trend_of(promised, phi, own)
    rest = GPValueFunction.conditioned(phi, own - phi @ trend.T, learner.transform(chosen), 0.1)
    assert float(trend.norm()) > 0.1
    torch.testing.assert_close(f.members(AT), rest.members(AT) + AT @ trend.T, rtol=0, atol=1e-10)
    assert f.noise_std(AT[0]) == pytest.approx(rest.noise_std(AT[0]), rel=1e-12)
