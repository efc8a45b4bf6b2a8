"""Annotated sets in Detectron2's catalog, and its sets as annotated sets."""

import math
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog, DatasetMapper, MetadataCatalog
from detectron2.structures import BoxMode

from metricopt_ext.data.own_parts import digests_of_files
from metricopt_ext.detection.box_kinds import check_annotated
from metricopt_ext.detection.boxes_outside import warn_of_boxes
from metricopt_ext.detection.detectron2.coco_shapes import CocoShapes
from metricopt_ext.detection.detectron2.config import metricopt_settings
from metricopt_ext.detection.metric import kind_of
from metricopt_ext.detection.records import Annotated, DetectionSet
from metricopt_ext.detection.tables import TruthTable
from metricopt_ext.detection.voc import read_voc
from metricopt_ext.errors import ConfigError, DataError
from metricopt_ext.utils.seeding import generator
from metricopt_ext.utils.words import brief


class Mapper(DatasetMapper):  # type: ignore[misc]
    """Detectron2's data mapper, with errors that name what it can't read."""

    def __call__(self, dataset_dict: dict[str, Any]) -> Any:
        """Return the model's input for one image.

        Raises:
            DataError: The image is missing, truncated, or of a different size from its annotation.
        """
        try:
            return super().__call__(dataset_dict)
        except (OSError, RuntimeError, SyntaxError, ValueError) as error:
            raise DataError(f"{dataset_dict['file_name']} can't be used: {error}") from error


def register(name: str, data: DetectionSet, shapes: CocoShapes | None = None) -> None:
    """Enter a set into Detectron2's catalog, so that configs can name it.

    Args:
        name: What it is called there.
        data: The set.
        shapes: The masks of its objects, if any.

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
    metadata.set(masks_left_out=shapes.left_out)


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


def _check_apart(trained: Sequence[str], judged: str) -> None:
    """Refuse that phi is tuned on what the detector was trained on, and count images of both, by name and content.

    Raises:
        ConfigError: All images of the set to judge are trained on.
    """
    images, train = records_of(judged), [each for name in trained for each in records_of(name)]
    files, own = ([Path(each["file_name"]) for each in records if "file_name" in each] for records in (train, images))
    digests = digests_of_files({"train": files, "judged": own})
    known = {*map(str, files), *digests["train"].values()}
    both = sum(str(file) in known or digests["judged"].get(str(file)) in known for file in own)
    if both and both == len(images):
        raise ConfigError(
            f"METRICOPT.METRIC.SET {judged} has images of DATASETS.TRAIN alone; name a set that is not trained on"
        )
    if both:
        warnings.warn(
            f"{both} of {len(images)} images of {judged} are trained on, too; what a model has seen is judged too well",
            stacklevel=3,
        )


def check_sets(cfg: CfgNode, trained: Sequence[str], judged: Sequence[str]) -> None:
    """Read all sets of a run before it starts, and check that they fit the detector and each other.

    Args:
        cfg: The detector's config.
        trained: Names of the sets that it is trained on.
        judged: Names of the sets that AP50 is evaluated on.

    Raises:
        ConfigError: The number of classes differs from the detector's, or two sets number them differently, or the
            detector has a mask head and an object to train on has no mask, or not such as it takes, or one to judge has
            none and the metric is of masks, or the detector has a keypoint head and an object no keypoints.
        DataError: There is no such set, or it can't be read.
    """
    head = {"GeneralizedRCNN": "ROI_HEADS", "RetinaNet": "RETINANET"}.get(cfg.MODEL.META_ARCHITECTURE)
    if (judges := metricopt_settings(cfg).metric.set) in judged:
        _check_apart(trained, judges)
    first = None
    for name in [*trained, *judged]:
        records = records_of(name)
        if name in trained and cfg.MODEL.MASK_ON:
            _check_masks(name, records, cfg.INPUT.MASK_FORMAT)
        if name in trained and cfg.MODEL.KEYPOINT_ON:
            _check_keypoints(name, records)
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
            f" False for boxes alone, or name a set with masks in DATASETS.TRAIN{_why(name)}"
        )
    encoded = sum(isinstance(each["segmentation"], dict) for each in objects)
    if encoded and mask_format != "bitmask":
        raise ConfigError(
            f"INPUT.MASK_FORMAT is {mask_format}, but {encoded} of {len(objects)} masks of {name} are run-length"
            " encodings; set it to bitmask"
        )


def _check_keypoints(name: str, records: Sequence[dict[str, Any]]) -> None:
    objects = _learned(records)
    if bare := sum("keypoints" not in each for each in objects):
        raise ConfigError(
            f"MODEL.KEYPOINT_ON is True, but {bare} of {len(objects)} objects of {name} have no keypoints, which are"
            " not read from files here; set it to False"
        )


def _learned(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The objects that Detectron2 trains on."""
    return [each for record in records for each in record.get("annotations", []) if not each.get("iscrowd")]


def _why(name: str) -> str:
    left_out: str = MetadataCatalog.get(name).get("masks_left_out") or ""
    return f" ({left_out})" if left_out else ""


def _check_shapes(name: str, records: Sequence[dict[str, Any]], metric: str) -> None:
    """Reject a set whose objects lack the masks that the metric judges."""
    objects = [each for record in records for each in record.get("annotations", [])]
    bare = sum("segmentation" not in each for each in objects)
    if kind_of(metric) != "bbox" and bare:
        raise ConfigError(
            f"METRICOPT.METRIC.NAME is {metric}, but {bare} of {len(objects)} objects of {name} have no 'segmentation';"
            f" name a set that has, or judge boxes by bbox/AP50{_why(name)}"
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
    return {
        "file_name": str(image.path),
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
    return Annotated(
        image_id=record["image_id"],
        path=Path(str(record.get("file_name") or "")),
        width=record.get("width") or 0,
        height=record.get("height") or 0,
        boxes=torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4),
        labels=torch.tensor([each["category_id"] for each in annotations], dtype=torch.int64),
        difficult=torch.tensor([bool(each.get("difficult")) for each in annotations], dtype=torch.bool),
        crowd=torch.tensor([bool(each.get("iscrowd")) for each in annotations], dtype=torch.bool),
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
