import pytest
import torch

from metricopt_ext.value.value_function import NeuralValueFunction, Quality, RidgeValueFunction
from rotated import RotatedValueFunction, random_rotation

GOOD = Quality(spearman=0.9, mae=0.01, constant_mae=0.05, points=100, trajectories=50, near_mae=0.01, headroom=0.05)


def fitted(
    kind: type[NeuralValueFunction] | type[RidgeValueFunction], dim: int = 6
) -> RidgeValueFunction | NeuralValueFunction:
    torch.manual_seed(3)
    f = kind(dim, 3)
    if isinstance(f, RidgeValueFunction):
        f.coefficients.normal_()
    f.quality = GOOD
    f.set_domain(torch.randn(50, dim))
    return f


@pytest.mark.parametrize("kind", [NeuralValueFunction, RidgeValueFunction])
def test_placebo_is_f_in_turned_coordinates(kind: type[RidgeValueFunction]) -> None:
    f = fitted(kind)
    placebo = RotatedValueFunction(f, seed=1)
    phi = torch.randn(4, 5, 6)
    turned = phi @ random_rotation(6, 1).float().T
    assert torch.allclose(placebo(phi), f(turned), atol=1e-6)
    assert not torch.allclose(placebo(phi), f(phi), atol=1e-3)
    # by the chain rule, its gradient is as long as f's at the turned point
    assert torch.allclose(placebo.gradient(phi).norm(dim=-1), f.gradient(turned).norm(dim=-1), rtol=1e-4)


def test_placebo_has_the_precision_of_f() -> None:
    f = fitted(RidgeValueFunction)
    torch.set_default_dtype(torch.float64)
    try:
        placebo = RotatedValueFunction(f, seed=1)
    finally:
        torch.set_default_dtype(torch.float32)
    assert placebo.centre.dtype == placebo.radius.dtype == placebo.rotation.dtype == torch.float32
    assert placebo(torch.randn(5, 6)).dtype == f(torch.randn(5, 6)).dtype == torch.float64


def test_placebo_is_as_trusted_and_as_bold_as_f() -> None:
    f = fitted(RidgeValueFunction)
    placebo = RotatedValueFunction(f, seed=1)
    assert placebo.trusted
    assert placebo.quality == GOOD
    assert torch.equal(placebo.radius, f.radius)
    assert torch.equal(placebo.gradient_floor, f.gradient_floor)


@pytest.mark.parametrize("dim", [1, 2, 17])
def test_rotation_is_orthogonal_and_depends_on_the_seed_only(dim: int) -> None:
    q = random_rotation(dim, 5)
    assert torch.allclose(q @ q.T, torch.eye(dim, dtype=torch.float64), atol=1e-12)
    assert torch.equal(q, random_rotation(dim, 5))
    if dim > 1:
        assert not torch.allclose(q, random_rotation(dim, 6))


def test_rotations_have_no_preferred_direction() -> None:
    first = torch.stack([random_rotation(3, seed)[:, 0] for seed in range(2000)])
    assert first.mean(0).abs().max() < 0.06  # standard error 0.013
    assert torch.allclose(first.T @ first / 2000, torch.eye(3, dtype=torch.float64) / 3, atol=0.04)
