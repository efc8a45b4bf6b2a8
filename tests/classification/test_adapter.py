"""The adapters of configs, and those that can't be."""

from pathlib import Path

import pytest
import torch

from helpers.refusals import assert_refused
from metricopt_ext.adapters.signature import Outputs
from metricopt_ext.classification.adapter import attach
from metricopt_ext.classification.config import ClassificationConfig, ClassifierAdapterConfig
from metricopt_ext.classification.models import build_model
from metricopt_ext.classification.probe import output_scale
from metricopt_ext.errors import AdapterError, ConfigError
from metricopt_ext.utils.config import load_config

DIGITS = Path(__file__).parents[2] / "configs" / "classification" / "digits.yaml"


def config_of(*overrides: str, file: Path = DIGITS) -> ClassificationConfig:
    return load_config(ClassificationConfig, file, ["model.epochs=1", "adapter.dim=3", "device=cpu", *overrides])


@pytest.mark.parametrize(
    ("kind", "layers", "model", "expected"),
    [
        ("film", ["norm*"], "small_cnn", ["norm1", "norm2", "norm3"]),
        ("film", [], "small_cnn", ["norm1", "norm2", "norm3"]),
        ("film", ["norm2", "head"], "small_cnn", ["norm2", "head"]),
        ("input_bias", [], "tabular_mlp", ["body.0"]),
        ("input_bias", ["body.4"], "tabular_mlp", ["body.4"]),
    ],
)
def test_adapters(kind: str, layers: list[str], model: str, expected: list[str]) -> None:
    shape = torch.Size((1, 8, 8) if model == "small_cnn" else (5,))
    config = config_of()
    config.adapter = ClassifierAdapterConfig(layers, 7, kind)
    first, same, other = (attach(build_model(model, shape, 3), config, seed) for seed in (1, 1, 2))
    assert first.context.kind == kind
    assert (first.layers, first.dim) == (expected, 7)
    for a, b, c in zip(*([m for _, m in adapter.modulations()] for adapter in (first, same, other)), strict=True):
        for (_, x), (_, y), (_, z) in zip(a.named_buffers(), b.named_buffers(), c.named_buffers(), strict=True):
            assert torch.equal(x, y)
            assert not torch.equal(x, z)


@pytest.mark.parametrize(
    ("kind", "model", "expected", "dim"),
    [
        ("film", "small_cnn", ["norm1", "norm2", "norm3", "head"], 7 + 3),
        ("input_bias", "tabular_mlp", ["body.0", "head"], 7 + 1),
        ("outputs", "small_cnn", ["head"], 3),
        ("outputs", "tabular_mlp", ["head"], 1),
    ],
)
def test_adapters_of_the_logits(kind: str, model: str, expected: list[str], dim: int) -> None:
    torch.manual_seed(0)
    shape = torch.Size((1, 8, 8) if model == "small_cnn" else (5,))
    net = build_model(model, shape, 3 if model == "small_cnn" else 2).eval()
    config, x = config_of(), torch.rand(40, *shape)
    config.adapter = ClassifierAdapterConfig([], 7, kind, kind != "outputs")
    before = {key: value.clone() for key, value in net.state_dict().items()}
    with torch.no_grad():
        plain = net(x)
        adapter = attach(net, config, 1, x)
        assert torch.equal(net(x), plain)
    assert (adapter.layers, adapter.dim) == (expected, dim)
    outputs = adapter.outputs
    assert outputs is not None
    assert not outputs.temperature
    assert outputs.scale == (1.0 if kind == "outputs" else output_scale(adapter, x))
    assert all(torch.equal(value, before[key]) for key, value in adapter.base_state_dict().items())
    again = Outputs(scale=1.0, layer=expected[-1])
    assert attach(adapter.remove(), config, 1).outputs == again  # without inputs


def test_adapters_that_cannot_be() -> None:
    config = config_of()
    config.adapter = ClassifierAdapterConfig(["body.0", "body.4"], 7, "input_bias")
    assert_refused(lambda: attach(build_model("tabular_mlp", torch.Size((5,)), 3), config, 0), ConfigError)
    config.adapter = ClassifierAdapterConfig(["body.1"], 7, "input_bias")
    assert_refused(lambda: attach(build_model("tabular_mlp", torch.Size((5,)), 3), config, 0), AdapterError, "body.1")
