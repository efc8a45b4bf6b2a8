"""The Gaussian process of a search against scipy's normal distribution, brute force and finite differences."""

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy.stats import multivariate_normal
from torch import Tensor

from helpers.tensors import rand
from metricopt_ext.value.gp import (
    EXPONENTS,
    LEAST_WEIGHT,
    LENGTH_PRIOR,
    LENGTHS,
    NOISE_PRIOR,
    NOISES,
    GPLearner,
    GPValueFunction,
    Hyperparameters,
    Spectrum,
    rbf,
)


def data(n: int = 20, d: int = 4, seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Points and a smooth cost of them, in units of its own."""
    phi = rand(n, d, seed=seed)
    cost = 3 + 40 * (phi[:, 0].sin() + 0.3 * phi.square().sum(1)) + 2 * rand(n, seed=seed + 100)
    return phi.to(dtype), cost


TRANSFORM = 0.4 * torch.eye(4, dtype=torch.float64) + 0.1 * rand(4, 4, seed=9)


def conditioned(noise: float = 0.1, **change: int) -> tuple[GPValueFunction, Tensor, Tensor]:
    phi, cost = data(**change)
    return GPValueFunction.conditioned(phi, cost, TRANSFORM, noise), phi, cost


def correlation(a: Tensor, b: Tensor, transform: Tensor = TRANSFORM) -> np.ndarray:
    """The kernel, naively."""
    za, zb = (a @ transform).numpy(), (b @ transform).numpy()
    return np.array([[math.exp(-0.5 * float(((x - y) ** 2).sum())) for y in zb] for x in za])


def standardised(cost: Tensor) -> np.ndarray:
    values = cost.double().numpy()
    return (values - values.mean()) / values.std(ddof=1)


def spectrum(d: int = 4) -> Spectrum:
    weights = 4.0 ** -torch.arange(d, dtype=torch.float64)
    return Spectrum(weights, torch.linalg.qr(rand(d, d, seed=3))[0])


# --- The posterior -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("noise", [1e-3, 0.1, 3.2])
def test_the_constant_and_the_variance_are_the_likeliest(noise: float) -> None:
    """Of scipy's multivariate normal, along both: the closed form is its only stationary point."""
    f, phi, cost = conditioned(noise)
    k, y = correlation(phi, phi) + noise * np.eye(20), standardised(cost)
    inverse = np.linalg.inv(k)
    constant = (inverse @ y).sum() / inverse.sum()
    variance = (y - constant) @ inverse @ (y - constant) / 20
    assert float(f.constant) == pytest.approx(constant, rel=1e-9, abs=1e-9)
    assert float(f.variance) == pytest.approx(variance, rel=1e-9)

    def density(m: float, v: float) -> float:
        return float(multivariate_normal.logpdf(y, np.full(20, m), v * k))

    best = density(constant, variance)
    for m, v in ((constant - 0.01, variance), (constant + 0.01, variance)):
        assert density(m, v) < best
    for factor in (0.99, 1.01):
        assert density(constant, factor * variance) < best


@pytest.mark.parametrize("noise", [1e-3, 0.1, 3.2])
def test_the_posterior_is_that_of_a_joint_normal(noise: float) -> None:
    f, phi, cost = conditioned(noise)
    at, y, constant, variance = rand(7, 4, seed=5), standardised(cost), float(f.constant), float(f.variance)
    prior, cross, inner = correlation(at, at), correlation(at, phi), correlation(phi, phi) + noise * np.eye(20)
    mean = constant + cross @ np.linalg.solve(inner, y - constant)
    std = np.sqrt(variance * np.diag(prior - cross @ np.linalg.solve(inner, cross.T)))
    unit = float(cost.std())
    np.testing.assert_allclose(f.mean(at).numpy(), mean, rtol=0, atol=1e-9)
    np.testing.assert_allclose(f.std(at)[:, 0].numpy(), unit * std, rtol=1e-9)
    assert f.noise_std(at[0]) == pytest.approx(unit * math.sqrt(variance * noise), rel=1e-12)
    predicted = f(at)
    assert predicted.dtype == torch.float64
    np.testing.assert_allclose(predicted.numpy(), float(cost.mean()) + unit * mean, rtol=1e-5)


def test_gradients_are_finite_differences() -> None:
    f, at = conditioned()[0], rand(3, 4, seed=7)
    sample = f.deviations(2, torch.Generator().manual_seed(0))
    step = 1e-5

    def check(value: Callable[[Tensor], Tensor], phi: Tensor, tolerance: float) -> None:
        point = phi.clone().requires_grad_(True)
        (found,) = torch.autograd.grad(value(point).sum(), point)
        for row, column in itertools.product(range(len(phi)), range(4)):
            moved = torch.zeros_like(phi)
            moved[row, column] = step
            slope = (value(phi + moved) - value(phi - moved)).sum() / (2 * step)
            assert float(found[row, column]) == pytest.approx(float(slope), rel=tolerance, abs=tolerance)

    check(f.mean, at, 1e-7)
    check(f.mean, f.points[:3].clone(), 1e-7)  # also where a distance is 0
    check(lambda phi: sample(phi)[:, 1], at, 1e-6)
    wanted = f.gradient(at)
    assert (wanted.dtype, wanted.shape) == (torch.float64, (3, 4))
    point = at.clone().requires_grad_(True)
    (mean,) = torch.autograd.grad(f.mean(point).sum(), point)
    torch.testing.assert_close(wanted, float(f.cost_std) * mean, rtol=1e-4, atol=1e-4)  # f itself is in float32


@pytest.mark.outcome
def test_samples_have_the_posteriors_mean_and_covariance() -> None:
    """Over 4 seeds of 2000 samples each: the prior of few features is itself a little off."""
    f, at, count = conditioned()[0], torch.cat([rand(3, 4, seed=8), rand(1, 4, seed=8) + 4]), 2000
    k, cross = f.kernel(f.points) + f.noise * torch.eye(20, dtype=torch.float64), f.kernel(at)
    exact = f.variance * (rbf(at @ f.transform, at @ f.transform) - cross @ torch.linalg.solve(k, cross.T))
    means, covariances = [], []
    for seed in range(4):
        samples = f.outcome_deviations(count, torch.Generator().manual_seed(seed), features=1024)(at)[..., 0]
        assert samples.shape == (4, count)
        means.append(samples.mean(1))
        covariances.append(samples @ samples.T / count)
    deviation = exact.diagonal().sqrt()
    mean_error = (torch.stack(means).mean(0) / deviation).abs().max()
    assert mean_error < 4 / math.sqrt(4 * count)  # four standard errors
    scale = deviation[:, None] * deviation
    error = ((torch.stack(covariances).mean(0) - exact) / scale).abs().max()
    assert error < 0.12  # of correlations: four standard errors, of 0.03 each over 10 seeds


# --- Hyper-parameters --------------------------------------------------------------------------------------------


def reference_score(phi: Tensor, cost: Tensor, learner: GPLearner, chosen: Hyperparameters) -> float:
    """The normal density at its own best amplitude and mean, times the priors, by scipy."""
    y, (noise,) = standardised(cost), chosen.noise
    k = correlation(phi.double(), phi.double(), learner.transform(chosen)) + noise * np.eye(len(y))
    inverse = np.linalg.inv(k)
    constant = (inverse @ y).sum() / inverse.sum()
    amplitude = (y - constant) @ inverse @ (y - constant) / len(y)
    score = float(multivariate_normal.logpdf(y, np.full(len(y), constant), amplitude * k))
    for value, (median, spread) in ((chosen.length, LENGTH_PRIOR), (noise, NOISE_PRIOR)):
        score -= 0.5 * (math.log(value / median) / spread) ** 2
    return score


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("n", [5, 20])
def test_the_grids_choice_is_that_of_brute_force(n: int, seed: int) -> None:
    phi, cost = data(n, seed=seed)
    learner = GPLearner(0.7, spectrum())
    scores = {
        chosen: reference_score(phi, cost, learner, chosen)
        for chosen in itertools.starmap(Hyperparameters, itertools.product(EXPONENTS, LENGTHS, zip(NOISES)))
    }
    first, second = sorted(scores, key=lambda each: -scores[each])[:2]
    assert scores[first] > scores[second] + 1e-6  # no near-tie
    assert learner.most_likely(phi, cost) == first
    f = learner(phi, cost)
    assert torch.equal(f.transform, learner.transform(first))


@pytest.mark.parametrize("exponent", EXPONENTS)
def test_the_root_of_a_spectrum_has_mean_weight_1(exponent: float) -> None:
    given = spectrum()
    root = given.root(exponent)
    found, vectors = torch.linalg.eigh(root @ root.T)
    weights = given.weights**exponent
    assert float(found.mean()) == pytest.approx(1, rel=1e-12)
    torch.testing.assert_close(found.flip(0), weights / weights.mean(), rtol=1e-9, atol=1e-12)
    if exponent:
        aligned = (vectors.flip(1) * given.basis).sum(0).abs()
        torch.testing.assert_close(aligned, torch.ones_like(aligned), rtol=0, atol=1e-9)


def test_directions_without_weight_keep_a_little() -> None:
    root = Spectrum(torch.tensor([3.0, 1.0, 0.0, 0.0], dtype=torch.float64), torch.eye(4, dtype=torch.float64)).root(1)
    weights = (root @ root.T).diagonal()
    expected = torch.tensor([3.0, 1.0, LEAST_WEIGHT, LEAST_WEIGHT], dtype=torch.float64)  # their mean was 1
    torch.testing.assert_close(weights, expected / expected.mean(), rtol=1e-12, atol=0)
    assert torch.equal(Spectrum.flat(3).root(0.7), torch.eye(3, dtype=torch.float64))


@pytest.mark.outcome
@pytest.mark.parametrize("exponent", [0.0, 1.0])
def test_the_exponent_is_that_of_the_process(exponent: float) -> None:
    """On 60 points of a process drawn with or without the spectrum: 24 of 24 are told; by chance a third would be."""
    learner, right = GPLearner(1.0, spectrum(6)), 0
    for seed in range(24):
        phi = rand(60, 6, seed=seed)
        z = phi @ learner.transform(Hyperparameters(exponent, 1.0, ()))
        root = torch.linalg.cholesky(rbf(z, z) + 1e-3 * torch.eye(60, dtype=torch.float64))
        right += learner.most_likely(phi, root @ rand(60, seed=1000 + seed)).exponent == exponent
    assert right >= 20


# --- Domain, files, precision ------------------------------------------------------------------------------------


def test_the_domain_is_around_the_centre_and_reaches_the_start() -> None:
    f, phi, _ = conditioned()
    centre, start = phi[3], torch.zeros(4, dtype=torch.float64)
    f.set_domain(phi, centre=centre)
    away = np.linalg.norm(phi.numpy() - centre.numpy(), axis=1)
    torch.testing.assert_close(f.centre.double(), centre, rtol=1e-6, atol=1e-6)
    assert float(f.radius) == pytest.approx(np.quantile(away, 0.95), rel=1e-5)
    slopes = f.gradient(phi).norm(dim=1).numpy()
    assert float(f.gradient_floor) == pytest.approx(np.quantile(slopes, 0.1), rel=1e-5)
    f.set_domain(phi, centre=centre, reaching=start + 100)
    assert float(f.radius) == pytest.approx(float((centre - 100).norm()), rel=1e-5)


def test_noise_that_is_known_is_the_least() -> None:
    phi = torch.randn(40, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    cost = 5 + phi.square().sum(1)  # smooth: nothing looks like noise
    learner = GPLearner(1.0, Spectrum.flat(3))
    assert learner(phi, cost).noise_std(phi[0]) < 0.2
    assert learner(phi, cost, least_noise=0.5).noise_std(phi[0]) >= 0.5
