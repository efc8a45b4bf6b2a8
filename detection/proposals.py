"""Recall of region proposals: the share of objects that one of the first k proposals covers."""

from collections.abc import Sequence

import torch
from torch import Tensor

from metricopt_ext.detection.records import DetectionSet
from metricopt_ext.errors import DataError


def proposal_recall(
    proposals: Sequence[Tensor],
    truth: DetectionSet,
    counts: Sequence[int] = (10, 50, 100, 300),
    iou: float = 0.5,
) -> dict[int, float]:
    """Return, for each k, the share of objects whose box one of the first k proposals of its image covers.

    Classes don't matter. Difficult objects and crowd regions don't count. One proposal may cover several objects.

    Args:
        proposals: Boxes ``p x 4`` for each image of ``truth`` in the same order, best first; p may differ.
        truth: The images with their objects.
        counts: The numbers k, each at least 1.
        iou: Minimum intersection over union of a box and a proposal that covers it, in (0, 1].

    Raises:
        DataError: The numbers of proposals and images differ, ``counts`` or ``iou`` is impossible, or no object
            counts.
    """
    if len(proposals) != len(truth):
        raise DataError(f"there are proposals for {len(proposals)} images, but {len(truth)} images")
    if not counts or min(counts) < 1:
        raise DataError(f"counts must be one or more numbers of at least 1, got {list(counts)}")
    if not 0 < iou <= 1:
        raise DataError(f"iou must be in (0, 1], got {iou}")
    ranks = []
    for boxes, image in zip(proposals, truth.images, strict=True):
        covered = box_iou(image.boxes[~(image.difficult | image.crowd)], boxes) >= iou
        never = torch.full((len(covered), 1), True, device=covered.device)  # as if one more proposal covered all
        first = torch.cat([covered, never], 1).int().argmax(1)
        ranks.append(torch.where(covered.any(1), first.double(), torch.inf).cpu())
    everything = torch.cat(ranks) if ranks else torch.zeros(0)
    if not len(everything):
        raise DataError(f"none of {len(truth)} images has an object that counts; the recall of proposals needs one")
    return {k: float((everything < k).double().mean()) for k in counts}


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
