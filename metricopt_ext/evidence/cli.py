"""What the command-line tools of all tasks do alike: read the command line, run the seeds, report."""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from metricopt_ext.errors import MetricOptError
from metricopt_ext.evidence.experiment import Config, Experiment, run_seed
from metricopt_ext.evidence.plots import plot_finetuning, plot_methods, plot_value_function
from metricopt_ext.evidence.report import Report, write_events
from metricopt_ext.methods.run_folder import open_run
from metricopt_ext.utils.config import load_config
from metricopt_ext.utils.parallel import run_seeds


def main_of(
    description: str | None,
    config_type: type[Config],
    run: Callable[[Config, Path, bool], object],
    overrides: str,
    choices: Mapping[str, Sequence[str]] | None = None,
) -> None:
    """Read the command line and run; an error that a user can mend ends in one line.

    Args:
        description: What ``--help`` says.
        config_type: The settings of the config file.
        run: ``run(config, output_dir, resume)``.
        overrides: Examples of overrides, for ``--help``.
        choices: Settings that have an option of their own, with their values.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config-file", required=True, help=f"YAML file; its keys are those of {config_type.__name__}")
    parser.add_argument("--output-dir", required=True, type=Path, help="folder for everything that is written")
    parser.add_argument("--resume", action="store_true", help="go on with an interrupted run in the output folder")
    parser.add_argument("--seed", type=int, help="first seed, in place of the config's")
    for name, values in (choices or {}).items():
        parser.add_argument(f"--{name}", choices=values, help="in place of the config's")
    parser.add_argument("overrides", nargs="*", help=f"key=value, e.g. {overrides}")
    arguments = parser.parse_intermixed_args()  # overrides may stand before, between and after the options
    try:
        config = load_config(config_type, arguments.config_file, arguments.overrides)
        for name in ("seed", *(choices or {})):
            if getattr(arguments, name) is not None:
                setattr(config, name, getattr(arguments, name))
        run(config, arguments.output_dir, arguments.resume)
    except (MetricOptError, FloatingPointError, OSError) as error:
        sys.exit(f"error: {' '.join(str(error).split())}")


def run_and_report(
    config: Config,
    folder: Path,
    resume: bool,
    experiment: type[Experiment[Any]],
    *,
    task: str,
    title: str,
    metric: str,
    maximize: bool,
    plot_more: Callable[[Sequence[int]], list[Path]] = lambda seeds: [],
) -> Report:
    """Run every seed, write report, plots and events, and print what came out.

    Args:
        config: The settings.
        folder: Receives everything that is written.
        resume: Go on with an interrupted run in the folder.
        experiment: What a seed runs.
        task: What was finetuned, e.g. ``"classification/a9a"``.
        title: The same in words, for the first line.
        metric: The metric's name.
        maximize: Whether higher is better.
        plot_more: Draws the task's own pictures of the seeds, and returns their paths.
    """
    open_run(folder, config.as_dict(), resume)
    print(f"{title}: {metric}, {config.seeds} seeds of {config.queries} queries")
    seeds = range(config.seed, config.seed + config.seeds)
    run = partial(run_seed, experiment, config, folder, resume)
    records = run_seeds(run, seeds, queries=config.queries, workers=config.workers, threads=config.threads)
    report = Report(task, metric, maximize, records, config.as_dict())
    written = [
        *report.write(folder),
        plot_methods(report, folder / "methods.png"),
        plot_finetuning(report, folder / "finetuning.png"),
        plot_value_function(report, folder / "value_function.png"),
        *plot_more(seeds),
    ]
    write_events(report, folder / "events")
    report.print()
    print("wrote", *written, f"and {folder}/seed-*/", sep="\n  ")
    return report
