"""Images on disk in the place of a tensor: the same values, read only when they are asked for."""

import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from metricopt_ext.data.images import load_image_folder
from metricopt_ext.data.labelled import Split
from metricopt_ext.data.parts import large_parts
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
        return StreamedImages(self, range(len(self.images)), (3, 2, 2))


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


def test_parts_are_read_one_after_the_other() -> None:
    disk = Disk(10)
    images, seen = disk.streamed(), []
    for part in images.split(4):
        seen.append(part)
        assert len(disk.read) == sum(map(len, seen))  # no more than what was asked for
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
    assert torch.equal(stacked([first.images, second.images]), torch.cat([first.images, second.images]))


def test_splits_keep_images_on_disk() -> None:
    disk, y = Disk(12), torch.arange(12) % 2
    whole = Split(as_inputs(disk.streamed()), y)
    splits = Splits(whole.take(torch.arange(6)), whole.take(torch.arange(6, 9)), whole.take(y == 1), ("a", "b"))
    moved = splits.to(torch.device("cpu")).map(lambda part, name: Split(changed(part.x, Tensor.float), part.y))
    assert disk.read == []
    assert torch.equal(moved.validation.x[:], disk.images[6:9].float())
    assert torch.equal(moved.test.x[:], disk.images[1::2].float())
    with pytest.raises(DataError, match=r"shift\.kind=none or data\.stream=false"):
        splits.shifted(lambda x, seed: x, 0)  # type: ignore[arg-type]


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
    with pytest.raises(DataError, match=r"must all have one size, got 10 x 12 \(cat/1\.jpg\) and 9 x 12"):
        load_image_folder(folder, stream=True)
    (folder / "dog/3.jpg").write_bytes(b"no picture")
    with pytest.raises(DataError, match=r"cannot read dog/3\.jpg as an image"):
        load_image_folder(folder, 7, stream=True)
    (folder / "packed.zip").write_bytes(b"PK")
    with pytest.raises(DataError, match="unpack it to stream them"):
        load_image_folder(folder / "packed.zip", 7, stream=True)


def test_what_is_lost_of_images_is_said_once(folder: Path) -> None:
    for i in (5, 6):
        Image.fromarray(np.full((9, 9), 4000, np.uint16)).save(folder / f"cat/{i}.png")
    data = load_image_folder(folder, 7, stream=True)
    with pytest.warns(UserWarning, match=r"16 shades are left.*cat/5\.png"):
        first = data.x[:]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(data.x[:], first)
