"""Hugging Face's detectors of the DETR family as a `Toolkit`."""

import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from metricopt_ext.adapters.adapter import Adapter
from metricopt_ext.data.named_model import class_names_of, folder_weights, has_weights
from metricopt_ext.detection.records import Detections, inside
from metricopt_ext.detection.toolkit import Example, images_in, layers_at
from metricopt_ext.errors import ConfigError, DataError
from metricopt_ext.utils.files import write_atomically
from metricopt_ext.utils.modes import evaluating, in_mode
from metricopt_ext.utils.seeding import generator, seeded_streams
from metricopt_ext.utils.words import brief, shortened

try:
    from transformers import AutoConfig, AutoImageProcessor, AutoModelForObjectDetection
except ImportError as error:
    raise ImportError("Hugging Face's detectors need transformers: pip install transformers") from error

# Where FiLM can act; only what matches a given model is used. LayerNorms, and the backbone's norms, frozen or not.
PLACEMENTS: dict[str, tuple[str, ...]] = {
    "backbone": ("*backbone*norm*", "*backbone*bn*", "vit.*layernorm*"),
    "encoder": ("model.encoder.*norm*",),
    "decoder": ("model.decoder.*norm*",),
}


@dataclass(frozen=True)
class TransformersToolkit:
    """Detectors of ``AutoModelForObjectDetection``; the attributes are their settings.

    Images are prepared, and boxes read, by the folder's own image processor.

    Attributes:
        folder: What ``save_pretrained`` wrote of a model and of its image processor: ``config.json``,
            ``preprocessor_config.json`` and, unless the detector is to be trained from scratch, its weights.
        classes: Names of the data's classes, each a label of the folder's model (``id2label``), which may have others;
            what it finds of these is left out. Empty: the model's labels are the data's classes, in their order.
        score_threshold: Lowest confidence of a detection, from 0 to 1.

    Raises:
        ConfigError: There is no such folder, or a setting is impossible.
    """

    folder: str
    classes: tuple[str, ...] = ()
    score_threshold: float = 0.0

    def __post_init__(self) -> None:
        for file in ("config.json", "preprocessor_config.json"):
            if not Path(self.folder, file).is_file():
                raise ConfigError(f"{self.folder} has no {file}; write it by save_pretrained, of {self._whose(file)}")
        if not 0 <= self.score_threshold <= 1:
            raise ConfigError(f"score_threshold={self.score_threshold} must be from 0 to 1")

    @staticmethod
    def _whose(file: str) -> str:
        return "the model" if file == "config.json" else "the model's image processor"

    def build(self, classes: int, seed: int) -> nn.Module:
        """Return the folder's detector, or if it has no weights, one with weights drawn from the seed.

        Args:
            classes: Number of classes, without background.
            seed: Draws weights that the folder lacks.

        Raises:
            ConfigError: It is no detector of transformers.
            DataError: It is for other classes, or its weights can't be read.
        """
        try:
            options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
            config = AutoConfig.from_pretrained(self.folder, **options)
            if not has_weights(self.folder) and not self.classes:
                config.num_labels = classes
            with seeded_streams(generator(seed, "weights").initial_seed(), torch.device("cpu")):
                kind: Any = AutoModelForObjectDetection
                model: nn.Module = kind.from_config(config, trust_remote_code=False).float()
        except Exception as error:
            raise ConfigError(f"{self.folder} is no detector of transformers: {brief(error)}") from error
        labels = self.labels(model)
        if self.classes and len(self.classes) != classes:
            raise ConfigError(f"a detector of the classes {shortened(list(self.classes))} is not for {classes} classes")
        if not self.classes and len(labels) != classes:
            raise DataError(
                f"{self.folder} is for {len(labels)} classes, the data has {classes}; name the data's in classes, if"
                " they are among those of id2label"
            )
        if has_weights(self.folder):
            model.load_state_dict(folder_weights(self.folder, model))
        return model.eval()

    def labels(self, model: nn.Module) -> list[int]:
        """Return the model's label of each class.

        Raises:
            DataError: A class is none of its labels.
        """
        config: Any = model.config
        if not self.classes:
            return list(range(config.num_labels))
        known = {str(name): int(label) for label, name in config.id2label.items()}
        strange = [name for name in self.classes if name not in known]
        if strange:
            theirs = f"those of {self.folder}, {shortened(list(known))}"
            raise DataError(f"the data's classes {shortened(strange)} are not among {theirs}")
        return [known[name] for name in self.classes]

    def loss(self, model: nn.Module, batch: Sequence[Example]) -> Tensor:
        """Return the detector's own loss on a batch, a scalar: of classes, boxes and overlaps of matched queries.

        Boxes are clipped to their images. Difficult and crowd boxes, and those without area in their image, are left
        out.

        Raises:
            FloatingPointError: The loss is not finite.
        """
        targets = [self._target(model, example) for example in batch]
        with in_mode(model, training=True):
            value: Tensor = model(**self._inputs(model, batch), labels=targets).loss
        if not value.isfinite():
            raise FloatingPointError(f"the detector's loss is {float(value.detach())}; lower the lr")
        return value

    def detect(self, model: nn.Module, batch: Sequence[Example]) -> list[Detections]:
        """Return what the detector finds in each image, best first, in pixels of that image, without gradients."""
        sizes = [example.size for example in batch]
        with evaluating(model), torch.no_grad():
            outputs = model(**self._inputs(model, batch))
        found = self._processor.post_process_object_detection(outputs, threshold=0.0, target_sizes=sizes)
        return [self._detections(model, each) for each in found]

    def film_layers(self, model: nn.Module, placements: Sequence[str]) -> list[str]:
        """Return the patterns of layers that some placements stand for, for `attach_film`.

        Raises:
            ConfigError: There is no such placement, or not in this detector.
        """
        return layers_at(model, placements, PLACEMENTS)

    def inputs(self, model: nn.Module, batch: Sequence[Example]) -> Tensor:
        """Return what the model's ``forward`` takes in evaluation mode: the images as prepared, ``n x 3 x h x w``."""
        pixels: Tensor = self._inputs(model, batch)["pixel_values"]
        return pixels

    def for_classes(self, classes: Sequence[str]) -> "TransformersToolkit":
        """Return the toolkit for a set's classes, read by name if all are among those of ``id2label``.

        If none is, it is the same: the model's labels are then the classes, in their order, or as many are not there.

        Raises:
            ConfigError: Some of a trained model's are, or are written otherwise there: in order, labels would be taken
                for others.
        """
        known = class_names_of(self.folder)
        if set(classes) <= set(known):
            return replace(self, classes=tuple(classes))
        alike = {name.casefold() for name in known}
        if has_weights(self.folder) and any(name.casefold() in alike for name in classes):
            lacking = next(name for name in classes if name not in known)
            raise ConfigError(
                f"{self.folder} has no class {lacking!r}, but {shortened(list(known))}; name the data's classes as the"
                " model's id2label does"
            )
        return self

    def inference(self, model: nn.Module) -> dict[str, float]:
        """Return what detections depend on beside the weights; the image processor decides on sizes."""
        return {"score_thresh": self.score_threshold}

    def export(self, model: nn.Module, path: str | Path) -> None:
        """Merge phi into a copy of an adapted model and write its state dict, for ``load_state_dict``.

        Raises:
            AdapterError: The model has no adapter.
        """
        buffer = io.BytesIO()
        torch.save(Adapter(model).merged_state_dict(), buffer)
        write_atomically(path, buffer.getvalue())

    @cached_property
    def _processor(self) -> Any:
        kind: Any = AutoImageProcessor
        return kind.from_pretrained(self.folder, local_files_only=True, trust_remote_code=False)

    def _inputs(self, model: nn.Module, batch: Sequence[Example]) -> dict[str, Tensor]:
        """Return the images, and where they are padded, as the folder's processor makes them, by name."""
        like, images = next(model.parameters()), [image.cpu() for image in images_in(batch)]
        prepared = self._processor(images=images, return_tensors="pt")
        inputs = {"pixel_values": prepared["pixel_values"].to(like)}
        if "pixel_mask" in prepared:
            inputs["pixel_mask"] = prepared["pixel_mask"].to(like.device)
        return inputs

    def _target(self, model: nn.Module, example: Example) -> dict[str, Tensor]:
        """Return what is learned from an image: labels, and boxes by centre and size as shares of the image.

        Not by the processor, which takes shares of the padded image while a batch's sizes differ; it reads what was
        found as shares of the image itself.
        """
        like = next(model.parameters())
        height, width = example.size
        clipped, within = inside(example.truth.boxes.double(), width, height)
        kept = within & ~(example.truth.difficult | example.truth.crowd)
        shares = clipped[kept] / clipped.new_tensor([width, height] * 2)
        centred = torch.cat([(shares[:, :2] + shares[:, 2:]) / 2, shares[:, 2:] - shares[:, :2]], dim=1)
        labels = torch.tensor(self.labels(model), dtype=torch.int64)[example.truth.labels[kept].long()]
        return {"class_labels": labels.to(like.device), "boxes": centred.to(like)}

    def _detections(self, model: nn.Module, found: dict[str, Tensor]) -> Detections:
        """Return what is found of the classes, best first, not clipped to the image, as transformers has it."""
        classes: dict[int, int] = {label: at for at, label in enumerate(self.labels(model))}
        places = torch.tensor([classes.get(label, -1) for label in found["labels"].tolist()], dtype=torch.int64)
        boxes, scores = found["boxes"].cpu(), found["scores"].cpu()
        rows = scores.argsort(descending=True, stable=True)
        rows = rows[(places[rows] >= 0) & (scores[rows] >= self.score_threshold)]
        return Detections(boxes[rows], scores[rows], places[rows])
