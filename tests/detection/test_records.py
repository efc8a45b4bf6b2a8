"""Images of any file that PIL reads: upright, with 8 bits per channel, or refused by name."""

import warnings
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from helpers.refusals import assert_refused

pytest.importorskip("PIL")

from PIL import ExifTags, Image

from metricopt_ext.detection.records import Annotated
from metricopt_ext.errors import DataError

PIXELS = np.random.default_rng(0).integers(0, 256, (3, 4, 3)).astype(np.uint8)
# By EXIF's definition: orientation 6 says that the file's first row is the right side, and its first column the top.
UPRIGHT = {
    1: PIXELS,
    2: np.fliplr(PIXELS),
    3: np.rot90(PIXELS, 2),
    4: np.flipud(PIXELS),
    5: PIXELS.transpose(1, 0, 2),
    6: np.rot90(PIXELS, -1),
    7: np.rot90(PIXELS, 2).transpose(1, 0, 2),
    8: np.rot90(PIXELS),
}


def image_of(path: Path, width: int = 4, height: int = 3) -> Annotated:
    none = torch.zeros(0, dtype=torch.bool)
    return Annotated("a", path, width, height, torch.zeros(0, 4), none.long(), none, none)


def assert_loads(path: Path, expected: npt.NDArray[np.uint8]) -> None:
    loaded = image_of(path, expected.shape[1], expected.shape[0]).load()
    assert torch.equal(loaded, torch.from_numpy(expected.copy()).permute(2, 0, 1))


def oriented(path: Path, orientation: int) -> Path:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    Image.fromarray(PIXELS).save(path, exif=exif)
    return path


@pytest.mark.parametrize("suffix", [".png", ".tif"])
@pytest.mark.parametrize("orientation", UPRIGHT)
def test_images_are_turned_as_their_exif_orientation_says(tmp_path: Path, orientation: int, suffix: str) -> None:
    """Their size too, where it is not annotated."""
    path = oriented(tmp_path / f"turned{suffix}", orientation)
    assert_loads(path, UPRIGHT[orientation])
    unknown = image_of(path, 0, 0)
    assert unknown.load().shape[1:] == UPRIGHT[orientation].shape[:2]
    known = unknown.with_size()
    assert (known.height, known.width) == UPRIGHT[orientation].shape[:2]
    assert known.with_size() is known


@pytest.mark.detectron2
@pytest.mark.parametrize("orientation", UPRIGHT)
def test_images_are_those_that_detectron2_reads(tmp_path: Path, orientation: int) -> None:
    utils = pytest.importorskip("detectron2.data.detection_utils")
    path = oriented(tmp_path / "turned.png", orientation)
    assert_loads(path, utils.read_image(str(path), "RGB"))


def test_a_size_that_ignores_the_orientation_is_named_with_it(tmp_path: Path) -> None:
    assert_refused(
        lambda: image_of(oriented(tmp_path / "6.png", 6)).load(), DataError, "6.png", "3 x 4", "4 x 3", "EXIF"
    )


@pytest.mark.parametrize(("dtype", "mode"), [(np.uint16, "I;16"), (np.int32, "I"), (np.float32, "F")])
def test_values_without_a_known_white_are_refused(tmp_path: Path, dtype: type, mode: str) -> None:
    path = tmp_path / "deep.tif"
    Image.fromarray(np.full((3, 4), 1000, dtype)).save(path)
    assert_refused(lambda: image_of(path).load(), DataError, "deep.tif", mode)


def test_grey_images_and_palettes_become_rgb(tmp_path: Path) -> None:
    grey = Image.fromarray(PIXELS[:, :, 0])
    for name, image in (("grey.png", grey), ("palette.png", grey.convert("P"))):
        image.save(tmp_path / name)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert_loads(tmp_path / name, PIXELS[:, :, :1].repeat(3, axis=2))
