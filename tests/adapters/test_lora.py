"""A factor for each layer that PEFT has adapted, against PEFT's own scales, merge and files."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers.refusals import assert_refused, having
from metricopt_ext.adapters.attach import attach_lora_scales, load_adapter
from metricopt_ext.errors import AdapterError

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.first, self.second = nn.Embedding(9, 4), nn.Linear(4, 5), nn.Linear(5, 5)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(self.words(x)).tanh()).tanh())


X = torch.arange(7)


def adapted(targets: Any = ("first", "second"), base: Any = None, **how: Any) -> Any:
    config = peft.LoraConfig(r=2, target_modules=list(targets), init_lora_weights=False, lora_dropout=0.3, **how)
    torch.manual_seed(1)
    return peft.get_peft_model(Net() if base is None else base, config)


def scaled_by_hand(model: Any, phi: Tensor) -> Tensor:
    """The output with PEFT's own scales."""
    copied = copy.deepcopy(model).eval()
    layers = [each for each in copied.modules() if isinstance(each, peft.tuners.lora.LoraLayer)]
    for layer, each in zip(layers, phi.tolist(), strict=True):
        layer.scale_layer(1 + each)
    return copied(X)


@pytest.mark.parametrize("bias", [False, True])
def test_factors_are_the_scales_of_peft_and_are_merged_by_it(bias: bool, tmp_path: Path) -> None:
    model, phi = adapted(lora_bias=bias), torch.tensor([0.5, -0.7])
    plain = copy.deepcopy(model).eval()
    expected = scaled_by_hand(model, phi)
    model.train()
    adapter = attach_lora_scales(model)
    assert adapter.dim == 2
    assert adapter.layers == [f"base_model.model.{name}.lora_B.default" for name in ("first", "second")]
    torch.testing.assert_close(model(X), plain(X))  # dropout is pinned, and phi is 0
    adapter.set_phi(phi)
    torch.testing.assert_close(model(X), expected)
    assert (expected - plain(X)).abs().max() > 1e-2
    adapter.save(tmp_path / "adapter.safetensors")
    loaded = load_adapter(copy.deepcopy(plain), tmp_path / "adapter.safetensors")
    torch.testing.assert_close(loaded.model(X), expected)
    assert loaded.signature == adapter.signature
    adapter.merge()
    torch.testing.assert_close(model.eval()(X), expected)
    model.save_pretrained(tmp_path / "peft")
    again = peft.PeftModel.from_pretrained(Net(), tmp_path / "peft").eval()
    torch.testing.assert_close(again(X), expected)
    torch.testing.assert_close(model.merge_and_unload()(X), expected)


def test_embeddings_are_left_with_a_warning() -> None:
    with pytest.warns(UserWarning, match=having("LoRA", "words")):
        assert attach_lora_scales(adapted(("words", "first"))).dim == 1
    assert_refused(lambda: attach_lora_scales(adapted(("words",))), AdapterError)


def test_what_a_factor_can_not_act_on_is_refused() -> None:
    assert_refused(lambda: attach_lora_scales(Net()), AdapterError, "Net", "PEFT", "LoRA")
    assert_refused(lambda: attach_lora_scales(adapted(use_dora=True)), AdapterError, "DoRA")
    merged = adapted()
    merged.merge_adapter()
    assert_refused(lambda: attach_lora_scales(merged), AdapterError, "model.unmerge_adapter()")
    disabled = adapted()
    disabled.base_model.disable_adapter_layers()
    assert_refused(lambda: attach_lora_scales(disabled), AdapterError, "model.enable_adapter_layers()")
    several = adapted()
    several.add_adapter("other", peft.LoraConfig(r=2, target_modules=["first"]))
    several.base_model.set_adapter(["default", "other"])
    assert_refused(lambda: attach_lora_scales(several), AdapterError, "default")
    several.set_adapter("other")
    assert attach_lora_scales(several).layers == ["base_model.model.first.lora_B.other"]
