"""Checkpoints of torch and of safetensors: what is read or refused, and that only what is replaced differs."""

import json
import struct
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from helpers.refusals import assert_refused
from metricopt_ext.errors import DataError, FileFormatError
from metricopt_ext.utils.checkpoint_file import read_checkpoint


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv1d(2, 3, 1), nn.BatchNorm1d(3), nn.Linear(4, 2))


def header(path: Path) -> bytes:
    content = path.read_bytes()
    return content[: 8 + int.from_bytes(content[:8], "little")]


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """A training script's checkpoint, in which two keys name one tensor and two tensors lie in one storage."""
    state = model().state_dict()
    state["tied.weight"] = state["1.weight"]
    flat = torch.arange(6.0)
    state["low"], state["high"] = flat[:3], flat[3:]
    state["half"] = torch.ones(3, dtype=torch.bfloat16)
    content = {"epoch": 7, "model": state, "optimizer": {"state": {0: {"step": torch.tensor(3.0)}}, "lr": [0.1, None]}}
    torch.save(content, tmp_path / "model.pth")
    return tmp_path / "model.pth"


def test_a_torch_file_keeps_all_but_what_is_replaced(trained: Path, tmp_path: Path) -> None:
    file = read_checkpoint(trained)
    assert file.entry == "model"
    assert file.shapes["1.weight"] == (3,)
    assert file.dtypes["half"] == torch.bfloat16
    new = {"1.bias": torch.tensor([1.0, 2.0, 3.0]), "half": torch.tensor([2.0, 3, 4]).bfloat16()}
    file.write(tmp_path / "new.pth", new)
    before, after = torch.load(trained), torch.load(tmp_path / "new.pth")
    assert list(after) == list(before)
    assert {key: after[key] for key in ("epoch", "optimizer")} == {key: before[key] for key in ("epoch", "optimizer")}
    old, now = before["model"], after["model"]
    assert type(now) is OrderedDict
    assert now._metadata == old._metadata
    assert list(now) == list(old)
    assert {key for key in now if not torch.equal(now[key], old[key])} == {"1.bias", "half"}
    assert torch.equal(now["1.bias"], new["1.bias"])
    assert torch.equal(now["half"], new["half"])
    assert all(now[key].dtype == old[key].dtype for key in now)
    assert now["tied.weight"].data_ptr() == now["1.weight"].data_ptr()
    assert now["low"].untyped_storage().data_ptr() == now["high"].untyped_storage().data_ptr()
    assert torch.equal(file.tensor("1.bias"), old["1.bias"])  # the file in memory is as it was


def test_a_safetensors_file_keeps_every_other_byte(tmp_path: Path) -> None:
    state = {
        **model().state_dict(),
        "half": torch.ones(3, dtype=torch.bfloat16),
        "z": torch.ones((), dtype=torch.int64),
    }
    save_file(state, tmp_path / "a.safetensors", metadata={"format": "pt", "who": "me"})
    file = read_checkpoint(tmp_path / "a.safetensors")
    assert set(file.shapes) == set(state)
    assert all(file.dtypes[key] == value.dtype for key, value in state.items())
    assert all(torch.equal(file.tensor(key), value) for key, value in state.items())
    assert file.aliases("half") == ["half"]
    new = {"1.weight": torch.tensor([1.0, 2.0, 3.0]), "half": torch.tensor([2.0, 3, 4]).bfloat16()}
    file.write(tmp_path / "b.safetensors", new)
    assert header(tmp_path / "b.safetensors") == header(tmp_path / "a.safetensors")
    now = load_file(tmp_path / "b.safetensors")
    assert {key for key, value in state.items() if not torch.equal(now[key], value)} == set(new)
    assert all(torch.equal(now[key], value) for key, value in new.items())
    file.write(tmp_path / "c.safetensors", {})
    assert (tmp_path / "c.safetensors").read_bytes() == (tmp_path / "a.safetensors").read_bytes()


STATE = {"a.weight": torch.ones(2)}


@pytest.mark.parametrize(
    ("content", "entry", "found"),
    [
        (STATE, None, None),
        ({**STATE, "epoch": 3}, None, None),
        ({"state_dict": STATE, "epoch": 3}, None, "state_dict"),
        ({"model": STATE, "state_dict_ema": STATE}, "state_dict_ema", "state_dict_ema"),
        ({"net": STATE, "epoch": 3, "best": torch.tensor(0.5)}, "net", "net"),
        ({**STATE, "norm._extra_state": {"scale": torch.ones(1)}}, None, None),
        ({"nets": {"student.1": STATE}}, "nets.student.1", "nets.student.1"),
    ],
)
def test_where_the_state_dict_is(content: Any, entry: str | None, found: str | None, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "a.th")
    file = read_checkpoint(tmp_path / "a.th", entry)
    assert file.entry == found
    assert list(file.shapes) == ["a.weight"]


@pytest.mark.parametrize(
    ("content", "entry", "names"),
    [
        ({"model": STATE, "state_dict_ema": STATE}, None, ("2", "model", "--entry")),
        ({"net": {"a": 1}, "epoch": 3}, None, ("--entry", "net")),
        ({"net": STATE}, "model", ("--entry", "net")),
        ({"epoch": 3}, None, ("epoch",)),
    ],
)
def test_what_has_no_state_dict_is_refused(
    content: Any, entry: str | None, names: tuple[str, ...], tmp_path: Path
) -> None:
    torch.save(content, tmp_path / "a.pt")
    assert_refused(lambda: read_checkpoint(tmp_path / "a.pt", entry), DataError, *names)


class Own:
    """Of a framework's own."""


@pytest.mark.parametrize(
    "content",
    [nn.Linear(2, 2), {"model": STATE, "args": Own()}, {"state_dict": STATE, "meta": {"best": np.float64(3)}}],
)
def test_what_is_more_than_tensors_is_refused(content: Any, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "a.pth")
    assert_refused(lambda: read_checkpoint(tmp_path / "a.pth"), FileFormatError, "a.pth")


def test_other_files_are_refused(tmp_path: Path) -> None:
    for name in ("a.onnx", "a.pkl"):
        assert_refused(lambda name=name: read_checkpoint(tmp_path / name), DataError, name[1:], "safetensors")
    assert_refused(lambda: read_checkpoint(tmp_path), DataError)
    for name in ("a.pth", "a.safetensors"):
        with pytest.raises(FileNotFoundError):
            read_checkpoint(tmp_path / name)
        for content in (b"no checkpoint", b"", b"PK\3\4"):
            (tmp_path / name).write_bytes(content)
            with pytest.raises(FileFormatError):
                read_checkpoint(tmp_path / name)
    assert_refused(lambda: read_checkpoint(tmp_path / "a.safetensors", "model"), DataError)


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_a_file_that_another_process_writes_anew_is_refused(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"last{suffix}"
    save = save_file if suffix == ".safetensors" else torch.save
    save({"a": torch.ones(2)}, path)  # type: ignore[operator]
    file = read_checkpoint(path)
    file.write(path, {"a": torch.zeros(2)})  # which is no other process
    file.write(tmp_path / f"trial{suffix}", {})
    save({"a": torch.ones(3)}, path)  # type: ignore[operator]
    assert_refused(lambda: file.write(tmp_path / f"trial{suffix}", {"a": torch.ones(2)}), DataError, "last")
    assert_refused(file.check_unchanged, DataError)


def test_a_tensor_of_a_type_that_safetensors_can_not_load_is_refused(tmp_path: Path) -> None:
    header = {"weight": {"dtype": "F6_E2M3", "shape": [2, 4], "data_offsets": [0, 6]}}
    written = json.dumps(header).encode().ljust(80)
    path = tmp_path / "a.safetensors"
    path.write_bytes(struct.pack("<Q", len(written)) + written + bytes(6))
    assert_refused(lambda: read_checkpoint(path).tensor("weight"), DataError, path.name, "weight", "F6_E2M3")
