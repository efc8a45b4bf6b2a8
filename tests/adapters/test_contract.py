"""Adapters of each kind, held to the contract of all."""

from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import metricopt_ext as mo
from helpers.architectures import cnn, convnext, headless, mlp, stochastic, tied, vit, without_shifts
from helpers.tensors import rand
from metricopt_ext.adapters.attach import attach_input_bias, attach_lora_scales
from testers.adapter import AdapterTester


class TestFilm(AdapterTester):
    models: ClassVar = {"cnn": cnn, "stochastic": stochastic, "convnext": convnext, "vit": vit}
    one_by_one: ClassVar = ("stochastic",)  # an LSTM

    def attach(self, model: nn.Module) -> mo.Adapter:
        return mo.attach_film(model, dim=3)

    def attach_other(self, model: nn.Module) -> mo.Adapter:
        return mo.attach_film(model, "1", dim=3)


class TestFilmOfLayersWithWeights(AdapterTester):
    models: ClassVar = {"cnn": cnn}

    def attach(self, model: nn.Module) -> mo.Adapter:
        return mo.attach_film(model, ["0", "4", "6"], dim=3)

    def attach_other(self, model: nn.Module) -> mo.Adapter:
        return mo.attach_film(model, ["0", "4"], dim=3)


class TestFilmOfScales(AdapterTester):
    models: ClassVar = {"as Llama's": without_shifts, "as Gemma's": lambda: without_shifts(1.0)}

    def attach(self, model: nn.Module) -> mo.Adapter:
        return mo.attach_film(model, dim=3)


class TestFilmAndOutputs(AdapterTester):
    models: ClassVar = {"vit": vit}

    def attach(self, model: nn.Module) -> mo.Adapter:
        return mo.attach_film(model, dim=3, outputs=mo.Outputs(temperature=True))


class TestInputBias(AdapterTester):
    models: ClassVar = {"cnn": cnn, "tied": tied}

    def attach(self, model: nn.Module) -> mo.Adapter:
        return attach_input_bias(model, dim=3)


class TestOutputs(AdapterTester):
    models: ClassVar = {"cnn": cnn, "tied": tied}

    def attach(self, model: nn.Module) -> mo.Adapter:
        return mo.attach_outputs(model)


class TestOutputsAndTemperatureOfAHeadWithoutABias(AdapterTester):
    models: ClassVar = {"mlp": headless}
    adds: ClassVar = ("2.bias",)

    def attach(self, model: nn.Module) -> mo.Adapter:
        return mo.attach_outputs(model, mo.Outputs(scale=2.0, temperature=True))


def finetunes(model: nn.Module) -> list[dict[str, Tensor]]:
    """Two checkpoints, of weights near the model's."""
    state = model.state_dict()
    floats = {key: each for key, each in state.items() if each.is_floating_point()}
    moved = [
        {key: each * (1 + 0.1 * rand(*each.shape, seed=seed).to(each)) for key, each in floats.items()}
        for seed in (1, 2)
    ]
    return [{**state, **each} for each in moved]


class TestMixture(AdapterTester):
    models: ClassVar = {"cnn": cnn, "tied": tied, "stochastic": stochastic}
    one_by_one: ClassVar = ("stochastic",)  # an LSTM, whose own weights are mixed

    def attach(self, model: nn.Module) -> mo.Adapter:
        return mo.attach_mixture(model, finetunes(model))

    def attach_other(self, model: nn.Module) -> mo.Adapter:
        return mo.attach_mixture(model, finetunes(model), film=2)


class TestMixtureAndFilmAndOutputs(AdapterTester):
    models: ClassVar = {"cnn": cnn}

    def attach(self, model: nn.Module) -> mo.Adapter:
        return mo.attach_mixture(model, finetunes(model), film=2, layers="1", outputs=mo.Outputs())


def by_lora() -> tuple[nn.Module, Any]:
    """A network that PEFT has adapted."""
    peft = pytest.importorskip("peft")
    model, inputs = mlp()
    config = peft.LoraConfig(r=2, target_modules=["0", "2"], init_lora_weights=False, lora_dropout=0.3, lora_bias=True)
    torch.manual_seed(1)
    return peft.get_peft_model(model, config), inputs


class TestLoraScales(AdapterTester):
    models: ClassVar = {"mlp": by_lora}

    def attach(self, model: nn.Module) -> mo.Adapter:
        return attach_lora_scales(model)

    def attach_other(self, model: nn.Module) -> mo.Adapter:
        return mo.attach_outputs(model, mo.Outputs("base_model.model.0.base_layer"))
