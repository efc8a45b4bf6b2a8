"""Torchvision's detectors as a `Toolkit`."""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from metricopt_ext.adapters.adapter import Adapter
from metricopt_ext.detection.ap_loss import ClassificationLoss, ap_loss
from metricopt_ext.detection.records import Detections, inside
from metricopt_ext.detection.shapes import masks_from, pixels_in
from metricopt_ext.detection.tables import Kind
from metricopt_ext.detection.toolkit import Example, images_in, layers_at
from metricopt_ext.detection.torchvision_models import ONE_STAGE, SMALL, STANDARD, build_small, build_standard
from metricopt_ext.errors import ConfigError, DataError, MetricError
from metricopt_ext.utils.extras import install
from metricopt_ext.utils.files import write_atomically
from metricopt_ext.utils.modes import evaluating, in_mode
from metricopt_ext.utils.seeding import generator, seeded_streams

try:
    from torchvision.models.detection.generalized_rcnn import GeneralizedRCNN
    from torchvision.models.detection.roi_heads import RoIHeads, fastrcnn_loss
    from torchvision.models.detection.transform import GeneralizedRCNNTransform
except ImportError as error:
    raise ImportError(f"torchvision's detectors need torchvision: {install('torchvision')}") from error

# Where FiLM can act, for attach_film(layers=...); only what matches a given model is used. A change of contrast
# or noise reaches the early layers first. The last four leave features and proposals unchanged. "head" is that of a
# detector of one stage, an SSD's with its predictor.
PLACEMENTS: dict[str, tuple[str, ...]] = {
    "backbone": ("backbone.body.*", "backbone.features.*", "backbone.extra.*"),
    "early": (
        *("backbone.body.bn1", "backbone.body.layer1.*"),
        *("backbone.body.0.*", "backbone.body.1.*"),
        *("backbone.features.0", "backbone.features.2", "backbone.features.0.0.*", "backbone.features.0.1.*"),
    ),
    "fpn": ("backbone.fpn.layer_blocks.*",),
    "rpn": ("rpn.head.conv.*",),
    "head": ("head.*.conv.*", "head.*.module_list.*"),
    "roi_head": ("roi_heads.box_head.*",),
    "predictor": ("roi_heads.box_predictor.*", "head.*.cls_logits", "head.*.bbox_*"),
    "mask_head": ("roi_heads.mask_head.*",),
}

MASKS = "maskrcnn"  # how the names of detectors begin that find masks

# Outputs of torchvision's detectors that were trained on COCO, with the background and the ids that COCO does not use.
COCO_OUTPUTS = 91


@dataclass(frozen=True)
class TorchvisionToolkit:
    """Torchvision's detectors; the attributes are their settings.

    Attributes:
        name: One of `STANDARD`, as in torchvision, or for small images ``small_fpn``, a Faster R-CNN. Of Mask R-CNNs
            only the boxes are trained, and detected, but for their ``kind``.
        min_size: Shorter side in pixels to which the network scales its images (800 in torchvision's own training) ...
        max_size: ... unless the longer side would then exceed this (1333). Also the small detector's largest anchor.
            SSDs have a size of their own.
        width: Channels of the small detector's feature pyramid.
        head: Channels of the small detector's box head.
        score_threshold: Lowest confidence of a detection, from 0 to 1.
        proposals: Maximum number of proposals per image to detect boxes in, from twice as many per level of the pyramid
            before NMS; 0 for the detector's own numbers (1000 from 1000, the small one 100 from 200). The loss has its
            own. Detectors of one stage have none.
        weights: File of torchvision's weights for one of `STANDARD` to start from, trained on COCO or trained further
            from these.
        entry: The state dict's key in that file; empty to find it.
        strict_weights: Whether the predictor of classes is taken from there too; False if the detector will be trained,
            for other classes.
        classification_loss: Of the box head: the detector's own ``cross_entropy``, or ``ap`` (`ap_loss.ap_loss`), which
            ranks the proposals that are sampled from a batch. Detectors of one stage have their own only.
        labels: The detector's own label of each class, from 1, if it has others too: COCO's 91 outputs are for its 80
            categories (`coco_outputs`). Empty: they count the classes.
        kind: What is trained and detected besides boxes: ``"segm"``, the masks of a Mask R-CNN, which objects then
            have as ``shapes``, or nothing, ``"bbox"``.

    Raises:
        ConfigError: There is no such detector, or a setting is impossible.
    """

    name: str = "small_fpn"
    min_size: int = 128
    max_size: int = 128
    width: int = 64
    head: int = 256
    score_threshold: float = 0.05
    proposals: int = 0
    weights: str = ""
    entry: str = ""
    strict_weights: bool = False
    classification_loss: ClassificationLoss = "cross_entropy"
    labels: tuple[int, ...] = ()
    kind: Kind = "bbox"

    def __post_init__(self) -> None:
        if self.name not in (*STANDARD, SMALL):
            raise ConfigError(f"no detector is named {self.name!r}; the choices are {', '.join((*STANDARD, SMALL))}")
        if self.kind != "bbox" and not self.name.startswith(MASKS):
            able = ", ".join(name for name in STANDARD if name.startswith(MASKS))
            raise ConfigError(f"{self.name} finds no masks; detectors that do are {able}")
        check_loss_of(self.kind, self.classification_loss)
        if self.weights and self.name not in STANDARD:
            raise ConfigError(f"torchvision has no weights for {self.name}, only for {', '.join(STANDARD)}")
        if not 0 < self.min_size <= self.max_size:
            raise ConfigError(f"min_size={self.min_size} must be above 0 and at most max_size={self.max_size}")
        if self.width < 1 or self.head < 1:
            raise ConfigError(f"width={self.width} and head={self.head} must be at least 1")
        if self.classification_loss not in get_args(ClassificationLoss):
            raise ConfigError(f"classification_loss={self.classification_loss!r} must be 'cross_entropy' or 'ap'")
        if self.proposals < 0:
            raise ConfigError(f"proposals={self.proposals} must be at least 1, or 0 for the detector's own number")
        if self.name in ONE_STAGE and (self.proposals or self.classification_loss == "ap"):
            raise ConfigError(
                f"{self.name} detects in one stage, without proposals and a box head: it takes neither"
                f" proposals={self.proposals or 'N'} nor classification_loss='ap'; leave them out"
            )
        if not 0 <= self.score_threshold <= 1:
            raise ConfigError(f"score_threshold={self.score_threshold} must be from 0 to 1")

    def build(self, classes: int, seed: int) -> nn.Module:
        """Return a new detector for this number of classes, without background, its weights drawn from the seed.

        Raises:
            DataError: The weights' file can't be read, or belongs to another detector.
        """
        if classes < 1:
            raise ConfigError(f"a detector needs at least one class, not {classes}")
        if self.labels:
            classes = COCO_OUTPUTS - 1
        size = self.min_size, self.max_size
        detector: Any
        with seeded_streams(generator(seed, "weights").initial_seed(), torch.device("cpu")):
            if self.name in STANDARD:
                detector = build_standard(
                    self.name, classes, *size, self.score_threshold, self.weights, self.strict_weights, self.entry
                )
            else:
                detector = build_small(classes, *size, self.score_threshold, self.width, self.head)
        if self.proposals:
            detector.rpn._pre_nms_top_n["testing"] = 2 * self.proposals
            detector.rpn._post_nms_top_n["testing"] = self.proposals
        return detector  # type: ignore[no-any-return]

    def loss(self, model: nn.Module, batch: Sequence[Example]) -> Tensor:
        """Return the sum of the detector's losses on a batch, a scalar.

        In two stages they are those of objectness, proposals, classes and boxes; detectors of one stage have their own.
        What is sampled at random (anchors, proposals) is drawn from torch's global stream. Boxes are clipped to their
        images. Difficult and crowd boxes are left out, so anything on them counts as background; `Detectron2Toolkit`
        learns from difficult ones, as Detectron2 does. So are boxes without area in their image. Where masks
        are judged it is torchvision's own sum, theirs included.

        Raises:
            FloatingPointError: The loss is not finite.
        """
        detector: Any = model
        with in_mode(model, training=True):
            if not has_proposals(model) or self.kind != "bbox":
                return total(detector(images_of(model, batch), targets_of(model, batch, self.labels, self.kind)))
            images, targets = detector.transform(images_of(model, batch), targets_of(model, batch, self.labels))
            features = features_of(detector, images)
            proposals, losses = detector.rpn(images, features, targets)
            # A mask head insists on masks, but only boxes are trained.
            targets = [{**target, "masks": None} for target in targets]
            chosen, _, labels, deltas = detector.roi_heads.select_training_samples(proposals, targets)
            pooled = detector.roi_heads.box_roi_pool(features, chosen, images.image_sizes)
            losses |= self.head_losses(model, pooled, labels, deltas)
        return total(losses)

    def head_losses(
        self, model: nn.Module, pooled: Tensor, labels: list[Tensor], deltas: list[Tensor]
    ) -> dict[str, Tensor]:
        """Return the losses of classes and boxes by name, scalars.

        Args:
            model: The detector, in training mode.
            pooled: Features of the sampled proposals of all images, ``p x c x h x w``.
            labels: Their classes in each image, 0 for background.
            deltas: Their regression targets in each image, ``p_i x 4``.
        """
        heads: Any = model.roi_heads
        logits, predicted = heads.box_predictor(heads.box_head(pooled))
        classification, regression = fastrcnn_loss(logits, predicted, labels, deltas)
        if self.classification_loss == "ap":
            # Log-probabilities rank like the detector's scores, but have a slope where those are almost 0 or 1.
            classification = ap_loss(F.log_softmax(logits, dim=1)[:, 1:], torch.cat(labels) - 1)
        return {"loss_classifier": classification, "loss_box_reg": regression}

    def detect(self, model: nn.Module, batch: Sequence[Example]) -> list[Detections]:
        """Return what the detector finds in each image, best first, in pixels of that image, without gradients."""
        with evaluating(model), torch.no_grad():
            return [to_detections(found, self.labels, self.kind) for found in model(images_of(model, batch))]

    def film_layers(self, model: nn.Module, placements: Sequence[str]) -> list[str]:
        """Return the patterns of layers that some placements stand for, for `attach_film`.

        Raises:
            ConfigError: There is no such placement, or not in this detector.
        """
        return layers_at(model, placements, PLACEMENTS)

    def inputs(self, model: nn.Module, batch: Sequence[Example]) -> list[Tensor]:
        """Return what the model's ``forward`` takes in evaluation mode."""
        return images_of(model, batch)

    def inference(self, model: nn.Module) -> dict[str, float]:
        """Return what detections depend on beside the weights, of what the model has of torchvision's attributes."""
        owner, transform = getattr(model, "roi_heads", model), getattr(model, "transform", None)
        names = {"score_thresh": "score_thresh", "detections": "detections_per_img"}
        found = {name: getattr(owner, attribute, None) for name, attribute in names.items()}
        if isinstance(transform, GeneralizedRCNNTransform):
            sides = transform.fixed_size or (transform.min_size[-1], transform.max_size)
            found |= {"min_size": min(sides), "max_size": max(sides)}
        return {name: value for name, value in found.items() if isinstance(value, int | float)}

    def export(self, model: nn.Module, path: str | Path) -> None:
        """Merge phi into a copy of an adapted model and write its state dict, for ``torch.load`` and torchvision.

        Raises:
            AdapterError: The model has no adapter.
        """
        buffer = io.BytesIO()
        torch.save(Adapter(model).merged_state_dict(), buffer)
        write_atomically(path, buffer.getvalue())


def check_loss_of(kind: Kind, classification_loss: str) -> None:
    """Reject the AP loss where masks are trained, by torchvision's own code.

    Raises:
        ConfigError: It is asked for.
    """
    if kind != "bbox" and classification_loss == "ap":
        raise ConfigError(
            "classification_loss='ap' is for metrics of boxes; masks have torchvision's own losses: leave it out"
        )


def has_proposals(model: nn.Module) -> bool:
    """Whether a detector has torchvision's two stages: it detects in proposals, by a box head.

    One whose own code does so in another way is computed as a whole.
    """
    parts = ((model, GeneralizedRCNN), (getattr(model, "roi_heads", None), RoIHeads))
    return all(isinstance(part, kind) and type(part).forward is kind.forward for part, kind in parts)


def features_of(detector: Any, images: Any) -> dict[str, Tensor]:
    """Return the backbone's maps of a batch by name, as torchvision's detectors take them also where there is one."""
    features = detector.backbone(images.tensors)
    return {"0": features} if isinstance(features, Tensor) else features


def total(losses: dict[str, Tensor]) -> Tensor:
    """Return the sum of named losses, a scalar.

    Raises:
        FloatingPointError: One of them is not finite.
    """
    for name, value in losses.items():
        if not value.isfinite():
            raise FloatingPointError(
                f"the detector's {name} is {float(value.detach())}; lower the lr, or check its weights"
            )
    return torch.stack(list(losses.values())).sum()


def to_detections(found: dict[str, Tensor], labels: Sequence[int] = (), kind: Kind = "bbox") -> Detections:
    """Return torchvision's detections in an image as a record; torchvision's label 0 is the background.

    Detectors of one stage have an output for it too, which is never trained; what it detects is left out.

    Args:
        found: The boxes, ``n x 4``, scores and labels, ``n``, perhaps masks, ``n x 1 x h x w`` in [0, 1], of which half
            is inside.
        labels: The detector's label of each class; what it finds of others is left out. Empty: they count the classes.
        kind: What is taken besides boxes.

    Raises:
        MetricError: It found no masks.
    """
    classes = found["labels"] - 1
    if labels:
        table = classes.new_full((COCO_OUTPUTS,), -1)
        table[list(labels)] = torch.arange(len(labels)).to(table)
        classes = table[found["labels"]]
    thing = classes >= 0
    boxes, scores = (found[key][thing].cpu() for key in ("boxes", "scores"))
    return Detections(boxes, scores, classes[thing].cpu(), shapes=_shapes_of(found, thing, kind))


def _shapes_of(found: dict[str, Tensor], thing: Tensor, kind: Kind) -> list[Any] | None:
    if kind == "bbox":
        return None
    given = found.get("masks")
    if given is None or given.dim() != 4:
        what = "none" if given is None else f"a tensor of shape {tuple(given.shape)}"
        raise MetricError(f"the detector gave {what} as masks; to be judged they must be n x 1 x h x w")
    return list(masks_from((given[thing][:, 0] >= 0.5).numpy(force=True)))


def images_of(model: nn.Module, batch: Sequence[Example]) -> list[Tensor]:
    """Return the images as torchvision takes them, each ``3 x h x w``, floats in [0, 1] like the model's."""
    like = next(model.parameters())
    return [image.to(like) / 255 for image in images_in(batch)]


def targets_of(
    model: nn.Module, batch: Sequence[Example], own: Sequence[int] = (), kind: Kind = "bbox"
) -> list[dict[str, Tensor]]:
    """Return the ground truth as torchvision takes it: clipped boxes, without difficult, crowd and outside ones.

    Args:
        model: The detector.
        batch: The images.
        own: The detector's label of each class; empty: they count the classes from 1.
        kind: What objects have besides boxes, in their ``shapes``.

    Raises:
        DataError: An image's objects are without it.
    """
    like = next(model.parameters())
    targets = []
    for example in batch:
        height, width = example.size
        clipped, within = inside(example.truth.boxes.to(like.dtype), width, height)
        kept = within & ~(example.truth.difficult | example.truth.crowd)
        boxes, classes = clipped[kept], example.truth.labels[kept].long()
        labels = torch.tensor(own)[classes] if own else classes + 1
        target = {"boxes": boxes.to(like).view(-1, 4), "labels": labels.to(like.device)}
        if kind != "bbox":
            if example.truth.shapes is None:
                raise DataError(f"{example.truth.path} has objects without masks, which the loss is of, too")
            shapes = [shape for shape, is_kept in zip(example.truth.shapes, kept.tolist(), strict=True) if is_kept]
            target["masks"] = torch.from_numpy(pixels_in(shapes, height, width)).to(like.device, torch.uint8)
        targets.append(target)
    return targets
