"""The model to be finetuned: drawn by the seed, trained, given or taken from the folder."""

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from helpers.refusals import assert_refused
from metricopt_ext.data.pretrained import pretrained
from metricopt_ext.errors import DataError


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 2))


def double(model: nn.Module, file: Path | None = None) -> None:
    """Stand for training: easy to recognise, and it draws from the global stream as dropout does."""
    torch.rand(1)
    for parameter in model.parameters():
        parameter.data *= 2


def make(
    folder: Path, train: Any = double, *, check: Any = lambda model: None, weights: str = "", seed: int = 3
) -> dict[str, torch.Tensor]:
    device = torch.device("cpu")
    model = pretrained(build, train, check=check, weights=weights, folder=folder, seed=seed, device=device)
    assert not model.training
    return model.state_dict()


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def never(model: nn.Module, file: Path) -> None:
    pytest.fail("trained")


def test_weights_depend_on_the_seed_alone(tmp_path: Path) -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = make(tmp_path / "a")
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert same(make(tmp_path / "b"), first)
    assert not same(make(tmp_path / "c", seed=4), first)
    untrained = make(tmp_path / "d", lambda *_: None)
    assert all(torch.equal(first[key], 2 * untrained[key]) for key in first)


def test_a_folder_that_has_the_model_is_asked_first(tmp_path: Path) -> None:
    first = make(tmp_path / "run")
    assert same(make(tmp_path / "run", never, seed=99), first)
    torch.save(build().state_dict(), tmp_path / "other.pt")
    assert same(make(tmp_path / "run", never, weights=str(tmp_path / "other.pt")), first)


def test_given_weights_are_loaded_and_kept(tmp_path: Path) -> None:
    given = build().state_dict()
    torch.save(given, tmp_path / "given.pt")
    assert same(make(tmp_path / "run", never, weights=str(tmp_path / "given.pt")), given)
    (tmp_path / "given.pt").unlink()
    assert same(make(tmp_path / "run", never, weights=str(tmp_path / "given.pt")), given)  # of the run's own copy


def test_the_named_entry_of_a_checkpoint_is_loaded(tmp_path: Path) -> None:
    other, given = build().state_dict(), build().state_dict()
    torch.save({"state_dict": other, "state_dict_ema": given, "args": Namespace(lr=1)}, tmp_path / "last.pth")
    settings: dict[str, Any] = {"weights": str(tmp_path / "last.pth"), "folder": tmp_path / "run", "seed": 0}
    settings |= {"check": lambda model: None, "device": torch.device("cpu")}
    assert_refused(lambda: pretrained(build, never, **settings), DataError, "last.pth", "2", "model.entry")
    model = pretrained(build, never, entry="state_dict_ema", **settings)
    assert same(model.state_dict(), given)


def test_nothing_is_kept_of_a_training_that_failed(tmp_path: Path) -> None:
    def fail(model: nn.Module, file: Path) -> None:
        raise FloatingPointError("the loss is nan")

    with pytest.raises(FloatingPointError):
        make(tmp_path / "run", fail)
    assert not (tmp_path / "run" / "model.safetensors").exists()


def test_the_file_of_a_killed_training_is_there_until_the_model_is(tmp_path: Path) -> None:
    def killed(model: nn.Module, file: Path) -> None:
        file.parent.mkdir()
        file.write_text("half of it")
        raise KeyboardInterrupt

    def resumed(model: nn.Module, file: Path) -> None:
        assert file.read_text() == "half of it"

    with pytest.raises(KeyboardInterrupt):
        make(tmp_path / "run", killed)
    make(tmp_path / "run", resumed)
    assert [file.name for file in (tmp_path / "run").iterdir()] == ["model.safetensors"]
