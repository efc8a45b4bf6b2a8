"""What a learned value function saves on every new start, and from how many starts learning it pays off.

    python tools/compare_starts.py --config-file configs/classification/digits.yaml --output-dir out/starts
    python tools/compare_starts.py --config-file configs/classification/a9a.yaml --output-dir out/starts-a9a \
        data.root=FOLDER metric.name=mcr
    python tools/compare_starts.py --task detection --config-file configs/detection/scenes_torchvision.yaml \
        --output-dir out/starts-scenes --budgets 50 100

Each seed learns one value function (strategy=recipe, whatever the config says) and tunes several new starts, random phi
of the same model on fresh batches, by MetricOpt, by MetricOpt followed by CMA-ES, and by CMA-ES and Guided ES on the
metric, at several numbers of queries per start, guards included; and by the loss, at its end and at its best step.
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

from metricopt_ext.evidence.cli import errors_in_one_line
from metricopt_ext.evidence.experiment import Experiment
from metricopt_ext.evidence.method import METHODS
from metricopt_ext.evidence.report import spread
from metricopt_ext.evidence.rivals import best_of_loss_finetune
from metricopt_ext.evidence.run_config import RunConfig
from metricopt_ext.evidence.style import direction, new_figure, save_figure
from metricopt_ext.methods.pipeline import optimize_metric
from metricopt_ext.methods.run_folder import open_run
from metricopt_ext.methods.tuning import FRESH, finetune, tune_start
from metricopt_ext.search.direct import CMAES, GuidedES
from metricopt_ext.search.optimizer import LossStep
from metricopt_ext.tasks.task import FinetuneTask
from metricopt_ext.utils.checks import check_at_least
from metricopt_ext.utils.config import load_config
from metricopt_ext.utils.device import choose_device
from metricopt_ext.utils.files import read_json, write_atomically, write_json
from metricopt_ext.utils.machine import Machine, deterministic
from metricopt_ext.utils.parallel import run_seeds
from metricopt_ext.utils.progress import Watcher
from metricopt_ext.utils.words import counted

BUDGETS = (25, 50, 100, 200, 400, 800)
TASKS = ("classification", "detection", "retrieval")

Points = dict[str, list[tuple[int, float]]]
"""(queries per start, test metric) of each method, averaged over the starts of a seed."""


def main() -> None:
    """Parse the command line, run all seeds, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config-file", required=True, help="YAML file; its keys are those of the task's tool")
    parser.add_argument("--task", choices=TASKS, default="classification", help="what the config file is for")
    parser.add_argument("--output-dir", required=True, type=Path, help="folder for all output files")
    parser.add_argument("--starts", type=int, default=4, help="new starts per seed")
    parser.add_argument("--budgets", type=int, nargs="*", default=BUDGETS, help="queries per start for the searches")
    parser.add_argument("overrides", nargs="*", help="key=value, e.g. metric.name=f1 data.root=FOLDER")
    arguments = parser.parse_intermixed_args()
    with errors_in_one_line(ValueError):
        check_at_least(1, **{"--starts": arguments.starts})
        config = load_config(experiment_of(arguments.task).config_type, arguments.config_file, arguments.overrides)
        compare_starts(arguments.task, config, arguments.output_dir, arguments.starts, tuple(arguments.budgets))


def experiment_of(task: str) -> type[Experiment[Any]]:
    """Return a task's experiment; only its own toolkit is imported."""
    if task == "classification":
        from metricopt_ext.classification.experiment import ClassificationExperiment

        return ClassificationExperiment
    if task == "detection":
        from metricopt_ext.detection.experiment import DetectionExperiment

        return DetectionExperiment
    from metricopt_ext.retrieval.experiment import RetrievalExperiment

    return RetrievalExperiment


def compare_starts(
    task: str, config: Any, folder: Path, starts: int, budgets: tuple[int, ...] = BUDGETS
) -> dict[str, Any]:
    """Run every seed and write the report; returns it."""
    config.strategy = "recipe"  # what a value function saves on further starts
    config.check()
    seeds = range(config.seed, config.seed + config.seeds)
    with deterministic(config.deterministic, config.threads):
        computed_on = str(Machine.current(choose_device(config.device), config.threads))
        settings = {**config.as_dict(), "starts": starts, "budgets": list(budgets), "computed_on": computed_on}
        open_run(folder, settings, resume=True)
        rows = run_seeds(
            partial(run_seed, task, config, folder, starts, budgets),
            seeds,
            queries=config.queries,
            workers=config.workers,
            threads=config.threads,
        )
    content = {
        "task": f"{task}/{config.data.name}",
        "metric": rows[0]["metric"],
        "seeds": list(seeds),
        "computed_on": computed_on,
        "starts": starts,
        "queries_once": max(row["queries_once"] for row in rows),
        "spearman": [row["spearman"] for row in rows],
        "methods": {name: _over_seeds([row["points"][name] for row in rows]) for name in rows[0]["points"]},
    }
    write_json(folder / "starts.json", content)
    write_atomically(folder / "starts.md", markdown(content).encode())
    plot(content, folder / "starts.png")
    print(markdown(content))
    print("wrote", *(folder / f"starts.{kind}" for kind in ("json", "md", "png")), sep="\n  ")
    return content


def run_seed(
    kind: str, config: RunConfig, folder: Path, starts: int, budgets: tuple[int, ...], seed: int, watcher: Watcher
) -> dict[str, Any]:
    """Learn one value function and tune all new starts; returns what they reached."""
    folder = folder / f"seed-{seed}"
    record = folder / "points.json"
    if record.exists():
        watcher.done()
        found: dict[str, Any] = read_json(record)
        return found
    watcher.stage("train the model")
    ready = experiment_of(kind)(config, folder, seed)
    recipe = config.recipe.build()
    result = optimize_metric(
        ready.task, queries=config.queries, strategy=recipe, seed=seed, output_dir=folder, resume=True, watcher=watcher
    )
    test = ready.task.judged_by(ready.test_metric)

    def judged(phi: Tensor) -> float:
        return float(test.metric.to_value(test.cost(phi, "judge")))

    def fresh() -> FinetuneTask:
        task: FinetuneTask = ready.task.judged_by(ready.task.metric.with_new_ledger())
        return task

    reached: dict[str, dict[int, list[tuple[int, float]]]] = {}
    for number in range(starts):
        watcher.stage(f"new start {number + 1}/{starts}")
        index = FRESH + 1000 + number
        start = ready.task.starts(recipe.start_std, seed, [index])[0]
        tuned = partial(tune_start, fit=result.fit, setting=result.setting, start=start, index=index, seed=seed)

        def note(name: str, budget: int, task: FinetuneTask, phi: Tensor) -> None:
            spent = task.metric.ledger.spent
            reached.setdefault(name, {}).setdefault(budget, []).append((spent, judged(phi)))

        note("pretrained", 0, fresh(), start)
        task = fresh()
        path = finetune(task, LossStep(recipe.lr), recipe.steps, seed, start, index)
        note("loss_finetune", 0, task, path[-1])
        note("loss_finetune_best", config.best_evals, task, best_of_loss_finetune(task, path, config.best_evals))
        task = fresh()
        outcome = tuned(task, recipe=recipe)
        note("metricopt", 0, task, outcome.ends[outcome.chosen])
        for budget in budgets:
            for name, search in (("guided_es", GuidedES(lr=recipe.lr)), ("cma_es", CMAES())):
                if budget >= search.least_queries(task.dim):
                    task = fresh()
                    note(name, budget, task, search(task, start, budget, seed=seed + number).phi)
            if budget >= CMAES().least_queries(task.dim):
                task = fresh()
                refining = replace(recipe, refine=CMAES(), refine_queries=budget)
                outcome = tuned(task, recipe=refining)
                note("refined", budget, task, outcome.ends[outcome.chosen])
    points = {
        name: [tuple(np.mean(values, axis=0).tolist()) for values in of_budget.values()]
        for name, of_budget in reached.items()
    }
    assert result.fit.f.quality is not None
    row = {
        "metric": {"name": result.metric, "maximize": ready.task.metric.maximize},
        "queries_once": sum(result.queries.values()) - result.queries_per_start,
        "spearman": result.fit.f.quality.spearman,
        "points": points,
    }
    write_json(record, row)
    watcher.done()
    return row


def _over_seeds(points: list[list[tuple[float, float]]]) -> list[dict[str, Any]]:
    """Gather a method's points from all seeds, budget by budget."""
    return [
        {"queries": float(np.mean([queries for queries, _ in column])), "test": [value for _, value in column]}
        for column in zip(*points, strict=True)
    ]


def pays_from(content: dict[str, Any], rival: str) -> tuple[float, float]:
    """Return from how many queries a rival matches MetricOpt at a new start, and from how many starts MetricOpt pays.

    Both are infinite if the rival never matches it, or if MetricOpt needs as many queries per start.
    """
    sign = 1 if content["metric"]["maximize"] else -1
    (ours,) = content["methods"]["metricopt"]
    matching = [
        point["queries"]
        for point in content["methods"].get(rival, [])
        if sign * np.mean(point["test"]) >= sign * np.mean(ours["test"])
    ]
    if not matching or min(matching) <= ours["queries"]:
        return (min(matching, default=math.inf), math.inf)
    return min(matching), math.ceil(content["queries_once"] / (min(matching) - ours["queries"]))


def markdown(content: dict[str, Any]) -> str:
    """Return the content of starts.md."""
    metric, seeds = content["metric"], content["seeds"]
    (ours,) = content["methods"]["metricopt"]
    lines = [
        f"# What a new start costs: {content['task']}, {metric['name']} ({direction(metric['maximize'])})",
        "",
        f"{counted(len(seeds), 'seed')} from {seeds[0]} on, {counted(content['starts'], 'new start')} each: random phi"
        f" on the same model, fresh batches. MetricOpt spent {content['queries_once']} queries once, to learn its value"
        f" function, whose Spearman correlation on held-out trajectories is {np.mean(content['spearman']):.2f}. Test"
        f" metric, mean and standard deviation over seeds. Computed on {content['computed_on']}; other processors give"
        " other digits.",
        "",
        "| method | queries per start | test |",
        "|---|---|---|",
    ]
    for name, points in content["methods"].items():
        title = "the start itself" if name == "pretrained" else METHODS[name].title
        lines += [f"| {title} | {point['queries']:.0f} | {spread(point['test'])} |" for point in points]
    lines.append("")
    for rival in ("cma_es", "guided_es"):
        if rival not in content["methods"]:
            continue  # no budget was enough for this method
        most = max(point["queries"] for point in content["methods"][rival])
        (queries, starts), title = pays_from(content, rival), METHODS[rival].title
        if math.isinf(queries):
            least = math.ceil(content["queries_once"] / max(1, most - ours["queries"]))
            lines.append(
                f"- {title} did not reach MetricOpt's mean with up to {most:.0f} queries per start: learning f"
                f" pays from at most {counted(least, 'start')} on."
            )
        elif math.isinf(starts):
            lines.append(f"- {title} reaches MetricOpt's mean with no more queries: learning f does not pay.")
        else:
            lines.append(
                f"- {title} reaches MetricOpt's mean with {queries:.0f} queries per start: learning f pays from"
                f" {counted(int(starts), 'start')} on."
            )
    return "\n".join([*lines, ""])


def standard_error(values: Sequence[float]) -> float:
    """Return the standard error of a mean over seeds, NaN for a single seed."""
    return float(np.std(values, ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def plot(content: dict[str, Any], path: Path) -> None:
    """Draw the test metric against the queries per start."""
    figure, ((axes,),) = new_figure(6.4, 4.0)
    for name, points in content["methods"].items():
        x = [max(1.0, point["queries"]) for point in points]
        mean = np.array([np.mean(point["test"]) for point in points])
        error = np.array([standard_error(point["test"]) for point in points])
        label = "the start itself" if name == "pretrained" else METHODS[name].title
        axes.errorbar(x, mean, error, color=METHODS[name].colour, marker="o", markersize=4, capsize=2, label=label)
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
