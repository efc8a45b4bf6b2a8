"""Annotated images and detections in COCO's JSON formats."""

import json
import math
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from metricopt_ext.data.labelled import MAX_BYTES
from metricopt_ext.detection.box_kinds import check_annotated, check_found, hits, refuse_corners
from metricopt_ext.detection.ids import (
    Id,
    checked_id,
    choose,
    class_ways,
    counting,
    distinct,
    examples,
    image_ways,
    known_of,
    number,
    other_readings,
    written_ways,
)
from metricopt_ext.detection.records import LONGEST_SIDE, Annotated, Detections, DetectionSet, warn_of_boxes_outside
from metricopt_ext.detection.shapes import Kind, box_around, box_around_points, keypoints_of, mask_of, pixels_of
from metricopt_ext.errors import DataError
from metricopt_ext.utils.files import JSON_BYTES, parse_json, read_bounded, write_atomically
from metricopt_ext.utils.words import brief, counted

NAMED = 5  # images listed in a warning

FLAGS = {None: False, 0: False, 1: True, "": False, "0": False, "1": True}  # False and True are 0 and 1
LARGEST = 1e30  # of a coordinate or score: sums of two are finite in float32


@dataclass(frozen=True, eq=False)
class CocoSet(DetectionSet):
    """A `DetectionSet` that remembers how its file numbers the classes.

    Attributes:
        category_ids: The id of each class, ascending.
    """

    category_ids: tuple[int | str, ...] = ()

    def subset(self, indices: Sequence[int]) -> "CocoSet":
        """Return the images at some positions."""
        return replace(self, images=[self.images[index] for index in indices])


def read_coco(
    annotations: str | Path,
    images_dir: str | Path | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    kind: Kind = "bbox",
    max_bytes: int = JSON_BYTES,
) -> CocoSet:
    """Read annotated images in COCO's format: images and classes in the order of their ids, as in pycocotools.

    Boxes ``[x, y, width, height]`` become the edges ``(x, y, x + width, y + height)``, and are not clipped to their
    images: one warning says how many are outside them, or partly, which a training leaves out or clips
    (`records.inside`). Those without area are left out, with one warning. (pycocotools counts those of area 0 as
    objects, so its AP50 can differ.)

    Args:
        annotations: The JSON file.
        images_dir: Folder of the images; None if only the boxes are needed; the images are then not looked for.
        dtype: Type of the boxes; float64 keeps all decimals of the file.
        kind: ``"segm"`` or ``"keypoints"`` to read these, too: `Annotated.shapes`. Boxes without area then stay.
        max_bytes: Most bytes of the JSON file, which takes up to 25 times as much memory.

    Raises:
        DataError: The file is truncated, too large, not JSON of this format or without images; an id is duplicate or
            unknown; a box or size is not a number; an image is missing; a mask or keypoints can't be compared.
    """
    content = _load(Path(annotations), max_bytes)
    wrong = [key for key in ("images", "annotations", "categories") if not isinstance(_get(content, key), list)]
    if wrong == ["categories"] and any(_get(each, "caption") is not None for each in content["annotations"]):
        raise DataError(f"{annotations} has captions, and no boxes; COCO's boxes are in instances_*.json")
    if wrong:
        raise DataError(f"{annotations} has no list {wrong[0]!r}; COCO's format needs images, annotations, categories")
    if not content["images"]:
        raise DataError(f"{annotations} has an empty list 'images'; it should name an image")
    shown = images_dir is not None
    images = _by_id(content["images"], partial(_image, shown=shown), f"{annotations}: an image", _as_written)
    categories = _by_id(content["categories"], _category, f"{annotations}: a category", _by_number)
    double = [name for name, count in Counter(categories.values()).items() if count > 1]
    if double:
        raise DataError(f"{annotations} has several categories named {double[0]!r}")
    folder = Path() if images_dir is None else Path(images_dir)
    empty = torch.zeros(0, 4, dtype=dtype), torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.bool)
    bare = [
        Annotated(key, folder / (name or ""), width, height, empty[0], empty[1], empty[2], empty[2])
        for key, (name, width, height) in images.items()
    ]
    if shown:
        missing = [name for name, _, _ in images.values() if not _is_file(folder / str(name))]
        if missing:
            raise DataError(f"{folder} lacks {len(missing)} of {len(images)} images, first {str(missing[0])[:200]}")
        bare = [_with_size(image) for image in bare]

    entries = [(each, f"{annotations}: annotation {i}") for i, each in enumerate(content["annotations"])]
    places = choose(written_ways(tuple(images)), distinct(entries, "image_id"), "image_id", "")
    ways = class_ways(tuple(categories), tuple(categories.values()))
    labels = choose(ways, distinct(entries, "category_id"), "category_id", "")
    objects: list[list[tuple[list[float], int, bool, float, Any]]] = [[] for _ in images]
    flat, boxes = [], [box_of(each, where) for each, where in entries]
    shapes = _shapes(entries, [bare[places[each["image_id"]]] for each, _ in entries], kind)
    for (each, where), (x, y, width, height), shape in zip(entries, boxes, shapes, strict=True):
        place = places[each["image_id"]]
        if kind == "bbox" and (width <= 0 or height <= 0):
            flat.append(bare[place].path.name or str(bare[place].image_id))
        else:
            edges = [x, y, x + width, y + height]
            crowd = flag_of(each, "iscrowd", where)
            area = area_of(each)
            if kind == "segm" and math.isnan(area):
                area = pixels_of(shape)
            if kind == "keypoints" and math.isnan(area):
                raise DataError(f"{where} has no area, which the similarity of keypoints is relative to")
            objects[place].append((edges, labels[each["category_id"]], crowd, area, shape))
    if flat:
        more = f" and {len(flat) - NAMED} more" if len(flat) > NAMED else ""
        warnings.warn(
            f"boxes in {annotations}: {len(flat)} without area left out ({', '.join(flat[:NAMED])}{more})", stacklevel=2
        )
    annotated = [
        replace(
            image,
            boxes=torch.tensor([box for box, *_ in own], dtype=dtype).reshape(-1, 4),
            labels=torch.tensor([label for _, label, *_ in own], dtype=torch.int64),
            difficult=torch.zeros(len(own), dtype=torch.bool),
            crowd=torch.tensor([crowd for _, _, crowd, *_ in own], dtype=torch.bool),
            areas=torch.tensor([area for *_, area, _ in own], dtype=torch.float64),
            shapes=None if kind == "bbox" else [shape for *_, shape in own],
        )
        for image, own in zip(bare, objects, strict=True)
    ]
    if kind != "bbox":  # boxes decide nothing
        return CocoSet(tuple(categories.values()), annotated, tuple(categories))
    check_annotated(annotated, str(annotations))
    numbers = torch.tensor(boxes, dtype=torch.float64).reshape(-1, 4)
    areas = torch.tensor([area_of(each) for each, _ in entries], dtype=torch.float64)
    refuse_corners(numbers, torch.zeros(len(boxes), 2), str(annotations), areas)  # by areas alone
    warn_of_boxes_outside(annotations, annotated, [image.path.name or str(image.image_id) for image in annotated])
    return CocoSet(tuple(categories.values()), annotated, tuple(categories))


def read_detections(
    results: str | Path,
    dataset: DetectionSet,
    *,
    kind: Kind = "bbox",
    ignore_unknown_classes: bool = False,
    max_bytes: int = JSON_BYTES,
) -> list[Detections]:
    """Read COCO's results format: a list of ``{image_id, category_id, bbox: [x, y, width, height], score}``.

    An image is identified by its ``image_id`` in the set: VOC's are strings, the file names without suffix. A class is
    identified by its ``category_id``, which counts the classes from 1 in sets not read from COCO's format, or by its
    ``category_name``, if there is one. Ids that are written otherwise are read as `ids` says. One warning says so where
    classes are counted from 0, or where another reading of ids, as they are written, gives at least as many hits.

    Args:
        results: The JSON file.
        dataset: The images that the detections are of.
        kind: ``"segm"`` or ``"keypoints"`` to read these, too: `Detections.shapes`.
        ignore_unknown_classes: Whether detections of classes that the set does not have are left out, with one warning
            that counts them, rather than refused.
        max_bytes: Most bytes of the JSON file, which takes up to 25 times as much memory.

    Returns:
        The detections in each image of the set, in float64 and in the file's order.

    Raises:
        DataError: The file is truncated, too large or not a list in this format, has an unknown or ambiguous image or
            category, a box or score that is not a finite number, or boxes of another kind (`box_kinds`).
    """
    content = _load(Path(results), max_bytes)
    if not isinstance(content, list):
        raise DataError(f"{results} holds a {type(content).__name__}; COCO's results are a list of detections")
    entries = [(each, f"{results}: detection {i}") for i, each in enumerate(content)]
    image_ids, ways = distinct(entries, "image_id"), image_ways(dataset.images)
    places = choose(ways, image_ids, "image_id", "; image_id is the image's id or the name of its file")
    labels, other_labels = _labels(entries, dataset, str(results), ignore_unknown_classes)
    shapes = _shapes(entries, [dataset.images[places[each["image_id"]]] for each, _ in entries], kind)
    extents = [_extent(*entry, kind, shape) for entry, shape in zip(entries, shapes, strict=True)]
    read = _Results(
        torch.tensor([box for box, _ in extents], dtype=torch.float64).reshape(-1, 4),
        torch.tensor([area for _, area in extents], dtype=torch.float64),
        None if kind == "bbox" else shapes,
        torch.tensor([_score(each, where) for each, where in entries], dtype=torch.float64),
        _each(places, entries, "image_id"),
        labels,
        len(dataset),
    )
    found = read.found()
    if kind == "bbox":
        check_found(read.boxes, read.places, read.found, dataset, str(results))

    counted_ways = [way for first in (0, 1) for way in counting([image.image_id for image in dataset.images], first)]
    others = [
        (f"image_id is read as the id; {what}", replace(read, places=_each(other, entries, "image_id")), more)
        for prefix, each_way, more in (("read as ", ways, 0), ("", counted_ways, 1))
        for what, other in ((prefix + what, other) for what, other in other_readings(each_way, image_ids, places))
    ] + [
        (f"category_id is read as the annotations count; {what}", replace(read, labels=other), 0)
        for what, other in other_labels
    ]
    before = hits(found, dataset) if others else 0
    for said, other_read, more in others:
        after = hits(other_read.found(), dataset)
        if after >= before + more:
            warnings.warn(
                f"{results}: {said}, {after} detections would hit an object; as read, {before} do", stacklevel=2
            )
    return found


@dataclass(frozen=True, eq=False)
class _Results:
    """What a file of results says, by one reading of its ids.

    Attributes:
        boxes: ``n x 4``, as in the file.
        areas: ``n``.
        shapes: Masks or keypoints, ``n``; None for boxes.
        scores: ``n``.
        places: The image of each, ``n``.
        labels: The class of each, ``n``; -1 for those to leave out.
        images: Number of images.
    """

    boxes: Tensor
    areas: Tensor
    shapes: list[Any] | None
    scores: Tensor
    places: Tensor
    labels: Tensor
    images: int

    def found(self, edges: Tensor | None = None) -> list[Detections]:
        """Return the detections in each image, in the file's order; from other edges than the file's if given."""
        if edges is None:
            edges = torch.cat([self.boxes[:, :2], self.boxes[:, :2] + self.boxes[:, 2:]], dim=1)
        rows = torch.argsort(self.places, stable=True)
        rows = rows[self.labels[rows] >= 0]
        counts = torch.bincount(self.places[rows], minlength=self.images).tolist()
        parts = (each[rows].split(counts) for each in (edges, self.scores, self.labels, self.areas))
        shapes: list[list[Any] | None] = [None] * len(counts)
        if self.shapes is not None:
            shapes = [[self.shapes[row] for row in own.tolist()] for own in rows.split(counts)]
        return [Detections(*each) for each in zip(*parts, shapes, strict=True)]


def write_coco(path: str | Path, dataset: DetectionSet) -> Path:
    """Write annotations in COCO's format, for its own tools; returns the file.

    Images whose ids are not integers, such as VOC's, are numbered from 1. To write matching detections, give
    `write_detections` what `read_coco` reads from the file. Difficult objects become ordinary objects, as the format
    has no such flag.
    """
    numbered = not all(isinstance(image.image_id, int) for image in dataset.images)
    category_ids = _category_ids(dataset)
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    for place, image in enumerate(dataset.images):
        key = place + 1 if numbered else image.image_id
        images.append({"id": key, "file_name": image.path.name, "width": image.width, "height": image.height})
        for box, label, crowd in zip(image.boxes.tolist(), image.labels.tolist(), image.crowd.tolist(), strict=True):
            bbox = _xywh(box)
            annotations.append(
                {
                    "id": len(annotations) + 1,
                    "image_id": key,
                    "category_id": category_ids[label],
                    "bbox": bbox,
                    "area": bbox[2] * bbox[3],
                    "iscrowd": int(crowd),
                }
            )
    categories = [{"id": key, "name": name} for key, name in zip(category_ids, dataset.classes, strict=True)]
    return _write(path, {"images": images, "annotations": annotations, "categories": categories})


def write_detections(path: str | Path, detections: Sequence[Detections], dataset: DetectionSet) -> Path:
    """Write detections in COCO's results format, by the set's own ids; returns the file.

    Args:
        path: The JSON file.
        detections: What was found in each image of the set.
        dataset: The images.
    """
    category_ids = _category_ids(dataset)
    return _write(
        path,
        [
            {"image_id": image.image_id, "category_id": category_ids[label], "bbox": _xywh(box), "score": score}
            for image, found in zip(dataset.images, detections, strict=True)
            for box, score, label in zip(
                found.boxes.tolist(), found.scores.tolist(), found.labels.tolist(), strict=True
            )
        ],
    )


def category_ids_of(dataset: DetectionSet) -> tuple[int | str, ...]:
    """Return how a set's file numbers its classes; empty if it is not in COCO's format."""
    return dataset.category_ids if isinstance(dataset, CocoSet) else ()


def _category_ids(dataset: DetectionSet) -> tuple[int | str, ...]:
    return dataset.category_ids if isinstance(dataset, CocoSet) else tuple(range(1, len(dataset.classes) + 1))


def _xywh(box: list[float]) -> list[float]:
    return [box[0], box[1], box[2] - box[0], box[3] - box[1]]


def _write(path: str | Path, content: Any) -> Path:
    write_atomically(path, json.dumps(content).encode())  # on one line: results of a large set have millions of numbers
    return Path(path)


def _load(path: Path, max_bytes: int) -> Any:
    if not path.is_file():
        raise DataError(f"{path} does not exist")
    try:
        return parse_json(read_bounded(path, max_bytes))
    except ValueError as error:
        raise DataError(f"{path} is truncated or not JSON ({brief(error)})") from error


def _get(entry: Any, key: str) -> Any:
    return entry.get(key) if isinstance(entry, dict) else None


def _by_id(
    entries: list[Any], read: Callable[[Any, str], Any], what: str, order: Callable[[Id], Any]
) -> dict[Any, Any]:
    """What entries say, ordered by their ids; an entry may be repeated, if it says the same."""
    found: dict[Any, Any] = {}
    for entry in entries:
        key = checked_id(entry, "id", what)
        key = number(key) if isinstance(key, float) else key
        if isinstance(key, float):
            raise DataError(f"{what} has the id {key}; it must be an integer or text")
        said = read(entry, what)
        if found.setdefault(key, said) != said:
            raise DataError(f"{what}'s id occurs twice: {brief(key)}, of {brief(found[key])} and {brief(said)}")
    return dict(sorted(found.items(), key=lambda item: order(item[0])))


def _as_written(key: Id) -> Any:
    return isinstance(key, str), key


def _by_number(key: Id) -> Any:
    return _as_written(number(key))


def _image(entry: Any, what: str, *, shown: bool) -> tuple[str | None, int, int]:
    """The file's name, and the width and height, 0 for what is not said; all may be wrong if it is not shown."""
    name = entry.get("file_name")
    if shown and name is None:
        raise DataError(f"{what} has no 'file_name': {brief(entry)}")
    if shown and not isinstance(name, str):
        raise DataError(f"{what} has the file_name {brief(name)}; it must be text")
    width, height = (side_of(entry, key, what, shown) for key in ("width", "height"))
    return str(name) if isinstance(name, str | int) else None, width, height


def _with_size(image: Annotated) -> Annotated:
    """The image with its own size, if the file tells none; what can't be read is said when it is loaded."""
    try:
        return image.with_size()
    except DataError:
        return image


def side_of(entry: Any, key: str, what: str, shown: bool) -> int:
    """Return an image's width or height in pixels, 0 if it is not said, or wrong where the image is not shown.

    Raises:
        DataError: It is wrong, and the image is shown.
    """
    value = entry.get(key)
    if value is None:
        return 0
    side = number(value) if type(value) in (int, float, str) else value
    if type(side) is int and 1 <= side <= LONGEST_SIDE:
        return side
    if shown:
        raise DataError(f"{what} has the {key} {brief(value)}; it must be an integer from 1 to {LONGEST_SIDE}")
    return 0


def _category(entry: Any, what: str) -> str:
    """The name; a category without one is called by its id."""
    name = entry.get("name")
    name = entry["id"] if name is None else name
    if type(name) not in (int, float, str):
        raise DataError(f"{what} has the name {brief(name)}; it must be text")
    return str(number(name) if isinstance(name, float) else name)


def _each(places: Mapping[Id, int], entries: Sequence[tuple[Any, str]], key: str) -> Tensor:
    """What each entry's id stands for, ``n``; -1 for an unknown one."""
    return torch.tensor([places.get(entry[key], -1) for entry, _ in entries], dtype=torch.int64)


def _labels(
    entries: Sequence[tuple[Any, str]], dataset: DetectionSet, results: str, ignore: bool
) -> tuple[Tensor, list[tuple[str, Tensor]]]:
    """The class of each detection, ``n``, -1 for those to leave out; and other readings, each with what it reads."""
    category_ids = _category_ids(dataset)
    named = torch.tensor([_get(entry, "category_name") is not None for entry, _ in entries], dtype=torch.bool)
    by_id, by_name = ([entries[i] for i in rows.nonzero().flatten().tolist()] for rows in (~named, named))
    ids, names = distinct(by_id, "category_id"), distinct(by_name, "category_name")
    more = "; --ignore-unknown-classes (ignore_unknown_classes=True) leaves out detections of other classes"
    count = (
        f"; category_id counts the classes as the annotations do, from {brief(category_ids[0])}" if category_ids else ""
    )

    ways = class_ways(category_ids, dataset.classes)
    known = known_of(ways[-1], names)
    from_0 = counting(category_ids, 0)
    if any(number(value) == 0 for value in ids) and any(len(known_of(way, ids)) == len(ids) for way in from_0):
        ways = [*ways, *from_0]
    if ignore:
        best = max(ways, key=lambda way: len(known_of(way, ids)))
        places = known_of(best, ids)
        if entries and not (places or known):
            raise DataError(f"{results} has no detection of a known class; known: {examples(category_ids)}{count}")
    else:
        places = choose(ways, ids, "category_id", f"{count}, or category_name names one{more}")
        if unknown := [name for name in names if name not in known]:
            raise DataError(
                f"{names[unknown[0]]} has the unknown category_name {brief(unknown[0])};"
                f" known: {examples(dataset.classes)}{more}"
            )

    def with_names(places: Mapping[Id, int]) -> Tensor:
        labels = torch.full((len(entries),), -1)
        labels[~named], labels[named] = _each(places, by_id, "category_id"), _each(known, by_name, "category_name")
        return labels

    labels = with_names(places)
    if from_0 and places and places == known_of(from_0[0], ids) != known_of(ways[0], ids):
        first = examples(f"{place} is {name}" for place, name in enumerate(dataset.classes))
        warnings.warn(f"{results}: category_id is read as counted from 0, as 0 occurs: {first}", stacklevel=3)
        return labels, []
    _tell_of_unknown(entries, labels, results)
    others = [*ways, *from_0, *counting(category_ids, 1)]
    return labels, [(what, with_names(other)) for what, other in other_readings(others, ids, places)]


def _tell_of_unknown(entries: Sequence[tuple[Any, str]], labels: Tensor, results: str) -> None:
    left = [entries[i][0] for i in (labels < 0).nonzero().flatten().tolist()]
    if left:
        classes = Counter(str(each.get("category_name") or each.get("category_id")) for each in left)
        shown = ", ".join(f"{brief(name)}: {count}" for name, count in classes.most_common(NAMED))
        warnings.warn(
            f"{results}: left out {counted(len(left), 'detection')} of {counted(len(classes), 'class')} that the"
            f" annotations don't have ({shown}{', ...' * (len(classes) > NAMED)})",
            stacklevel=4,
        )


def box_of(entry: Any, where: str) -> list[float]:
    """Return the numbers of a box; of an object with polygons alone, those of the box around them.

    Raises:
        DataError: They are not four finite numbers, or those of another kind of box.
    """
    box, mode, shape = (_get(entry, key) for key in ("bbox", "bbox_mode", "segmentation"))
    if mode not in (None, 1, "XYWH_ABS", "BoxMode.XYWH_ABS"):
        raise DataError(f"{where} has the bbox_mode {brief(mode)}; bbox must be [left, top, width, height] in pixels")
    if box in (None, []) and shape:
        return _around(shape, where)
    if not isinstance(box, list) or len(box) != 4 or not all(map(_is_finite, box)):
        rotated = "; rotated boxes are of another kind" if isinstance(box, list) and len(box) == 5 else ""
        raise DataError(
            f"{where} has the bbox {brief(box)}; it must be 4 finite numbers, each at most {LARGEST:.0e}{rotated}"
        )
    return [float(each) for each in box]


def _shapes(entries: Sequence[tuple[Any, str]], images: Sequence[Annotated], kind: Kind) -> list[Any]:
    """The mask or keypoints of each entry, in its image; None for boxes."""
    shapes, size = [], 0
    for (each, where), image in zip(entries, images, strict=True):
        shapes.append(_shape(each, where, kind, image))
        size += len(shapes[-1]["counts"]) if kind == "segm" else 0
        if size > MAX_BYTES:  # polygons take less in the file
            raise DataError(f"{where}: the masks so far take more than {MAX_BYTES} bytes")
    return shapes


def _shape(entry: Any, where: str, kind: Kind, image: Annotated) -> Any:
    if kind == "keypoints":
        return keypoints_of(entry, where)
    if kind == "bbox":
        return None
    if not (image.width and image.height):
        raise DataError(f"{where}'s image {brief(image.image_id)} has no width and height, which masks need")
    if _get(entry, "segmentation") is None:
        raise DataError(f"{where} has no segmentation, which --iou-type segm (kind='segm') compares")
    return mask_of(entry["segmentation"], where, image.height, image.width)


def _extent(entry: Any, where: str, kind: Kind, shape: Any) -> tuple[list[float], float]:
    """A detection's box and area; without a box, those of its mask or keypoints, as pycocotools' loadRes has them."""
    if _get(entry, "bbox") in (None, []):
        told = _get(entry, "segmentation")
        if kind == "segm" or (kind == "bbox" and isinstance(told, dict)):
            mask = shape if kind == "segm" else mask_of(told, where)
            return box_around(mask), pixels_of(mask)
        box = box_around_points(shape) if kind == "keypoints" else box_of(entry, where)
    else:
        box = box_of(entry, where)
    return box, box[2] * box[3]


def area_of(entry: Any) -> float:
    """Return the area that an annotation tells, NaN if it tells none."""
    area = _get(entry, "area")
    return float(area) if _is_finite(area) else math.nan


def _around(polygons: Any, where: str) -> list[float]:
    """The box of polygons, each ``[x, y, x, y, ...]``, or of a mask."""
    if isinstance(polygons, dict):
        return box_around(mask_of(polygons, where))
    whole = [each for each in polygons if isinstance(each, list)] if isinstance(polygons, list) else []
    numbers = [coordinate for each in whole for coordinate in each]
    if len(whole) != len(polygons) or any(len(each) % 2 for each in whole) or not all(map(_is_finite, numbers)):
        raise DataError(f"{where} has no bbox, and its segmentation is no list of polygons; AP50 is of boxes")
    x, y = ([coordinate for each in whole for coordinate in each[axis::2]] for axis in (0, 1))
    if not x:
        raise DataError(f"{where} has no bbox, and no polygon in its segmentation; AP50 is of boxes")
    return [float(min(x)), float(min(y)), float(max(x) - min(x)), float(max(y) - min(y))]


def _score(entry: Any, where: str) -> float:
    score = _get(entry, "score")
    if not _is_finite(score):
        raise DataError(f"{where} has the score {brief(score)}; it must be a finite number")
    return float(score)


def flag_of(entry: Any, key: str, where: str) -> bool:
    """Return an annotation's flag, False if it is not said.

    Raises:
        DataError: It is neither 0 nor 1.
    """
    value = _get(entry, key)
    if isinstance(value, list | dict) or value not in FLAGS:
        raise DataError(f"{where} has {brief(value)} as {key}; it must be 0 or 1")
    return FLAGS[value]


def _is_finite(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= LARGEST  # NaN is not


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # a name that no file can have
        return False
