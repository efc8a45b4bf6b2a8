"""tools/evaluate_ap50.py on small sets."""

import argparse
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("PIL")

from coco_files import read_detections, write_coco, write_detections
from helpers.programs import call
from helpers.refusals import assert_named, assert_refused
from metricopt_ext.detection.ap50 import average_precision
from metricopt_ext.detection.coco import CocoSet, read_coco
from metricopt_ext.detection.coco_summary import Summary, summarize
from metricopt_ext.detection.matching import DEFINITIONS
from metricopt_ext.detection.records import Annotated, Detections, DetectionSet
from metricopt_ext.detection.scenes import write_scenes
from metricopt_ext.detection.toolkit import Example
from metricopt_ext.detection.torchvision_toolkit import TorchvisionToolkit
from metricopt_ext.detection.voc import read_voc, write_voc
from metricopt_ext.tools import evaluate_ap50

TOOLS = Path(__file__).parents[2] / "tools"
CLASSES = ("bird", "cat", "dog")  # of which there is no dog


def images(seed: int) -> list[Annotated]:
    rng = torch.Generator().manual_seed(seed)
    drawn = []
    for i in range(12):
        corners = torch.randint(0, 60, (3, 2), generator=rng)
        sides = torch.randint(10, 40, (3, 2), generator=rng)
        drawn.append(
            Annotated(
                image_id=f"s{seed}_{i}",
                path=Path(f"s{seed}_{i}.png"),
                width=100,
                height=100,
                boxes=torch.cat([corners, corners + sides], 1).float(),
                labels=torch.randint(0, 2, (3,), generator=rng),
                difficult=torch.rand(3, generator=rng) < 0.2,
                crowd=torch.zeros(3, dtype=torch.bool),
            )
        )
    return drawn


def guesses(truth: DetectionSet) -> list[Detections]:
    """Each object found with some error, at a random score."""
    rng = torch.Generator().manual_seed(9)
    return [
        Detections(
            image.boxes + torch.randint(-5, 6, image.boxes.shape, generator=rng),
            torch.rand(len(image.boxes), generator=rng),
            torch.where(torch.rand(len(image.labels), generator=rng) < 0.8, image.labels, 2),
        )
        for image in truth.images
    ]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A VOC set, voc, with the splits val and test, detections in test, and the same in COCO's format."""
    blank = torch.zeros(3, 100, 100, dtype=torch.uint8)
    for split, seed in (("val", 0), ("test", 1)):
        write_voc(tmp_path / "voc", [Example(blank, image) for image in images(seed)], CLASSES, split)
    truth = read_voc(tmp_path / "voc", "test", classes=CLASSES)
    found = guesses(truth)
    write_detections(tmp_path / "voc_results.json", found, truth)
    coco = read_coco(write_coco(tmp_path / "coco.json", truth))
    write_detections(tmp_path / "coco_results.json", found, coco)
    return tmp_path


VOC = ("--detections", "voc_results.json", "--annotations", "voc", "--split", "test", "--classes", *CLASSES)
COCO = ("--detections", "coco_results.json", "--annotations", "coco.json")


def evaluate(folder: Path, *arguments: str) -> Any:
    """Run the tool in this process, in the folder; returns its report."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        call(evaluate_ap50, *arguments, "--output-dir", "out")
    return json.loads((folder / "out" / "report.json").read_text())


def test_on_the_command_line(folder: Path) -> None:
    command = [sys.executable, TOOLS / "evaluate_ap50.py", *VOC, "--output-dir", "out"]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    truth = read_voc(folder / "voc", "test", classes=CLASSES)
    report = json.loads((folder / "out" / "report.json").read_text())
    for definition in DEFINITIONS:
        expected = average_precision(guesses(truth), truth, definition)
        assert report["ap50"][definition]["mean"] == pytest.approx(expected.mean)
        assert report["ap50"][definition]["per_class"] == pytest.approx(expected.per_class)
        assert list(expected.per_class) == ["bird", "cat"]
        assert f"{expected.mean:.4f}" in result.stdout
    assert report["images"] == 12
    assert sum(report["objects"].values()) == sum(report["detections"].values()) == 36
    assert report["objects"]["dog"] == 0
    assert report["config"]["split"] == "test"


def test_coco_s_files_are_judged_without_torch(folder: Path) -> None:
    script = "import runpy, sys; sys.modules['torch'] = None; runpy.run_path(sys.argv.pop(1), run_name='__main__')"
    command = [sys.executable, "-c", script, TOOLS / "evaluate_ap50.py", *COCO, "--output-dir", "bare"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    report = json.loads((folder / "bare" / "report.json").read_text())
    usual = evaluate(folder, *COCO)
    assert (report["ap50"], report["coco"]) == (usual["ap50"], usual["coco"])


def test_coco_files_give_the_value_of_the_voc_set(folder: Path) -> None:
    voc, coco = (evaluate(folder, *arguments, "--definition", "coco") for arguments in (VOC, COCO))
    assert list(voc["ap50"]) == ["coco"]
    assert voc["ap50"] == coco["ap50"]


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ((*VOC[:4], "--split", "train"), ("train",)),
        (("--detections", "coco_results.json", *VOC[2:]), ("0", "image_id", "1", "s1_0")),
        ((*COCO, "--iou-type", "segm"), ("0", "--iou-type", "segm")),
        ((*VOC, "--strict", "--definition", "coco"), ("--strict", "annotations", "COCO")),
        ((*COCO, "--weights", "w.pth"), ("--weights", "--detections")),
    ],
)
def test_what_a_user_can_mend_ends_in_one_line(
    folder: Path, arguments: tuple[str, ...], names: tuple[str, ...]
) -> None:
    with pytest.raises(SystemExit) as caught:
        evaluate(folder, *arguments)
    assert_named(caught, *names)
    assert str(caught.value).startswith("error: ")
    assert "\n" not in str(caught.value)


def crowded(folder: Path, objects: int = 150) -> tuple[str, ...]:
    """Write an image with this many objects of one class, all of them found, and a second class found once."""
    boxes = [[20 * (i % 30), 20 * (i // 30), 15, 15] for i in range(objects)]
    annotations = {
        "images": [{"id": 1}],
        "categories": [{"id": 1, "name": "cat"}, {"id": 2, "name": "dog"}],
        "annotations": [{"image_id": 1, "category_id": 1, "bbox": box, "area": 225} for box in boxes],
    }
    found = [{"image_id": 1, "category_id": 1, "bbox": box, "score": 1 - 0.001 * i} for i, box in enumerate(boxes)] + [
        {"image_id": 1, "category_id": 2, "bbox": [0, 0, 9, 9], "score": 0.5}
    ]
    (folder / "CROWDED.JSON").write_text(json.dumps(annotations))
    (folder / "crowded_results.json").write_text(json.dumps(found))
    return ("--detections", "crowded_results.json", "--annotations", "CROWDED.JSON")


def test_detections_beyond_coco_s_limit_are_counted(tmp_path: Path) -> None:
    arguments = crowded(tmp_path)
    report = evaluate(tmp_path, *arguments)
    assert report["ap50"]["coco"]["mean"] == pytest.approx(67 / 101)  # the recalls up to 100 of 150
    assert report["ap50"]["voc"]["mean"] == pytest.approx(1)
    assert len(report["notes"]) == 3  # of a threshold that cuts, of these, and of a class without objects
    assert len(evaluate(tmp_path, *arguments, "--definition", "voc")["notes"]) == 2


def told(summary: Summary) -> dict[str, Any]:
    """What the report has of it."""
    return {**summary.numbers, "per_class": summary.per_class, "lines": list(summary.lines)}


def test_coco_s_numbers_are_reported_and_printed_as_pycocotools_prints_them(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = evaluate(folder, *COCO)
    data = read_coco(folder / "coco.json", dtype=torch.float64)
    summary = summarize(read_detections(folder / "coco_results.json", data), data)
    numbers = told(summary)
    assert report["coco"] == numbers
    assert "".join(f"{line}\n" for line in summary.lines) in capsys.readouterr().out
    assert report["coco"]["AP50"] == pytest.approx(report["ap50"]["coco"]["mean"], abs=1e-12)
    assert 0 < report["coco"]["AP75"] < report["coco"]["AP50"]
    assert list(report["coco"]["per_class"]) == ["bird", "cat"]
    changed(folder, "coco.json", lambda content: [each.pop("area") for each in content["annotations"][:2]])
    again = evaluate(folder, *COCO)
    assert again["coco"] == numbers  # as it is that of the bbox


def test_a_strict_count_is_pycocotools_s(folder: Path) -> None:
    usual = evaluate(folder, *COCO, "--definition", "coco")
    assert evaluate(folder, *COCO, "--definition", "coco", "--strict")["coco"] == usual["coco"]
    changed(folder, "coco.json", lambda content: content["annotations"][0].update(id=0))
    assert evaluate(folder, *COCO, "--definition", "coco")["coco"] == usual["coco"]
    strict = evaluate(folder, *COCO, "--definition", "coco", "--strict")
    assert strict["coco"]["AP50"] < usual["coco"]["AP50"]  # a hit on it is a miss
    changed(folder, "coco.json", lambda content: content.update(annotations=[]))
    assert evaluate(folder, *COCO, "--definition", "coco", "--strict")["ap50"]["coco"]["mean"] == -1


def with_masks(folder: Path) -> None:
    """Give each object of COCO's file a triangle in its box, and each detection one in place of its box."""

    def triangle(entry: dict[str, Any]) -> list[list[float]]:
        x, y, w, h = entry["bbox"]
        return [[x, y, x + w, y, x, y + h]]

    def encode(entry: dict[str, Any]) -> dict[str, Any]:
        mask = pytest.importorskip("pycocotools.mask")
        encoded = mask.frPyObjects(triangle(entry), 100, 100)[0]
        return {"size": [100, 100], "counts": encoded["counts"].decode()}

    def mend(entry: dict[str, Any]) -> None:
        entry["segmentation"] = encode(entry)
        del entry["bbox"]

    changed(folder, "coco.json", lambda c: [each.update(segmentation=triangle(each)) for each in c["annotations"]])
    changed(folder, "coco_results.json", lambda found: [mend(each) for each in found])


def test_masks_are_compared_by_iou_type(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    boxes = evaluate(folder, *COCO)
    with_masks(folder)
    assert_refused(lambda: evaluate(folder, *COCO), SystemExit, "0", "bbox")
    masks = evaluate(folder, *COCO, "--iou-type", "segm")
    data = read_coco(folder / "coco.json", kind="segm", dtype=torch.float64)
    summary = summarize(read_detections(folder / "coco_results.json", data, kind="segm"), data, "segm")
    assert masks["coco"] == told(summary)
    per_class = {name: numbers["AP50"] for name, numbers in summary.per_class.items()}
    assert masks["ap50"] == {"coco": {"mean": summary.numbers["AP50"], "per_class": per_class}}
    assert masks["coco"]["AP"] != boxes["coco"]["AP"]
    assert "".join(f"{line}\n" for line in summary.lines) in capsys.readouterr().out
    changed(folder, "coco.json", lambda content: [each.update(iscrowd=1) for each in content["annotations"]])
    assert_refused(lambda: evaluate(folder, *COCO, "--iou-type", "segm"), SystemExit, "12")


def changed(folder: Path, name: str, change: Any) -> None:
    content = json.loads((folder / name).read_text())
    change(content)
    (folder / name).write_text(json.dumps(content))


def test_detections_of_unknown_classes_are_refused_unless_pycocotools_s_count_is_wanted(folder: Path) -> None:
    before = evaluate(folder, *COCO, "--definition", "coco", "--strict")
    results = json.loads((folder / "coco_results.json").read_text())
    (folder / "coco_results.json").write_text(json.dumps([*results, {**results[0], "category_id": 44}]))
    assert_refused(lambda: evaluate(folder, *COCO), SystemExit, "category_id")
    after = evaluate(folder, *COCO, "--definition", "coco", "--strict")
    assert after["ap50"] == before["ap50"]
    assert len(after["notes"]) == len(before["notes"]) + 1


def test_classes_counted_from_0_are_refused(folder: Path) -> None:
    def lowered(found: list[Any]) -> None:
        for each in found:
            each["category_id"] -= 1

    changed(folder, "voc_results.json", lowered)
    assert_refused(lambda: evaluate(folder, *VOC), SystemExit, "category_id", "0", "from 1")


def test_a_training_scripts_checkpoint_is_judged_as_its_state_dict(tmp_path: Path) -> None:
    write_scenes(tmp_path / "scenes", images=(2, 1, 2), size=64, seed=0)
    (tmp_path / "c.yaml").write_text(
        "data: {name: voc, root: scenes, classes: ['0', '1', '2', '3', '4', '5', '6', '7', '8', '9']}\ndevice: cpu\n"
    )
    torch.manual_seed(0)
    state = TorchvisionToolkit().build(10, seed=0).state_dict()
    wrapped = {f"module.{name}": value for name, value in state.items()}
    more: dict[str, Any] = {"args": argparse.Namespace(lr=0.1), "epoch": 3, "optimizer": {}}
    torch.save(state, tmp_path / "plain.pth")
    torch.save({"model": wrapped, **more}, tmp_path / "wrapped.pth")
    torch.save(
        {"model": {name: 2 * value for name, value in state.items()}, "model_ema": wrapped}, tmp_path / "ema.pth"
    )
    options = ("--config-file", "c.yaml", "--annotations", "scenes", "--split", "test", "--definition", "coco")

    def judged(*weights: str) -> dict[str, Any]:
        report = evaluate(tmp_path, *options, "--weights", *weights)
        return {key: report[key] for key in ("ap50", "detections")}

    plain = judged("plain.pth")
    assert sum(plain["detections"].values()) > 0
    assert judged("wrapped.pth") == plain
    assert_refused(lambda: judged("ema.pth"), SystemExit, "ema.pth", "2", "--entry")
    assert judged("ema.pth", "--entry", "model_ema") == plain


def test_a_detector_trained_on_coco_is_judged_on_its_categories(tmp_path: Path) -> None:
    import torchvision

    name = "fasterrcnn_mobilenet_v3_large_320_fpn"
    sizes: dict[str, Any] = {"min_size": 64, "max_size": 64, "box_score_thresh": 0.05}
    torch.manual_seed(0)
    model = torchvision.models.get_model(name, weights=None, weights_backbone=None, **sizes).eval()
    model.roi_heads.box_predictor.cls_score.bias.data[[1, 12, 18, 50, 90]] = 3.0  # 12 is none of COCO's categories
    write_scenes(tmp_path / "scenes", images=(1, 1, 3), size=64, seed=0)
    scenes = read_voc(tmp_path / "scenes", "test")
    with torch.no_grad():
        found = [model([image.load() / 255])[0] for image in scenes.images]
    ids, classes = (1, 18, 90), ("person", "dog", "toothbrush")
    renamed = [replace(each, labels=each.labels % len(ids)) for each in scenes.images]
    write_coco(tmp_path / "coco.json", CocoSet(classes, renamed, ids))
    truth = read_coco(tmp_path / "coco.json")

    (tmp_path / "found.json").write_text(
        json.dumps(
            [
                {"image_id": image.image_id, "category_id": label, "bbox": [x, y, r - x, b - y], "score": score}
                for image, each in zip(truth.images, found, strict=True)
                for (x, y, r, b), label, score in zip(*(each[key].tolist() for key in KEYS), strict=True)
                if label in ids
            ]
        )
    )
    options = ("--annotations", "coco.json", "--definition", "coco")
    expected = evaluate(tmp_path, "--detections", "found.json", *options)
    assert min(expected["detections"].values()) > 0
    torch.save(model.state_dict(), tmp_path / "coco.pth")
    settings = {"name": name, "min_size": 64, "max_size": 64}
    (tmp_path / "c.yaml").write_text(json.dumps({"data": {"name": "coco"}, "model": settings, "device": "cpu"}))
    options += ("--images-dir", "scenes/JPEGImages")
    report = evaluate(tmp_path, "--config-file", "c.yaml", "--weights", "coco.pth", *options)
    assert report["detections"] == expected["detections"]
    assert report["ap50"] == expected["ap50"]


KEYS = ("boxes", "labels", "scores")


def test_a_hugging_face_folder_is_judged_with_its_own_weights_or_others(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    small: dict[str, Any] = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.YolosConfig(
        **small, intermediate_size=8, image_size=[64, 64], patch_size=16, num_detection_tokens=6
    )
    config.id2label = {0: "other", 1: "bird", 2: "cat", 3: "dog"}
    config.label2id = {name: i for i, name in config.id2label.items()}
    model = transformers.YolosForObjectDetection(config)
    model.class_labels_classifier.layers[-1].bias.data[2] = 3.0  # all are cats
    model.save_pretrained(tmp_path / "yolos")
    transformers.YolosImageProcessor(size={"shortest_edge": 64, "longest_edge": 64}).save_pretrained(tmp_path / "yolos")
    blank = torch.zeros(3, 100, 100, dtype=torch.uint8)
    write_voc(tmp_path / "voc", [Example(blank, image) for image in images(1)], CLASSES, "test")
    data = {"name": "voc", "root": "voc", "classes": list(CLASSES)}
    content = {"data": data, "device": "cpu", "toolkit": "transformers", "model": {"name": "yolos"}}
    (tmp_path / "c.yaml").write_text(json.dumps(content))
    options = ("--config-file", "c.yaml", "--annotations", "voc", "--split", "test", "--definition", "voc")
    own = evaluate(tmp_path, *options)
    assert own["detections"] == {"bird": 0, "cat": 6 * len(images(1)), "dog": 0}
    model.class_labels_classifier.layers[-1].bias.data[3] = 9.0
    torch.save({"model": model.state_dict()}, tmp_path / "dogs.pth")
    dogs = evaluate(tmp_path, *options, "--weights", "dogs.pth")
    assert dogs["detections"] == {"bird": 0, "cat": 0, "dog": 6 * len(images(1))}
