"""Gaussian soft-NMS by class (Bodla et al., 2017, "Soft-NMS"), and detections of several views of an image as one."""

from collections.abc import Sequence

import torch
from torch import Tensor

try:
    from torchvision.ops import batched_nms, box_iou
except ImportError as error:
    raise ImportError("soft-NMS needs torchvision: pip install 'metricopt-ext[detection]'") from error

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
    left = torch.zeros_like(scores)
    _, group, counts = torch.unique(groups, return_inverse=True, return_counts=True)
    rows = torch.argsort(group, stable=True)
    ends = counts.cumsum(0).tolist()
    # Groups of like size go together: what a smaller one is padded with is computed too.
    order = sorted(range(len(ends)), key=lambda g: int(counts[g]))
    sizes = counts.tolist()
    while order:
        width = sizes[order[-1]]
        chunk = order[-max(1, ENTRIES // width**2) :]
        chunk = [g for g in chunk if 2 * sizes[g] > width]
        del order[-len(chunk) :]
        places = rows.new_full((len(chunk), width), -1)
        for i, g in enumerate(chunk):
            places[i, : sizes[g]] = rows[ends[g] - sizes[g] : ends[g]]
        _lower(left, boxes, scores, places, sigma, threshold, width if most is None else min(most, width))
    kept = left.nonzero().flatten()
    return kept, left[kept]


def _lower(
    left: Tensor, boxes: Tensor, scores: Tensor, places: Tensor, sigma: float, threshold: float, steps: int
) -> None:
    """Write the scores of the boxes that are taken, of groups side by side; ``places`` are rows, ``g x w``, or -1."""
    there = places >= 0
    places = places.clamp(min=0)
    current = torch.where(there, scores[places], 0)
    inside = boxes[places]
    # Two boxes without area have no IoU; they don't compete, as in NMS.
    overlaps = torch.stack([box_iou(each, each) for each in inside]).nan_to_num(nan=0.0)
    factors = torch.exp(-(overlaps**2) / sigma)
    every = torch.arange(len(places), device=places.device)
    for _ in range(steps):
        best, at = current.max(dim=1)
        taken = best > threshold
        if not taken.any():
            return
        left[places[every[taken], at[taken]]] = best[taken]
        current = current * factors[every, at]
        current[every, at] = 0


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
