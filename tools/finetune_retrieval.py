"""Finetune an embedding for Recall@k on classes it has not seen, and report what it gained.

    python tools/finetune_retrieval.py --config-file configs/retrieval/digits.yaml --output-dir out/digits_retrieval
    python tools/finetune_retrieval.py --config-file configs/retrieval/omniglot.yaml --output-dir out/omniglot \
        data.root=FOLDER

Writes report.json, report.md and plots, and each seed's model, adapter, value function and trajectories.
"""

from functools import partial

from metricopt_ext.evidence.cli import main_of, run_and_report
from metricopt_ext.retrieval.experiment import RetrievalExperiment

main = partial(main_of, __doc__, RetrievalExperiment, "loss.name=triplet_margin data.root=FOLDER")
run = partial(run_and_report, RetrievalExperiment)

if __name__ == "__main__":
    main()
