"""Images that stay on disk, in the place of a tensor in memory: they are read whenever they are asked for."""

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache, reduce
from typing import Any, Protocol, cast

import torch
from torch import Tensor

MOST_THREADS = 16  # that decode images at once: libraries release Python's lock while they do
AHEAD = 4  # images that are read before they are asked for, for each thread ...
AHEAD_BYTES = 1 << 26  # ... which take at most this many bytes

_KEYS = itertools.count()


class Source(Protocol):
    """What reads rows: images that are always the same for the same row.

    Attributes:
        key: Tells it from others.
    """

    key: int

    def read(self, rows: Sequence[int]) -> Tensor:
        """Return the images of some rows, ``b x c x h x w``."""

    def prepare(self, rows: Sequence[int]) -> None:
        """Begin to read rows that will be asked for next."""


class StreamedImages:
    """Images on disk, in place of a tensor ``n x c x h x w``.

    An index, a slice or a tensor of indices reads these images and returns them as a tensor; `split` and `tensor_split`
    read one part after the other, as each is asked for, and a few images ahead. Nothing else is kept. Several threads
    read and decode, where the machine has the processors; what comes out does not depend on how many.

    Args:
        source: Reads them.
        rows: Which of its rows these are, ``n`` of them.
        shape: ``c x h x w``.
        dtype: Of what is read.
        device: Where that is.
    """

    def __init__(
        self,
        source: Source,
        rows: Sequence[int],
        shape: Sequence[int],
        dtype: torch.dtype = torch.uint8,
        device: torch.device = torch.device("cpu"),  # noqa: B008
    ) -> None:
        self._source, self._rows, self._image = source, list(rows), torch.Size(shape)
        self.dtype, self.device = dtype, device

    @classmethod
    def of(cls, read: Callable[[int], Tensor], count: int, shape: Sequence[int]) -> "StreamedImages":
        """Return images that are read one by one.

        Args:
            read: Returns the image of a row, ``c x h x w`` uint8; called in any thread.
            count: The number of rows, ``n``.
            shape: ``c x h x w``.
        """
        return cls(_Decoder(read, torch.Size(shape)), range(count), shape)

    @property
    def shape(self) -> torch.Size:
        """``n x c x h x w``."""
        return torch.Size((len(self._rows), *self._image))

    @property
    def ndim(self) -> int:
        """4, the number of dimensions."""
        return len(self._image) + 1

    def dim(self) -> int:
        """Return the number of dimensions."""
        return self.ndim

    def __len__(self) -> int:
        """Number of images."""
        return len(self._rows)

    def __getitem__(self, index: Any) -> Tensor:
        """Read one image, ``c x h x w``, or several, ``b x c x h x w``: by a slice, indices or booleans."""
        if isinstance(index, int):
            return self[[index]][0]
        chosen = self.take(index)
        batch = self._source.read(chosen._rows)
        # By which what is computed from a batch can be remembered: its memory is another one each time.
        batch.streamed_rows = chosen.streamed_rows  # type: ignore[attr-defined]
        return batch

    @property
    def streamed_rows(self) -> tuple[int, ...]:
        """What tells the images from others, before they are read: the source's key and the rows."""
        return self._source.key, *self._rows

    def prepare(self, index: Any) -> None:
        """Begin to read images that will be asked for next: by a slice, indices or booleans."""
        self._source.prepare(self._chosen(index))

    def take(self, index: Any) -> "StreamedImages":
        """Return some of the images without reading them: by a slice, indices or booleans."""
        return StreamedImages(self._source, self._chosen(index), self._image, self.dtype, self.device)

    def split(self, size: int) -> Iterator[Tensor]:
        """Read the images, ``size`` at once."""
        ahead = max(0, min(AHEAD * threads(), AHEAD_BYTES // max(1, self._image.numel())))
        for start in range(0, len(self), size):
            self.prepare(slice(start, start + size + ahead))
            yield self[start : start + size]

    def tensor_split(self, parts: int) -> "LazyParts":
        """Return parts of about equal size, each of which is read whenever it is asked for."""
        return LazyParts(self, parts)

    def to(self, device: torch.device) -> "StreamedImages":
        """Return the same images, put on a device as they are read."""
        moved = _Changed(self._source, lambda batch: batch.to(device))
        return StreamedImages(moved, self._rows, self._image, self.dtype, device)

    def changed(self, change: Callable[[Tensor], Tensor], dtype: torch.dtype = torch.float32) -> "StreamedImages":
        """Return the same images with a further change of each, such as a normalisation.

        Args:
            change: Called with a batch, ``b x c x h x w``; what it makes of an image depends on that image alone, and
                keeps its shape.
            dtype: Of what it returns.
        """
        return StreamedImages(_Changed(self._source, change), self._rows, self._image, dtype, self.device)

    def changed_by_place(
        self, change: Callable[[Tensor, Sequence[int]], Tensor], dtype: torch.dtype = torch.float32
    ) -> "StreamedImages":
        """Return the same images with a change that depends on an image's place among them, as of now.

        Args:
            change: Called with a batch, ``b x c x h x w``, and the place of each of its images, from 0.
            dtype: Of what it returns.
        """
        return StreamedImages(_Placed(self, change), range(len(self)), self._image, dtype, self.device)

    def followed_by(self, other: "StreamedImages") -> "StreamedImages":
        """Return these images and then those of another."""
        count = len(self) + len(other)
        return StreamedImages(_Joined(self, other), range(count), self._image, self.dtype, self.device)

    def _chosen(self, index: Any) -> list[int]:
        if isinstance(index, slice):
            return self._rows[index]
        places = torch.as_tensor(index)
        places = places.nonzero().flatten() if places.dtype == torch.bool else places
        return [self._rows[place] for place in places.tolist()]


@dataclass
class _Decoder:
    """Reads rows one by one, several at once where there are threads for it."""

    one: Callable[[int], Tensor]
    shape: torch.Size
    key: int = field(default_factory=lambda: next(_KEYS))

    def __post_init__(self) -> None:
        self.reading = Reading(self.one)

    def read(self, rows: Sequence[int]) -> Tensor:
        batch = torch.empty((len(rows), *self.shape), dtype=torch.uint8)
        if threads() == 1:
            for place, row in enumerate(rows):
                batch[place] = self.one(row)
            return batch
        self.reading.begin(rows)
        found = {row: self.reading.result(row) for row in dict.fromkeys(rows)}
        for place, row in enumerate(rows):
            batch[place] = found[row]
        return batch

    def prepare(self, rows: Sequence[int]) -> None:
        if threads() > 1:
            self.reading.keep(rows)
            self.reading.begin(rows)


@dataclass
class _Changed:
    """The batches of a source, changed."""

    source: Source
    change: Callable[[Tensor], Tensor]
    key: int = field(default_factory=lambda: next(_KEYS))

    def read(self, rows: Sequence[int]) -> Tensor:
        return self.change(self.source.read(rows))

    def prepare(self, rows: Sequence[int]) -> None:
        self.source.prepare(rows)


@dataclass
class _Placed:
    """Images changed by their places, which are the rows."""

    images: StreamedImages
    change: Callable[[Tensor, Sequence[int]], Tensor]
    key: int = field(default_factory=lambda: next(_KEYS))

    def read(self, rows: Sequence[int]) -> Tensor:
        return self.change(self.images[list(rows)], rows)

    def prepare(self, rows: Sequence[int]) -> None:
        self.images.prepare(list(rows))


@dataclass
class _Joined:
    """Images, and then others."""

    first: StreamedImages
    second: StreamedImages
    key: int = field(default_factory=lambda: next(_KEYS))

    def read(self, rows: Sequence[int]) -> Tensor:
        ours, theirs = self._divided(rows)
        batch = torch.empty((len(rows), *self.first.shape[1:]), dtype=self.first.dtype, device=self.first.device)
        is_first = torch.tensor([row < len(self.first) for row in rows], dtype=torch.bool)
        batch[is_first], batch[~is_first] = self.first[ours], self.second[theirs]
        return batch

    def prepare(self, rows: Sequence[int]) -> None:
        ours, theirs = self._divided(rows)
        self.first.prepare(ours)
        self.second.prepare(theirs)

    def _divided(self, rows: Sequence[int]) -> tuple[list[int], list[int]]:
        count = len(self.first)
        return [row for row in rows if row < count], [row - count for row in rows if row >= count]


def threads() -> int:
    """Return how many threads read images: as many as this process has processors, up to `MOST_THREADS`."""
    return min(MOST_THREADS, _processors())


class Reading:
    """Images that threads were told to read, by their rows; a fork of the process, which has no threads, has none.

    Args:
        read: Returns the image of a row; called in any thread.
    """

    def __init__(self, read: Callable[[int], Tensor]) -> None:
        self._read = read
        self._process, self._futures = os.getpid(), dict[int, Future[Tensor]]()

    def begin(self, rows: Sequence[int]) -> None:
        """Begin to read rows that were not begun."""
        for row in rows:
            if row not in self._mine():
                self._futures[row] = _pool(os.getpid()).submit(self._read, row)

    def keep(self, rows: Sequence[int]) -> None:
        """Drop rows that were begun and are not among these."""
        for row in self._mine().keys() - set(rows):
            self._futures.pop(row).cancel()

    def result(self, row: int) -> Tensor:
        """Return an image that was begun, once it is read, or read it now."""
        future = self._mine().pop(row, None)
        return self._read(row) if future is None else future.result()

    def _mine(self) -> dict[int, "Future[Tensor]"]:
        if self._process != os.getpid():
            self._process, self._futures = os.getpid(), {}
        return self._futures


@cache
def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@cache
def _pool(process: int) -> ThreadPoolExecutor:
    """The threads of a process; a fork of it has others, as threads do not survive one."""
    return ThreadPoolExecutor(threads(), thread_name_prefix="images")


class LazyParts(Sequence[Tensor]):
    """Images in parts of about equal size, which are read whenever they are asked for.

    Args:
        images: The images.
        parts: How many parts.
    """

    def __init__(self, images: StreamedImages, parts: int) -> None:
        self._images = images
        self._places = torch.arange(len(images)).tensor_split(parts)

    def __len__(self) -> int:
        """Number of parts."""
        return len(self._places)

    def __getitem__(self, index: Any) -> Any:
        """Read a part."""
        return self._images[self._places[index]]


def is_streamed(x: Tensor) -> bool:
    """Whether inputs are images on disk, which take a tensor's place."""
    return isinstance(cast(Any, x), StreamedImages)


def as_inputs(images: StreamedImages) -> Tensor:
    """Return images as what the functions of this package take for a tensor of inputs."""
    return cast(Tensor, images)


def taken(x: Tensor, index: Any) -> Tensor:
    """Return some of the inputs; images on disk are not read yet.

    Args:
        x: Inputs, ``n x ...``.
        index: A slice, indices or booleans.
    """
    images = cast(Any, x)
    return as_inputs(images.take(index)) if isinstance(images, StreamedImages) else x[index]


def changed(x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the inputs changed to floats; images on disk as they are read.

    Args:
        x: Inputs, ``n x ...``.
        change: What it makes of an input depends on that input alone.
    """
    images = cast(Any, x)
    return as_inputs(images.changed(change)) if isinstance(images, StreamedImages) else change(x)


def stacked(parts: Sequence[Tensor]) -> Tensor:
    """Return inputs one after the other; images on disk, which all must be then and not changed yet, are not read.

    Args:
        parts: Inputs, ``n_i x ...`` each.
    """
    images = cast(Sequence[Any], parts)
    return as_inputs(reduce(StreamedImages.followed_by, images)) if is_streamed(parts[0]) else torch.cat(list(parts))
