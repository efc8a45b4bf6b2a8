"""What the command-line tools of all tasks share: read the command line, run the seeds, report."""

import argparse
import pkgutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from metricopt_ext.experiment.command import (
    LIMIT_BROKEN,
    add_show_config,
    errors_in_one_line,
    show_config,
    shows_config,
)
from metricopt_ext.experiment.dry_run import dry_run
from metricopt_ext.experiment.events import write_events
from metricopt_ext.experiment.experiment import Experiment, run_seed
from metricopt_ext.experiment.output_folder import open_run, refuse_among_data
from metricopt_ext.experiment.plots import (
    plot_finetuning,
    plot_methods,
    plot_outcomes,
    plot_search,
    plot_value_function,
)
from metricopt_ext.experiment.record import check_alike
from metricopt_ext.experiment.report import Report
from metricopt_ext.experiment.report_page import FILE, report_page
from metricopt_ext.experiment.report_text import print_report, write
from metricopt_ext.experiment.run_config import VARIANTS, RunConfig
from metricopt_ext.experiment.style import direction, print_written
from metricopt_ext.plain import plain
from metricopt_ext.runtime import distributed
from metricopt_ext.runtime.identity import sole_writer
from metricopt_ext.runtime.parallel import run_seeds
from metricopt_ext.runtime.run_log import run_log
from metricopt_ext.utils.config import load_config
from metricopt_ext.utils.extras import require
from metricopt_ext.utils.words import counted

LOG = "log.txt"
TASKS = ("classification", "detection", "retrieval")

RUNS_CODE = (  # for --help of the tools that take such configs
    "Warning: a config can name a metric as MODULE:FUNCTION, which is imported and run. Read configs of others first."
)


def experiment_of(task: str) -> type[Experiment[Any]]:
    """Return the experiment of one of `TASKS`; only its own toolkit is imported."""
    found: type[Experiment[Any]] = pkgutil.resolve_name(f"metricopt_ext.{task}.experiment:{task.title()}Experiment")
    return found


def main_of(
    description: str | None,
    experiment: type[Experiment[Any]],
    examples: str,
    choices: Mapping[str, Sequence[str]] | None = None,
) -> None:
    """Read the command line and run.

    Args:
        description: What ``--help`` says.
        experiment: What each seed runs.
        examples: Examples of overrides, for ``--help``.
        choices: Settings that have their own option, with their values.
    """
    schema = experiment.config_type
    parser = argparse.ArgumentParser(
        description=description,
        epilog=RUNS_CODE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config-file", required=True, help=f"YAML file; its keys are those of {schema.__name__}")
    parser.add_argument("--output-dir", required=not shows_config(), type=Path, help="folder for all output files")
    add_show_config(parser)
    parser.add_argument("--resume", action="store_true", help="continue an interrupted run in the output folder")
    parser.add_argument(
        "--dry-run", action="store_true", help="print what a run would do and how long it would take, and stop"
    )
    parser.add_argument("--seed", type=int, help="first seed, overriding the config")
    for name, values in (choices or {}).items():
        parser.add_argument(f"--{name}", choices=values, help="overrides the config")
    parser.add_argument("overrides", nargs="*", help=f"key=value, e.g. {examples}")
    arguments = parser.parse_intermixed_args()  # overrides may come before, between or after the options
    options = [(name, getattr(arguments, name)) for name in ("seed", *(choices or {}))]
    overrides = [*arguments.overrides, *(f"{name}={value}" for name, value in options if value is not None)]
    with errors_in_one_line(keeps=arguments.output_dir, resume="--resume"), distributed.joined():
        if arguments.show_config:
            show_config(schema, arguments.config_file, overrides)
            return
        config = load_config(schema, arguments.config_file, overrides)
        if arguments.dry_run:
            dry_run(experiment, config)
            return
        report = run_and_report(experiment, config, arguments.output_dir, arguments.resume or distributed.restarted())
    if any(record.broken for record in report.records):
        sys.exit(LIMIT_BROKEN)


def run_and_report(experiment: type[Experiment[Any]], config: RunConfig, folder: Path, resume: bool) -> Report:
    """Run every seed, write report, plots and events, and print the outcome.

    Processes of torchrun take the seeds, or share each of them if there are fewer.

    Args:
        experiment: What each seed runs.
        config: The settings.
        folder: Receives all output files.
        resume: Continue an interrupted run in the folder.
    """
    config.check()
    require("tensorboard", "matplotlib", "jinja2")  # which are used once a model is trained
    subject = experiment.describe(config)  # refuses settings before the folder is taken
    refuse_among_data(folder, config.data_files())
    with distributed.sharing(config.as_dict()), ExitStack() as held:
        distributed.only_first(partial(held.enter_context, sole_writer(folder)))
        grows = config.build_strategy().anytime and not set(config.methods) & set(VARIANTS)
        distributed.only_first(lambda: open_run(folder, config.as_dict(), resume, config.data_files(), grows=grows))
        log = distributed.only_first(lambda: held.enter_context(run_log(folder / LOG)))
        title = (
            f"{subject.title}: {subject.metric} ({direction(subject.maximize)}),"
            f" {counted(config.seeds, 'seed')} of {counted(config.queries, 'query')}"
        )
        if log is not None:
            log(f"{title}{', resumed' if resume else ''}")
            print(plain(title))
            if subject.explained:
                print(plain(f"{subject.metric}: {subject.explained}"))
        seeds = range(config.seed, config.seed + config.seeds)
        run = partial(run_seed, experiment, config, folder, resume)
        records = run_seeds(
            run,
            seeds,
            queries=config.queries,
            workers=config.workers,
            threads=config.threads,
            shared=True,
            metric=subject.metric,
            log=log,
        )
        check_alike(records)
        report = Report(subject.task, subject.metric, subject.maximize, records, config.as_dict(), subject.explained)
        distributed.only_first(lambda: _show(experiment, report, folder, seeds))
        if log is not None:
            log("finished")
        return report


def _show(experiment: type[Experiment[Any]], report: Report, folder: Path, seeds: Sequence[int]) -> None:
    files = write(report, folder)
    print_report(report)
    print("\npictures ...", flush=True)
    pictures = [
        plot_methods(report, folder / "methods.png"),
        *([plot_search(report, folder / "search.png")] if report.searched else []),
        *([plot_finetuning(report, folder / "finetuning.png")] if any(each.curves for each in report.records) else []),
        *([plot_value_function(report, folder / "value_function.png")] if report.predicts else []),
        *([plot_outcomes(report, folder / "outcomes.png")] if report.outcomes() else []),
        *experiment.plot_seeds(folder, seeds),
    ]
    page = report_page(report, folder, pictures, experiment.tuned_file).write(folder / FILE)
    write_events(report, folder / "events")
    print_written(*files, page, *pictures, f"and {folder}/seed-*/")
