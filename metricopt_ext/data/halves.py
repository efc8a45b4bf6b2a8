"""Two halves of the data that a metric sees, from which the guard learns how much of a gain is chance."""

import torch
from torch import Tensor

from metricopt_ext.utils.seeding import generator


def class_halves(y: Tensor, seed: int) -> tuple[Tensor, ...]:
    """Divide examples at random by class: what differs between the halves differs on new classes too.

    Args:
        y: Labels, ``n``.
        seed: Seed of the division.

    Returns:
        The indices of each half, ascending; empty if a half would have fewer than two classes of two examples.
    """
    classes, counts = y.cpu().unique(return_counts=True)
    order = torch.randperm(len(classes), generator=generator(seed, "halves"))
    halves = order[::2], order[1::2]
    if min(int((counts[half] > 1).sum()) for half in halves) < 2:
        return ()
    return tuple(torch.isin(y, classes[half].to(y.device)).nonzero().flatten() for half in halves)


def stratified_halves(y: Tensor, seed: int) -> tuple[Tensor, ...]:
    """Divide examples at random into two halves with the same number of each class, give or take one.

    Args:
        y: Labels, ``n``.
        seed: Seed of the division.

    Returns:
        The indices of each half, ascending; empty if a class has a single example, as one half would lack it.
    """
    order = torch.randperm(len(y), generator=generator(seed, "halves")).to(y.device)
    order = order[y[order].argsort(stable=True)]  # class by class, in random order within each
    if len(y) == 0 or int(y.unique(return_counts=True)[1].min()) < 2:
        return ()
    return order[::2].sort().values, order[1::2].sort().values
