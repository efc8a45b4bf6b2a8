"""The detection tool end to end on tiny runs of torchvision's detectors, and what it refuses."""

import json
import runpy
import sys
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

pytest.importorskip("torchvision")

from helpers import own
from helpers.own_detectors import detector, masks, write_discs
from helpers.programs import call, refused
from helpers.refusals import assert_refused
from metricopt_ext.detection.build import build_metric, build_toolkit
from metricopt_ext.detection.coco import read_coco
from metricopt_ext.detection.config import DetectionConfig
from metricopt_ext.detection.metric import detector_metric
from metricopt_ext.detection.task import load_examples
from metricopt_ext.detection.torchvision_toolkit import TorchvisionToolkit
from metricopt_ext.errors import ConfigError
from metricopt_ext.tools import evaluate_ap50
from metricopt_ext.tools import finetune_detector as tool
from metricopt_ext.utils.config import load_config
from testers.tool import SMALL, FinetuneTester, report_of

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs" / "detection"
SCENES = CONFIGS / "scenes_torchvision.yaml"
SIZES = [
    *("finetune.steps=3", "model.steps=20", "model.lr=0.05", "model.batch_size=2", "model.min_size=48"),
    *("model.max_size=48", "scene.size=48", "scene.digits=[1,2]", "scene.scale=[24,40]", "shift.scale=1"),
    *("data.images=[6,6,6]", "model.proposals=100", "batch_size=2", "adapter.dim=3", "workers=1", "seeds=1"),
    "device=cpu",
]


def config_of(*overrides: str, file: Path = SCENES) -> DetectionConfig:
    return load_config(DetectionConfig, file, overrides)


def found_by(model: Any, file: Path, kind: str) -> float:
    """Return AP50 (bbox) or AP (segm) by pycocotools of what torchvision's interface gives for a file's images."""
    coco, evaluation = pytest.importorskip("pycocotools.coco"), pytest.importorskip("pycocotools.cocoeval")
    encode = pytest.importorskip("pycocotools.mask").encode
    truth, found = coco.COCO(file), []
    for image in truth.dataset["images"]:
        pixels = torch.tensor(np.asarray(Image.open(file.with_name(image["file_name"]))))
        (out,) = model.eval()([pixels.permute(2, 0, 1).double() / 255])
        for i, (left, top, right, bottom) in enumerate(out["boxes"].tolist()):
            entry = {"image_id": image["id"], "category_id": 3, "score": float(out["scores"][i])}
            if kind == "segm":
                entry["segmentation"] = encode(np.asfortranarray((out["masks"][i, 0] > 0.5).numpy().astype(np.uint8)))
            else:
                entry["bbox"] = [left, top, right - left, bottom - top]
            found.append(entry)
    judged = evaluation.COCOeval(truth, truth.loadRes(found), kind)
    judged.evaluate()
    judged.accumulate()
    judged.summarize()
    return float(judged.stats[1 if kind == "bbox" else 0])


def discs(folder: Path) -> dict[str, str]:
    """Write three parts; returns them as a section of the settings."""
    sizes = {"train": 6, "val": 8, "test": 6}
    parts = {part: write_discs(folder / f"{part}.json", seed, n) for seed, (part, n) in enumerate(sizes.items())}
    return {"name": "coco", **{part: str(file) for part, file in parts.items()}}


@pytest.mark.slow
class TestDetector(FinetuneTester):
    program = tool
    config: ClassVar = {
        "model": {"name": "helpers.own_detectors:detector", "folder": own.FOLDER, "steps": 20, "lr": 0.02},
        "adapter": {"dim": 4, "placement": "backbone", "keep_gib": 0},
        "guard": {"confidence": 0.5},
        "batch_size": 2,
        **SMALL,
    }
    counted, kept, seeds = "mean_score", "tuned.pth", 1
    beside = "AP75"
    refused = (
        (["toolkit=mmdet"], ["toolkit=", "mmdet", "torchvision"]),
        (["metric.definition=coco50"], ["metric.definition=", "coco50", "voc"]),
        (["model.min_size=48"], ["model.min_size=48", "model.kwargs.min_size"]),
        (["classification_loss=focal"], ["classification_loss=", "focal", "ap"]),
        (["population=2"], ["population=2"]),
        (["adapter.keep_gib=-1"], ["adapter.keep_gib=-1.0", "0"]),
        (["methods=[settings]", "settings.names=[size,blur]"], ["settings.names=", "blur"]),
    )
    refused_by_data = (
        (["data.train=nowhere.json"], ["nowhere.json"]),
        (["data.classes=[cat]"], ["data.classes"]),
        (["adapter.placement=head"], ["placement=", "head", "backbone"]),
        (["adapter.layers=[nrom*]"], ["nrom"]),
        (["device=abacus"], ["abacus"]),
    )

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def discs(cls, tmp_path_factory: pytest.TempPathFactory) -> None:
        cls.config = {**cls.config, "data": discs(tmp_path_factory.mktemp("discs"))}

    def judge(self, state: Any, folder: Path) -> float:
        model = detector(2)
        model.load_state_dict(state)
        return found_by(model, Path(self.config["data"]["test"]), "bbox")

    def test_a_detector_has_one_ap50(self, finished: Path, tmp_path: Path) -> None:
        """As it began and as it was kept, by both tools and by pycocotools, of one picture at a time."""
        methods, test = report_of(finished)["methods"], Path(self.config["data"]["test"])
        for method, kept in (("pretrained", "model.safetensors"), ("metricopt", self.kept)):
            file = finished / "seed-0" / kept
            state = load_file(file) if file.suffix == ".safetensors" else torch.load(file, weights_only=True)
            ways = [*methods[method]["test"], self.judge(state, finished)]
            ways.append(evaluated(tmp_path / method, test, *self.words(tmp_path / "run")[:2], "--weights", file))
            assert 0 < min(ways) == pytest.approx(max(ways), abs=1e-9)


def evaluated(folder: Path, test: Path, *words: object) -> float:
    """Return the AP50 by evaluate_ap50 of COCO's definition, of images beside their file."""
    data = ("--annotations", test, "--images-dir", test.parent, "--definition", "coco")
    call(evaluate_ap50, *words, *data, "--output-dir", folder)
    return float(report_of(folder)["ap50"]["coco"]["mean"])


@pytest.mark.parametrize("named", [("disc", "ring"), ("ring", "disc"), ("disc",), ("ring", "disc", "square")])
def test_classes_are_those_that_the_detector_was_trained_on_in_its_order(named: Any, tmp_path: Path) -> None:
    """Whatever numbers the file that it is judged by gives them."""
    (tmp_path / "test").mkdir()
    train, test = write_discs(tmp_path / "train.json", 0, 1), write_discs(tmp_path / "test" / "test.json", 2, 6)
    for file, names in ((train, ("disc", "ring")), (test, named)):
        content = json.loads(file.read_text())
        content["categories"] = [{"id": 5 + 2 * i, "name": name} for i, name in enumerate(names)]
        for each in content["annotations"]:
            each["category_id"] = 5 + 2 * names.index("disc")
        file.write_text(json.dumps(content))
    own_detector = {"name": "helpers.own_detectors:detector", "folder": own.FOLDER}
    data = {"name": "coco", "train": str(train), "val": str(test)}
    (tmp_path / "mine.yaml").write_text(json.dumps({"data": data, "model": own_detector, "device": "cpu"}))
    model = build_toolkit(load_config(DetectionConfig, tmp_path / "mine.yaml")).build(2, seed=0)
    with torch.no_grad():  # what it finds of the other class is far from any disc
        model.roi_heads.box_predictor.cls_score.bias[2] = -9
    torch.save(model.state_dict(), tmp_path / "mine.pth")
    words = ("--config-file", tmp_path / "mine.yaml", "--weights", tmp_path / "mine.pth")
    if "square" in named:  # of which the detector knows nothing
        with pytest.raises(SystemExit, match=r"error: .*mine\.pth"):
            evaluated(tmp_path / "out", test, *words)
        return
    value = evaluated(tmp_path / "out", test, *words)
    found = report_of(tmp_path / "out")["detections"]
    assert value > 0
    assert found["disc"] > found.get("ring", 0)


def test_pictures_of_several_sizes_are_judged_as_one_at_a_time(tmp_path: Path) -> None:
    """They see nothing of each other, not even as padding."""
    test = write_discs(tmp_path / "test.json", 2, 12)
    own_detector = {"name": "helpers.own_detectors:detector", "folder": own.FOLDER}
    config = {"data": {"name": "coco", "root": "."}, "model": own_detector, "device": "cpu"}
    (tmp_path / "mine.yaml").write_text(json.dumps(config))
    toolkit = build_toolkit(load_config(DetectionConfig, tmp_path / "mine.yaml"))
    model = toolkit.build(1, seed=0)
    torch.save(model.state_dict(), tmp_path / "mine.pth")
    words = ("--config-file", tmp_path / "mine.yaml", "--weights", tmp_path / "mine.pth")
    with torch.no_grad():
        expected = found_by(model, test, "bbox")
    assert 0 < expected == pytest.approx(evaluated(tmp_path / "out", test, *words), abs=1e-9)
    examples = load_examples(read_coco(test, tmp_path))
    metric = build_metric(DetectionConfig().metric)  # COCO's definition unless another is named
    found = detector_metric(metric, toolkit, examples, ("disc",), ()).evaluate(model, "test")
    assert found.value == pytest.approx(expected, abs=1e-9)


@pytest.mark.slow
def test_a_detector_of_masks_is_tuned_for_their_ap(tmp_path: Path) -> None:
    (tmp_path / "discs").mkdir()
    config, data = tmp_path / "mine.yaml", discs(tmp_path / "discs")
    model = {**TestDetector.config["model"], "name": "helpers.own_detectors:masks"}
    metric = {"name": "segm/AP", "also": ["AP50"]}
    config.write_text(json.dumps({**TestDetector.config, "data": data, "model": model, "metric": metric}))
    run = ["--config-file", config, "--output-dir"]
    call(tool, *run, tmp_path / "run")
    report, seed = report_of(tmp_path / "run"), tmp_path / "run" / "seed-0"
    assert report["metric"]["name"] == "segm/AP"
    fresh = masks(2)
    fresh.load_state_dict(torch.load(seed / "tuned.pth", weights_only=True))
    with torch.no_grad():
        expected = found_by(fresh, Path(data["test"]), "segm")
    assert report["methods"]["metricopt"]["test"] == [pytest.approx(expected, abs=1e-9)]

    assert "data.size" in refused(tool, *run, tmp_path / "other", "data.size=24")
    content = json.loads(Path(data["train"]).read_text())
    del content["annotations"][2]["segmentation"]
    Path(data["train"]).write_text(json.dumps(content))
    assert "annotation 2 has no segmentation" in refused(tool, *run, tmp_path / "other")


@pytest.mark.parametrize(
    ("overrides", "strict"), [([], False), (["model.steps=0"], True), (["model.steps=0", "model.weights=a.pth"], False)]
)
def test_published_weights_are_whole_where_nothing_trains_them(overrides: list[str], strict: bool) -> None:
    toolkit = build_toolkit(config_of("model.name=fasterrcnn_resnet50_fpn", *overrides))
    assert isinstance(toolkit, TorchvisionToolkit)
    assert toolkit.strict_weights is strict


@pytest.mark.parametrize(
    ("toolkit", "setting"),
    [
        ("detectron2", "model.min_size=64"),
        ("torchvision", "model.config_file=scenes.yaml"),
    ],
)
def test_a_setting_that_the_toolkit_does_not_look_at_is_refused(toolkit: str, setting: str) -> None:
    other = {"detectron2": "torchvision", "torchvision": "detectron2"}[toolkit]
    config = load_config(DetectionConfig, None, [f"toolkit={toolkit}", "data.name=scenes", setting])
    names = (setting.partition("=")[0], f"toolkit={other}", f"toolkit={toolkit}")
    assert_refused(lambda: build_toolkit(config), ConfigError, *names)


def test_detectron2_is_asked_for_where_it_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("metricopt_ext.detection.detectron2.")]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("detectron2", "detectron2.config"):
        monkeypatch.setitem(sys.modules, name, None)
    message = refused(tool, "--config-file", CONFIGS / "scenes_detectron2.yaml", "--output-dir", tmp_path / "run")
    assert message.startswith("toolkit=detectron2 needs Detectron2, which is installed from source (")
    assert "--toolkit torchvision works without it, with its own config file" in message
    assert not (tmp_path / "run").exists()


def test_help_is_shown_where_detectron2_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "detectron2", None)
    for word in ("--help", "-h"):
        monkeypatch.setattr(sys, "argv", ["train_detector.py", word])
        with pytest.raises(SystemExit) as caught:
            runpy.run_path(str(ROOT / "tools" / "train_detector.py"), run_name="__main__")
        assert not caught.value.code
        said = capsys.readouterr().out
        assert all(each in said for each in ("--search", "--eval-only", "Detectron2"))


@pytest.mark.slow
def test_hugging_faces_detectors_are_tuned_and_judged(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    small: dict[str, Any] = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.YolosConfig(
        **small, intermediate_size=8, image_size=[64, 64], patch_size=16, num_detection_tokens=6
    )
    config.id2label = {i: str(i) for i in range(10)}  # the scenes' classes
    config.label2id = {name: i for i, name in config.id2label.items()}
    folder = tmp_path / "yolos"
    model = transformers.YolosForObjectDetection(config)
    model.class_labels_classifier.layers[-1].bias.data[0] = 3.0  # all are zeros
    model.save_pretrained(folder)
    transformers.YolosImageProcessor(size={"shortest_edge": 64, "longest_edge": 64}).save_pretrained(folder)
    options = [f"model.name={folder}", "model.steps=0", "adapter.layers=[vit.*layernorm*]", "toolkit=transformers"]
    sizes = {"model.min_size", "model.max_size", "model.proposals"}
    base = [each for each in (*SIZES, "queries=20") if each.partition("=")[0] not in sizes]
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
def test_settings_of_inference_come_before_phi(tmp_path: Path) -> None:
    more = ["methods=[settings]", "settings.inference=3", "queries=28"]
    call(tool, "--config-file", SCENES, "--output-dir", tmp_path / "run", *SIZES, *more)
    report = report_of(tmp_path / "run")
    (queries,), methods = report["queries"], report["methods"]
    assert queries["settings"] >= 4  # sizes and presets
    assert methods["settings"]["queries_total"] == queries["starts"] + queries["settings"]
    assert methods["metricopt"]["validation"][0] >= methods["settings"]["validation"][0] - 1e-12
