"""Images with what a detector finds before and after finetuning."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from metricopt_ext.detection.records import Annotated, Detections
from metricopt_ext.detection.toolkit import Example
from metricopt_ext.experiment.style import new_figure, save_figure

RIGHT, WRONG, MISSED = "#35c759", "#ff3b30", "#ffd60a"
WIDTH = 2.8  # of an image, in inches
SCORE = 0.5  # the least that is drawn


def plot_detections(
    examples: Sequence[Example],
    before: Sequence[Detections],
    after: Sequence[Detections],
    classes: Sequence[str],
    path: str | Path,
) -> Path:
    """Draw a row for each image: what was found in it before and after finetuning.

    Correct detections (IoU of at least 0.5 with an object of their class that none with a better score found) are
    green, others red, each with its class and score; objects that were missed are dashed in yellow.

    Args:
        examples: The images, at least one; meant for a handful.
        before: Detections in each image before finetuning.
        after: Detections after finetuning.
        classes: Names of the classes.
        path: The PNG file.
    """
    height = max(example.image.shape[1] / example.image.shape[2] for example in examples) * WIDTH
    figure, panels = new_figure(2 * WIDTH, height * len(examples) + 0.5, len(examples), 2)
    for axes in panels.flat:
        axes.set_axis_off()
    figure.suptitle(f"detections of score {SCORE:g} or more; green: right, red: wrong, yellow: missed", fontsize=8)
    for line, example, *found in zip(panels, examples, before, after, strict=True):
        for axes, each in zip(line, found, strict=True):
            _draw_detections(axes, example, each, classes)
    for axes, title in zip(panels[0], ("before", "after"), strict=True):
        axes.set_title(title, fontsize=9)
    return save_figure(figure, path)


def _draw_detections(axes: Any, example: Example, found: Detections, classes: Sequence[str]) -> None:
    _show(axes, example.image)
    order = found.scores.argsort(descending=True)
    order = order[found.scores[order] >= SCORE]
    shown = Detections(found.boxes[order].cpu(), found.scores[order].cpu(), found.labels[order].cpu())
    right, missed = _outcomes(shown, example.truth)
    for box in example.truth.boxes[missed].tolist():
        _box(axes, box, MISSED, linestyle="--")
    for box, value, label, hit in zip(
        shown.boxes.tolist(), shown.scores.tolist(), shown.labels.tolist(), right.tolist(), strict=True
    ):
        _box(axes, box, RIGHT if hit else WRONG)
        _name(axes, box, f"{classes[label]} {value:.2f}", RIGHT if hit else WRONG)


def _outcomes(found: Detections, truth: Annotated) -> tuple[Tensor, Tensor]:
    """Which detections, best first, are correct, and which objects were missed; difficult and crowd ones never are."""
    overlaps = box_iou(found.boxes, truth.boxes)
    overlaps[found.labels[:, None] != truth.labels] = 0
    right = torch.zeros(len(found), dtype=torch.bool)
    free = torch.ones(len(truth.labels), dtype=torch.bool)
    for row, overlap in enumerate(overlaps):
        near = overlap * free
        if len(near) and near.max() >= 0.5:
            right[row] = True
            free[near.argmax()] = False
    return right, free & ~truth.difficult & ~truth.crowd


def _show(axes: Any, image: Tensor) -> None:
    height, width = image.shape[1:]
    # The edges of the first pixel are 0 and 1, like those of boxes.
    axes.imshow(image.cpu().permute(1, 2, 0).numpy(), extent=(0, width, height, 0), interpolation="nearest")
    axes.set_xlim(0, width)
    axes.set_ylim(height, 0)


def _box(axes: Any, box: Sequence[float], colour: str, **line: Any) -> None:
    from matplotlib.patches import Rectangle

    left, top, right, bottom = box
    axes.add_patch(
        Rectangle((left, top), right - left, bottom - top, fill=False, edgecolor=colour, linewidth=1.5, **line)
    )


def _name(axes: Any, box: Sequence[float], text: str, colour: str) -> None:
    # Above the box's visible part, or within it at the upper edge of the image; to the left of its right end there.
    bottom, end = axes.get_ylim()[0], axes.get_xlim()[1]
    left, top, right = max(box[0], 0), max(box[1], 0), min(box[2], end)
    inside, at_right = top < 0.07 * bottom, left > 0.75 * end
    axes.annotate(
        text,
        (right if at_right else left, top),
        xytext=(0, -1 if inside else 1),
        textcoords="offset points",
        fontsize=6,
        color="black",
        va="top" if inside else "bottom",
        ha="right" if at_right else "left",
        bbox={"facecolor": colour, "edgecolor": "none", "pad": 0.6, "alpha": 0.85},
    )


def box_iou(a: Tensor, b: Tensor) -> Tensor:
    """Return the intersection over union of each box of ``a``, ``n x 4``, with each of ``b``, ``m x 4``: ``n x m``.

    Computed on the device of ``b``, in float64; 0 if neither box has area.
    """
    a, b = a.to(b.device).double(), b.double()
    sides = torch.minimum(a[:, None, 2:], b[:, 2:]) - torch.maximum(a[:, None, :2], b[:, :2])
    common = sides.clamp(min=0).prod(2)
    area, other = ((boxes[:, 2:] - boxes[:, :2]).prod(1) for boxes in (a, b))
    whole = area[:, None] + other - common
    return torch.where(common > 0, common / whole, 0.0)
