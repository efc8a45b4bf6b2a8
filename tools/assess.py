r"""Say with a few queries whether a search for a metric is worth more of them, or what else would do.

    metricopt assess configs/classification/digits_longtail.yaml metric.name=worst_recall
    python tools/assess.py configs/classification/a9a.yaml metric.name=f1 data.root=FOLDER
    python tools/assess.py configs/compare/digits_shifted.yaml --queries 20 seed=3

CONFIG is a config of `finetune_classifier`, `finetune_retrieval` or `finetune_detector`, or of `compare`, which names
its task's. The first seed's model is trained or loaded. The queries are those that a search would ask first: the free
starts and its design. --output-dir keeps them: the tool itself continues from there with the same config, the same
folder and --resume, with any number of queries. docs/assess.md explains the output.
"""

import argparse
import pkgutil
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from metricopt_ext.errors import ConfigError
from metricopt_ext.experiment.cli import RUNS_CODE, TASKS, experiment_of
from metricopt_ext.experiment.command import errors_in_one_line
from metricopt_ext.experiment.experiment import Experiment
from metricopt_ext.experiment.output_folder import GROWS, open_run, refuse_among_data
from metricopt_ext.experiment.run_config import RunConfig
from metricopt_ext.experiment.style import direction, print_points
from metricopt_ext.methods.assessment import QUERIES, Assessment
from metricopt_ext.methods.optimize import assess
from metricopt_ext.plain import plain
from metricopt_ext.runtime import distributed
from metricopt_ext.runtime.identity import sole_writer
from metricopt_ext.runtime.progress import progress_of
from metricopt_ext.search.trust_region import GuidedTrustRegion
from metricopt_ext.tasks.settings import QUERIES as OF_SETTINGS
from metricopt_ext.utils.config import load_config
from metricopt_ext.utils.packaged import existing_config
from metricopt_ext.utils.words import brief


def main() -> None:
    """Parse the command line, ask, and print what the answers say."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=RUNS_CODE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", type=Path, metavar="CONFIG", help="YAML file of a tool, or of a comparison")
    parser.add_argument(
        "--queries", type=int, help=f"how many to ask; default {QUERIES}, {OF_SETTINGS} more with settings"
    )
    parser.add_argument("--output-dir", type=Path, help="folder in which the tool itself can go on with --resume")
    parser.add_argument("--resume", action="store_true", help="go on in the output folder")
    parser.add_argument("overrides", nargs="*", help="key=value, e.g. metric.name=f1 data.root=FOLDER")
    arguments = parser.parse_intermixed_args()
    with errors_in_one_line(ValueError, keeps=arguments.output_dir, resume="--resume"), distributed.joined():
        experiment, config = read(arguments.config, arguments.overrides)
        subject = experiment.describe(config)
        found = assess_seed(experiment, config, arguments.queries, arguments.output_dir, arguments.resume)
        if distributed.rank() == 0:
            print(plain(f"{subject.title}: {subject.metric} ({direction(subject.maximize)}), seed {config.seed}"))
            print_points(found.lines())


def read(file: Path, overrides: Sequence[str] = ()) -> tuple[type[Experiment[Any]], RunConfig]:
    """Return the experiment that a config is of, and the config.

    Args:
        file: The YAML of a task's tool, or of a comparison.
        overrides: ``key=value``.

    Raises:
        ConfigError: There is no such file, or it is none of these, or a key is unknown or a value impossible.
    """
    existing_config(file)
    task, refused = _task_of(file)
    if task:
        experiment = experiment_of(task)
        return experiment, load_config(experiment.config_type, file, overrides)
    from metricopt_ext.tools.compare import OF_THE_COMPARISON, read_configs

    try:
        read_configs(file)
    except ConfigError as error:
        raise ConfigError(f"{file} is no config of a tool: {refused}; nor of a comparison: {brief(error)}") from error
    comparison, config = read_configs(file, overrides)
    for name in OF_THE_COMPARISON:
        setattr(config, name, getattr(comparison, name))
    return experiment_of(comparison.task), config


def _task_of(file: Path) -> tuple[str, str]:
    """Return the task whose config a file is, empty if of none, and why it is not of the others.

    Raises:
        ConfigError: It fits several.
    """
    fitting, refused = [], []
    for task in [file.parent.name] if file.parent.name in TASKS else TASKS:
        schema: type[Any] = pkgutil.resolve_name(f"metricopt_ext.{task}.config:{task.title()}Config")
        try:
            load_config(schema, file)
            fitting.append(task)
        except ConfigError as error:
            refused.append(f"{task}: {brief(error)}")
    if len(fitting) > 1:
        raise ConfigError(f"{file} fits {' and '.join(fitting)}; put it into a folder of the one's name")
    return (fitting or [""])[0], "; ".join(refused)


def assess_seed(
    experiment: type[Experiment[Any]], config: RunConfig, queries: int | None, folder: Path | None, resume: bool
) -> Assessment:
    """Train or load the model of the first seed, and assess it.

    Args:
        experiment: What a seed runs.
        config: The settings.
        queries: How many to ask; None for `QUERIES` and those that settings of inference may ask for.
        folder: Keeps the model and the evaluations, for a run of the tool that goes on; None keeps nothing.
        resume: Go on with what is in the folder.

    Raises:
        MetricOptError: Data, settings or metric are not usable; the message says which.
    """
    config.check()
    if queries is None:
        queries = QUERIES + (0 if config.settings is None else OF_SETTINGS)
    strategy = config.build_strategy()
    if not isinstance(strategy, GuidedTrustRegion) and folder is not None:
        raise ConfigError(f"method.name={config.method.name} does not go on from these queries: leave --output-dir out")
    if folder is not None:
        refuse_among_data(folder, config.data_files())
    open_settings = {key: value for key, value in config.as_dict().items() if key != GROWS}
    seed = config.seed
    with distributed.sharing(open_settings), ExitStack() as held:
        run, kept = folder, folder if distributed.rank() == 0 else None
        if kept is not None:
            held.enter_context(sole_writer(kept))
            open_run(kept, open_settings, resume, config.data_files())
        own = (kept or Path(held.enter_context(TemporaryDirectory()))) / f"seed-{seed}"
        shown = held.enter_context(progress_of(None, experiment.describe(config).metric, queries))
        shown.stage("data and model")
        made = experiment(config, own, seed, shown)
        return assess(
            made.task,
            queries,
            strategy=strategy if isinstance(strategy, GuidedTrustRegion) else None,
            starts=made.starts(),
            guard_confidence=config.guard.confidence,
            seed=seed,
            output_dir=None if run is None else run / own.name,
            resume=resume,
            callback=shown,
        )


if __name__ == "__main__":
    main()
