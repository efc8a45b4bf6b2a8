"""The state dict in a checkpoint's file: which entry it is, and into which model it goes."""

import os
from pathlib import Path

import pytest
import torch
from torch import nn

from metricopt_ext.errors import DataError
from metricopt_ext.utils.files import save_checkpoint
from metricopt_ext.utils.state_dict import load_checkpoint, within


def test_a_saved_checkpoint_is_loaded_as_it_was(tmp_path: Path) -> None:
    model, other = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    model(torch.randn(4, 3, generator=torch.Generator().manual_seed(0)))
    save_checkpoint(tmp_path / "new" / "model.safetensors", model.state_dict())
    load_checkpoint(other, tmp_path / "new" / "model.safetensors")
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in other.state_dict().items())


@pytest.mark.parametrize("name", ["x.safetensors", "x.pt"])
def test_a_pipe_is_not_opened(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(DataError, match="not a regular file"):
        load_checkpoint(nn.Linear(1, 1), tmp_path / name)


def test_keys_with_dots_lead_into_nested_content() -> None:
    content = {"a": {"b.c": [1, {"d": 2}]}, "a.b": {"c": 3}, "e": None}
    assert within(content, "a.b.c.1.d") == 2
    assert within(content, "a.b.c") == 3  # the longest key counts
    assert within(content, "a.b") == {"c": 3}
    for missing in ("x", "a.b.c.7", "a.b.c.x", "e.f", "a.b.c.0.d", "e"):
        assert within(content, missing) is None
