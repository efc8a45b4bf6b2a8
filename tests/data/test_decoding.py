"""Pictures of several types of values and orientations, decoded to 8 bits and upright."""

import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from helpers.refusals import assert_refused, having
from metricopt_ext.data.images import load_image_folder
from metricopt_ext.errors import DataError


def saved(path: Path, pixels: Any, mode: str | None = None, **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    image = pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)
    (image.convert(mode) if mode else image).save(path, **options)
    return path


RAMP = np.arange(0, 65536, 4369, dtype=np.uint16).reshape(4, 4)  # 0, 0x1111, ... 0xffff


def png_of_16_bits(values: Any) -> bytes:
    """A PNG of ``h x w x c`` values, c as its colour types have it."""
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    height, width, channels = values.shape
    header = struct.pack(">IIBBBBB", width, height, 16, {1: 0, 2: 4, 3: 2, 4: 6}[channels], 0, 0, 0)
    parts = [(b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body)) for kind, body in parts
    )


def tiff_of_16_bits(values: Any) -> bytes:
    """A TIFF of ``h x w x 3`` values."""
    height, width, _ = values.shape
    tags = ((256, width), (257, height), (258, 122), (259, 1), (262, 2), (273, 128), (277, 3), (278, height))
    entries = [struct.pack("<HHIHH", tag, 3, 3 if tag == 258 else 1, value, 0) for tag, value in tags]
    entries.append(struct.pack("<HHII", 279, 4, 1, values.size * 2))
    head = b"II*\0\x08\0\0\0" + struct.pack("<H", len(entries)) + b"".join(entries) + bytes(4)
    return head.ljust(122, b"\0") + struct.pack("<HHH", 16, 16, 16) + values.astype("<u2").tobytes()


@pytest.mark.parametrize(("suffix", "channels"), [("png", 1), ("png", 2), ("png", 3), ("png", 4), ("tif", 3)])
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_16_bits_are_refused(tmp_path: Path, suffix: str, channels: int, mode: Any) -> None:
    (tmp_path / "a").mkdir()
    write = png_of_16_bits if suffix == "png" else tiff_of_16_bits
    (tmp_path / "a" / f"1.{suffix}").write_bytes(write(np.repeat(RAMP[:, :, None], channels, 2)))
    assert_refused(lambda: load_image_folder(tmp_path, mode=mode), DataError, f"a/1.{suffix}", "mode", "8 bits")


@pytest.mark.parametrize("suffix", ["png", "tif"])
@pytest.mark.parametrize(
    "pixels",
    [
        RAMP,
        (RAMP // 257).astype(np.uint16),  # 8 bits saved as 16
        np.zeros((4, 4), np.uint16),
        np.full((4, 4), 4095, np.uint16),  # 12 bits saved as 16
        np.full((4, 4), 70_000, np.int32),
        (np.arange(16).reshape(4, 4) / 15).astype(np.float32),
    ],
)
def test_values_without_a_known_white_are_refused(tmp_path: Path, pixels: Any, suffix: str) -> None:
    if suffix == "png" and pixels.dtype != np.uint16:
        pytest.skip("PNG has no such values")
    saved(tmp_path / f"a/1.{suffix}", pixels)
    assert_refused(lambda: load_image_folder(tmp_path), DataError, f"a/1.{suffix}", "mode", "8 bits")


def test_big_endian_values_and_portable_greymaps_of_16_bits_are_refused(tmp_path: Path) -> None:
    header = b"MM\0*\0\0\0\x08" + struct.pack(">H", 8)
    tags = ((256, 4), (257, 4), (258, 16), (259, 1), (262, 1), (273, 110), (278, 4), (279, 32))
    entries = b"".join(struct.pack(">HHIHH", tag, 3, 1, value, 0) for tag, value in tags)
    values = RAMP.astype(">u2").tobytes()
    for name, content in (
        ("1.tif", (header + entries + bytes(4)).ljust(110, b"\0") + values),
        ("1.pgm", b"P5 4 4 65535\n" + values),
    ):
        (tmp_path / name / "a").mkdir(parents=True)
        (tmp_path / name / "a" / name).write_bytes(content)
        assert_refused(lambda name=name: load_image_folder(tmp_path / name), DataError, name, "8 bits")


@pytest.mark.parametrize("mode", ["P", "1", "LA", "RGBA", "CMYK"])
def test_pictures_of_other_modes_are_what_pil_shows(tmp_path: Path, mode: str) -> None:
    colours = np.random.default_rng(0).integers(0, 2, (4, 4, 3), dtype=np.uint8) * 255
    if mode in ("1", "LA"):
        colours[:] = colours[:, :, :1]
    saved(tmp_path / f"a/1.{'tif' if mode == 'CMYK' else 'png'}", colours, mode)
    assert np.array_equal(load_image_folder(tmp_path).x[0].numpy(), colours.transpose(2, 0, 1))


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("suffix", ["png", "tif", "webp"])
def test_pictures_are_upright(tmp_path: Path, orientation: int, suffix: str) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (4, 6, 3), dtype=np.uint8)
    exif = Image.Exif()
    exif[274] = orientation
    options = {"lossless": True} if suffix == "webp" else {}
    saved(tmp_path / f"a/1.{suffix}", pixels, exif=exif, **options)
    # EXIF's own words for where the stored row 0 and column 0 are to be seen.
    upright = {
        1: pixels,
        2: pixels[:, ::-1],
        3: pixels[::-1, ::-1],
        4: pixels[::-1],
        5: pixels.transpose(1, 0, 2),
        6: pixels[::-1].transpose(1, 0, 2),
        7: pixels[::-1, ::-1].transpose(1, 0, 2),
        8: pixels[:, ::-1].transpose(1, 0, 2),
    }[orientation]
    assert np.array_equal(load_image_folder(tmp_path).x[0].numpy(), upright.transpose(2, 0, 1))


def test_the_first_of_several_frames_is_read(tmp_path: Path) -> None:
    first, second = (Image.fromarray(np.full((4, 4), shade, np.uint8)) for shade in (40, 90))
    saved(tmp_path / "a/1.gif", first, save_all=True, append_images=[second])
    saved(tmp_path / "a/2.png", first)
    with pytest.warns(UserWarning, match=having("a/1.gif")):
        assert set(load_image_folder(tmp_path).x.flatten().tolist()) == {40}
