"""Examples with several labels each, divided such that each part has its share of each label."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from metricopt_ext.data.halves import Halves
from metricopt_ext.utils.seeding import generator


def label_parts(y: Tensor, sizes: Sequence[int], seed: int) -> tuple[Tensor, ...]:
    """Divide examples at random, the rarest labels first (iterative stratification, Sechidis et al. 2011).

    Args:
        y: Labels, ``n x k`` of 0 and 1.
        sizes: How many examples each part has; they sum to n.
        seed: Seed of the division.

    Returns:
        The indices of each part, ascending.
    """
    order = torch.randperm(len(y), generator=generator(seed, "label parts")).numpy()
    labels = y.numpy(force=True).astype(bool)[order]
    shares = np.array(sizes) / len(y)
    wanted = np.outer(shares, labels.sum(0))  # of each label, by part
    room = np.array(sizes, dtype=np.float64)
    part = np.full(len(y), -1)
    while (part < 0).any():
        left = part < 0
        counts = labels[left].sum(0).astype(np.float64)
        rarest = int(np.where(counts > 0, counts, math.inf).argmin())
        rows = np.flatnonzero(left & labels[:, rarest]) if counts.any() else np.flatnonzero(left)
        for row in rows:
            lacks = wanted[:, rarest] if counts.any() else room
            # the part that lacks the label most; of equals the one with most room, if it has any
            chosen = max(range(len(sizes)), key=lambda each: (room[each] > 0, lacks[each], room[each]))
            part[row] = chosen
            wanted[chosen] -= labels[row]
            room[chosen] -= 1
    return tuple(torch.from_numpy(np.sort(order[part == each])).to(y.device) for each in range(len(sizes)))


def label_halves(y: Tensor, seed: int) -> Halves:
    """Divide examples with several labels into two halves with about the same number of each label.

    Args:
        y: Labels, ``n x k`` of 0 and 1.
        seed: Seed of the division.

    Returns:
        The halves; none if a single example has a label, or lacks it, as one half would be without it.
    """
    if len(y) < 2:
        return "there are fewer than two examples"
    having = y.long().sum(0)
    if single := int(((having == 1) | (having == len(y) - 1)).sum()):
        verb = "has" if single == 1 else "have"
        return f"{single} of {len(having)} labels {verb} a single example with or without it, and both need one"
    first, second = label_parts(y, [(len(y) + 1) // 2, len(y) // 2], seed)
    return first, second
