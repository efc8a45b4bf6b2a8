"""Sets that a config lists are entered into Detectron2's catalog."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import torch
from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.utils import comm

from metricopt_ext.data.own_parts import digests_of_files, same_classes, warn_of_shared
from metricopt_ext.detection.coco import CocoSet, read_coco
from metricopt_ext.detection.data import files_of, with_classes
from metricopt_ext.detection.detectron2.coco_shapes import read_shapes
from metricopt_ext.detection.detectron2.config import DatasetsNode, metricopt_settings
from metricopt_ext.detection.detectron2.datasets import register
from metricopt_ext.detection.layouts import images_of, part_at
from metricopt_ext.detection.records import DetectionSet
from metricopt_ext.detection.scenes import write_scenes
from metricopt_ext.detection.voc import read_voc
from metricopt_ext.errors import ConfigError
from metricopt_ext.utils.seeding import generator
from metricopt_ext.utils.words import counted

SomeSet = TypeVar("SomeSet", bound=DetectionSet)

KEPT_NAMES = {"train": "train", "val": "validation", "test": "test"}  # what `own_parts` calls the parts
ENTRY = re.compile(  # of a name Detectron2's evaluator makes a file's
    r"(?P<name>[^=/\\]+)=(?P<folder>.+):(?P<split>[^:\[\]]+)(\[((?P<first>\d+)%)?:((?P<last>\d+)%)?\])?", re.ASCII
)


def write_example(datasets: DatasetsNode) -> None:
    """Write the scenes that METRICOPT.DATASETS.SCENES names, if any; one process per machine does so.

    Raises:
        DataError: A setting of the scenes is impossible.
        FileFormatError: The folder holds scenes with other settings.
    """
    scenes = datasets.scenes
    if scenes.folder and comm.get_local_rank() == 0:
        write_scenes(Path(datasets.root) / scenes.folder, images=scenes.images, seed=scenes.seed, shift=scenes.shift)
    comm.synchronize()


def register_entries(entries: Sequence[str], root: str | Path, classes: Sequence[str] = ()) -> None:
    """Register what METRICOPT.DATASETS.REGISTER lists, unless it is already in the catalog.

    An entry is ``NAME=FOLDER:SPLIT`` for a VOC folder, or ``NAME=FOLDER:FILE.json`` for images with
    annotations in COCO's format, masks among them (`coco_shapes.read_shapes`). A suffix of ``[:80%]`` or
    ``[80%:]`` chooses a part of the images in an order that is always shuffled the same way: what one leaves out is
    what the other has, in every run.

    Args:
        entries: The entries.
        root: What relative folders are relative to.
        classes: Names of the classes of VOC folders; empty for all in a folder's annotations.

    Raises:
        ConfigError: An entry can't be read.
        DataError: The data can't be read.
    """
    for entry in entries:
        match = ENTRY.fullmatch(entry)
        if match is None:
            raise ConfigError(
                f"METRICOPT.DATASETS.REGISTER: {entry!r} is not NAME=FOLDER:SPLIT, NAME=FOLDER:SPLIT[:80%] or similar"
            )
        name, folder, split = match["name"], Path(root) / match["folder"], match["split"]
        if name in DatasetCatalog.list():
            continue
        limits = int(match["first"] or 0), int(match["last"] or 100)
        if split.lower().endswith(".json"):
            file = folder / split
            part = _part(read_coco(file, images_of(file, folder)), *limits)
            shapes = read_shapes(file, part)
            register(name, part, shapes)
            if shapes is not None and shapes.complete and limits == (0, 100):
                _judge_by(file, name, part)
        else:
            register(name, _part(read_voc(folder, split, classes=classes or None), *limits))
        MetadataCatalog.get(name).set(boxes_told=True)  # of those outside their images, by the reader


def _judge_by(file: Path, name: str, data: CocoSet) -> None:
    """Have Detectron2's COCOEvaluator judge by a file itself, which has the areas of the objects."""
    numbers = {number: at for at, number in enumerate(data.category_ids)}
    MetadataCatalog.get(name).set(json_file=str(file), thing_dataset_id_to_contiguous_id=numbers)


def register_parts(cfg: CfgNode) -> tuple[str, ...]:
    """Register the parts of one's own that METRICOPT.DATASETS names, and have a config take them for its sets.

    They are read as in our other tools (`layouts.part_at`): COCO's files and Roboflow's folders, VOC's lists and
    folders, folders in YOLO's format. Classes are compared by name, and train's numbers count. Images in two
    parts, by content, are counted in a warning.

    Args:
        cfg: The config. ``own_train``, ``own_val`` and ``own_test`` take the place of DATASETS.TRAIN,
            METRICOPT.METRIC.SET and DATASETS.TEST, each if the part is given.

    Returns:
        How each part was found, in words.

    Raises:
        DataError: A part can't be read, or lacks a class of train, or has another.
    """
    datasets = metricopt_settings(cfg).datasets
    parts = {"train": datasets.train, "val": datasets.val, "test": datasets.test}
    given = {name: path for name, path in parts.items() if path}
    found = {KEPT_NAMES[name]: part_at(Path(path)) for name, path in given.items()}
    read = {name: part.read(datasets.classes or None) for name, part in found.items()}
    shapes = {name: read_shapes(found[name].path, data) for name, data in read.items() if isinstance(data, CocoSet)}
    if "train" in read:
        classes = same_classes({name: part.classes for name, part in read.items()})
        read = {name: with_classes(part, classes) for name, part in read.items()}
    warn_of_shared(digests_of_files({name: files_of(part) for name, part in read.items()}), "image")
    for name, data in zip(given, read.values(), strict=True):
        register(f"own_{name}", data, shapes.get(KEPT_NAMES[name]))
        MetadataCatalog.get(f"own_{name}").set(boxes_told=True)  # by the reader
    if "train" in given:
        cfg.DATASETS.TRAIN = ("own_train",)
    if "val" in given:
        cfg.METRICOPT.METRIC.SET = "own_val"
    if "test" in given:
        cfg.DATASETS.TEST = ("own_test",)
    return tuple(f"{name}: {part.found}; {counted(len(read[name]), 'image')}" for name, part in found.items())


def _part(data: SomeSet, first: int, last: int) -> SomeSet:
    """Return the images between two percentages of a shuffled order, in the order of the set."""
    if not 0 <= first < last <= 100:
        raise ConfigError(f"METRICOPT.DATASETS.REGISTER: [{first}%:{last}%] is not part of a set")
    order = torch.randperm(len(data), generator=generator(0, "part"))
    chosen = order[len(data) * first // 100 : len(data) * last // 100]
    if not len(chosen):
        raise ConfigError(f"METRICOPT.DATASETS.REGISTER: [{first}%:{last}%] of {len(data)} images is empty")
    return data.subset(chosen.sort().values.tolist())  # type: ignore[return-value]  # of its own kind
