"""Guided evolution strategies (paper, section 3.2, Eq. 3-4) as pure functions; all take leading batch shapes."""

import torch
from torch import Tensor


def orthonormal_basis(gradients: Tensor) -> tuple[Tensor, Tensor]:
    """Return an orthonormal basis U of the subspace that past loss gradients span.

    Gradients are brought to unit length first, so that a small one counts as a direction too. Dependent gradients add
    no direction, where a QR factorisation would invent one out of rounding errors.

    Args:
        gradients: The past k gradients, ``... x k x d``, k may be 0.

    Returns:
        U, ``... x d x k``, whose columns beyond the rank are zero, and the rank, ``...``.
    """
    k, d = gradients.shape[-2:]
    if k == 0:
        return gradients.mT, gradients.new_zeros(gradients.shape[:-2])
    length = gradients.norm(dim=-1, keepdim=True)
    unit = torch.where(length > 0, gradients / length.clamp(min=torch.finfo(length.dtype).tiny), 0.0)
    _, s, directions = torch.linalg.svd(unit, full_matrices=False)
    independent = s > 10 * max(k, d) * torch.finfo(s.dtype).eps * s[..., :1].clamp(min=1)
    basis = (directions * independent[..., None]).mT
    if basis.shape[-1] < k:  # more gradients than dimensions
        basis = torch.cat([basis, basis.new_zeros(*basis.shape[:-1], k - basis.shape[-1])], -1)
    return basis, independent.sum(-1).to(gradients.dtype)


def apply_covariance(basis: Tensor, rank: Tensor, vector: Tensor) -> Tensor:
    """Multiply by the search covariance Sigma = I/(2d) + U U^T/(2k) (Eq. 3).

    k is the rank, so that tr Sigma = 1; without any direction, Sigma = I/d keeps that trace.

    Args:
        basis: U, ``... x d x k``.
        rank: Number of its non-zero columns, ``...``.
        vector: ``... x d``.

    Returns:
        Sigma times the vector, ``... x d``.
    """
    d = vector.shape[-1]
    inside = (basis @ (basis.mT @ vector[..., None])).squeeze(-1)
    rank = rank[..., None]
    guided = vector / (2 * d) + inside / (2 * rank.clamp(min=1))
    return torch.where(rank > 0, guided, vector / d)


def analytic_direction(gradient: Tensor, history: Tensor) -> Tensor:
    """Return 2 Sigma grad f, the expectation of Eq. 4's estimate u_t as s^2 goes to 0 (exact for a linear f).

    Args:
        gradient: grad f at phi, ``... x d``.
        history: The past k loss gradients, ``... x k x d``.

    Returns:
        The direction to descend against, ``... x d``.
    """
    basis, rank = orthonormal_basis(history)
    return 2 * apply_covariance(basis, rank, gradient)
