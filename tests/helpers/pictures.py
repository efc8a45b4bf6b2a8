"""Pictures to classify, and pictures that a run left."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
from PIL import Image


def coloured(folder: Path, *, per_class: int = 12) -> Path:
    """Write RGB images of 32 x 32, each class with more of its own colour, but not so much that phi changes nothing."""
    rng, path = np.random.default_rng(0), folder / "images"
    for channel, name in enumerate(("red", "green", "blue")):
        (path / name).mkdir(parents=True)
        for i in range(per_class):
            pixels = rng.integers(0, 225, (32, 32, 3), dtype=np.uint8)
            pixels[..., channel] += 30
            Image.fromarray(pixels).save(path / name / f"{i:02d}.png")
    return path


def check_figures(paths: Iterable[Path]) -> None:
    """Check that each is a PNG of a size to look at."""
    for path in paths:
        with Image.open(path) as image:
            assert image.format == "PNG"
            assert min(image.size) > 200
