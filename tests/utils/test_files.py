"""Files are written whole or not at all; JSON takes the numbers of NumPy."""

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.refusals import having
from metricopt_ext.runtime.identity import claim
from metricopt_ext.utils.files import (
    read_json,
    remove_unfinished,
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
