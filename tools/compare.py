"""Find the best method for one model, one metric and a number of queries: methods x budgets x seeds on the same splits.

    python tools/compare.py --config-file configs/compare/digits_shifted.yaml --output-dir out/digits_shifted
    python tools/compare.py --config-file configs/compare/digits_shifted.yaml --output-dir out/plain shift.kind=none
    python tools/compare.py --config-file configs/compare/digits_shifted.yaml --output-dir out/part --seeds 700-704
    python tools/compare.py --join out/part other/part --output-dir out/all

An override sets one of the comparison's own keys (task, config, overrides, methods, budgets, most, starts, seeds, seed,
workers, threads, device), or else a key of the task's config. Queries are calls of the metric. Beside them stands what
a method costs the model, as passes over the metric's data + batches of the loss. Writes comparison.json, comparison.md,
comparison.png and report.html (the same in one file, to hand on) for all seeds in the folder. Rows on file are not
computed again: an interrupted comparison continues where it stopped, and seeds can be run in parts, one after another.
--join reports on runs of the same comparison on different seeds, e.g. from other machines, as one.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

from metricopt_ext.comparison.comparison import Plan, run_seed
from metricopt_ext.comparison.comparison_content import gather, load, paired
from metricopt_ext.comparison.comparison_page import comparison_page
from metricopt_ext.comparison.comparison_report import print_report, write
from metricopt_ext.comparison.joined import joined
from metricopt_ext.errors import ConfigError
from metricopt_ext.experiment.cli import RUNS_CODE, TASKS, experiment_of
from metricopt_ext.experiment.command import LIMIT_BROKEN, add_show_config, errors_in_one_line
from metricopt_ext.experiment.config_sections import check_at_least
from metricopt_ext.experiment.output_folder import open_run, refuse_among_data
from metricopt_ext.experiment.report_page import FILE as PAGE
from metricopt_ext.experiment.style import print_written
from metricopt_ext.plain import plain
from metricopt_ext.runtime import distributed
from metricopt_ext.runtime.identity import sole_writer
from metricopt_ext.runtime.parallel import run_seeds
from metricopt_ext.utils.checks import MOST_THREADS
from metricopt_ext.utils.config import COMMAND_LINE, load_with_origins
from metricopt_ext.utils.extras import require
from metricopt_ext.utils.files import content_of
from metricopt_ext.utils.packaged import PACKAGE, existing_config
from metricopt_ext.utils.shown_config import shown_config
from metricopt_ext.utils.words import counted

METHODS = [
    "random_search",
    "guided_es",
    "cma_es",
    "ngopt",
    "loss_finetune_best",
    "loss_finetune_validation",
    "metricopt",
]

OF_THE_COMPARISON = ("seed", "seeds", "workers", "threads", "device")  # what it sets in the task's config


@dataclass
class CompareConfig:
    """A whole run of `tools/compare.py`."""

    task: str = "classification"  # classification, detection or retrieval: whose config the next key names
    config: str = ""  # that task's YAML, relative to this file's folder or the nearest one above, or the package's
    overrides: list[str] = field(default_factory=list)  # key=value, of the task's config
    methods: list[str] = field(default_factory=METHODS.copy)
    budgets: list[int] = field(default_factory=lambda: [20, 60, 150, 300, 600])  # metric queries, ascending
    most: dict[str, int] = field(default_factory=dict)  # largest budget of a method that takes too long for larger ones
    # Starts to choose from: the task's, or any that its tool's starts or the methods that end at one name; empty: the
    # task's
    starts: list[str] = field(default_factory=list)
    seeds: int = 20  # number of seeds
    seed: int = 700  # the first of them
    workers: int = 1  # seeds that run in parallel, each in its own process
    threads: int = 1  # CPU threads of each
    device: str = "auto"  # auto, cpu, cuda, cuda:0, ...

    def check(self) -> None:
        """Reject what would only fail after work has been done.

        Raises:
            ConfigError: A value is out of range.
        """
        if self.task not in TASKS:
            raise ConfigError(f"task={self.task}: it must be one of {', '.join(TASKS)}")
        check_at_least(1, {"seeds": self.seeds})
        check_at_least(1, {"workers": self.workers, "threads": self.threads}, MOST_THREADS)
        check_at_least(0, {"seed": self.seed})

    @property
    def plan(self) -> Plan:
        """What is run."""
        return Plan(tuple(self.methods), tuple(self.budgets), tuple(self.starts), dict(self.most))


def main() -> None:
    """Parse the command line, run all seeds or join those of several comparisons, report."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=RUNS_CODE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config-file", type=Path, help="YAML file; its keys are those of CompareConfig")
    parser.add_argument("--output-dir", type=Path, help="folder for all output files")
    parser.add_argument("--seeds", help="first and last seed, e.g. 700-709, overriding the config")
    parser.add_argument("--join", type=Path, nargs="+", metavar="FOLDER", help="join these comparisons' seeds instead")
    add_show_config(parser)
    parser.add_argument("overrides", nargs="*", help="key=value, e.g. budgets=[20,60] data.root=FOLDER")
    arguments = parser.parse_intermixed_args()
    with errors_in_one_line(ValueError, keeps=arguments.output_dir), distributed.joined():
        if arguments.join:
            if arguments.config_file or arguments.overrides or arguments.seeds:
                parser.error("--join takes folders, and --output-dir, alone")
            if not arguments.output_dir:
                parser.error("--join needs --output-dir")
            report(join(arguments.join), arguments.output_dir)
            return
        if not arguments.config_file or not (arguments.output_dir or arguments.show_config):
            parser.error("--config-file and --output-dir are required")
        overrides = [*arguments.overrides, *(seed_range(arguments.seeds) if arguments.seeds else [])]
        if arguments.show_config:
            show(arguments.config_file, overrides)
            return
        content = compare(*read_configs(arguments.config_file, overrides), arguments.output_dir)
    if any(each.get("broken") for each in content.get("guards", [])):
        sys.exit(LIMIT_BROKEN)


def read_configs(file: Path, overrides: Sequence[str] = ()) -> tuple[CompareConfig, Any]:
    """Return the comparison's config and, as yet without its seeds and device, the task's.

    Args:
        file: The comparison's YAML.
        overrides: ``key=value``; a key of `CompareConfig` sets it, any other is the task's.

    Raises:
        ConfigError: A file is missing, a key unknown or a value impossible.
    """
    (config, _), (subject, _) = _read(file, overrides)
    return config, subject


def show(file: Path, overrides: Sequence[str] = ()) -> None:
    """Print the comparison's config and the task's, two YAML documents (see `shown_config`).

    Raises:
        ConfigError: As from `read_configs`.
    """
    (config, own), (subject, theirs) = _read(file, overrides)
    for name in OF_THE_COMPARISON:
        setattr(subject, name, getattr(config, name))
    theirs |= dict.fromkeys(OF_THE_COMPARISON, "the comparison's")
    print(f"{shown_config(config, own)}---  # {plain(config.config)}\n{shown_config(subject, theirs)}", end="")


def _read(file: Path, overrides: Sequence[str]) -> tuple[tuple[CompareConfig, dict[str, str]], tuple[Any, Any]]:
    """Return the comparison's config and the task's, each with where its values come from."""
    own = {each.name for each in fields(CompareConfig)}
    ours = [each for each in overrides if each.partition("=")[0] in own]
    file = existing_config(file)
    config, origins = load_with_origins(CompareConfig, file, {COMMAND_LINE: ours})
    config.check()
    candidates = [folder / config.config for folder in [*file.resolve().parents, PACKAGE]]
    path = next((each for each in candidates if config.config and each.is_file()), None)
    if path is None:
        raise ConfigError(
            f"config={config.config}: there is no such file in {file.resolve().parent}, above, or in the package"
        )
    theirs = {"overrides": config.overrides, COMMAND_LINE: [each for each in overrides if each not in ours]}
    for each in config.overrides:
        if each.partition("=")[0] in own:
            raise ConfigError(f"overrides: {each} is a key of the comparison itself; write it there")
    subject, origins_of_task = load_with_origins(experiment_of(config.task).config_type, path, theirs)
    subject.methods = []  # what its tool runs by default; here the rows are the comparison's own
    return (config, origins), (subject, origins_of_task)


def seed_range(text: str) -> list[str]:
    """Return the first seed and the number of seeds of ``"first-last"``, as overrides.

    Raises:
        ConfigError: It is something else, or empty.
    """
    found = re.fullmatch(r"(\d+)-(\d+)", text)
    if not found or int(found[2]) < int(found[1]):
        raise ConfigError(f"--seeds {text}: it must be FIRST-LAST, e.g. 700-709")
    return [f"seed={int(found[1])}", f"seeds={int(found[2]) - int(found[1]) + 1}"]


def compare(config: CompareConfig, subject: Any, folder: Path) -> dict[str, Any]:
    """Run every seed and write the report on all seeds of the folder; returns its content.

    Processes of torchrun take the seeds in turn; the first one reports.

    Args:
        config: The comparison's settings.
        subject: The task's.
        folder: Receives all output files.
    """
    config.check()
    require("matplotlib", "jinja2")  # which are used once all seeds have run
    for name in OF_THE_COMPARISON:
        setattr(subject, name, getattr(config, name))
    subject.check()
    if subject.metric.also:
        raise ConfigError(
            "metric.also is for the tools that finetune: a comparison shows the metric alone; leave it out"
        )
    experiment, plan = experiment_of(config.task), config.plan
    about = experiment.describe(subject)
    baselines = experiment.baselines(subject)
    plan.check(baselines)
    if subject.metric.subject_to and (heedless := [name for name in plan.methods if not baselines[name].constrained]):
        raise ConfigError(
            f"metric.subject_to: {', '.join(heedless)} can't respect constraints; leave them out of methods"
        )
    refuse_among_data(folder, subject.data_files())
    settings = {**subject.as_dict(), "task": config.task, "budgets": config.budgets, "starts": config.starts}
    with distributed.sharing(settings), ExitStack() as held:
        distributed.only_first(partial(held.enter_context, sole_writer(folder)))
        distributed.only_first(lambda: open_run(folder, settings, resume=True, files=subject.data_files()))
        if distributed.rank() == 0:
            methods = counted(len(plan.methods), "method")
            print(plain(f"{about.title}: {about.metric}, {methods} from seed {config.seed} on"))
        largest = max(plan.budgets)
        total = sum(largest if baselines[name].anytime else sum(plan.budgets) for name in plan.methods)
        run_seeds(
            partial(run_seed, experiment, subject, plan, folder),
            range(config.seed, config.seed + config.seeds),
            queries=total,
            workers=config.workers,
            threads=config.threads,
            metric=about.metric,
        )
        described = {**asdict(config), "of_task": subject.as_dict()}
        return distributed.only_first(lambda: report(gather(folder, plan, about, described), folder)) or {}


def join(folders: Sequence[Path]) -> dict[str, Any]:
    """Return what one comparison of the seeds of several would hold."""
    names = list(map(str, folders))
    contents = [load(folder) for folder in folders]
    with content_of(", ".join(names), "comparisons"):
        return paired(joined(contents, names))


def report(content: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Write and print a comparison's report; returns its content."""
    paths = write(content, folder)
    paths.append(comparison_page(content, folder).write(folder / PAGE))
    print_report(content)
    print_written(*paths)
    return content


if __name__ == "__main__":
    main()
