"""Images: folders of them made here."""

import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from helpers.refusals import assert_named, assert_refused, assert_warned
from metricopt_ext.data.images import load_image_folder, read_images, reader
from metricopt_ext.errors import DataError

FILES = {"cat/2.png": 12, "cat/1.png": 11, "ant/7.PNG": 1, "cat/.notes.txt": b"no image"}


@pytest.mark.parametrize("kind", ["folder", "nested folder"])
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
    assert_refused(lambda: load_image_folder(root), DataError, "8", "3", "ant/7.PNG", "image_size")
    data = load_image_folder(root, image_size=(5, 6))
    assert data.x.shape == (4, 3, 5, 6)
    assert set(data.x[3].flatten().tolist()) == {77}
    assert load_image_folder(root, image_size=2).x.shape == (4, 3, 2, 2)


def test_unreadable_image_is_named(lay: Callable[..., Path], tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    whole = io.BytesIO()
    Image.fromarray(noise).save(whole, "JPEG")
    for name, content in {"cat/3.png": b"not a picture", "cat/3.jpg": whole.getvalue()[:-300]}.items():
        root = lay(tmp_path / name[-3:], FILES | {name: content})
        with pytest.raises(DataError) as caught:
            load_image_folder(root, image_size=4)
        assert_named(caught, name)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes")
def test_a_pipe_is_not_waited_for(lay: Callable[..., Path], tmp_path: Path) -> None:
    root = lay(tmp_path / "set", FILES)
    os.mkfifo(root / "cat/3.png")
    assert_refused(lambda: load_image_folder(root), DataError, "cat/3.png", "regular")
    assert_refused(lambda: load_image_folder(root / "cat/3.png"), DataError, "cat/3.png", "regular")


def test_a_file_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "set.zip").write_bytes(b"PK")
    assert_refused(lambda: load_image_folder(tmp_path / "set.zip"), DataError, "set.zip", "unpack")
    (tmp_path / "set.png").write_bytes(b"")
    assert_refused(lambda: load_image_folder(tmp_path / "set.png"), DataError, "set.png")


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


def test_limits_must_be_positive(tmp_path: Path) -> None:
    assert_refused(lambda: load_image_folder(tmp_path, limit_per_class=0), ValueError, "limit_per_class", "1")


def test_what_is_not_read_is_said(lay: Callable[..., Path], tmp_path: Path) -> None:
    files = FILES | {"cat/.hidden": b"", "cat/Thumbs.db": b"", "cat/3.heic": b"", "README": b""}
    assert_warned(lambda: load_image_folder(lay(tmp_path / "set", files)), "2", "README")


def test_a_class_without_an_image_is_refused(lay: Callable[..., Path], tmp_path: Path) -> None:
    root = lay(tmp_path / "set", FILES, "folder")
    (root / "emu").mkdir()
    (root / ".git").mkdir()
    assert_refused(lambda: load_image_folder(root), DataError, "1", "emu")
    with pytest.raises(DataError) as caught:
        load_image_folder(lay(tmp_path / "nested", FILES | {"emu/1.heic": b""}, "nested folder"))
    assert_named(caught, "1", "emu")
    (root / "emu").rmdir()
    (root / "cat" / "1.png").rename(root / "cat" / "1.jfif")
    assert load_image_folder(root).x[:, 0, 0, 0].tolist() == [1, 11, 12]


def test_an_alphabet_without_a_character_is_refused(lay: Callable[..., Path], tmp_path: Path) -> None:
    assert_refused(
        lambda: load_image_folder(lay(tmp_path / "set", {"greek/a/1.png": 1, "latin/a.txt": b""}, "folder"), depth=2),
        DataError,
        "1",
        "folder",
        "latin",
    )


def test_an_empty_file_and_one_of_another_format_have_no_address(lay: Callable[..., Path], tmp_path: Path) -> None:
    for name, content, names in (("empty.png", b"", ("empty",)), ("text.png", b"text", ("BMP", "GIF"))):
        with pytest.raises(DataError) as caught:
            load_image_folder(lay(tmp_path / name, {f"cat/{name}": content}, "folder"))
        assert_named(caught, f"cat/{name}", *names)


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


def test_a_missing_path_names_itself_and_the_key(tmp_path: Path) -> None:
    assert_refused(lambda: load_image_folder(tmp_path / "nowhere"), DataError, "nowhere", "data.root=DIR")


def test_two_folders_may_name_a_class(lay: Callable[..., Path], tmp_path: Path) -> None:
    files = {"greek/b/1.png": 4, "latin/a/2.png": 3, "latin/a/1.png": 2, "greek/a/1.png": 1}
    data = load_image_folder(lay(tmp_path / "set", files, "nested folder"), depth=2)
    assert data.class_names == ("greek/a", "greek/b", "latin/a")
    assert data.x[:, 0, 0, 0].tolist() == [1, 4, 2, 3]
    assert data.y.tolist() == [0, 1, 2, 2]
    assert_refused(lambda: load_image_folder(lay(tmp_path / "flat", {"cat/1.png": 1}), depth=2), DataError, "cat/1.png")


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
    assert_refused(lambda: read_images(folder, ["a.png", "gone.png"], reader(folder)), DataError, "gone.png")
