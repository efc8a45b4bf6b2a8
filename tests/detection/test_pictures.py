"""What the pictures of detections draw."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("PIL")

from matplotlib.colors import to_rgb
from PIL import Image

from metricopt_ext.detection import pictures
from metricopt_ext.detection.pictures import plot_detections
from metricopt_ext.detection.records import Annotated, Detections
from metricopt_ext.detection.toolkit import Example


def annotated(boxes: Any, labels: Any = None, difficult: Any = None, crowd: Any = None) -> Annotated:
    boxes = torch.as_tensor(boxes, dtype=torch.float32).reshape(-1, 4)
    none = torch.zeros(len(boxes), dtype=torch.bool)
    return Annotated(
        image_id="a",
        path=Path("a.png"),
        width=100,
        height=80,
        boxes=boxes,
        labels=none.long() if labels is None else torch.tensor(labels),
        difficult=none if difficult is None else torch.as_tensor(difficult),
        crowd=none if crowd is None else torch.as_tensor(crowd),
    )


A, B, C, FAR = [10, 10, 30, 30], [50, 40, 90, 70], [60, 5, 80, 25], [0, 50, 9, 79]
EXAMPLE = Example(torch.zeros(3, 80, 100, dtype=torch.uint8), annotated([A, B, C], [0, 1, 1], [False, False, True]))


def found(*boxes: list[int], scores: list[float], labels: list[int]) -> Detections:
    return Detections(
        torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4), torch.tensor(scores), torch.tensor(labels)
    )


def test_detections_are_drawn_right_wrong_or_missed(tmp_path: Path) -> None:
    """Before: one with the wrong class. After: all that are not difficult; then nothing."""
    before = found(A, [52, 42, 92, 72], FAR, scores=[0.9, 0.8, 0.4], labels=[0, 0, 1])
    after = found(A, B, scores=[0.9, 0.8], labels=[0, 1])
    colours = []
    for each in (before, after, found(scores=[], labels=[])):
        path = plot_detections([EXAMPLE], [each], [each], ("cat", "dog"), tmp_path / "detections.png")
        pixels = np.array(Image.open(path).convert("RGB")).reshape(-1, 3)
        drawn = (np.array(to_rgb(colour)) * 255 for colour in (pictures.RIGHT, pictures.WRONG, pictures.MISSED))
        colours.append([bool((np.abs(pixels - colour).max(1) < 3).any()) for colour in drawn])
    assert colours == [[True, True, True], [True, False, False], [False, False, True]]
