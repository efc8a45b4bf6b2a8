"""COCO's AP, AP50 or AP75 of boxes or masks as the black-box metric, by pycocotools."""

import contextlib
import io
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn

from metricopt_ext.detection.ap50 import COCO_DETECTIONS, told_beyond_limit
from metricopt_ext.detection.box_kinds import refuse_corners, refuse_normalised
from metricopt_ext.detection.coco_entries import area_of, box_of, flag_of, side_of
from metricopt_ext.detection.ids import Id, all_places_of, checked_id, distinct, examples, number, places_of
from metricopt_ext.detection.metric import halves_of_images
from metricopt_ext.detection.shapes import masks_from
from metricopt_ext.detection.tables import KINDS, Booleans, Kind
from metricopt_ext.errors import DataError, MetricError
from metricopt_ext.tasks.halved import with_halves
from metricopt_ext.tasks.metric import Metric
from metricopt_ext.utils.extras import install
from metricopt_ext.utils.words import brief, counted

try:
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval
except ImportError as error:
    raise ImportError(f"COCO's metrics need pycocotools: {install('pycocotools')}") from error

Name = Literal["AP", "AP50", "AP75"]
IOUS: dict[Name, float] = {"AP50": 0.5, "AP75": 0.75}  # of one IoU

COMPARED = 500  # images by which another reading of boxes is compared


def coco_metric(
    images: Sequence[Tensor],
    annotations: Mapping[str, Any],
    *,
    kind: Kind = "bbox",
    name: Name = "AP",
    halves: Sequence[Tensor] | str | None = None,
    detect: Callable[[nn.Module, Tensor], Mapping[str, Tensor]] | None = None,
) -> Metric:
    """Return the black box: COCO's AP, AP50 or AP75 of what a detector finds in images.

    Args:
        images: What the detector takes, each ``3 x h x w``, in the order of ``annotations["images"]``.
        annotations: The content of a COCO file: ``images``, ``annotations`` and ``categories``.
        kind: What is compared by IoU: boxes (``"bbox"``) or masks (``"segm"``).
        name: ``"AP"``, the mean over the IoUs 0.5, 0.55, ..., 0.95, ``"AP50"`` or ``"AP75"``.
        halves: Positions of two halves of the images, on each of which the metric also reports its value, or why there
            are none; by default random ones, if each has an object that counts. Empty for a metric without.
        detect: ``detect(model, image)`` returns what is found in an image as torchvision's detectors do: ``scores``,
            ``n``, ``labels``, ``n``, which are the categories' ids, and ``boxes``, ``n x 4``, or ``masks``,
            ``n x 1 x h x w`` in [0, 1]. By default ``model([image])[0]``.

    The ids of annotations and ``area`` are not used; ``iscrowd`` may be missing. One warning each
    counts annotations of other images, detections of other categories, and those beyond the 100 best of a category in
    an image, none of which count.

    Raises:
        DataError: The kind or name is unknown, images and annotations don't fit together, an image is repeated, what is
            compared is missing or of another kind, or no object counts.
    """
    if kind not in KINDS or name not in get_args(Name):
        raise DataError(
            f"kind={kind!r} must be one of {', '.join(KINDS)}, and name={name!r} one of {', '.join(get_args(Name))}"
        )
    if not isinstance(annotations, Mapping):
        raise DataError(f"annotations must be a COCO file's content, as json.load gives, got {brief(annotations)}")
    if isinstance(images, Mapping) or not hasattr(images, "__len__"):
        raise DataError(f"images are {brief(images)}; they must be a list, in the order of annotations['images']")
    annotations = {key: _plain(annotations.get(key)) for key in ("images", "annotations", "categories")}
    if (entries := len(annotations["images"] or ())) != len(images):
        raise DataError(f"there are {len(images)} images, but annotations of {entries}")
    content = _as_read(annotations, kind)
    if detect is None:
        _warn_of_sizes(images, content["images"])
    ids = [entry["id"] for entry in content["images"]]
    judged = [entry for entry in content["annotations"] if not entry["iscrowd"]]
    objects = {entry["image_id"] for entry in judged}
    if not objects.intersection(ids):
        raise DataError(f"none of {len(ids)} images has an object that counts; {name} needs one")
    with contextlib.redirect_stdout(io.StringIO()):
        truth = COCO()
        truth.dataset = content
        truth.createIndex()
    told: set[str] = set()
    of_images = halves_of_images(halves, np.array([image_id in objects for image_id in ids]))

    def function(model: nn.Module) -> Any:
        results = []
        for entry, image in zip(content["images"], images, strict=True):
            found = model([image])[0] if detect is None else detect(model, image)
            results += _results(entry, found, kind)
        _tell_of(results, sorted(truth.cats), kind, told)
        if kind == "bbox" and "sides" not in told:
            told.add("sides")
            _refuse_sides(truth, results, [image_id for image_id in ids if image_id in objects][:COMPARED])

        def value_on(half: Tensor | None) -> float:
            return _value(truth, results, ids if half is None else [ids[i] for i in half.tolist()], kind, name)

        return with_halves(value_on, of_images)

    labels = {"bbox": name, "segm": f"mask {name}"}
    return Metric(function, maximize=True, name=labels[kind])


def _as_read(annotations: Mapping[str, Any], kind: Kind) -> dict[str, Any]:
    """The content of a COCO file with what pycocotools goes by, which takes ids at their word and writes into it."""
    wrong = [key for key in ("images", "annotations", "categories") if not isinstance(annotations.get(key), Sequence)]
    if wrong:
        raise DataError(f"annotations have no list {wrong[0]!r}; COCO's format needs images, annotations, categories")
    lacking = [(place, each) for place, each in enumerate(annotations["annotations"]) if not _has_shape(each, kind)]
    if lacking:
        place, entry = lacking[0]
        raise DataError(f"annotation {entry.get('id', place)} has no {KINDS[kind]!r}, which kind={kind!r} needs")
    places = [(each, f"image {place}") for place, each in enumerate(annotations["images"])]
    images = [checked_id(each, "id", where) for each, where in places]
    double = [key for key, count in Counter(images).items() if count > 1]
    if double:
        raise DataError(f"the image id {brief(double[0])} occurs twice; give each image and its entry once")
    categories = [number(checked_id(each, "id", "a category")) for each in annotations["categories"]]
    if not all(isinstance(key, int) for key in categories):
        raise DataError(f"categories have the ids {brief(categories)}; they must be integers, as labels are")

    entries = [(each, f"annotation {place}") for place, each in enumerate(annotations["annotations"])]
    image_ids = distinct(entries, "image_id")
    at = places_of(images, image_ids)
    labels = all_places_of(categories, distinct(entries, "category_id"), "category_id")
    if left := sum(each["image_id"] not in at for each, _ in entries):
        warnings.warn(f"{left} annotations are of images that are not given; they don't count", stacklevel=3)
    read = [
        _annotation(each, kind, where)
        | {"image_id": images[at[each["image_id"]]], "category_id": categories[labels[each["category_id"]]]}
        for each, where in entries
        if each["image_id"] in at
    ]
    if kind == "bbox":
        _check_boxes(read, {key: each for key, (each, _) in zip(images, places, strict=True)})
    if kind == "segm":
        entered = {each["id"]: _with_sides(each, where) for each, where in places}
        unsized = [
            each for each in read if "counts" not in each["segmentation"] and not entered[each["image_id"]]["width"]
        ]
        if unsized:
            raise DataError(
                f"image {brief(unsized[0]['image_id'])} has no width and height, which polygons are drawn in"
            )
    else:
        entered = {each["id"]: dict(each) for each, _ in places}
    return {
        "images": list(entered.values()),
        "annotations": [each | {"id": place} for place, each in enumerate(read, 1)],
        "categories": [{**each, "id": key} for each, key in zip(annotations["categories"], categories, strict=True)],
    }


def _plain(value: Any) -> Any:
    """Arrays, numpy's numbers and tuples as what JSON would hold."""
    if isinstance(value, np.ndarray | np.generic | Tensor):
        return value.tolist()
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value


def _warn_of_sizes(images: Sequence[Tensor], entries: list[dict[str, Any]]) -> None:
    """Warn once of images that were resized, unlike their annotations."""
    told = [tuple(side_of(each, key, "", shown=False) for key in ("width", "height")) for each in entries]
    sizes = [tuple(image.shape[:-3:-1]) for image in images]
    other = [i for i, (said, size) in enumerate(zip(told, sizes, strict=True)) if all(said) and said != size]
    if other:
        first = other[0]
        warnings.warn(
            f"{len(other)} of {counted(len(images), 'image')} have another size than annotated, first image"
            f" {brief(entries[first]['id'])}: {' x '.join(map(str, sizes[first]))} pixels,"
            f" not {' x '.join(map(str, told[first]))}; what is found is compared in pixels as annotated",
            stacklevel=3,
        )


def _check_boxes(read: list[dict[str, Any]], entries: Mapping[Id, Mapping[str, Any]]) -> None:
    """Refuse annotated boxes of another kind, and warn once of those without area."""
    boxes = np.array([each["bbox"] for each in read], dtype=np.float64).reshape(-1, 4)
    sides = [[side_of(entries[each["image_id"]], key, "", False) for key in ("width", "height")] for each in read]
    areas = np.array([each["told_area"] for each in read], dtype=np.float64)
    refuse_corners(boxes, np.array(sides, dtype=np.float64).reshape(-1, 2), areas, "annotations")
    if flat := int((boxes[:, 2:] <= 0).any(1).sum()):
        warnings.warn(
            f"{counted(flat, 'annotated box')} without area count as objects that are not found, as in pycocotools",
            stacklevel=4,
        )


def _has_shape(entry: Mapping[str, Any], kind: Kind) -> bool:
    return entry.get(KINDS[kind]) is not None


def _with_sides(image: Mapping[str, Any], where: str) -> dict[str, Any]:
    width, height = (side_of(image, key, where, shown=True) for key in ("width", "height"))
    return {**image, "width": height and width, "height": width and height}


def _annotation(entry: Mapping[str, Any], kind: Kind, where: str) -> dict[str, Any]:
    """An annotation with all that pycocotools reads, which takes no area for one of any size."""
    read = {**entry, "iscrowd": int(flag_of(entry, "iscrowd", where)), "area": 0.0}
    read["told_area"] = area_of(entry)
    return read | {"bbox": box_of(entry, where)} if kind == "bbox" else read


def _tell_of(results: list[dict[str, Any]], categories: list[int], kind: Kind, told: set[str]) -> None:
    """Refuse boxes and labels of another kind at the first evaluation, and warn once of what does not count."""
    labels = Counter(each["category_id"] for each in results)
    unknown = {label: count for label, count in labels.items() if label not in categories}
    if 0 in unknown and max(labels) < len(categories):
        raise MetricError(
            f"the detector's labels are {examples(sorted(labels))}, as if counted from 0; they must be the ids of"
            f" categories, {examples(categories)}, so let detect=... translate them"
        )
    if kind == "bbox" and "kind" not in told:
        told.add("kind")
        try:
            numbers = np.array([each["bbox"] for each in results], dtype=np.float64).reshape(-1, 4)
            refuse_normalised(numbers, "the detector", "boxes must be [left, top, right, bottom] in pixels")
        except DataError as error:
            raise MetricError(str(error)) from error
    counts = Counter((each["image_id"], each["category_id"]) for each in results)
    cut = sum(max(0, count - COCO_DETECTIONS) for (_, label), count in counts.items() if label not in unknown)
    said = {
        "classes": (
            f"{counted(sum(unknown.values()), 'detection')} of {counted(len(unknown), 'class')} that the annotations"
            f" don't have don't count: {examples(sorted(unknown))}"
        ),
        "limit": told_beyond_limit(cut),
    }
    for key, count in (("classes", len(unknown)), ("limit", cut)):
        if count and key not in told:
            told.add(key)
            warnings.warn(said[key], stacklevel=3)


def _refuse_sides(truth: COCO, results: list[dict[str, Any]], ids: list[Id]) -> None:
    """Refuse boxes that are right far more often if they are read by their sides.

    Args:
        truth: The annotations.
        results: What is found, as entries of COCO's file of results.
        ids: Images with objects.
    """
    if not ids or (value := _value(truth, results, ids, "bbox", "AP50")) >= 0.5:
        return
    read = [{**each, "bbox": [x, y, w + x, h + y]} for each in results for x, y, w, h in [each["bbox"]]]
    if (other := _value(truth, read, ids, "bbox", "AP50")) > max(2 * value, 0.5):
        raise MetricError(
            f"AP50 would be {other:.3f} in place of {value:.3f} if the detector's boxes were [left, top, width,"
            " height]; they must be [left, top, right, bottom] in pixels, so let detect=... translate them"
        )


def _results(image: Mapping[str, Any], found: Mapping[str, Tensor], kind: Kind) -> list[dict[str, Any]]:
    """What is found in an image, which has this entry in the annotations, as entries of COCO's file of results."""
    shapes: list[Any]
    image_id: Id = image["id"]
    given, inner = {"bbox": ("boxes", (4,)), "segm": ("masks", ())}[kind]
    if not isinstance(found, Mapping) or not {given, "scores", "labels"} <= found.keys():
        got = ", ".join(map(str, found)) if isinstance(found, Mapping) else type(found).__name__
        raise MetricError(f"the detector gave {got} in image {brief(image_id)}; they must be {given}, scores, labels")
    found = {key: torch.as_tensor(found[key]) for key in (given, "scores", "labels")}
    if not found["scores"].ndim == found["labels"].ndim == 1:
        sizes = " and ".join(f"{key} of shape {tuple(found[key].shape)}" for key in ("scores", "labels"))
        raise MetricError(f"the detector gave {sizes} in image {brief(image_id)}; they must be n and n")
    for key in (given, "scores", "labels"):
        if not torch.isfinite(found[key]).all():
            raise MetricError(f"the detector gave {key} that are NaN or infinite in image {brief(image_id)}")
    if len(found["labels"]) != len(found["scores"]) or len(found[given]) != len(found["scores"]):
        sizes = ", ".join(f"{len(found[key])} {key}" for key in (given, "scores", "labels"))
        raise MetricError(f"the detector gave {sizes} in image {brief(image_id)}; their numbers must be equal")
    if inner and found[given].ndim == 2 and found[given].shape[1:] != inner:
        raise MetricError(
            f"the detector gave boxes of shape {tuple(found[given].shape)} in image {brief(image_id)}; they must be"
            " n x 4 (left, top, right, bottom)"
        )
    if kind == "bbox":
        corners = found["boxes"].double().reshape(-1, 4)
        shapes = torch.cat([corners[:, :2], corners[:, 2:] - corners[:, :2]], dim=1).tolist()
    else:
        shapes = masks_from(_masks(found["masks"], image))
    scores, labels = found["scores"].tolist(), found["labels"].tolist()
    return [
        {"image_id": image_id, "category_id": label, "score": score, KINDS[kind]: shape}
        for shape, score, label in zip(shapes, scores, labels, strict=True)
    ]


def _masks(given: Tensor, image: Mapping[str, Any]) -> Booleans:
    """Masks, ``n x h x w``, of the size of their image."""
    if not (given.ndim == 3 or (given.ndim == 4 and given.shape[1] == 1)):
        raise MetricError(
            f"the detector gave masks of shape {tuple(given.shape)} in image {brief(image['id'])}; they must be"
            " n x 1 x h x w"
        )
    masks = given if given.ndim == 3 else given[:, 0]
    sides = tuple(side_of(image, key, "", shown=False) for key in ("height", "width"))
    if len(masks) and all(sides) and masks.shape[1:] != sides:
        raise MetricError(
            f"the detector gave masks of {masks.shape[1]} x {masks.shape[2]} pixels in image {brief(image['id'])},"
            f" which has {sides[0]} x {sides[1]}, height and width; let detect=... resize them"
        )
    found: Booleans = (masks >= 0.5).numpy(force=True)
    return found


def _value(truth: COCO, results: list[dict[str, Any]], ids: list[Id], kind: Kind, name: Name) -> float:
    """The value on some images: the mean precision over IoUs, recalls and classes with an object."""
    chosen = set(ids)
    within = [dict(each) for each in results if each["image_id"] in chosen]
    if not within:
        return 0.0
    with contextlib.redirect_stdout(io.StringIO()):
        evaluation = COCOeval(truth, truth.loadRes(within), kind)
        evaluation.params.imgIds = ids
        if name in IOUS:
            evaluation.params.iouThrs = np.array([IOUS[name]])
        evaluation.evaluate()
        evaluation.accumulate()
    precision = evaluation.eval["precision"][..., 0, -1]  # objects of any area, the largest number of detections
    return float(precision[precision > -1].mean())
