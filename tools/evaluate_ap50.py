r"""Compute the AP50 of detections: the average precision if a hit needs an intersection over union of 0.5.

    python tools/evaluate_ap50.py --detections results.json --annotations VOC_FOLDER --split test --output-dir out/ap50
    python tools/evaluate_ap50.py --detections results.json --annotations instances.json --definition coco \
        --output-dir out/ap50
    python tools/evaluate_ap50.py --config-file configs/detection/scenes_torchvision.yaml \
        --weights out/run/seed-0/tuned.pth --annotations out/run/seed-0/scenes --split test --output-dir out/ap50

Detections are in COCO's results format: a list of {"image_id", "category_id", "bbox": [x, y, width, height], "score"}.
Annotations are COCO's JSON, or a folder in Pascal VOC's format, or a folder as exported by Roboflow, Kaggle
or YOLO; a note says which (metricopt_ext.detection.layouts). For VOC and YOLO, image_id is the image's file name
without suffix, and category_id counts the classes from 1. Notes below the table say what did not count. The module
metricopt_ext.detection.ap50 explains how the definitions differ. Instead of a file, a detector can supply the
detections: one described by a config file of tools/finetune_detector.py, with its weights, and with a finetuned adapter
if given. Prints a table, for COCO's definition also pycocotools' twelve lines (metricopt_ext.detection.coco_summary),
and writes report.json.
"""

import argparse
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from metricopt_ext.errors import DataError, MetricOptError
from metricopt_ext.experiment.command import add_show_config, errors_in_one_line, show_config, shows_config
from metricopt_ext.experiment.style import print_written
from metricopt_ext.utils.files import write_json
from metricopt_ext.utils.versions import versions

if TYPE_CHECKING:
    from metricopt_ext.detection.tables import FoundTable, TruthTable


def main() -> None:
    """Parse the command line, evaluate, report; an error that a user can fix is printed on one line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    detections = parser.add_mutually_exclusive_group(required=not shows_config())
    detections.add_argument("--detections", type=Path, help="JSON file in COCO's results format")
    detections.add_argument("--config-file", type=Path, help="describes the detector that finds them")
    parser.add_argument("--weights", type=Path, help="the detector's state dict, or a checkpoint that holds it")
    parser.add_argument("--entry", default="", metavar="KEY", help="where it is in that file, if that has several")
    parser.add_argument("--adapter", type=Path, help="a finetuned adapter for it; BatchNorm statistics beside it count")
    parser.add_argument(
        "--annotations", required=not shows_config(), type=Path, help="COCO's JSON file, or VOC's folder"
    )
    parser.add_argument("--images-dir", type=Path, help="folder of the images that COCO's JSON file names")
    parser.add_argument("--split", help="VOC only: the list of images to evaluate; default: all")
    parser.add_argument(
        "--classes",
        nargs="+",
        help="VOC only: the classes in the order of category_id; default: the config's, or all in the set, sorted",
    )
    parser.add_argument(
        "--iou-type",
        choices=["bbox", "segm"],
        default="bbox",
        help="what is compared: boxes, or by COCO's definition masks, from a file of detections",
    )
    parser.add_argument("--definition", choices=["voc_11_point", "voc", "coco", "all"], default="all")
    parser.add_argument(
        "--strict",
        action="store_true",
        help="for COCO's definition and files: count exactly what pycocotools counts, its faults included",
    )
    parser.add_argument("--output-dir", required=not shows_config(), type=Path, help="folder for report.json")
    add_show_config(parser)
    arguments = parser.parse_args()
    with errors_in_one_line():
        if arguments.show_config:
            from metricopt_ext.detection.config import DetectionConfig

            show_config(DetectionConfig, arguments.config_file)
            return
        run(arguments)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Evaluate the detections and write the report; returns it."""
    from metricopt_ext.detection.evaluated_files import read_results
    from metricopt_ext.detection.evaluation import evaluate, not_counted, print_notes, print_report, repeated, untold

    check_options(arguments)
    kind = arguments.iou_type
    with said_by_readers() as notes:
        found, truth, inference = read_results(arguments) if arguments.config_file is None else detect(arguments)
    try:
        evaluation = evaluate(found, truth, arguments.definition, kind, arguments.strict)
    except MetricOptError:
        print_notes(notes)  # they may say why
        raise
    told = [*untold(truth, evaluation), *repeated(found, truth)] if kind == "bbox" else []
    report = {
        "task": "detection/ap50",
        "metric": {"name": "ap50", "maximize": True},
        "images": len(truth),
        "inference": inference,
        **evaluation,
        "notes": [*notes, *not_counted(found, evaluation), *told],
        "versions": versions(),
        "config": {key: str(value) if isinstance(value, Path) else value for key, value in vars(arguments).items()},
    }
    path = arguments.output_dir / "report.json"
    write_json(path, report)
    print_report(report)
    print_written(path)
    return report


def check_options(arguments: argparse.Namespace) -> None:
    """Reject options that don't go together.

    Raises:
        DataError: Options clash, or one is missing.
    """
    from metricopt_ext.detection.evaluated_files import is_coco

    if arguments.strict and (arguments.definition != "coco" or not is_coco(arguments.annotations)):
        raise DataError("--strict is for --definition coco and annotations in COCO's JSON format")
    if arguments.iou_type != "bbox":
        if arguments.definition not in ("coco", "all") or not is_coco(arguments.annotations):
            raise DataError(
                f"--iou-type {arguments.iou_type} is for COCO's definition, and annotations in COCO's JSON format"
            )
        if arguments.config_file is not None:
            raise DataError(
                f"--iou-type {arguments.iou_type} needs --detections, a file with what was found; the detectors of"
                " --config-file are judged by their boxes"
            )
    if arguments.config_file is None:
        of_model = ("weights", "entry", "adapter", "images_dir")
        given = [f"--{name.replace('_', '-')}" for name in of_model if getattr(arguments, name)]
        if given:
            raise DataError(f"{' and '.join(given)} can't be used with --detections")
        return
    if arguments.strict:
        raise DataError("--strict is for --detections, a file as pycocotools takes it")
    if is_coco(arguments.annotations) != (arguments.images_dir is not None):
        raise DataError("--images-dir is for a JSON file in COCO's format; VOC's format has its own images")


@contextmanager
def said_by_readers() -> Iterator[list[str]]:
    """Collect what readers warn of, each once, for the report."""
    notes: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield notes
    for each in caught:
        if each.category is UserWarning and str(each.message) not in notes:
            notes.append(str(each.message))
        elif each.category is not UserWarning:
            warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)


def detect(arguments: argparse.Namespace) -> "tuple[FoundTable, TruthTable, dict[str, float]]":
    """Find objects with a detector; returns them, the images with their objects at the config's size, and the settings.

    Raises:
        DataError: The images or the weights can't be used.
        FileFormatError: The adapter can't be used.
    """
    from metricopt_ext.adapters.attach import load_adapter
    from metricopt_ext.data.named_model import has_weights
    from metricopt_ext.detection.build import build_toolkit, with_outputs_of
    from metricopt_ext.detection.coco import category_ids_of
    from metricopt_ext.detection.config import DetectionConfig
    from metricopt_ext.detection.data import trained_classes, with_classes
    from metricopt_ext.detection.evaluated_files import read_annotations
    from metricopt_ext.detection.metric import detect_all, truth_of
    from metricopt_ext.detection.tables import FoundTable, TruthTable
    from metricopt_ext.detection.task import load_examples
    from metricopt_ext.utils.config import load_config
    from metricopt_ext.utils.device import choose_device
    from metricopt_ext.utils.state_dict import load_checkpoint

    config = load_config(DetectionConfig, arguments.config_file, [])
    classes = arguments.classes
    if classes is None and arguments.images_dir is None:
        classes = getattr(config.data, "classes", None) or None
    truth = read_annotations(arguments, classes, images=True)
    if classes is None and {*truth.classes} <= {*(trained := trained_classes(config))}:
        truth = with_classes(truth, trained)  # as the detector counts them, in whose order a file need not be
    config.model.entry = arguments.entry or config.model.entry
    weights = config.model.weights = str(arguments.weights or config.model.weights)
    own = config.toolkit == "transformers" and has_weights(config.model.name)
    own = own or (":" in config.model.name and not config.model.steps)  # a function may load them itself
    if not (weights or own) and (config.model.steps or not config.model.coco_weights):
        raise DataError(
            "--config-file needs --weights, the state dict of the detector that it describes, or in it"
            " model.coco_weights and model.steps=0"
        )
    toolkit = with_outputs_of(build_toolkit(config), config, truth.classes, category_ids_of(truth), weights)
    model = toolkit.build(len(truth.classes), seed=0)
    if weights:
        load_checkpoint(model, Path(weights), entry=config.model.entry, option="--entry")
    model.to(choose_device(config.device)).eval()
    if arguments.adapter is not None:
        load_adapter(model, arguments.adapter)
    examples = load_examples(truth, config.data.size or None, stream=True)
    found = FoundTable.of(detect_all(toolkit, model, examples))
    return found, TruthTable.of(truth_of(examples, truth.classes)), toolkit.inference(model)


if __name__ == "__main__":
    main()
