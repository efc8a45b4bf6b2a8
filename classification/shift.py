"""A shift of the class ratio between the data a classifier is trained on and those it meets in use."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from metricopt_ext.data.labelled import Split
from metricopt_ext.data.splits import Splits
from metricopt_ext.errors import DataError
from metricopt_ext.utils.checks import check_at_least, check_integer
from metricopt_ext.utils.seeding import generator


def shift_class_ratio(splits: Splits, ratio: Sequence[float], seed: int = 0) -> Splits:
    """Leave out validation and test examples at random until their classes have these shares; train stays as it is.

    As few as possible are left out: the class that is scarcest relative to its share is kept whole.

    Args:
        splits: The parts, with any inputs.
        ratio: The ``c`` shares, above 0 and summing to 1; met to within half an example of each class.
        seed: Seed of the choice.

    Raises:
        ValueError: For a ratio of the wrong length or out of range.
        DataError: For a part in which a class would have no examples.
    """
    if len(ratio) != splits.num_classes:
        raise ValueError(f"ratio must hold one share for each of {splits.num_classes} classes, got {list(ratio)}")
    if not (min(ratio) > 0 and abs(sum(ratio) - 1) <= 1e-6):
        raise ValueError(f"ratio must hold shares above 0 that sum to 1, got {list(ratio)}")

    def subsampled(name: str, index: int) -> Split:
        part: Split = getattr(splits, name)
        counts = torch.bincount(part.y, minlength=len(ratio)).tolist()
        size = min(count / share for count, share in zip(counts, ratio, strict=True))
        kept = [round(size * share) for share in ratio]
        if min(kept) == 0:
            raise DataError(
                f"the {name} part is too small for class shares of {list(ratio)}: of {counts} examples by class it "
                f"would keep {kept}"
            )
        return _subsampled(part, counts, kept, generator(seed, "class_ratio", index))

    return replace(splits, validation=subsampled("validation", 0), test=subsampled("test", 1))


def long_tail(splits: Splits, imbalance: float, largest_class: int = 0, seed: int = 0) -> Splits:
    """Leave out train examples at random until the counts of classes fall geometrically; the other parts stay natural.

    Class k of c keeps ``n * imbalance ** (-k / (c - 1))``, from n of the first to n / imbalance of the last, the
    exponential imbalance of long-tailed CIFAR (Cui et al. 2019).

    Args:
        splits: The parts, with any inputs.
        imbalance: Ratio of the first class's count to the last's, at least 1.
        largest_class: The first class's count n; 0 for as many as all the other classes' counts allow.
        seed: Seed of the choice.

    Raises:
        ValueError: A number is out of range.
        DataError: A class has fewer train examples than it should keep, or would keep none.
    """
    check_at_least(1, imbalance=imbalance)
    check_integer(0, largest_class=largest_class)
    part, classes = splits.train, splits.num_classes
    counts = torch.bincount(part.y, minlength=classes).tolist()
    shares = [imbalance ** (-label / (classes - 1)) for label in range(classes)]
    size = largest_class or min(count / share for count, share in zip(counts, shares, strict=True))
    kept = [round(size * share) for share in shares]
    if min(kept) == 0 or any(count < keep for count, keep in zip(counts, kept, strict=True)):
        raise DataError(
            f"the train part is too small for a long tail from {round(size)} examples of the first class to"
            f" 1/{imbalance:g} of that: it has {counts} examples by class, and would keep {kept}"
        )
    return replace(splits, train=_subsampled(part, counts, kept, generator(seed, "long_tail")))


def _subsampled(part: Split, counts: Sequence[int], kept: Sequence[int], rng: torch.Generator) -> Split:
    """The part with some of each class's examples, chosen at random, in the order that they had."""
    rows = [
        (part.y == label).nonzero().flatten()[torch.randperm(count, generator=rng)[:keep]]
        for label, (count, keep) in enumerate(zip(counts, kept, strict=True))
    ]
    return part.take(torch.cat(rows).sort().values)
