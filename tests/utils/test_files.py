"""A model's weights: kept as a state dict, and told from others by a fingerprint."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from metricopt_ext.utils.files import fingerprint, load_checkpoint, save_checkpoint

STATE: dict[str, Any] = {
    "weight": torch.arange(6.0).reshape(2, 3),
    "half": torch.ones(3, dtype=torch.bfloat16),
    "count": torch.tensor(4),
    "mask": torch.tensor([True, False]),
    "empty": torch.zeros(0),
}


def test_a_saved_checkpoint_is_loaded_as_it_was(tmp_path: Path) -> None:
    model, other = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    model(torch.randn(4, 3, generator=torch.Generator().manual_seed(0)))
    save_checkpoint(tmp_path / "new" / "model.safetensors", model.state_dict())
    load_checkpoint(other, tmp_path / "new" / "model.safetensors")
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in other.state_dict().items())


def test_the_same_state_has_the_same_fingerprint() -> None:
    assert len(fingerprint(STATE)) == 16
    strided = STATE["weight"].T.contiguous().T
    kept_otherwise = {**STATE, "weight": torch.nn.Parameter(strided), "_extra_state": "no tensor"}
    assert fingerprint(dict(reversed(kept_otherwise.items()))) == fingerprint(STATE)


@pytest.mark.parametrize(
    "change",
    [
        {"weight": torch.tensor([[0.0, 1, 2], [3, 4, 5.000001]])},
        {"weight": torch.arange(6.0).reshape(3, 2)},
        {"half": torch.ones(3, dtype=torch.float16)},
        {"count": torch.tensor(5)},
        {"mask": torch.tensor([False, True])},
        {"more": torch.zeros(0)},
    ],
)
def test_another_state_has_another_fingerprint(change: dict[str, Any]) -> None:
    assert fingerprint({**STATE, **change}) != fingerprint(STATE)
