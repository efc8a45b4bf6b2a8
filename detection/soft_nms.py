"""Gaussian soft-NMS by class (Bodla et al., 2017, "Soft-NMS"), and detections of several views of an image as one."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from metricopt_ext.detection.records import as_array
from metricopt_ext.utils.extras import install

try:
    from torchvision.ops import batched_nms
except ImportError as error:
    raise ImportError(f"soft-NMS needs torchvision: {install('torchvision')}") from error

Array = npt.NDArray[Any]

ENTRIES = 1 << 22  # overlaps that are in memory at once, 16 MB of float32, but for a larger group


def soft_nms(
    boxes: Tensor, scores: Tensor, groups: Tensor, *, sigma: float, threshold: float, most: int | None = None
) -> tuple[Tensor, Tensor]:
    """Lower the scores of boxes that overlap better ones of their group, instead of removing them.

    The best box of a group is taken, and the score of each other is multiplied by ``exp(-IoU ** 2 / sigma)`` of both;
    then so with the best of the rest. Of equal scores the first box is taken.

    Args:
        boxes: ``n x 4`` (left, top, right, bottom).
        scores: ``n``, above 0.
        groups: ``n`` integers: boxes of different ones, such as classes or images, don't compete.
        sigma: Above 0; the larger, the less a score falls.
        threshold: Boxes whose score falls to it or below are left out; at least 0.
        most: How many boxes of a group are taken at most; all of them by default.

    Returns:
        The rows of the boxes that are left, ``m``, ascending, and their scores, ``m``.
    """
    # On the CPU, whose steps are shorter than what it takes to begin one elsewhere.
    corners, current, left = as_array(boxes), as_array(scores), np.zeros(len(scores), as_array(scores).dtype)
    _, group, sizes = np.unique(as_array(groups), return_inverse=True, return_counts=True)
    rows, ends = np.argsort(group, kind="stable"), np.cumsum(sizes)
    order = np.argsort(sizes, kind="stable")
    while len(order):
        # Groups of like size go together: what a smaller one is padded with is computed too.
        width = int(sizes[order[-1]])
        chunk = order[-max(1, ENTRIES // width**2) :]
        chunk = chunk[2 * sizes[chunk] > width]
        order = order[: -len(chunk)]
        places = np.full((len(chunk), width), -1)
        for padded, g in zip(places, chunk, strict=True):
            padded[: sizes[g]] = rows[ends[g] - sizes[g] : ends[g]]
        _lower(left, corners, current, places, sigma, threshold, width if most is None else min(most, width))
    kept = np.flatnonzero(left)
    return torch.from_numpy(kept).to(scores.device), torch.from_numpy(left[kept]).to(scores)


def _lower(left: Array, boxes: Array, scores: Array, places: Array, sigma: float, threshold: float, steps: int) -> None:
    """Write the scores of the boxes that are taken, of groups side by side; ``places`` are rows, ``g x w``, or -1."""
    current = np.where(places >= 0, scores[places], 0)
    factors = np.exp(-(_overlaps(boxes[places]) ** 2) / sigma)
    inner = np.arange(places.shape[1])
    factors[:, inner, inner] = 0  # what is taken does not come again
    every = np.arange(len(places))
    for _ in range(steps):
        at = current.argmax(axis=1)
        best = current[every, at]
        taken = best > threshold
        if not taken.any():
            return
        left[places[every[taken], at[taken]]] = best[taken]
        current *= factors[every, at]


def _overlaps(boxes: Array) -> Array:
    """Return the IoU of each two boxes of a group, ``g x w x w`` of ``g x w x 4``; 0 of two without area, as in NMS."""
    left, top, right, bottom = (boxes[..., side] for side in range(4))
    width = np.minimum(right[:, :, None], right[:, None]) - np.maximum(left[:, :, None], left[:, None])
    height = np.minimum(bottom[:, :, None], bottom[:, None]) - np.maximum(top[:, :, None], top[:, None])
    common = np.maximum(width, 0) * np.maximum(height, 0)
    area = (right - left) * (bottom - top)
    whole = area[:, :, None] + area[:, None] - common
    overlaps: Array = np.divide(common, whole, out=np.zeros_like(common), where=whole > 0)
    return overlaps


def merged(
    found: Sequence[Sequence[dict[str, Tensor]]], *, nms: float, sigma: float, threshold: float, most: int
) -> list[dict[str, Tensor]]:
    """Return the detections of each image from what was found in views of it, best first.

    The boxes of all views of an image compete as if they were of one, by class.

    Args:
        found: Of each image and view ``boxes``, ``n x 4`` in pixels of the image, ``scores`` and ``labels``, ``n``,
            before NMS.
        nms: IoU above which NMS removes the worse of two boxes, where ``sigma`` is 0.
        sigma: Of soft-NMS, see `soft_nms`; 0 for NMS.
        threshold: Lowest score of soft-NMS.
        most: Most detections of an image.
    """
    pooled = [{name: torch.cat([view[name] for view in views]) for name in views[0]} for views in found]
    if not sigma:
        kept = [batched_nms(each["boxes"], each["scores"], each["labels"], nms)[:most] for each in pooled]
        return [{name: each[name][rows] for name in each} for each, rows in zip(pooled, kept, strict=True)]
    # Images together: each step of soft-NMS is for all of their classes at once.
    counts = [len(each["scores"]) for each in pooled]
    boxes, scores, labels = (torch.cat([each[name] for each in pooled]) for name in ("boxes", "scores", "labels"))
    image = torch.arange(len(pooled), device=labels.device).repeat_interleave(
        torch.tensor(counts, device=labels.device)
    )
    groups = image * (int(labels.max()) + 1 if len(labels) else 1) + labels
    rows, lowered = soft_nms(boxes, scores, groups, sigma=sigma, threshold=threshold, most=most)
    merged = []
    for i in range(len(pooled)):
        own = (image[rows] == i).nonzero().flatten()
        own = own[torch.argsort(lowered[own], descending=True, stable=True)[:most]]
        merged.append({"boxes": boxes[rows[own]], "scores": lowered[own], "labels": labels[rows[own]]})
    return merged


def mirrored(boxes: Tensor, width: int) -> Tensor:
    """Return boxes, ``n x 4``, of an image that was mirrored from left to right, in pixels of the image itself."""
    left, top, right, bottom = boxes.unbind(1)
    return torch.stack((width - right, top, width - left, bottom), dim=1)
