"""Finetune an embedding for Recall@k on classes it has not seen, and say what that was worth.

    python tools/finetune_retrieval.py --config-file configs/retrieval/digits.yaml --output-dir out/digits_retrieval
    python tools/finetune_retrieval.py --config-file configs/retrieval/omniglot.yaml --output-dir out/omniglot \
        data.root=FOLDER

Writes report.json, report.md and plots, and for each seed model, adapter, value function and trajectories.
"""

from pathlib import Path

from metricopt_ext.evidence.cli import main_of, run_and_report
from metricopt_ext.evidence.report import Report
from metricopt_ext.retrieval.build import build_loss, check_ks, metric_name
from metricopt_ext.retrieval.config import RetrievalConfig
from metricopt_ext.retrieval.experiment import RetrievalExperiment
from metricopt_ext.retrieval.pictures import plot_recalls


def main() -> None:
    """Parse the command line, run all seeds, report."""
    main_of(__doc__, RetrievalConfig, run, "loss.name=triplet_margin data.root=FOLDER")


def run(config: RetrievalConfig, folder: Path, resume: bool) -> Report:
    """Run every seed and write the report; returns it."""
    config.check()
    check_ks(config.metric)
    build_loss(config.loss)
    data = config.data.name if config.shift.kind == "none" else f"shifted {config.data.name}"
    return run_and_report(
        config,
        folder,
        resume,
        RetrievalExperiment,
        task=f"retrieval/{config.data.name}",
        title=f"{config.model.name} on {data}",
        metric=metric_name(config.metric),
        maximize=True,
        plot_more=lambda seeds: [
            plot_recalls([folder / f"seed-{seed}" / "recalls.json" for seed in seeds], folder / "recalls.png")
        ],
    )


if __name__ == "__main__":
    main()
