"""A fixed shift of images, as between the images a model was trained on and those it meets in use."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import affine_grid, grid_sample

from metricopt_ext.errors import DataError

_CHUNK = 1024  # images processed at a time, to bound memory


def rotate(x: Tensor, degrees: Tensor) -> Tensor:
    """Rotate each image counter-clockwise about its centre, bilinearly, padding with zeros.

    Args:
        x: Images, ``n x c x h x w`` floats.
        degrees: Angles, ``n``.

    Returns:
        The rotated images, shaped as ``x``.
    """
    height, width = x.shape[-2:]
    radians = torch.deg2rad(degrees.to(x))
    cos, sin, zero = radians.cos(), radians.sin(), torch.zeros_like(radians)
    rows = [cos, -sin * height / width, zero, sin * width / height, cos, zero]  # coordinates span -1..1 on each axis
    grid = affine_grid(torch.stack(rows, 1).view(-1, 2, 3), list(x.shape), align_corners=False)
    return grid_sample(x, grid, mode="bilinear", padding_mode="zeros", align_corners=False)


@dataclass(frozen=True)
class ImageShift:
    """Rotation, then contrast, brightness and noise, drawn anew for each image but always the same from one seed.

    An image's draws depend only on the seed and its position in the set: the first k images come out the same however
    many follow. The defaults change nothing.

    Attributes:
        contrast: Factor in (0, 1] on each image's distance from its mean, channel by channel.
        brightness: Amount in [-1, 1] added to every pixel.
        noise_std: Standard deviation, 0 or more, of independent Gaussian noise on every value.
        rotation_degrees: Angles are uniform within plus or minus this, in [0, 180].
        seed: Seed of the draws, an integer of 0 or more.

    Raises:
        ValueError: For a value out of range.
    """

    contrast: float = 1.0
    brightness: float = 0.0
    noise_std: float = 0.0
    rotation_degrees: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the ranges."""
        for name, valid, wanted in (
            ("contrast", 0 < self.contrast <= 1, "in (0, 1]"),
            ("brightness", -1 <= self.brightness <= 1, "in [-1, 1]"),
            ("noise_std", 0 <= self.noise_std < math.inf, "finite and at least 0"),
            ("rotation_degrees", 0 <= self.rotation_degrees <= 180, "in [0, 180]"),
            ("seed", self.seed >= 0, "at least 0"),
        ):
            if not valid:
                raise ValueError(f"{name} must be {wanted}, got {getattr(self, name)}")

    def __call__(self, x: Tensor, seed: int | None = None) -> Tensor:
        """Shift a set of images.

        Args:
            x: Images, ``n x c x h x w`` floats in [0, 1]; not modified.
            seed: Seed to use in place of the shift's own.

        Returns:
            A new tensor shaped as ``x``, with values in [0, 1].

        Raises:
            DataError: For another shape, type or range.
        """
        if x.ndim != 4 or not x.is_floating_point():
            raise DataError(f"images must be n x c x h x w floats, got {x.dtype} of shape {tuple(x.shape)}")
        if x.numel() == 0:
            return x.clone()
        low, high = (float(bound) for bound in x.aminmax())
        if not (low >= 0 and high <= 1):
            raise DataError(f"images must have values in [0, 1], got {low:g} to {high:g}")
        return torch.cat(list(self._chunks(x, self.seed if seed is None else seed)))

    def _chunks(self, x: Tensor, seed: int) -> Iterator[Tensor]:
        # Each generator is read in image order, so neither chunking nor the size of the set matters.
        angles, noise = (np.random.default_rng((seed, stream)) for stream in range(2))
        for images in torch.split(x, _CHUNK):
            out = images
            if self.rotation_degrees:
                turn = angles.uniform(-self.rotation_degrees, self.rotation_degrees, len(out))
                out = rotate(out, torch.from_numpy(turn))
            if self.contrast != 1:
                mean = out.mean((2, 3), keepdim=True)
                out = mean + (out - mean) * self.contrast
            out = out + self.brightness
            if self.noise_std:
                drawn = noise.standard_normal(tuple(out.shape), dtype=np.float32)
                out = out + self.noise_std * torch.from_numpy(drawn).to(out)
            yield out.clamp(0, 1)
