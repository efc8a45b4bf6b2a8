"""A model's weights, kept as a state dict and told from others by a fingerprint; JSON takes the numbers of NumPy."""

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

from helpers.refusals import assert_named, assert_refused, having
from metricopt_ext.errors import AdapterError, DataError, FileFormatError
from metricopt_ext.runtime.identity import claim
from metricopt_ext.utils import files
from metricopt_ext.utils.files import (
    check_tensors,
    content_of,
    module_of,
    parse_json,
    read_json,
    read_tensors,
    remove_unfinished,
    walked,
    write_atomically,
    write_json,
    write_tensors,
)


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
def test_others_may_read_a_file_if_the_umask_lets_them(umask: int, mode: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        write_json(tmp_path / "a.json", {})
    finally:
        assert os.umask(before) == umask
    assert (tmp_path / "a.json").stat().st_mode & 0o777 == mode


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_a_failed_write_names_its_file_and_leaves_the_old_one(
    failing: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "a.json"
    write_atomically(path, b"old")

    def full(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, failing, full)
    with pytest.raises(OSError, match=having("a.json")) as raised:
        write_atomically(path, b"new")
    assert raised.value.errno == errno.ENOSPC
    assert [each.read_bytes() for each in tmp_path.iterdir()] == [b"old"]


def test_a_folder_that_is_a_file_keeps_its_kind_of_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    assert_refused(
        lambda: write_atomically(tmp_path / "file" / "a.json", b"new"),
        (FileExistsError, NotADirectoryError),
        "file/a.json",
    )


def test_what_killed_writers_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    others = [".lock", ".a.json", "a.unfinished", "a.json", "folder/.a.json.1.unfinished"]
    for name in [".a.json.x_1.unfinished", *others]:
        write_atomically(tmp_path / name, b"")
    remove_unfinished(tmp_path)
    remove_unfinished(tmp_path / "missing")
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()} == set(others)


def test_numbers_of_numpy_are_numbers_in_json(tmp_path: Path) -> None:
    numbers = {
        "seed": np.int64(3),
        "lr": np.float32(0.5),
        "maximize": np.bool_(True),
        "settings": [(np.float64(0.1), 1)],
    }
    write_json(tmp_path / "numbers.json", numbers)
    plain = {"seed": 3, "lr": 0.5, "maximize": True, "settings": [[0.1, 1]]}
    assert read_json(tmp_path / "numbers.json") == plain
    claim(tmp_path / "identity.json", numbers)
    claim(tmp_path / "identity.json", plain)


def test_what_json_can_not_hold_is_refused_by_its_type(tmp_path: Path) -> None:
    assert_refused(
        lambda: write_json(tmp_path / "numbers.json", {"lr": torch.tensor(0.1)}), TypeError, "Tensor", "JSON"
    )
    assert list(tmp_path.iterdir()) == []


def test_json_in_another_encoding_says_what_to_do() -> None:
    assert parse_json('"ä"'.encode("utf-8-sig")) == "ä"
    assert_refused(lambda: parse_json(b'["",\n"\xe4"]'), ValueError, "2", "UTF-8", "0xe4")


def test_json_that_no_parser_reads_is_refused(tmp_path: Path) -> None:
    for content in ('{"a": ', '{"a": ' + "[" * 100_000):
        (tmp_path / "a.json").write_text(content)
        assert_refused(lambda: read_json(tmp_path / "a.json"), FileFormatError, "a.json", "JSON")


def test_a_description_and_tensors_come_back_and_are_aligned(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    for name in ("a", "ab", "abc", "abcdefgh"):
        tensors = {name: torch.arange(3.0), "z": torch.tensor([True])}
        write_tensors(path, tensors, "kind/1", {"ä": name})
        found, described = read_tensors(path, "kind/1")
        assert described == {"ä": name}
        assert found.keys() == tensors.keys()
        assert all(torch.equal(found[key], value) for key, value in tensors.items())
        assert int.from_bytes(path.read_bytes()[:8], "little") % 8 == 0


@pytest.mark.parametrize("place", ["tensors", "description"])
def test_a_flipped_byte_is_noticed(tmp_path: Path, place: str) -> None:
    path = tmp_path / "a.safetensors"
    write_tensors(path, {"a": torch.arange(3.0)}, "kind/1", {"steps": 11})
    content = bytearray(path.read_bytes())
    at = len(content) - 2 if place == "tensors" else content.index(b"11")
    content[at] ^= 1
    path.write_bytes(content)
    assert_refused(lambda: read_tensors(path, "kind/1"), FileFormatError, "a.safetensors")


def test_a_file_without_a_checksum_is_refused(tmp_path: Path) -> None:
    metadata = {"format": "kind/1", "described": '{"steps": 11}'}
    (tmp_path / "a.safetensors").write_bytes(safetensors.torch.save({"a": torch.arange(3.0)}, metadata=metadata))
    assert_refused(lambda: read_tensors(tmp_path / "a.safetensors", "kind/1"), FileFormatError, "a.safetensors")


def test_other_tensors_are_named() -> None:
    tensors = {"a": torch.zeros(2, 3)}
    check_tensors("f", tensors, {"a": (2, 3)})
    for expected, names in (
        ({"a": (2, 3), "b": ()}, ("f", "'b'")),
        ({}, ("f", "'a'")),
        ({"a": (3, 2)}, ("f", "'a'", "(2, 3)", "(3, 2)")),
    ):
        with pytest.raises(FileFormatError) as caught:
            check_tensors("f", tensors, expected)
        assert_named(caught, *names)


def test_a_module_is_built_of_its_own_tensors_alone() -> None:
    model = nn.BatchNorm1d(3).double()
    model(torch.randn(4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
    loaded = module_of("f", model.state_dict(), lambda: nn.BatchNorm1d(3))
    assert all(torch.equal(value, model.state_dict()[key].to(value)) for key, value in loaded.state_dict().items())
    assert loaded.weight.dtype == torch.float32
    # 16 TB, had it been built
    assert_refused(
        lambda: module_of("f", model.state_dict(), lambda: nn.BatchNorm1d(10**12)), FileFormatError, "(1000000000000,)"
    )


def test_what_code_raises_on_other_content_names_the_file() -> None:
    with (
        pytest.raises(FileFormatError) as caught,
        content_of("f", "thing"),
    ):
        {}["a"]
    assert_named(caught, "thing", "KeyError('a')")
    with pytest.raises(AdapterError) as caught, content_of("f", "thing"):
        raise AdapterError("mine")
    assert_named(caught, "mine")
    with pytest.raises(KeyboardInterrupt), content_of("f", "thing"):
        raise KeyboardInterrupt


def test_each_folder_is_entered_once(tmp_path: Path) -> None:
    (tmp_path / "top/b/c").mkdir(parents=True)
    (tmp_path / "else").mkdir()
    for name in ("top/1", "top/b/2", "top/b/c/3", "else/4"):
        (tmp_path / name).touch()
    for name, target in (("top/a", "b"), ("top/b/c/up", ".."), ("top/x", "../else"), ("top/y", "../else")):
        (tmp_path / name).symlink_to(target)
    (tmp_path / "top/gone").symlink_to("nowhere")
    assert walked(tmp_path / "top") == (
        ["1", "b/", "b/2", "b/c/", "b/c/3", "gone", "x/", "x/4"],
        ["a", "b/c/up", "y"],
    )


def test_many_links_to_many_links_take_no_time(tmp_path: Path) -> None:
    for level in range(30):  # 2^30 paths
        (tmp_path / str(level)).mkdir()
        for side in ("l", "r"):
            (tmp_path / str(level) / side).symlink_to(f"../{level + 1}")
    (tmp_path / "30").mkdir()
    names, again = walked(tmp_path / "0")
    assert len(names) == 30
    assert len(again) == 30


def test_an_archive_is_to_be_unpacked(tmp_path: Path) -> None:
    for name in ("a.zip", "b.tar.gz", "c.7z"):
        (tmp_path / name).touch()
        assert_refused(lambda name=name: files.existing(tmp_path / name), DataError, name, "unpack")


def test_a_home_that_no_shell_put_in_is_named() -> None:
    assert_refused(lambda: files.existing("~/none"), DataError, "~/none", "data.root=DIR")
