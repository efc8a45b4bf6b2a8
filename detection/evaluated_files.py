"""What `tools/evaluate_ap50.py` reads: detections, and images with their objects."""

import argparse
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from metricopt_ext.detection.ap50 import told_cut
from metricopt_ext.detection.coco_tables import read_found, read_truth
from metricopt_ext.detection.tables import FoundTable, TruthTable
from metricopt_ext.errors import DataError


def read_results(arguments: argparse.Namespace) -> tuple[FoundTable, TruthTable, dict[str, float]]:
    """Read the detections from a file; returns them, the images with their objects, and what is known of the settings.

    A warning says if they look cut by a threshold.
    """
    if is_coco(arguments.annotations):  # without torch, which takes longer to import than most files to read
        check_coco(arguments)
        truth = read_truth(arguments.annotations, kind=arguments.iou_type, strict=arguments.strict)
    else:
        truth = TruthTable.of(read_annotations(arguments))
    found = read_found(arguments.detections, truth, kind=arguments.iou_type, strict=arguments.strict)
    if cut := told_cut(found):
        warnings.warn(cut, stacklevel=2)
    return found, truth, {}


def is_coco(path: Path) -> bool:
    """Tell whether annotations are in COCO's format, by the file's suffix."""
    return path.suffix.lower() == ".json"


def check_coco(arguments: argparse.Namespace) -> None:
    """Reject options that COCO's format has no use for.

    Raises:
        DataError: A split or classes are given.
    """
    if arguments.split is not None or arguments.classes is not None:
        raise DataError(
            f"--split and --classes are for VOC's format; {arguments.annotations} is in COCO's, which has its own"
        )


def read_annotations(
    arguments: argparse.Namespace, classes: Sequence[str] | None = None, *, images: bool = False
) -> Any:
    """Read the images with their objects: COCO's format from a .json file, else VOC's, whose images may be needed.

    Args:
        arguments: The command line.
        classes: For VOC's format, if the command line names none.
        images: Whether the images are needed.

    Raises:
        DataError: They can't be read, or a split or classes are given for COCO's format.
    """
    from torch import float64

    from metricopt_ext.detection.coco import read_coco
    from metricopt_ext.detection.layouts import as_usual, part_in
    from metricopt_ext.detection.voc import read_voc

    path, split, classes = arguments.annotations, arguments.split, arguments.classes or classes
    if not is_coco(path):
        if path.is_dir() and (part := part_in(path, split)) is not None and not as_usual(part):
            if classes is not None and part.kind != "voc":
                raise DataError(f"--classes is for VOC's format; {path} is in {part.kind.upper()}'s, which has its own")
            warnings.warn(f"read as {part.found}", stacklevel=2)
            return part.read(classes, images=images, dtype=float64)
        return read_voc(path, split, classes=classes, images=images)
    check_coco(arguments)
    return read_coco(path, arguments.images_dir, dtype=float64)
