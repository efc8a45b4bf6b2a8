"""COCO's AP or AP50 of boxes, masks or keypoints as the black-box metric, by pycocotools."""

import contextlib
import copy
import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn

from metricopt_ext.errors import DataError
from metricopt_ext.tasks.metric import Metric, with_halves

try:
    from pycocotools import mask as rle
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval
except ImportError as error:
    raise ImportError("COCO's metrics need pycocotools: pip install 'metricopt-ext[detection]'") from error

Kind = Literal["bbox", "segm", "keypoints"]
Name = Literal["AP", "AP50"]

TRUTH = {"bbox": "bbox", "segm": "segmentation", "keypoints": "keypoints"}  # what an annotation must have


def coco_metric(
    images: Sequence[Tensor],
    annotations: Mapping[str, Any],
    *,
    kind: Kind = "bbox",
    name: Name = "AP",
    halves: Sequence[Tensor] = (),
    detect: Callable[[nn.Module, Tensor], Mapping[str, Tensor]] | None = None,
) -> Metric:
    """Return the black box: COCO's AP, or AP50, of what a detector finds in images.

    Args:
        images: What the detector takes, each ``3 x h x w``, in the order of ``annotations["images"]``.
        annotations: The content of a COCO file: ``images``, ``annotations`` and ``categories``.
        kind: What is compared: boxes (``"bbox"``) or masks (``"segm"``) by their IoU, or ``"keypoints"`` by their
            object keypoint similarity, with the deviations of COCO's 17.
        name: ``"AP"``, the mean over the IoUs 0.5, 0.55, ..., 0.95, or ``"AP50"``.
        halves: Positions of two halves of the images, for a metric that also reports its value on each; empty for one
            that does not. They are not reported if one of them has no object that counts.
        detect: ``detect(model, image)`` returns what is found in an image as torchvision's detectors do: ``scores``,
            ``n``, ``labels``, ``n``, which are the categories' ids, and ``boxes``, ``n x 4``, ``masks``,
            ``n x 1 x h x w`` in [0, 1], or ``keypoints``, ``n x 17 x 3``. By default ``model([image])[0]``.

    Raises:
        DataError: The kind or name is unknown, images and annotations don't fit together, or no object counts.
    """
    if kind not in get_args(Kind) or name not in get_args(Name):
        raise DataError(
            f"kind={kind!r} must be one of {', '.join(get_args(Kind))}, and name={name!r} one of"
            f" {', '.join(get_args(Name))}"
        )
    ids = [entry["id"] for entry in annotations["images"]]
    if len(ids) != len(images):
        raise DataError(f"there are {len(images)} images, but annotations of {len(ids)}")
    lacking = [entry["id"] for entry in annotations["annotations"] if TRUTH[kind] not in entry]
    if lacking:
        raise DataError(f"annotation {lacking[0]} has no {TRUTH[kind]!r}, which kind={kind!r} needs")
    counted = [entry for entry in annotations["annotations"] if not entry.get("iscrowd")]
    if kind == "keypoints":
        counted = [entry for entry in counted if entry.get("num_keypoints")]
    objects = {entry["image_id"] for entry in counted}
    if not objects.intersection(ids):
        raise DataError(f"none of {len(ids)} images has an object that counts; {name} needs one")
    with contextlib.redirect_stdout(io.StringIO()):
        truth = COCO()
        truth.dataset = copy.deepcopy(dict(annotations))  # pycocotools writes into it
        truth.createIndex()
    each_has_one = all(objects.intersection(ids[i] for i in half.tolist()) for half in halves)

    def function(model: nn.Module) -> Any:
        results = []
        for image_id, image in zip(ids, images, strict=True):
            found = model([image])[0] if detect is None else detect(model, image)
            results += _results(image_id, found, kind)

        def value_on(half: Tensor | None) -> float:
            return _value(truth, results, ids if half is None else [ids[i] for i in half.tolist()], kind, name)

        return with_halves(value_on, halves if each_has_one else ())

    labels = {"bbox": name, "segm": f"mask {name}", "keypoints": f"keypoint {name}"}
    return Metric(function, maximize=True, name=labels[kind])


def _results(image_id: int, found: Mapping[str, Tensor], kind: Kind) -> list[dict[str, Any]]:
    """What is found in an image, as entries of COCO's file of results."""
    shapes: list[Any]
    if kind == "bbox":
        corners = found["boxes"].double()
        shapes = torch.cat([corners[:, :2], corners[:, 2:] - corners[:, :2]], dim=1).tolist()
    elif kind == "segm":
        masks = (found["masks"][:, 0] >= 0.5).to(torch.uint8).numpy(force=True)
        shapes = [rle.encode(np.asfortranarray(mask)) for mask in masks]
    else:
        shapes = found["keypoints"].flatten(1).tolist()
    scores, labels = found["scores"].tolist(), found["labels"].tolist()
    return [
        {"image_id": image_id, "category_id": label, "score": score, TRUTH[kind]: shape}
        for shape, score, label in zip(shapes, scores, labels, strict=True)
    ]


def _value(truth: COCO, results: list[dict[str, Any]], ids: list[int], kind: Kind, name: Name) -> float:
    """The value on some images: the mean precision over IoUs, recalls and classes with an object."""
    chosen = set(ids)
    within = [dict(each) for each in results if each["image_id"] in chosen]
    if not within:
        return 0.0
    with contextlib.redirect_stdout(io.StringIO()):
        evaluation = COCOeval(truth, truth.loadRes(within), kind)
        evaluation.params.imgIds = ids
        if name == "AP50":
            evaluation.params.iouThrs = np.array([0.5])
        evaluation.evaluate()
        evaluation.accumulate()
    precision = evaluation.eval["precision"][..., 0, -1]  # objects of any area, the largest number of detections
    return float(precision[precision > -1].mean())
