"""pycocotools' evaluation, of the content of COCO's files or of records."""

import contextlib
import copy
import io
from collections.abc import Sequence
from typing import Any

import numpy as np
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

FIRST_IOU = {"AP50": 0, "AP75": 5}  # of those from 0.5 to 0.95


def evaluated(truth: dict[str, Any], found: list[dict[str, Any]], kind: str = "bbox", **params: Any) -> COCOeval:
    """Evaluate results."""
    with contextlib.redirect_stdout(io.StringIO()):
        coco = COCO()
        coco.dataset = copy.deepcopy(truth)
        coco.createIndex()
        evaluation = COCOeval(coco, coco.loadRes(copy.deepcopy(found)), kind)
        for name, value in params.items():
            setattr(evaluation.params, name, value)
        evaluation.evaluate()
        evaluation.accumulate()
    return evaluation


def summary(*given: Any, **params: Any) -> tuple[list[float], tuple[str, ...]]:
    """Return the twelve numbers, and the lines that are printed of them."""
    evaluation, said = evaluated(*given, **params), io.StringIO()
    with contextlib.redirect_stdout(said):
        evaluation.summarize()
    lines = said.getvalue().splitlines()
    return evaluation.stats.tolist(), tuple(line for line in lines if line.startswith(" Average"))


def average_precision(evaluation: COCOeval, name: str = "AP") -> float:
    """Return ``AP``, ``AP50`` or ``AP75`` of objects of any area, the mean over classes; NaN where there are none."""
    precision = evaluation.eval["precision"][..., 0, -1]
    precision = precision if name == "AP" else precision[FIRST_IOU[name]]
    known = precision[precision > -1]
    return float(known.mean()) if known.size else float("nan")


def contents(found: Sequence[Any], truth: Sequence[Any], classes: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return records of detections and images as the contents of COCO's files; images are numbered from 1."""

    def entries(records: Sequence[Any], *fields: str) -> list[dict[str, Any]]:
        made = []
        for place, each in enumerate(records, start=1):
            boxes = each.boxes.double().numpy()
            columns = [getattr(each, field).tolist() for field in fields]
            for box, label, value in zip(
                np.concatenate([boxes[:, :2], boxes[:, 2:] - boxes[:, :2]], 1), *columns, strict=True
            ):
                made.append({"image_id": place, "category_id": label, "bbox": box.tolist(), fields[1]: value})
        return made

    objects = [
        {"id": number, "area": each["bbox"][2] * each["bbox"][3], "iscrowd": int(each.pop("crowd")), **each}
        for number, each in enumerate(entries(truth, "labels", "crowd"), start=1)
    ]
    images = [{"id": place, "width": 100, "height": 100} for place in range(1, len(truth) + 1)]
    results = [each | {"score": each.pop("scores")} for each in entries(found, "labels", "scores")]
    return {"images": images, "annotations": objects, "categories": [{"id": i} for i in range(classes)]}, results
