"""What phi can't change in torchvision's R-CNNs, computed once for each image: the backbone's maps, and proposals."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from metricopt_ext.adapters.adapter import Adapter
from metricopt_ext.detection.torchvision_toolkit import has_proposals
from metricopt_ext.utils.kept_outputs import KeptOutputs, circumstances, digest_of, digest_of_model
from metricopt_ext.utils.modes import trains

BACKBONE, PROPOSALS = "backbone", "rpn"


def keep_maps(model: Any, gib: float) -> list[str]:
    """Have an adapted R-CNN compute once, for images that it sees again, what phi leaves as it is.

    These are the backbone's maps where no layer of it is modulated, and proposals where none of the RPN is either. They
    are kept in evaluation mode without gradients, by the scaled images, so that what it finds, masks too,
    is the same to the last bit. Anything else that changes before phi, such as weights or BatchNorm's statistics, has
    them computed anew. Copies of the model share what is kept.

    Args:
        model: The detector, with an adapter.
        gib: Memory for what is kept, in GiB; what no longer fits is computed whenever it is needed.

    Returns:
        Names of the parts whose output is kept; none for a detector of one stage.
    """
    kept, found = KeptOutputs(gib, room=1.0), list[str]()
    for name in (BACKBONE, PROPOSALS):
        changed = any(layer.startswith(f"{name}.") for layer in Adapter(model).layers)
        if changed or not has_proposals(model):
            break  # and so is what follows changed
        part = getattr(model, name)
        keeping = KeptMaps(part, part.forward, kept) if name == BACKBONE else _Proposals(model, part.forward, kept)
        part.forward = keeping.forward
        found.append(name)
    if not found:
        tell_of_whole_passes(model, gib, "its code is not that of torchvision's two stages")
    return found


def tell_of_whole_passes(model: nn.Module, gib: float, why: str, *, keys: str = "adapter.keep_gib") -> None:
    """Warn where phi leaves the backbone as it is, and its maps are computed for each query all the same.

    Args:
        model: The detector, with an adapter.
        gib: Memory for what is kept, in GiB; of 0, nothing is said.
        why: Why nothing is kept.
        keys: The setting of ``gib``.
    """
    changed = any(f"{layer}.".startswith(f"{BACKBONE}.") for layer in Adapter(model).layers)
    if gib and hasattr(model, BACKBONE) and not changed:
        warnings.warn(
            f"the backbone's maps, which phi leaves as they are, are not kept of a {type(model).__name__}, as {why}:"
            f" each query computes them. With phi in the box head alone of a stock R-CNN they are; {keys}=0 turns"
            " caching and this warning off",
            stacklevel=3,
        )


class KeptMaps:
    """A backbone's forward pass, in place of its own.

    Args:
        backbone: The backbone.
        forward: Its own forward pass.
        kept: Keeps the maps.
    """

    def __init__(self, backbone: nn.Module, forward: Callable[..., Any], kept: KeptOutputs) -> None:
        self.backbone, self.before, self.kept = backbone, forward, kept

    def forward(self, x: Tensor) -> Any:
        """Return the maps of images, ``n x 3 x h x w``, by name, or one."""
        if torch.is_grad_enabled() or trains(self.backbone):
            return self.before(x)
        key = f"{digest_of_model(self.backbone)} {circumstances(x.device)}"
        maps = self.kept.of(key, lambda: self.before(x), part=digest_of([x]), if_room=True)
        return dict(maps) if isinstance(maps, dict) else maps


class _Proposals:
    """An RPN's forward pass, in place of its own."""

    def __init__(self, model: Any, forward: Callable[..., Any], kept: KeptOutputs) -> None:
        self.model, self.before, self.kept = model, forward, kept

    def forward(self, images: Any, features: dict[str, Tensor], targets: Any = None) -> Any:
        """Return the proposals of each image, and no losses."""
        if torch.is_grad_enabled() or trains(self.model) or targets is not None:
            return self.before(images, features, targets)
        digests = (digest_of_model(each) for each in (self.model.backbone, self.model.rpn))
        key = f"{' '.join(digests)} {circumstances(images.tensors.device)} {images.image_sizes}"
        part = digest_of([images.tensors])
        boxes = self.kept.of(key, lambda: self.before(images, features)[0], part=part, if_room=True)
        return list(boxes), {}
