"""Detections judged, as `tools/evaluate_ap50.py` reports it: the numbers, and what there is to note."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from metricopt_ext.detection.ap50 import average_precision, beyond_limit, told_beyond_limit
from metricopt_ext.detection.coco_summary import summarize
from metricopt_ext.detection.matching import DEFINITIONS
from metricopt_ext.detection.tables import FoundTable, TruthTable
from metricopt_ext.errors import DataError
from metricopt_ext.experiment.style import print_table
from metricopt_ext.plain import plain
from metricopt_ext.utils.words import counted, shortened


def evaluate(
    found: FoundTable,
    truth: TruthTable,
    definition: str,
    kind: Any = "bbox",
    strict: bool = False,
) -> dict[str, Any]:
    """Return the numbers of objects and detections of each class, the AP50 by each requested definition, and COCO's.

    Where no object counts, the mean is -1 if strict, as pycocotools has it, and refused otherwise.
    """
    wanted = [each for each in DEFINITIONS if definition in (each, "all")]
    voc = [each for each in wanted if each != "coco" and kind == "bbox"]
    evaluation: dict[str, Any] = {
        "objects": count(truth.labels, truth.classes),
        "detections": count(found.labels, truth.classes),
        "ap50": {each: asdict(average_precision(found, truth, each)) for each in voc},
    }
    if definition in ("coco", "all"):
        summary = summarize(found, truth, kind)
        evaluation["coco"] = {**summary.numbers, "per_class": summary.per_class, "lines": summary.lines}
        mean = summary.numbers["AP50"]
        if mean is None and strict:
            mean = -1.0  # as pycocotools has it
        if mean is None:
            raise DataError(f"none of {len(truth)} images has an object that counts; AP50 needs one")
        per_class = {name: numbers["AP50"] for name, numbers in summary.per_class.items()}
        evaluation["ap50"]["coco"] = {"mean": mean, "per_class": per_class}
    return evaluation


def not_counted(found: FoundTable, evaluation: dict[str, Any]) -> list[str]:
    """Return in words which detections did not count."""
    notes = []
    if "coco" in evaluation["ap50"] and (cut := told_beyond_limit(beyond_limit(found))):
        notes.append(cut)
    judged = {name for result in evaluation["ap50"].values() for name in result["per_class"]}
    left = {name: count for name, count in evaluation["detections"].items() if count and name not in judged}
    if left:
        notes.append(
            f"{counted(sum(left.values()), 'detection')} of {counted(len(left), 'class')} without an object that counts"
            f" are in no mean: {shortened(list(left))}"
        )
    if any(evaluation["detections"].values()) and not any(result["mean"] for result in evaluation["ap50"].values()):
        notes.append(
            "no detection hits an object; are image_id, category_id (which counts VOC's classes from 1) and bbox"
            " written as the annotations' are?"
        )
    return notes


def untold(truth: TruthTable, evaluation: dict[str, Any]) -> list[str]:
    """Return in words of how many objects COCO's annotations don't tell the area, which decides the size."""
    if "coco" not in evaluation:
        return []
    lacking = int(np.isnan(truth.areas).sum()) if truth.category_ids else 0
    return [f"the area of {counted(lacking, 'object')} is not told; that of the bbox decides the size"] * (lacking > 0)


def repeated(found: FoundTable, truth: TruthTable) -> list[str]:
    """Return in words how many objects and detections are written again as they are."""
    kinds = [
        ("object", [truth.places, truth.labels, *truth.boxes.T], "each counts"),
        ("detection", [found.places, found.labels, *found.boxes.T, found.scores], "it is false the second time"),
    ]
    notes = []
    for what, columns, more in kinds:
        if again := repetitions(columns):
            of = len(columns[0])
            notes.append(f"{again} of {counted(of, what)} repeat another of the same image, class and bbox; {more}")
    return notes


def repetitions(columns: Sequence[Any]) -> int:
    """Return how many rows equal an earlier one."""
    if len(columns[0]) == 0:
        return 0
    mixed = sum(column * np.sqrt(prime) for column, prime in zip(columns, (2, 3, 5, 7, 11, 13, 17), strict=False))
    order = np.argsort(mixed)  # equal rows have an equal sum, and few others
    same = np.diff(mixed[order]) == 0
    rows = np.sort(order[np.append(same, False) | np.append(False, same)])
    few = [column[rows] for column in columns]
    order = np.lexsort(few)
    return int(np.all([column[order][1:] == column[order][:-1] for column in few], axis=0).sum())


def count(labels: Any, classes: Sequence[str]) -> dict[str, int]:
    """Return the number of labels of each class."""
    return dict(zip(classes, np.bincount(labels, minlength=len(classes)).tolist(), strict=True))


def print_report(report: dict[str, Any]) -> None:
    """Print a line for each class, the means, COCO's numbers, and how the detections were found."""
    results = report["ap50"]
    rows = []
    for name, objects in report["objects"].items():
        values = [result["per_class"].get(name) for result in results.values()]
        shown = ["-" if value is None else f"{value:.4f}" for value in values]
        rows.append([name, str(objects), str(report["detections"][name]), *shown])
    totals = [str(sum(report[key].values())) for key in ("objects", "detections")]
    rows.append(["mean", *totals, *(f"{result['mean']:.4f}" for result in results.values())])
    header = ["AP50", "objects", "detections", *results]
    print_table(header, rows, bold=[len(rows) - 1])
    if coco := report.get("coco"):
        print(*coco["lines"], sep="\n")
    if report["inference"]:
        from metricopt_ext.detection.toolkit import told_inference  # with torch, which files do without

        print(plain(f"found {told_inference(report['inference'])}"))
    print_notes(report["notes"])


def print_notes(notes: Sequence[str]) -> None:
    """Print what there is to say about the data."""
    for note in notes:
        print(plain(f"note: {note}"))
