"""COCO's JSON files as tables: `coco` has the same as records."""

import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from metricopt_ext.detection.box_kinds import check_annotated, check_found, hits, refuse_corners
from metricopt_ext.detection.boxes_outside import warn_of_boxes_outside
from metricopt_ext.detection.coco_entries import Entries, get, side_of
from metricopt_ext.detection.ids import (
    Id,
    checked_id,
    choose,
    class_ways,
    counting,
    examples,
    image_ways,
    known_of,
    number,
    other_readings,
    written_ways,
)
from metricopt_ext.detection.tables import (
    Array,
    Booleans,
    Floats,
    FoundTable,
    Integers,
    Kind,
    TruthLike,
    TruthTable,
    as_objects,
)
from metricopt_ext.errors import DataError
from metricopt_ext.utils.files import parse_json
from metricopt_ext.utils.words import brief, counted

NAMED = 5  # images listed in a warning
LVIS = ("neg_category_ids", "not_exhaustive_category_ids")  # of an image, and no other format's

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
    if wrong == ["categories"] and any(get(each, "caption") is not None for each in content["annotations"]):
        raise DataError(f"{annotations} has captions, and no boxes; COCO's boxes are in instances_*.json")
    if wrong:
        raise DataError(f"{annotations} has no list {wrong[0]!r}; COCO's format needs images, annotations, categories")
    if not content["images"]:
        raise DataError(f"{annotations} has an empty list 'images'; it should name an image")
    if any(get(each, key) is not None for each in content["images"] for key in LVIS):
        raise DataError(
            f"{annotations} is in LVIS's format, by {' and '.join(LVIS)}: its images are searched for some classes"
            " alone, which COCO's numbers know nothing of. Use the package lvis, or leave these keys out to count all"
        )
    shown = images_dir is not None
    images = _by_id(content["images"], partial(_image, shown=shown), f"{annotations}: an image", _as_written)
    categories = _by_id(content["categories"], _category, f"{annotations}: a category", _by_number)
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
        pixels = [size if all(size) else size_of(key, name) for key, name, size in zip(ids, names, pixels, strict=True)]
    sizes = np.array(pixels, dtype=np.int64).reshape(-1, 2)

    there, ways = entries.distinct("image_id"), written_ways(tuple(images))
    at = max((known_of(way, there) for way in ways), key=len)
    if not at or len(at) == len(there):
        at = choose(ways, there, "image_id", "")
    ways = class_ways(tuple(categories), tuple(categories.values()))
    known = choose(ways, entries.distinct("category_id"), "category_id", "")
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
    refuse_corners(numbers, np.zeros((len(numbers), 2)), str(annotations), areas)  # by areas alone
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
    """Read detections; see `coco.read_detections`.

    Args:
        results: The JSON file.
        dataset: The images that the detections are of.
        kind: What is compared.
        strict: Take boxes as they are, whatever kind they seem to be of, and leave out detections of classes that the
            set does not have, as pycocotools does.

    Raises:
        DataError: As `coco.read_detections`.
    """
    truth = TruthTable.of(dataset)
    entries = _detections(Path(results))
    image_ids, ways = entries.distinct("image_id"), image_ways(truth.image_ids, truth.names)
    at = choose(ways, image_ids, "image_id", "; image_id is the image's id or the name of its file")
    labels, other_labels = _labels(entries, truth, str(results), strict)
    places = entries.places("image_id", at)
    shapes = entries.shapes(kind, places, truth.image_ids, truth.sizes)
    boxes, areas = entries.extents(kind, shapes)
    listed = None if shapes is None else as_objects(shapes)
    read = _Results(boxes, areas, listed, entries.scores(), places, labels, len(truth))
    found = read.found()
    if kind == "bbox" and not strict:
        check_found(read.boxes, read.places, read.found, truth, str(results))

    counted_ways = [way for first in (0, 1) for way in counting(truth.image_ids, first)]
    others = [
        (f"image_id is read as the id; {what}", replace(read, places=entries.places("image_id", other)), more)
        for prefix, each_way, more in (("read as ", ways, 0), ("", counted_ways, 1))
        for what, other in ((prefix + what, other) for what, other in other_readings(each_way, image_ids, at))
    ] + [
        (f"category_id is read as the annotations count; {what}", replace(read, labels=other), 0)
        for what, other in other_labels
    ]
    before = hits(found, truth) if others else 0
    for said, other_read, more in others:
        after = hits(other_read.found(), truth)
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
        shapes: Masks, ``n``; None for boxes.
        scores: ``n``.
        places: The image of each, ``n``.
        labels: The class of each, ``n``; -1 for those to leave out.
        images: Number of images.
    """

    boxes: Floats
    areas: Floats
    shapes: Any
    scores: Floats
    places: Integers
    labels: Integers
    images: int

    def found(self, edges: Array | None = None) -> FoundTable:
        """Return the detections by image, in the file's order; from other edges than the file's if given."""
        if edges is None:
            edges = np.concatenate([self.boxes[:, :2], self.boxes[:, :2] + self.boxes[:, 2:]], axis=1)
        table = FoundTable(self.images, self.places, edges, self.scores, self.labels, self.areas, self.shapes)
        rows = np.argsort(self.places, kind="stable")
        return table.take(rows[self.labels[rows] >= 0])


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
        return parse_json(read_bounded(path))
    except ValueError as error:
        raise DataError(f"{path} is truncated or not JSON ({brief(error)})") from error


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


def _category(entry: Any, what: str) -> str:
    """The name; a category without one is called by its id."""
    name = entry.get("name")
    name = entry["id"] if name is None else name
    if type(name) not in (int, float, str):
        raise DataError(f"{what} has the name {brief(name)}; it must be text")
    return str(number(name) if isinstance(name, float) else name)


def _labels(
    entries: Entries, truth: TruthTable, results: str, ignore: bool
) -> tuple[Integers, list[tuple[str, Integers]]]:
    """The class of each detection, ``n``, -1 for those to leave out; and other readings, each with what it reads."""
    category_ids = truth.category_ids or tuple(range(1, len(truth.classes) + 1))
    named = entries.named()
    ids, names = entries.distinct("category_id", ~named), entries.distinct("category_name", named)
    count = (
        f"; category_id counts the classes as the annotations do, from {brief(category_ids[0])}" if category_ids else ""
    )

    ways = class_ways(category_ids, truth.classes)
    known = known_of(ways[-1], names)
    from_0 = counting(category_ids, 0)
    if any(number(value) == 0 for value in ids) and any(len(known_of(way, ids)) == len(ids) for way in from_0):
        ways = [*ways, *from_0]
    if ignore:
        best = max(ways, key=lambda way: len(known_of(way, ids)))
        places = known_of(best, ids)
        if len(entries) and not (places or known):
            raise DataError(f"{results} has no detection of a known class; known: {examples(category_ids)}{count}")
    else:
        places = choose(ways, ids, "category_id", f"{count}, or category_name names one")
        if unknown := [name for name in names if name not in known]:
            raise DataError(
                f"{names[unknown[0]]} has the unknown category_name {brief(unknown[0])};"
                f" known: {examples(truth.classes)}"
            )

    def with_names(places: Mapping[Id, int]) -> Integers:
        labels = np.full(len(entries), -1)
        labels[~named] = entries.places("category_id", places, ~named)
        labels[named] = entries.places("category_name", known, named)
        return labels

    labels = with_names(places)
    if from_0 and places and places == known_of(from_0[0], ids) != known_of(ways[0], ids):
        first = examples(f"{place} is {name}" for place, name in enumerate(truth.classes))
        warnings.warn(f"{results}: category_id is read as counted from 0, as 0 occurs: {first}", stacklevel=3)
        return labels, []
    _tell_of_unknown(entries, labels, results)
    others = [*ways, *from_0, *counting(category_ids, 1)]
    return labels, [(what, with_names(other)) for what, other in other_readings(others, ids, places)]


def _tell_of_unknown(entries: Entries, labels: Integers, results: str) -> None:
    if len(left := np.flatnonzero(labels < 0)):
        classes = Counter(entries.called(row) for row in left.tolist())
        shown = ", ".join(f"{brief(name)}: {count}" for name, count in classes.most_common(NAMED))
        warnings.warn(
            f"{results}: left out {counted(len(left), 'detection')} of {counted(len(classes), 'class')} that the"
            f" annotations don't have ({shown}{', ...' * (len(classes) > NAMED)})",
            stacklevel=4,
        )


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # a name that no file can have
        return False
