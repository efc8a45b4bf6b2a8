r"""What a learned value function saves on every new start, and from how many starts learning it pays off.

    python benchmarks/compare_starts.py --config-file configs/classification/digits.yaml --output-dir out/starts
    python benchmarks/compare_starts.py --config-file configs/classification/a9a.yaml --output-dir out/starts-a9a \
        data.root=FOLDER metric.name=mcr
    python benchmarks/compare_starts.py --task detection --config-file configs/detection/scenes_torchvision.yaml \
        --output-dir out/starts-scenes --budgets 50 100 --methods cma_es metricopt

Each seed learns one value function (method.name=recipe, whatever the config says) and tunes several new starts, random
phi of the same model on fresh batches, by MetricOpt, whose guard takes five queries, and by baselines of
tools/compare.py that learn nothing beforehand: by default Guided ES, CMA-ES and a guided search of its own from each
start, at several numbers of queries, and the loss at its best step.
Writes starts.json, starts.md and starts.png; an interrupted run continues where it stopped.
"""

import argparse
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from metricopt_ext.comparison.comparison import Plan
from metricopt_ext.errors import FileFormatError
from metricopt_ext.experiment.baselines import at_each_budget, loss_path
from metricopt_ext.experiment.cli import RUNS_CODE, TASKS, experiment_of
from metricopt_ext.experiment.command import errors_in_one_line
from metricopt_ext.experiment.compare import judge
from metricopt_ext.experiment.experiment import Experiment
from metricopt_ext.experiment.method import METHODS, Baseline, Entry, Started
from metricopt_ext.experiment.output_folder import open_run
from metricopt_ext.experiment.seeds import spread, standard_error
from metricopt_ext.experiment.style import direction, markdown_table, new_figure, save_figure
from metricopt_ext.methods.optimize import optimize_metric
from metricopt_ext.methods.paper.recipe import FRESH, Recipe, tune_start
from metricopt_ext.plain import in_markdown
from metricopt_ext.runtime.identity import sole_writer
from metricopt_ext.runtime.parallel import run_seeds
from metricopt_ext.runtime.progress import Callback
from metricopt_ext.tasks.task import FinetuneTask
from metricopt_ext.utils.checks import check_at_least
from metricopt_ext.utils.config import load_config
from metricopt_ext.utils.device import choose_device
from metricopt_ext.utils.files import read_json, write_atomically, write_json
from metricopt_ext.utils.machine import Machine
from metricopt_ext.utils.words import counted
from metricopt_ext.value.fitting import Fit

NEW = FRESH + 1000  # the task index of the first new start
BUDGETS = (25, 50, 100, 200, 400, 800)
BASELINES = ("loss_finetune_best", "guided_es", "cma_es", "metricopt")
LEARNED = "learned_f"  # tuned by the f that was learned once
ALWAYS = ("pretrained", "loss_finetune", LEARNED)
ENTRIES = {**METHODS, LEARNED: Entry("MetricOpt, f learned before", "#c02942", "queries", training=True)}


def main() -> None:
    """Parse the command line, run all seeds, report."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=RUNS_CODE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config-file", required=True, help="YAML file; its keys are those of the task's tool")
    parser.add_argument("--task", choices=TASKS, default="classification", help="what the config file is for")
    parser.add_argument("--output-dir", required=True, type=Path, help="folder for all output files")
    parser.add_argument("--starts", type=int, default=4, help="new starts per seed")
    parser.add_argument("--budgets", type=int, nargs="*", default=BUDGETS, help="queries per start for the searches")
    parser.add_argument("--methods", nargs="*", default=BASELINES, help="baselines, by their names in METHODS")
    parser.add_argument("overrides", nargs="*", help="key=value, e.g. metric.name=f1 data.root=FOLDER")
    arguments = parser.parse_intermixed_args()
    with errors_in_one_line(ValueError, keeps=arguments.output_dir):
        check_at_least(1, **{"--starts": arguments.starts})
        # What a value function saves on further starts, without settings of inference, of which a recipe tunes none.
        overrides = [*arguments.overrides, "method.name=recipe", "methods=[]"]
        config = load_config(experiment_of(arguments.task).config_type, arguments.config_file, overrides)
        plan = Plan(tuple(arguments.methods), tuple(arguments.budgets))
        compare_starts(arguments.task, config, arguments.output_dir, arguments.starts, plan)


def compare_starts(task: str, config: Any, folder: Path, starts: int, plan: Plan) -> dict[str, Any]:
    """Run every seed of a recipe and write the report; returns its content."""
    config.check()
    experiment = experiment_of(task)
    about = experiment.describe(config)
    plan.check(experiment.baselines(config))
    plan = replace(plan, methods=tuple(name for name in ENTRIES if name in (*ALWAYS, *plan.methods)))
    seeds = range(config.seed, config.seed + config.seeds)
    with sole_writer(folder):
        computed_on = str(Machine.current(choose_device(config.device), config.threads))
        settings = {**config.as_dict(), "starts": starts, "budgets": list(plan.budgets), "computed_on": computed_on}
        open_run(folder, settings, resume=True, files=config.data_files())
        rows = run_seeds(
            partial(run_seed, experiment, config, folder, starts, plan),
            seeds,
            queries=config.queries,
            workers=config.workers,
            threads=config.threads,
        )
    points = {name: _over_seeds([row["points"][name] for row in rows]) for name in plan.methods}
    content = {
        "task": about.task,
        "metric": {"name": about.metric, "maximize": about.maximize},
        "seeds": list(seeds),
        "computed_on": computed_on,
        "starts": starts,
        "queries_once": max(row["queries_once"] for row in rows),
        "spearman": [row["spearman"] for row in rows],
        "methods": {name: reached for name, reached in points.items() if reached},  # no budget may have been enough
    }
    write_json(folder / "starts.json", content)
    write_atomically(folder / "starts.md", markdown(content).encode())
    plot(content, folder / "starts.png")
    print(markdown(content))
    print("wrote", *(folder / f"starts.{kind}" for kind in ("json", "md", "png")), sep="\n  ")
    return content


def run_seed(
    experiment: type[Experiment[Any]], config: Any, folder: Path, starts: int, plan: Plan, seed: int, callback: Callback
) -> dict[str, Any]:
    """Learn one value function and tune all new starts; returns what is on file of it.

    A method's points, (queries per start, test metric), are means over the starts; one that has them is not run again.
    """
    folder = folder / f"seed-{seed}"
    record = folder / "points.json"
    row: dict[str, Any] = read_json(record) if record.exists() else {"points": {}}
    if not isinstance(row.get("points"), dict):
        raise FileFormatError(f"{record} holds no points of a comparison; delete it to regenerate it")
    missing = [name for name in plan.methods if name not in row["points"]]
    if missing:
        callback.stage("train the model")
        ready, recipe = experiment(config, folder, seed), config.build_strategy()
        task, test = ready.task, ready.task.judged_by(ready.test_metric)
        result = optimize_metric(
            task, queries=config.queries, strategy=recipe, seed=seed, output_dir=folder, resume=True, callback=callback
        )
        assert result.fit is not None
        assert result.fit.f.quality is not None
        assert result.setting is not None
        row["queries_once"] = sum(result.queries.values()) - result.queries_per_start
        row["spearman"] = result.fit.f.quality.spearman
        runs = runs_of(ready, result.fit, result.setting, plan.budgets)

        def points(name: str, number: int) -> list[tuple[int, float]]:
            start = task.starts(recipe.start_std, seed, [NEW + number])[0]
            baseline, budgets = runs[name]
            possible = [queries for queries in budgets if queries >= baseline.least(task.dim)]
            found = baseline.run(task, Started.at(start), possible, seed + number) if possible else []
            return [(reached.queries, judge(test, reached.end)) for reached in found]

        for name in missing:
            callback.stage(ENTRIES[name].title)
            row["points"][name] = np.mean([points(name, number) for number in range(starts)], axis=0).tolist()
            write_json(record, row)
    callback.done()
    return row


def runs_of(
    ready: Experiment[Any], fit: Fit, setting: tuple[float, float], budgets: Sequence[int]
) -> dict[str, tuple[Baseline, Sequence[int]]]:
    """Return every method with its numbers of queries per start; the n-th start is run with the seed + n."""
    config, recipe = ready.config, ready.config.build_strategy()
    assert isinstance(recipe, Recipe)

    def by_loss(task: FinetuneTask, start: Tensor, queries: int, seed: int) -> Tensor:
        return loss_path(task, config.finetune, seed, start)[-1]

    def tuned(task: FinetuneTask, start: Tensor, queries: int, seed: int) -> Tensor:
        outcome = tune_start(
            task,
            fit,
            recipe=replace(recipe, settings=(setting,)),
            start=start,
            index=NEW + seed - ready.seed,
            guard_confidence=config.guard.confidence,
            seed=ready.seed,
        )
        return outcome.ends[outcome.chosen]

    baselines = ready.baselines(config, ready)
    return {
        **{name: (baseline, budgets) for name, baseline in baselines.items()},
        "pretrained": (at_each_budget(lambda task, start, *_: start), [0]),
        "loss_finetune": (
            at_each_budget(lambda task, start, _, seed: loss_path(task, config.finetune, seed, start)[-1]),
            [0],
        ),
        "loss_finetune_best": (baselines["loss_finetune_best"], [config.best_evals]),
        LEARNED: (at_each_budget(tuned), [recipe.start_queries]),
    }


def _over_seeds(points: list[list[tuple[float, float]]]) -> list[dict[str, Any]]:
    """Gather a method's points from all seeds, budget by budget."""
    return [
        {"queries": float(np.mean([queries for queries, _ in column])), "test": [value for _, value in column]}
        for column in zip(*points, strict=True)
    ]


def pays_from(content: dict[str, Any], baseline: str) -> tuple[float, float]:
    """Return from how many queries a baseline matches MetricOpt at a new start, and from how many starts it pays.

    Both are infinite if the baseline never matches it, or if MetricOpt needs as many queries per start.
    """
    sign = 1 if content["metric"]["maximize"] else -1
    (ours,) = content["methods"][LEARNED]
    matching = [
        point["queries"]
        for point in content["methods"].get(baseline, [])
        if sign * np.mean(point["test"]) >= sign * np.mean(ours["test"])
    ]
    if not matching or min(matching) <= ours["queries"]:
        return (min(matching, default=math.inf), math.inf)
    return min(matching), math.ceil(content["queries_once"] / (min(matching) - ours["queries"]))


def markdown(content: dict[str, Any]) -> str:
    """Return the content of starts.md."""
    metric, seeds = content["metric"], content["seeds"]
    (ours,) = content["methods"][LEARNED]
    rows = [
        [title_of(name), f"{point['queries']:.0f}", spread(point["test"])]
        for name, points in content["methods"].items()
        for point in points
    ]
    lines = [
        f"# What a new start costs: {in_markdown(content['task'])}, {in_markdown(metric['name'])}"
        f" ({direction(metric['maximize'])})",
        "",
        f"{counted(len(seeds), 'seed')} from {seeds[0]} on, {counted(content['starts'], 'new start')} each: random phi"
        f" on the same model, fresh batches. MetricOpt spent {content['queries_once']} queries once, to learn its value"
        f" function, whose Spearman correlation on held-out trajectories is {np.mean(content['spearman']):.2f}. Test"
        f" metric, mean and standard deviation over seeds. Computed on {content['computed_on']}; other processors give"
        " other digits.",
        "",
        *markdown_table(["method", "queries per start", "test"], rows),
        "",
    ]
    for baseline in (name for name in content["methods"] if name not in (*ALWAYS, "loss_finetune_best")):
        most = max(point["queries"] for point in content["methods"][baseline])
        (queries, starts), title = pays_from(content, baseline), ENTRIES[baseline].title
        if math.isinf(queries):
            least = math.ceil(content["queries_once"] / max(1, most - ours["queries"]))
            reached = f"did not reach MetricOpt's mean with up to {most:.0f} queries per start"
            pays = f"pays from at most {counted(least, 'start')} on"
        else:
            never = math.isinf(starts)
            reached = f"reaches MetricOpt's mean with {'no more' if never else f'{queries:.0f}'} queries per start"
            pays = "does not pay" if never else f"pays from {counted(int(starts), 'start')} on"
        lines.append(f"- {title} {reached}: learning f {pays}.")
    return "\n".join([*lines, ""])


def title_of(name: str) -> str:
    """Return a method's title at a new start."""
    return "the start itself" if name == "pretrained" else ENTRIES[name].title


def plot(content: dict[str, Any], path: Path) -> None:
    """Draw the test metric against the queries per start."""
    figure, ((axes,),) = new_figure(6.4, 4.0)
    for name, points in content["methods"].items():
        x = [max(1.0, point["queries"]) for point in points]
        mean = np.array([np.mean(point["test"]) for point in points])
        error = np.array([standard_error(point["test"]) for point in points])
        style = {"color": ENTRIES[name].colour, "marker": "o", "markersize": 4, "capsize": 2}
        axes.errorbar(x, mean, error, label=title_of(name), **style)
    axes.set_xscale("log")
    axes.set_xlabel("metric queries for each new start, guard included (1: none)")
    axes.set_ylabel(f"test {content['metric']['name']}\n({direction(content['metric']['maximize'])})")
    axes.legend(frameon=False, fontsize=8)
    axes.set_title(
        f"{counted(content['starts'], 'start')} on each of {counted(len(content['seeds']), 'seed')};"
        " bars: standard error over seeds",
        fontsize=9,
    )
    axes.grid(alpha=0.25)
    save_figure(figure, path)


if __name__ == "__main__":
    main()
