"""The detection tool end to end on tiny runs of torchvision's detectors, and what it refuses."""

import importlib.util
import json
import re
import shutil
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

pytest.importorskip("torchvision")

from helpers.pictures import check_figures
from helpers.programs import call, refused
from helpers.refusals import assert_refused
from helpers.runs import KEPT, check_needs_resume, stopped_after
from metricopt_ext.adapters.attach import load_adapter
from metricopt_ext.data import training_state
from metricopt_ext.detection import build, experiment, scenes
from metricopt_ext.detection.build import build_metric, build_toolkit
from metricopt_ext.detection.coco import read_coco, write_coco
from metricopt_ext.detection.config import DetectionConfig
from metricopt_ext.detection.data import load_splits
from metricopt_ext.detection.records import DetectionSet
from metricopt_ext.detection.torchvision_toolkit import TorchvisionToolkit
from metricopt_ext.detection.voc import read_voc
from metricopt_ext.errors import ConfigError
from metricopt_ext.experiment import method_config
from metricopt_ext.methods.recipe import Recipe
from metricopt_ext.tasks.task import FinetuneTask
from metricopt_ext.tools import evaluate_ap50
from metricopt_ext.tools import finetune_detector as tool
from metricopt_ext.utils.config import load_config
from metricopt_ext.utils.state_dict import load_checkpoint
from metricopt_ext.value.learners import RidgeLearner
from metricopt_ext.value.loading import load_value_function

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs" / "detection"
SCENES = CONFIGS / "scenes_torchvision.yaml"


@dataclass(frozen=True)
class Toolkit(TorchvisionToolkit):
    """Detects at any score, so that AP50 moves with phi whatever was learned, and doubly precise: no two boxes tie."""

    score_threshold: float = 0.0

    def build(self, classes: int, seed: int) -> nn.Module:
        return super().build(classes, seed).double()


STOCK = Toolkit(min_size=48, max_size=48, proposals=100)

# One round of four tasks with two observations, three queries to choose and five for the guard. The detector hardly
# learns, but some of its many boxes fall on digits that are large and of one class (`small_and_quick`).
SIZES = [
    *("finetune.steps=3", "queries=16", "methods=[]"),
    *("model.steps=20", "model.lr=0.05", "model.batch_size=2", "model.min_size=48", "model.max_size=48"),
    *("scene.size=48", "scene.digits=[1,2]", "scene.scale=[24,40]", "shift.scale=1", "data.images=[6,6,6]"),
    *("model.proposals=100", "batch_size=2"),
    *("adapter.dim=3", "best_evals=2", "workers=1", "seeds=1", "device=cpu"),
]
RECIPE = [
    *("method.name=recipe", "method.evals=2", "method.rounds=1", "method.folds=2", "method.trials=0"),
    "method.learners=[ridge]",  # the others take seconds to fit
]
METHODS = {"search": [], "paper": ["method.name=paper", "method.evals=2"]}
TINY = [*RECIPE, *SIZES]
NAMED = ("methods=[loss_finetune_best]", "pictures=[curves]")
FINISHED = [*TINY, *NAMED, "adapter.placement=roi_head", "metric.definition=coco"]
OF_SCENES = ("scene.", "shift.", "data.images=")


def of_files(folder: Path) -> Path:
    """The scenes' config without what is the scenes' own, for data in files."""
    lines = SCENES.read_text().splitlines(keepends=True)
    file = folder / "files.yaml"
    file.write_text("".join(line for line in lines if not line.startswith(("data:", "scene:", "shift:"))))
    return file


def without_scenes(overrides: Sequence[str]) -> list[str]:
    return [each for each in overrides if not each.startswith(OF_SCENES)]


@pytest.fixture(autouse=True)
def quick(one_thread: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out threads, and pictures, which are looked at in `finished`; see `small_and_quick`."""
    small_and_quick(monkeypatch)
    monkeypatch.setattr(experiment, "plot_detections", lambda *_: None)


def small_and_quick(patched: pytest.MonkeyPatch) -> None:
    """Leave out the value function that takes a second to fit, and the digits' classes, and detect at any score."""
    patched.setattr(method_config, "Recipe", ridge_only)
    patched.setattr(build, "TorchvisionToolkit", Toolkit)
    patched.setattr(scenes, "CLASSES", ("digit",) * 10)


def ridge_only(**settings: Any) -> Recipe:
    return Recipe(**{**settings, "learners": (RidgeLearner(),)})


def config_of(*overrides: str, file: Path = SCENES) -> DetectionConfig:
    return load_config(DetectionConfig, file, overrides)


def content_of(folder: Path) -> Any:
    return json.loads((folder / "report.json").read_text())


def pycocotools_ap50(model: nn.Module, data: DetectionSet) -> float:
    """AP50 by pycocotools of what a detector of torchvision finds, called as torchvision's documentation calls it."""
    coco = pytest.importorskip("pycocotools.coco")
    cocoeval = pytest.importorskip("pycocotools.cocoeval")
    with torch.no_grad():
        outputs = model.eval()([image.load().double() / 255 for image in data.images])

    def corner(box: Tensor) -> list[float]:
        left, top, right, bottom = box.double().tolist()
        return [left, top, right - left, bottom - top]

    def each(parts: list[tuple[Tensor, Tensor]]) -> list[dict[str, Any]]:
        return [
            {"image_id": i, "category_id": int(label), "bbox": (box := corner(b)), "area": box[2] * box[3]}
            for i, (boxes, labels) in enumerate(parts)
            for b, label in zip(boxes, labels, strict=True)
        ]

    truth = each([(image.boxes, image.labels + 1) for image in data.images])
    found = each([(output["boxes"], output["labels"]) for output in outputs])
    for detection, score in zip(found, torch.cat([output["scores"] for output in outputs]).tolist(), strict=True):
        detection["score"] = score
    reference = coco.COCO()
    reference.dataset = {
        "info": {},
        "images": [{"id": i} for i in range(len(data))],
        "categories": [{"id": i + 1} for i in range(len(data.classes))],
        "annotations": [{"id": i + 1, "iscrowd": 0, **thing} for i, thing in enumerate(truth)],
    }
    reference.createIndex()
    evaluation = cocoeval.COCOeval(reference, reference.loadRes(found), "bbox")
    evaluation.evaluate()
    evaluation.accumulate()
    evaluation.summarize()
    return float(evaluation.stats[1])


# --- A run and its interruptions -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run one seed of tiny settings, once for all tests that only look at what is left."""
    folder = tmp_path_factory.mktemp("runs") / "finished"
    with pytest.MonkeyPatch.context() as patched:
        small_and_quick(patched)
        tool.run(config_of(*FINISHED), folder, resume=False)
    return folder


def weights_of(finished: Path) -> str:
    """The setting of the detector that was trained there."""
    return f"model.weights={finished / 'seed-0' / 'model.safetensors'}"


def test_everything_is_written(finished: Path) -> None:
    assert {path.name for path in finished.iterdir()} == {
        *KEPT,
        "seed-0",
        *("methods.png", "finetuning.png", "value_function.png"),
    }
    folder = finished / "seed-0"
    kept = {"record.json", "model.safetensors", "adapter.safetensors", "tuned.pth", "scenes"}
    assert kept <= {path.name for path in folder.iterdir()}
    check_figures([*finished.glob("*.png"), folder / "detections.png"])
    assert len(list((folder / "trajectories").glob("round-0-task-*.safetensors"))) == 4
    assert load_value_function(folder / "value_function.safetensors", dim=3).quality is not None


def test_the_report_states_what_pycocotools_says_of_the_kept_detectors(finished: Path) -> None:
    content = content_of(finished)
    assert content["task"] == "detection/scenes"
    assert content["metric"] == {"name": "AP50", "maximize": True}
    methods = content["methods"]
    assert {"pretrained", "loss_finetune", "loss_finetune_best", "metricopt"} <= set(methods)
    assert methods["metricopt"]["queries_total"] <= content["config"]["queries"] == 16
    assert methods["metricopt"]["validation"][0] >= methods["pretrained"]["validation"][0]
    folder = finished / "seed-0"
    test = read_voc(folder / "scenes", "test")
    model = STOCK.build(len(test.classes), seed=9)
    load_checkpoint(model, folder / "model.safetensors")
    expected = {"pretrained": pycocotools_ap50(model, test)}
    load_adapter(model, folder / "adapter.safetensors")
    expected["metricopt"] = pycocotools_ap50(model, test)
    assert expected["pretrained"] > 0
    for name, value in expected.items():
        assert methods[name]["test"] == [pytest.approx(value)]
    tuned = STOCK.build(len(test.classes), seed=9)
    tuned.load_state_dict(torch.load(folder / "tuned.pth", weights_only=True), strict=True)
    assert pycocotools_ap50(tuned, test) == pytest.approx(expected["metricopt"])


def test_a_second_call_needs_resume(finished: Path) -> None:
    check_needs_resume(tool, SCENES, finished, FINISHED)


def test_a_finished_run_resumes_without_any_training(
    finished: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = content_of(finished)
    monkeypatch.setattr(build, "train_detector", lambda *_, **__: pytest.fail("trained"))
    monkeypatch.setattr(FinetuneTask, "loss_and_gradient", lambda *_: pytest.fail("finetuned"))
    (finished / "report.json").unlink()
    call(tool, "--config-file", SCENES, "--resume", "--output-dir", finished, *FINISHED)
    assert content_of(finished) == before
    assert "small_fpn on shifted scenes: AP50 (higher is better), 1 seed of 16 queries" in capsys.readouterr().out


@pytest.mark.slow
def test_an_interrupted_run_resumes_to_the_same_report(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training_state, "KEEP_EVERY", 0.0)
    losses = []

    def kill(self: TorchvisionToolkit, *arguments: Any) -> Any:
        losses.append(arguments)
        if len(losses) > 15:
            raise KeyboardInterrupt
        return loss(self, *arguments)

    loss, folder = TorchvisionToolkit.loss, tmp_path / "run" / "seed-0"
    with monkeypatch.context() as patched:
        patched.setattr(TorchvisionToolkit, "loss", kill)
        with pytest.raises(KeyboardInterrupt):
            tool.run(config_of(*FINISHED), tmp_path / "run", resume=False)
    assert (folder / "training.safetensors").exists()
    assert not (folder / "model.safetensors").exists()

    stopped_after(5, lambda: tool.run(config_of(*FINISHED), tmp_path / "run", resume=True))
    assert 0 < len(list((folder / "trajectories").glob("*.safetensors"))) < 4
    assert not (folder / "training.safetensors").exists()
    detector = (folder / "model.safetensors").read_bytes()
    assert detector == (finished / "seed-0" / "model.safetensors").read_bytes()
    monkeypatch.setattr(build, "train_detector", lambda *_, **__: pytest.fail("trained a detector that was there"))
    tool.run(config_of(*FINISHED), tmp_path / "run", resume=True)
    resumed, whole = content_of(tmp_path / "run"), content_of(finished)
    for name, method in resumed["methods"].items():
        for part in ("validation", "test"):
            assert method[part] == whole["methods"][name][part]


# --- What else it takes ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_ap_loss_in_the_backbone_by_the_command_line(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    call(
        tool,
        "--toolkit",
        "torchvision",
        "--config-file",
        CONFIGS / "scenes_detectron2.yaml",
        "--output-dir",
        tmp_path,
        *TINY,
        "classification_loss=ap",
        "model.config_file=''",
        weights_of(finished),
    )
    assert "torchvision's small_fpn on shifted scenes" in capsys.readouterr().out
    content = content_of(tmp_path)
    assert content["config"]["toolkit"] == "torchvision"
    assert content["config"]["adapter"]["placement"] == "early"
    tuned = torch.load(tmp_path / "seed-0" / "tuned.pth", weights_only=True)
    kept = STOCK.build(len(read_voc(tmp_path / "seed-0" / "scenes").classes), seed=9)
    load_checkpoint(kept, finished / "seed-0" / "model.safetensors")
    changed = {name.split(".")[0] for name, value in kept.state_dict().items() if not torch.equal(value, tuned[name])}
    assert changed <= {"backbone"}  # nothing where phi ends at its origin


@pytest.mark.slow
def test_features_in_memory_change_no_number(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = TorchvisionToolkit.build

    def sampling_all(self: TorchvisionToolkit, classes: int, seed: int) -> Any:
        # Features in memory shift the random stream that proposals are sampled from: without choice there is no chance.
        model: Any = original(self, classes, seed)
        model.roi_heads.fg_bg_sampler.batch_size_per_image = 1000
        model.roi_heads.fg_bg_sampler.positive_fraction = 0.5
        return model

    monkeypatch.setattr(TorchvisionToolkit, "build", sampling_all)
    contents = []
    for keep in ("keep_gib=0", "keep_gib=0.015"):  # none of the images', and some
        config = config_of(*FINISHED, weights_of(finished), f"adapter.{keep}")
        some = keep == "keep_gib=0.015"
        with pytest.warns(UserWarning, match=r"fill.*half of adapter\.keep_gib=0\.015") if some else nullcontext():
            tool.run(config, tmp_path / keep, resume=False)
        contents.append(content_of(tmp_path / keep)["methods"])
    never, some = contents
    for name, method in some.items():
        for part in ("validation", "test"):
            assert method[part] == pytest.approx(never[name][part], abs=1e-9)


@pytest.mark.slow
def test_a_metric_of_one_s_own(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "own_best_scores.py").write_text(
        "def best(truth, found):\n"
        "    assert len(truth) == len(found) == 6 or len(truth) == 3\n"
        "    return sum(each['scores'].max() for each in found) / len(found)\n"
    )
    own = ["metric.name=own_best_scores:best", f"metric.folder={tmp_path}", "metric.maximize=false"]
    call(tool, "--config-file", SCENES, "--output-dir", tmp_path / "run", *TINY, weights_of(finished), *own)
    shown = capsys.readouterr().out
    settings = "score_thresh 0, at most 100 detections an image, images scaled to sides of 48 to 48"
    assert f"seed 0  objects are found with {settings}\n" in shown
    assert "shifted scenes: best (lower is better)" in shown
    assert "best: own_best_scores:best of objects and detections" in shown
    content = content_of(tmp_path / "run")
    assert content["metric"] == {"name": "best", "maximize": False}
    test = load_splits(config_of(*TINY, *own), 0, tmp_path / "run" / "seed-0").test
    model = STOCK.build(1, seed=9)
    load_checkpoint(model, finished / "seed-0" / "model.safetensors")
    for name in ("pretrained", "metricopt"):
        if name == "metricopt":
            load_adapter(model, tmp_path / "run" / "seed-0" / "adapter.safetensors")
        best = [float(found.scores.max()) for found in STOCK.detect(model.eval(), test)]
        assert content["methods"][name]["test"] == [pytest.approx(sum(best) / 6, abs=1e-9)]


def test_voc_s_format_with_validation_held_out_of_train(finished: Path, tmp_path: Path) -> None:
    tree = shutil.copytree(finished / "seed-0" / "scenes", tmp_path / "voc")
    (tree / "ImageSets" / "Main" / "train.txt").rename(tree / "ImageSets" / "Main" / "trainval.txt")
    overrides = [
        *("data.name=voc", f"data.root={tree}", "data.splits=[trainval,'',test]", "data.validation_share=0.4"),
        *("data.images=[3,0,5]", "data.size=32", weights_of(finished)),
    ]
    overrides, file = [*without_scenes(FINISHED), *overrides], of_files(tmp_path)
    call(tool, "--config-file", file, "--output-dir", tmp_path / "run", *overrides)
    content = content_of(tmp_path / "run")
    assert content["task"] == "detection/voc"
    assert not (tmp_path / "run" / "seed-0" / "scenes").exists()
    splits = load_splits(config_of(*overrides, file=file), 0, tmp_path / "none")
    assert [len(part) for part in (splits.train, splits.validation, splits.test)] == [3, 2, 5]
    assert {example.image.shape for example in splits.train} == {(3, 32, 32)}


def test_coco_s_format_gives_the_images_of_the_same_voc_tree(finished: Path, tmp_path: Path) -> None:
    tree = finished / "seed-0" / "scenes"
    files = [write_coco(tmp_path / f"{split}.json", read_voc(tree, split)) for split in ("train", "val", "test")]
    file, few = of_files(tmp_path), [*without_scenes(TINY), "data.images=[0,4,0]"]
    coco = ["data.name=coco", f"data.root={tree / 'JPEGImages'}", f"data.splits=[{','.join(map(str, files))}]"]
    voc = ["data.name=voc", f"data.root={tree}"]
    ours, theirs = (load_splits(config_of(*few, *each, file=file), 1, tmp_path) for each in (coco, voc))
    assert ours.classes == theirs.classes
    for a, b, count in zip(vars(ours).values(), vars(theirs).values(), (None, 6, 4, 6, None, None), strict=True):
        if count:
            assert len(a) == len(b) == count
            for first, second in zip(a, b, strict=True):
                assert torch.equal(first.image, second.image)
                torch.testing.assert_close(first.truth.boxes, second.truth.boxes)


@pytest.mark.parametrize("file", sorted(CONFIGS.glob("*.yaml")), ids=lambda file: file.stem)
def test_every_config_is_sound(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    config = config_of(file=file)
    config.check()
    build_metric(config.metric)
    there = config.toolkit == "torchvision" or importlib.util.find_spec("detectron2")
    with nullcontext() if there else pytest.raises(ConfigError):
        build_toolkit(config)
    assert config.toolkit == "torchvision" or Path(config.model.config_file).is_file()


@pytest.mark.parametrize(
    ("overrides", "strict"), [([], False), (["model.steps=0"], True), (["model.steps=0", "model.weights=a.pth"], False)]
)
def test_published_weights_are_whole_where_nothing_trains_them(overrides: list[str], strict: bool) -> None:
    toolkit = build_toolkit(config_of("model.name=fasterrcnn_resnet50_fpn", *overrides))
    assert isinstance(toolkit, TorchvisionToolkit)
    assert toolkit.strict_weights is strict


# --- What it refuses -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.nmae=voc"], r"unknown.*'data\.nmae'.*'data\.name'\?"),
        (["toolkit=mmdet"], r"toolkit='mmdet' is none.*torchvision"),
        (
            ["metric.name=ap50"],
            r"metric\.name='ap50'.*your own function",
        ),
        (["metric.name=segm/AP"], r"segm.*, not with data\.name=scenes"),
        (["metric.definition=coco50"], r"metric\.definition='coco50'.*voc, coco"),
        (["model.name=yolo"], r"'yolo'.*fasterrcnn_resnet50_fpn"),
        (["toolkit=detectron2"], "no effect with toolkit=detectron2"),
        (["classification_loss=focal"], r"classification_loss='focal'.*'ap'"),
        (["population=2"], r"population=2.*one task at a time"),
        (["adapter.keep_gib=-1"], r"adapter\.keep_gib=-1\.0.*least 0"),
        (["model.lr=0"], r"model\.lr=0\.0: it must be above 0"),
        (["queries=15"], r"15 queries are too.*give at least 16"),
        (["data.images=[6,6]"], r"data\.images=\[6.*validation and test"),
        (["data.images=[6,-1,6]"], r"data\.images=\[6.*least 0"),
        (["scene.digits=[2]"], r"scene\.digits=\[2\].*two numbers"),
    ],
)
def test_bad_settings_are_refused_before_the_folder_is_taken(
    tmp_path: Path, overrides: list[str], message: str
) -> None:
    out = tmp_path / "run"
    assert re.search(message, refused(tool, "--config-file", SCENES, "--output-dir", out, *TINY, *overrides))
    assert not out.exists()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.images=[6,0,6]"], r"images must be three.*\(6, 0, 6\)"),
        (["model.lr=1e30"], r"step \d: .*(lower the lr|not finite)"),
        (["device=abacus"], r"device='abacus' is not available here"),
    ],
)
def test_what_cannot_be_built_is_refused_in_one_line(tmp_path: Path, overrides: list[str], message: str) -> None:
    out = tmp_path / "run"
    assert re.search(message, refused(tool, "--config-file", SCENES, "--output-dir", out, *TINY, *overrides))
    assert not (out / "report.json").exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("kitti", r"data\.name='kitti'.*voc, coco, yolo"),
        ("voc", r"voc needs data\.root=PATH"),
        ("voc data.splits=[train,test]", r"data\.splits=\['train'.*three entries"),
    ],
)
def test_data_that_are_nowhere_are_refused_in_one_line(tmp_path: Path, name: str, message: str) -> None:
    out, tiny = tmp_path / "run", without_scenes(TINY)
    assert re.search(
        message,
        refused(tool, "--config-file", of_files(tmp_path), "--output-dir", out, *tiny, *f"data.name={name}".split()),
    )


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("adapter.placement=head", r"placement='head'.*backbone, early, fpn"),
        ("adapter.layers=[norm*]", r"layers='norm\*' matches no layer"),
    ],
)
def test_layers_that_are_not_there_are_refused_before_any_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, override: str, message: str
) -> None:
    monkeypatch.setattr(build, "train_detector", lambda *_, **__: pytest.fail("trained"))
    assert re.search(message, refused(tool, "--config-file", SCENES, "--output-dir", tmp_path / "run", *TINY, override))


def break_image(tree: Path) -> None:
    path = tree / "JPEGImages" / "train_00000.png"
    path.write_bytes(path.read_bytes()[:500])


def empty_split(tree: Path) -> None:
    (tree / "ImageSets" / "Main" / "val.txt").write_text("\n")


def remove_objects(tree: Path) -> None:
    for path in (tree / "Annotations").iterdir():
        path.write_text(re.sub("<object>.*</object>", "", path.read_text(), flags=re.DOTALL))


def mark_difficult(tree: Path) -> None:
    for path in (tree / "Annotations").glob("val_*"):
        path.write_text(path.read_text().replace("<difficult>0", "<difficult>1"))


@pytest.mark.parametrize(
    ("spoil", "overrides", "message"),
    [
        (break_image, [], r"train_00000\.png.*read as an image"),
        (empty_split, [], r"val\.txt is empty"),
        (remove_objects, [], r"none.*6 images for train has a box"),
        (mark_difficult, [], r"none.*6 images.*difficult nor a crowd"),
        (None, ["data.classes=[cat]"], "class 'digit'; the classes are cat"),
        (None, ["data.splits=[train,val,tset]"], r"'tset'.*test, train, val"),
        (None, ["data.root=nowhere"], r"nowhere not found"),
        (None, ["data.splits=['',val,test]"], r"data\.splits=.*.*train, must be named"),
        (
            None,
            ["model.weights={weights}", "model.name=fasterrcnn_mobilenet_v3_large_320_fpn"],
            r"holds no weights for FasterRCNN",
        ),
        (None, ["data.name=coco", "data.splits=[a.json,b.json,c.json]"], r"a\.json does not exist"),
        (
            None,
            ["data.name=coco", "data.classes=[cat]"],
            r"data\.classes.*run has .*coco",
        ),
    ],
)
def test_bad_data_are_refused_in_one_line(
    finished: Path, tmp_path: Path, spoil: Any, overrides: list[str], message: str
) -> None:
    tree = shutil.copytree(finished / "seed-0" / "scenes", tmp_path / "voc")
    if spoil:
        spoil(tree)
    weights = str(finished / "seed-0" / "model.safetensors")
    given = [override.replace("{weights}", weights) for override in overrides]
    arguments = ["--config-file", of_files(tmp_path), "--output-dir", tmp_path / "run", *without_scenes(TINY)]
    assert re.search(message, refused(tool, *arguments, "data.name=voc", f"data.root={tree}", *given))


def test_detectron2_is_asked_for_where_it_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("metricopt_ext.detection.detectron2.")]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("detectron2", "detectron2.config"):
        monkeypatch.setitem(sys.modules, name, None)
    message = refused(tool, "--config-file", CONFIGS / "scenes_detectron2.yaml", "--output-dir", tmp_path / "run")
    assert message.startswith("toolkit=detectron2 needs Detectron2, which is installed from source (")
    assert "--toolkit torchvision works without it, with its own config file" in message
    assert not (tmp_path / "run").exists()


# --- A kept detector evaluated ---------------------------------------------------------------------------------


def test_evaluate_ap50_finds_with_the_kept_detector(finished: Path, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("data: {name: scenes}\nmodel: {min_size: 48, max_size: 48, proposals: 100}\ndevice: cpu\n")
    folder, methods = finished / "seed-0", content_of(finished)["methods"]
    data = ("--annotations", folder / "scenes", "--split", "test")
    model, tuned = folder / "model.safetensors", folder / "tuned.pth"
    test = read_voc(folder / "scenes", "test")
    annotations = write_coco(tmp_path / "test.json", test)
    for name, options in (
        ("pretrained", (model, *data)),
        ("metricopt", (tuned, *data)),
        ("metricopt", (model, "--adapter", folder / "adapter.safetensors", *data)),
        ("metricopt", (tuned, "--annotations", annotations, "--images-dir", folder / "scenes" / "JPEGImages")),
    ):
        call(evaluate_ap50, "--config-file", file, "--output-dir", tmp_path, "--weights", *options)
        report = content_of(tmp_path)
        assert report["images"] == 6
        assert report["ap50"]["coco"]["mean"] == pytest.approx(methods[name]["test"][0])
    assert_refused(
        lambda: call(
            evaluate_ap50,
            "--config-file",
            file,
            "--output-dir",
            tmp_path,
            "--weights",
            tuned,
            "--annotations",
            annotations,
        ),
        SystemExit,
        "--images-dir",
        "JSON",
        "file",
    )
    assert_refused(
        lambda: call(evaluate_ap50, "--config-file", file, "--output-dir", tmp_path, *data),
        SystemExit,
        "--config-file",
        "--weights",
    )
    assert_refused(
        lambda: call(
            evaluate_ap50, "--detections", file, "--output-dir", tmp_path, "--weights", tuned, "--adapter", tuned, *data
        ),
        SystemExit,
        "--weights",
        "--detections",
    )


# --- The toolkit that the settings name ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("toolkit", "setting"),
    [
        ("detectron2", "model.name=fasterrcnn_resnet50_fpn"),
        ("detectron2", "model.min_size=64"),
        ("detectron2", "model.max_size=256"),
        ("detectron2", "model.proposals=30"),
        ("detectron2", "model.coco_weights=coco.pth"),
        ("torchvision", "model.config_file=scenes.yaml"),
        ("torchvision", "model.opts=[MODEL.WEIGHTS,a.pth]"),
    ],
)
def test_a_setting_that_the_toolkit_does_not_look_at_is_refused(toolkit: str, setting: str) -> None:
    other = {"detectron2": "torchvision", "torchvision": "detectron2"}[toolkit]
    config = load_config(DetectionConfig, None, [f"toolkit={toolkit}", "data.name=scenes", setting])
    names = (setting.partition("=")[0], f"toolkit={other}", f"toolkit={toolkit}")
    assert_refused(lambda: build_toolkit(config), ConfigError, *names)


def test_detectron2_needs_its_config_file() -> None:
    pytest.importorskip("detectron2", reason="needs Detectron2, installed from source")
    assert_refused(
        lambda: build_toolkit(load_config(DetectionConfig, None, ["toolkit=detectron2", "data.name=scenes"])),
        ConfigError,
        "model.config_file=FILE",
    )


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["search", "paper"])
def test_a_detector_under_each_strategy(finished: Path, tmp_path: Path, strategy: str, check_strategy: Any) -> None:
    settings = [*SIZES, *METHODS[strategy], "queries=20", weights_of(finished)]
    call(tool, "--config-file", SCENES, "--output-dir", tmp_path / "run", *settings)
    check_strategy(tmp_path / "run", strategy)
    assert len(list((tmp_path / "run").glob("seed-*/tuned.pth"))) == 1


OWN = """
from torchvision.models.detection import FasterRCNN
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.backbone_utils import BackboneWithFPN
from metricopt_ext.detection.torchvision_models import SmallBackbone

def detector(num_classes, size, score=0.0):  # num_classes counts the background
    backbone = BackboneWithFPN(SmallBackbone(8), {"layer2": "0", "layer3": "1", "layer4": "2"}, [16, 32, 64], 16)
    anchors = AnchorGenerator(tuple((size / 2**i,) for i in (3, 2, 1, 0)), ((1.0,),) * 4)
    numbers = {"rpn_post_nms_top_n_test": 100, "rpn_pre_nms_top_n_test": 200, "box_score_thresh": score}
    sizes = {"min_size": size, "max_size": size}
    return FasterRCNN(backbone, num_classes, rpn_anchor_generator=anchors, **sizes, **numbers).double()
"""


@pytest.mark.slow
def test_a_detector_of_ones_own_is_tuned_and_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "path", sys.path[:])
    (tmp_path / "our_detectors.py").write_text(OWN)
    own = ["model.name=our_detectors:detector", f"model.folder={tmp_path}", "model.kwargs.size=48"]
    sizes = {"model.min_size", "model.max_size", "model.proposals"}
    plain, base = tmp_path / "plain.yaml", [each for each in TINY if each.partition("=")[0] not in sizes]
    plain.write_text("data: {name: scenes}\n")
    call(tool, "--config-file", plain, "--output-dir", tmp_path / "run", *base, *own, "metric.definition=coco")
    report, seed = content_of(tmp_path / "run"), tmp_path / "run" / "seed-0"
    assert "our_detectors:detector on scenes" in capsys.readouterr().out
    fresh = sys.modules["our_detectors"].detector(2, 48)  # as a script of one's own would load it
    fresh.load_state_dict(torch.load(seed / "tuned.pth", weights_only=True))
    expected = pycocotools_ap50(fresh, read_voc(seed / "scenes", "test"))
    assert report["methods"]["metricopt"]["test"] == [pytest.approx(expected, abs=1e-9)]

    (tmp_path / "mine.yaml").write_text(
        json.dumps(
            {
                "data": {"name": "voc"},
                "model": {
                    "name": "our_detectors:detector",
                    "folder": str(tmp_path),
                    "kwargs": {"size": 48},
                    "steps": 0,
                },
            }
        )
    )
    judged = ["--annotations", seed / "scenes", "--split", "test", "--output-dir", tmp_path / "ap50"]
    options = ["--weights", seed / "tuned.pth", "--definition", "coco"]
    call(evaluate_ap50, "--config-file", tmp_path / "mine.yaml", *judged, *options)
    assert content_of(tmp_path / "ap50")["ap50"]["coco"]["mean"] == pytest.approx(expected, abs=1e-9)

    refusal = refused(tool, "--config-file", plain, "--output-dir", tmp_path / "r", *base, *own, "model.min_size=48")
    assert re.search(r"tool's own detectors; model\.name=.*", refusal)
    refusal = refused(tool, "--config-file", plain, "--output-dir", tmp_path / "r", *base, *own, "toolkit=transformers")
    assert refusal.startswith("model.name=our_detectors:detector builds a detector with torchvision's interface, for")
    refusal = refused(tool, "--config-file", plain, "--output-dir", tmp_path / "r", *base, "model.folder=.")
    assert refusal.startswith("model.folder is a key of model.name=MODULE:FUNCTION; this run has another model")


MASKS = """
from our_detectors import AnchorGenerator, BackboneWithFPN, SmallBackbone
from torchvision.models.detection import MaskRCNN
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor

def masks(num_classes):
    backbone = BackboneWithFPN(SmallBackbone(8), {"layer2": "0", "layer3": "1", "layer4": "2"}, [16, 32, 64], 16)
    anchors = AnchorGenerator(tuple((48 / 2**i,) for i in (3, 2, 1, 0)), ((1.0,),) * 4)
    numbers = {f"rpn_post_nms_top_n_{when}": 30 for when in ("train", "test")} | {"box_score_thresh": 0.0}
    sizes = {"min_size": 48, "max_size": 48, "box_detections_per_img": 20, "box_batch_size_per_image": 32}
    heads = {"box_head": TwoMLPHead(16 * 49, 16), "mask_head": MaskRCNNHeads(16, (8,), 1)}
    model = MaskRCNN(backbone, num_classes, rpn_anchor_generator=anchors, **sizes, **numbers, **heads)
    model.roi_heads.box_predictor = FastRCNNPredictor(16, num_classes)
    model.roi_heads.mask_predictor = MaskRCNNPredictor(8, 8, num_classes)
    model.roi_heads.mask_predictor.mask_fcn_logits.bias.data.fill_(0.5)
    return model.double()
"""


def with_discs(folder: Path, seed: int, images: int) -> Path:
    """Write images of bright discs, and COCO's file of them."""
    rng = np.random.default_rng(seed)
    content: dict[str, Any] = {"images": [], "annotations": [], "categories": [{"id": 3, "name": "disc"}]}
    for i in range(images):
        pixels, (x, y), radius = rng.integers(60, 120, (48, 48, 3), dtype=np.uint8), rng.integers(20, 28, 2), 18
        turns = np.linspace(0, 2 * np.pi, 17)[:-1]
        corners = np.stack([x + radius * np.cos(turns), y + radius * np.sin(turns)], 1)
        rows, columns = np.mgrid[:48, :48]
        pixels[(rows - y) ** 2 + (columns - x) ** 2 < radius**2] = 230
        Image.fromarray(pixels).save(folder / f"{seed}-{i}.png")
        content["images"].append({"id": i, "file_name": f"{seed}-{i}.png", "width": 48, "height": 48})
        box = [float(x - radius), float(y - radius), 2.0 * radius, 2.0 * radius]
        entry = {"id": i + 1, "image_id": i, "category_id": 3, "bbox": box, "iscrowd": 0}
        content["annotations"].append({**entry, "segmentation": [corners.flatten().tolist()], "area": 1000.0})
    (folder / f"{seed}.json").write_text(json.dumps(content))
    return folder / f"{seed}.json"


@pytest.mark.slow
def test_a_detector_of_masks_is_tuned_for_their_ap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    coco_metric = pytest.importorskip("metricopt_ext.detection.coco_metric").coco_metric
    monkeypatch.setattr(sys, "path", sys.path[:])
    (tmp_path / "our_detectors.py").write_text(OWN)
    (tmp_path / "our_masks.py").write_text(MASKS)
    train, val, test = (with_discs(tmp_path, seed, 4) for seed in range(3))
    sizes = {"model.min_size", "model.max_size", "model.proposals"}
    base = [each for each in without_scenes(TINY) if each.partition("=")[0] not in sizes] + ["model.steps=20"]
    config = tmp_path / "mine.yaml"
    parts = {"train": str(train), "val": str(val), "test": str(test)}
    model = {"name": "our_masks:masks", "folder": str(tmp_path)}
    config.write_text(json.dumps({"data": {"name": "coco", **parts}, "model": model}))
    asked = ["metric.name=segm/AP", "metric.definition=coco", "adapter.placement=backbone", "metric.also=[AP50]"]
    run = ["--config-file", config, "--output-dir", tmp_path / "run", *base, *asked]
    call(tool, *run)
    report, seed = content_of(tmp_path / "run"), tmp_path / "run" / "seed-0"
    assert report["metric"]["name"] == "segm/AP"
    fresh = sys.modules["our_masks"].masks(2)
    metric_of = {}
    for name, file in (("model", seed / "model.safetensors"), ("tuned", seed / "tuned.pth")):
        load_checkpoint(fresh, file)
        data = json.loads(test.read_text())
        images = [image.load().double() / 255 for image in read_coco(test, tmp_path).images]
        for each in (*data["annotations"], *data["categories"]):  # the detector's label
            each.update({"category_id": 1} if "category_id" in each else {"id": 1})
        metric_of[name] = 1 - coco_metric(images, data, kind="segm").judge(fresh.eval()).cost
    assert report["methods"]["metricopt"]["test"] == [pytest.approx(metric_of["tuned"], abs=1e-9)]
    assert report["methods"]["pretrained"]["test"] == [pytest.approx(metric_of["model"], abs=1e-9)]
    assert 0 < metric_of["model"] < 1

    said = refused(tool, *run[:3], tmp_path / "other", *run[4:], "data.size=24")
    assert said.startswith("masks are as large as their images, which are not scaled down: leave data.size")
    content = json.loads(train.read_text())
    del content["annotations"][2]["segmentation"]
    train.write_text(json.dumps(content))
    said = refused(tool, *run[:3], tmp_path / "other", *run[4:])
    assert "annotation 2 has no segmentation, which --iou-type segm (kind='segm') and metric.name=segm/AP50" in said


def test_hugging_faces_detectors_are_tuned_and_judged(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    small: dict[str, Any] = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.YolosConfig(
        **small, intermediate_size=8, image_size=[64, 64], patch_size=16, num_detection_tokens=6
    )
    config.id2label = {0: "digit", 1: "other"}
    config.label2id = {"digit": 0, "other": 1}
    folder = tmp_path / "yolos"
    model = transformers.YolosForObjectDetection(config)
    model.class_labels_classifier.layers[-1].bias.data[0] = 3.0  # all are digits
    model.save_pretrained(folder)
    transformers.YolosImageProcessor(size={"shortest_edge": 64, "longest_edge": 64}).save_pretrained(folder)
    options = [f"model.name={folder}", "model.steps=0", "adapter.layers=[vit.*layernorm*]", "toolkit=transformers"]
    sizes = {"model.min_size", "model.max_size", "model.proposals"}
    base = [each for each in TINY if each.partition("=")[0] not in sizes]
    plain = tmp_path / "plain.yaml"
    content = {"data": {"name": "scenes", "images": [6, 4, 4]}, "scene": {"size": 64}, "toolkit": "transformers"}
    plain.write_text(json.dumps(content))
    call(tool, "--config-file", plain, "--output-dir", tmp_path / "run", *base, *options)
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert 0 <= report["methods"]["metricopt"]["test"][0] <= 1
    fresh = transformers.YolosForObjectDetection.from_pretrained(folder)
    fresh.load_state_dict(torch.load(tmp_path / "run" / "seed-0" / "tuned.pth"))
    assert_refused(
        lambda: build_toolkit(load_config(DetectionConfig, plain, [*options, "model.min_size=64"])),
        ConfigError,
        "model.min_size=64",
        "toolkit=torchvision",
    )
    assert_refused(
        lambda: build_toolkit(load_config(DetectionConfig, plain, [*options, "classification_loss=ap"])),
        ConfigError,
        "toolkit=transformers",
    )
    assert_refused(lambda: build_toolkit(load_config(DetectionConfig, plain)), ConfigError, "small_fpn", "config.json")


@pytest.mark.slow
def test_settings_of_inference_come_before_phi(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A larger image and views of it are tried, and as many detections as AP can use are there from the first on."""
    more = ["methods=[settings]", "settings.inference=3", "queries=28", weights_of(finished)]
    overrides = [each for each in SIZES if not each.startswith("queries=")]
    call(tool, "--config-file", SCENES, "--output-dir", tmp_path / "run", *overrides, *more)
    report = content_of(tmp_path / "run")
    (queries,), (changed,) = report["queries"], report["inference"]
    assert queries["settings"] >= 4  # sizes and presets
    assert changed.pop("detections") == [100, 300]
    assert "score_thresh" not in changed  # it is 0 already
    assert "detections 100 → 300 in 1" in " ".join(capsys.readouterr().out.split())


def test_a_setting_that_a_detector_has_not_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "run"
    said = refused(
        tool, "--config-file", SCENES, "--output-dir", out, *SIZES, "methods=[settings]", "settings.names=[size,blur]"
    )
    assert said.startswith("settings.names=['size', 'blur']: there is no 'blur'")
    assert not out.exists()
