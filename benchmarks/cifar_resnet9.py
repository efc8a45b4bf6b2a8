"""A nine-layer network for CIFAR-10, by ``model.name=cifar_resnet9:resnet9 model.folder=benchmarks``."""

from collections.abc import Sequence

from torch import nn

from metricopt_ext.classification.models import CifarBlock


def resnet9(outputs: int, input_shape: Sequence[int], width: int = 64) -> nn.Module:
    """Build it; ``model.kwargs.width`` is its width."""
    return ResNet9(outputs, width)


class ResNet9(nn.Sequential):
    """ResNet-9, a network for 32-pixel images that few epochs train (Page, "How to Train Your ResNet", 2018).

    Three times the channels double and the resolution halves, with a residual block after the first and after the last.
    Here pooling comes before BatchNorm, the block's sum goes through a ReLU, and logits are not scaled. Maps
    ``n x 3 x h x w`` to logits, ``n x classes``; h and w are at least 8.

    Args:
        classes: Number of classes.
        width: Channels of the first convolution, w, at least 1; the last block has 8w. The published one is 64.
    """

    def __init__(self, classes: int = 10, width: int = 64) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.relu = nn.ReLU()
        self.halving1 = Halving(width, 2 * width)
        self.block1 = CifarBlock(2 * width, 2 * width)
        self.halving2 = Halving(2 * width, 4 * width)
        self.halving3 = Halving(4 * width, 8 * width)
        self.block3 = CifarBlock(8 * width, 8 * width)
        self.pool = nn.AdaptiveMaxPool2d(1)
        self.flatten = nn.Flatten()
        self.head = nn.Linear(8 * width, classes)


class Halving(nn.Sequential):
    """A 3x3 convolution and a maximum over 2x2 pixels: ``n x inputs x h x w`` to ``n x outputs x h/2 x w/2``."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        self.pool = nn.MaxPool2d(2)
        self.norm = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU()
