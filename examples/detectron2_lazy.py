"""Detectron2: a trainer by LazyConfig, in the manner of its lazyconfig_train_net.py, on scenes of digits."""

import argparse
from pathlib import Path

from detectron2.checkpoint import DetectionCheckpointer
from detectron2.config import LazyCall, get_cfg, instantiate
from detectron2.data import DatasetMapper, get_detection_dataset_dicts
from detectron2.data import build_detection_test_loader as test_loader
from detectron2.data import build_detection_train_loader as train_loader
from detectron2.engine import SimpleTrainer
from detectron2.evaluation import COCOEvaluator, inference_on_dataset
from detectron2.modeling import build_model
from detectron2.solver import get_default_optimizer_params
from omegaconf import OmegaConf
from torch import nn
from torch.optim import SGD

from metricopt_ext.detection.detectron2.datasets import register
from metricopt_ext.detection.detectron2.lazy import lazy_config, lazy_trainer  # +
from metricopt_ext.detection.detectron2.meta_train import meta_train  # ++
from metricopt_ext.detection.detectron2.search import search  # +
from metricopt_ext.detection.scenes import SceneShift, write_scenes
from metricopt_ext.detection.voc import read_voc

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=600)
parser.add_argument("--queries", type=int, default=60)  # +
args = parser.parse_args()
Path("out").mkdir()  # a folder of an earlier run is refused here, before the training
write_scenes("scenes", images=(400, 80, 100), size=64, scale=(14, 28), shift=SceneShift(contrast=0.4))
for part in ("train", "val", "test"):  # the last two have less contrast
    register(part, read_voc("scenes", part))
small = get_cfg()
small.merge_from_file(str(Path(__file__).with_name("detectron2_small.yaml")))

# What is a file of LazyConfig otherwise.
L, records = LazyCall, LazyCall(get_detection_dataset_dicts)
lazy = OmegaConf.create({"model": L(build_model)(cfg=small), "dataloader": {}}, flags={"allow_objects": True})
lazy.train = {"init_checkpoint": "out/trained.pth", "output_dir": "out", "device": "cpu", "max_iter": args.steps}
lazy.optimizer = L(SGD)(params=L(get_default_optimizer_params)(), lr=0.01, momentum=0.9)
lazy.dataloader.train = L(train_loader)(
    dataset=records(names="train"),
    mapper=L(DatasetMapper)(is_train=True, augmentations=[], image_format="BGR"),
    total_batch_size=4,
)
lazy.dataloader.test = L(test_loader)(
    dataset=records(names="test", filter_empty=False),
    mapper=L(DatasetMapper)(is_train=False, augmentations=[], image_format="BGR"),
)
lazy.dataloader.evaluator = L(COCOEvaluator)(
    dataset_name="${..test.dataset.names}", output_dir="coco", use_fast_impl=False
)


def do_test(model: nn.Module) -> dict:
    return inference_on_dataset(model, instantiate(lazy.dataloader.test), instantiate(lazy.dataloader.evaluator))


model = instantiate(lazy.model)
lazy.optimizer.params.model = model
trainer = SimpleTrainer(model, instantiate(lazy.dataloader.train), instantiate(lazy.optimizer))
trainer.train(0, lazy.train.max_iter)
DetectionCheckpointer(model, "out").save("trained")
print("on test, before:", do_test(model))
cfg, Trainer = lazy_config(lazy), lazy_trainer(lazy)  # +
cfg.METRICOPT.METRIC.SET, cfg.METRICOPT.SEARCH.QUERIES, cfg.METRICOPT.FILM.DIM = "val", args.queries, 16  # +
print(search(cfg, trainer_class=Trainer))  # +
cfg.METRICOPT.META.ROUNDS, cfg.METRICOPT.FINETUNE.STEPS, cfg.METRICOPT.METRIC.EVALS = 2, 20, 4  # ++
print("f of meta-training:", meta_train(cfg, "f.safetensors", trainer_class=Trainer).f.quality)  # ++
