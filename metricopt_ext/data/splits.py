"""The three parts of a labelled set: what the loss sees, what the metric sees, and what the result is reported on."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from metricopt_ext.data.labelled import Split
from metricopt_ext.data.reading import Reading
from metricopt_ext.data.shift import ImageShift, ShiftByPlace
from metricopt_ext.data.streamed import StreamedImages, as_inputs, changed
from metricopt_ext.errors import DataError
from metricopt_ext.utils.seeding import generator

PARTS = ("train", "validation", "test")


@dataclass(frozen=True, eq=False)
class Splits:
    """Train, validation and test examples of one set.

    Attributes:
        train: What the surrogate loss is computed on.
        validation: What the metric is queried on.
        test: What the result is reported on.
        class_names: The names of all c classes; labels index them. Of several labels each, the names of the k labels.
        reading: How the file that they come from was read; None where there is nothing to say.

    Raises:
        DataError: For fewer than two classes, an empty part, inputs whose shape differs from train's, or a label
            without a name.
    """

    train: Split
    validation: Split
    test: Split
    class_names: tuple[str, ...]
    reading: Reading | None = None

    def __post_init__(self) -> None:
        """Check that the parts fit together."""
        several = self.train.y.ndim == 2
        if self.num_classes < 2:
            raise DataError(f"a set needs at least two classes, got {self.num_classes}")
        for name in PARTS:
            part: Split = getattr(self, name)
            if len(part) == 0:
                raise DataError(f"the {name} part is empty")
            shape, wanted = tuple(part.x.shape[1:]), tuple(self.train.x.shape[1:])
            if shape != wanted:
                raise DataError(f"the {name} inputs must be of shape n x {wanted} like those of train, got {shape}")
            if part.y.ndim != self.train.y.ndim:
                raise DataError(f"the {name} labels must be of the kind of train's, got shape {tuple(part.y.shape)}")
            if several and part.y.shape[1] != self.num_classes:
                raise DataError(f"the {name} part has {part.y.shape[1]} labels each, but {self.num_classes} names")
            if several:
                continue
            wrong = [label for label in sorted(part.y.unique().tolist()) if not 0 <= label < self.num_classes]
            if wrong:
                raise DataError(f"the {name} labels must be in 0..{self.num_classes - 1}, got {wrong[0]}")

    @property
    def num_classes(self) -> int:
        """Number of classes c."""
        return len(self.class_names)

    def classes_of(self, name: str) -> list[str]:
        """Return the names of the classes that have examples in a part."""
        part: Split = getattr(self, name)
        return [self.class_names[label] for label in part.y.unique().tolist()]

    def map(self, change: Callable[[Split, str], Split]) -> "Splits":
        """Return the splits with ``change(part, name)`` applied to each part."""
        train, validation, test = (change(getattr(self, name), name) for name in PARTS)
        return replace(self, train=train, validation=validation, test=test)

    def to(self, device: torch.device) -> "Splits":
        """Return all parts on a device."""
        return self.map(lambda part, name: replace(part, x=part.x.to(device), y=part.y.to(device)))

    def shifted(self, shift: ImageShift, seed: int) -> "Splits":
        """Return the images of validation and test shifted, as floats in [0, 1]; train stays as it is.

        Args:
            shift: The shift of images, ``n x c x h x w``, uint8 or floats in [0, 1].
            seed: Seed of its draws, which differ between the two parts.
        """
        drawn = {name: generator(seed, "shift", i).initial_seed() for i, name in enumerate(PARTS[1:])}

        def change(part: Split, name: str) -> Split:
            if name not in drawn:
                return part
            x = changed(part.x, lambda x: x.float().div_(255)) if part.x.dtype == torch.uint8 else part.x
            if isinstance(images := cast(Any, x), StreamedImages):
                return replace(part, x=as_inputs(images.changed_by_place(ShiftByPlace(shift, drawn[name]))))
            return replace(part, x=shift(x, seed=drawn[name]))

        return self.map(change)


def check_fractions(fractions: Sequence[float]) -> None:
    """Reject shares of train, validation and test that are not above 0 or do not sum to 1.

    Raises:
        ValueError: The shares are rejected; the message gives them.
    """
    if not (len(fractions) == 3 and min(fractions) > 0 and abs(sum(fractions) - 1) <= 1e-6):  # NaN is none
        raise ValueError(f"fractions must be three numbers above 0 that sum to 1, got {tuple(fractions)}")
