"""A detector of one's own, named as ``MODULE:FUNCTION``, as a `Toolkit`."""

import copy
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor, nn

from metricopt_ext.data.named_model import own_model
from metricopt_ext.detection.ap_loss import ClassificationLoss
from metricopt_ext.detection.records import Annotated, Detections
from metricopt_ext.detection.toolkit import Example
from metricopt_ext.detection.torchvision_toolkit import (
    TorchvisionToolkit,
    check_loss_of,
    has_proposals,
    images_of,
    targets_of,
    to_detections,
)
from metricopt_ext.errors import ConfigError, DataError
from metricopt_ext.utils.modes import evaluating, in_mode
from metricopt_ext.utils.seeding import generator, seeded_streams
from metricopt_ext.utils.words import brief, counted, shortened

FOUND = ("boxes", "scores", "labels")  # in each image
SIDE = 128  # pixels of the images that a new detector is tried on


@dataclass(frozen=True)
class OwnToolkit(TorchvisionToolkit):
    """Detectors with torchvision's interface, built by a function of the user's own, which decides on all else.

    In evaluation mode they map a list of images, each ``3 x h x w`` in [0, 1], to a list of dicts of ``boxes``,
    ``n x 4`` in pixels, ``scores`` and ``labels``, ``n``; in training mode, with a list of targets (``boxes`` and
    ``labels``), to a dict of losses. Labels count the classes from 1, and 0 is the background.

    Attributes:
        name: ``MODULE:FUNCTION``, called as ``FUNCTION(num_classes, **kwargs)``; as in torchvision, ``num_classes``
            counts the background too.
        folder: Where the module is, if it is not installed (`import_named`).
        kwargs: Further arguments.
        classes: Number of classes, without background; what has a label above it is refused. 0: not known.
    """

    folder: str = ""
    kwargs: dict[str, Any] = field(default_factory=dict, hash=False)
    classes: int = 0

    def __post_init__(self) -> None:
        if self.classification_loss not in get_args(ClassificationLoss):
            raise ConfigError(f"classification_loss={self.classification_loss!r} must be 'cross_entropy' or 'ap'")
        check_loss_of(self.kind, self.classification_loss)

    def build(self, classes: int, seed: int) -> nn.Module:
        """Return what the function builds for this number of classes, with weights drawn from the seed.

        Raises:
            ConfigError: The function fails, or what it returns has not torchvision's interface.
        """
        if classes < 1:
            raise ConfigError(f"a detector needs at least one class, not {classes}")
        with seeded_streams(generator(seed, "weights").initial_seed(), torch.device("cpu")):
            model = own_model(self.name, classes + 1, folder=self.folder, kwargs=self.kwargs)
            if self.classification_loss != "cross_entropy" and not has_proposals(model):
                raise ConfigError(
                    f"classification_loss={self.classification_loss!r} is for the box head of torchvision's"
                    f" GeneralizedRCNN; model.name={self.name} has a loss of its own"
                )
            self._try(copy.deepcopy(model))
        return model

    def detect(self, model: nn.Module, batch: Sequence[Example]) -> list[Detections]:
        """Return what the detector finds in each image, in pixels of that image, without gradients.

        A warning says if something has label 0, torchvision's background, which is left out.

        Raises:
            DataError: Something has the label of no class.
        """
        with evaluating(model), torch.no_grad():
            outputs = model(images_of(model, batch))
        labels = torch.cat([each["labels"] for each in outputs])
        if (labels == 0).any():
            warnings.warn(
                f"what model.name={self.name} finds with label 0, the background of torchvision's interface, is left"
                " out; labels of classes count from 1",
                stacklevel=2,
            )
        strange = labels[(labels < 0) | (labels > self.classes)] if self.classes else labels[labels < 0]
        if len(strange):
            raise DataError(
                f"model.name={self.name} finds the label {int(strange[0])}; those of the data's {self.classes} classes"
                f" are 1 to {self.classes}"
            )
        return [to_detections(each, kind=self.kind) for each in outputs]

    def _try(self, model: nn.Module) -> None:
        """Reject a model that has not torchvision's interface, in evaluation or in training.

        Raises:
            ConfigError: It has not.
        """
        no = torch.zeros(1, dtype=torch.bool)
        box, label = torch.tensor([[16.0, 24.0, 96.0, 80.0]]), torch.zeros(1, dtype=torch.int64)
        pixels = torch.randint(256, (3, SIDE, SIDE), dtype=torch.uint8)
        batch = [Example(pixels, Annotated("tried", Path("none"), SIDE, SIDE, box, label, no, no))] * 2
        try:
            with evaluating(model), torch.no_grad():
                outputs = model(images_of(model, batch))
                wrong = _wrong_outputs(outputs, len(batch))
            if not wrong and self.kind != "bbox" and any("masks" not in each for each in outputs):
                wrong = "finds no masks in an image; where these are judged it must"
            if not wrong and not has_proposals(model) and self.kind == "bbox":
                with in_mode(model, training=True):
                    wrong = _wrong_losses(model(images_of(model, batch), targets_of(model, batch)))
        except Exception as error:  # of any kind: it is the user's own code
            raise ConfigError(
                f"model.name={self.name} does not take a list of images, or in training of images and targets, as"
                f" torchvision's detectors do: {type(error).__name__}: {brief(error)}"
            ) from error
        if wrong:
            raise ConfigError(f"model.name={self.name} {wrong}, as torchvision's detectors do")


def _wrong_outputs(outputs: Any, images: int) -> str:
    """Return what of the interface outputs in evaluation mode lack; empty if nothing."""
    if not isinstance(outputs, list) or len(outputs) != images:
        what = counted(len(outputs), "output") if isinstance(outputs, list) else f"a {type(outputs).__name__}"
        return f"returns {what} for {images} images in evaluation mode; it must return a list of a dict each"
    for each in outputs:
        if not isinstance(each, dict) or not all(isinstance(each.get(name), Tensor) for name in FOUND):
            what = shortened(list(each)) if isinstance(each, dict) else f"a {type(each).__name__}"
            return f"finds {what} in an image; it must be a dict of tensors {', '.join(FOUND)}"
        boxes, scores, labels = (each[name] for name in FOUND)
        count = len(boxes)
        if boxes.shape != (count, 4) or scores.shape != (count,) or labels.shape != (count,):
            shapes = ", ".join(str(tuple(each[name].shape)) for name in FOUND)
            return f"finds {', '.join(FOUND)} of shapes {shapes}; they must be n x 4, n and n"
        if labels.is_floating_point():
            return f"finds labels of {labels.dtype}; they must be integers"
    return ""


def _wrong_losses(losses: Any) -> str:
    """Return what of the interface outputs in training mode lack; empty if nothing."""
    if not isinstance(losses, dict) or not losses:
        what = "no loss" if losses == {} else f"a {type(losses).__name__}"
        return f"returns {what} in training mode; it must return a dict of losses"
    strange = [name for name, value in losses.items() if not isinstance(value, Tensor) or value.dim()]
    return f"returns the loss {brief(strange[0])}, which is no scalar; each must be one" if strange else ""
