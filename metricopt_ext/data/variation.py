"""Images varied for training: mirrored, shifted, and changed in contrast and noise."""

import torch
import torch.nn.functional as F
from torch import Tensor


def flip_and_shift(x: Tensor, rng: torch.Generator, pixels: int = 4) -> Tensor:
    """Mirror half of the images, ``n x c x h x w``, and shift each by up to ``pixels``, padding with zeros."""
    n, _, height, width = x.shape
    mirrored = torch.rand(n, generator=rng).to(x.device) < 0.5
    x = torch.where(mirrored[:, None, None, None], x.flip(-1), x)
    offset = torch.randint(2 * pixels + 1, (2, n), generator=rng).to(x.device)
    rows = offset[0, :, None] + torch.arange(height, device=x.device)
    columns = offset[1, :, None] + torch.arange(width, device=x.device)
    padded = F.pad(x, (pixels,) * 4).movedim(1, -1)
    image = torch.arange(n, device=x.device)[:, None, None]
    return padded[image, rows[:, :, None], columns[:, None, :]].movedim(-1, 1)


def jitter(batch: tuple[Tensor, Tensor], rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """Change the contrast of each image, add noise, and shift the whole batch by a pixel at most: no flips, no turns.

    Args:
        batch: Images, ``n x c x h x w``, of any range or bytes, and labels.
        rng: Draws contrasts within 30%, and noise of a deviation of up to a quarter of the images' own.
    """
    x, y = batch
    each = (len(x), 1, 1, 1)
    values = x.float()
    mean, spread = values.mean((1, 2, 3), keepdim=True), values.std()
    contrast, noisy = (torch.rand(each, generator=rng).to(x.device) for _ in range(2))
    noise = torch.randn(x.shape, generator=rng).to(x.device)
    shift = torch.randint(-1, 2, (2,), generator=rng).tolist()
    values = mean + (0.7 + 0.6 * contrast) * (values - mean) + 0.25 * spread * noisy * noise
    values = values.roll(shift, (2, 3))
    return values.to(x.dtype) if x.is_floating_point() else values.round().clamp(0, 255).to(x.dtype), y
