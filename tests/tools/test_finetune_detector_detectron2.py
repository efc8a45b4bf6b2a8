"""The detection tool end to end on a tiny run of a Detectron2 detector."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("detectron2", reason="needs Detectron2, installed from source")

from detectron2.checkpoint import DetectionCheckpointer
from detectron2.engine import DefaultPredictor

from metricopt_ext.detection import scenes
from metricopt_ext.detection.ap50 import average_precision
from metricopt_ext.detection.build import build_toolkit
from metricopt_ext.detection.config import DetectionConfig
from metricopt_ext.detection.detectron2.toolkit import Detectron2Toolkit, detections_of
from metricopt_ext.detection.voc import read_voc
from metricopt_ext.tools import evaluate_ap50, finetune_detector
from metricopt_ext.utils.config import load_config

pytestmark = pytest.mark.detectron2

ROOT = Path(__file__).parents[2]
SCENES = ROOT / "configs" / "detection" / "scenes_detectron2.yaml"

# The detector hardly learns, but some of its many boxes, detected at any score, fall on digits, which are large and of
# one class here: AP50 moves with phi.
TINY = [
    *("finetune.steps=3", "method.evals=2", "method.rounds=1", "method.folds=2", "method.trials=0", "queries=16"),
    "method.name=recipe",
    *(
        "model.steps=30",
        "model.lr=0.01",
        "model.batch_size=4",
        "model.opts=[]",
        "adapter.placement=backbone",
        "methods=[]",
    ),
    *("scene.size=64", "scene.digits=[1,2]", "scene.scale=[32,54]", "shift.scale=1"),
    *("data.images=[12,6,6]", "batch_size=2"),
    *("adapter.dim=3", "method.start_std=0.4", "workers=1", "seeds=1", "device=cpu"),
]


@pytest.mark.usefixtures("double_nms")
def test_the_tool_and_its_checkpoint(
    tiny_config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    build = Detectron2Toolkit.build
    # In double precision no two boxes tie.
    monkeypatch.setattr(Detectron2Toolkit, "build", lambda self, classes, seed: build(self, classes, seed).double())
    monkeypatch.setattr(scenes, "CLASSES", ("digit",) * 10)
    many = ("MODEL.RPN.POST_NMS_TOPK_TEST", 300, "TEST.DETECTIONS_PER_IMAGE", 300)
    cfg = tiny_config("fpn", "BN", "MODEL.ROI_HEADS.SCORE_THRESH_TEST", 0.0, *many)
    file = tmp_path / "detector.yaml"
    file.write_text(cfg.dump())
    out = tmp_path / "run"
    finetune_detector.run(load_config(DetectionConfig, SCENES, [*TINY, f"model.config_file={file}"]), out, resume=False)
    assert "detectron2's detector on shifted scenes" in capsys.readouterr().out
    content = json.loads((out / "report.json").read_text())
    test = read_voc(out / "seed-0" / "scenes", "test")

    cfg.MODEL.WEIGHTS = str(out / "seed-0" / "tuned.pth")
    cfg.MODEL.ROI_HEADS.NUM_CLASSES = len(test.classes)
    predictor = DefaultPredictor(cfg)
    DetectionCheckpointer(predictor.model.double()).load(cfg.MODEL.WEIGHTS)
    found = [
        detections_of(predictor(np.ascontiguousarray(image.load().permute(1, 2, 0).numpy()[:, :, ::-1]))["instances"])
        for image in test.images
    ]
    expected = average_precision(found, test, "voc").mean
    assert expected > 0
    assert content["methods"]["metricopt"]["test"] == [pytest.approx(expected)]

    config = tmp_path / "run.yaml"
    config.write_text(f"toolkit: detectron2\ndata: {{name: scenes}}\nmodel: {{config_file: '{file}'}}\ndevice: cpu\n")
    evaluate = evaluate_ap50
    monkeypatch.setattr(
        "sys.argv",
        ["evaluate_ap50.py", "--config-file", str(config), "--weights", cfg.MODEL.WEIGHTS, "--split", "test",
         "--annotations", str(out / "seed-0" / "scenes"), "--output-dir", str(tmp_path)],
    )  # fmt: skip
    evaluate.main()
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["ap50"]["voc"]["mean"] == pytest.approx(expected)


@pytest.mark.parametrize(("overrides", "whole"), [([], False), (["model.steps=0"], True)])
def test_weights_are_whole_where_nothing_trains_them(overrides: list[str], whole: bool, tiny_config: Any) -> None:
    cfg = tiny_config("fpn", "BN")
    toolkit = build_toolkit(
        load_config(
            DetectionConfig, SCENES, [f"model.config_file={cfg.OUTPUT_DIR}/../tiny.yaml", "device=cpu", *overrides]
        )
    )
    assert isinstance(toolkit, Detectron2Toolkit)
    assert toolkit.strict_weights is whole
