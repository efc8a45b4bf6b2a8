r"""Finetune an embedding for Recall@k, or another metric, on classes it has not seen, and report what it gained.

    python tools/finetune_retrieval.py --config-file configs/retrieval/digits.yaml --output-dir out/digits_retrieval
    python tools/finetune_retrieval.py --config-file configs/retrieval/omniglot.yaml --output-dir out/omniglot \
        data.root=FOLDER

A guided search finds phi, from a whitening unless it loses. method.name=recipe instead learns a value function from
many finetuning runs; method.name=paper runs Algorithm 1 as printed. methods=[ala_mixture,ala_focal] also runs sibling
methods (docs/siblings.md). queries=N limits how often MetricOpt evaluates the metric. Writes report.html (all in one
file, to hand on), report.json, report.md and plots, and each seed's model before (model.safetensors) and after
finetuning (tuned.safetensors, an ordinary state dict, phi merged), the classes of each part, adapter, value function
and what --resume needs. tools/evaluate_recall.py --run-dir evaluates these models.
"""

from functools import partial

from metricopt_ext.experiment.cli import main_of, run_and_report
from metricopt_ext.utils.extras import naming_extras

with naming_extras():
    from metricopt_ext.retrieval.experiment import RetrievalExperiment

main = partial(main_of, __doc__, RetrievalExperiment, "loss.name=triplet_margin data.root=FOLDER")
run = partial(run_and_report, RetrievalExperiment)

if __name__ == "__main__":
    main()
