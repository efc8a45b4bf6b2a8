"""Which layers phi can modulate and be folded into, and what is said of others."""

import copy
from collections.abc import Callable

import pytest
import torch
import torchvision
from torch import Tensor, nn

from helpers.architectures import OwnRMSNorm
from helpers.refusals import assert_refused
from metricopt_ext.adapters.adapter import Adapter
from metricopt_ext.adapters.affine import is_affine
from metricopt_ext.adapters.attach import attach_film, attach_input_bias, attach_outputs
from metricopt_ext.errors import AdapterError


class ChannelsFirst(nn.LayerNorm):
    """A LayerNorm over the channels of ``B x C x H x W``."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


class OnePlus(nn.LayerNorm):
    """A LayerNorm whose weight is around 0, as Nemotron's."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.layer_norm(x, self.normalized_shape, self.weight + 1, self.bias)


class Gated(nn.LayerNorm):
    """A LayerNorm that needs more than its input."""

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x) * gate


class Rectified(nn.BatchNorm2d):
    """A BatchNorm with an activation of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu()


class Renamed(nn.BatchNorm3d):
    """A BatchNorm that computes as torch's."""


class Standardised(nn.Conv2d):
    """A convolution that normalises its weight."""

    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(x, weight / weight.std(), bias)


class Padded(nn.Conv1d):
    """A convolution that pads its input by itself."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(nn.functional.pad(x, (1, 0)))


class Cosine(nn.Linear):
    """A linear layer of directions."""

    def forward(self, x: Tensor) -> Tensor:
        normalize = nn.functional.normalize
        return nn.functional.linear(normalize(x), normalize(self.weight), self.bias)


class Scaled(nn.Linear):
    """A linear layer that multiplies what it adds its bias to."""

    def forward(self, x: Tensor) -> Tensor:
        return 10 * super().forward(x)


def with_another_forward() -> nn.Module:
    layer = nn.Linear(3, 2)
    own = layer.forward
    layer.forward = lambda x: own(x).tanh()  # type: ignore[method-assign]
    return layer


@pytest.mark.parametrize(
    ("layer", "foldable", "in_bias"),
    [
        (nn.BatchNorm2d(4), True, True),
        (nn.LayerNorm(4), True, True),
        (ChannelsFirst(4), True, True),
        (Renamed(4), True, True),
        (torchvision.ops.FrozenBatchNorm2d(4), True, True),
        (Padded(2, 4, 3, padding=1), True, True),
        (OnePlus(4), False, True),
        (Gated(4), False, False),
        (Rectified(4), False, False),
        (Standardised(3, 4, 5, dilation=2), False, True),
        (Cosine(3, 4), False, True),
        (Scaled(3, 4), False, False),
        (with_another_forward(), False, False),
    ],
    ids=lambda each: type(each).__name__,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_own_code_is_asked_whether_phi_can_be_folded_in(
    layer: nn.Module, foldable: bool, in_bias: bool, dtype: torch.dtype
) -> None:
    layer = layer if "forward" in vars(layer) else copy.deepcopy(layer).to(dtype)
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    assert (is_affine(layer), is_affine(layer, in_weight=False)) == (foldable, in_bias)
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())
    assert not layer._forward_hooks


# --- Norms of a model's own code -----------------------------------------------------------------------------------


class SquaredRMSNorm(OwnRMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return self.weight**2 * x


class CurvedLayerNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.layer_norm(x, x.shape[-1:], self.weight, self.bias).tanh()


def test_norms_without_a_bias_are_left_where_others_have_one() -> None:
    model = nn.Sequential(OwnRMSNorm(4), nn.LayerNorm(4), nn.RMSNorm(4))
    assert attach_film(model, dim=2).layers == ["1"]
    assert attach_film(nn.Sequential(OwnRMSNorm(4), nn.RMSNorm(4)), dim=2).layers == ["0", "1"]


@pytest.mark.parametrize(
    "norm",
    [OnePlus(4), Gated(4), SquaredRMSNorm(4), CurvedLayerNorm(), nn.RMSNorm(4, elementwise_affine=False)],
    ids=lambda each: type(each).__name__,
)
def test_norms_that_phi_can_not_be_folded_into_are_refused_if_named_and_left_out_if_not(norm: nn.Module) -> None:
    model = nn.Sequential(norm, nn.LayerNorm(4))
    assert_refused(lambda: attach_film(model, "0"), AdapterError, "'0'")
    assert attach_film(model, dim=2).layers == ["1"]


# --- What is chosen ------------------------------------------------------------------------------------------------


def test_patterns_are_joined_without_doubles(cnn: Callable[[], nn.Sequential]) -> None:
    assert attach_film(cnn(), ["1", "[14]", "6"], dim=2).layers == ["1", "4", "6"]


@pytest.mark.parametrize(
    ("make", "attach", "names"),
    [
        (torchvision.models.resnet18, lambda model: attach_film(model, ["bn1", "layer9.0.bn1"]), ("layer9.0.bn1",)),
        (torchvision.models.resnet18, lambda model: attach_film(model, "relu"), ("relu", "ReLU")),
        (torchvision.models.resnet18, lambda model: attach_film(model, "conv1"), ("conv1",)),
        (lambda: nn.Sequential(nn.LayerNorm((3, 4))), lambda model: attach_film(model, "0"), ("2",)),
        (lambda: nn.Sequential(nn.Conv2d(1, 4, 3), Rectified(4)), attach_film, ("'1'", "Rectified", "0")),
        (lambda: nn.Sequential(Cosine(4, 4)), lambda model: attach_film(model, "0"), ("'0'", "Cosine")),
        (lambda: nn.Sequential(Scaled(4, 4)), attach_input_bias, ("'0'", "Scaled")),
        (lambda: nn.Sequential(Scaled(4, 4)), attach_outputs, ("outputs", "'0'", "Scaled")),
    ],
)
def test_unusable_layers(
    make: Callable[[], nn.Module], attach: Callable[[nn.Module], Adapter], names: tuple[str, ...]
) -> None:
    model = make()
    assert_refused(lambda: attach(model), AdapterError, *names)
    assert not hasattr(model, "metricopt")
    assert all(each.requires_grad for each in model.parameters())


@pytest.mark.parametrize("attach", [lambda model: attach_input_bias(model, dim=3), attach_outputs])
def test_what_acts_on_a_bias_alone_is_folded_into_it(attach: Callable[[nn.Module], Adapter]) -> None:
    model, x = nn.Sequential(Cosine(4, 3)).double(), torch.arange(8.0, dtype=torch.float64).view(2, 4)
    adapter = attach(model)
    adapter.set_phi(torch.tensor([1.0, -2.0, 0.5]))
    expected = model(x).detach()
    torch.testing.assert_close(adapter.merge()(x), expected)
