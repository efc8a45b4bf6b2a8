"""The three parts of the data: what the loss sees, what the metric sees, and what the result is reported on."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from metricopt_ext.data.own_parts import digests_of_files, renumbered, same_classes, warn_of_shared
from metricopt_ext.data.reading import warn_of_near_names
from metricopt_ext.data.splits import PARTS
from metricopt_ext.detection.coco import category_ids_of
from metricopt_ext.detection.config import DATA, SPLITS, DetectionConfig, FilesConfig, VOCConfig
from metricopt_ext.detection.layouts import Part, is_whole, part_at, part_of
from metricopt_ext.detection.records import Annotated, DetectionSet, inside
from metricopt_ext.detection.scenes import SceneShift, write_scenes
from metricopt_ext.detection.task import load_examples
from metricopt_ext.detection.toolkit import Example
from metricopt_ext.detection.voc import read_voc
from metricopt_ext.errors import ConfigError, DataError
from metricopt_ext.utils.files import existing
from metricopt_ext.utils.seeding import generator
from metricopt_ext.utils.words import counted


@dataclass(frozen=True)
class DetectionSplits:
    """Images in memory.

    Attributes:
        classes: Names of the classes.
        train: What the detector is trained on and the loss sees.
        validation: What metric queries see.
        test: What the result is reported on.
        category_ids: How COCO's format numbers the classes; empty for other formats.
        found: How the data were read, in words: a line for each part, or for what differs from what was asked for.
    """

    classes: tuple[str, ...]
    train: list[Example]
    validation: list[Example]
    test: list[Example]
    category_ids: tuple[int | str, ...] = ()
    found: tuple[str, ...] = ()


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
    read, found = _read(config, seed, folder)
    classes = same_classes({name: part.classes for name, part in read.items()})
    warn_of_near_names("classes", classes)
    limits = config.data.images if config.data.name != "scenes" else [0, 0, 0]
    drawn = [
        _drawn(with_classes(read[name], classes), limit, seed, name) for name, limit in zip(PARTS, limits, strict=True)
    ]
    for name, part in zip(PARTS, drawn, strict=True):
        if all(bool((image.difficult | image.crowd).all()) for image in part.images):
            raise DataError(
                f"none of the {len(part)} images for {name} has a box that is neither difficult nor a crowd region"
            )
    if not any(_learned_from(image).any() for image in drawn[0].images):
        raise DataError(f"none of the {len(drawn[0])} images for train has a box with area in its image")
    if config.data.name != "scenes":
        warn_of_shared(
            digests_of_files({name: files_of(part) for name, part in zip(PARTS, drawn, strict=True)}), "image"
        )
    size, stream = config.data.size or None, config.data.stream
    train, validation, test = (load_examples(part, size, stream=stream) for part in drawn)
    numbers = category_ids_of(read["train"]) if read["train"].classes == tuple(classes) else ()
    return DetectionSplits(classes, train, validation, test, numbers, found)


def with_classes(data: DetectionSet, classes: Sequence[str]) -> DetectionSet:
    """Return a set whose labels count other classes, by name.

    Args:
        data: The set.
        classes: All classes, its own among them.
    """
    if data.classes == tuple(classes):
        return data
    images = [replace(image, labels=renumbered(image.labels, data.classes, classes)) for image in data.images]
    return DetectionSet(tuple(classes), images)


def trained_classes(config: DetectionConfig) -> tuple[str, ...]:
    """Return the classes in train's order, in which a detector counts them; none where train's files are not there."""
    data = config.data
    if isinstance(data, FilesConfig) and (data.train or data.root):
        with suppress(DataError):
            part = part_at(Path(data.train), data.name) if data.train else _found(data)["train"]
            return part.read(images=False).classes
    return ()


def files_of(part: DetectionSet) -> list[Path]:
    """Return the files of the images."""
    return [image.path for image in part.images]


def _learned_from(image: Annotated) -> Tensor:
    """Which boxes a detector can be trained on, ``n`` booleans."""
    _, within = inside(image.boxes, image.width, image.height)
    return within & ~(image.difficult | image.crowd)


def _read(config: DetectionConfig, seed: int, folder: Path) -> tuple[dict[str, DetectionSet], tuple[str, ...]]:
    """The three parts by their names, and how they were found."""
    data = config.data
    if data.name not in DATA:
        raise ConfigError(f"data.name={data.name!r} is none of {', '.join(DATA)}")
    if not isinstance(data, FilesConfig):
        return dict(zip(PARTS, _scenes(config, seed, folder / "scenes"), strict=True)), ()
    if own := data.parts:
        found = {name: part_at(Path(path), data.name) for name, path in own.items()}
    else:
        found = _found(data)
    of_voc = data if isinstance(data, VOCConfig) else VOCConfig(data.name)
    classes = of_voc.classes or None
    read = {name: part.read(classes, shapes=config.kind) for name, part in found.items()}
    train = read["train"]
    for root in of_voc.more_train:
        more = read_voc(root, data.splits[0], classes=classes)
        if more.classes != train.classes:
            raise DataError(f"{root} and {data.root} have different classes; name them in data.classes")
        train = DetectionSet(train.classes, [*train.images, *more.images])
    return _completed({**read, "train": train}, found, data.validation_share, seed)


def _found(data: FilesConfig) -> dict[str, Part]:
    """Where the parts of a root are."""
    if not data.root:
        raise ConfigError(
            f"data.name={data.name} needs data.root=PATH, its folder, or data.train=PATH and data.val or data.test"
        )
    root = existing(data.root)
    if tuple(data.splits) == SPLITS and is_whole(root, data.name):
        return {"train": part_at(root, data.name)}
    named = {name: split for name, split in zip(PARTS, data.splits, strict=True) if split}
    if "train" not in named:
        raise ConfigError(f"data.splits={data.splits}: the first one, train, must be named")
    return {name: part_of(root, split, data.name) for name, split in named.items()}


def _completed(
    read: Mapping[str, DetectionSet], found: Mapping[str, Part], share: float, seed: int
) -> tuple[dict[str, DetectionSet], tuple[str, ...]]:
    """All parts, those that are not given held out from train, and how they were found."""
    parts = {**read}
    said = [f"{name}: {found[name].found}; {counted(len(part), 'image')}" for name, part in parts.items()]
    whole = len(parts["train"])
    for name in ("validation", "test"):
        if name not in parts:
            # The second part that is held out is as large as the first.
            left = len(parts["train"])
            parts["train"], parts[name] = _held_out(parts["train"], share * whole / left, seed, name)
            said.append(f"{name}: {counted(len(parts[name]), 'image')} held out from train")
    return parts, tuple(said)


def _scenes(config: DetectionConfig, seed: int, folder: Path) -> tuple[DetectionSet, DetectionSet, DetectionSet]:
    scene, shift, counts = config.scene, config.shift, config.data.images
    assert scene is not None
    assert shift is not None
    write_scenes(
        folder,
        images=(counts[0], counts[1], counts[2]),
        size=scene.size,
        digits_per_scene=(scene.digits[0], scene.digits[1]),
        scale=(scene.scale[0], scene.scale[1]),
        seed=seed,
        shift=SceneShift(shift.contrast, shift.noise_std, shift.scale),
    )
    train, validation, test = (read_voc(folder, split) for split in ("train", "val", "test"))
    return train, validation, test


def _held_out(train: DetectionSet, share: float, seed: int, name: str) -> tuple[DetectionSet, DetectionSet]:
    """Hold out a part of the train images, drawn by the seed."""
    purpose = "held_out" if name == "validation" else f"held_out {name}"
    order = torch.randperm(len(train), generator=generator(seed, purpose)).tolist()
    size = max(1, round(share * len(train)))
    if size == len(train):
        raise DataError(f"{counted(len(train), 'image')} can't be divided into train and {name}")
    return train.subset(sorted(order[size:])), train.subset(sorted(order[:size]))


def _drawn(part: DetectionSet, limit: int, seed: int, name: str) -> DetectionSet:
    if not limit or len(part) <= limit:
        return part
    order = torch.randperm(len(part), generator=generator(seed, "images", PARTS.index(name)))
    return part.subset(sorted(order[:limit].tolist()))
