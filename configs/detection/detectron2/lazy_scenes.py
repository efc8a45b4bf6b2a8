"""The finetuning of scenes.yaml by LazyConfig, for Detectron2's tools/lazyconfig_train_net.py and trainers like it.

`with_film` takes any lazy model; this one is read from the YAML file. `ap_loss.use_ap_loss` around that gives it the AP
loss. A trainer sets ``optimizer.params.model``, as
Detectron2's tool does, and to evaluate AP50 on val and record a trajectory, it sets ``hooks.model`` too and registers
``instantiate(cfg.hooks)`` before its other hooks.
"""

from pathlib import Path

from detectron2.config import LazyCall as L
from detectron2.data import DatasetMapper, build_detection_test_loader, build_detection_train_loader
from detectron2.data.transforms import ResizeShortestEdge
from detectron2.modeling import build_model
from fvcore.common.param_scheduler import LinearParamScheduler

from metricopt_ext.detection.detectron2.build import finetuning_hooks, phi_of, phi_optimizer, with_film
from metricopt_ext.detection.detectron2.config import read_config
from metricopt_ext.detection.detectron2.datasets import as_records
from metricopt_ext.detection.detectron2.evaluator import AP50Evaluator, ap50_metric
from metricopt_ext.detection.scenes import SceneShift, write_scenes
from metricopt_ext.detection.voc import read_voc
from metricopt_ext.tasks.trajectories import TrajectoryStore

data = {
    "root": L(write_scenes)(
        folder="datasets/scenes",
        images=[600, 100, 200],
        seed=310,
        shift=L(SceneShift)(contrast=0.3, noise_std=0.03, scale=0.8),
    )
}

model = L(with_film)(
    model=L(build_model)(
        cfg=L(read_config)(
            path=str(Path(__file__).parent / "scenes.yaml"), overrides=["MODEL.DEVICE", "${train.device}"]
        )
    ),
    layers=["early"],
    dim=32,
)

optimizer = L(phi_optimizer)(
    params=L(phi_of)(),  # of the model, which the trainer sets
    value_function="",
    lr=0.1,
)

lr_multiplier = L(LinearParamScheduler)(start_value=1.0, end_value=1.0)  # the constant one fails at its end

dataloader = {
    "train": L(build_detection_train_loader)(
        dataset=L(as_records)(data=L(read_voc)(root="${data.root}", split="train")),
        mapper=L(DatasetMapper)(
            is_train=True, augmentations=[L(ResizeShortestEdge)(short_edge_length=96)], image_format="BGR"
        ),
        total_batch_size=4,
    ),
    "test": L(build_detection_test_loader)(
        dataset=L(as_records)(data=L(read_voc)(root="${data.root}", split="val")),
        mapper=L(DatasetMapper)(
            is_train=False, augmentations=[L(ResizeShortestEdge)(short_edge_length=96)], image_format="BGR"
        ),
    ),
    "evaluator": L(AP50Evaluator)(truth=L(read_voc)(root="${data.root}", split="val"), definition="voc"),
}

train = {
    "output_dir": "out/lazy_scenes",
    "init_checkpoint": "out/scenes/model_final.pth",
    "max_iter": 20,
    "amp": {"enabled": False},
    "ddp": {"broadcast_buffers": False, "find_unused_parameters": False, "fp16_compression": False},
    "checkpointer": {"period": 2, "max_to_keep": 1},
    "eval_period": 0,
    "log_period": 20,
    "device": "cuda",
    "seed": 0,
}

hooks = L(finetuning_hooks)(
    metric=L(ap50_metric)(loader="${dataloader.test}", evaluator="${dataloader.evaluator}"),
    store=L(TrajectoryStore)(folder="out/lazy_scenes/trajectories"),
    steps="${train.max_iter}",
    evals=8,
    output_dir="${train.output_dir}",
)
