"""Embeddings as they are searched: rows in float64, and coordinates in which float32 keeps their digits."""

import math
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Array = Tensor | npt.NDArray[Any]
Singles = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

CHUNK = 4096  # FAISS itself takes this many queries at a time: such chunks cost no time and give the very same floats
NUMBERS = 2**21  # of embeddings in float64, held at once
SAMPLE = 1024  # rows that tell where embeddings lie, and their scale
ORDINARY = 2.0**32  # lengths below it, and above its inverse, need no scale
LONGEST = 2.0**60  # what no scale makes a row longer than: squares stay far below float32's largest number


class Vectors:
    """Embeddings as they were given, ``n x d``, whose rows are had in float64.

    Args:
        given: A tensor on any device or an array, of finite numbers.
        unit: Whether rows are scaled to length 1; none is then 0.
    """

    def __init__(self, given: Array, unit: bool = False) -> None:
        self.given, self.unit = given, unit
        self.size: int = given.shape[0]
        self.dimension: int = given.shape[1]

    def rows(self, which: Any) -> Doubles:
        """Return rows, ``b x d``, for a slice or an array of their numbers."""
        found: Doubles
        if isinstance(self.given, Tensor):
            at = which if isinstance(which, slice) else torch.from_numpy(which).to(self.given.device)
            found = self.given[at].detach().cpu().double().numpy()
        else:
            found = self.given[which].astype(np.float64)
        if self.unit:
            found = np.ldexp(found, -np.frexp(np.abs(found).max(axis=1, keepdims=True))[1])  # squares don't vanish
            found /= np.linalg.norm(found, axis=1, keepdims=True)
        return found

    def parts(self) -> list[slice]:
        """Slices that are short enough to be held in float64."""
        return chunks(self.size, max(1, NUMBERS // self.dimension))


class Frame:
    """Embeddings in coordinates in which float32 keeps its digits.

    They are shifted where they lie further from 0 than they are wide, and scaled by a power of two, which does not
    round, where their lengths are far from 1.

    Args:
        vectors: The embeddings.
        shifted: Whether they may be shifted.
        like: Embeddings whose coordinates these share; None for their own.
    """

    def __init__(self, vectors: Vectors, shifted: bool = True, like: "Frame | None" = None) -> None:
        self.vectors = vectors
        self.centre: Doubles
        self.scale: float
        self.centre, self.scale = (like.centre, like.scale) if like else self._fitted(shifted)
        self.copy = self._copy()

    def single(self, which: Any) -> Singles:
        """Return rows, ``b x d``, in these coordinates in float32."""
        found: Singles = self.copy[which]
        return found

    def _fitted(self, shifted: bool) -> tuple[Doubles, float]:
        size = self.vectors.size
        sample = self.vectors.rows(np.linspace(0, size - 1, min(size, SAMPLE)).astype(np.int64))
        centre: Doubles = np.median(sample, axis=0)  # which a few far rows don't move
        if _whole(sample):
            centre = np.rint(centre)
        if not shifted or np.linalg.norm(centre) <= 2 * np.median(np.linalg.norm(sample - centre, axis=1)):
            centre = np.zeros_like(centre)
        typical = float(np.median(np.abs(sample - centre).max(axis=1)))
        if 1 / ORDINARY < typical < ORDINARY:
            return centre, 1.0
        largest = max(float(np.abs(self.vectors.rows(part) - centre).max()) for part in self.vectors.parts())
        longest = largest * math.sqrt(self.vectors.dimension)
        exponent = math.frexp(max(typical or longest, longest / LONGEST) or 1.0)[1]
        return centre, 2.0 ** -max(exponent, -1000)

    def _copy(self) -> Singles:
        """All rows in float32, those that were given if they can be."""
        given = self.vectors.given
        if not (self.vectors.unit or self.centre.any() or self.scale != 1):
            if isinstance(given, Tensor) and given.device.type == "cpu" and given.dtype == torch.float32:
                given = given.detach().numpy()
            if isinstance(given, np.ndarray) and given.dtype == np.float32 and given.flags.c_contiguous:
                return given
        single = np.empty((self.vectors.size, self.vectors.dimension), dtype=np.float32)
        with np.errstate(over="ignore"):  # to infinity, which the bound takes for unknown
            for part in self.vectors.parts():  # no second copy of everything on the way, in particular on the GPU
                single[part] = self.double(part)
        return single

    def double(self, which: Any) -> Doubles:
        """Return rows, ``b x d``, in these coordinates."""
        double: Doubles = (self.vectors.rows(which) - self.centre) * self.scale
        return double

    def exact(self, which: Any) -> Doubles:
        """Return rows, ``b x d``, not shifted: only their scale differs from what was given."""
        exact: Doubles = self.vectors.rows(which) * self.scale
        return exact

    def whole(self) -> bool:
        """Whether all coordinates are whole numbers."""
        return all(_whole(self.double(part)) for part in self.vectors.parts())


def _whole(numbers: Doubles) -> bool:
    return bool((numbers == np.rint(numbers)).all())


def lengths_of(rows: Singles) -> Doubles:
    """Lengths, ``b``, rounded up."""
    with np.errstate(over="ignore"):
        lengths: Doubles = np.sqrt(np.einsum("ij,ij->i", rows, rows).astype(np.float64)) * 1.001
    return lengths


def fingerprints(
    vectors: Vectors, precision: torch.dtype | None = None, grid: tuple[Doubles, float] | None = None
) -> npt.NDArray[np.uint64]:
    """Return a number for each row, ``n``, which rows of the same content share, and others but by a chance of 2^-64.

    Args:
        vectors: ``n x d``.
        precision: What the numbers are rounded to before; None for as they are.
        grid: A point and a distance: numbers are rounded to multiples of it from there; None for as they are.
    """
    factors = np.random.default_rng(0).integers(2**64, size=vectors.dimension, dtype=np.uint64) | np.uint64(1)
    result = np.empty(vectors.size, dtype=np.uint64)
    for part in vectors.parts():
        rows = vectors.rows(part)
        if precision is not None:
            rows = torch.from_numpy(rows).to(precision).double().numpy()
        if grid is not None:
            rows = np.rint((rows - grid[0]) / grid[1])
        bits = (rows + 0.0).view(np.uint64)  # -0 becomes 0
        result[part] = ((bits ^ (bits >> np.uint64(32))) * factors).sum(axis=1)  # as the low bits of many are 0
    return result


def chunks(total: int, size: int = CHUNK, fewest: int = 1) -> list[slice]:
    """Slices of ``size`` rows; a last one shorter than ``fewest`` joins the one before."""
    starts = list(range(0, total, size))
    if len(starts) > 1 and total - starts[-1] < fewest:
        starts.pop()
    return [slice(start, end) for start, end in pairwise([*starts, total])]
