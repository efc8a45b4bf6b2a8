"""What checkpoints of several frameworks hold, under the model's names; what does not fit is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from helpers.networks import BatchNormNet as Net
from helpers.refusals import assert_refused, having
from metricopt_ext.adapters.adapter import Adapter
from metricopt_ext.adapters.attach import attach_film
from metricopt_ext.adapters.checkpoints import CheckpointReader, files_of
from metricopt_ext.adapters.start import Start
from metricopt_ext.errors import AdapterError, DataError


def adapter_of(seed: int = 0) -> Adapter:
    return attach_film(Net(seed).eval(), ["norm"], dim=3)


def state_of(seed: int) -> dict[str, Tensor]:
    return Net(seed).state_dict()


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(value, b[name]) for name, value in a.items())


# --- Files -------------------------------------------------------------------------------------------------------


def written(kind: str, folder: Path, state: dict[str, Tensor]) -> Path:
    """Write a state dict as one of the kinds of checkpoint that there are."""
    if kind == "folder":
        save_file(state, folder / "model.safetensors")
        return folder
    if kind == "shards":
        names = {
            "a.safetensors": [n for n in state if "first" in n],
            "b.safetensors": [n for n in state if "first" not in n],
        }
        for file, keys in names.items():
            save_file({key: state[key] for key in keys}, folder / file)
        weight_map = {key: file for file, keys in names.items() for key in keys}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
        return folder
    path = folder / {"safetensors": "m.safetensors", "lightning": "m.ckpt"}.get(kind, "model_0000099.pth")
    content: Any = {
        "plain": state,
        "detectron2": {"model": state, "iteration": 99, "optimizer": {"state": {}}},
        "lightning": {"state_dict": {f"model.{key}": each for key, each in state.items()}, "epoch": 3},
        "ema": {"n_averaged": torch.tensor(3), **{f"module.{key}": each for key, each in state.items()}},
    }.get(kind)
    if kind == "safetensors":
        save_file(state, path)
    else:
        torch.save(content, path)
    return path


@pytest.mark.parametrize("kind", ["plain", "safetensors", "detectron2", "lightning", "ema", "folder", "shards"])
def test_checkpoints_of_all_kinds_are_the_same_tensors(kind: str, tmp_path: Path) -> None:
    path = written(kind, tmp_path, state_of(1))
    assert equal(CheckpointReader(adapter_of().model).read(path), state_of(1))


def test_a_folder_without_weights_and_a_path_to_nothing_are_refused(tmp_path: Path) -> None:
    assert_refused(lambda: files_of(tmp_path), DataError, "model.safetensors")
    assert_refused(lambda: files_of(tmp_path / "gone.pth"), DataError, "gone.pth")


MISFITS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "missing": (lambda s: s.pop("last.bias"), ("last.bias",)),
    "extra": (lambda s: s.update(head=torch.ones(1)), ("head",)),
    "shape": (lambda s: s.update({"last.bias": torch.ones(3)}), ("last.bias", "(3,)", "(2,)")),
    "integers": (lambda s: s.update({"last.bias": torch.ones(2).long()}), ("last.bias", "torch.int64")),
    "nan": (lambda s: s["last.bias"].fill_(torch.nan), ("last.bias", "NaN")),
}


@pytest.mark.parametrize("misfit", list(MISFITS))
def test_what_does_not_fit_is_refused_with_file_and_key(misfit: str, tmp_path: Path) -> None:
    state, (change, names) = state_of(1), MISFITS[misfit]
    change(state)
    path = written("plain", tmp_path, state)
    assert_refused(lambda: CheckpointReader(adapter_of().model).read(path), DataError, path.name, *names)


def test_what_counts_batches_may_be_missing(tmp_path: Path) -> None:
    state = state_of(1)
    del state["norm.num_batches_tracked"]
    assert equal(CheckpointReader(adapter_of().model).read(written("plain", tmp_path, state)), state)


def test_a_module_beside_the_model_is_left_out_with_a_warning(tmp_path: Path) -> None:
    path = tmp_path / "m.ckpt"
    torch.save({"state_dict": {**{f"model.{k}": v for k, v in state_of(1).items()}, "loss.w": torch.ones(1)}}, path)
    with pytest.warns(UserWarning, match=having("1", "loss.w")):
        assert equal(CheckpointReader(adapter_of().model).read(path), state_of(1))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm, self.head = nn.Embedding(7, 4), nn.LayerNorm(4), nn.Linear(4, 7, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.words(x)))


def test_tied_weights_may_be_there_once(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, state = Tied(), Tied().state_dict()
    adapter = attach_film(model, ["norm"], dim=2)
    reader = CheckpointReader(adapter.model)
    once = {name: value.clone() for name, value in state.items() if name != "head.weight"}
    for name, content in {"once.pth": once, "twice.pth": state}.items():
        torch.save(content, tmp_path / name)
        with adapter.applied(Start(torch.zeros(2), reader.replaced(reader.read(tmp_path / name)))):
            assert torch.equal(model.head.weight, state["words.weight"])
    torch.save({**once, "head.weight": torch.ones(7, 4)}, tmp_path / "untied.pth")
    assert_refused(lambda: reader.read(tmp_path / "untied.pth"), DataError, "untied.pth")


def test_lora_is_to_be_merged_first() -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(Net(), peft.LoraConfig(r=2, target_modules=["first"]))
    assert_refused(lambda: CheckpointReader(model), AdapterError, "first", "merge_and_unload")


def test_weights_of_a_type_without_a_mean_must_be_the_model_s() -> None:
    def quantized(seed: int) -> nn.Module:
        model = Net(seed)
        numbers = torch.randint(-9, 9, (3, 4), generator=torch.Generator().manual_seed(seed))
        model.register_buffer("quantized", numbers.to(torch.int8))
        return model

    reader, other = CheckpointReader(quantized(0)), quantized(1).state_dict()
    assert_refused(lambda: reader.read(other, "other"), DataError, "quantized", "int8")
    same = {**other, "quantized": quantized(0).state_dict()["quantized"]}
    assert "quantized" in reader.read(same, "other")


class Quantized(nn.Module):
    """Packs its tensors in the state dict, as torch's quantized layers do."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}packed"] = (torch.ones(2, 2), None)


def test_what_is_quantized_is_refused() -> None:
    model = nn.Sequential(Quantized())
    assert_refused(lambda: CheckpointReader(model), AdapterError, "0.packed")
    reader = CheckpointReader(nn.Sequential(nn.Linear(2, 2)))
    assert_refused(lambda: reader.read(model.state_dict(), "other"), DataError, "other", "0.packed", "quantized")
