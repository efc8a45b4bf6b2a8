"""Images on disk in the place of a tensor: the same values, read only when they are asked for."""

import os
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from helpers.refusals import assert_refused, assert_warned
from metricopt_ext.data import streamed
from metricopt_ext.data.images import load_image_folder
from metricopt_ext.data.labelled import Split
from metricopt_ext.data.parts import large_parts
from metricopt_ext.data.shift import ImageShift
from metricopt_ext.data.splits import Splits
from metricopt_ext.data.streamed import StreamedImages, as_inputs, changed, is_streamed, stacked, taken
from metricopt_ext.errors import DataError


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


def test_parts_are_read_one_after_the_other(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streamed, "AHEAD_BYTES", 2 * 12)  # two images
    disk = Disk(10)
    images, seen = disk.streamed(), []
    for part in images.split(4):
        seen.append(part)
        asked = sum(map(len, seen))
        assert asked <= len(disk.read) <= (asked if threads == 1 else asked + 2)  # and no more
    assert [len(part) for part in seen] == [4, 4, 2]
    assert torch.equal(torch.cat(seen), disk.images)
    disk.read.clear()
    parts = large_parts(as_inputs(images), 4)
    assert (len(parts), disk.read) == (3, [])
    assert torch.equal(parts[1], large_parts(disk.images, 4)[1])
    assert len(disk.read) == len(parts[1])
    assert torch.equal(torch.cat(list(parts)), disk.images)


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


def test_splits_keep_images_on_disk() -> None:
    disk, y = Disk(12), torch.arange(12) % 2
    whole = Split(as_inputs(disk.streamed()), y)
    splits = Splits(whole.take(torch.arange(6)), whole.take(torch.arange(6, 9)), whole.take(y == 1), ("a", "b"))
    moved = splits.to(torch.device("cpu")).map(lambda part, name: Split(changed(part.x, Tensor.float), part.y))
    assert disk.read == []
    assert torch.equal(moved.validation.x[:], disk.images[6:9].float())
    assert torch.equal(moved.test.x[:], disk.images[1::2].float())


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


def test_a_forked_process_reads_what_its_parent_had_begun_to_read(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(8)
    images = disk.streamed()
    images.prepare(slice(None))
    first, process = images[:2], os.getpid()
    for future in list(images._source.reading._futures.values()):  # type: ignore[attr-defined]
        future.cancel()  # as in a fork, where no thread is left to read it
    monkeypatch.setattr(os, "getpid", lambda: process + 1)
    assert torch.equal(torch.cat([first, images[2:]]), disk.images)


def test_an_error_is_that_of_the_image_that_was_asked_for() -> None:
    def read(row: int) -> Tensor:
        if row > 3:
            raise DataError(f"image {row} is broken")
        return torch.zeros(3, 2, 2, dtype=torch.uint8)

    images = StreamedImages.of(read, 8, (3, 2, 2))
    assert images[:4].shape == (4, 3, 2, 2)
    assert_refused(lambda: images[2:8], DataError, "4")
    parts = images.split(2)
    assert [len(next(parts)) for _ in range(2)] == [2, 2]  # though later ones are read ahead
    assert_refused(lambda: next(parts), DataError, "4")


# --- Folders ---------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two classes of four noisy images, of unequal sizes, one of them turned by its EXIF orientation."""
    rng = np.random.default_rng(0)
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        for i in range(4):
            image = Image.fromarray(rng.integers(0, 256, (9 + i, 12, 3), dtype=np.uint8))
            exif = image.getexif()
            exif[0x0112] = 6 if i == 2 else 1
            image.save(tmp_path / name / f"{i}.jpg", exif=exif)
    return tmp_path


def test_a_folder_gives_the_same_from_disk_as_in_memory(folder: Path) -> None:
    memory, disk = (load_image_folder(folder, 7, stream=stream) for stream in (False, True))
    assert is_streamed(disk.x)
    assert not is_streamed(memory.x)
    assert torch.equal(disk.x[:], memory.x)
    assert torch.equal(disk.y, memory.y)
    assert disk.class_names == memory.class_names


def test_what_is_wrong_with_a_folder_is_said_before_anything_is_trained(folder: Path) -> None:
    assert_refused(lambda: load_image_folder(folder, stream=True), DataError, "10 x 12", "cat/1.jpg", "9 x 12")
    (folder / "dog/3.jpg").write_bytes(b"no picture")
    assert_refused(lambda: load_image_folder(folder, 7, stream=True), DataError, "dog/3.jpg")


def test_further_frames_are_said_to_be_left_out(folder: Path) -> None:
    frames = [Image.fromarray(np.full((9, 9), shade, np.uint8)) for shade in (40, 90)]
    frames[0].save(folder / "cat/5.gif", save_all=True, append_images=frames[1:])
    data = assert_warned(lambda: load_image_folder(folder, 7, stream=True), "frames", "cat/5.gif")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(data.x[:]) == len(data)
