"""The models of configs, their adapters, and the scale of offsets."""

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from helpers.refusals import assert_named, assert_refused
from metricopt_ext.adapters.attach import attach_input_bias
from metricopt_ext.adapters.signature import Outputs
from metricopt_ext.classification.adapter import attach
from metricopt_ext.classification.classifier import classifier
from metricopt_ext.classification.config import ClassificationConfig, ClassifierAdapterConfig
from metricopt_ext.classification.models import CifarResNet, build_model
from metricopt_ext.classification.probe import output_scale
from metricopt_ext.classification.splits import load_splits
from metricopt_ext.errors import ConfigError, DataError
from metricopt_ext.utils.config import load_config


def test_cifar_resnet_has_the_published_size_and_depth() -> None:
    sizes = {depth: sum(p.numel() for p in CifarResNet(depth).parameters()) for depth in (20, 32, 56)}
    assert {depth: round(size / 1e6, 2) for depth, size in sizes.items()} == {20: 0.27, 32: 0.46, 56: 0.85}
    layers = [m for m in CifarResNet(32).modules() if isinstance(m, (torch.nn.Conv2d, torch.nn.Linear))]
    assert len(layers) == 32


def test_cifar_block_shortcut_is_parameter_free_identity_padded_with_zeros() -> None:
    block = CifarResNet(8).stage2[0].eval()
    torch.nn.init.zeros_(block.conv2.weight)
    x = torch.rand(2, 16, 8, 8)
    h = block(x)
    assert torch.equal(h[:, :16], x[:, :, ::2, ::2])
    assert h[:, 16:].abs().max() == 0


def test_refuses_what_does_not_fit() -> None:
    assert_refused(lambda: build_model("tabular_mlp", torch.Size((1, 8, 8)), 2), ConfigError)
    assert_refused(lambda: build_model("small_cnn", torch.Size((7,)), 2), ConfigError)
    for name, shape in [("cifar_resnet20", (1, 8, 8)), ("cifar_resnet32", (3, 7, 8))]:
        with pytest.raises(ConfigError) as caught:
            build_model(name, torch.Size(shape), 10)
        assert_named(caught, "3", "8 x 8")
    assert_refused(lambda: build_model("resnet19", torch.Size((3, 8, 8)), 2), ConfigError, "resnet19")


DIGITS = Path(__file__).parents[2] / "configs" / "classification" / "digits.yaml"


def config_of(*overrides: str, file: Path = DIGITS) -> ClassificationConfig:
    return load_config(ClassificationConfig, file, ["model.epochs=1", "adapter.dim=3", "device=cpu", *overrides])


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


def several(classes: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.5), nn.Linear(4, classes))


def rounded(scale: float) -> float:
    return float(f"{scale:.2g}")


@pytest.mark.parametrize("outputs", [None, Outputs(scale=7.0, temperature=True)])
@pytest.mark.parametrize("classes", [2, 5])
def test_several_logits(classes: int, outputs: Outputs | None) -> None:
    """The logits are linear in phi: V (W x + b + C phi) + c, so their derivative is V C, whatever the input."""
    torch.manual_seed(0)
    model = several(classes).double()
    adapter = attach_input_bias(model, dim=3, outputs=outputs)
    effects = model[2].weight.detach() @ adapter.moves["0"].C  # classes x 3
    effects = effects - effects.mean(0)
    rms = math.sqrt(float(effects.square().mean(0).mean()))
    model.train()
    scale = output_scale(adapter, torch.randn(20, 2).double())
    assert scale == rounded(3 * rms * math.sqrt(classes / (1 - 1 / classes)))
    assert scale != rounded(3 * rms)
    assert model.training

    offset = torch.eye(classes)[0].double() * scale  # what the scale is made for
    effect = float((offset - offset.mean()).square().mean().sqrt())
    assert effect == pytest.approx(3 * rms, rel=0.05)


def test_a_phi_without_an_effect_gives_a_scale_of_one() -> None:
    model = several(3)
    nn.init.zeros_(model[2].weight)
    assert output_scale(attach_input_bias(model, dim=2), torch.randn(20, 2)) == 1.0


def test_training_depends_on_the_seed_alone_and_is_kept(tmp_path: Path) -> None:
    config = config_of("shift.kind=none")
    splits = load_splits(config, 0)
    torch.manual_seed(123)
    state = torch.get_rng_state()
    first = classifier(config, splits, 0, tmp_path / "a")
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(456)
    second = classifier(config, splits, 0, tmp_path / "b")
    other = classifier(config, splits, 1, tmp_path / "c")
    for key, value in first.state_dict().items():
        assert torch.equal(value, second.state_dict()[key])
    assert not torch.equal(first.conv1.weight, other.conv1.weight)
    assert not first.training

    torch.save(first.state_dict(), tmp_path / "weights.pt")
    config.model.weights = str(tmp_path / "weights.pt")
    given = classifier(config, splits, 9, tmp_path / "d")
    for key, value in first.state_dict().items():
        assert torch.equal(value, given.state_dict()[key])
    assert (tmp_path / "d" / "model.safetensors").exists()
    torch.save(nn.Linear(2, 2).state_dict(), tmp_path / "weights.pt")
    resumed = classifier(config, splits, 9, tmp_path / "d")  # the run has a copy of what its file was
    assert torch.equal(resumed.conv1.weight, first.conv1.weight)
    with pytest.raises(DataError) as caught:
        classifier(config, splits, 0, tmp_path / "e")
    assert_named(caught, "weights.pt")
    assert len(str(caught.value).splitlines()) == 1
