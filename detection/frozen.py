"""What phi can't change in a detector whose box head alone is modulated, computed once for each image."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from metricopt_ext.detection.records import Detections
from metricopt_ext.detection.toolkit import Example
from metricopt_ext.detection.torchvision_toolkit import (
    TorchvisionToolkit,
    images_of,
    targets_of,
    to_detections,
    to_pixels,
    total,
)
from metricopt_ext.errors import AdapterError
from metricopt_ext.film import Adapter
from metricopt_ext.metric import evaluating, in_mode
from metricopt_ext.seeding import seeded_streams

BOX_HEAD = "roi_heads."


@dataclass(frozen=True, eq=False)
class Frozen:
    """What a detector computes from one image before its box head.

    Attributes:
        features: The levels of the feature pyramid, each ``1 x c x h x w``.
        size: Height and width of the scaled image.
        target: Ground truth of the scaled image, as torchvision's detectors take it.
        sampled_from: Region proposals from which the training loss samples, ``p x 4``; often more than for detection.
        proposals: Region proposals for detection, ``p x 4``.
    """

    features: dict[str, Tensor]
    size: tuple[int, int]
    target: dict[str, Tensor]
    sampled_from: Tensor
    proposals: Tensor


class FrozenFeatures:
    """A toolkit for one adapted detector that runs only its box head, on features and proposals kept in memory.

    They are computed when an image is first met, by itself. Detections, proposals and the gradient of the loss are
    those of the detector without this memory, but for the padding where it gets images of different sizes together.

    An image of ``h x w`` pixels (as the detector scales them, and rounded up to multiples of 32) with a pyramid of
    c channels takes ``4 c h w (1/16 + 1/64 + ...)`` bytes where the finest level has stride 4: 128 x 128 pixels and 64
    channels take 0.35 MB, 800 x 1216 pixels and 256 channels 83 MB.

    Args:
        toolkit: Where the detector is from.
        adapter: The adapter that is attached to it, to layers below ``roi_heads`` only.

    Raises:
        AdapterError: The adapter modulates another layer, so that features or proposals depend on phi.
    """

    def __init__(self, toolkit: TorchvisionToolkit, adapter: Adapter) -> None:
        for layer in adapter.layers:
            if not layer.startswith(BOX_HEAD):
                raise AdapterError(
                    f"the adapter modulates {layer!r}, so features or proposals change with phi; only layers below"
                    f" {BOX_HEAD!r} leave them as they are"
                )
        self.toolkit, self.model = toolkit, adapter.model
        self.known: dict[Example, Frozen] = {}

    def build(self, classes: int, seed: int) -> nn.Module:
        """Return a new detector; it is none that this memory is of."""
        return self.toolkit.build(classes, seed)

    def loss(self, model: nn.Module, batch: Sequence[Example]) -> Tensor:
        """Return the sum of the losses of classes and boxes, a scalar.

        The proposals' losses, which `TorchvisionToolkit.loss` adds, are left out: phi does not change them, so the
        gradient in phi is the same. The samples are drawn from torch's global stream.

        Raises:
            FloatingPointError: The loss is not finite.
        """
        frozen = self._frozen(model, batch)
        heads: Any = model.roi_heads
        with in_mode(model, training=True):
            proposals, targets = [each.sampled_from for each in frozen], [each.target for each in frozen]
            chosen, _, labels, deltas = heads.select_training_samples(proposals, targets)
            return total(self.toolkit.head_losses(model, _pool(heads, frozen, chosen), labels, deltas))

    def detect(self, model: nn.Module, batch: Sequence[Example]) -> list[Detections]:
        """Return what the detector finds in each image, best first, in pixels of that image, without gradients."""
        frozen = self._frozen(model, batch)
        detector: Any = model
        heads = detector.roi_heads
        proposals, sizes = [each.proposals for each in frozen], [each.size for each in frozen]
        with evaluating(model), torch.no_grad():
            logits, deltas = heads.box_predictor(heads.box_head(_pool(heads, frozen, proposals)))
            found = zip(*heads.postprocess_detections(logits, deltas, proposals, sizes), strict=True)
            scaled = [dict(zip(("boxes", "scores", "labels"), each, strict=True)) for each in found]
            in_pixels = detector.transform.postprocess(scaled, sizes, [item.image.shape[1:] for item in batch])
        return [to_detections(each) for each in in_pixels]

    def propose(self, model: nn.Module, batch: Sequence[Example]) -> list[Tensor]:
        """Return the region proposals of each image, ``p x 4``, best first, without gradients."""
        return [
            to_pixels(frozen.proposals, frozen.size, example)
            for frozen, example in zip(self._frozen(model, batch), batch, strict=True)
        ]

    def _frozen(self, model: nn.Module, batch: Sequence[Example]) -> list[Frozen]:
        if model is not self.model:
            raise AdapterError("the features in memory are those of another model; make FrozenFeatures for this one")
        for example in batch:
            if example not in self.known:
                self.known[example] = _compute(model, example)
        return [self.known[example] for example in batch]


@torch.no_grad()
def _compute(detector: Any, example: Example) -> Frozen:
    inputs, truth = images_of(detector, [example]), targets_of(detector, [example])
    # In training mode the proposals' network also samples its loss: the caller's stream must not notice.
    with evaluating(detector), seeded_streams(0, inputs[0].device):
        images, targets = detector.transform(inputs, truth)
        features = detector.backbone(images.tensors)
        (proposals,), _ = detector.rpn(images, features)
        with in_mode(detector.rpn, training=True):
            (sampled_from,), _ = detector.rpn(images, features, targets)
    return Frozen(features, images.image_sizes[0], targets[0], sampled_from, proposals)


def _pool(heads: Any, frozen: Sequence[Frozen], boxes: Sequence[Tensor]) -> Tensor:
    """Return the features of boxes of all images, ``p x c x h x w``; image by image, so that none is padded."""
    pooled = [heads.box_roi_pool(each.features, [own], [each.size]) for each, own in zip(frozen, boxes, strict=True)]
    return torch.cat(pooled)
