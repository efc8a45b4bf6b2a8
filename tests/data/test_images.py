"""Images: folders and zip files of them made here, and their flips and shifts."""

import io
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from metricopt_ext.data.images import flip_and_shift, jitter, load_image_folder, read_images, reader
from metricopt_ext.errors import DataError

FILES = {"cat/2.png": 12, "cat/1.png": 11, "ant/7.PNG": 1, "cat/.notes.txt": b"no image"}


@pytest.mark.parametrize("kind", ["folder", "zip", "nested folder", "nested zip"])
def test_images(lay: Callable[..., Path], tmp_path: Path, kind: str) -> None:
    data = load_image_folder(lay(tmp_path / "set", FILES, kind))
    assert data.x.dtype == torch.uint8
    assert data.x.shape == (3, 3, 3, 4)
    assert data.x[:, 0, 0, 0].tolist() == [1, 11, 12]
    assert data.x[0, 1, 2].tolist() == [0, 1, 2, 3]
    assert data.y.tolist() == [0, 1, 1]
    assert data.class_names == ("ant", "cat")
    assert load_image_folder(lay(tmp_path / "set", FILES, kind), limit_per_class=1).x[:, 0, 0, 0].tolist() == [1, 11]


def test_images_of_other_sizes_and_modes(lay: Callable[..., Path], tmp_path: Path) -> None:
    grey = io.BytesIO()
    Image.new("L", (8, 8), 77).save(grey, "JPEG")
    root = lay(tmp_path / "set", FILES | {"dog/1.jpg": grey.getvalue()}, "folder")
    with pytest.raises(DataError, match=r"8 x 8 \(dog/1\.jpg\) and 3 x 4 \(ant/7\.PNG\); set image_size"):
        load_image_folder(root)
    data = load_image_folder(root, image_size=(5, 6))
    assert data.x.shape == (4, 3, 5, 6)
    assert set(data.x[3].flatten().tolist()) == {77}
    assert load_image_folder(root, image_size=2).x.shape == (4, 3, 2, 2)


@pytest.mark.parametrize("kind", ["folder", "zip"])
def test_unreadable_image_is_named(lay: Callable[..., Path], tmp_path: Path, kind: str) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    whole = io.BytesIO()
    Image.fromarray(noise).save(whole, "JPEG")
    for name, content in {"cat/3.png": b"not a picture", "cat/3.jpg": whole.getvalue()[:-300]}.items():
        root = lay(tmp_path / name[-3:], FILES | {name: content}, kind)
        with pytest.raises(DataError, match=f"cannot read {name}"):
            load_image_folder(root, image_size=4)


def test_damaged_zip(lay: Callable[..., Path], tmp_path: Path) -> None:
    path = lay(tmp_path / "set", FILES, "zip")
    content = bytearray(path.read_bytes())
    content[content.index(b"IDAT") + 6] ^= 0xFF
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"cannot read cat/2\.png"):
        load_image_folder(path)
    path.write_bytes(b"not a zip")
    with pytest.raises(DataError, match="neither a folder nor a complete zip"):
        load_image_folder(path)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"readme.txt": b""}, "got none"),
        ({"1.png": 1}, r"<class>/<file>, got 1\.png"),
        ({"a/1.png": 1, "a/b/2.png": 1}, r"got a/b/2\.png"),
        ({"x/a/1.png": 1, "y/a/2.png": 1}, r"got x/a/1\.png"),
    ],
)
def test_other_image_layouts_are_refused(
    lay: Callable[..., Path], tmp_path: Path, files: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        load_image_folder(lay(tmp_path / "set", files, "folder"))


def test_limits_must_be_positive(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="limit_per_class is 0; it must be at least 1"):
        load_image_folder(tmp_path, limit_per_class=0)


def saved(path: Path, pixels: Any, mode: str | None = None, **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    image = pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)
    (image.convert(mode) if mode else image).save(path, **options)
    return path


RAMP = np.arange(0, 65536, 4369, dtype=np.uint16).reshape(4, 4)  # 0, 0x1111, ... 0xffff
BYTES = (RAMP // 257).astype(np.uint8)  # 0, 0x11, ... 0xff: what a screen shows


@pytest.mark.parametrize("suffix", ["png", "tif", "pgm"])
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_16_bit_pictures_keep_their_shades(tmp_path: Path, suffix: str, mode: Any) -> None:
    path = tmp_path / f"a/1.{suffix}"
    if suffix == "pgm":  # which Pillow writes from 10.4 on
        path.parent.mkdir()
        path.write_bytes(b"P5 4 4 65535\n" + RAMP.astype(">u2").tobytes())
    else:
        saved(path, RAMP)
    x = load_image_folder(tmp_path, mode=mode).x
    assert np.array_equal(x[0, 0].numpy(), BYTES)


def test_big_endian_and_colour_of_16_bits(tmp_path: Path) -> None:
    import struct
    import zlib

    rows = b"".join(b"\0" + np.repeat(row[:, None], 3, 1).astype(">u2").tobytes() for row in RAMP)
    parts = [(b"IHDR", struct.pack(">IIBBBBB", 4, 4, 16, 2, 0, 0, 0)), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    png = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body)) for kind, body in parts
    )
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "1.png").write_bytes(png)
    header = b"MM\0*\0\0\0\x08" + struct.pack(">H", 8)
    tags = ((256, 4), (257, 4), (258, 16), (259, 1), (262, 1), (273, 110), (278, 4), (279, 32))
    entries = b"".join(struct.pack(">HHIHH", tag, 3, 1, value, 0) for tag, value in tags)
    tiff = (header + entries + bytes(4)).ljust(110, b"\0") + RAMP.astype(">u2").tobytes()
    (tmp_path / "a" / "2.tif").write_bytes(tiff)
    x = load_image_folder(tmp_path).x
    assert np.array_equal(x[0, 2].numpy(), BYTES)
    assert np.array_equal(x[1, 2].numpy(), BYTES)


def test_floats_between_black_and_white(tmp_path: Path) -> None:
    saved(tmp_path / "a/1.tiff", (np.arange(16).reshape(4, 4) / 15).astype(np.float32))
    assert np.array_equal(load_image_folder(tmp_path).x[0, 1].numpy(), BYTES)


@pytest.mark.parametrize(
    ("pixels", "message"),
    [
        (np.full((4, 4), 128.0, np.float32), r"a/1\.tif as an image: it is of PIL's mode F .* 128 to 128; only floats"),
        (np.full((4, 4), np.nan, np.float32), r"mode F with values from nan to nan; only floats in \[0, 1\]"),
        (np.full((4, 4), 70_000, np.int32), r"mode I with values from 70000 to 70000, so it has no known white"),
        (np.full((4, 4), -1, np.int32), r"mode I with values from -1 to -1, so it has no known white"),
        (
            BYTES.astype(np.uint16),
            r"mode I;16 with values from 0 to 255: black, if white is 65535. Save it with 8 bits",
        ),
    ],
)
def test_values_without_a_known_white_are_refused(tmp_path: Path, pixels: Any, message: str) -> None:
    saved(tmp_path / "a/1.tif", pixels)
    with pytest.raises(DataError, match=message):
        load_image_folder(tmp_path)


@pytest.mark.parametrize(("high", "told"), [(4095, True), (4096, False)])
def test_12_bits_saved_as_16_are_warned_of(tmp_path: Path, high: int, told: bool) -> None:
    (tmp_path / "a").mkdir()
    values = np.array([[0, 256], [300, high]], np.uint16)
    Image.fromarray(values).save(tmp_path / "a/1.png")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        x = load_image_folder(tmp_path, mode="L").x
    assert x.flatten().tolist() == [0, 1, 1, high >> 8]
    assert len(said) == told
    assert all("of 1 image with 16 bits all values are below 4096, so 16 shades" in str(each.message) for each in said)


def test_black_is_black_in_16_bits(tmp_path: Path) -> None:
    saved(tmp_path / "a/1.png", np.zeros((4, 4), np.uint16))
    assert load_image_folder(tmp_path).x.max() == 0


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


@pytest.mark.parametrize("kind", ["folder", "zip"])
def test_what_is_not_read_is_said(lay: Callable[..., Path], tmp_path: Path, kind: str) -> None:
    files = FILES | {"cat/.hidden": b"", "cat/Thumbs.db": b"", "cat/3.heic": b"", "README": b""}
    with pytest.warns(UserWarning, match=r"2 files .* not read: 'README', 'cat/3\.heic'$"):
        load_image_folder(lay(tmp_path / "set", files, kind))


def test_a_class_without_an_image_is_refused(lay: Callable[..., Path], tmp_path: Path) -> None:
    root = lay(tmp_path / "set", FILES, "folder")
    (root / "emu").mkdir()
    (root / ".git").mkdir()
    with pytest.raises(DataError, match=r"1 folder without an image that is read: 'emu'\. Add images with one of"):
        load_image_folder(root)
    for kind in ("zip", "nested zip", "nested folder"):
        with pytest.raises(DataError, match=r"1 folder without an image that is read: '(images/)?emu'\."):
            load_image_folder(lay(tmp_path / kind, FILES | {"emu/1.heic": b""}, kind))
    (root / "emu").rmdir()
    (root / "cat" / "1.png").rename(root / "cat" / "1.jfif")
    assert load_image_folder(root).x[:, 0, 0, 0].tolist() == [1, 11, 12]


def test_an_alphabet_without_a_character_is_refused(lay: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(DataError, match="1 folder without an image that is read: 'latin'"):
        load_image_folder(lay(tmp_path / "set", {"greek/a/1.png": 1, "latin/a.txt": b""}, "folder"), depth=2)


def test_an_empty_file_and_one_of_another_format_have_no_address(lay: Callable[..., Path], tmp_path: Path) -> None:
    for name, content, why in (("empty.png", b"", "it is empty"), ("text.png", b"text", "it is none of BMP, GIF")):
        with pytest.raises(DataError, match=rf"cannot read cat/{name} as an image: {why}"):
            load_image_folder(lay(tmp_path / name, {f"cat/{name}": content}, "folder"))


def test_the_first_of_several_frames_is_read(tmp_path: Path) -> None:
    first, second = (Image.fromarray(np.full((4, 4), shade, np.uint8)) for shade in (40, 90))
    saved(tmp_path / "a/1.gif", first, save_all=True, append_images=[second])
    saved(tmp_path / "a/2.png", first)
    with pytest.warns(UserWarning, match=r"of 1 image with several frames only the first is read: 'a/1\.gif'"):
        assert set(load_image_folder(tmp_path).x.flatten().tolist()) == {40}


def test_a_pipe_is_refused_at_once(lay: Callable[..., Path], tmp_path: Path) -> None:
    root = lay(tmp_path / "set", FILES, "folder")
    os.mkfifo(root / "cat" / "3.png")
    with pytest.raises(DataError, match=r"cannot read cat/3\.png as an image: .*not a regular file"):
        load_image_folder(root)


def test_links_end(lay: Callable[..., Path], tmp_path: Path) -> None:
    root = lay(tmp_path / "set", {"ant/1.png": 1, "cat/2.png": 2}, "folder")
    (root / "ant" / "up").symlink_to("..")
    (root / "ant" / "here").symlink_to(".")
    with pytest.warns(UserWarning, match=r"2 links to folders that are read elsewhere left out: 'ant/here', 'ant/up'"):
        data = load_image_folder(root)
    assert data.class_names == ("ant", "cat")
    (tmp_path / "farm").mkdir()
    for name in ("ant", "cat"):
        (tmp_path / "farm" / name).symlink_to(tmp_path / "pictures" / name)
        lay(tmp_path / "pictures" / name, {"1.png": 5}, "folder")
    assert len(load_image_folder(tmp_path / "farm").y) == 2


def test_a_missing_path_names_itself_and_the_key(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere not found; set data\.root=DIR"):
        load_image_folder(tmp_path / "nowhere")


def test_two_folders_may_name_a_class(lay: Callable[..., Path], tmp_path: Path) -> None:
    files = {"greek/b/1.png": 4, "latin/a/2.png": 3, "latin/a/1.png": 2, "greek/a/1.png": 1}
    data = load_image_folder(lay(tmp_path / "set", files, "nested zip"), depth=2)
    assert data.class_names == ("greek/a", "greek/b", "latin/a")
    assert data.x[:, 0, 0, 0].tolist() == [1, 4, 2, 3]
    assert data.y.tolist() == [0, 1, 2, 2]
    with pytest.raises(DataError, match=r"must hold its images as <group>/<class>/<file>, got cat/1\.png"):
        load_image_folder(lay(tmp_path / "flat", {"cat/1.png": 1}), depth=2)


def test_shades_of_grey_have_one_channel(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (5, 7), dtype=np.uint8)
    (tmp_path / "a").mkdir()
    Image.fromarray(pixels).save(tmp_path / "a" / "1.png")
    data = load_image_folder(tmp_path, mode="L")
    assert data.x.shape == (1, 1, 5, 7)
    assert np.array_equal(data.x[0, 0].numpy(), pixels)


def test_images_are_read_in_the_order_of_their_names(lay: Callable[..., Path], tmp_path: Path) -> None:
    folder = lay(tmp_path / "set", {"a.png": 1, "b.png": 2, "c/d.png": 3})
    x = read_images(folder, ["c/d.png", "a.png", "b.png"], reader(folder))
    assert x[:, 0, 0, 0].tolist() == [3, 1, 2]
    with pytest.raises(DataError, match=r"set: cannot read gone\.png as an image"):
        read_images(folder, ["a.png", "gone.png"], reader(folder))


def test_flips_and_shifts_are_those_of_a_loop_over_all_that_can_be() -> None:
    x = torch.rand(400, 2, 5, 4, generator=torch.Generator().manual_seed(0))
    out = flip_and_shift(x, torch.Generator().manual_seed(1), pixels=2)
    assert out.shape == x.shape
    drawn = []
    for before, after in zip(x, out, strict=True):
        found = []
        for flipped in (False, True):
            source = before.flip(-1) if flipped else before
            for down in range(-2, 3):
                for right in range(-2, 3):
                    expected = torch.zeros_like(source)
                    for row in range(5):
                        for column in range(4):
                            if 0 <= row + down < 5 and 0 <= column + right < 4:
                                expected[:, row, column] = source[:, row + down, column + right]
                    if torch.equal(after, expected):
                        found.append((flipped, down, right))
        (only,) = found  # exactly one way to come to it
        drawn.append(only)
    mirrored = sum(flipped for flipped, _, _ in drawn)
    assert abs(mirrored - 200) < 40  # std 10
    for axis in (1, 2):
        counts = np.bincount([each[axis] + 2 for each in drawn], minlength=5)
        assert np.abs(counts - 80).max() < 32  # std 8


def test_flips_and_shifts_depend_on_the_generator_alone() -> None:
    x = torch.rand(20, 1, 6, 6)
    one, same, other = (flip_and_shift(x, torch.Generator().manual_seed(seed)) for seed in (3, 3, 4))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    still = flip_and_shift(x, torch.Generator().manual_seed(3), pixels=0)
    assert all(torch.equal(a, b) or torch.equal(a, b.flip(-1)) for a, b in zip(still, x, strict=True))


@pytest.mark.parametrize("white", [1.0, 3.0, 255.0])
def test_jitter_scales_with_the_images_and_keeps_their_mean_and_order(white: float) -> None:
    x = white * torch.rand(40, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    y = torch.arange(40)
    found, labels = jitter((x, y), torch.Generator().manual_seed(1))
    assert torch.equal(labels, y)
    assert (found.shape, found.dtype) == (x.shape, x.dtype)
    relative, _ = jitter((x / white, y), torch.Generator().manual_seed(1))
    torch.testing.assert_close(found / white, relative, rtol=1e-4, atol=1e-5)
    assert (found.mean((1, 2, 3)) - x.mean((1, 2, 3))).abs().max() < 0.1 * white
    contrast = found.flatten(1).std(1) / x.flatten(1).std(1)
    assert 0.65 < float(contrast.min()) < 0.85 < 1.15 < float(contrast.max()) < 1.4
    moved = [(dy, dx) for dy in (-1, 0, 1) for dx in (-1, 0, 1)]
    like = [torch.corrcoef(torch.stack([found[0].flatten(), x[0].roll(by, (1, 2)).flatten()]))[0, 1] for by in moved]
    assert sum(float(each) > 0.9 for each in like) == 1


def test_jitter_of_bytes_is_bytes_and_depends_on_the_generator_alone() -> None:
    x = torch.randint(256, (9, 1, 6, 6), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    first, again, other = (jitter((x, x), torch.Generator().manual_seed(seed))[0] for seed in (1, 1, 2))
    assert first.dtype == torch.uint8
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
