"""Images with boxes, and how far two boxes overlap."""

from pathlib import Path

import torch

from metricopt_ext.detection.records import Annotated
from metricopt_ext.detection.toolkit import Example

CLASSES = 3


def example(boxes: int, height: int = 64, width: int = 64, seed: int = 0, *, within: int = 20) -> Example:
    """Draw an image of so many boxes, of 10 to 18 pixels a side, whose corners are ``within`` pixels of the image's."""
    rng = torch.Generator().manual_seed(seed)
    corners = torch.rand(boxes, 2, generator=rng) * within
    truth = Annotated(
        image_id=seed,
        path=Path("none"),
        width=width,
        height=height,
        boxes=torch.cat([corners, corners + 10 + 8 * torch.rand(boxes, 2, generator=rng)], dim=1),
        labels=torch.randint(CLASSES, (boxes,), generator=rng),
        difficult=torch.zeros(boxes, dtype=torch.bool),
        crowd=torch.zeros(boxes, dtype=torch.bool),
    )
    return Example(torch.randint(256, (3, height, width), generator=rng, dtype=torch.uint8), truth)


def naive_iou(one: list[float], other: list[float]) -> float:
    """Return intersection over union of two boxes, straight from its definition; 0 for two boxes of no area."""
    width = min(one[2], other[2]) - max(one[0], other[0])
    height = min(one[3], other[3]) - max(one[1], other[1])
    common = max(width, 0.0) * max(height, 0.0)
    area = sum((box[2] - box[0]) * (box[3] - box[1]) for box in (one, other)) - common
    return common / area if area else 0.0


def blank_examples(count: int, name: str = "a", seed: int = 0) -> list[Example]:
    """Make blank images with two objects each, one of either class."""
    rng = torch.Generator().manual_seed(seed)
    made = []
    for i in range(count):
        corners = torch.randint(0, 20, (2, 2), generator=rng).float()
        boxes = torch.cat([corners, corners + torch.randint(8, 12, (2, 2), generator=rng)], 1)
        no = torch.zeros(2, dtype=torch.bool)
        truth = Annotated(f"{name}{i}", Path("none"), 32, 32, boxes, torch.tensor([0, 1]), no, no.clone())
        image = torch.full((3, 32, 32), i, dtype=torch.uint8)
        image[1] = ord(name)  # no two sets have an image in common
        made.append(Example(image, truth))
    return made
