"""Guided ES: the analytic direction against the dense matrix product, the sampled one against a naive loop."""

import numpy as np
import pytest
import torch
from torch import Tensor

from helpers.tensors import rand
from metricopt_ext.search.guided_es import (
    analytic_direction,
    es_direction,
    orthonormal_basis,
    perturbations,
)


def dense_covariance(history: np.ndarray) -> np.ndarray:
    """Sigma of Eq. 3, with U from a QR factorisation of the (independent) gradients."""
    k, d = history.shape
    if k == 0:
        return np.eye(d) / d
    basis = np.linalg.qr(history.T)[0]
    return np.eye(d) / (2 * d) + basis @ basis.T / (2 * k)


def covariance(history: Tensor) -> Tensor:
    """Sigma, column by column."""
    units = torch.eye(history.shape[-1], dtype=history.dtype)
    return torch.stack([analytic_direction(unit, history) / 2 for unit in units], -1)


@pytest.mark.parametrize("shape", [(), (5,), (2, 3)])
@pytest.mark.parametrize(("k", "d"), [(1, 1), (1, 6), (3, 6), (6, 6), (3, 40), (0, 6)])
def test_direction_is_the_dense_product(shape: tuple[int, ...], k: int, d: int) -> None:
    history, gradient = rand(*shape, k, d), rand(*shape, d, seed=1)
    direction = analytic_direction(gradient, history)
    assert direction.shape == gradient.shape
    for index in np.ndindex(*shape):
        expected = 2 * dense_covariance(history[index].numpy()) @ gradient[index].numpy()
        np.testing.assert_allclose(direction[index], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("k", "d"), [(1, 6), (3, 6), (5, 6), (6, 6)])
def test_spectrum_of_sigma(k: int, d: int) -> None:
    sigma = covariance(rand(k, d))
    expected = [1 / (2 * d)] * (d - k) + [1 / (2 * d) + 1 / (2 * k)] * k
    np.testing.assert_allclose(np.linalg.eigvalsh(sigma), expected, rtol=1e-12)
    assert float(sigma.trace()) == pytest.approx(1, abs=1e-12)


g, h = rand(2, 5, seed=3)
zero = torch.zeros(5).double()

# gradients, and gradients that span the same space independently
DEPENDENT: dict[str, tuple[list[Tensor], list[Tensor]]] = {
    "twice": ([g, g], [g]),
    "zero": ([g, zero, h], [g, h]),
    "nearly, by rounding": ([g, h, 0.1 * g + 0.7 * h, (g - h) / 3], [g, h]),
    "more than dimensions": (list(rand(9, 5, seed=4)), list(torch.eye(5).double())),
    "tiny": ([g, 1e-150 * h], [g, h]),
    "all tiny": ([1e-150 * g, 1e-140 * h], [g, h]),
}


@pytest.mark.parametrize(("gradients", "independent"), DEPENDENT.values(), ids=DEPENDENT)
def test_no_direction_is_invented_or_lost(gradients: list[Tensor], independent: list[Tensor]) -> None:
    history, span = torch.stack(gradients), torch.stack(independent).numpy()
    basis, rank = orthonormal_basis(history)
    assert basis.shape == (5, min(5, len(gradients)))
    assert int(rank) == len(span)
    np.testing.assert_allclose(basis @ basis.mT, np.linalg.pinv(span) @ span, atol=1e-9)
    lengths = basis.norm(dim=0).sort().values
    np.testing.assert_allclose(lengths, [0.0] * (basis.shape[1] - len(span)) + [1.0] * len(span), atol=1e-12)

    sigma = covariance(history)
    assert float(sigma.trace()) == pytest.approx(1, abs=1e-12)
    np.testing.assert_allclose(sigma, dense_covariance(span), atol=1e-9)


def test_rows_of_a_batch_have_their_own_rank() -> None:
    history = torch.stack([torch.stack([g, h]), torch.stack([g, g]), torch.stack([zero, zero])])
    gradient = rand(3, 5, seed=6)
    direction = analytic_direction(gradient, history)
    for row, span in enumerate([[g, h], [g], []]):
        sigma = dense_covariance(torch.stack(span).numpy() if span else np.zeros((0, 5)))
        np.testing.assert_allclose(direction[row], 2 * sigma @ gradient[row].numpy(), atol=1e-12)


# --- The sampled estimate ------------------------------------------------------------------------------------


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def wavy(phi: Tensor) -> Tensor:
    return phi.sin().sum(-1)


@pytest.mark.parametrize(
    "history",
    [rand(2, 6), torch.stack([g, 2 * g, h]), rand(9, 5, seed=4), torch.zeros(3, 5).double(), rand(0, 5)],
    ids=["independent", "dependent", "more than dimensions", "zero", "none"],
)
def test_perturbations_have_the_search_covariance(history: Tensor) -> None:
    scale, draws = 0.3, 400_000
    delta = perturbations(*orthonormal_basis(history), draws, scale, rng())
    assert delta.shape == (draws, history.shape[-1])
    np.testing.assert_allclose(delta.mean(0), 0, atol=5 * scale / draws**0.5)
    sampled, sigma = torch.cov(delta.mT) / scale**2, covariance(history)
    np.testing.assert_allclose(sampled, sigma, atol=0.004)
    assert float(sampled.trace()) == pytest.approx(1, abs=0.005)
    np.testing.assert_allclose(np.linalg.eigvalsh(sampled), np.linalg.eigvalsh(sigma), rtol=0.02)


@pytest.mark.parametrize("shape", [(), (5,), (2, 3)])
@pytest.mark.parametrize(("k", "count", "variance"), [(0, 3, 0.01), (1, 1, 0.01), (3, 4, 0.5)])
def test_estimate_is_the_naive_loop(shape: tuple[int, ...], k: int, count: int, variance: float) -> None:
    def f(phi: Tensor) -> Tensor:
        asked.append(phi.shape)
        return phi.cos().prod(-1) + phi[..., 0] ** 3

    asked: list[torch.Size] = []
    phi, history = rand(*shape, 6), rand(*shape, k, 6, seed=1)
    u = es_direction(f, phi, history, generator=rng(5), count=count, variance=variance)
    assert u.shape == phi.shape
    assert asked == [(*shape, 2 * count, 6)]
    delta = perturbations(*orthonormal_basis(history), count, variance**0.5, rng(5))
    for index in np.ndindex(*shape):
        expected = torch.zeros(6).double()
        for i in range(count):
            d = delta[index][i]
            expected += d * (f(phi[index] + d) - f(phi[index] - d)) / (variance * count)
        torch.testing.assert_close(u[index], expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("history", [rand(1, 6, seed=1), rand(2, 6, seed=1), rand(3, 6, seed=1)])
def test_k_as_printed_divides_by_itself_from_the_first_gradient_on(history: Tensor) -> None:
    """With k = 3: s (e1 / sqrt(2d) + U e2 / sqrt(6)), and with three gradients the same as without it."""
    phi, d = rand(6), 6
    u = es_direction(wavy, phi, history, generator=rng(5), count=4, variance=0.04, k=3)
    basis, _ = orthonormal_basis(history)
    draws = rng(5)
    e1 = torch.randn(4, d, generator=draws, dtype=torch.float64)
    e2 = torch.randn(4, len(history), generator=draws, dtype=torch.float64)
    expected = torch.zeros(d).double()
    for i in range(4):
        delta = 0.2 * (e1[i] / (2 * d) ** 0.5 + basis @ e2[i] / 6**0.5)
        expected += delta * (wavy(phi + delta) - wavy(phi - delta)) / (0.04 * 4)
    torch.testing.assert_close(u, expected, rtol=1e-10, atol=1e-12)
    grown = es_direction(wavy, phi, history, generator=rng(5), count=4, variance=0.04)
    assert torch.allclose(u, grown) == (len(history) == 3)
