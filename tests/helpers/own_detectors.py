"""A detector of a user's own, doubly precise so that no two boxes tie, and images for it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch import nn
from torchvision.models.detection import FasterRCNN, MaskRCNN
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.backbone_utils import BackboneWithFPN
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor

SIDE = 48
SIZES = ((72, 48), (48, 72), (SIDE, SIDE))  # lying, standing and square pictures, which a batch would pad


class Stages(nn.Module):
    """Three halvings of the size."""

    def __init__(self) -> None:
        super().__init__()
        for i, (given, made) in enumerate(((3, 8), (8, 16), (16, 32))):
            setattr(self, f"layer{i}", _stage(given, made))

    def forward(self, x: Any) -> Any:
        return self.layer2(self.layer1(self.layer0(x)))


def _stage(given: int, made: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(given, made, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(made), nn.ReLU())


def backbone() -> nn.Module:
    """Return a pyramid of three levels and a coarser one."""
    return BackboneWithFPN(Stages(), {f"layer{i}": str(i) for i in range(3)}, [8, 16, 32], 16)


def sizes(num_classes: int) -> dict[str, Any]:
    """Return how a detector is built on it: of any score, few proposals, and thin heads."""
    proposals = {f"rpn_post_nms_top_n_{when}": 30 for when in ("train", "test")}
    thin = {"box_head": TwoMLPHead(16 * 49, 16), "box_predictor": FastRCNNPredictor(16, num_classes)}
    anchors = AnchorGenerator(((9.0,), (18.0,), (36.0,), (48.0,)), ((1.0,),) * 4)
    few = {"box_detections_per_img": 20, "box_batch_size_per_image": 32, "box_score_thresh": 0.0}
    return {**proposals, **few, **thin, "rpn_anchor_generator": anchors, "min_size": SIDE, "max_size": SIDE}


def detector(num_classes: int) -> nn.Module:
    """Return a detector of boxes; ``num_classes`` counts the background."""
    return FasterRCNN(backbone(), **sizes(num_classes)).double()


def masks(num_classes: int) -> nn.Module:
    """Return a detector of masks."""
    heads = {"mask_head": MaskRCNNHeads(16, (8,), 1), "mask_predictor": MaskRCNNPredictor(8, 8, num_classes)}
    heads["mask_predictor"].mask_fcn_logits.bias.data.fill_(0.5)
    return MaskRCNN(backbone(), **sizes(num_classes), **heads).double()


def write_discs(file: Path, seed: int, images: int) -> Path:
    """Write images of bright discs beside COCO's file of them, with their outlines."""
    rng = np.random.default_rng(seed)
    content: dict[str, Any] = {"images": [], "annotations": [], "categories": [{"id": 3, "name": "disc"}]}
    turns = np.linspace(0, 2 * np.pi, 17)[:-1]
    for i in range(images):
        width, height = SIZES[i % len(SIZES)]
        rows, columns = np.mgrid[:height, :width]
        pixels, radius = rng.integers(60, 120, (height, width, 3), dtype=np.uint8), 18
        x, y = rng.integers(20, (width - 20, height - 20))
        pixels[(rows - y) ** 2 + (columns - x) ** 2 < radius**2] = 230
        name = f"{file.stem}-{i}.png"
        Image.fromarray(pixels).save(file.with_name(name))
        content["images"].append({"id": i, "file_name": name, "width": width, "height": height})
        corners = np.stack([x + radius * np.cos(turns), y + radius * np.sin(turns)], 1).flatten().tolist()
        box = [float(x - radius), float(y - radius), 2.0 * radius, 2.0 * radius]
        entry = {"id": i + 1, "image_id": i, "category_id": 3, "bbox": box, "iscrowd": 0}
        content["annotations"].append({**entry, "segmentation": [corners], "area": 1000.0})
    file.write_text(json.dumps(content))
    return file
