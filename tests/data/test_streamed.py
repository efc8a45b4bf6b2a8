"""Images on disk in the place of a tensor: the same values, read only when they are asked for."""

import pytest
import torch
from torch import Tensor

from metricopt_ext.data import streamed
from metricopt_ext.data.labelled import Split
from metricopt_ext.data.shift import ImageShift
from metricopt_ext.data.splits import Splits
from metricopt_ext.data.streamed import StreamedImages, as_inputs, changed, is_streamed, stacked, taken


class Disk:
    """Images whose rows are noted as they are read."""

    def __init__(self, count: int) -> None:
        self.images = torch.arange(count * 12).remainder(251).to(torch.uint8).reshape(count, 3, 2, 2)
        self.read: list[int] = []

    def __call__(self, row: int) -> Tensor:
        self.read.append(row)
        return self.images[row]

    def streamed(self) -> StreamedImages:
        return StreamedImages.of(self, len(self.images), (3, 2, 2))


@pytest.fixture(autouse=True, params=[1, 4])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """As on a machine with one processor, and on one with four."""
    monkeypatch.setattr(streamed, "_processors", lambda: request.param)
    streamed._pool.cache_clear()
    return int(request.param)


INDICES = [
    3,
    slice(2, 7),
    slice(None, None, 3),
    [4, 4, 0],
    torch.tensor([8, 1]),
    torch.tensor([True, False] * 5),
]


@pytest.mark.parametrize("index", INDICES, ids=str)
def test_an_index_gives_what_a_tensor_gives(index: object) -> None:
    disk = Disk(10)
    images = disk.streamed()
    assert images.shape == disk.images.shape
    assert (len(images), images.ndim, images.dim(), images.dtype) == (10, 4, 4, torch.uint8)
    assert disk.read == []
    assert torch.equal(images[index], disk.images[index])
    if not isinstance(index, int):
        some = images.take(index)
        assert torch.equal(some[:], disk.images[index])
        assert torch.equal(some.take(slice(1, None))[:], disk.images[index][1:])


def test_changes_are_made_as_images_are_read() -> None:
    disk = Disk(6)
    images = changed(changed(as_inputs(disk.streamed()), lambda x: x.float() / 255), lambda x: (x - 0.5) / 0.2)
    expected = changed(changed(disk.images, lambda x: x.float() / 255), lambda x: (x - 0.5) / 0.2)
    assert disk.read == []
    assert images.dtype == torch.float32
    assert torch.equal(images[torch.arange(6)], expected)
    assert torch.equal(taken(images, [5, 2])[:], expected[[5, 2]])


def test_images_of_several_folders_are_one() -> None:
    first, second = Disk(3), Disk(5)
    images = stacked([as_inputs(first.streamed()), as_inputs(second.streamed().take([4, 1]))])
    assert is_streamed(images)
    assert torch.equal(images[:], torch.cat([first.images, second.images[[4, 1]]]))
    assert torch.equal(torch.cat(list(images.split(2))), images[:])  # type: ignore[call-overload]
    assert torch.equal(images[[4, 0, 3]], torch.cat([second.images[[1]], first.images[[0]], second.images[[4]]]))
    assert torch.equal(stacked([first.images, second.images]), torch.cat([first.images, second.images]))


def test_a_shift_is_that_of_images_in_memory() -> None:
    disk, y = Disk(12), torch.arange(12) % 2
    parts = (torch.arange(3), torch.arange(3, 8), torch.tensor([9, 8, 11, 10]))
    shift = ImageShift(contrast=0.5, noise_std=0.1, rotation_degrees=30)
    memory, shifted = (
        Splits(*(Split(x, y).take(rows) for rows in parts), ("a", "b")).shifted(shift, 1)
        for x in (disk.images, as_inputs(disk.streamed()))
    )
    assert disk.read == []
    assert torch.equal(shifted.train.x[:], memory.train.x)
    for name in ("test", "validation"):
        part, expected = getattr(shifted, name).x, getattr(memory, name).x
        assert torch.equal(part[[3, 1]], expected[[3, 1]])
        assert torch.equal(torch.cat(list(part.split(2))), expected)
        assert torch.equal(taken(part, torch.tensor([2, 0]))[:], expected[[2, 0]])
        normalised = changed(part, lambda x: (x - 0.5) / 0.2)
        assert torch.equal(normalised[[1]], (expected[[1]] - 0.5) / 0.2)
