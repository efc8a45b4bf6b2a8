"""Which layers phi can modulate, and what is said of others."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor, nn

from helpers.refusals import assert_refused
from metricopt_ext.adapters.adapter import Adapter
from metricopt_ext.adapters.attach import attach_film, attach_input_bias, attach_outputs, load_adapter
from metricopt_ext.adapters.signature import Outputs
from metricopt_ext.errors import AdapterError


def test_patterns_are_joined_without_doubles(cnn: Callable[[], nn.Sequential]) -> None:
    assert attach_film(cnn(), ["1", "[14]", "6"], dim=2).layers == ["1", "4", "6"]


@pytest.mark.parametrize(
    ("layers", "names"),
    [
        ("layer4.*.bn3", ("layer4.*.bn3",)),
        (["bn1", "layer9.0.bn1"], ("layers='layer9.0.bn1'",)),
        ("relu", ("relu", "ReLU")),
        ("conv1", ("conv1",)),
    ],
)
def test_unusable_layers(layers: Any, names: tuple[str, ...]) -> None:
    model = torchvision.models.resnet18()
    assert_refused(lambda: attach_film(model, layers), AdapterError, *names)
    assert not hasattr(model, "metricopt")
    assert all(p.requires_grad for p in model.parameters())


def test_attention_output_projection_is_no_layer() -> None:
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(4, 2)})
    assert_refused(lambda: attach_film(model, "attention.*"), AdapterError, "attention.out_proj")


class OnePlus(nn.LayerNorm):
    """A LayerNorm whose weight is around 0, as Nemotron's."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.layer_norm(x, self.normalized_shape, self.weight + 1, self.bias)


class SquaredScale(nn.RMSNorm):
    """A RMSNorm that phi can't be folded into."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.rms_norm(x, self.normalized_shape, self.weight**2 + 1)


@pytest.mark.parametrize(
    ("norm", "names"),
    [
        (SquaredScale(4), ("output",)),
        (nn.RMSNorm(4, elementwise_affine=False), ()),
        (nn.RMSNorm((2, 4)), ()),
    ],
)
def test_scales_that_phi_can_not_be_folded_into_are_refused(norm: nn.Module, names: tuple[str, ...]) -> None:
    assert_refused(lambda: attach_film(nn.Sequential(norm), "0"), AdapterError, *names)


class Conditional(nn.GroupNorm):
    """A norm that needs more than its input."""

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x) * scale


class Rectified(nn.BatchNorm2d):
    """A norm with an activation of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu()


class Scaled(nn.Linear):
    """A linear layer that multiplies what it adds its bias to."""

    def forward(self, x: Tensor) -> Tensor:
        return 10 * super().forward(x)


class Cosine(nn.Linear):
    """A linear layer of directions, with a bias."""

    def forward(self, x: Tensor) -> Tensor:
        normalize = nn.functional.normalize
        return nn.functional.linear(normalize(x), normalize(self.weight), self.bias)


@pytest.mark.parametrize(
    ("attach", "layer", "names"),
    [
        (lambda model: attach_film(model, "0"), Cosine(4, 4), ("'0'", "Cosine")),
        (attach_input_bias, Scaled(4, 4), ("'0'", "Scaled")),
        (attach_outputs, Scaled(4, 4), ("outputs", "'0'", "Scaled")),
        (
            lambda model: attach_outputs(model, Outputs(temperature=True)),
            Cosine(4, 4),
            ("outputs", "'0'", "Cosine"),
        ),
    ],
)
def test_linear_layers_that_phi_can_not_be_folded_into_are_refused(
    attach: Callable[[nn.Module], Adapter], layer: nn.Module, names: tuple[str, ...]
) -> None:
    assert_refused(lambda: attach(nn.Sequential(layer)), AdapterError, *names)


@pytest.mark.parametrize("attach", [lambda model: attach_input_bias(model, dim=3), attach_outputs])
def test_what_acts_on_a_bias_alone_is_folded_into_it(attach: Callable[[nn.Module], Adapter], tmp_path: Path) -> None:
    model, x = nn.Sequential(Cosine(4, 3)).double(), torch.arange(8.0, dtype=torch.float64).view(2, 4)
    adapter = attach(model)
    adapter.set_phi(torch.tensor([1.0, -2.0, 0.5]))
    expected = model(x).detach()
    adapter.save(tmp_path / "a.safetensors")
    adapter.remove()
    again = load_adapter(model, tmp_path / "a.safetensors")
    torch.testing.assert_close(again.merge()(x), expected)


@pytest.mark.parametrize("norm", [OnePlus(4), Conditional(2, 4)])
def test_norms_that_phi_can_not_be_folded_into_are_refused(norm: nn.Module) -> None:
    model = nn.Sequential(norm, nn.LayerNorm(4))
    assert_refused(lambda: attach_film(model, "0"), AdapterError, "'0'", type(norm).__name__)
    assert attach_film(model, dim=2).layers == ["1"]


def test_norm_over_several_axes_has_no_channel() -> None:
    assert_refused(lambda: attach_film(nn.Sequential(nn.LayerNorm((3, 4))), "0"), AdapterError, "2")


@pytest.mark.parametrize(
    ("model", "names"),
    [
        (nn.Sequential(nn.Linear(2, 3), nn.ReLU()), ("0",)),
        (nn.Sequential(nn.ReLU()), ("layers",)),
        (nn.Sequential(nn.Conv2d(1, 4, 3), Rectified(4)), ("'1'", "Rectified", "0")),
    ],
)
def test_model_without_norms(model: nn.Module, names: tuple[str, ...]) -> None:
    assert_refused(lambda: attach_film(model), AdapterError, *names)
