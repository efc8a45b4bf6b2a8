"""Annotated images and detections in COCO's JSON formats."""

import json
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from metricopt_ext.detection.records import LONGEST_SIDE, Annotated, Detections, DetectionSet, warn_of_boxes_outside
from metricopt_ext.errors import DataError
from metricopt_ext.utils.files import JSON_BYTES, parse_json, read_bounded, write_atomically
from metricopt_ext.utils.words import brief

NAMED = 5  # images listed in a warning

LARGEST = 1e30  # of a coordinate or score: sums of two are finite in float32


@dataclass(frozen=True, eq=False)
class CocoSet(DetectionSet):
    """A `DetectionSet` that remembers how its file numbers the classes.

    Attributes:
        category_ids: The id of each class, ascending.
    """

    category_ids: tuple[int, ...] = ()

    def subset(self, indices: Sequence[int]) -> "CocoSet":
        """Return the images at some positions."""
        return replace(self, images=[self.images[index] for index in indices])


def read_coco(
    annotations: str | Path,
    images_dir: str | Path | None = None,
    *,
    dtype: torch.dtype = torch.float32,
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
        max_bytes: Most bytes of the JSON file, which takes up to 25 times as much memory.

    Raises:
        DataError: The file is truncated, too large, not JSON of this format or without images; an id is duplicate or
            unknown; a box or size is not a number; an image is missing.
    """
    content = _load(Path(annotations), max_bytes)
    wrong = [key for key in ("images", "annotations", "categories") if not isinstance(_get(content, key), list)]
    if wrong:
        raise DataError(f"{annotations} has no list {wrong[0]!r}; COCO's format needs images, annotations, categories")
    if not content["images"]:
        raise DataError(f"{annotations} has an empty list 'images'; it should name an image")
    images = _by_id(content["images"], ("file_name", "width", "height"), f"{annotations}: an image")
    categories = _by_id(content["categories"], ("name",), f"{annotations}: a category")
    double = [name for name, count in Counter(each["name"] for each in categories.values()).items() if count > 1]
    if double:
        raise DataError(f"{annotations} has several categories named {double[0]!r}")
    labels = {key: label for label, key in enumerate(categories)}

    objects: dict[Any, list[tuple[list[float], int, bool]]] = {key: [] for key in images}
    flat = []
    for i, each in enumerate(content["annotations"]):
        where = f"{annotations}: annotation {i}"
        image, category = _known(each, "image_id", images, where), _known(each, "category_id", labels, where)
        x, y, width, height = _box(each, where)
        if width <= 0 or height <= 0:
            flat.append(str(images[image]["file_name"]))
        else:
            crowd = bool(each.get("iscrowd", 0))
            objects[image].append(([float(edge) for edge in (x, y, x + width, y + height)], labels[category], crowd))
    if flat:
        more = f" and {len(flat) - NAMED} more" if len(flat) > NAMED else ""
        warnings.warn(
            f"boxes in {annotations}: {len(flat)} without area left out ({', '.join(flat[:NAMED])}{more})", stacklevel=2
        )
    folder = Path() if images_dir is None else Path(images_dir)
    if images_dir is not None:
        missing = [image["file_name"] for image in images.values() if not _is_file(folder / image["file_name"])]
        if missing:
            raise DataError(f"{folder} lacks {len(missing)} of {len(images)} images, first {missing[0][:200]}")
    annotated = [
        Annotated(
            image_id=key,
            path=folder / image["file_name"],
            width=image["width"],
            height=image["height"],
            boxes=torch.tensor([box for box, _, _ in objects[key]], dtype=dtype).reshape(-1, 4),
            labels=torch.tensor([label for _, label, _ in objects[key]], dtype=torch.int64),
            difficult=torch.zeros(len(objects[key]), dtype=torch.bool),
            crowd=torch.tensor([crowd for _, _, crowd in objects[key]], dtype=torch.bool),
        )
        for key, image in images.items()
    ]
    warn_of_boxes_outside(annotations, annotated, [image.path.name or str(image.image_id) for image in annotated])
    return CocoSet(tuple(each["name"] for each in categories.values()), annotated, tuple(categories))


def read_detections(results: str | Path, dataset: DetectionSet, *, max_bytes: int = JSON_BYTES) -> list[Detections]:
    """Read COCO's results format: a list of ``{image_id, category_id, bbox: [x, y, width, height], score}``.

    An image is identified by its ``image_id`` in the set: VOC's are strings, the file names without suffix. A class is
    identified by its ``category_id``, which counts the classes from 1 in sets not read from COCO's format, or by its
    ``category_name``, if there is one.

    Args:
        results: The JSON file.
        dataset: The images that the detections are of.
        max_bytes: Most bytes of the JSON file, which takes up to 25 times as much memory.

    Returns:
        The detections in each image of the set, in float64 and in the file's order.

    Raises:
        DataError: The file is truncated, too large or not a list in this format, has an unknown image or category, or a
            box or score that is not a finite number.
    """
    content = _load(Path(results), max_bytes)
    if not isinstance(content, list):
        raise DataError(f"{results} holds a {type(content).__name__}; COCO's results are a list of detections")
    places = {image.image_id: place for place, image in enumerate(dataset.images)}
    labels = {key: label for label, key in enumerate(_category_ids(dataset))}
    named = {name: label for label, name in enumerate(dataset.classes)}
    found: list[list[tuple[list[float], float, int]]] = [[] for _ in dataset.images]
    for i, each in enumerate(content):
        where = f"{results}: detection {i}"
        place = places[_known(each, "image_id", places, where)]
        if "category_name" in each:
            label = named[_known(each, "category_name", named, where)]
        else:
            label = labels[_known(each, "category_id", labels, where)]
        x, y, width, height = _box(each, where)
        score = each.get("score")
        if not _is_finite(score):
            raise DataError(f"{where} has the score {brief(score)}; it must be a finite number")
        found[place].append(([float(edge) for edge in (x, y, x + width, y + height)], float(score), label))
    return [
        Detections(
            torch.tensor([box for box, _, _ in each], dtype=torch.float64).reshape(-1, 4),
            torch.tensor([score for _, score, _ in each], dtype=torch.float64),
            torch.tensor([label for _, _, label in each], dtype=torch.int64),
        )
        for each in found
    ]


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


def _category_ids(dataset: DetectionSet) -> tuple[int, ...]:
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


def _by_id(entries: list[Any], keys: Sequence[str], what: str) -> dict[Any, dict[str, Any]]:
    """The entries ordered by id."""
    for entry in entries:
        for key in ("id", *keys):
            if _get(entry, key) is None:
                raise DataError(f"{what} has no {key!r}: {brief(entry)}")
        for key in sorted({"id", "width", "height"} & {"id", *keys}):
            if type(entry[key]) is not int:
                raise DataError(f"{what} has the {key} {brief(entry[key])}; it must be an integer")
        for key in sorted({"width", "height"} & {*keys}):
            if not 1 <= entry[key] <= LONGEST_SIDE:
                raise DataError(f"{what} has the {key} {brief(entry[key])}; it must be from 1 to {LONGEST_SIDE}")
        for key in sorted({"name", "file_name"} & {*keys}):
            if not isinstance(entry[key], str):
                raise DataError(f"{what} has the {key} {brief(entry[key])}; it must be text")
    ids = Counter(entry["id"] for entry in entries)
    double = [key for key, count in ids.items() if count > 1]
    if double:
        raise DataError(f"{what}'s id occurs twice: {double[0]}")
    return {entry["id"]: entry for entry in sorted(entries, key=lambda entry: entry["id"])}


def _known(entry: Any, key: str, known: dict[Any, Any], where: str) -> Any:
    """The entry's id under this key, which must be a known one."""
    value = _get(entry, key)
    if value is None:
        raise DataError(f"{where} has no {key!r}")
    if isinstance(value, list | dict) or value not in known:
        examples = ", ".join(repr(each) for each in list(known)[:NAMED])
        raise DataError(
            f"{where} has the unknown {key} {brief(value)}; known: {examples}{', ...' * (len(known) > NAMED)}"
        )
    return value


def _box(entry: Any, where: str) -> list[float]:
    box = _get(entry, "bbox")
    if not isinstance(box, list) or len(box) != 4 or not all(map(_is_finite, box)):
        raise DataError(f"{where} has the bbox {brief(box)}; it must be 4 finite numbers, each at most {LARGEST:.0e}")
    return box


def _is_finite(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= LARGEST  # NaN is not


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # a name that no file can have
        return False
