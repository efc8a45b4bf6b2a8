"""What is said where PEFT's own function will leave out what phi was merged into."""

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from helpers.networks import LayerNormNet as Net
from metricopt_ext.adapters.attach import attach_film
from metricopt_ext.adapters.signature import Outputs


def warnings_of_merging(model: nn.Module, layers: Any = None, size: float = 1.0) -> list[str]:
    adapter = attach_film(model, layers, dim=2)
    adapter.set_phi(torch.full((2,), size))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        adapter.merge()
    return [str(each.message) for each in caught]


def test_ordinary_models_are_saved_as_a_whole() -> None:
    assert warnings_of_merging(Net()) == []
    frozen = Net().requires_grad_(False)
    assert warnings_of_merging(frozen) == []


def peft_model(**options: Any) -> Any:
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(Net(), peft.LoraConfig(r=2, target_modules=["body"], **options)).eval()


def test_peft_saves_no_norms(tmp_path: Any) -> None:
    model, x = peft_model(), torch.randn(5, 4)
    (message,) = warnings_of_merging(model)
    assert "what was tuned in ['base_model.model.norm.weight', 'base_model.model.norm.bias'] will be lost" in message
    assert "save model.merge_and_unload(), or name these layers in modules_to_save" in message
    tuned = model(x)
    model.save_pretrained(tmp_path)
    peft = pytest.importorskip("peft")
    assert not torch.allclose(peft.PeftModel.from_pretrained(Net(), tmp_path).eval()(x), tuned)
    torch.testing.assert_close(model.merge_and_unload()(x), tuned)


def test_peft_saves_modules_to_save(tmp_path: Any) -> None:
    model, x = peft_model(modules_to_save=["norm", "head"]), torch.randn(5, 4)
    head = "base_model.model.head.modules_to_save.default"
    adapter = attach_film(model, "*norm.modules_to_save.default", dim=2, outputs=Outputs(head))
    adapter.set_phi(torch.ones(5))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        adapter.merge()
    model.save_pretrained(tmp_path)
    peft = pytest.importorskip("peft")
    torch.testing.assert_close(peft.PeftModel.from_pretrained(Net(), tmp_path).eval()(x), model(x))


def test_the_part_within_a_peft_model() -> None:
    (message,) = warnings_of_merging(peft_model().base_model.model)
    assert "what was tuned in ['norm.weight', 'norm.bias'] will be lost" in message
