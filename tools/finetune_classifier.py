"""Finetune a classifier for the metric it is judged by, and say what that was worth.

    python tools/finetune_classifier.py --config-file configs/classification/digits.yaml --output-dir out/digits
    python tools/finetune_classifier.py --config-file configs/classification/a9a.yaml --output-dir out/a9a \
        metric.name=f1 data.root=FOLDER

Writes report.json, report.md and plots, and for each seed model, adapter, value function and trajectories.
"""

from pathlib import Path

from metricopt_ext.classification.build import build_metric
from metricopt_ext.classification.config import ClassificationConfig
from metricopt_ext.classification.experiment import ClassificationExperiment
from metricopt_ext.evidence.cli import main_of, run_and_report
from metricopt_ext.evidence.report import Report


def main() -> None:
    """Parse the command line, run all seeds, report."""
    main_of(__doc__, ClassificationConfig, run, "metric.name=f1 data.root=FOLDER")


def run(config: ClassificationConfig, folder: Path, resume: bool) -> Report:
    """Run every seed and write the report; returns it."""
    config.check()
    metric = build_metric(config.metric)
    data = config.data.name if config.shift.kind == "none" else f"shifted {config.data.name}"
    return run_and_report(
        config,
        folder,
        resume,
        ClassificationExperiment,
        task=f"classification/{config.data.name}",
        title=f"{config.model.name} on {data}",
        metric=metric.name,
        maximize=metric.maximize,
    )


if __name__ == "__main__":
    main()
