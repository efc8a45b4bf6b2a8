"""The model at a trial, written as a plain one."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from helpers.refusals import assert_named, having
from metricopt_ext.adapters.attach import attach_film
from metricopt_ext.errors import AdapterError
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
        with pytest.raises(OSError, match=having(name)):
            trial.checkpoint(tmp_path / "folder" / name)


def searched(**options: Any) -> Search:
    torch.manual_seed(0)
    return Search(
        attach_film(nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4)), "1", dim=4), 20, maximize=True, **options
    )


def test_two_trials_at_once_are_refused(tmp_path: Path) -> None:
    search = searched()
    search.tell(search.ask()[0].id, 0.5)
    one, other = search.ask(2)
    with one.applied() as model:
        with one.applied() as again:
            assert again is model
        other.checkpoint(tmp_path / "other.pth")
        assert torch.equal(model.metricopt.phi, one.phi)  # type: ignore[union-attr, arg-type]
        with (
            pytest.raises(AdapterError) as caught,
            other.applied(),
        ):
            pass
        assert_named(caught, "2", "1")
    with other.applied() as model:
        assert torch.equal(model.metricopt.phi, other.phi)  # type: ignore[union-attr, arg-type]
