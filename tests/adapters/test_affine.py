"""Which axis has a layer's channels, and which norms phi can be folded into."""

import copy

import pytest
import torch
import torchvision
from torch import Tensor, nn

from metricopt_ext.adapters.affine import channel_axis, is_affine


class ChannelsFirst(nn.LayerNorm):
    """A LayerNorm over the channels of ``B x C x H x W``."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


class OnePlus(nn.LayerNorm):
    """A LayerNorm whose weight is around 0."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.layer_norm(x, self.normalized_shape, self.weight + 1, self.bias)


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Linear(3, 5), (2, 4, 3)),
        (nn.Conv1d(3, 5, 1), (2, 3, 4)),
        (nn.Conv1d(3, 5, 1), (3, 4)),  # without a batch axis
        (nn.Conv2d(3, 5, 1), (2, 3, 4, 4)),
        (nn.Conv3d(3, 5, 1), (3, 4, 4, 4)),
        (nn.BatchNorm2d(5), (2, 5, 4, 4)),
        (nn.GroupNorm(1, 5), (2, 5, 4)),
        (nn.LayerNorm(5), (2, 4, 4, 5)),
        (nn.RMSNorm(5), (2, 5)),
        (ChannelsFirst(5), (2, 5, 4, 3)),
    ],
    ids=lambda each: type(each).__name__,
)
def test_the_channel_axis_is_the_one_of_five(layer: nn.Module, shape: tuple[int, ...]) -> None:
    assert layer(torch.ones(shape)).shape[channel_axis(layer)] == 5


class Gated(nn.LayerNorm):
    """A LayerNorm that needs more than its input."""

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x) * gate


@pytest.mark.parametrize(
    ("norm", "foldable"),
    [(nn.LayerNorm(4), True), (ChannelsFirst(4), True), (OnePlus(4), False), (Gated(4), False)],
)
def test_a_norm_that_adds_to_its_weight_is_not_affine_in_it(norm: nn.Module, foldable: bool) -> None:
    assert is_affine(norm) == foldable


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


class Equalised(nn.Linear):
    """A linear layer whose bias is scaled, as StyleGAN's."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight / 4, self.bias / 100)


class Shifted(nn.InstanceNorm1d):
    """An InstanceNorm whose weight is around 0."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.instance_norm(x, weight=self.weight + 1, bias=self.bias)


@pytest.mark.parametrize(
    ("layer", "foldable", "in_bias"),
    [
        (nn.BatchNorm2d(4), True, True),
        (Renamed(4), True, True),
        (torchvision.ops.FrozenBatchNorm2d(4), True, True),
        (Rectified(4), False, False),
        (Standardised(3, 4, 5, dilation=2), False, True),
        (Padded(2, 4, 3, padding=1), True, True),
        (Cosine(3, 4), False, True),
        (Equalised(3, 4), False, False),
        (Shifted(4, affine=True), False, True),
    ],
    ids=lambda each: type(each).__name__,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_own_code_is_asked_whether_phi_can_be_folded_in(
    layer: nn.Module, foldable: bool, in_bias: bool, dtype: torch.dtype
) -> None:
    layer = copy.deepcopy(layer).to(dtype)
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    assert (is_affine(layer), is_affine(layer, in_weight=False)) == (foldable, in_bias)
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())
    assert not layer._forward_hooks


class Quantised(nn.Linear):
    """A linear layer with a weight of integers and their scale."""

    def __init__(self, features: int, outputs: int) -> None:
        super().__init__(features, outputs)
        del self.weight
        self.register_buffer("weight", torch.arange(features * outputs, dtype=torch.int8).view(outputs, features))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight.to(x) / 8, self.bias)


class Undropped(nn.BatchNorm1d):
    """A norm whose parts are called otherwise than timm calls its own."""

    def __init__(self, features: int) -> None:
        super().__init__(features)
        self.drop, self.act = nn.Identity(), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(super().forward(x))


def test_integers_and_parts_that_are_not_called() -> None:
    assert not is_affine(Quantised(3, 2))
    assert is_affine(Quantised(3, 2), in_weight=False)
    assert not is_affine(Undropped(4))


def test_code_in_the_place_of_a_layers_own_is_asked_too() -> None:
    layer = nn.Linear(3, 2)
    own = layer.forward
    layer.forward = lambda x: own(x).tanh()  # type: ignore[method-assign]
    assert not is_affine(layer)


class Interrupted(nn.GroupNorm):
    def forward(self, x: Tensor) -> Tensor:
        raise KeyboardInterrupt


def test_an_interruption_is_passed_on_and_leaves_no_hook() -> None:
    norm = Interrupted(2, 4).train()
    with pytest.raises(KeyboardInterrupt):
        is_affine(norm)
    assert not norm._forward_hooks
    assert norm.training
