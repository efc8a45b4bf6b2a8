"""Torchvision's detectors built thin, with its own modules but few channels, or small, on two convolutions."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchvision.models import ResNet
from torchvision.models.detection import (
    FCOS,
    FasterRCNN,
    MaskRCNN,
    RetinaNet,
    backbone_utils,
    faster_rcnn,
    fcos,
    mask_rcnn,
    retinanet,
    ssd,
)
from torchvision.models.detection.anchor_utils import AnchorGenerator, DefaultBoxGenerator
from torchvision.models.detection.backbone_utils import BackboneWithFPN
from torchvision.models.detection.faster_rcnn import FastRCNNConvFCHead, FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.models.detection.ssd import SSD
from torchvision.models.resnet import Bottleneck
from torchvision.models.vgg import make_layers
from torchvision.ops import MultiScaleRoIAlign
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


TWO_STAGES = ("FasterRCNN", "MaskRCNN")
RNG = torch.Generator().manual_seed(0)
SMALL_IMAGES = [
    torch.randint(256, (3, *size), generator=RNG, dtype=torch.uint8).double() / 255
    for size in ((48, 64), (64, 40), (48, 64))
]


class Backbone(nn.Module):
    """Two convolutions; one map of features."""

    def __init__(self, out_channels: Any = 32) -> None:
        super().__init__()
        self.out_channels = out_channels
        self.body = nn.Sequential(
            nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, 4, 1), nn.ReLU()
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)  # type: ignore[no-any-return]


def small_detector(name: str) -> Any:
    """Make a detector of two classes in double precision, whose scores are spread and don't tie."""
    torch.manual_seed(0)
    count, sizes = 3, {"min_size": 48, "max_size": 72}
    options: dict[str, Any]
    model: Any
    if name in TWO_STAGES:
        pool = MultiScaleRoIAlign(["0"], 7, 2)
        options = {"rpn_anchor_generator": AnchorGenerator(((12, 24),), ((0.5, 1.0),)), "box_roi_pool": pool, **sizes}
        options |= {"rpn_pre_nms_top_n_test": 60, "rpn_post_nms_top_n_test": 30, "box_detections_per_img": 20}
        options |= {"box_head": TwoMLPHead(32 * 49, 64), "box_predictor": FastRCNNPredictor(64, count)}
        small = MultiScaleRoIAlign(["0"], 4, 2)
        if name == "MaskRCNN":
            options |= {"mask_head": MaskRCNNHeads(32, (16,), 1), "mask_predictor": MaskRCNNPredictor(16, 16, count)}
            options["mask_roi_pool"] = small
        model = {"FasterRCNN": FasterRCNN, "MaskRCNN": MaskRCNN}[name](Backbone(), **options)
        predictor = model.roi_heads.box_predictor.cls_score
    elif name == "SSD":
        boxes = DefaultBoxGenerator([[2]], scales=[0.2, 0.4])
        model = SSD(Backbone([32]), boxes, (48, 64), count, detections_per_img=20, score_thresh=0.05)
        predictor = model.head.classification_head.module_list[0]
    else:
        anchors = AnchorGenerator(((8 if name == "FCOS" else 16,),), ((1.0,),))
        options = {"detections_per_img": 20, "score_thresh": 0.05, "anchor_generator": anchors, **sizes}
        model = (FCOS if name == "FCOS" else RetinaNet)(Backbone(), count, **options)
        predictor = model.head.classification_head.cls_logits
    model.double().eval()
    seen: list[Tensor] = []
    with torch.no_grad():
        handle = predictor.register_forward_hook(lambda module, args, output: seen.append(output))
        model(list(SMALL_IMAGES))
        handle.remove()
        logits = seen[0] if seen[0].ndim == 2 else seen[0].movedim(1, -1).flatten(0, -2)
        scale = 2 / float((logits - logits.mean(0)).std())
        predictor.weight.mul_(scale)
        predictor.bias.sub_(logits.mean(0)).mul_(scale)
    if name in TWO_STAGES:  # as if it had seen no image yet
        for pool in (each for each in model.modules() if isinstance(each, MultiScaleRoIAlign)):
            pool.scales = pool.map_levels = None
    return model
