"""Detectron2: a training loop of one's own, in the manner of its plain_train_net.py, on scenes of digits."""

import argparse
from pathlib import Path

from detectron2.checkpoint import DetectionCheckpointer
from detectron2.config import get_cfg
from detectron2.data import DatasetCatalog, DatasetMapper, MapDataset
from detectron2.data import build_detection_test_loader as test_loader
from detectron2.data import build_detection_train_loader as train_loader
from detectron2.evaluation import COCOEvaluator, inference_on_dataset
from detectron2.modeling import build_model
from detectron2.solver import build_optimizer
from detectron2.utils.events import EventStorage
from numpy import nan_to_num
from torch import Tensor, nn

import metricopt_ext as mo  # +
from metricopt_ext.detection.detectron2.datasets import register
from metricopt_ext.detection.scenes import SceneShift, write_scenes
from metricopt_ext.detection.voc import read_voc

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=600)
parser.add_argument("--queries", type=int, default=60)  # +
args = parser.parse_args()
write_scenes("scenes", images=(400, 80, 100), size=64, scale=(14, 28), shift=SceneShift(contrast=0.4))
for part in ("train", "val", "test"):  # the last two have less contrast
    register(part, read_voc("scenes", part))
cfg = get_cfg()
cfg.merge_from_file(str(Path(__file__).with_name("detectron2_small.yaml")))
cfg.SOLVER.MAX_ITER = args.steps
model = build_model(cfg).train()
optimizer = build_optimizer(cfg, model)


def loss_of(model: nn.Module, batch: list[dict]) -> Tensor:
    with EventStorage():
        return sum(model.train()(batch).values())


def ap50(model: nn.Module, part: str) -> float:
    evaluator = COCOEvaluator(part, output_dir="coco", use_fast_impl=False)
    return nan_to_num(inference_on_dataset(model, test_loader(cfg, part), evaluator)["bbox"]["AP50"]) / 100


for batch, _ in zip(train_loader(cfg), range(args.steps), strict=False):
    optimizer.zero_grad()
    loss_of(model, batch).backward()
    optimizer.step()
print(f"AP50 on test, before: {ap50(model, 'test'):.4f}")
train_set = MapDataset(DatasetCatalog.get("train"), DatasetMapper(cfg, is_train=True))  # +
batches = mo.DatasetBatches(train_set, cfg.SOLVER.IMS_PER_BATCH, collate=list)  # +
adapter = mo.attach_film(model, "backbone.bottom_up.*norm", dim=16)  # +
metric = mo.Metric(lambda model: ap50(model, "val"), maximize=True, name="AP50")  # +
task = mo.FinetuneTask(adapter, loss=loss_of, batches=batches, metric=metric, population=1)  # +
print(mo.optimize_metric(task, queries=args.queries))  # +
adapter.merge()  # +
print(f"AP50 on test, after: {ap50(model, 'test'):.4f}")
DetectionCheckpointer(model, ".").save("detectron2_loop")
