"""Arrays from files of several kinds."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from metricopt_ext.data.arrays import read_array, read_shape
from metricopt_ext.errors import DataError

X = np.arange(12, dtype=np.float32).reshape(4, 3) / 7
Y = np.array([3, 1, 2**40, 1])


def test_npy_and_safetensors_hold_what_was_written(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", X)
    save_file({"embeddings": torch.from_numpy(X), "labels": torch.from_numpy(Y)}, tmp_path / "xy.safetensors")
    assert np.array_equal(read_array(tmp_path / "x.npy", "embeddings"), X)
    assert torch.equal(read_array(tmp_path / "xy.safetensors", "embeddings"), torch.from_numpy(X))
    assert (
        read_shape(tmp_path / "x.npy", "embeddings") == read_shape(tmp_path / "xy.safetensors", "embeddings") == (4, 3)
    )
    assert read_shape(tmp_path / "xy.safetensors", "labels") == (4,)


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"x\.npy does not exist"):
        read_array(tmp_path / "x.npy", "embeddings")
    (tmp_path / "x.csv").write_text("1,2")
    with pytest.raises(DataError, match=r"x\.csv must be a \.npy"):
        read_array(tmp_path / "x.csv", "embeddings")
