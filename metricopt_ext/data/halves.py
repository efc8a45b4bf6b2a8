"""Two halves of the data that a metric sees, from which the guard learns how much of a gain is chance."""

import torch
from torch import Tensor

from metricopt_ext.utils.seeding import generator

# The indices of each half, ascending; or why there are none, in words that follow "as".
Halves = tuple[Tensor, Tensor] | str

# How often classes are divided anew. More hardly change the mean over them.
DRAWS = 8


def random_halves(count: int, seed: int) -> Halves:
    """Divide some examples at random into two halves.

    Args:
        count: How many there are.
        seed: Seed of the division.

    Returns:
        The halves; none of a single example.
    """
    if count < 2:
        return "there are fewer than two examples"
    order = torch.randperm(count, generator=generator(seed, "halves"))
    return order[::2].sort().values, order[1::2].sort().values


def class_draws(y: Tensor, seed: int, draws: int = DRAWS) -> list[tuple[Tensor, Tensor]] | str:
    """Divide examples by class several times, each time at random; see `class_halves`, whose division is the first.

    None is there twice. Few classes have fewer divisions: of four there are three, and it is drawn up to four times as
    often as asked for to find them.

    Args:
        y: Labels, ``n`` or ``n x l``.
        seed: Seed of the divisions.
        draws: How many.

    Returns:
        At most so many pairs of halves; or why there are none, if the first division has too few classes.
    """
    first = class_halves(y, seed)
    if isinstance(first, str):
        return first
    pairs = {_division(first): first}
    for draw in range(1, 4 * draws):  # of few classes, the same division is drawn again and again
        if len(pairs) < draws and not isinstance(halves := class_halves(y, seed, draw), str):
            pairs.setdefault(_division(halves), halves)
    return list(pairs.values())


def _division(halves: tuple[Tensor, Tensor]) -> frozenset[bytes]:
    """Return what two divisions have in common if they are the same, whichever half is the first."""
    return frozenset(half.cpu().numpy().tobytes() for half in halves)


def class_halves(y: Tensor, seed: int, draw: int = 0) -> Halves:
    """Divide examples at random by class: what differs between the halves differs on new classes too.

    Args:
        y: Labels, ``n``; or ``n x l`` at several levels, of which the first divides. Classes that share a label at a
            further level are dealt out to both halves.
        seed: Seed of the division.
        draw: Which of the divisions by this seed.

    Returns:
        The halves; none if one would have fewer than two classes of two examples, at any level.
    """
    labels = (y if y.dim() > 1 else y[:, None]).cpu()
    classes, of_class = labels[:, 0].unique(return_inverse=True)

    def rng(*level: int) -> torch.Generator:
        return generator(seed, "more halves", draw, *level) if draw else generator(seed, "halves", *level)

    order = torch.randperm(len(classes), generator=rng())
    for level in range(1, labels.shape[1]):
        above, of_above = labels[:, level].unique(return_inverse=True)
        place = torch.randperm(len(above), generator=rng(level))[of_above]
        place = torch.zeros_like(order).scatter_reduce(0, of_class, place, "amin", include_self=False)
        order = order[place[order].argsort(stable=True)]
    first, second = (torch.isin(labels[:, 0], classes[half]).nonzero().flatten() for half in (order[::2], order[1::2]))
    for level in labels.T:
        if min(int((level[half].unique(return_counts=True)[1] > 1).sum()) for half in (first, second)) < 2:
            return "one of two halves of its classes would have fewer than two classes with two examples"
    return first.to(y.device), second.to(y.device)


def stratified_halves(y: Tensor, seed: int, within: Tensor | None = None) -> Halves:
    """Divide examples at random into two halves with the same number of each class, give or take one.

    Args:
        y: Labels, ``n``.
        seed: Seed of the division.
        within: Numbers of groups within the classes, ``n``, those of a class next to each other; each half has the same
            number of each group too, give or take one.

    Returns:
        The halves; none if a class has a single example, as one half would lack it.
    """
    if len(y) == 0:
        return "there are no examples"
    counts = y.unique(return_counts=True)[1]
    if single := int((counts < 2).sum()):
        return (
            f"{single} of {len(counts)} classes {'has' if single == 1 else 'have'} a single example, and both need one"
        )
    order = torch.randperm(len(y), generator=generator(seed, "halves")).to(y.device)
    kinds = y if within is None else within
    order = order[kinds[order].argsort(stable=True)]  # class by class, in random order within each
    return order[::2].sort().values, order[1::2].sort().values
