"""Time AP50 against pycocotools and Detectron2, and COCO's numbers from files against faster-coco-eval.

    python benchmarks/measure_ap50.py --images 5000 --detections 20 --classes 80 --output-dir out/measure_ap50

All get the same random detections and run in turn. In memory, in one process, pycocotools computes only IoU 0.5, any
area and 100 detections, while Detectron2's evaluator always computes ten IoU thresholds. "files" is from the two JSON
files to COCO's twelve numbers, "process" a program that does so, its imports included: tools/evaluate_ap50.py, which
writes a report too, and the shortest script. What is not installed is left out. Prints a table, writes report.json, and
fails if values differ.
"""

import argparse
import contextlib
import io
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from coco_files import write_coco, write_detections
from metricopt_ext.detection.ap50 import average_precision
from metricopt_ext.detection.coco import CocoSet, read_coco
from metricopt_ext.detection.coco_summary import summarize
from metricopt_ext.detection.coco_tables import read_found, read_truth
from metricopt_ext.detection.records import Annotated, Detections, DetectionSet
from metricopt_ext.detection.toolkit import Example
from metricopt_ext.detection.voc import write_voc
from metricopt_ext.utils.extras import naming_extras, require
from metricopt_ext.utils.files import write_json
from metricopt_ext.utils.versions import versions

SIZE = 300  # of an image; none is opened
OBJECTS = 7  # maximum in an image

Side = Callable[[], float]

THEIRS = """
import contextlib, io, sys
from faster_coco_eval import COCO, COCOeval_faster
with contextlib.redirect_stdout(io.StringIO()):
    truth = COCO(sys.argv[1])
    evaluation = COCOeval_faster(truth, truth.loadRes(sys.argv[2]), "bbox")
    evaluation.evaluate()
    evaluation.accumulate()
    evaluation.summarize()
print(evaluation.stats[0])
"""
TOOL = Path(__file__).parents[1] / "tools" / "evaluate_ap50.py"


def main() -> None:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=1000, help="number of images")
    parser.add_argument("--detections", type=int, default=100, help="detections per image")
    parser.add_argument("--classes", type=int, default=20, help="number of classes")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each; the fastest counts")
    parser.add_argument("--seed", type=int, default=0, help="seed of the objects and detections")
    parser.add_argument("--output-dir", required=True, type=Path, help="folder for report.json")
    arguments = parser.parse_args()
    with naming_extras():
        require("pycocotools")
    run(arguments)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure each against its reference, print and write the results; returns the report."""
    found, truth = draw(arguments.images, arguments.detections, arguments.classes, arguments.seed)
    with tempfile.TemporaryDirectory() as folder:
        coco = read_coco(write_coco(Path(folder) / "coco.json", truth))
        rounds: dict[str, tuple[Side, Side | None]] = {
            "coco": (lambda: average_precision(found, truth, "coco").mean, pycocotools(found, coco, Path(folder))),
            "voc": (
                lambda: average_precision(found, truth, "voc").mean,
                detectron2(found, truth, Path(folder), 2012),
            ),
            "voc_11_point": (
                lambda: average_precision(found, truth, "voc_11_point").mean,
                detectron2(found, truth, Path(folder), 2007),
            ),
        }
        if find_spec("faster_coco_eval") is not None:
            rounds |= from_files(write_detections(Path(folder) / "found.json", found, coco), Path(folder))
        results = {
            definition: compare(ours, theirs, arguments.repeats)
            for definition, (ours, theirs) in rounds.items()
            if theirs is not None
        }
    report = {
        "task": "detection/measure_ap50",
        "results": results,
        "versions": versions(),
        "config": {key: value for key, value in vars(arguments).items() if key != "output_dir"},
    }
    write_json(arguments.output_dir / "report.json", report)
    print(f"{'':14}{'ours':>9}{'reference':>11}{'ratio':>9}  AP50")
    for definition, result in results.items():
        agreement = "the same" if result["same"] else f"differs, {result['their_value']:.12f}"
        print(
            f"{definition:14}{result['seconds']:8.3f}s{result['their_seconds']:10.3f}s"
            f"{result['ratio']:9.4f}  {result['value']:.6f} ({agreement})"
        )
    print("wrote", arguments.output_dir / "report.json", sep="\n  ")
    if not all(result["same"] for result in results.values()):
        sys.exit("error: values differ from the reference's")
    return report


def draw(images: int, per_image: int, classes: int, seed: int) -> tuple[list[Detections], DetectionSet]:
    """Draw objects, and detections, about half of which are near an object."""
    rng = np.random.default_rng(seed)
    found, truth = [], []
    for i in range(images):
        n = int(rng.integers(1, OBJECTS + 1))
        boxes, labels = random_boxes(rng, n), rng.integers(classes, size=n)
        guesses, guessed = random_boxes(rng, per_image), rng.integers(classes, size=per_image)
        near = rng.integers(n, size=per_image)
        good = rng.random(per_image) < 0.5
        guesses[good] = boxes[near[good]] + rng.normal(0, 8, (int(good.sum()), 4))
        guesses[:, 2:] = np.maximum(guesses[:, 2:], guesses[:, :2] + 1)
        guessed[good] = labels[near[good]]
        scores = np.clip(0.4 * good + rng.uniform(0, 0.6, per_image), 0, 1)
        found.append(
            Detections(torch.from_numpy(guesses).float(), torch.from_numpy(scores).float(), torch.from_numpy(guessed))
        )
        none = torch.zeros(n, dtype=torch.bool)
        truth.append(
            Annotated(
                f"{i:06d}",
                Path(f"{i:06d}.png"),
                SIZE,
                SIZE,
                torch.from_numpy(boxes).float(),
                torch.from_numpy(labels),
                none,
                none,
            )
        )
    return found, DetectionSet(tuple(f"class{label}" for label in range(classes)), truth)


def random_boxes(rng: np.random.Generator, count: int) -> Any:
    """Draw boxes with whole edges, ``count x 4``, in float64."""
    corners = rng.integers(0, SIZE - 100, (count, 2))
    return np.concatenate([corners, corners + rng.integers(10, 100, (count, 2))], axis=1).astype(float)


def pycocotools(found: Sequence[Detections], truth: CocoSet, folder: Path) -> Side:
    """Return what is measured: from COCO's results, as a list in memory, to AP50."""
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    with contextlib.redirect_stdout(io.StringIO()):
        coco = COCO(folder / "coco.json")
    results = json.loads(write_detections(folder / "results.json", found, truth).read_bytes())

    def evaluate() -> float:
        with contextlib.redirect_stdout(io.StringIO()):
            evaluation = COCOeval(coco, coco.loadRes([dict(each) for each in results]), "bbox")
            evaluation.params.iouThrs = np.array([0.5])
            evaluation.params.areaRng, evaluation.params.areaRngLbl = [[0, 1e10]], ["all"]
            evaluation.params.maxDets = [100]
            evaluation.evaluate()
            evaluation.accumulate()
        precision = evaluation.eval["precision"]
        return float(precision[precision > -1].mean())

    return evaluate


def detectron2(found: Sequence[Detections], truth: DetectionSet, folder: Path, year: int) -> Side | None:
    """Return what is measured: from instances in memory to AP50; None without Detectron2."""
    try:
        from detectron2.data import MetadataCatalog
        from detectron2.evaluation import PascalVOCDetectionEvaluator
        from detectron2.structures import Boxes, Instances
    except ImportError:
        return None
    blank = torch.zeros(3, SIZE, SIZE, dtype=torch.uint8)
    write_voc(folder, (Example(blank, image) for image in truth.images), truth.classes, "all")
    name = f"{folder} {year}"
    MetadataCatalog.get(name).set(dirname=str(folder), split="all", year=year, thing_classes=list(truth.classes))
    outputs = []
    for each in found:
        instances = Instances((SIZE, SIZE))
        instances.pred_boxes, instances.scores, instances.pred_classes = Boxes(each.boxes), each.scores, each.labels
        outputs.append({"instances": instances})

    def evaluate() -> float:
        evaluator = PascalVOCDetectionEvaluator(name)
        evaluator.reset()
        evaluator.process([{"image_id": image.image_id} for image in truth.images], outputs)
        return float(evaluator.evaluate()["bbox"]["AP50"]) / 100

    return evaluate


def from_files(found: Path, folder: Path) -> dict[str, tuple[Side, Side]]:
    """Return what is measured from two JSON files on: ours and faster-coco-eval, in this process and in one's own."""
    from faster_coco_eval import COCO, COCOeval_faster

    annotations = folder / "coco.json"

    def ours() -> float:
        truth = read_truth(annotations)
        return summarize(read_found(found, truth), truth).numbers["AP"] or 0.0

    def theirs() -> float:
        with contextlib.redirect_stdout(io.StringIO()):
            truth = COCO(annotations)
            evaluation = COCOeval_faster(truth, truth.loadRes(str(found)), "bbox")
            evaluation.evaluate()
            evaluation.accumulate()
            evaluation.summarize()
        return float(evaluation.stats[0])

    def our_process() -> float:
        inputs = ["--annotations", str(annotations), "--detections", str(found), "--definition", "coco"]
        call = [sys.executable, str(TOOL), *inputs, "--output-dir", str(folder / "out")]
        subprocess.run(call, check=True, stdout=subprocess.DEVNULL)
        return float(json.loads((folder / "out" / "report.json").read_bytes())["coco"]["AP"])

    def their_process() -> float:
        call = [sys.executable, "-c", THEIRS, str(annotations), str(found)]
        return float(subprocess.run(call, check=True, capture_output=True, text=True).stdout)

    return {"files": (ours, theirs), "process": (our_process, their_process)}


def compare(ours: Side, theirs: Side, repeats: int) -> dict[str, Any]:
    """Time both in turn; returns values and the fastest times."""
    times: list[list[float]] = [[], []]
    for _ in range(repeats):
        value, their_value = (timed(side, kept) for side, kept in zip((ours, theirs), times, strict=True))
    seconds, their_seconds = map(min, times)
    return {
        "value": value,
        "their_value": their_value,
        "same": abs(value - their_value) < 1e-9,
        "seconds": seconds,
        "their_seconds": their_seconds,
        "ratio": seconds / their_seconds,
    }


def timed(side: Side, times: list[float]) -> float:
    """Return the side's value and record its time."""
    started = time.perf_counter()
    value = side()
    times.append(time.perf_counter() - started)
    return value


if __name__ == "__main__":
    main()
