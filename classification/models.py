"""The networks of the paper's classification experiments, and any torchvision classifier by name."""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from metricopt_ext.data.named_model import named_model
from metricopt_ext.errors import ConfigError


class TabularMLP(nn.Module):
    """Leaky-ReLU network 100-30-10-c with BatchNorm and dropout at each layer (paper, section 4.2).

    Args:
        features: Number of inputs.
        outputs: Number of logits c; 1 for a binary classifier.
        widths: Hidden widths.
        dropout: Dropout probability.
    """

    def __init__(
        self, features: int, outputs: int = 1, widths: tuple[int, ...] = (100, 30, 10), dropout: float = 0.2
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for a, b in zip((features, *widths), widths, strict=False):
            layers += [nn.Linear(a, b), nn.LeakyReLU(), nn.BatchNorm1d(b), nn.Dropout(dropout)]
        self.body = nn.Sequential(*layers)
        self.head = nn.Linear(widths[-1], outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``n x features`` to logits, ``n`` for one output, otherwise ``n x outputs``."""
        logits: Tensor = self.head(self.body(x))
        return logits.squeeze(-1) if self.head.out_features == 1 else logits


class SmallCNN(nn.Sequential):
    """Three 3x3 convolutions with BatchNorm, the second of stride 2, for small images.

    The norms are named ``norm1``, ``norm2`` and ``norm3``. Maps ``n x channels x h x w`` to logits, ``n x classes``.

    Args:
        channels: Input channels.
        classes: Number of classes.
        width: Channels of the first convolution; the others have twice as many.
    """

    def __init__(self, channels: int, classes: int, width: int = 16) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(2 * width)
        self.relu2 = nn.ReLU()
        self.conv3 = nn.Conv2d(2 * width, 2 * width, 3, padding=1, bias=False)
        self.norm3 = nn.BatchNorm2d(2 * width)
        self.relu3 = nn.ReLU()
        self.pool = nn.AdaptiveAvgPool2d(2)
        self.flatten = nn.Flatten()
        self.head = nn.Linear(2 * width * 4, classes)


class CifarResNet(nn.Sequential):
    """The residual network for 32-pixel images of He et al. (2016), section 4.2, with parameter-free shortcuts.

    Three stages of n blocks and 16k, 32k, 64k channels: depth 6n + 2; 32 is the paper's network for MCR. Maps
    ``n x 3 x h x w`` to logits, ``n x classes``.

    Args:
        depth: Number of layers, 6n + 2 with n at least 1.
        classes: Number of classes.
        widening: How many times as wide as the published one, k, at least 1 (Zagoruyko and Komodakis, 2016).

    Raises:
        ConfigError: The depth is not of this form, or the widening is below 1.
    """

    def __init__(self, depth: int = 32, classes: int = 10, widening: int = 1) -> None:
        super().__init__()
        if depth < 8 or (depth - 2) % 6:
            raise ConfigError(f"depth is {depth}; a CIFAR ResNet has 6n + 2 layers, e.g. 20, 32, 56")
        if widening < 1:
            raise ConfigError(f"widening is {widening}; it must be at least 1, e.g. cifar_resnet14x2")
        blocks, width = (depth - 2) // 6, 16 * widening
        self.conv = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.relu = nn.ReLU()
        self.stage1 = self._stage(width, width, blocks)
        self.stage2 = self._stage(width, 2 * width, blocks)
        self.stage3 = self._stage(2 * width, 4 * width, blocks)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.flatten = nn.Flatten()
        self.head = nn.Linear(4 * width, classes)

    @staticmethod
    def _stage(inputs: int, outputs: int, blocks: int) -> nn.Sequential:
        return nn.Sequential(*(CifarBlock(inputs if i == 0 else outputs, outputs) for i in range(blocks)))


class CifarBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut; a change of width also halves the resolution."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.stride, self.added = (1, 0) if inputs == outputs else (2, outputs - inputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=self.stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``n x inputs x h x w`` to ``n x outputs x h/stride x w/stride``."""
        h = self.norm2(self.conv2(self.norm1(self.conv1(x)).relu()))
        shortcut = x[:, :, :: self.stride, :: self.stride]
        shortcut = nn.functional.pad(shortcut, (0, 0, 0, 0, 0, self.added))  # new channels start at zero
        total: Tensor = h + shortcut
        return total.relu()


def build_model(
    name: str,
    input_shape: torch.Size,
    classes: int,
    *,
    one_logit: bool = True,
    folder: str = "",
    kwargs: Mapping[str, Any] | None = None,
) -> nn.Module:
    """Build an untrained classifier.

    Args:
        name: ``tabular_mlp``, ``small_cnn``, ``cifar_resnet32`` (or another depth, twice as wide with ``x2`` after it),
            or what `named_model` knows: a torchvision classifier, e.g. ``resnet18``, timm's, a Hugging Face folder,
            ``MODULE:FUNCTION``.
        input_shape: Shape of one input: ``features`` or ``channels x h x w``.
        classes: Number of classes c, or of other outputs. Two classes give the MLP one logit.
        one_logit: False for two outputs that are no classes.
        folder: Where the function's module is, if it is not installed.
        kwargs: Further arguments of what `named_model` builds.

    Raises:
        ConfigError: There is no such model, or it doesn't take inputs of this shape.
    """
    if name == "tabular_mlp":
        if len(input_shape) != 1:
            raise ConfigError(f"model.name=tabular_mlp takes vectors, but the data has shape {tuple(input_shape)}")
        return TabularMLP(input_shape[0], 1 if classes == 2 and one_logit else classes)
    if len(input_shape) != 3 and ":" not in name:
        raise ConfigError(f"model.name={name} takes images, but the data has shape {tuple(input_shape)}")
    if name == "small_cnn":
        return SmallCNN(input_shape[0], classes)
    if name.startswith("cifar_resnet") and (input_shape[0] != 3 or min(input_shape[1:]) < 8):
        raise ConfigError(
            f"model.name={name} takes 3 channels of 8 x 8 pixels or more, but the data has shape {tuple(input_shape)}"
        )
    if cifar_resnet := re.fullmatch(r"cifar_resnet(\d+)(?:x(\d+))?", name):
        depth, widening = cifar_resnet.groups(default="1")
        return CifarResNet(int(depth), classes, int(widening))
    others = "tabular_mlp, small_cnn, cifar_resnetN"
    return named_model(name, input_shape, classes, others=others, folder=folder, kwargs=kwargs)
