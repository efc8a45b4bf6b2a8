"""Torchvision's detectors, in the manner of its references/detection, tuned for AP50 by COCO's evaluation."""

import argparse

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics.detection import MeanAveragePrecision
from torchvision.models.detection.faster_rcnn import FasterRCNN, FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.rpn import AnchorGenerator
from torchvision.ops import MultiScaleRoIAlign

import metricopt_ext as mo  # +

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=12)
parser.add_argument("--test-only", default="", help="a checkpoint to evaluate")
args = parser.parse_args()
torch.manual_seed(0)
WIDTHS = ((3, 16), (16, 32), (32, 64))


def scene(seed: int, light: float) -> tuple[Tensor, dict[str, Tensor]]:  # squares, full (1) or hollow (2), on noise
    rng, boxes, labels = np.random.default_rng(seed), [], []
    image = 0.3 * rng.random((3, 64, 64), dtype=np.float32)
    for corner in rng.permutation([(0, 0), (0, 32), (32, 0), (32, 32)])[: rng.integers(1, 4)]:
        (y, x), size, label = corner + rng.integers(0, 12, 2), rng.integers(14, 20), int(rng.integers(1, 3))
        image[:, y : y + size, x : x + size] = light
        image[:, y + 4 : y + size - 4, x + 4 : x + size - 4] = 0.15 if label == 2 else light
        boxes, labels = [*boxes, [x, y, x + size, y + size]], [*labels, label]
    return torch.from_numpy(image), {"boxes": torch.tensor(np.array(boxes)).float(), "labels": torch.tensor(labels)}


def loss_of(model: nn.Module, batch: tuple) -> Tensor:
    return sum(model(*batch).values())


@torch.inference_mode()
def evaluate(model: nn.Module, loader: DataLoader) -> tuple[float, list[float]]:
    model.eval()
    pairs = [pair for images, targets in loader for pair in zip(model(images), targets, strict=True)]
    ap50, *halves = (average_precision(pairs[i::n]) for i, n in ((0, 1), (0, 2), (1, 2)))  # metric
    return ap50, halves  # metric


def average_precision(pairs: list) -> float:
    coco = MeanAveragePrecision(max_detection_thresholds=[1, 10, 100])
    coco.update(*zip(*pairs, strict=True))
    return max(0.0, float(coco.compute()["map_50"]))


backbone = nn.Sequential(*(nn.Sequential(nn.Conv2d(a, b, 3, 2, 1), nn.BatchNorm2d(b), nn.ReLU()) for a, b in WIDTHS))
backbone.out_channels = 64
anchors = AnchorGenerator(((16,),), ((1.0,),))
few = {f"rpn_{when}_nms_top_n_{part}": 40 for when in ("pre", "post") for part in ("train", "test")}
model = FasterRCNN(
    backbone, min_size=64, max_size=64, rpn_anchor_generator=anchors, box_batch_size_per_image=32,
    box_roi_pool=MultiScaleRoIAlign(["0"], 4, 2), box_head=TwoMLPHead(1024, 128),
    box_predictor=FastRCNNPredictor(128, 3), **few,
)  # fmt: skip
parts = {"train": (range(100), 0.9), "val": (range(1000, 1040), 0.5), "test": (range(2000, 2060), 0.5)}  # less light
sets = {name: [scene(seed, light) for seed in seeds] for name, (seeds, light) in parts.items()}
options = {"batch_size": 10, "collate_fn": lambda batch: tuple(zip(*batch, strict=True))}
train, val, test = (DataLoader(each, shuffle=each is sets["train"], **options) for each in sets.values())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
if args.test_only:
    model.load_state_dict(torch.load(args.test_only)["model"])
    raise SystemExit(f"AP50 on test: {evaluate(model, test)[0]:.4f}")
for epoch in range(args.epochs):
    for batch in train:
        optimizer.zero_grad()
        loss_of(model.train(), batch).backward()
        optimizer.step()
    torch.save({"model": model.state_dict(), "epoch": epoch}, "torchvision_detection.pth")
print(f"AP50 on test, before: {evaluate(model, test)[0]:.4f}")
metric = mo.Metric(lambda: evaluate(model, val), maximize=True)  # metric
print(mo.tune_model(model, loss=loss_of, batches=train, metric=metric, queries=60, training=True))  # +
torch.save({"model": model.state_dict(), "epoch": args.epochs}, "torchvision_detection.pth")  # +
print(f"AP50 on test, after: {evaluate(model, test)[0]:.4f}")
