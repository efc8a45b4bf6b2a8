"""A fixed shift of images: each part of it alone, against scipy where that has it, and what it depends on."""

import numpy as np
import pytest
import scipy.ndimage
import torch
from torch import Tensor

from helpers.refusals import assert_refused
from metricopt_ext.data.shift import ImageShift, ShiftByPlace, rotate
from metricopt_ext.errors import DataError


@pytest.fixture
def images() -> Tensor:
    return torch.rand(40, 3, 10, 8, generator=torch.Generator().manual_seed(0))


SHIFT = ImageShift(contrast=0.6, noise_std=0.05, rotation_degrees=20, seed=1)


def test_no_shift_is_the_identity(images: Tensor) -> None:
    assert torch.equal(ImageShift()(images), images)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("orders", [[range(40)], [[7], [3], [39], [7, 0, 7], range(40)]])
def test_an_image_is_shifted_alike_whenever_it_is_met(images: Tensor, channels: int, orders: list[list[int]]) -> None:
    images = images[:, :channels]
    once, shift = SHIFT(images, seed=4), ShiftByPlace(SHIFT, 4)
    for places in orders:
        assert torch.equal(shift(images[list(places)], list(places)), once[list(places)])
    assert len(shift(images[:0], [])) == 0
    assert_refused(lambda: shift(images[:1] + 1, [0]), DataError, "0", "1")


def test_contrast(images: Tensor) -> None:
    x = images * 0.2 + 0.4
    out = ImageShift(contrast=0.5)(x)
    assert torch.allclose(out.mean((2, 3)), x.mean((2, 3)), atol=1e-6)
    assert torch.allclose(out.std((2, 3)), 0.5 * x.std((2, 3)), atol=1e-6)


def test_rotation_angles_are_uniform_within_the_limit() -> None:
    bar = torch.zeros(500, 1, 33, 33)
    bar[:, :, 16, 17:] = 1  # points right from the centre
    out = ImageShift(rotation_degrees=60)(bar)[:, 0]
    rows, columns = torch.meshgrid(torch.arange(33.0) - 16, torch.arange(33.0) - 16, indexing="ij")
    angles = torch.rad2deg(torch.atan2(-(out * rows).sum((1, 2)), (out * columns).sum((1, 2))))
    assert float(angles.abs().max()) < 62
    assert float(angles.std()) == pytest.approx(60 / 3**0.5, rel=0.1)
    assert float(angles.mean()) == pytest.approx(0, abs=5)


def test_rotation_by_right_angles_is_exact(images: Tensor) -> None:
    square = images[:, :, :8, :8]
    for turns in range(1, 4):
        turned = rotate(square, torch.full((40,), 90.0 * turns))
        assert torch.allclose(turned, square.rot90(turns, (2, 3)), atol=1e-5)


@pytest.mark.parametrize("degrees", [-35.0, 10.0, 120.0])
def test_rotation_agrees_with_scipy(images: Tensor, degrees: float) -> None:
    turned = rotate(images[:3], torch.full((3,), degrees))
    expected = scipy.ndimage.rotate(
        images[:3].numpy(), degrees, axes=(2, 3), reshape=False, order=1, mode="grid-constant"
    )
    assert np.allclose(turned.numpy(), expected, atol=1e-5)
