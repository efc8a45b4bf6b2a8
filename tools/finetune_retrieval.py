"""Finetune an embedding for Recall@k on classes it has not seen, and say what that was worth.

    python tools/finetune_retrieval.py --config-file configs/retrieval/digits.yaml --output-dir out/digits_retrieval
    python tools/finetune_retrieval.py --config-file configs/retrieval/omniglot.yaml --output-dir out/omniglot \
        data.root=FOLDER

Writes report.json, report.md and plots, and for each seed model, adapter, value function and trajectories.
"""

import argparse
import sys
from functools import partial
from pathlib import Path

from metricopt_ext.config import load_config
from metricopt_ext.errors import MetricOptError
from metricopt_ext.evidence import open_run
from metricopt_ext.plots import plot_finetuning, plot_methods, plot_value_function
from metricopt_ext.report import Report, write_events
from metricopt_ext.retrieval.build import build_loss, check_ks, metric_name
from metricopt_ext.retrieval.config import RetrievalConfig
from metricopt_ext.retrieval.experiment import run_seed
from metricopt_ext.retrieval.pictures import plot_recalls
from metricopt_ext.seeds import run_seeds


def main() -> None:
    """Parse the command line, run all seeds, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config-file", required=True, help="YAML file; its keys are those of RetrievalConfig")
    parser.add_argument("--output-dir", required=True, type=Path, help="folder for everything that is written")
    parser.add_argument("--resume", action="store_true", help="go on with an interrupted run in the output folder")
    parser.add_argument("--seed", type=int, help="first seed, in place of the config's")
    parser.add_argument("overrides", nargs="*", help="key=value, e.g. loss.name=triplet_margin data.root=FOLDER")
    arguments = parser.parse_intermixed_args()  # overrides may stand before, between and after the options
    try:
        config = load_config(RetrievalConfig, arguments.config_file, arguments.overrides)
        if arguments.seed is not None:
            config.seed = arguments.seed
        run(config, arguments.output_dir, arguments.resume)
    except (MetricOptError, FloatingPointError, OSError) as error:
        sys.exit(f"error: {' '.join(str(error).split())}")


def run(config: RetrievalConfig, folder: Path, resume: bool) -> Report:
    """Run every seed and write the report; returns it."""
    config.check()
    check_ks(config.metric)
    build_loss(config.loss)
    metric = metric_name(config.metric)
    open_run(folder, config.as_dict(), resume)
    data = config.data.name if config.shift.kind == "none" else f"shifted {config.data.name}"
    print(f"{config.model.name} on {data}: {metric}, {config.seeds} seeds of {config.queries} queries")
    seeds = range(config.seed, config.seed + config.seeds)
    records = run_seeds(
        partial(run_seed, config, folder, resume),
        seeds,
        queries=config.queries,
        workers=config.workers,
        threads=config.threads,
    )
    report = Report(
        task=f"retrieval/{config.data.name}",
        metric=metric,
        maximize=True,
        records=records,
        config=config.as_dict(),
    )
    written = [
        *report.write(folder),
        plot_methods(report, folder / "methods.png"),
        plot_finetuning(report, folder / "finetuning.png"),
        plot_value_function(report, folder / "value_function.png"),
        plot_recalls([folder / f"seed-{seed}" / "recalls.json" for seed in seeds], folder / "recalls.png"),
    ]
    write_events(report, folder / "events")
    report.print()
    print("wrote", *written, f"and {folder}/seed-*/", sep="\n  ")
    return report


if __name__ == "__main__":
    main()
