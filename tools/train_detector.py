"""Train a Detectron2 detector, or finetune one for AP50, in the manner of Detectron2's tools/train_net.py.

    python tools/train_detector.py --config-file FILE                                        # 1: train, as Detectron2
    python tools/train_detector.py --config-file FILE --meta-train f.safetensors
        MODEL.WEIGHTS out/model_final.pth OUTPUT_DIR out/meta                                # 2: learn f
    python tools/train_detector.py --config-file FILE MODEL.WEIGHTS out/model_final.pth METRICOPT.ENABLED True
        METRICOPT.FINETUNE.VALUE_FUNCTION f.safetensors OUTPUT_DIR out/tuned                 # 3: follow f
    python tools/train_detector.py --config-file FILE --search
        MODEL.WEIGHTS out/model_final.pth OUTPUT_DIR out/tuned                               # 2 and 3 for one detector
    python tools/train_detector.py --config-file FILE --eval-only MODEL.WEIGHTS out/tuned/model_merged.pth
        DATASETS.TEST "('voc07_test',)" OUTPUT_DIR out/test                                  # 4: judge on test

FILE is one of configs/detection/detectron2. The options are those of train_net.py; --num-gpus 0 computes on the CPU;
overrides are KEY VALUE pairs at the end; docs/detection.md lists those under METRICOPT. data.train=PATH, data.val=PATH
and data.test=PATH among them name your own parts, as in tools/finetune_detector.py. Each numbered item above is one
command. With METRICOPT.ENABLED False, training is Detectron2's own. Learning f takes METRICOPT.META.ROUNDS * TASKS
runs, each of which evaluates AP50 on METRICOPT.METRIC.SET METRIC.EVALS times, and keeps them in
OUTPUT_DIR/trajectories; --resume continues a killed run from there. A search evaluates AP50 METRICOPT.SEARCH.QUERIES
times. It writes what the guard kept, merged, to OUTPUT_DIR/model_merged.pth, and f and phi to OUTPUT_DIR/search.
Finetuning saves a checkpoint after each tenth of its steps, from which --resume continues. It logs AP50 at each
evaluated step, also to OUTPUT_DIR/metrics.json and TensorBoard, and writes its best model, with phi merged, to
OUTPUT_DIR/model_merged.pth, which any program that uses Detectron2 can load and which is evaluated on DATASETS.TEST.
Evaluation is by AP50; --eval-only writes it to OUTPUT_DIR/results.json.
"""

import argparse
import re
import sys
from importlib.util import find_spec
from itertools import dropwhile
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.spawn import ProcessRaisedException

from metricopt_ext.errors import ConfigError, MetricOptError
from metricopt_ext.plain import MESSAGE, plain
from metricopt_ext.runtime.distributed import left_in_order
from metricopt_ext.runtime.stopping import ending_when_stopped
from metricopt_ext.utils.extras import naming_extras
from metricopt_ext.utils.files import write_json

if find_spec("detectron2") is None and {"-h", "--help"} & {*sys.argv}:  # whose parser has the other options
    print(f"{__doc__}\nIt needs Detectron2, and with it has its options, too: --help lists them then.")
    sys.exit()

with naming_extras():
    from detectron2.checkpoint import DetectionCheckpointer
    from detectron2.config import CfgNode
    from detectron2.engine import default_argument_parser, default_setup, launch
    from detectron2.evaluation import verify_results
    from detectron2.utils import comm

    from metricopt_ext.detection.detectron2.config import metricopt_settings, read_config, show_config
    from metricopt_ext.detection.detectron2.datasets import check_sets
    from metricopt_ext.detection.detectron2.meta_train import meta_train
    from metricopt_ext.detection.detectron2.registered import register_entries, register_parts, write_example
    from metricopt_ext.detection.detectron2.search import search
    from metricopt_ext.detection.detectron2.trainer import MetricOptTrainer, check_amp
    from metricopt_ext.detection.detectron2.weights import load_weights

WRITTEN = re.compile(r"model_(final|best|merged|\d+)\.pth")  # by a finetuning run, in its OUTPUT_DIR


@left_in_order()  # which Detectron2's launcher does not
def run(arguments: argparse.Namespace) -> Any:
    """Run the command line's task in one process; returns the evaluation's results, if any."""
    cfg = read_config(arguments.config_file, arguments.opts)
    if arguments.num_gpus == 0:
        cfg.MODEL.DEVICE = "cpu"
    if arguments.eval_only:
        cfg.METRICOPT.FINETUNE.START_STD = 0.0  # phi is what the checkpoint holds, or 0
    for line in register_parts(cfg):
        if comm.is_main_process():
            print(plain(line))
    cfg.freeze()
    settings = metricopt_settings(cfg)
    check(cfg, arguments)
    write_example(settings.datasets)
    register_entries(settings.datasets.register, settings.datasets.root, settings.datasets.classes)
    tuning = not arguments.eval_only and (settings.enabled or arguments.search or arguments.meta_train is not None)
    evaluated = [settings.metric.set] if tuning and settings.metric.set else []
    check_sets(cfg, [] if arguments.eval_only else cfg.DATASETS.TRAIN, [*evaluated, *cfg.DATASETS.TEST])
    default_setup(cfg, arguments)
    if arguments.meta_train is not None:
        return meta_train(cfg, arguments.meta_train, arguments.resume)
    if arguments.search:
        return search(cfg, arguments.resume)
    if arguments.eval_only:
        return evaluate(cfg, arguments.resume)
    if settings.enabled:
        cfg = cfg.clone()
        cfg.defrost()
        cfg.SOLVER.CHECKPOINT_PERIOD = min(cfg.SOLVER.CHECKPOINT_PERIOD, max(1, settings.finetune.steps // 10))
    trainer = MetricOptTrainer(cfg)
    trainer.resume_or_load(resume=arguments.resume)
    return trainer.train()


def evaluate(cfg: CfgNode, resume: bool) -> Any:
    """Evaluate the detector of ``MODEL.WEIGHTS``, or of the last checkpoint, on ``DATASETS.TEST``.

    The results are written to ``OUTPUT_DIR/results.json`` by the sets' names, and checked against
    ``TEST.EXPECTED_RESULTS``.
    """
    model = MetricOptTrainer.build_model(cfg)
    checkpointer = DetectionCheckpointer(model, save_dir=cfg.OUTPUT_DIR)
    resume = resume and checkpointer.has_checkpoint()
    weights = checkpointer.get_checkpoint_file() if resume else cfg.MODEL.WEIGHTS
    if not weights:
        raise ConfigError("--eval-only needs MODEL.WEIGHTS, the detector to evaluate")
    load_weights(model, weights, tuned=metricopt_settings(cfg).enabled)
    results = MetricOptTrainer.test(cfg, model)
    if comm.is_main_process():
        by_set = {cfg.DATASETS.TEST[0]: results} if len(cfg.DATASETS.TEST) == 1 else results
        write_json(Path(cfg.OUTPUT_DIR) / "results.json", by_set)
        verify_results(cfg, results)
    return results


def check(cfg: CfgNode, arguments: argparse.Namespace) -> None:
    """Reject settings that can't work, before anything is read or written.

    Raises:
        ConfigError: A setting lacks another one, or can't take effect; the message says what would work.
    """
    weights, folder = cfg.MODEL.WEIGHTS, Path(cfg.OUTPUT_DIR)
    file = Path(weights.partition("?")[0])  # Detectron2 allows options after the name
    finetuning = cfg.METRICOPT.ENABLED and not arguments.eval_only and arguments.meta_train is None
    merging = finetuning or arguments.search
    resumed = arguments.resume and (folder / "last_checkpoint").exists()  # MODEL.WEIGHTS is then not read
    if not (arguments.eval_only or arguments.search):  # which compute in float32
        check_amp(cfg)
    if cfg.MODEL.DEVICE.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"MODEL.DEVICE is {cfg.MODEL.DEVICE}, but no GPU was found; --num-gpus 0 computes on the CPU")
    if weights and not resumed and "://" not in weights and not file.is_file():
        raise ConfigError(f"MODEL.WEIGHTS={weights}: there is no such file")
    if not weights and finetuning and not arguments.search:
        raise ConfigError("METRICOPT.ENABLED needs MODEL.WEIGHTS, the trained detector")
    if merging and file.resolve().parent == folder.resolve() and WRITTEN.fullmatch(file.name):
        raise ConfigError(
            f"OUTPUT_DIR={folder} holds MODEL.WEIGHTS={weights}, which would be overwritten; give another"
        )
    if arguments.eval_only and not cfg.DATASETS.TEST:
        raise ConfigError("--eval-only needs DATASETS.TEST, e.g. DATASETS.TEST \"('scenes_test',)\"")


def main() -> None:
    """Parse the command line and launch the processes; an error that a user can fix is printed on one line."""
    parser = default_argument_parser(epilog=__doc__)
    parser.add_argument(
        "--meta-train", type=Path, metavar="FILE", help="learn a value function into this .safetensors file"
    )
    parser.add_argument("--search", action="store_true", help="search for phi from the trained detector on")
    parser.add_argument(
        "--show-config",
        action="store_true",
        help="print all keys with their values and where each comes from, and stop",
    )
    arguments = parser.parse_args()
    if not arguments.config_file:
        parser.error("--config-file is needed, e.g. configs/detection/detectron2/scenes.yaml")
    if arguments.eval_only + arguments.search + (arguments.meta_train is not None) > 1:
        parser.error("--eval-only, --meta-train and --search are separate commands")
    with ending_when_stopped(keeps=Path("OUTPUT_DIR"), resume="--resume"):
        try:
            if arguments.show_config:
                print(show_config(arguments.config_file, arguments.opts), end="")
                return
            launch(
                run,
                arguments.num_gpus,
                num_machines=arguments.num_machines,
                machine_rank=arguments.machine_rank,
                dist_url=arguments.dist_url,
                args=(arguments,),
            )
        except (MetricOptError, FloatingPointError, OSError, ProcessRaisedException) as error:
            said = in_one_line(str(error))
            if said is None:
                raise
            sys.exit(f"error: {plain(said, MESSAGE)}")


def in_one_line(message: str) -> str | None:
    """Return an error's message on one line; for another process's traceback, the message of its final error.

    None if it is not an error that a user can fix.
    """
    _, child, trace = message.rpartition("Traceback (most recent call last):\n")
    if child:
        raised = dropwhile(lambda line: line[:1].isspace(), trace.splitlines())
        kind, _, message = "\n".join(raised).partition(": ")  # an error may have no message
        if not kind.startswith(("metricopt_ext.errors.", "FloatingPointError", "OSError", "FileNotFoundError")):
            return None
    return " ".join(message.split())


if __name__ == "__main__":
    main()
