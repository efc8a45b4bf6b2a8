"""Which axis has a layer's channels, and which norms phi can be folded into."""

import pytest
import torch
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


class Interrupted(nn.GroupNorm):
    def forward(self, x: Tensor) -> Tensor:
        raise KeyboardInterrupt


def test_an_interruption_is_passed_on_and_leaves_no_hook() -> None:
    norm = Interrupted(2, 4).train()
    with pytest.raises(KeyboardInterrupt):
        is_affine(norm)
    assert not norm._forward_hooks
    assert norm.training
