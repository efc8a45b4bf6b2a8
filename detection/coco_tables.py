"""COCO's JSON files as tables: `coco` has the same as records."""

import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from metricopt_ext.detection.box_kinds import check_annotated, check_found
from metricopt_ext.detection.boxes_outside import warn_of_boxes_outside
from metricopt_ext.detection.coco_entries import Entries, get, side_of
from metricopt_ext.detection.ids import all_places_of, checked_id, number, places_of
from metricopt_ext.detection.tables import Booleans, FoundTable, Integers, Kind, TruthLike, TruthTable, as_objects
from metricopt_ext.errors import DataError
from metricopt_ext.runtime.pace import followed
from metricopt_ext.utils.files import parse_json
from metricopt_ext.utils.words import brief, counted

NAMED = 5  # images listed in a warning

Size = Callable[[int | str, str], tuple[int, int]]


def read_truth(
    annotations: str | Path,
    images_dir: str | Path | None = None,
    *,
    kind: Kind = "bbox",
    strict: bool = False,
    size_of: Size | None = None,
) -> TruthTable:
    """Read annotated images; see `coco.read_coco`.

    Args:
        annotations: The JSON file.
        images_dir: Folder of the images.
        kind: What is compared.
        strict: Count what pycocotools counts: boxes without area, those of another kind, and of several annotations
            with one id the last, as often as there are such; one with the id 0 can't be hit.
        size_of: Returns the width and height of an image, by its id and file; asked where the JSON file tells none.

    Raises:
        DataError: As `coco.read_coco`.
    """
    content, entries = _annotations(Path(annotations))
    wrong = [key for key in ("images", "annotations", "categories") if not isinstance(get(content, key), list)]
    if wrong:
        raise DataError(f"{annotations} has no list {wrong[0]!r}; COCO's format needs images, annotations, categories")
    if not content["images"]:
        raise DataError(f"{annotations} has an empty list 'images'; it should name an image")
    shown = images_dir is not None
    images = _by_id(content["images"], partial(_image, shown=shown), f"{annotations}: an image")
    categories = _by_id(content["categories"], _category, f"{annotations}: a category")
    double = [name for name, count in Counter(categories.values()).items() if count > 1]
    if double:
        raise DataError(f"{annotations} has several categories named {double[0]!r}")
    folder = Path() if images_dir is None else Path(images_dir)
    if shown:
        missing = [name for name, _, _ in images.values() if not _is_file(folder / str(name))]
        if missing:
            raise DataError(f"{folder} lacks {len(missing)} of {len(images)} images, first {str(missing[0])[:200]}")
    ids = list(images)
    names = [(folder / name).as_posix() if name else "" for name, _, _ in images.values()]
    pixels = [(width, height) for _, width, height in images.values()]
    if size_of is not None:
        each = followed(zip(ids, names, pixels, strict=True), f"look at the images of {annotations}", len(ids))
        pixels = [size if all(size) else size_of(key, name) for key, name, size in each]
    sizes = np.array(pixels, dtype=np.int64).reshape(-1, 2)

    there = entries.distinct("image_id")
    at = places_of(ids, there) or all_places_of(ids, there, "image_id")
    known = all_places_of(tuple(categories), entries.distinct("category_id"), "category_id")
    places, labels = entries.places("image_id", at), entries.places("category_id", known)
    numbers = entries.boxes()
    shapes = entries.shapes(kind, places, ids, sizes)
    kept: Booleans = places >= 0
    if left := len(kept) - int(kept.sum()):  # as in a file whose list of images was cut
        unknown = next(key for key in there if key not in at)
        warnings.warn(
            f"{annotations}: {left} of {counted(len(kept), 'annotation')} left out, of images that are not listed, such"
            f" as {brief(unknown)}",
            stacklevel=2,
        )
    flat: Booleans = kept & (numbers[:, 2:] <= 0).any(1)
    if kind == "bbox" and not strict:
        kept &= ~flat
    crowd, areas = entries.crowds(kept), entries.areas()
    if not strict:  # pycocotools does not count an object of such an area
        areas = np.where(areas < 0, np.nan, areas)
    if kind == "segm":
        from metricopt_ext.detection.shapes import pixels_of

        told = zip(areas.tolist(), shapes or (), strict=True)
        areas = np.array(
            [pixels_of(shape) if np.isnan(area) and shape is not None else area for area, shape in told],
            dtype=np.float64,
        )
    called = [Path(name).name or str(key) for name, key in zip(names, ids, strict=True)]
    if not kept[flat].all():
        of = [called[place] for place in places[flat]]
        more = f" and {len(of) - NAMED} more" if len(of) > NAMED else ""
        warnings.warn(
            f"boxes in {annotations}: {len(of)} without area left out ({', '.join(of[:NAMED])}{more})", stacklevel=2
        )
    chosen = _as_pycocotools(entries.ids(), places, str(annotations)) if strict else np.flatnonzero(kept)
    chosen = chosen[kept[chosen]]
    rows = chosen[np.argsort(places[chosen], kind="stable")]
    edges = np.concatenate([numbers[:, :2], numbers[:, :2] + numbers[:, 2:]], axis=1)
    truth = TruthTable(
        tuple(categories.values()),
        tuple(categories),
        ids,
        names,
        sizes,
        places[rows],
        edges[rows],
        labels[rows],
        np.zeros(len(rows), dtype=bool),
        crowd[rows],
        areas[rows],
        None if shapes is None else as_objects(shapes)[rows],
        np.array([each == 0 for each in entries.ids()], dtype=bool)[rows] if strict else None,
        rows,
    )
    if strict or kind != "bbox":  # boxes decide nothing
        return truth
    check_annotated(truth, str(annotations))
    warn_of_boxes_outside(annotations, truth, called)
    return truth


def _as_pycocotools(ids: list[Any], places: Integers, annotations: str) -> Integers:
    """The annotation that pycocotools takes for each, in its order: the last one with the same id."""
    if None in ids:
        raise DataError(f"{annotations}: annotation {ids.index(None)} has no id, which --strict (pycocotools) goes by")
    last = {key: row for row, key in enumerate(ids)}
    return np.array([last[ids[row]] for row in np.argsort(places, kind="stable").tolist()], dtype=np.int64)


def read_found(
    results: str | Path,
    dataset: TruthLike,
    *,
    kind: Kind = "bbox",
    strict: bool = False,
) -> FoundTable:
    """Read COCO's results format: a list of ``{image_id, category_id, bbox: [x, y, width, height], score}``.

    An image is identified by its ``image_id`` in the set: VOC's are strings, the file names without suffix. A class is
    identified by its ``category_id``, which counts the classes from 1 in sets not read from COCO's format. Ids are
    those of the set, as they are written there; a float such as 1.0 is an integer.

    Args:
        results: The JSON file.
        dataset: The images that the detections are of.
        kind: What is compared.
        strict: Take boxes as they are, whatever kind they seem to be of, and leave out detections of classes that the
            set does not have, as pycocotools does.

    Raises:
        DataError: The file is truncated or not a list in this format, has an unknown image or category, a box or score
            that is not a finite number, or boxes of another kind (`box_kinds`).
    """
    truth = TruthTable.of(dataset)
    entries = _detections(Path(results))
    at = all_places_of(truth.image_ids, entries.distinct("image_id"), "image_id", "; image_id is the image's id")
    places, labels = entries.places("image_id", at), _labels(entries, truth, str(results), strict)
    shapes = entries.shapes(kind, places, truth.image_ids, truth.sizes)
    boxes, areas = entries.extents(shapes)
    edges = np.concatenate([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]], axis=1)
    listed = None if shapes is None else as_objects(shapes)
    rows = np.argsort(places, kind="stable")
    rows = rows[labels[rows] >= 0]
    found = FoundTable(len(truth), places, edges, entries.scores(), labels, areas, listed).take(rows)
    if kind == "bbox" and not strict:
        check_found(boxes[rows], found, truth, str(results))
    return found


def _annotations(path: Path) -> tuple[Any, Entries]:
    """What a file of annotations holds, and its annotations, none where they are no list."""
    content = _parsed(path)
    listed = get(content, "annotations")
    return content, Entries(listed if isinstance(listed, list) else [], f"{path}: annotation")


def _detections(path: Path) -> Entries:
    content = _parsed(path)
    if not isinstance(content, list):
        raise DataError(f"{path} holds a {type(content).__name__}; COCO's results are a list of detections")
    return Entries(content, f"{path}: detection")


def _parsed(path: Path) -> Any:
    if not path.is_file():
        raise DataError(f"{path} does not exist")
    try:
        return parse_json(path.read_bytes())
    except ValueError as error:
        raise DataError(f"{path} is truncated or not JSON ({brief(error)})") from error


def _by_id(entries: list[Any], read: Callable[[Any, str], Any], what: str) -> dict[Any, Any]:
    """What entries say, ordered by their ids; an entry may be repeated, if it says the same."""
    found: dict[Any, Any] = {}
    for entry in entries:
        key = checked_id(entry, "id", what)
        key = number(key)
        if isinstance(key, float):
            raise DataError(f"{what} has the id {key}; it must be an integer or text")
        said = read(entry, what)
        if found.setdefault(key, said) != said:
            raise DataError(f"{what}'s id occurs twice: {brief(key)}, of {brief(found[key])} and {brief(said)}")
    return dict(sorted(found.items(), key=lambda item: (isinstance(item[0], str), item[0])))


def _image(entry: Any, what: str, *, shown: bool) -> tuple[str | None, int, int]:
    """The file's name, and the width and height, 0 for what is not said; all may be wrong if it is not shown."""
    name = entry.get("file_name")
    if shown and name is None:
        raise DataError(f"{what} has no 'file_name': {brief(entry)}")
    if shown and not isinstance(name, str):
        raise DataError(f"{what} has the file_name {brief(name)}; it must be text")
    width, height = (side_of(entry, key, what, shown) for key in ("width", "height"))
    return str(name) if isinstance(name, str | int) else None, width, height


def _category(entry: Any, what: str) -> str:
    """The name; a category without one is called by its id."""
    name = entry.get("name")
    name = entry["id"] if name is None else name
    if type(name) not in (int, float, str):
        raise DataError(f"{what} has the name {brief(name)}; it must be text")
    return str(number(name))


def _labels(entries: Entries, truth: TruthTable, results: str, strict: bool) -> Integers:
    """The class of each detection, ``n``; -1 for those of unknown classes, which a strict count leaves out."""
    category_ids, ids = truth.category_ids or range(1, len(truth.classes) + 1), entries.distinct("category_id")
    if not strict:
        hint = "; category_id counts the classes from 1" if not truth.category_ids else ""
        return entries.places("category_id", all_places_of(category_ids, ids, "category_id", hint))
    labels = entries.places("category_id", places_of(category_ids, ids))
    if left := int((labels < 0).sum()):
        warnings.warn(
            f"{results}: left out {counted(left, 'detection')} of classes that the annotations don't have", stacklevel=3
        )
    return labels


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # a name that no file can have
        return False
