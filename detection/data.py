"""The three parts of the data: what the loss sees, what the metric sees, and what the result is reported on."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from metricopt_ext.data.splits import PARTS
from metricopt_ext.detection.coco import category_ids_of, read_coco
from metricopt_ext.detection.config import DataConfig, DetectionConfig
from metricopt_ext.detection.records import Annotated, DetectionSet, inside
from metricopt_ext.detection.scenes import SceneShift, write_scenes
from metricopt_ext.detection.task import load_examples
from metricopt_ext.detection.toolkit import Example
from metricopt_ext.detection.voc import read_voc
from metricopt_ext.errors import ConfigError, DataError
from metricopt_ext.utils.seeding import generator


@dataclass(frozen=True)
class DetectionSplits:
    """Images in memory.

    Attributes:
        classes: Names of the classes.
        train: What the detector is trained on and the loss sees.
        validation: What metric queries see.
        test: What the result is reported on.
        category_ids: How COCO's format numbers the classes; empty for other formats.
    """

    classes: tuple[str, ...]
    train: list[Example]
    validation: list[Example]
    test: list[Example]
    category_ids: tuple[int | str, ...] = ()


def load_splits(config: DetectionConfig, seed: int, folder: Path) -> DetectionSplits:
    """Read the parts, or draw them into ``folder/scenes``.

    Args:
        config: The settings.
        seed: Draws scenes, the images of each part, and what is held out from train.
        folder: Receives scenes.

    Raises:
        ConfigError: A setting is unknown.
        DataError: The data are missing or unusable.
    """
    parts = _read(config, seed, folder)
    classes = parts[0].classes
    limits = config.data.images if config.data.name != "scenes" else [0, 0, 0]
    drawn = [_drawn(part, limit, seed, name) for name, part, limit in zip(PARTS, parts, limits, strict=True)]
    for name, part in zip(PARTS, drawn, strict=True):
        if part.classes != classes:
            raise DataError(f"{name} has the classes {', '.join(part.classes)}, train has {', '.join(classes)}")
        if all(bool((image.difficult | image.crowd).all()) for image in part.images):
            raise DataError(
                f"none of the {len(part)} images for {name} has a box that is neither difficult nor a crowd region"
            )
    if not any(_learned_from(image).any() for image in drawn[0].images):
        raise DataError(f"none of the {len(drawn[0])} images for train has a box with area in its image")
    train, validation, test = (load_examples(part, config.data.size or None, **config.limits) for part in drawn)
    return DetectionSplits(classes, train, validation, test, category_ids_of(parts[0]))


def _learned_from(image: Annotated) -> Tensor:
    """Which boxes a detector can be trained on, ``n`` booleans."""
    _, within = inside(image.boxes, image.width, image.height)
    return within & ~(image.difficult | image.crowd)


def _read(config: DetectionConfig, seed: int, folder: Path) -> tuple[DetectionSet, DetectionSet, DetectionSet]:
    data = config.data
    if data.name != "scenes" and not config.shift.is_none:
        raise ConfigError(f"the settings of shift are for data.name=scenes and don't affect data.name={data.name}")
    if data.name not in ("scenes", "voc", "coco"):
        raise ConfigError(f"data.name={data.name!r} is none of scenes, voc, coco")
    if data.more_train and data.name != "voc":
        raise ConfigError(f"data.more_train={data.more_train} is for data.name=voc")
    if data.classes and data.name != "voc":
        raise ConfigError(f"data.classes={data.classes} is for data.name=voc; scenes and COCO files have their own")
    if data.name == "scenes":
        return _scenes(config, seed, folder / "scenes")
    if not data.root:
        raise ConfigError(f"data.name={data.name} needs data.root=PATH, its folder or, for voc, zip file")
    train = _split(data, data.root, data.splits[0])
    for root in data.more_train:
        more = _split(data, root, data.splits[0])
        if more.classes != train.classes:
            raise DataError(f"{root} and {data.root} have different classes; name them in data.classes")
        train = DetectionSet(train.classes, [*train.images, *more.images])
    if data.splits[1]:
        return train, _split(data, data.root, data.splits[1]), _split(data, data.root, data.splits[2])
    return *_held_out(train, data.validation_share, seed), _split(data, data.root, data.splits[2])


def _split(data: DataConfig, root: str, split: str) -> DetectionSet:
    if data.name == "coco":
        return read_coco(split, root)
    return read_voc(root, split, classes=data.classes or None)


def _scenes(config: DetectionConfig, seed: int, folder: Path) -> tuple[DetectionSet, DetectionSet, DetectionSet]:
    scene, shift, counts = config.scene, config.shift, config.data.images
    write_scenes(
        folder,
        images=(counts[0], counts[1], counts[2]),
        size=scene.size,
        digits_per_scene=(scene.digits[0], scene.digits[1]),
        scale=(scene.scale[0], scene.scale[1]),
        seed=seed,
        shift=SceneShift(shift.contrast, shift.brightness, shift.noise_std, shift.scale),
    )
    train, validation, test = (read_voc(folder, split) for split in ("train", "val", "test"))
    return train, validation, test


def _held_out(train: DetectionSet, share: float, seed: int) -> tuple[DetectionSet, DetectionSet]:
    """Hold out a part of the train images, drawn by the seed."""
    order = torch.randperm(len(train), generator=generator(seed, "held_out")).tolist()
    size = max(1, round(share * len(train)))
    if size == len(train):
        raise DataError(f"{len(train)} image can't be divided into train and validation")
    return train.subset(sorted(order[size:])), train.subset(sorted(order[:size]))


def _drawn(part: DetectionSet, limit: int, seed: int, name: str) -> DetectionSet:
    if not limit or len(part) <= limit:
        return part
    order = torch.randperm(len(part), generator=generator(seed, "images", PARTS.index(name)))
    return part.subset(sorted(order[:limit].tolist()))
