"""A fixed shift of images, as between the images a model was trained on and those it meets in use."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import grid_sample

from metricopt_ext.errors import DataError

Array = npt.NDArray[Any]

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
    radians = torch.deg2rad(degrees.to(x))[:, None, None]
    cos, sin = radians.cos(), radians.sin()
    # Coordinates of the pixels' centres, which span -1..1 on each axis. Number by number: a product of matrices, as in
    # affine_grid, may round an image's in another way in a batch of another size.
    across, down = ((2 * torch.arange(size).to(x) + 1) / size - 1 for size in (width, height))
    across, down = across[None, None, :], down[None, :, None]
    grid = [cos * across - sin * (height / width) * down, sin * (width / height) * across + cos * down]
    return grid_sample(x, torch.stack(grid, -1), mode="bilinear", padding_mode="zeros", align_corners=False)


@dataclass(frozen=True)
class ImageShift:
    """Rotation, then contrast and noise, drawn anew for each image but always the same from one seed.

    An image's draws depend only on the seed and its position in the set: the first k images come out the same however
    many follow. The defaults change nothing.

    Attributes:
        contrast: Factor in (0, 1] on each image's distance from its mean, channel by channel.
        noise_std: Standard deviation, 0 or more, of independent Gaussian noise on every value.
        rotation_degrees: Angles are uniform within plus or minus this, in [0, 180].
        seed: Seed of the draws, an integer of 0 or more.

    Raises:
        ValueError: For a value out of range.
    """

    contrast: float = 1.0
    noise_std: float = 0.0
    rotation_degrees: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the ranges."""
        for name, valid, wanted in (
            ("contrast", 0 < self.contrast <= 1, "in (0, 1]"),
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
        self.check(x)
        if x.numel() == 0:
            return x.clone()
        return torch.cat(list(self._chunks(x, self.seed if seed is None else seed)))

    def check(self, x: Tensor) -> None:
        """Reject what are no images to be shifted, ``n x c x h x w`` floats in [0, 1].

        Raises:
            DataError: For another shape, type or range.
        """
        if x.ndim != 4 or not x.is_floating_point():
            raise DataError(f"images must be n x c x h x w floats, got {x.dtype} of shape {tuple(x.shape)}")
        if x.numel() == 0:
            return
        low, high = (float(bound) for bound in x.aminmax())
        if not (low >= 0 and high <= 1):
            raise DataError(f"images must have values in [0, 1], got {low:g} to {high:g}")

    def _chunks(self, x: Tensor, seed: int) -> Iterator[Tensor]:
        # Each generator is read in image order, so neither chunking nor the size of the set matters.
        angles, noise = _generators(seed)
        for images in torch.split(x, _CHUNK):
            turn = angles.uniform(-self.rotation_degrees, self.rotation_degrees, len(images))
            drawn = noise.standard_normal(tuple(images.shape), dtype=np.float32) if self.noise_std else None
            yield self._shifted(images, turn, drawn)

    def _shifted(self, x: Tensor, angles: Array, noise: Array | None) -> Tensor:
        out = x
        if self.rotation_degrees:
            out = rotate(out, torch.from_numpy(angles))
        if self.contrast != 1:
            # The mean of a single channel alone could be summed by several threads, which rounds in another way.
            mean = torch.cat([out, out[:1]]).mean((2, 3), keepdim=True)[: len(out)]
            out = mean + (out - mean) * self.contrast
        if noise is not None:
            out = out + self.noise_std * torch.from_numpy(noise).to(out)
        return out.clamp(0, 1)


class ShiftByPlace:
    """A shift of images that are met in any order: each comes out as `ImageShift` shifts it among all of its set.

    An image's noise begins where that of the image before it ends. Where that is is kept once it was met.

    Args:
        shift: The shift.
        seed: Seed of its draws.
    """

    def __init__(self, shift: ImageShift, seed: int) -> None:
        self._shift, self._seed = shift, seed
        self._noise = _generators(seed)[1]
        self._begins = [self._place()]  # of each image's noise, and of the next one's

    def __call__(self, x: Tensor, places: Sequence[int]) -> Tensor:
        """Shift some images, ``b x c x h x w`` floats in [0, 1], of the set.

        Args:
            x: The images.
            places: Their places in the set, ``b``, from 0.

        Raises:
            DataError: For another type or range.
        """
        if not len(places):
            return x.clone()
        self._shift.check(x)
        most = self._shift.rotation_degrees
        angles = _generators(self._seed)[0].uniform(-most, most, max(places) + 1)[list(places)]
        shape = tuple(x.shape[1:])
        noise = np.stack([self._noise_at(place, shape) for place in places]) if self._shift.noise_std else None
        return self._shift._shifted(x, angles, noise)

    def _noise_at(self, place: int, shape: tuple[int, ...]) -> Array:
        for first in range(min(place, len(self._begins) - 1), place + 1):
            self._noise.bit_generator.state = self._begins[first]
            drawn = self._noise.standard_normal(shape, dtype=np.float32)
            if first == len(self._begins) - 1:
                self._begins.append(self._place())
        return drawn

    def _place(self) -> dict[str, Any]:
        place: dict[str, Any] = dict(self._noise.bit_generator.state)
        return place


def _generators(seed: int) -> tuple[np.random.Generator, np.random.Generator]:
    """Those of the angles and of the noise."""
    angles, noise = (np.random.default_rng((seed, stream)) for stream in range(2))
    return angles, noise
