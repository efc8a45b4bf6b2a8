"""What checkpoints of several frameworks hold, under the model's names; what does not fit is refused by name."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from helpers.networks import BatchNormNet as Net
from helpers.refusals import assert_refused, assert_warned, having
from metricopt_ext.adapters.adapter import Adapter
from metricopt_ext.adapters.attach import attach_film, attach_lora_scales
from metricopt_ext.adapters.ingredients import Ingredients, files_of
from metricopt_ext.errors import AdapterError, DataError, FileFormatError


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
    assert equal(Ingredients(adapter_of().model).read(path), state_of(1))


def test_a_folder_without_weights_and_a_path_to_nothing_are_refused(tmp_path: Path) -> None:
    assert_refused(lambda: files_of(tmp_path), DataError, "model.safetensors")
    assert_refused(lambda: files_of(tmp_path / "gone.pth"), DataError, "gone.pth")


def test_an_index_names_no_file_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../b.safetensors"}}))
    assert_refused(lambda: files_of(tmp_path), FileFormatError)


def test_of_two_state_dicts_the_entry_is_read(tmp_path: Path) -> None:
    path = tmp_path / "two.pth"
    torch.save({"model": state_of(1), "model_ema": state_of(2)}, path)
    assert_refused(lambda: Ingredients(adapter_of().model).read(path), DataError, "two.pth", "2", "entry")
    assert equal(Ingredients(adapter_of().model, "model_ema").read(path), state_of(2))


MISFITS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "missing": (lambda s: s.pop("last.bias"), ("last.bias",)),
    "extra": (lambda s: s.update(head=torch.ones(1)), ("head",)),
    "shape": (lambda s: s.update({"last.bias": torch.ones(3)}), ("last.bias", "(3,)", "(2,)")),
    "type": (lambda s: s.update({"last.bias": torch.ones(2).half()}), ("last.bias", "torch.float16")),
    "integers": (lambda s: s.update({"last.bias": torch.ones(2).long()}), ("last.bias", "torch.int64")),
    "nan": (lambda s: s["last.bias"].fill_(torch.nan), ("last.bias", "NaN")),
}


@pytest.mark.parametrize("kind", ["plain", "safetensors"])
@pytest.mark.parametrize("misfit", list(MISFITS))
def test_what_does_not_fit_is_refused_with_file_and_key(misfit: str, kind: str, tmp_path: Path) -> None:
    state, (change, names) = state_of(1), MISFITS[misfit]
    change(state)
    path = written(kind, tmp_path, state)
    assert_refused(lambda: Ingredients(adapter_of().model).read(path), DataError, path.name, *names)


def test_what_counts_batches_may_be_missing(tmp_path: Path) -> None:
    state = state_of(1)
    del state["norm.num_batches_tracked"]
    assert equal(Ingredients(adapter_of().model).read(written("plain", tmp_path, state)), state)


def test_a_module_beside_the_model_is_left_out_with_a_warning(tmp_path: Path) -> None:
    path = tmp_path / "m.ckpt"
    torch.save({"state_dict": {**{f"model.{k}": v for k, v in state_of(1).items()}, "loss.w": torch.ones(1)}}, path)
    with pytest.warns(UserWarning, match=having("1", "loss.w")):
        assert equal(Ingredients(adapter_of().model).read(path), state_of(1))


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
    ingredients = Ingredients(attach_film(model, ["norm"], dim=2).model)
    once = {name: value.clone() for name, value in state.items() if name != "head.weight"}
    for name, content in {"once.pth": once, "twice.pth": state}.items():
        torch.save(content, tmp_path / name)
        start = ingredients.start(ingredients.read(tmp_path / name))
        with Adapter(ingredients.model).applied(start):
            assert torch.equal(model.head.weight, state["words.weight"])
    torch.save({**once, "head.weight": torch.ones(7, 4)}, tmp_path / "untied.pth")
    assert_refused(lambda: ingredients.read(tmp_path / "untied.pth"), DataError, "untied.pth")


# --- LoRA --------------------------------------------------------------------------------------------------------

peft = pytest.importorskip("peft")


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.first, self.norm, self.head = (
            nn.Embedding(9, 4),
            nn.Linear(4, 5),
            nn.LayerNorm(5),
            nn.Linear(5, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.first(self.words(x)).tanh()))


X = torch.arange(7)


def adapted(seed: int, targets: tuple[str, ...] = ("first", "head"), **how: Any) -> Any:
    config = peft.LoraConfig(r=2, lora_alpha=6, target_modules=list(targets), init_lora_weights=False, **how)
    model = Words()
    torch.manual_seed(seed)  # of LoRA alone
    return peft.get_peft_model(model, config).eval()


def of_changes(models: list[Any]) -> Any:
    """Return a plain model whose weights have the mean of what the models' LoRA adds, by PEFT's own merge."""
    states = [copy.deepcopy(each).merge_and_unload().state_dict() for each in models]
    model = Words().eval()
    model.load_state_dict({name: torch.stack([s[name].double() for s in states]).mean(0).float() for name in states[0]})
    return model


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize(
    "how", [{}, {"use_rslora": True}, {"targets": ("words", "first")}, {"modules_to_save": ["norm"]}]
)
def test_of_lora_the_changes_are_averaged_and_phi_still_acts(how: dict[str, Any], whole: bool, tmp_path: Path) -> None:
    own, others = adapted(1, **how), [adapted(seed, **how) for seed in (2, 3, 4)]
    if "modules_to_save" in how:
        for seed, each in enumerate(others):
            torch.manual_seed(seed)
            nn.init.normal_(each.base_model.model.norm.modules_to_save["default"].weight)
    adapter = attach_film(own, ["base_model.model.norm*"], dim=2)
    ingredients = Ingredients(adapter.model)
    states = []
    for number, each in enumerate(others):
        path = tmp_path / f"{number}"
        if whole:
            path = tmp_path / f"{number}.pth"
            torch.save(each.state_dict(), path)
        else:
            each.save_pretrained(path)
        states.append(ingredients.read(path))
    mean = {
        name: torch.stack([s[name].double() for s in states]).mean(0)
        for name in states[0]
        if states[0][name].is_floating_point()
    }
    start = ingredients.start(mean)
    assert not any("lora_" in name for name in start.parameters)
    with adapter.applied(start) as model, torch.no_grad():
        torch.testing.assert_close(model(X), of_changes(others)(X), atol=1e-5, rtol=1e-5)
        adapter.set_phi(torch.ones(2))
        assert not torch.allclose(model(X), of_changes(others)(X), atol=1e-3)


def test_the_mean_of_a_and_b_is_another_model(tmp_path: Path) -> None:
    others = [adapted(seed) for seed in (2, 3)]
    wrong = adapted(1)
    states = [each.state_dict() for each in others]
    wrong.load_state_dict({name: (states[0][name] + states[1][name]) / 2 for name in states[0]})
    assert (wrong(X) - of_changes(others)(X)).abs().max() > 0.05


def test_lora_scales_act_on_an_average(tmp_path: Path) -> None:
    own, other = adapted(1), adapted(2)
    torch.save(other.state_dict(), tmp_path / "other.pth")
    adapter = attach_lora_scales(own)
    ingredients = Ingredients(adapter.model)
    start = ingredients.start(ingredients.read(tmp_path / "other.pth"))
    with adapter.applied(start) as model:
        torch.testing.assert_close(model(X), other(X), atol=1e-5, rtol=1e-5)


def test_lora_of_another_scale_is_refused(tmp_path: Path) -> None:
    adapted(2).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps({**config, "lora_alpha": 12}))
    assert_refused(
        lambda: Ingredients(attach_lora_scales(adapted(1)).model).read(tmp_path),
        DataError,
        "adapter_config.json",
        "6",
    )


def test_dora_is_refused() -> None:
    assert_refused(
        lambda: Ingredients(attach_film(adapted(1, use_dora=True), ["base_model.model.norm"], dim=2).model),
        AdapterError,
    )


def test_a_start_that_peft_does_not_save_is_warned_of_at_the_merge(tmp_path: Path) -> None:
    torch.save(adapted(2).state_dict(), tmp_path / "other.pth")
    adapter = attach_film(adapted(1), ["base_model.model.norm"], dim=2)
    ingredients = Ingredients(adapter.model)
    adapter.apply(ingredients.start(ingredients.read(tmp_path / "other.pth")))
    name = "base_model.model.first.base_layer.weight"
    assert_warned(adapter.merge, name)


def test_lora_without_its_settings_is_read_by_its_matrices(tmp_path: Path) -> None:
    adapted(2).save_pretrained(tmp_path)
    read = [Ingredients(attach_lora_scales(adapted(1)).model).read(tmp_path)]
    (tmp_path / "adapter_config.json").unlink()
    read.append(Ingredients(attach_lora_scales(adapted(1)).model).read(tmp_path))
    assert equal(*read)


def test_two_loras_that_act_are_refused() -> None:
    model = adapted(1)
    model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["first"]))
    model.base_model.set_adapter(["default", "other"])
    assert_refused(lambda: Ingredients(model), AdapterError, "first", "default", "other")


def test_lora_of_an_attention_s_own_matrix_is_refused() -> None:
    """Its weight has another name, as one matrix does for queries, keys and values."""
    plain = nn.ModuleDict({"attention": nn.MultiheadAttention(4, 2)})
    model = peft.get_peft_model(plain, peft.LoraConfig(r=2, target_modules=["attention"]))
    assert_refused(lambda: Ingredients(model), AdapterError, "attention")


def test_a_file_that_holds_the_model_twice_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "two.pth"
    torch.save({f"{part}.{key}": each for part in ("one", "two") for key, each in state_of(1).items()}, path)
    assert_refused(lambda: Ingredients(adapter_of().model).read(path), DataError, "two.pth", "one")


@pytest.mark.parametrize("dtype", [torch.int8, torch.complex64, torch.float8_e4m3fn])
def test_weights_of_a_type_without_a_mean_must_be_the_model_s(dtype: torch.dtype) -> None:
    def quantized(seed: int) -> nn.Module:
        model = Net(seed)
        numbers = torch.randint(-9, 9, (3, 4), generator=torch.Generator().manual_seed(seed))
        model.register_buffer("quantized", numbers.float().to(dtype))
        return model

    ingredients, other = Ingredients(quantized(0)), quantized(1).state_dict()
    assert_refused(lambda: ingredients.take(other, "other"), DataError, "quantized", dtype)
    same = {**other, "quantized": quantized(0).state_dict()["quantized"]}
    assert "quantized" in ingredients.take(same, "other")


def test_counts_and_indices_may_differ() -> None:
    model = Net(0)
    model.register_buffer("seen", torch.arange(4))
    other = {**Net(1).state_dict(), "seen": torch.arange(4) + 7}
    assert torch.equal(Ingredients(model).take(other, "other")["seen"], torch.arange(4) + 7)


def test_layers_that_hide_their_weights_are_refused() -> None:
    """As dynamic quantization makes them, whose state dict has tuples."""

    class Packed(nn.Module):
        def get_extra_state(self) -> Any:
            return (torch.ones(3), None)

        def set_extra_state(self, state: Any) -> None: ...

    model = nn.Sequential(nn.Linear(2, 2), Packed())
    assert_refused(lambda: Ingredients(model), AdapterError, "_extra_state")
    plain = nn.Sequential(nn.Linear(2, 2))
    assert_refused(lambda: Ingredients(plain).take(model.state_dict(), "other"), DataError, "other", "1._extra_state")


def test_a_whole_file_s_content_is_taken_as_its_state_dict() -> None:
    ingredients = Ingredients(Net(0))
    content: Any = {"model": state_of(1), "epoch": 3}
    assert equal(ingredients.take(content, "other"), ingredients.take(state_of(1), "other"))
