r"""Finetune a classifier for the metric it is judged by, and report what it gained.

    python tools/finetune_classifier.py --config-file configs/classification/digits.yaml --output-dir out/digits
    python tools/finetune_classifier.py --config-file configs/classification/a9a.yaml --output-dir out/a9a \
        metric.name=f1 data.root=FOLDER
    python tools/finetune_classifier.py --config-file configs/classification/a9a.yaml --output-dir out/own \
        data.name=csv data.root=FILE data.target=COLUMN data.standardise=true queries=600 \
        metric.name=sklearn.metrics:f1_score metric.kwargs.average=macro

A guided search finds phi, from a free start that surely gains. method.name=recipe instead learns a value function from
many finetuning runs; method.name=paper runs Algorithm 1 as printed. methods=[sl_r] also runs sibling methods
(docs/siblings.md). queries=N limits how often MetricOpt evaluates the metric. Writes report.html (all in one file, to
hand on), report.json, report.md and plots, and each seed's model before (model.safetensors) and after finetuning
(tuned.safetensors, an ordinary state dict, phi merged), adapter, value function and what --resume needs.
docs/classification.md explains the keys.
"""

from functools import partial

from metricopt_ext.classification.experiment import ClassificationExperiment
from metricopt_ext.experiment.cli import main_of, run_and_report

main = partial(main_of, __doc__, ClassificationExperiment, "metric.name=f1 data.root=FOLDER")
run = partial(run_and_report, ClassificationExperiment)

if __name__ == "__main__":
    main()
