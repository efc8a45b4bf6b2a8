"""What phi can't change in Detectron2's detectors, computed once for each image: the backbone, and proposals."""

from collections.abc import Callable
from typing import Any

import torch
from detectron2.modeling import GeneralizedRCNN, ProposalNetwork, RetinaNet
from detectron2.modeling.proposal_generator import RPN
from detectron2.structures import Boxes, ImageList, Instances
from torch import Tensor, nn

from metricopt_ext.adapters.adapter import Adapter
from metricopt_ext.detection.kept_maps import KeptMaps, tell_of_whole_passes
from metricopt_ext.utils.kept_outputs import KeptOutputs, circumstances, digest_of, digest_of_model
from metricopt_ext.utils.modes import trains

BACKBONE, PROPOSALS = "backbone", "proposal_generator"
OF_PROPOSALS = {"proposal_boxes", "objectness_logits"}


def keep_features(model: nn.Module, gib: float) -> list[str]:
    """Have an adapted detector compute once, for images that it sees again, what phi leaves as it is.

    These are the backbone's maps where no layer of it is modulated, and proposals where none of the RPN is either. They
    are kept in evaluation mode without gradients, by the images as the model is given them, so that what it finds is
    the same to the last bit. Anything else that changes before phi, such as weights or BatchNorm's statistics, has them
    computed anew. Copies of the model share what is kept.

    Args:
        model: The detector, with an adapter.
        gib: Memory for what is kept, in GiB; what no longer fits is computed whenever it is needed.

    Returns:
        Names of the parts whose output is kept.
    """
    parts = {RetinaNet: (BACKBONE,), GeneralizedRCNN: (BACKBONE, PROPOSALS), ProposalNetwork: (BACKBONE,)}
    known = next((names for kind, names in parts.items() if isinstance(model, kind)), ())
    layers = Adapter(model).layers
    kept, found = KeptOutputs(gib, room=1.0), list[str]()
    for name in known:
        if any(layer.startswith(f"{name}.") or layer == name for layer in layers):
            break  # and so is what follows changed
        part = getattr(model, name)
        if name == BACKBONE:
            part.forward = KeptMaps(part, part.forward, kept).forward
        elif type(part) is RPN:
            part.forward = _Proposals(model, part, part.forward, kept).forward
        else:
            continue
        found.append(name)
    if not known:
        tell_of_whole_passes(
            model, gib, "its architecture is unknown", keys="adapter.keep_gib or METRICOPT.SEARCH.KEEP_GIB"
        )
    return found


class _Proposals:
    """An RPN's forward pass, in place of its own."""

    def __init__(self, model: Any, rpn: nn.Module, forward: Callable[..., Any], kept: KeptOutputs) -> None:
        self.model, self.rpn, self.before, self.kept = model, rpn, forward, kept

    def forward(self, images: ImageList, features: dict[str, Tensor], truth: Any = None) -> Any:
        """Return the proposals of each image, and no losses."""
        if torch.is_grad_enabled() or trains(self.model) or truth is not None:
            return self.before(images, features, truth)
        digests = (digest_of_model(each) for each in (self.model.backbone, self.rpn))
        key = f"{' '.join(digests)} {circumstances(images.device)} {images.image_sizes}"
        made = self.kept.of(key, lambda: self._made(images, features), part=digest_of([images.tensor]), if_room=True)
        return [_instances(size, *each) for size, each in zip(images.image_sizes, made, strict=True)], {}

    def _made(self, images: ImageList, features: dict[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
        found, _ = self.before(images, features, None)
        assert all(set(each.get_fields()) == OF_PROPOSALS for each in found)
        return [(each.proposal_boxes.tensor, each.objectness_logits) for each in found]


def _instances(size: tuple[int, int], boxes: Tensor, logits: Tensor) -> Instances:
    found = Instances(size)
    found.proposal_boxes, found.objectness_logits = Boxes(boxes), logits
    return found
