"""Ridge regression in closed form."""

from collections.abc import Sequence

import torch
from torch import Tensor


def best_penalty(x: Tensor, y: Tensor, group: Tensor, penalties: Sequence[float]) -> float:
    """Return the ridge penalty with the smallest error on left-out groups of points.

    Args:
        x: Features, ``n x p``.
        y: Targets, ``n``.
        group: The group of each point, ``n``.
        penalties: The candidates; see `ridge_path`.
    """
    errors = torch.zeros(len(penalties), dtype=x.dtype)
    for held_out in group.unique():
        inside, outside = group != held_out, group == held_out
        if inside.sum() < 2:
            continue
        for i, (coefficients, intercept) in enumerate(ridge_path(x[inside], y[inside], penalties)):
            errors[i] += (x[outside] @ coefficients + intercept - y[outside]).abs().sum()
    return penalties[int(errors.argmin())]


def ridge_path(x: Tensor, y: Tensor, penalties: Sequence[float]) -> list[tuple[Tensor, Tensor]]:
    """Fit ridge regressions to standardised features, with one decomposition for all penalties.

    Args:
        x: Features, ``n x p``.
        y: Targets, ``n``.
        penalties: Penalty per point; the squared coefficients of standardised features are weighted by ``n`` times it.

    Returns:
        The coefficients of the raw features, ``p``, and the intercept for each penalty.
    """
    mean, std = x.mean(0), x.std(0).clamp(min=1e-12)
    z, y_centred = (x - mean) / std, y - y.mean()
    if z.shape[1] > len(z):  # the same via the smaller matrix of inner products, several times faster
        squares, u = torch.linalg.eigh(z @ z.T)
        scaled = [u @ (u.T @ y_centred / (squares.clamp(min=0) + len(z) * penalty)) for penalty in penalties]
        coefficients = [z.T @ weights / std for weights in scaled]
    else:
        u, s, vt = torch.linalg.svd(z, full_matrices=False)
        projected = u.T @ y_centred
        coefficients = [vt.T @ (s / (s**2 + len(z) * penalty) * projected) / std for penalty in penalties]
    return [(b, y.mean() - mean @ b) for b in coefficients]
