"""Detectron2's R-CNN detectors, as the detection tools need them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from detectron2.config import CfgNode
from detectron2.data import transforms
from detectron2.modeling import build_model
from detectron2.structures import Boxes, Instances, RotatedBoxes
from detectron2.utils.events import EventStorage
from torch import Tensor, nn

from metricopt_ext.detection.ap_loss import ClassificationLoss
from metricopt_ext.detection.detectron2.ap_loss import use_ap_loss
from metricopt_ext.detection.detectron2.export import export
from metricopt_ext.detection.detectron2.placements import film_layers
from metricopt_ext.detection.detectron2.weights import load_weights
from metricopt_ext.detection.records import Detections, inside
from metricopt_ext.detection.toolkit import Example
from metricopt_ext.errors import ConfigError, MetricError
from metricopt_ext.utils.modes import evaluating, in_mode


class Detectron2Toolkit:
    """Builds, trains and queries the detectors of a Detectron2 config.

    Images are resized by ``INPUT.MIN_SIZE_TEST`` and ``INPUT.MAX_SIZE_TEST``, for the loss too: augmentation is left to
    the caller. As in Detectron2's own data loaders, difficult objects are learned from and crowds are not;
    `TorchvisionToolkit` leaves out both.

    Args:
        cfg: The config, e.g. from `config.read_config`. ``MODEL.WEIGHTS``, if given, is read by Detectron2's
            checkpointer, which unpickles ``.pkl`` files: name only files that you trust.
        classification_loss: Of the box head: the detector's own ``cross_entropy``, or ``ap`` (`ap_loss.ap_loss`).
        strict_weights: Whether ``MODEL.WEIGHTS`` must give every parameter; False if the detector will be trained.

    Raises:
        ConfigError: There is no such loss.
    """

    def __init__(
        self, cfg: CfgNode, classification_loss: str = "cross_entropy", *, strict_weights: bool = True
    ) -> None:
        if classification_loss not in get_args(ClassificationLoss):
            raise ConfigError(f"classification_loss={classification_loss!r} must be 'cross_entropy' or 'ap'")
        if cfg.INPUT.FORMAT not in ("RGB", "BGR"):
            raise ConfigError(f"INPUT.FORMAT is {cfg.INPUT.FORMAT!r}; pictures are given as RGB or BGR")
        self.cfg, self.classification_loss, self.strict_weights = cfg, classification_loss, strict_weights
        size = cfg.INPUT.MIN_SIZE_TEST
        self._resize = transforms.ResizeShortestEdge([size, size], cfg.INPUT.MAX_SIZE_TEST)

    def build(self, classes: int, seed: int) -> nn.Module:
        """Return a new detector; what ``MODEL.WEIGHTS`` does not give is drawn from the seed.

        Raises:
            DataError: The weights can't be loaded; see `weights.load_weights`.
        """
        cfg = self.cfg.clone()
        cfg.defrost()
        cfg.MODEL.ROI_HEADS.NUM_CLASSES = cfg.MODEL.RETINANET.NUM_CLASSES = classes
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model: nn.Module = build_model(cfg)
        if cfg.MODEL.WEIGHTS:
            load_weights(model, cfg.MODEL.WEIGHTS, strict=self.strict_weights)
        if self.classification_loss == "ap":
            use_ap_loss(model)
        return model

    def film_layers(self, model: nn.Module, placements: Sequence[str]) -> list[str]:
        """Return the patterns of layers that some placements stand for; see `placements.film_layers`."""
        return film_layers(model, placements)

    def inputs(self, model: nn.Module, batch: Sequence[Example]) -> list[dict[str, Any]]:
        """Return what the model's ``forward`` takes in evaluation mode."""
        for example in batch:
            example.begin()
        return [self._input(example) for example in batch]

    def inference(self, model: nn.Module) -> dict[str, float]:
        """Return what detections depend on beside the weights, by the detector's configuration."""
        cfg = self.cfg
        part = cfg.MODEL.RETINANET if cfg.MODEL.META_ARCHITECTURE == "RetinaNet" else cfg.MODEL.ROI_HEADS
        return {
            "score_thresh": part.SCORE_THRESH_TEST,
            "detections": cfg.TEST.DETECTIONS_PER_IMAGE,
            "min_size": cfg.INPUT.MIN_SIZE_TEST,
            "max_size": cfg.INPUT.MAX_SIZE_TEST,
        }

    def export(self, model: nn.Module, path: str | Path) -> None:
        """Merge phi into a copy of an adapted model and write it as a Detectron2 checkpoint; see `export.export`."""
        export(model, path)

    def loss(self, model: nn.Module, batch: Sequence[Example]) -> Tensor:
        """Return the sum of the detector's losses on a batch, a scalar; the model computes in training mode.

        Anchors and proposals are sampled from torch's global stream on the model's device.

        Raises:
            ConfigError: The detector has a head of masks or keypoints.
        """
        for key in ("MASK_ON", "KEYPOINT_ON"):
            if self.cfg.MODEL[key]:
                raise ConfigError(f"MODEL.{key} is True, but the images have boxes alone here; set it to False")
        inputs = [
            {**known, "instances": self._targets(example)}
            for known, example in zip(self.inputs(model, batch), batch, strict=True)
        ]
        # The R-CNN heads count their samples in an event storage and fail without one.
        with in_mode(model, training=True), EventStorage():
            losses: dict[str, Tensor] = model(inputs)
        return torch.stack(list(losses.values())).sum()

    @torch.no_grad()
    def detect(self, model: nn.Module, batch: Sequence[Example]) -> list[Detections]:
        """Return what the detector finds in each image, in pixels of that image, on the CPU."""
        with evaluating(model):
            outputs = model(self.inputs(model, batch))
        return [detections_of(output["instances"]) for output in outputs]

    def _input(self, example: Example) -> dict[str, Any]:
        pixels = example.image.permute(1, 2, 0).cpu().numpy()
        if self.cfg.INPUT.FORMAT == "BGR":
            pixels = pixels[:, :, ::-1]
        resized = self._resize.get_transform(pixels).apply_image(np.ascontiguousarray(pixels))
        image = torch.from_numpy(np.ascontiguousarray(resized.transpose(2, 0, 1)))
        height, width = example.size
        return {"image": image, "height": height, "width": width}

    def _targets(self, example: Example) -> Instances:
        height, width = example.size
        transform = self._resize.get_transform(np.empty((height, width, 3), np.uint8))
        clipped, within = inside(example.truth.boxes, width, height)
        kept = within & ~example.truth.crowd
        boxes = transform.apply_box(clipped[kept].cpu().numpy().reshape(-1, 4))
        size = (height, width)
        if isinstance(transform, transforms.ResizeTransform):
            size = (transform.new_h, transform.new_w)
        targets = Instances(size)
        targets.gt_boxes = Boxes(torch.as_tensor(boxes, dtype=torch.float32))
        targets.gt_classes = example.truth.labels[kept].long()
        return targets


def detections_of(instances: Instances) -> Detections:
    """Return a model's output for one image as detections, on the CPU.

    Raises:
        MetricError: It has no boxes, or rotated ones.
    """
    found = instances.to("cpu")
    lacking = [name for name in ("pred_boxes", "scores", "pred_classes") if not found.has(name)]
    if lacking:
        raise MetricError(
            f"the detector gave no {lacking[0]}, which AP50 of boxes needs, but {sorted(found.get_fields())}"
        )
    if isinstance(found.pred_boxes, RotatedBoxes):
        raise MetricError("the detector gave RotatedBoxes; AP50 is of boxes along the axes, Detectron2's Boxes")
    return Detections(found.pred_boxes.tensor, found.scores, found.pred_classes)
