"""Annotated sets in Detectron2's catalog, and its sets as annotated sets."""

import io
import math
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, TypeVar

import numpy as np
import torch
from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog, DatasetMapper, MetadataCatalog
from detectron2.structures import BoxMode
from detectron2.utils import comm
from detectron2.utils.file_io import PathHandler, PathManager

from metricopt_ext.data.archives import open_zip
from metricopt_ext.data.own_parts import digests_of_files, same_classes, warn_of_copies
from metricopt_ext.detection.box_kinds import check_annotated
from metricopt_ext.detection.boxes_outside import warn_of_boxes
from metricopt_ext.detection.coco import CocoSet, read_coco
from metricopt_ext.detection.data import files_of, with_classes
from metricopt_ext.detection.detectron2.coco_shapes import CocoShapes, read_shapes
from metricopt_ext.detection.detectron2.config import DatasetsNode, metricopt_settings
from metricopt_ext.detection.layouts import images_of, part_at
from metricopt_ext.detection.metric import kind_of
from metricopt_ext.detection.records import UNREADABLE, Annotated, DetectionSet
from metricopt_ext.detection.scenes import write_scenes
from metricopt_ext.detection.tables import KINDS, TruthTable
from metricopt_ext.detection.voc import read_voc
from metricopt_ext.errors import ConfigError, DataError
from metricopt_ext.utils.seeding import generator
from metricopt_ext.utils.words import brief, counted

SomeSet = TypeVar("SomeSet", bound=DetectionSet)
KEPT_NAMES = {"train": "train", "val": "validation", "test": "test"}  # what `own_parts` calls the parts
ENTRY = re.compile(
    r"(?P<name>[^=]+)=(?P<folder>.+):(?P<split>[^:\[\]]+)(\[((?P<first>\d+)%)?:((?P<last>\d+)%)?\])?", re.ASCII
)


class ZipHandler(PathHandler):  # type: ignore[misc]
    """Opens ``zip://ARCHIVE!MEMBER`` wherever Detectron2 reads a file, so its own data mapper can read archives."""

    PREFIX = "zip://"

    def _get_supported_prefixes(self) -> list[str]:
        return [self.PREFIX]

    def _open(self, path: str, mode: str = "r", buffering: int = -1, **kwargs: Any) -> IO[Any]:
        archive, _, member = path[len(self.PREFIX) :].partition("!")
        with open_zip(Path(archive)) as file:
            content = io.BytesIO(file.read(member))
        return content if "b" in mode else io.TextIOWrapper(content)


PathManager.register_handler(ZipHandler(), allow_override=True)


class Mapper(DatasetMapper):  # type: ignore[misc]
    """Detectron2's data mapper, with errors that name what it can't read."""

    def __call__(self, dataset_dict: dict[str, Any]) -> Any:
        """Return the model's input for one image.

        Raises:
            DataError: The image is missing, truncated, or of a different size from its annotation.
        """
        try:
            return super().__call__(dataset_dict)
        except (*UNREADABLE, SyntaxError, ValueError) as error:
            raise DataError(f"{dataset_dict['file_name']} can't be used: {error}") from error


def register(name: str, data: DetectionSet, shapes: CocoShapes | None = None) -> None:
    """Enter a set into Detectron2's catalog, so that configs can name it.

    Args:
        name: What it is called there.
        data: The set.
        shapes: The masks and keypoints of its objects, if any.

    Raises:
        DataError: The name is taken.
    """
    if name in DatasetCatalog.list():
        raise DataError(f"Detectron2's catalog already has a dataset {name!r}; choose another name")
    metadata = MetadataCatalog.get(name).set(thing_classes=list(data.classes))
    if shapes is None:
        DatasetCatalog.register(name, lambda: as_records(data))
        return
    DatasetCatalog.register(name, lambda: shapes.into(as_records(data)))
    metadata.set(**shapes.metadata, shapes_left_out=shapes.left_out)


def registered_truth(name: str) -> DetectionSet:
    """Return a set in Detectron2's catalog, whether from `register`, Detectron2 or the user.

    Raises:
        DataError: There is no such set, or it can't be judged by (`as_truth`).
    """
    records = records_of(name)
    truth = as_truth(name, records)
    if not _in_voc_s_files(name):  # whose reader has told of them
        _tell_of_boxes(name, records)
    return truth


def records_of(name: str) -> list[dict[str, Any]]:
    """Return the records of a set in Detectron2's catalog.

    Raises:
        DataError: There is no such set.
    """
    if name not in DatasetCatalog.list():
        raise DataError(f"Detectron2's catalog has no dataset {name!r}; METRICOPT.DATASETS.REGISTER enters one")
    records: list[dict[str, Any]] = DatasetCatalog.get(name)
    return records


def drawn_images(name: str, images: int, seed: int) -> str:
    """Enter some images of a set into Detectron2's catalog, as a set of their own, and return its name.

    Args:
        name: The set.
        images: How many of its images, drawn at random; 0 for all, whose name is the set's own.
        seed: Draws them.

    Raises:
        ConfigError: The set has fewer images.
        DataError: There is no such set.
    """
    records = records_of(name)
    if images > len(records):
        raise ConfigError(f"{images} validation images requested, but {name!r} has {len(records)}")
    if not images:
        return name
    chosen = torch.randperm(len(records), generator=generator(seed, "validation"))[:images].sort().values.tolist()
    drawn = f"{name}_{images}_images_seed_{seed}"

    def load() -> list[dict[str, Any]]:
        records = records_of(name)
        return [records[index] for index in chosen]

    if drawn not in DatasetCatalog.list():
        DatasetCatalog.register(drawn, load)
        # COCO's file of annotations is of all images: without it, Detectron2's evaluator makes one of these.
        about = {key: value for key, value in MetadataCatalog.get(name).as_dict().items() if key != "json_file"}
        MetadataCatalog.get(drawn).set(**{**about, "name": drawn})
    return drawn


def as_records(data: DetectionSet) -> list[dict[str, Any]]:
    """Return a set in Detectron2's format, for its data loaders.

    Raises:
        DataError: An image whose size is not annotated can't be read.
    """
    return [_record(image.with_size()) for image in data.images]


def as_truth(name: str, records: Sequence[dict[str, Any]]) -> DetectionSet:
    """Return some records of a set in Detectron2's catalog as an annotated set.

    Detectron2's records of VOC's sets do not say which objects are difficult; VOC's files are read again for that.

    Raises:
        DataError: The set is empty or names no classes, two records have one ``image_id``, a record lacks what AP50
            needs, its box is of another kind or its class unknown, or VOC's files can't be read.
    """
    if not records:
        raise DataError(f"dataset {name!r} has no images")
    metadata, classes = MetadataCatalog.get(name), classes_of(name)
    check_image_ids([record["image_id"] for record in records if "image_id" in record], f"dataset {name!r}")
    if _in_voc_s_files(name):
        images = {image.image_id: image for image in read_voc(metadata.dirname, metadata.split, classes=classes).images}
        return DetectionSet(classes, [images[str(record["image_id"])] for record in records])
    try:
        annotated = [_annotated(record, len(classes), name) for record in records]
    except KeyError as error:
        raise DataError(f"a record of dataset {name!r} lacks {error}, which AP50 is computed from") from error
    truth = DetectionSet(classes, annotated)
    check_annotated(TruthTable.of(truth), f"dataset {name!r}", "a bbox must be in pixels, as its bbox_mode says")
    return truth


def _in_voc_s_files(name: str) -> bool:
    """Whether a set was entered by Detectron2's ``register_pascal_voc``."""
    metadata = MetadataCatalog.get(name)
    return bool(metadata.get("dirname") and metadata.get("split"))


def check_image_ids(ids: Sequence[Any], where: str) -> None:
    """Reject repeated ids of images, by which an evaluator tells apart what is found in them.

    Raises:
        DataError: An id is repeated.
    """
    double = [key for key, count in Counter(ids).items() if count > 1]
    if double:
        raise DataError(
            f"{where} has {len(double)} image_id that occur twice, first {brief(double[0])}; AP50 needs a different"
            " image_id for each image"
        )


def classes_of(name: str) -> tuple[str, ...]:
    """Return the names of a set's classes; Detectron2 reads those of its COCO sets along with the images.

    Raises:
        DataError: The set does not name them.
    """
    classes = MetadataCatalog.get(name).get("thing_classes")
    if not classes:
        raise DataError(f"dataset {name!r} names no classes; set MetadataCatalog.get({name!r}).thing_classes")
    return tuple(classes)


def check_sets(cfg: CfgNode, trained: Sequence[str], judged: Sequence[str]) -> None:
    """Read all sets of a run before it starts, and check that they fit the detector and each other.

    Args:
        cfg: The detector's config.
        trained: Names of the sets that it is trained on.
        judged: Names of the sets that AP50 is evaluated on.

    Raises:
        ConfigError: The number of classes differs from the detector's, or two sets number them differently, or the
            detector has a mask or keypoint head and an object to train on has no mask or keypoints, or not such as it
            takes, or one to judge has none of the metric's masks or keypoints.
        DataError: There is no such set, or it can't be read.
    """
    head = {"GeneralizedRCNN": "ROI_HEADS", "RetinaNet": "RETINANET"}.get(cfg.MODEL.META_ARCHITECTURE)
    first = None
    for name in [*trained, *judged]:
        records = records_of(name)
        if name in trained and cfg.MODEL.MASK_ON:
            _check_masks(name, records, cfg.INPUT.MASK_FORMAT)
        if name in trained and cfg.MODEL.KEYPOINT_ON:
            _check_keypoints(name, records, cfg.MODEL.ROI_KEYPOINT_HEAD.NUM_KEYPOINTS)
        if name in judged:
            as_truth(name, records)
            _check_shapes(name, records, metricopt_settings(cfg).metric.name)
        if not (name in judged and _in_voc_s_files(name)):  # whose reader has told of them
            _tell_of_boxes(name, records)
        if name not in judged and not MetadataCatalog.get(name).get("thing_classes"):
            continue  # a training set need not name its classes
        classes, first = classes_of(name), first or name
        if head and len(classes) != cfg.MODEL[head].NUM_CLASSES:
            raise ConfigError(
                f"MODEL.{head}.NUM_CLASSES is {cfg.MODEL[head].NUM_CLASSES}; {name} has {len(classes)} classes:"
                f" {', '.join(classes)}"
            )
        if classes != classes_of(first):
            raise ConfigError(
                f"{name} has the classes {', '.join(classes)}, but {first} has {', '.join(classes_of(first))};"
                " METRICOPT.DATASETS.CLASSES gives VOC folders the same classes"
            )


def _check_masks(name: str, records: Sequence[dict[str, Any]], mask_format: str) -> None:
    objects = _learned(records)
    bare = sum("segmentation" not in each for each in objects)
    if bare:
        raise ConfigError(
            f"MODEL.MASK_ON is True, but {bare} of {len(objects)} objects of {name} have no mask; set MODEL.MASK_ON"
            f" False for boxes alone, or name a set with masks in DATASETS.TRAIN{_why(name, 'segmentation')}"
        )
    encoded = sum(isinstance(each["segmentation"], dict) for each in objects)
    if encoded and mask_format != "bitmask":
        raise ConfigError(
            f"INPUT.MASK_FORMAT is {mask_format}, but {encoded} of {len(objects)} masks of {name} are run-length"
            " encodings; set it to bitmask"
        )


def _check_keypoints(name: str, records: Sequence[dict[str, Any]], count: int) -> None:
    objects, metadata = _learned(records), MetadataCatalog.get(name)
    bare = sum("keypoints" not in each for each in objects)
    if bare:
        raise ConfigError(
            f"MODEL.KEYPOINT_ON is True, but {bare} of {len(objects)} objects of {name} have no keypoints; set it to"
            f" False, or name a set with keypoints in DATASETS.TRAIN{_why(name, 'keypoints')}"
        )
    if not metadata.get("keypoint_names") or metadata.get("keypoint_flip_map") is None:
        raise ConfigError(
            f"MODEL.KEYPOINT_ON is True, but {name} does not name its keypoints; name them as 'keypoints' of its"
            f" category, or set MetadataCatalog.get({name!r}).keypoint_names and keypoint_flip_map"
        )
    if len(metadata.keypoint_names) != count:
        raise ConfigError(
            f"MODEL.ROI_KEYPOINT_HEAD.NUM_KEYPOINTS is {count}; {name} has {len(metadata.keypoint_names)} keypoints"
        )


def _learned(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The objects that Detectron2 trains on."""
    return [each for record in records for each in record.get("annotations", []) if not each.get("iscrowd")]


def _why(name: str, shape: str) -> str:
    left_out: dict[str, str] = MetadataCatalog.get(name).get("shapes_left_out") or {}
    return f" ({left_out[shape]})" if shape in left_out else ""


def _check_shapes(name: str, records: Sequence[dict[str, Any]], metric: str) -> None:
    """Reject a set whose objects lack the masks or keypoints that the metric judges."""
    kind = kind_of(metric)
    objects = [each for record in records for each in record.get("annotations", [])]
    bare = sum(KINDS[kind] not in each for each in objects)
    if kind != "bbox" and bare:
        raise ConfigError(
            f"METRICOPT.METRIC.NAME is {metric}, but {bare} of {len(objects)} objects of {name} have no"
            f" {KINDS[kind]!r}; name a set that has, or judge boxes by bbox/AP50{_why(name, KINDS[kind])}"
        )


def _tell_of_boxes(name: str, records: Sequence[dict[str, Any]]) -> None:
    """Warn once of boxes outside their images, which Detectron2's mapper clips or leaves out."""
    metadata = MetadataCatalog.get(name)
    if metadata.get("boxes_told"):
        return
    metadata.set(boxes_told=True)
    known = [(record, each) for record in records for each in record.get("annotations", []) if "bbox" in each]
    boxes = [_edges(each, f"dataset {name!r}") for _, each in known]
    warn_of_boxes(
        f"dataset {name}",
        np.array(boxes, dtype=np.float64).reshape(-1, 4),
        np.array([(record.get("width", 0), record.get("height", 0)) for record, _ in known]).reshape(-1, 2),
        [Path(record.get("file_name") or str(record.get("image_id"))).name for record, _ in known],
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

    An entry is ``NAME=FOLDER:SPLIT`` for a VOC folder or its zip file, or ``NAME=FOLDER:FILE.json`` for images with
    annotations in COCO's format, masks and keypoints among them (`coco_shapes.read_shapes`). A suffix of ``[:80%]`` or
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

    They are read as in our other tools (`layouts.part_at`): COCO's files and Roboflow's folders, VOC's lists, folders
    and zip files, folders in YOLO's format. Classes are compared by name, and train's numbers count. Images in two
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
    warn_of_copies(digests_of_files({name: files_of(part) for name, part in read.items()}), "image")
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


def _record(image: Annotated) -> dict[str, Any]:
    annotations = [
        {
            "bbox": box,
            "bbox_mode": BoxMode.XYXY_ABS,
            "category_id": label,
            "iscrowd": int(crowd),
            "difficult": difficult,
        }
        for box, label, crowd, difficult in zip(
            image.boxes.tolist(), image.labels.tolist(), image.crowd.tolist(), image.difficult.tolist(), strict=True
        )
    ]
    path = str(image.path)
    if image.archive is not None:
        path = f"{ZipHandler.PREFIX}{image.archive}!{image.path.as_posix()}"
    return {
        "file_name": path,
        "image_id": image.image_id,
        "width": image.width,
        "height": image.height,
        "annotations": annotations,
    }


def _annotated(record: dict[str, Any], classes: int, name: str) -> Annotated:
    """A record as an annotated image; boxes are compared without its file and size, which may be missing."""
    where = f"image {brief(record['image_id'])} of dataset {name!r}"
    annotations = record.get("annotations", [])
    boxes = [_edges(each, where) for each in annotations]
    for each in annotations:
        if each["category_id"] not in range(classes):
            raise DataError(
                f"{where} has the category_id {brief(each['category_id'])}; with {classes} classes it must be in"
                f" 0..{classes - 1}"
            )
    path, archive = str(record.get("file_name") or ""), None
    if path.startswith(ZipHandler.PREFIX):
        archive, _, path = path[len(ZipHandler.PREFIX) :].partition("!")
    return Annotated(
        image_id=record["image_id"],
        path=Path(path),
        width=record.get("width") or 0,
        height=record.get("height") or 0,
        boxes=torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4),
        labels=torch.tensor([each["category_id"] for each in annotations], dtype=torch.int64),
        difficult=torch.tensor([bool(each.get("difficult")) for each in annotations], dtype=torch.bool),
        crowd=torch.tensor([bool(each.get("iscrowd")) for each in annotations], dtype=torch.bool),
        archive=None if archive is None else Path(archive),
    )


def _edges(annotation: dict[str, Any], where: str) -> list[float]:
    """The left, top, right and bottom edge of an annotated box, in pixels."""
    box, mode = annotation["bbox"], annotation["bbox_mode"]
    if mode not in (BoxMode.XYXY_ABS, BoxMode.XYWH_ABS):  # converting a rotated box would enlarge it
        raise DataError(f"{where} has a box of mode {brief(mode)}; AP50 is of BoxMode.XYXY_ABS and XYWH_ABS")
    if len(box) != 4:
        raise DataError(f"{where} has the box {brief(list(box))}; it must be 4 numbers")
    edges = [float(edge) for edge in BoxMode.convert(list(box), BoxMode(mode), BoxMode.XYXY_ABS)]
    if not all(map(math.isfinite, edges)):
        raise DataError(f"{where} has the box {brief(list(box))}; it must be finite")
    return edges
