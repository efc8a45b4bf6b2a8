r"""Measure what a guided search leaves behind: its f, followed from phi = 0, and its end, as a start on another model.

    python benchmarks/measure_search.py --task classification --config-file configs/classification/digits.yaml \
        --output-dir out/left_behind seeds=20 'queries=150'

Each seed trains a model and searches it with the config's queries and starts. Then ``MetricOpt``'s step follows the
search's f from phi = 0 on the model that it was learned for, without a query, and its end is compared with the
search's own, kept or not. Last, another model is trained with another seed, on another split, and searched twice: from
the same kinds of starts as the first, and from the first model's phi besides, which costs a query. The test metric
after each of --budgets is that of what the guard keeps. Writes search.json and search.md. The same command goes on with
an interrupted run, seed by seed, and adds seeds to a finished one.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from kept import kept_json
from metricopt_ext.adapters.start import Start
from metricopt_ext.errors import ConfigError
from metricopt_ext.experiment.cli import RUNS_CODE, TASKS, experiment_of
from metricopt_ext.experiment.command import errors_in_one_line
from metricopt_ext.experiment.compare import judge
from metricopt_ext.experiment.experiment import Experiment
from metricopt_ext.experiment.output_folder import open_run
from metricopt_ext.experiment.run_config import RunConfig
from metricopt_ext.experiment.seeds import paired_interval, spread, standard_error
from metricopt_ext.experiment.style import direction, markdown_table, print_table
from metricopt_ext.methods.paper.recipe import Recipe, finetune
from metricopt_ext.methods.result import Result
from metricopt_ext.methods.run import search_results
from metricopt_ext.methods.strategy import Plan
from metricopt_ext.plain import in_markdown
from metricopt_ext.runtime.identity import sole_writer
from metricopt_ext.runtime.parallel import run_seeds
from metricopt_ext.runtime.progress import Callback
from metricopt_ext.search.trust_region import GuidedTrustRegion
from metricopt_ext.utils.config import load_config
from metricopt_ext.utils.device import choose_device
from metricopt_ext.utils.files import write_atomically, write_json
from metricopt_ext.utils.machine import Machine
from metricopt_ext.utils.versions import versions
from metricopt_ext.utils.words import counted

OTHER = 100_000  # what is added to a seed for the second model
PREVIOUS = "previous"
KINDS = {"seed": int, "search": float, "second": dict}  # of a seed's file


def main() -> None:
    """Parse the command line, run all seeds, report."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=RUNS_CODE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--task", choices=TASKS, required=True, help="whose config the next option names")
    parser.add_argument("--config-file", required=True, help="YAML file of a finetune tool")
    parser.add_argument("--output-dir", required=True, type=Path, help="folder for all output files")
    parser.add_argument("--budgets", type=budget_list, default=[20, 40, 60], help="the second model's, e.g. 20,40,60")
    parser.add_argument("overrides", nargs="*", help="key=value, e.g. seeds=5 queries=150 data.root=FOLDER")
    arguments = parser.parse_intermixed_args()
    with errors_in_one_line(ValueError):
        experiment = experiment_of(arguments.task)
        config = load_config(experiment.config_type, arguments.config_file, arguments.overrides)
        measure_search(experiment, config, arguments.budgets, arguments.output_dir)


def budget_list(text: str) -> list[int]:
    """Return numbers of queries from ``"20,40"``, ascending."""
    return sorted({int(each) for each in text.split(",")})


def measure_search(
    experiment: type[Experiment[Any]], config: RunConfig, budgets: Sequence[int], folder: Path
) -> dict[str, Any]:
    """Run every seed and write the report; returns its content.

    Raises:
        ConfigError: The config's method is no guided search.
    """
    config.check()
    if config.method.name != "search":
        raise ConfigError(f"method.name={config.method.name}: what is measured here is a guided search; leave it so")
    subject = experiment.describe(config)
    with sole_writer(folder):
        machine = Machine.current(choose_device(config.device), config.threads)
        settings = {**config.as_dict(), "budgets": list(budgets), "computed_on": str(machine)}
        open_run(folder, settings, resume=True, files=config.data_files())
        rows = run_seeds(
            partial(run_seed, experiment, config, budgets, folder),
            range(config.seed, config.seed + config.seeds),
            queries=config.queries + 2 * budgets[-1],
            workers=config.workers,
            threads=config.threads,
        )
    sign = 1 if subject.maximize else -1
    gaps = [sign * (row["followed"] - row["search"]) for row in rows if row["followed"] is not None]
    content = {
        "task": subject.task,
        "metric": {"name": subject.metric, "maximize": subject.maximize},
        "queries": config.queries,
        "per_seed": rows,
        "followed": {"mean": float(np.mean(gaps)) if gaps else None, "error": standard_error(gaps), "seeds": len(gaps)},
        "machine": vars(machine),
        "versions": versions(),
        "config": config.as_dict(),
    }
    table, header = [], ["second model", "alone", "from the first one's phi too", "gain", "95% interval", "begun there"]
    for budget in map(str, budgets):
        alone, too = ([row["second"][kind][budget] for row in rows] for kind in ("alone", PREVIOUS))
        gain = paired_interval([sign * (b["test"] - a["test"]) for a, b in zip(alone, too, strict=True)])
        started = sum(each["started_at"] == PREVIOUS for each in too)
        table.append(
            [
                counted(int(budget), "query"),
                *(spread([each["test"] for each in side]) for side in (alone, too)),
                f"{gain.mean:+.4f}",
                f"[{gain.low:+.4f}, {gain.high:+.4f}]" if len(rows) > 1 else "",
                f"{started} of {len(rows)}",
            ]
        )
    title = f"{subject.title}: test {subject.metric} ({direction(subject.maximize)}), {counted(len(rows), 'seed')}"
    note = f"no f was to be trusted after {counted(config.queries, 'query')}"
    if gaps:
        of = "" if len(gaps) == len(rows) else f" (of {len(rows)}; the others had no f to trust)"
        note = (
            f"f of {counted(config.queries, 'query')}, followed from phi = 0, ends {np.mean(gaps):+.4f}"
            f" ±{standard_error(gaps):.4f} from the search's own end, positive is better; ±: standard error over"
            f" {counted(len(gaps), 'seed')}{of}"
        )
    write_json(folder / "search.json", content)
    write_atomically(
        folder / "search.md",
        "\n".join([f"# {in_markdown(title)}", "", *markdown_table(header, table), "", note, ""]).encode(),
    )
    print_table(header, table, title=title)
    print(note)
    return content


def run_seed(
    experiment_type: type[Experiment[Any]],
    config: RunConfig,
    budgets: Sequence[int],
    folder: Path,
    seed: int,
    callback: Callback,
) -> dict[str, Any]:
    """Return what comes out for a seed, from its file if it is there."""
    file = folder / f"seed-{seed}" / "row.json"
    callback.stage("on file" if file.exists() else "train the first model")

    def make(seed: int) -> Experiment[Any]:
        return experiment_type(config, folder / f"seed-{seed}", seed)

    row = kept_json(file, KINDS, lambda: search_both(make, seed, budgets, callback))
    callback.done()
    return row


def search_both(
    make: Callable[[int], Experiment[Any]], seed: int, budgets: Sequence[int], callback: Callback
) -> dict[str, Any]:
    """Search one model, follow its f, and search another with and without the first one's phi.

    Args:
        make: Trains the model of a seed.
        seed: The first model's.
        budgets: The second model's, ascending.
        callback: Notified of progress.
    """
    first = make(seed)
    (run,) = search(first, {}, [first.config.queries], callback)
    callback.stage("train the second model")
    second = make(seed + OTHER)
    like = second.starts().get(run.started_at)  # the first model's phi is worth something under such buffers alone
    previous = replace(like, phi=run.ends["search"]) if isinstance(like, Start) else Start(run.ends["search"])
    others: dict[str, dict[str, Start]] = {"alone": {}, PREVIOUS: {PREVIOUS: previous}}
    second_runs = {kind: search(second, more, budgets, callback) for kind, more in others.items()}
    return {
        "seed": seed,
        "search": tested(first, run, "search"),
        "followed": followed(first, run),
        "second": {
            kind: {
                str(budget): {"test": tested(second, each, each.chosen), "started_at": each.started_at}
                for budget, each in zip(budgets, runs, strict=True)
            }
            for kind, runs in second_runs.items()
        },
    }


def search(
    experiment: Experiment[Any], more: dict[str, Start], budgets: Sequence[int], callback: Callback
) -> list[Result]:
    """Search an experiment's model from its own starts and more."""
    task, config = experiment.task, experiment.config
    search = config.build_strategy()
    assert isinstance(search, GuidedTrustRegion)  # the settings are checked
    starts = {**experiment.starts(), **more}
    fresh = task.judged_by(task.metric.with_settings())
    given = {"starts": starts, "guard_confidence": config.guard.confidence, "seed": experiment.seed}
    plan = Plan(fresh, queries=budgets[0], strategy=search, **given)
    plan.callback = callback
    return list(search_results(plan, budgets[1:]))


def followed(experiment: Experiment[Any], run: Result) -> float | None:
    """Return the test metric where following a search's f from phi = 0 ends; None if it is not to be trusted."""
    if run.fit is None or not run.fit.f.trusted:
        return None
    recipe = Recipe(**vars(experiment.config.finetune))
    task, start = experiment.task, run.candidates[run.started_at]
    with task.adapter.applied(start):  # the model that f was learned for
        path = finetune(task, recipe.policy(run.fit.f, recipe.settings[0]), recipe.steps, experiment.seed)
    return judge(task.judged_by(experiment.test_metric), replace(start, phi=path[-1]))


def tested(experiment: Experiment[Any], run: Result, name: str) -> float:
    """Return the test metric of one of a search's ends."""
    started = run.started_at if name == "search" else name
    end = replace(run.candidates[started], phi=run.ends[name])
    return judge(experiment.task.judged_by(experiment.test_metric), end)


if __name__ == "__main__":
    main()
