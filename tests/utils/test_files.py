"""A model's weights, kept as a state dict and told from others by a fingerprint; JSON takes the numbers of NumPy."""

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers.refusals import assert_named, assert_refused, having
from metricopt_ext.errors import FileFormatError
from metricopt_ext.runtime.identity import claim
from metricopt_ext.utils.files import (
    check_tensors,
    parse_json,
    read_json,
    remove_unfinished,
    walked,
    write_atomically,
    write_json,
)


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


def test_json_in_another_encoding_says_what_to_do() -> None:
    assert parse_json('"ä"'.encode("utf-8-sig")) == "ä"
    assert_refused(lambda: parse_json(b'["",\n"\xe4"]'), ValueError, "2", "UTF-8", "0xe4")


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
