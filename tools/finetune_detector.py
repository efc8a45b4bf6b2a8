r"""Finetune a detector for AP50, and report what it gained.

    python tools/finetune_detector.py --config-file configs/detection/scenes_torchvision.yaml --output-dir out/scenes
    python tools/finetune_detector.py --toolkit detectron2 --config-file configs/detection/bccd_detectron2.yaml \
        --output-dir out/bccd data.root=FOLDER

A guided search finds phi, from a free start that surely gains. method.name=recipe instead learns a value function from
many finetuning runs; method.name=paper runs Algorithm 1 as printed. queries=N limits how often MetricOpt evaluates
AP50. Writes report.html (all in one file, to hand on), report.json, report.md and plots, and each seed's detector after
finetuning (tuned.pth, phi merged), adapter, value function and what --resume needs. docs/detection.md explains more.
"""

from functools import partial

from metricopt_ext.experiment.cli import main_of, run_and_report
from metricopt_ext.utils.extras import naming_extras

with naming_extras():
    from metricopt_ext.detection.build import TOOLKITS
    from metricopt_ext.detection.experiment import DetectionExperiment

main = partial(main_of, __doc__, DetectionExperiment, "model.steps=500 data.root=FOLDER", choices={"toolkit": TOOLKITS})
run = partial(run_and_report, DetectionExperiment)

if __name__ == "__main__":
    main()
