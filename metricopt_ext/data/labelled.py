"""Examples with their class labels, in memory."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from metricopt_ext.data.reading import Reading
from metricopt_ext.data.streamed import is_streamed, taken
from metricopt_ext.errors import DataError


@dataclass(frozen=True, eq=False)
class Split:
    """Examples and their labels.

    Attributes:
        x: Inputs, ``n x ...``: finite float32, or uint8 images; or images on disk (`StreamedImages`).
        y: Labels, ``n`` int64; of several labels each (multi-label) ``n x k`` int64, 0 or 1.
        columns: What else is known of each row, such as its weight or its region, by name: arrays of ``n``. A metric
            may be given them; a model never is.
        names: What each example is called in messages, such as its file; empty if it is of none.

    Raises:
        DataError: For other types, unequal lengths, or inputs that are not finite.
    """

    x: Tensor
    y: Tensor
    columns: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict, kw_only=True)
    names: Sequence[str] = field(default=(), kw_only=True)

    def __post_init__(self) -> None:
        """Check types and lengths."""
        self._check_x()
        for name, column in self.columns.items():
            if column.shape != (len(self.x),):
                raise DataError(f"column {name!r} must have {len(self.x)} values, one per row of x, got {column.shape}")
        several = self.y.dtype == torch.int64 and self.y.ndim == 2 and len(self.y) == len(self.x)
        if several and bool(((self.y != 0) & (self.y != 1)).any()):
            raise DataError(f"y of shape {tuple(self.y.shape)} must hold 0 and 1 for each label")
        if not several and (self.y.dtype != torch.int64 or self.y.shape != self.x.shape[:1]):
            raise DataError(
                f"y must hold {len(self.x)} int64 labels, one per row of x, "
                f"got {self.y.dtype} of shape {tuple(self.y.shape)}"
            )

    def _check_x(self) -> None:
        if is_streamed(self.x):  # finite as far as it was read
            return
        if self.x.dtype not in (torch.float32, torch.uint8) or self.x.ndim < 2:
            raise DataError(
                f"x must be float32 or uint8 of shape n x ..., got {self.x.dtype} of shape {tuple(self.x.shape)}"
            )
        if self.x.is_floating_point():
            bad = int((~self.x.flatten(1).isfinite()).any(1).sum())
            if bad:
                raise DataError(f"x must be finite, got NaN or infinity in {bad} of {len(self.x)} rows")

    def __len__(self) -> int:
        """Number of examples."""
        return len(self.y)

    def take(self, rows: Tensor) -> "Split":
        """The examples at these positions, or where these booleans are true."""
        return Split(taken(self.x, rows), self.y[rows], **self._known_at(rows))

    def _known_at(self, rows: Tensor) -> dict[str, Any]:
        places = rows.numpy(force=True)
        names = np.array(self.names, dtype=object)[places].tolist() if self.names else ()
        return {"columns": {name: column[places] for name, column in self.columns.items()}, "names": names}


@dataclass(frozen=True, eq=False)
class Labelled(Split):
    """A whole set as loaded: a `Split` with a name for each class.

    Attributes:
        x: Inputs, ``n x ...``.
        y: Labels, ``n`` int64 in 0..c-1.
        class_names: The ``c`` names.
    """

    class_names: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Unscaled(Split):
    """Rows of a table that are not inputs yet, as float32 may not tell their numbers apart.

    Attributes:
        x: Numbers, ``n x d`` float64, or float32 if that holds them as well; NaN where one is missing.
        y: Labels, ``n`` int64.
    """

    def _check_x(self) -> None:
        if self.x.dtype not in (torch.float32, torch.float64) or self.x.ndim != 2:
            raise DataError(f"x must be float32 or float64 n x d, got {self.x.dtype} of shape {tuple(self.x.shape)}")
        if bool(self.x.isinf().any()):
            raise DataError("x must be finite or NaN, got infinity")

    def take(self, rows: Tensor) -> "Unscaled":
        """The rows at these positions, or where these booleans are true."""
        return Unscaled(self.x[rows], self.y[rows], **self._known_at(rows))


@dataclass(frozen=True, eq=False)
class Table(Unscaled):
    """A whole table as read.

    Attributes:
        x: Numbers, ``n x d``; see `Unscaled`.
        y: Labels, ``n`` int64 in 0..c-1.
        class_names: The ``c`` names.
        reading: How it was read.
        sizes: How many rows are of each file.
    """

    class_names: tuple[str, ...]
    reading: Reading
    sizes: tuple[int, ...] = ()
