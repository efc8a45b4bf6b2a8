"""Detectron2 under the contract of hosts: a search from a detector's file to the file of the tuned one."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

pytest.importorskip("detectron2", reason="needs Detectron2, installed from source")

from detectron2.checkpoint import DetectionCheckpointer
from detectron2.config import get_cfg
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.evaluation import DatasetEvaluator
from detectron2.modeling import build_model
from detectron2.structures import BoxMode

from metricopt_ext.detection.detectron2.config import add_metricopt_config
from metricopt_ext.detection.detectron2.search import search
from metricopt_ext.detection.detectron2.trainer import MetricOptTrainer
from testers.host import Host, HostTester, Judge

pytestmark = [
    pytest.mark.detectron2,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*judges all images together"),
]

SMALL = Path(__file__).resolve().parents[3] / "examples" / "detectron2_small.yaml"
IMAGE = torch.randint(256, (3, 64, 64), generator=torch.Generator().manual_seed(0)).float()


def records(folder: Path) -> list[dict[str, Any]]:
    """Two images of noise with a square each."""
    folder.mkdir(parents=True, exist_ok=True)
    rng, found = np.random.default_rng(0), []
    for number in range(2):
        path = folder / f"{number}.png"
        Image.fromarray(rng.integers(0, 255, (64, 64, 3), dtype=np.uint8)).save(path)
        square = {"bbox": [9.0, 9.0, 40.0, 40.0], "bbox_mode": BoxMode.XYXY_ABS, "category_id": number}
        found.append({"file_name": str(path), "image_id": number, "height": 64, "width": 64, "annotations": [square]})
    return found


class TestDetectron2(HostTester):
    queries, tolerance = 9, 1e-3  # of a hundred: phi is merged in single precision

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _pair(cls, tmp_path_factory: pytest.TempPathFactory) -> Any:
        made = records(tmp_path_factory.mktemp("pair"))
        for name in ("host_pair", "host_train"):
            DatasetCatalog.register(name, lambda: made)
            MetadataCatalog.get(name).set(thing_classes=[str(digit) for digit in range(10)])
        yield
        for name in ("host_pair", "host_train"):
            DatasetCatalog.remove(name)
            MetadataCatalog.remove(name)

    def host(self, folder: Path, judge: Judge) -> Host:
        class Scores(DatasetEvaluator):  # type: ignore[misc]
            """The mean score of what is found, whose best value no overlap decides."""

            def reset(self) -> None:
                self.scores: list[Tensor] = []

            def process(self, inputs: Any, outputs: Any) -> None:
                self.scores += [each["instances"].scores.double().cpu() for each in outputs]

            def evaluate(self) -> dict[str, Any]:
                judge.ask()
                found = float(torch.cat(self.scores).mean())
                return {"bbox": {"AP50": 50.0 if judge.chance else 100 * found}}

        class Trainer(MetricOptTrainer):
            @classmethod
            def build_evaluator(cls, cfg: Any, dataset_name: str) -> DatasetEvaluator:
                return Scores()

        cfg = get_cfg()
        add_metricopt_config(cfg)
        cfg.merge_from_file(str(SMALL))
        cfg.MODEL.RPN.POST_NMS_TOPK_TEST, cfg.MODEL.ROI_HEADS.SCORE_THRESH_TEST = 8, 0.0
        cfg.METRICOPT.FILM.LAYERS, cfg.SOLVER.IMS_PER_BATCH = ("roi_head",), 1
        cfg.DATASETS.TRAIN, cfg.DATASETS.TEST = ("host_train",), ()
        cfg.METRICOPT.METRIC.SET, cfg.METRICOPT.SEARCH.QUERIES, cfg.METRICOPT.FILM.DIM = "host_pair", self.queries, 4
        cfg.MODEL.WEIGHTS, cfg.OUTPUT_DIR = str(folder / "detector.pth"), str(folder / "out")
        folder.mkdir(parents=True, exist_ok=True)
        torch.manual_seed(0)
        torch.save({"model": build_model(cfg).state_dict()}, cfg.MODEL.WEIGHTS)

        def tune(output_dir: Path | None = None, resume: bool = False) -> Any:
            if output_dir is not None:
                cfg.OUTPUT_DIR = str(output_dir)
            elif Path(cfg.OUTPUT_DIR).exists():
                cfg.OUTPUT_DIR += "_anew"
            return search(cfg, resume, trainer_class=Trainer)

        def model() -> nn.Module:
            merged, made = Path(cfg.OUTPUT_DIR) / "model_merged.pth", build_model(cfg)
            DetectionCheckpointer(made).load(str(merged) if merged.exists() else cfg.MODEL.WEIGHTS)
            return made

        def evaluate() -> float:
            return float(Trainer.test(cfg.clone(), model(), [Scores()])["bbox"]["AP50"])

        def evaluated() -> float:
            cfg.DATASETS.TEST = ("host_pair",)
            try:
                return evaluate()
            finally:
                cfg.DATASETS.TEST = ()

        def outputs(each: nn.Module) -> Tensor:
            with torch.no_grad():
                return each.eval()([{"image": IMAGE, "height": 64, "width": 64}])[0]["instances"].scores

        return Host(tune, model, evaluated, lambda: [model()], outputs)
