"""Guided evolution strategies (paper, section 3.2, Eq. 3-4) as pure functions; all take leading batch shapes."""

from collections.abc import Callable

import torch
from torch import Tensor


def orthonormal_basis(gradients: Tensor) -> tuple[Tensor, Tensor]:
    """Return an orthonormal basis U of the subspace that past loss gradients span.

    Gradients are first scaled to unit length, so that a small one counts as a direction too. Dependent gradients add
    no direction, whereas a QR factorisation would make one up from rounding errors.

    Args:
        gradients: The past k gradients, ``... x k x d``, k may be 0.

    Returns:
        U, ``... x d x min(k, d)``, whose columns beyond the rank are zero, and the rank, ``...``.
    """
    k, d = gradients.shape[-2:]
    length = gradients.norm(dim=-1, keepdim=True)
    unit = torch.where(length > 0, gradients / length.clamp(min=torch.finfo(length.dtype).tiny), 0.0)
    _, s, directions = torch.linalg.svd(unit, full_matrices=False)
    independent = s > 10 * max(k, d) * torch.finfo(s.dtype).eps * s[..., :1].clamp(min=1)
    return (directions * independent[..., None]).mT, independent.sum(-1).to(gradients.dtype)


def analytic_direction(gradient: Tensor, history: Tensor) -> Tensor:
    """Return 2 Sigma grad f, the expectation of Eq. 4's estimate u_t as s^2 goes to 0 (exact for a linear f).

    Sigma = I/(2d) + U U^T/(2k) is the search covariance (Eq. 3). k is the rank of the history, so that tr Sigma = 1;
    without any direction, Sigma = I/d keeps that trace.

    Args:
        gradient: grad f at phi, ``... x d``.
        history: The past k loss gradients, ``... x k x d``.

    Returns:
        The direction to descend against, ``... x d``.
    """
    basis, rank = orthonormal_basis(history)
    d, rank = gradient.shape[-1], rank[..., None]
    inside = (basis @ (basis.mT @ gradient[..., None])).squeeze(-1)
    return torch.where(rank > 0, gradient / d + inside / rank.clamp(min=1), 2 * gradient / d)


def perturbations(basis: Tensor, rank: Tensor, count: int, scale: float, generator: torch.Generator) -> Tensor:
    """Draw delta ~ N(0, s^2 Sigma), as s (e1 / sqrt(2d) + U e2 / sqrt(2k)) with standard normal e1 and e2 (Eq. 3).

    k is the rank; without any direction delta = s e1 / sqrt(d). As tr Sigma = 1, the length of a delta is about s.

    Args:
        basis: U of `orthonormal_basis`.
        rank: Number of its non-zero columns, ``...``.
        count: Number P of draws, at least 1.
        scale: s, above 0.
        generator: Source of the draws.

    Returns:
        The draws, ``... x P x d``.
    """
    *batch, d, k = basis.shape
    e1 = torch.randn(*batch, count, d, generator=generator, dtype=basis.dtype, device=generator.device).to(basis)
    e2 = torch.randn(*batch, count, k, generator=generator, dtype=basis.dtype, device=generator.device).to(basis)
    rank = rank[..., None, None]
    inside = e2 @ basis.mT  # U's columns beyond the rank are zero
    guided = e1 / (2 * d) ** 0.5 + inside / (2 * rank.clamp(min=1)).sqrt()
    return scale * torch.where(rank > 0, guided, e1 / d**0.5)


@torch.no_grad()
def es_direction(
    f: Callable[[Tensor], Tensor],
    phi: Tensor,
    history: Tensor,
    *,
    generator: torch.Generator,
    count: int = 3,
    variance: float = 0.01,
    k: int | None = None,
) -> Tensor:
    """Estimate the direction u_t from values of f alone, by antithetic perturbations (Eq. 4).

    f may be a black box. Where its gradient is available, `analytic_direction` returns exactly what this estimates.

    Args:
        f: Called once, with all 2P points, ``... x 2P x d``; returns their values, ``... x 2P``.
        phi: ``... x d``.
        history: The past k loss gradients, ``... x k x d``.
        generator: Source of the perturbations.
        count: Number P of antithetic pairs, at least 1.
        variance: s^2, above 0.
        k: Eq. 3 divides by this, at least 1, however many directions the history has; None divides by their number,
            so that tr Sigma = 1.

    Returns:
        The direction to descend against, ``... x d``.
    """
    basis, rank = orthonormal_basis(history)
    rank = rank if k is None else torch.full_like(rank, k)
    delta = perturbations(basis, rank, count, variance**0.5, generator)
    return estimated_direction(delta, f(antithetic(phi, delta)), variance)


def antithetic(phi: Tensor, delta: Tensor) -> Tensor:
    """Return the points at which Eq. 4 asks f, those with ``+ delta`` first, ``... x 2P x d``.

    Args:
        phi: ``... x d``.
        delta: The perturbations, ``... x P x d``.
    """
    centre = phi[..., None, :]
    return torch.cat([centre + delta, centre - delta], -2)


def estimated_direction(delta: Tensor, values: Tensor, variance: float) -> Tensor:
    """Return u_t of Eq. 4, ``... x d``, from what f is at `antithetic` points.

    Args:
        delta: The perturbations, ``... x P x d``.
        values: f's values, ``... x 2P``.
        variance: s^2, above 0.
    """
    above, below = values.chunk(2, -1)
    slope = (above - below).to(delta.dtype)[..., None]
    return (delta * slope).sum(-2) / (variance * delta.shape[-2])
