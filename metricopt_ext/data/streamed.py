"""Images that stay on disk, in the place of a tensor in memory: they are read whenever they are asked for."""

from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from typing import Any, cast

import torch
from torch import Tensor


class StreamedImages:
    """Images on disk, in place of a tensor ``n x c x h x w``.

    An index, a slice or a tensor of indices reads these images and returns them as a tensor; `split` and `tensor_split`
    read one part after the other, as each is asked for. Nothing is kept.

    Args:
        read: Returns the image of a row, ``c x h x w`` uint8; always the same for the same row.
        rows: Which images these are, ``n`` of them.
        shape: ``c x h x w``.
        changes: What becomes of a batch, ``b x c x h x w``, image by image.
        dtype: What the changes make of uint8.
        device: Where batches are put, before the changes.
    """

    def __init__(
        self,
        read: Callable[[int], Tensor],
        rows: Sequence[int],
        shape: Sequence[int],
        changes: Sequence[Callable[[Tensor], Tensor]] = (),
        dtype: torch.dtype = torch.uint8,
        device: torch.device = torch.device("cpu"),  # noqa: B008
    ) -> None:
        self._read, self._rows, self._image, self._changes = read, list(rows), torch.Size(shape), tuple(changes)
        self.dtype, self.device = dtype, device

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
        rows = self._chosen(index)
        batch = torch.empty((len(rows), *self._image), dtype=torch.uint8)
        for place, row in enumerate(rows):
            batch[place] = self._read(row)
        batch = batch.to(self.device)
        for change in self._changes:
            batch = change(batch)
        # By which what is computed from a batch can be remembered: its memory is another one each time.
        batch.streamed_rows = (id(self._read), *rows)  # type: ignore[attr-defined]
        return batch

    def take(self, index: Any) -> "StreamedImages":
        """Return some of the images without reading them: by a slice, indices or booleans."""
        return StreamedImages(self._read, self._chosen(index), self._image, self._changes, self.dtype, self.device)

    def split(self, size: int) -> Iterator[Tensor]:
        """Read the images, ``size`` at once."""
        for start in range(0, len(self), size):
            yield self[start : start + size]

    def tensor_split(self, parts: int) -> "LazyParts":
        """Return parts of about equal size, each of which is read whenever it is asked for."""
        return LazyParts(self, parts)

    def to(self, device: torch.device) -> "StreamedImages":
        """Return the same images, put on a device as they are read."""
        return StreamedImages(self._read, self._rows, self._image, self._changes, self.dtype, device)

    def changed(self, change: Callable[[Tensor], Tensor], dtype: torch.dtype = torch.float32) -> "StreamedImages":
        """Return the same images with a further change of each, such as a normalisation.

        Args:
            change: Called with a batch, ``b x c x h x w``; what it makes of an image depends on that image alone, and
                keeps its shape.
            dtype: Of what it returns.
        """
        return StreamedImages(self._read, self._rows, self._image, (*self._changes, change), dtype, self.device)

    def followed_by(self, other: "StreamedImages") -> "StreamedImages":
        """Return these images and then those of another, neither of them changed yet."""
        first, second, count = self, other, len(self)

        def read(row: int) -> Tensor:
            part, place = (first, row) if row < count else (second, row - count)
            return part._read(part._rows[place])

        return StreamedImages(read, range(count + len(other)), self._image)

    def _chosen(self, index: Any) -> list[int]:
        if isinstance(index, slice):
            return self._rows[index]
        places = torch.as_tensor(index)
        places = places.nonzero().flatten() if places.dtype == torch.bool else places
        return [self._rows[place] for place in places.tolist()]


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
