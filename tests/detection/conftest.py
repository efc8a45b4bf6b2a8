"""A set of small images with squares."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from metricopt_ext.detection.records import Annotated, DetectionSet


@pytest.fixture
def squares(tmp_path: Path) -> Callable[..., DetectionSet]:
    """Make a set of small images, each with one or two squares: reds and greens, on noise."""

    def make(images: int, *, width: int = 64, height: int = 64, seed: int = 0) -> DetectionSet:
        rng = np.random.default_rng(seed)
        made = []
        for index in range(images):
            pixels = rng.integers(90, 130, (height, width, 3), dtype=np.uint8)
            count = index % 2 + 1
            labels = rng.integers(0, 2, count)
            left = rng.integers(0, width // 2 - 20, count) + np.arange(count) * width // 2  # side by side
            top = rng.integers(0, height - 24, count)
            side = rng.integers(14, 20, count)
            boxes = np.stack([left, top, left + side, top + side], axis=1)
            for (x0, y0, x1, y1), label in zip(boxes, labels, strict=True):
                pixels[y0:y1, x0:x1] = (220, 30, 30) if label == 0 else (30, 220, 30)
            path = tmp_path / f"squares-{seed}-{index}.png"
            Image.fromarray(pixels).save(path)
            nobody = torch.zeros(count, dtype=torch.bool)
            sizes = {"width": width, "height": height}
            truth = {"boxes": torch.from_numpy(boxes).float(), "labels": torch.from_numpy(labels)}
            made.append(Annotated(f"{seed}-{index}", path, **sizes, **truth, difficult=nobody, crowd=nobody))
        return DetectionSet(("red", "green"), made)

    return make
