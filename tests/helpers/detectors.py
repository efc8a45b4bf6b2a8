"""Torchvision's detectors built thin: each has its own modules, names and sizes of images, but few channels."""

from collections.abc import Sequence
from typing import Any

import pytest
from torch import nn
from torchvision.models import ResNet
from torchvision.models.detection import backbone_utils, faster_rcnn, fcos, mask_rcnn, retinanet, ssd
from torchvision.models.detection.backbone_utils import BackboneWithFPN
from torchvision.models.detection.faster_rcnn import FastRCNNConvFCHead
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads
from torchvision.models.resnet import Bottleneck
from torchvision.models.vgg import make_layers
from torchvision.ops.feature_pyramid_network import LastLevelP6P7

CHANNELS = 64  # of a pyramid: torchvision's group norms part them in 32
# As many channels as torchvision's SSD expects of its two feature maps, and few elsewhere.
THIN_VGG: list[str | int] = [8, 8, "M", 8, 8, "M", 8, 8, 8, "M", 8, 8, 512, "M", 8, 8, 512, "M"]


class Narrow(Bottleneck):
    """A block of half as many channels."""

    expansion = 2


def _resnet(norm_layer: Any = None, **options: Any) -> nn.Module:
    return ResNet(Narrow, [1, 1, 1, 1], width_per_group=16, norm_layer=norm_layer)


def _vgg(**options: Any) -> nn.Module:
    features = make_layers(THIN_VGG)  # type: ignore[arg-type]
    for layer in features.modules():
        if isinstance(layer, nn.Conv2d):  # as torchvision's VGG is born: what it is given is not lost on the way
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return nn.ModuleDict({"features": features})


def _pyramid(
    backbone: nn.Module, layers: dict[str, str], channels: list[int], out: int, extra_blocks: Any = None, **options: Any
) -> nn.Module:
    if isinstance(extra_blocks, LastLevelP6P7):
        extra_blocks = LastLevelP6P7(CHANNELS if extra_blocks.use_P5 else channels[-1], CHANNELS)
    return BackboneWithFPN(backbone, layers, channels, CHANNELS, extra_blocks=extra_blocks, **options)


def _thinned(layers: Sequence[int]) -> list[int]:
    """Few channels, but the last as many as what follows takes."""
    return [16] * (len(layers) - 1) + [layers[-1]]


def _masks(channels: int, layers: Sequence[int], *options: Any, **more: Any) -> nn.Module:
    return MaskRCNNHeads(channels, _thinned(layers), *options, **more)


def _boxes(size: tuple[int, int, int], layers: Sequence[int], *options: Any, **more: Any) -> nn.Module:
    return FastRCNNConvFCHead(size, [16] * len(layers), *options, **more)


def thin_detectors(patch: pytest.MonkeyPatch) -> None:
    """Let torchvision's builders take a block for each stage of a ResNet-50, and few channels wherever they may."""
    for module in (faster_rcnn, fcos, mask_rcnn, retinanet):
        patch.setattr(module, "resnet50", _resnet)
    patch.setattr(ssd, "vgg16", _vgg)
    patch.setattr(backbone_utils, "BackboneWithFPN", _pyramid)
    patch.setattr(mask_rcnn, "MaskRCNNHeads", _masks)
    for module in (faster_rcnn, mask_rcnn):
        patch.setattr(module, "FastRCNNConvFCHead", _boxes)
