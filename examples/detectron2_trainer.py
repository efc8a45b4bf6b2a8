"""Detectron2: a DefaultTrainer with an evaluator of one's own; a search ends with the test, as training does."""

import argparse
from pathlib import Path

from detectron2.config import CfgNode, get_cfg
from detectron2.evaluation import COCOEvaluator

from metricopt_ext.detection.detectron2.config import add_metricopt_config  # +
from metricopt_ext.detection.detectron2.datasets import register
from metricopt_ext.detection.detectron2.search import search  # +
from metricopt_ext.detection.detectron2.trainer import MetricOptTrainer  # +
from metricopt_ext.detection.scenes import SceneShift, write_scenes
from metricopt_ext.detection.voc import read_voc

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=600)
parser.add_argument("--queries", type=int, default=60)  # +
parser.add_argument("--output-dir", type=Path, default=Path("out"))
args = parser.parse_args()
args.output_dir.mkdir(parents=True)  # a folder of an earlier run is refused here, before the training
write_scenes("scenes", images=(400, 80, 100), size=64, scale=(14, 28), shift=SceneShift(contrast=0.4))
for part in ("train", "val", "test"):  # the last two have less contrast
    register(part, read_voc("scenes", part))


class Trainer(MetricOptTrainer):  # +
    @classmethod
    def build_evaluator(cls, cfg: CfgNode, dataset_name: str, output_folder: str | None = None) -> COCOEvaluator:
        return COCOEvaluator(dataset_name, output_dir=output_folder or cfg.OUTPUT_DIR, use_fast_impl=False)


cfg = get_cfg()
add_metricopt_config(cfg)  # +
cfg.merge_from_file(str(Path(__file__).with_name("detectron2_small.yaml")))
cfg.SOLVER.MAX_ITER, cfg.OUTPUT_DIR = args.steps, str(args.output_dir / "trained")
trainer = Trainer(cfg)
trainer.train()
print("on test, before:", Trainer.test(cfg, trainer.model))
cfg.MODEL.WEIGHTS, cfg.OUTPUT_DIR = f"{cfg.OUTPUT_DIR}/model_final.pth", str(args.output_dir / "tuned")  # +
cfg.METRICOPT.METRIC.SET, cfg.METRICOPT.SEARCH.QUERIES = "val", args.queries  # +
cfg.METRICOPT.FILM.DIM = 16  # +
print(search(cfg, trainer_class=Trainer))  # +
