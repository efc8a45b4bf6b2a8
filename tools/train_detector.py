"""Train a detector of Detectron2, or finetune one for AP50, as Detectron2's own tools/train_net.py does.

    python tools/train_detector.py --config-file FILE                                        # 1: train, as Detectron2
    python tools/train_detector.py --config-file FILE --meta-train f.safetensors
        MODEL.WEIGHTS out/model_final.pth OUTPUT_DIR out/meta                                # 2: learn f
    python tools/train_detector.py --config-file FILE MODEL.WEIGHTS out/model_final.pth METRICOPT.ENABLED True
        METRICOPT.VALUE_FUNCTION f.safetensors OUTPUT_DIR out/tuned                          # 3: follow f
    python tools/train_detector.py --config-file FILE --eval-only MODEL.WEIGHTS out/tuned/model_merged.pth
        DATASETS.TEST "('voc07_test',)"                                                      # 4: judge on test

FILE is one of configs/detection/detectron2. The options are those of train_net.py, --num-gpus 0 computes on the CPU;
overrides are KEY VALUE pairs at the end. Each item above is one command. With METRICOPT.ENABLED False, training is
Detectron2's own. Learning f asks AP50 on METRICOPT.VALIDATION METRICOPT.ROUNDS * TASKS * EVALS times and keeps its runs
in OUTPUT_DIR/trajectories; --resume goes on with what a killed one left there. Finetuning writes its best model, phi
merged, to OUTPUT_DIR/model_merged.pth, which any program that uses Detectron2 loads. Evaluation is by AP50.
"""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from metricopt_ext.errors import ConfigError, MetricOptError

try:
    from detectron2.checkpoint import DetectionCheckpointer
    from detectron2.engine import default_argument_parser, default_setup, launch
    from detectron2.utils import comm

    from metricopt_ext.detection.detectron2.build import unwrapped
    from metricopt_ext.detection.detectron2.config import read_config, settings_of
    from metricopt_ext.detection.detectron2.datasets import check_classes, register_entries
    from metricopt_ext.detection.detectron2.export import export
    from metricopt_ext.detection.detectron2.meta_train import meta_train
    from metricopt_ext.detection.detectron2.trainer import MetricOptTrainer
except ModuleNotFoundError as error:
    sys.exit(
        f"error: {error.name} is not installed; get Detectron2 by"
        " pip install --no-build-isolation git+https://github.com/facebookresearch/detectron2"
    )


def main(arguments: argparse.Namespace) -> Any:
    """Do in one process what the command line says; returns the evaluation's results, if any."""
    cfg = read_config(arguments.config_file, arguments.opts)
    if arguments.num_gpus == 0:
        cfg.MODEL.DEVICE = "cpu"
    if arguments.eval_only:
        cfg.METRICOPT.START_STD = 0.0  # phi is what the checkpoint holds, or 0
    weights = cfg.MODEL.WEIGHTS
    if weights and "://" not in weights and not Path(weights).is_file():
        raise ConfigError(f"MODEL.WEIGHTS={weights}: there is no such file")
    cfg.freeze()
    settings = settings_of(cfg)
    register_entries(settings.data, settings.data_root, settings.classes)
    check_classes(cfg)
    default_setup(cfg, arguments)
    if arguments.meta_train is not None:
        return meta_train(cfg, arguments.meta_train, arguments.resume)
    if arguments.eval_only:
        model = MetricOptTrainer.build_model(cfg)
        checkpointer = DetectionCheckpointer(model, save_dir=cfg.OUTPUT_DIR)
        checkpointer.resume_or_load(cfg.MODEL.WEIGHTS, resume=arguments.resume)
        return MetricOptTrainer.test(cfg, model)
    trainer = MetricOptTrainer(cfg)
    trainer.resume_or_load(resume=arguments.resume)
    results = trainer.train()
    if settings.enabled and comm.is_main_process():
        model, folder = unwrapped(trainer.model), Path(cfg.OUTPUT_DIR)
        if settings.validation:
            DetectionCheckpointer(model).load(os.fspath(folder / "model_best.pth"))
        export(model, folder / "model_merged.pth")
    return results


def run() -> None:
    """Parse the command line and launch the processes; an error that a user can mend ends in one line."""
    parser = default_argument_parser(epilog=__doc__)
    parser.add_argument("--meta-train", type=Path, metavar="FILE", help="learn a value function and write it here")
    arguments = parser.parse_args()
    if not arguments.config_file:
        parser.error("--config-file is needed, e.g. configs/detection/detectron2/scenes.yaml")
    if arguments.eval_only and arguments.meta_train:
        parser.error("--eval-only and --meta-train are two commands")
    try:
        launch(
            main,
            arguments.num_gpus,
            num_machines=arguments.num_machines,
            machine_rank=arguments.machine_rank,
            dist_url=arguments.dist_url,
            args=(arguments,),
        )
    except (MetricOptError, FloatingPointError, OSError) as error:
        sys.exit(f"error: {' '.join(str(error).split())}")


if __name__ == "__main__":
    run()
