"""Images: folders of them made here, of several types of values and orientations."""

import io
import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from helpers.refusals import assert_refused, assert_warned
from metricopt_ext.data.images import load_image_folder
from metricopt_ext.errors import DataError

FILES = {"cat/2.png": 12, "cat/1.png": 11, "ant/7.PNG": 1, "cat/.notes.txt": b"no image"}


def test_images_of_other_sizes_and_modes(lay: Callable[..., Path], tmp_path: Path) -> None:
    grey = io.BytesIO()
    Image.new("L", (8, 8), 77).save(grey, "JPEG")
    root = lay(tmp_path / "set", FILES | {"dog/1.jpg": grey.getvalue()}, "folder")
    assert_refused(lambda: load_image_folder(root), DataError, "8", "3", "ant/7.PNG", "image_size")
    data = load_image_folder(root, image_size=(5, 6))
    assert data.x.shape == (4, 3, 5, 6)
    assert set(data.x[3].flatten().tolist()) == {77}
    assert load_image_folder(root, image_size=2).x.shape == (4, 3, 2, 2)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes")
def test_a_pipe_is_not_waited_for(lay: Callable[..., Path], tmp_path: Path) -> None:
    root = lay(tmp_path / "set", FILES)
    os.mkfifo(root / "cat/3.png")
    assert_refused(lambda: load_image_folder(root), DataError, "cat/3.png", "regular")
    assert_refused(lambda: load_image_folder(root / "cat/3.png"), DataError, "cat/3.png", "regular")


@pytest.mark.parametrize(
    ("files", "names"),
    [
        ({"readme.txt": b""}, ("1", "readme.txt")),
        ({"1.png": 1}, ("1.png",)),
        ({"a/1.png": 1, "a/b/2.png": 1}, ("a/b/2.png",)),
        ({"x/a/1.png": 1, "y/a/2.png": 1}, ("x/a/1.png",)),
    ],
)
def test_other_image_layouts_are_refused(
    lay: Callable[..., Path], tmp_path: Path, files: dict[str, Any], names: tuple[str, ...]
) -> None:
    assert_refused(lambda: load_image_folder(lay(tmp_path / "set", files, "folder")), DataError, *names)


def test_what_is_not_read_is_said(lay: Callable[..., Path], tmp_path: Path) -> None:
    files = FILES | {"cat/.hidden": b"", "cat/Thumbs.db": b"", "cat/3.heic": b"", "README": b""}
    assert_warned(lambda: load_image_folder(lay(tmp_path / "set", files)), "2", "README")


def test_links_end(lay: Callable[..., Path], tmp_path: Path) -> None:
    root = lay(tmp_path / "set", {"ant/1.png": 1, "cat/2.png": 2}, "folder")
    (root / "ant" / "up").symlink_to("..")
    (root / "ant" / "here").symlink_to(".")
    data = assert_warned(lambda: load_image_folder(root), "2", "ant/here", "ant/up")
    assert data.class_names == ("ant", "cat")
    (tmp_path / "farm").mkdir()
    for name in ("ant", "cat"):
        (tmp_path / "farm" / name).symlink_to(tmp_path / "pictures" / name)
        lay(tmp_path / "pictures" / name, {"1.png": 5}, "folder")
    assert len(load_image_folder(tmp_path / "farm").y) == 2


def test_two_folders_may_name_a_class(lay: Callable[..., Path], tmp_path: Path) -> None:
    files = {"greek/b/1.png": 4, "latin/a/2.png": 3, "latin/a/1.png": 2, "greek/a/1.png": 1}
    data = load_image_folder(lay(tmp_path / "set", files, "nested folder"), depth=2)
    assert data.class_names == ("greek/a", "greek/b", "latin/a")
    assert data.x[:, 0, 0, 0].tolist() == [1, 4, 2, 3]
    assert data.y.tolist() == [0, 1, 2, 2]
    assert_refused(lambda: load_image_folder(lay(tmp_path / "flat", {"cat/1.png": 1}), depth=2), DataError, "cat/1.png")


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


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_16_bits_are_refused(tmp_path: Path, channels: int, mode: Any) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "1.png").write_bytes(png_of_16_bits(np.repeat(RAMP[:, :, None], channels, 2)))
    assert_refused(lambda: load_image_folder(tmp_path, mode=mode), DataError, "a/1.png", "mode", "8 bits")


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
