"""The AP loss in the box head of Detectron2's R-CNN detectors."""

from typing import Any

import torch
import torch.nn.functional as F
from detectron2.modeling.roi_heads.fast_rcnn import FastRCNNOutputLayers
from torch import Tensor, nn

from metricopt_ext.detection.ap_loss import ap_loss
from metricopt_ext.errors import ConfigError


class APOutputLayers(FastRCNNOutputLayers):  # type: ignore[misc]
    """Detectron2's box predictor with the AP loss in place of the cross-entropy (MetricOpt, Table 6)."""

    def losses(self, predictions: tuple[Tensor, Tensor], proposals: list[Any]) -> dict[str, Tensor]:
        """Return the losses of classes and boxes by name, scalars; see `FastRCNNOutputLayers.losses`."""
        losses: dict[str, Tensor] = super().losses(predictions, proposals)
        logits = predictions[0]
        labels = torch.cat([each.gt_classes for each in proposals])
        labels = labels.where(labels < self.num_classes, -1)  # there, the last class is the background
        losses["loss_cls"] = ap_loss(F.log_softmax(logits, dim=1)[:, :-1], labels)
        return losses


def use_ap_loss(model: nn.Module) -> nn.Module:
    """Give a detector's box predictor the AP loss, keeping its weights and their names, and return the detector.

    Raises:
        ConfigError: The detector has another kind of box predictor.
    """
    predictor = getattr(getattr(model, "roi_heads", None), "box_predictor", None)
    if type(predictor) is not FastRCNNOutputLayers:
        raise ConfigError(f"the AP loss is for FastRCNNOutputLayers, but this detector has {type(predictor).__name__}")
    predictor.__class__ = APOutputLayers  # Detectron2's heads create their own predictor, always of this class
    return model
