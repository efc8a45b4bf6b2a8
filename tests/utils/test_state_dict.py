"""The state dict in a checkpoint's file: which entry it is, and into which model it goes."""

import warnings
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel
from torch.optim.swa_utils import AveragedModel

from helpers.refusals import assert_refused
from metricopt_ext.errors import DataError
from metricopt_ext.utils.files import save_checkpoint
from metricopt_ext.utils.state_dict import load_checkpoint


def network() -> nn.Module:
    return nn.Sequential(nn.Conv1d(2, 3, 1), nn.BatchNorm1d(3), nn.Sequential(nn.Linear(4, 2)))


def drawn(model: nn.Module) -> nn.Module:
    for parameter in model.parameters():
        nn.init.normal_(parameter, generator=torch.Generator().manual_seed(parameter.numel()))
    return model


@pytest.mark.parametrize(
    "trained",
    [
        lambda: drawn(network()),
        lambda: DataParallel(drawn(network())),
        lambda: torch.compile(drawn(network())),
        lambda: DataParallel(torch.compile(drawn(network()))),
        lambda: AveragedModel(drawn(network())),
    ],
)
@pytest.mark.parametrize("entry", ["", "model", "state_dict", "state_dict_ema"])
def test_wrappers_and_entries_are_left_out(trained: Any, entry: str, tmp_path: Path) -> None:
    wrapped, model = trained(), network()
    state = wrapped.state_dict()
    arguments: dict[str, Any] = {"args": Namespace(lr=0.1), "epoch": 3, "optimizer": {"state": {0: {"step": 1.0}}}}
    torch.save({entry: state, **arguments} if entry else state, tmp_path / "a.pth")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_checkpoint(model, tmp_path / "a.pth")
    assert equal(model, drawn(network()))


def equal(a: nn.Module, b: nn.Module) -> bool:
    theirs = b.state_dict()
    return all(torch.equal(value, theirs[name]) for name, value in a.state_dict().items())


def test_one_of_several_state_dicts_is_named(tmp_path: Path) -> None:
    good, other = drawn(network()).state_dict(), network().state_dict()
    torch.save({"state_dict": other, "state_dict_ema": good}, tmp_path / "a.pth")
    model = network()
    assert_refused(lambda: load_checkpoint(model, tmp_path / "a.pth"), DataError, "2", "model.entry")
    assert_refused(lambda: load_checkpoint(model, tmp_path / "a.pth", entry="ema"), DataError, "model.entry='ema'")
    load_checkpoint(model, tmp_path / "a.pth", entry="state_dict_ema")
    assert equal(model, drawn(network()))
    save_checkpoint(tmp_path / "a.safetensors", good)
    assert_refused(
        lambda: load_checkpoint(model, tmp_path / "a.safetensors", entry="model", option="--entry"),
        DataError,
        "--entry",
        "model",
    )


def without(name: str) -> dict[str, Tensor]:
    return {key: each for key, each in network().state_dict().items() if key != name}


@pytest.mark.parametrize(
    ("state", "names"),
    [
        (without("0.weight"), ("Sequential", "0.weight")),
        ({**network().state_dict(), "fc.bias": torch.ones(2)}, ("fc.bias",)),
        ({**network().state_dict(), "0.bias": torch.ones(5)}, ("(5,)", "(3,)")),
        ({f"net.{key}": each for key, each in network().state_dict().items()}, ("net",)),
    ],
)
def test_weights_of_another_model_are_refused(state: dict[str, Tensor], names: tuple[str, ...], tmp_path: Path) -> None:
    torch.save(state, tmp_path / "a.pth")
    assert_refused(lambda: load_checkpoint(network(), tmp_path / "a.pth"), DataError, *names)


class Named(nn.Module):
    """A model whose parts are named."""

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)


def test_a_misfit_is_named_as_in_the_file_or_in_the_model_that_is_wrapped(tmp_path: Path) -> None:
    """An embedder calls the model that it wraps its trunk, as the model may call a part of its own."""

    def said(state: Mapping[str, Tensor]) -> str:
        torch.save(dict(state), tmp_path / "a.pth")
        with pytest.raises(DataError) as caught:
            load_checkpoint(Named(trunk=Named(trunk=nn.Linear(3, 4), head=nn.Linear(4, 2))), tmp_path / "a.pth")
        return str(caught.value)

    fits = Named(trunk=nn.Linear(3, 4), head=nn.Linear(4, 2)).state_dict()
    wide = Named(trunk=nn.Linear(3, 5), head=nn.Linear(4, 2)).state_dict()
    more = {**fits, "trunk.scale": torch.ones(1)}
    for state, names in (
        (wide, ("'trunk.weight'", (5, 3), (4, 3))),
        ({f"module.{name}": value for name, value in wide.items()}, ("'module.trunk.weight'",)),
        ({name: value for name, value in fits.items() if name != "trunk.bias"}, ("'trunk.bias'",)),
        (more, ("'trunk.scale'",)),
        (nn.Conv1d(2, 3, 1).state_dict(), ("'trunk.weight'", "'weight'")),
    ):
        message = said(state)
        assert "trunk.trunk" not in message
        assert all(str(name) in message for name in names), message
