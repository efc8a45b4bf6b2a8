"""What phi can't change in a detector if only its box head is modulated, computed once for each image."""

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from metricopt_ext.adapters.adapter import Adapter
from metricopt_ext.detection.records import Detections
from metricopt_ext.detection.toolkit import Example
from metricopt_ext.detection.torchvision_toolkit import (
    TorchvisionToolkit,
    features_of,
    has_proposals,
    images_of,
    targets_of,
    to_detections,
    total,
)
from metricopt_ext.errors import AdapterError
from metricopt_ext.utils.modes import evaluating, in_mode
from metricopt_ext.utils.seeding import seeded_streams
from metricopt_ext.utils.weights import where_and_how_often

BOX_HEAD = "roi_heads."


@dataclass(frozen=True, eq=False)
class Proposals:
    """What detection in one image needs from the layers before the box head.

    Attributes:
        boxes: Region proposals of the scaled image, ``p x 4``, best first.
        pooled: Their features, ``p x c x 7 x 7``.
        size: Height and width of the scaled image.
    """

    boxes: Tensor
    pooled: Tensor
    size: tuple[int, int]


@dataclass(frozen=True, eq=False)
class Candidates:
    """What the box head's loss on one image is computed from: the boxes that it samples.

    Attributes:
        pooled: Features of region proposals and true boxes, ``p x c x 7 x 7``.
        labels: Their classes, ``p``: 0 for background, -1 for boxes that are never sampled.
        deltas: Their regression targets, ``p x 4``.
    """

    pooled: Tensor
    labels: Tensor
    deltas: Tensor


@dataclass(eq=False)
class Memory:
    """What is kept of one model, as long as its layers before the box head stay as they are.

    Attributes:
        state: What `state_before_head` was when it was computed.
        kept: For ``"detection"`` the `Proposals` of each image, for the ``"loss"`` its `Candidates`.
        bytes: Memory that they take, by use.
    """

    state: tuple[Any, ...]
    kept: dict[str, dict[Example, Any]] = field(default_factory=lambda: {"detection": {}, "loss": {}})
    bytes: dict[str, int] = field(default_factory=lambda: {"detection": 0, "loss": 0})


class FrozenFeatures:
    """A toolkit for adapted detectors that runs only their box head, on pooled features kept in memory.

    They are computed when a model first sees an image, separately: once for detection, once for the loss, and anew if
    a layer before the box head changed (re-estimated BatchNorm, loaded weights). Detections, proposals and the
    gradient of the loss are the same as without this memory, except for the padding if the detector gets images of
    different sizes together. It serves any model with an adapter in the box head alone, such as the copy that a start
    with other buffers is tried on, and forgets it when the model is gone; any other detector is run whole.

    With c channels in the feature pyramid, an image with p proposals takes ``196 c p`` bytes for detection, and as many
    for p candidates of the loss: 1.3 MB for 64 channels and 100 proposals, 50 MB for the 256 channels and 1000
    proposals of torchvision's own detectors, which have up to 2000 for the loss. What no longer fits is recomputed
    whenever it is needed, to the same numbers; a warning says so once.

    Args:
        toolkit: The detectors' toolkit.
        adapter: An adapter of one of them, attached to layers below ``roi_heads`` only.
        gib: Maximum memory for the features, in GiB, on the detectors' device; at least 0. Half of it is for detection
            and half for the loss, which sees most images rarely.

    Raises:
        AdapterError: The adapter modulates another layer, so that features or proposals depend on phi.
    """

    def __init__(self, toolkit: TorchvisionToolkit, adapter: Adapter, gib: float = 4.0) -> None:
        for layer in adapter.layers:
            if not layer.startswith(BOX_HEAD):
                raise AdapterError(
                    f"the adapter modulates {layer!r}, so features or proposals change with phi; only layers below"
                    f" {BOX_HEAD!r} leave them unchanged"
                )
        self.toolkit = toolkit
        self.build, self.film_layers = toolkit.build, toolkit.film_layers  # what this memory does not change
        self.inputs, self.export, self.inference = toolkit.inputs, toolkit.export, toolkit.inference
        self.memories: WeakKeyDictionary[nn.Module, Memory] = WeakKeyDictionary()
        self.gib, self.warned = gib, False

    def loss(self, model: nn.Module, batch: Sequence[Example]) -> Tensor:
        """Return the sum of the losses of classes and boxes, a scalar.

        The proposals' losses, which `TorchvisionToolkit.loss` adds, are left out: phi does not change them, so the
        gradient with respect to phi is the same. The samples are drawn from torch's global stream.

        Raises:
            FloatingPointError: The loss is not finite.
        """
        if not served(model):
            return self.toolkit.loss(model, batch)
        heads: Any = model.roi_heads
        candidates = self._remembered("loss", model, batch)
        sampled = heads.subsample([each.labels for each in candidates])
        chosen = list(zip(candidates, sampled, strict=True))
        pooled = torch.cat([each.pooled[index] for each, index in chosen])
        labels = [each.labels[index] for each, index in chosen]
        deltas = [each.deltas[index] for each, index in chosen]
        with in_mode(model, training=True):
            return total(self.toolkit.head_losses(model, pooled, labels, deltas))

    def detect(self, model: nn.Module, batch: Sequence[Example]) -> list[Detections]:
        """Return what the detector finds in each image, best first, in pixels of that image, without gradients."""
        if not served(model):
            return self.toolkit.detect(model, batch)
        detector: Any = model
        heads = detector.roi_heads
        proposals = self._remembered("detection", model, batch)
        boxes, sizes = [each.boxes for each in proposals], [each.size for each in proposals]
        with evaluating(model), torch.no_grad():
            logits, deltas = heads.box_predictor(heads.box_head(torch.cat([each.pooled for each in proposals])))
            found = zip(*heads.postprocess_detections(logits, deltas, boxes, sizes), strict=True)
            scaled = [dict(zip(("boxes", "scores", "labels"), each, strict=True)) for each in found]
            in_pixels = detector.transform.postprocess(scaled, sizes, [example.size for example in batch])
        return [to_detections(each, self.toolkit.labels) for each in in_pixels]

    def _memory(self, model: nn.Module) -> Memory:
        """Return a model's memory, an empty one if it is new or has changed."""
        memory, state = self.memories.get(model), state_before_head(model)
        if memory is None or memory.state != state:
            memory = self.memories[model] = Memory(state)
        return memory

    def _remembered(self, use: str, model: nn.Module, batch: Sequence[Example]) -> list[Any]:
        """Return what a use needs of each image, `Proposals` or `Candidates`."""
        memory = self._memory(model)
        kept = memory.kept[use]
        compute: Any = partial(_candidates, own=self.toolkit.labels) if use == "loss" else _proposals
        found = []
        for example in batch:
            each: Any = kept.get(example)
            if each is None:
                each = compute(model, example)
                self._keep(memory, use, example, each)
            found.append(each)
        return found

    def _keep(self, memory: Memory, use: str, example: Example, computed: Proposals | Candidates) -> None:
        size = sum(value.nbytes for value in vars(computed).values() if isinstance(value, Tensor))
        used = sum(each.bytes[use] for each in self.memories.values())
        if used + size <= self.gib * 2**30 / 2:
            memory.kept[use][example] = computed
            memory.bytes[use] += size
        elif not self.warned:
            self.warned = True
            warnings.warn(
                f"the features of {len(memory.kept[use])} images for {use} fill their half of"
                f" adapter.keep_gib={self.gib}; those of further images are computed whenever they are needed",
                stacklevel=4,
            )


def served(model: nn.Module) -> bool:
    """Whether `FrozenFeatures` computes what a model finds, which settings of inference may have find otherwise."""
    return "forward" not in vars(model) and acts_in_box_head_alone(model)


def acts_in_box_head_alone(model: nn.Module) -> bool:
    """Whether phi acts in a model's box head alone, and what is before that is not trained."""
    try:
        layers = Adapter(model).layers
    except AdapterError:
        return False
    in_box_head = has_proposals(model) and all(layer.startswith(BOX_HEAD) for layer in layers)
    return in_box_head and not any(tensor.requires_grad for tensor in before_head(model))


def state_before_head(model: Any) -> tuple[Any, ...]:
    """Return where the tensors before the box head lie and how often each was changed in place, and what is set there.

    Set are the size to which images are scaled, and how many proposals there are (`detection_settings`).
    """
    transform, rpn = model.transform, model.rpn
    sizes = tuple(transform.min_size), transform.max_size, transform.fixed_size
    counts = [tuple(sorted(getattr(rpn, name, {}).items())) for name in ("_pre_nms_top_n", "_post_nms_top_n")]
    return (*map(where_and_how_often, before_head(model)), *sizes, *counts)


def before_head(model: Any) -> Iterator[Tensor]:
    """Go through parameters and buffers of the layers before the box head."""
    return chain.from_iterable(
        chain(part.parameters(), part.buffers()) for part in (model.transform, model.backbone, model.rpn)
    )


@torch.no_grad()
def _proposals(detector: Any, example: Example) -> Proposals:
    with evaluating(detector):
        images, _ = detector.transform(images_of(detector, [example]))
        features = features_of(detector, images)
        (boxes,), _ = detector.rpn(images, features)
        pooled = detector.roi_heads.box_roi_pool(features, [boxes], images.image_sizes)
    return Proposals(boxes, pooled, images.image_sizes[0])


@torch.no_grad()
def _candidates(detector: Any, example: Example, own: Sequence[int]) -> Candidates:
    heads, inputs = detector.roi_heads, images_of(detector, [example])
    # In training mode the region proposal network also samples for its own loss; the caller's stream is unaffected.
    with evaluating(detector), seeded_streams(0, inputs[0].device):
        images, (target,) = detector.transform(inputs, targets_of(detector, [example], own))
        features = features_of(detector, images)
        with in_mode(detector.rpn, training=True):
            proposals, _ = detector.rpn(images, features, [target])
        boxes = heads.add_gt_proposals(proposals, [target["boxes"]])
        matches, labels = heads.assign_targets_to_proposals(boxes, [target["boxes"]], [target["labels"]])
        pooled = heads.box_roi_pool(features, boxes, images.image_sizes)
    # An image without boxes has only background, whose targets are not used.
    truth = target["boxes"] if len(target["boxes"]) else target["boxes"].new_zeros(1, 4)
    return Candidates(pooled, labels[0], heads.box_coder.encode([truth[matches[0]]], boxes)[0])
