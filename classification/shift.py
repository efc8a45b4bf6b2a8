"""A shift of the class ratio, as between the data a classifier was trained on and those it meets in use."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from metricopt_ext.data.labelled import Split
from metricopt_ext.data.splits import Splits
from metricopt_ext.errors import DataError
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
        rng = generator(seed, "class_ratio", index)
        rows = [
            (part.y == label).nonzero().flatten()[torch.randperm(count, generator=rng)[:keep]]
            for label, (count, keep) in enumerate(zip(counts, kept, strict=True))
        ]
        return part.take(torch.cat(rows).sort().values)

    return replace(splits, validation=subsampled("validation", 0), test=subsampled("test", 1))
