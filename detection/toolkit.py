"""What the detection tools need from a toolkit of detectors; Detectron2's and torchvision's both provide it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn

from metricopt_ext.detection.records import Annotated, Detections
from metricopt_ext.errors import ConfigError
from metricopt_ext.utils.words import shortened


@dataclass(frozen=True, eq=False)
class Example:
    """One image in memory with its ground truth.

    Attributes:
        image: ``3 x h x w``, uint8 RGB. Its size may differ from the annotated file's, if boxes were scaled with it.
        truth: Its boxes, in pixels of this image.
    """

    image: Tensor
    truth: Annotated

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of the image."""
        height, width = self.image.shape[1:]
        return height, width

    def begin(self) -> None:
        """Begin to read the image, if it is not in memory."""


def images_in(batch: Sequence[Example]) -> list[Tensor]:
    """Return the images of a batch, ``3 x h x w`` each; those on disk are read at once, by several threads."""
    for each in batch:
        each.begin()
    return [each.image for each in batch]


class Toolkit(Protocol):
    """How to train, query and save detectors of one toolkit. A model is anything that its `build` returned."""

    def build(self, classes: int, seed: int) -> nn.Module:
        """Return a new detector for this number of classes, without background, its weights drawn from the seed."""

    def loss(self, model: nn.Module, batch: Sequence[Example]) -> Tensor:
        """Return the detector's training loss on a batch, a scalar.

        What it samples at random (anchors, proposals) is drawn from torch's global stream.
        """

    def detect(self, model: nn.Module, batch: Sequence[Example]) -> list[Detections]:
        """Return what the detector finds in each image, in pixels of that image, without gradients."""

    def film_layers(self, model: nn.Module, placements: Sequence[str]) -> list[str]:
        """Return the patterns of layers that some placements (``"roi_head"``, ...) stand for, for `attach_film`."""

    def inputs(self, model: nn.Module, batch: Sequence[Example]) -> Any:
        """Return what the model's ``forward`` takes in evaluation mode."""

    def inference(self, model: nn.Module) -> dict[str, float]:
        """Return what the model's detections depend on beside its weights, as far as it is known, by name.

        These are ``score_thresh``, ``detections`` (most in an image), and ``min_size`` and ``max_size`` (pixels of the
        sides to which images are scaled).
        """

    def export(self, model: nn.Module, path: str | Path) -> None:
        """Merge phi into a copy of an adapted model and write it as the toolkit's ordinary checkpoint, ``.pth``."""


def told_inference(settings: Mapping[str, float]) -> str:
    """Return in words what `Toolkit.inference` tells; empty if that is nothing.

    Examples:
        >>> told_inference({"score_thresh": 0.05, "detections": 100, "min_size": 120, "max_size": 160})
        'with score_thresh 0.05, at most 100 detections an image, images scaled to sides of 120 to 160'
    """
    said = {
        "score_thresh": "score_thresh {score_thresh:g}",
        "detections": "at most {detections} detections an image",
        "min_size": "images scaled to sides of {min_size} to {max_size}",
    }
    told = ", ".join(words.format(**settings) for name, words in said.items() if name in settings)
    return f"with {told}" if told else ""


def patterns_in(model: nn.Module, patterns: Iterable[str]) -> list[str]:
    """Return the patterns that match the name of a layer with a weight and a bias."""
    names = _layers(model)
    return [pattern for pattern in patterns if any(fnmatchcase(name, pattern) for name in names)]


def _layers(model: nn.Module) -> list[str]:
    modules = model.named_modules()
    return [name for name, each in modules if all(getattr(each, k, None) is not None for k in ("weight", "bias"))]


def layers_at(model: nn.Module, placements: Sequence[str], known: Mapping[str, Iterable[str]]) -> list[str]:
    """Return the patterns of a detector's layers that some placements stand for.

    Args:
        model: The detector.
        placements: Names.
        known: Patterns by name, for any of a toolkit's detectors.

    Raises:
        ConfigError: There is no such placement, or not in this detector.
    """
    present = {name: found for name, patterns in known.items() if (found := patterns_in(model, patterns))}
    for name in placements:
        if not present:
            raise ConfigError(
                f"placement={name!r}: {type(model).__name__} has no layers of the placements' names; set adapter.layers"
                f" to patterns of its own, {shortened(_layers(model))}"
            )
        if name not in present:
            choices = ", ".join(present)
            raise ConfigError(f"placement={name!r} is none of {type(model).__name__}'s; choose from {choices}")
    return [pattern for name in placements for pattern in present[name]]
