"""Torchvision's detectors of one and two stages, and a small Faster R-CNN that trains from scratch in minutes."""

from pathlib import Path

from torch import nn

from metricopt_ext.utils.extras import install
from metricopt_ext.utils.state_dict import load_checkpoint

try:
    from torchvision.models import get_model
    from torchvision.models.detection import FasterRCNN
    from torchvision.models.detection.anchor_utils import AnchorGenerator
    from torchvision.models.detection.backbone_utils import BackboneWithFPN
    from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
    from torchvision.ops import FrozenBatchNorm2d, MultiScaleRoIAlign
except ImportError as error:
    raise ImportError(f"torchvision's detectors need torchvision: {install('torchvision')}") from error

SSD = ("ssd300_vgg16", "ssdlite320_mobilenet_v3_large")
ONE_STAGE = ("retinanet_resnet50_fpn", "retinanet_resnet50_fpn_v2", "fcos_resnet50_fpn", *SSD)
STANDARD = (
    *("fasterrcnn_resnet50_fpn", "fasterrcnn_resnet50_fpn_v2", "maskrcnn_resnet50_fpn", "maskrcnn_resnet50_fpn_v2"),
    *("fasterrcnn_mobilenet_v3_large_fpn", "fasterrcnn_mobilenet_v3_large_320_fpn"),
    *ONE_STAGE,
)
SMALL = "small_fpn"

# Torchvision's weights of these are for frozen norms, which are not trained from scratch; for those marked True it sets
# the norms' eps to 0, which the weights themselves don't show.
FROZEN_NORMS = {
    "fasterrcnn_resnet50_fpn": True,
    "maskrcnn_resnet50_fpn": True,
    "retinanet_resnet50_fpn": True,
    "fcos_resnet50_fpn": False,
    "fasterrcnn_mobilenet_v3_large_fpn": False,
    "fasterrcnn_mobilenet_v3_large_320_fpn": False,
}
# Where weights that depend on the number of classes are.
PREDICTORS = (
    *("roi_heads.box_predictor.", "roi_heads.mask_predictor.mask_fcn_logits."),
    *("head.classification_head.cls_logits.", "head.classification_head.module_list."),
)


class SmallBackbone(nn.Module):
    """Seven 3x3 convolutions with BatchNorm in four stages of stride 2, for images of about 100 pixels.

    The stages are named ``layer1`` to ``layer4``, as in a ResNet; each has twice the channels of the one before. It is
    never called itself: torchvision's feature pyramid calls the stages one after the other.

    Args:
        width: Channels of the first stage.
    """

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.layer1 = _stage(3, width, convolutions=1)
        self.layer2 = _stage(width, 2 * width)
        self.layer3 = _stage(2 * width, 4 * width)
        self.layer4 = _stage(4 * width, 8 * width)


def _stage(inputs: int, outputs: int, convolutions: int = 2) -> nn.Sequential:
    layers: list[nn.Module] = []
    for i in range(convolutions):
        layers += [
            nn.Conv2d(inputs if i == 0 else outputs, outputs, 3, stride=2 if i == 0 else 1, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
        ]
    return nn.Sequential(*layers)


def build_standard(
    name: str,
    classes: int,
    min_size: int,
    max_size: int,
    score_threshold: float,
    weights: str = "",
    strict: bool = False,
    entry: str = "",
) -> nn.Module:
    """Build one of torchvision's own detectors.

    Its state dict fits torchvision's detector of that name, built with ``weights=None``.

    Args:
        name: One of `STANDARD`.
        classes: Number of classes, without background.
        min_size: Shorter side in pixels to which images are scaled (800 in torchvision's own training) ...
        max_size: ... unless the longer side would then exceed this (1333). SSDs have a size of their own.
        score_threshold: Lowest confidence of a detection.
        weights: File of torchvision's weights for this detector, trained on COCO, or trained further from these.
        strict: Whether the predictor of classes is taken from there too; the number of classes must then match.
        entry: The state dict's key in that file; empty to find it.

    Raises:
        DataError: The weights don't fit the detector.
    """
    sizes = {} if name in SSD else {"min_size": min_size, "max_size": max_size}
    threshold = {"score_thresh" if name in ONE_STAGE else "box_score_thresh": score_threshold}
    model: nn.Module = get_model(
        name, weights=None, weights_backbone=None, num_classes=classes + 1, **sizes, **threshold
    )
    if not weights:
        return model
    if name in FROZEN_NORMS:
        _freeze_norms(model.backbone.body)  # type: ignore[union-attr, arg-type]
    predictor = [key for key in model.state_dict() if key.startswith(PREDICTORS)]
    load_checkpoint(model, Path(weights), keep=() if strict else predictor, entry=entry)
    if FROZEN_NORMS.get(name):
        for module in model.modules():
            if isinstance(module, FrozenBatchNorm2d):
                _add_to_variance(module)
    return model


def _freeze_norms(body: nn.Module) -> None:
    """Freeze a backbone as torchvision does for finetuning: its norms and its first layers."""
    for parent in list(body.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.BatchNorm2d):
                setattr(parent, name, FrozenBatchNorm2d(child.num_features))
    # Of a ResNet its stem and first stage, of MobileNet's stages the last three are trained.
    first = ("conv1", "layer1") if hasattr(body, "layer1") else map(str, range(7))
    for name in first:
        body.get_submodule(name).requires_grad_(False)


def _add_to_variance(norm: FrozenBatchNorm2d) -> None:
    """Rescale a published norm, whose variance is used as it is, to one that adds ``eps``, as any other does."""
    variance = norm.running_var.double()
    norm.weight.copy_(norm.weight * ((variance + norm.eps) / variance).sqrt())


def build_small(classes: int, min_size: int, max_size: int, score_threshold: float, width: int, head: int) -> nn.Module:
    """Build a Faster R-CNN for small images and few boxes.

    Args:
        classes: Number of classes, without background.
        min_size: Shorter side in pixels to which images are scaled ...
        max_size: ... unless the longer side would then exceed this.
        score_threshold: Lowest confidence of a detection.
        width: Channels of the feature pyramid.
        head: Channels of the box head's two layers.
    """
    channels = {"layer2": 32, "layer3": 64, "layer4": 128}
    levels = {stage: str(i) for i, stage in enumerate(channels)}
    # Pooling adds one level, whose anchors are as large as the image; each level below halves their size.
    sizes = [(max_size / 2**halvings,) for halvings in reversed(range(len(levels) + 1))]
    # A box as large as the image is pooled from the level of stride 16, like one of 224 pixels by default.
    pool = MultiScaleRoIAlign(list(levels.values()), output_size=7, sampling_ratio=2, canonical_scale=max_size)
    return FasterRCNN(  # type: ignore[no-any-return]
        BackboneWithFPN(SmallBackbone(), levels, list(channels.values()), width),
        min_size=min_size,
        max_size=max_size,
        rpn_anchor_generator=AnchorGenerator(tuple(sizes), ((0.5, 1.0, 2.0),) * len(sizes)),
        # A tenth of the proposals and samples of the 800-pixel detectors: there are few boxes to find.
        rpn_pre_nms_top_n_train=200,
        rpn_pre_nms_top_n_test=200,
        rpn_post_nms_top_n_train=100,
        rpn_post_nms_top_n_test=100,
        rpn_batch_size_per_image=64,
        box_batch_size_per_image=64,
        box_roi_pool=pool,
        box_head=TwoMLPHead(width * 7 * 7, head),
        box_predictor=FastRCNNPredictor(head, classes + 1),
        box_score_thresh=score_threshold,
    )
