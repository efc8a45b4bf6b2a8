"""The model at a trial, written as a plain one."""

from pathlib import Path

import pytest
import torch
from torch import nn

from metricopt_ext.adapters.attach import attach_film
from metricopt_ext.methods.search import Search


def test_checkpoints_hold_the_merged_model(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.LazyLinear(2))
    x = torch.randn(2, 3, 5, 5)
    model.eval()(x)
    keys = list(model.state_dict())
    search = Search(attach_film(model, "1", dim=4), 20, maximize=True)
    search.tell(search.ask()[0].id, 0.5)
    trial = search.ask(3)[2]
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with trial.applied() as applied, torch.no_grad():
        expected = applied(x)
    for name in ("trial.safetensors", "trial.pth"):
        trial.checkpoint(tmp_path / name)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    state = torch.load(tmp_path / "trial.pth", weights_only=True)
    assert list(state) == keys
    plain = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(36, 2)).eval()
    plain.load_state_dict(state)
    assert torch.allclose(plain(x), expected, atol=1e-5)
    import safetensors.torch

    stored = safetensors.torch.load_file(tmp_path / "trial.safetensors")
    assert all(torch.equal(value, state[key]) for key, value in stored.items())
    for name in ("trial.safetensors", "trial.pth"):
        (tmp_path / "folder" / name).mkdir(parents=True)
        with pytest.raises(OSError, match=name):
            trial.checkpoint(tmp_path / "folder" / name)
