"""Which layers phi can modulate, and what is said of others."""

from collections.abc import Callable
from typing import Any

import pytest
import torchvision
from torch import Tensor, nn

from metricopt_ext.adapters.attach import attach_film
from metricopt_ext.errors import AdapterError


def test_patterns_are_joined_without_doubles(cnn: Callable[[], nn.Sequential]) -> None:
    assert attach_film(cnn(), ["1", "[14]", "6"], dim=2).layers == ["1", "4", "6"]


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ("layer4.*.bn3", r"'layer4\.\*\.bn3'.*\[.*layer4\.\d\.bn"),
        (["bn1", "layer9.0.bn1"], r"layers='layer9\.0\.bn1'"),
        ("relu", r"matches 'relu'.*ReLU, neither"),
        ("conv1", r"matches 'conv1'.*weight and a bias"),
    ],
)
def test_unusable_layers(layers: Any, message: str) -> None:
    model = torchvision.models.resnet18()
    with pytest.raises(AdapterError, match=message):
        attach_film(model, layers)
    assert not hasattr(model, "metricopt")
    assert all(p.requires_grad for p in model.parameters())


def test_attention_output_projection_is_no_layer() -> None:
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(4, 2)})
    with pytest.raises(AdapterError, match=r"'attention\.out_proj'.*projection"):
        attach_film(model, "attention.*")


class OnePlus(nn.LayerNorm):
    """A LayerNorm whose weight is around 0, as Nemotron's."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.layer_norm(x, self.normalized_shape, self.weight + 1, self.bias)


class SquaredScale(nn.RMSNorm):
    """A RMSNorm that phi can't be folded into."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.rms_norm(x, self.normalized_shape, self.weight**2 + 1)


@pytest.mark.parametrize(
    ("norm", "message"),
    [
        (SquaredScale(4), "output is no multiple of its weight"),
        (nn.RMSNorm(4, elementwise_affine=False), "without a weight per channel"),
        (nn.RMSNorm((2, 4)), "without a weight per channel"),
    ],
)
def test_scales_that_phi_can_not_be_folded_into_are_refused(norm: nn.Module, message: str) -> None:
    with pytest.raises(AdapterError, match=message):
        attach_film(nn.Sequential(norm), "0")


class Conditional(nn.GroupNorm):
    """A norm that needs more than its input."""

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x) * scale


@pytest.mark.parametrize("norm", [OnePlus(4), Conditional(2, 4)])
def test_norms_that_phi_can_not_be_folded_into_are_refused(norm: nn.Module) -> None:
    model = nn.Sequential(norm, nn.LayerNorm(4))
    with pytest.raises(AdapterError, match=rf"'0'.*{type(norm).__name__}, whose output is not affine"):
        attach_film(model, "0")
    assert attach_film(model, dim=2).layers == ["1"]


def test_norm_over_several_axes_has_no_channel() -> None:
    with pytest.raises(AdapterError, match="over 2 axes"):
        attach_film(nn.Sequential(nn.LayerNorm((3, 4))), "0")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Sequential(nn.Linear(2, 3), nn.ReLU()), r"no normalisation layer.*\['0'\]"),
        (nn.Sequential(nn.ReLU()), "none of its layers has both"),
    ],
)
def test_model_without_norms(model: nn.Module, message: str) -> None:
    with pytest.raises(AdapterError, match=message):
        attach_film(model)
