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


class Cosine(nn.Linear):
    """A linear layer of directions."""

    def forward(self, x: Tensor) -> Tensor:
        normalize = nn.functional.normalize
        return nn.functional.linear(normalize(x), normalize(self.weight), self.bias)


# --- Norms of a model's own code -----------------------------------------------------------------------------------


class Centred(OwnRMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return (self.weight + 0.5) * x


@pytest.mark.parametrize(
    ("norm", "shape"), [(OnePlus(4), (5, 4)), (OwnRMSNorm(4, 1.0), (5, 4)), (ChannelsFirst(4), (5, 4, 2, 2))]
)
def test_norms_that_add_to_their_weight_are_scaled_with_it(norm: nn.Module, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(copy.deepcopy(norm).double())
    x, plain = torch.randn(*shape).double(), model(torch.zeros(shape).double())
    before = model(x) - plain
    adapter = attach_film(model, "0", dim=2)
    adapter.set_phi(torch.tensor([0.5, -0.3]))
    scale = 1 + adapter.moves["0"].get_buffer("A") @ adapter.phi
    moved = model(x) - model(torch.zeros(shape).double())
    torch.testing.assert_close(moved, before * (scale if len(shape) == 2 else scale[:, None, None]))


def test_norms_without_a_bias_are_left_where_others_have_one() -> None:
    model = nn.Sequential(OwnRMSNorm(4), nn.LayerNorm(4), nn.RMSNorm(4))
    assert attach_film(model, dim=2).layers == ["1"]
    assert attach_film(nn.Sequential(OwnRMSNorm(4), nn.RMSNorm(4)), dim=2).layers == ["0", "1"]


@pytest.mark.parametrize(
    "norm",
    [Gated(4), Centred(4), nn.RMSNorm(4, elementwise_affine=False)],
    ids=lambda each: type(each).__name__,
)
def test_norms_that_phi_can_not_move_are_refused_if_named_and_left_out_if_not(norm: nn.Module) -> None:
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
        (lambda: nn.Sequential(nn.LayerNorm((3, 4))), lambda model: attach_film(model, "0"), ("'0'",)),
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
