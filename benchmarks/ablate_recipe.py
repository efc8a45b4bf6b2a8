r"""Change one part of the default recipe at a time, and measure what that does to the value function and the end point.

    python benchmarks/ablate_recipe.py --output-dir out/ablations
    python benchmarks/ablate_recipe.py --output-dir out/ablations \
        --task configs/classification/digits.yaml \
        --task configs/classification/a9a.yaml data.root=FOLDER metric.name=mcr
    python benchmarks/ablate_recipe.py --output-dir out/paper --strategy paper \
        --task configs/classification/a9a.yaml data.root=FOLDER

All of it is method.name=recipe, whatever the config says, or with --strategy paper changes of Algorithm 1 as printed:
the rows of the paper's Fig. 3 and Fig. S4, and Adam. Each seed is a fresh split and model. Changes of the fit are
made on the default's trajectories and changes of the step on its value function; all others are separate whole runs.
There is no guard: end points are judged as they are. Writes ablations.json, ablations.md and ablations.png; an
interrupted run continues where it stopped.
"""

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from as_printed import LITERAL, OBSERVED, PARTS
from linear_labels import LinearLabels
from metricopt_ext.classification.config import ClassificationConfig
from metricopt_ext.classification.experiment import ClassificationExperiment
from metricopt_ext.experiment.cli import RUNS_CODE
from metricopt_ext.experiment.command import errors_in_one_line
from metricopt_ext.experiment.output_folder import open_run
from metricopt_ext.experiment.seeds import paired_interval, spread
from metricopt_ext.experiment.style import new_figure, save_figure
from metricopt_ext.methods.optimize import optimize_metric
from metricopt_ext.methods.paper.recipe import Recipe, by_adam, finetune
from metricopt_ext.methods.result import Result
from metricopt_ext.plain import in_markdown
from metricopt_ext.runtime.identity import sole_writer
from metricopt_ext.runtime.parallel import run_seeds
from metricopt_ext.runtime.progress import Callback
from metricopt_ext.search.guided_es import es_direction
from metricopt_ext.search.optimizer import MetricOptStep
from metricopt_ext.tasks.trajectories import Policy
from metricopt_ext.utils.config import load_config
from metricopt_ext.utils.described import from_json
from metricopt_ext.utils.device import choose_device
from metricopt_ext.utils.files import content_of, read_json, write_atomically, write_json
from metricopt_ext.utils.machine import Machine
from metricopt_ext.utils.seeding import generator
from metricopt_ext.utils.words import counted
from metricopt_ext.value.fitting import Fit
from metricopt_ext.value.interpolation import GaussianProcessLabels
from metricopt_ext.value.learning import NeuralLearner, Objective
from metricopt_ext.value.reptile import ReptileLearner
from metricopt_ext.value.value_function import ValueFunction
from trivial import trivial_predictors

DEFAULT = "default"


class EsStep(MetricOptStep):
    """The default step, with its direction estimated from values of f (Eq. 4) instead of its gradient."""

    pairs = 3

    def metric_direction(self, phi: Tensor, history: Tensor) -> Tensor:
        """Return Eq. 4's estimate at the length of f's radius, ``... x d``."""
        rng = generator(0, "ablation", int(phi.double().sum() * 1e6) % 2**31)  # anew at every step
        u = es_direction(self.f, phi, history, generator=rng, count=self.pairs, variance=0.01)
        return self.f.radius * torch.nn.functional.normalize(u, dim=-1)


class EsStep12(EsStep):
    """The same with twelve pairs."""

    pairs = 12


def adam_step(f: ValueFunction, lr: float, *settings: Any) -> Policy:
    """Return the default step with Adam's steps in place of loss gradients, at Adam's own rate."""
    return by_adam(MetricOptStep(f, ADAM_RATE, *settings))


def learner(**change: Any) -> dict[str, Any]:
    """Return the change of the recipe to an MLP alone, with other settings."""
    return {"learner": NeuralLearner(**change)}


ADAM_RATE = 0.01

MIXED = ReptileLearner()

# What is fitted to the default's trajectories, as changes of the recipe.
FITS: dict[str, dict[str, Any]] = {
    "MLP alone": learner(),
    "Reptile, mixed batches": {"learner": MIXED},
    "Reptile, one task per BatchNorm batch": {"learner": replace(MIXED, tasks=1, points=None)},
    "Reptile, ordinal weight 0": {"learner": replace(MIXED, objective=Objective(beta=0.0))},
    "Reptile, ordinal weight 1": {"learner": replace(MIXED, objective=Objective(beta=1.0))},
    "Reptile, hardest triplets": {"learner": replace(MIXED, objective=Objective(hardest=True))},
    "labels: linear": {"labels": LinearLabels()},
    "labels: Gaussian process": {"labels": GaussianProcessLabels()},
    "weight decay 0.01": learner(weight_decay=0.01),
    "weight decay 0.3": learner(weight_decay=0.3),
    "weight decay 3": learner(weight_decay=3.0),
    "2 folds": {"folds": 2},
    "8 folds": {"folds": 8},
}

# How the default's value function is followed: the step rule, its changes, and a setting if not the chosen one.
STEPS: dict[str, tuple[Callable[..., Policy], dict[str, Any], tuple[float, float] | None]] = {
    "step without the loss": (MetricOptStep, {}, (0.0, 0.15)),
    "step with the loss at 0.3": (MetricOptStep, {}, (0.3, 0.15)),
    "step with the loss at 1": (MetricOptStep, {}, (1.0, 0.15)),
    "step length 0.05": (MetricOptStep, {}, (0.0, 0.05)),
    "step length 0.3": (MetricOptStep, {}, (0.0, 0.3)),
    "step length 0.6": (MetricOptStep, {}, (0.0, 0.6)),
    "ES, 3 pairs": (EsStep, {}, None),
    "ES, 12 pairs": (EsStep12, {}, None),
    "trust radius 0.8": (MetricOptStep, {"trust": 0.8}, None),
    "trust radius 2": (MetricOptStep, {"trust": 2.0}, None),
    "no trust radius": (MetricOptStep, {"trust": 1e9}, None),
    "Adam": (adam_step, {}, None),
}

# Of both strategies. One of the two adapters is the default already.
BOTH: dict[str, list[str]] = {
    "FiLM at all norms": ["adapter.kind=film", "adapter.layers=[]"],
    "input bias": ["adapter.kind=input_bias", "adapter.layers=[]"],
}

# Overrides of the config, or fields of the strategy that differ.
Change = list[str] | dict[str, Any]

# Whole runs.
RUNS: dict[str, Change] = {
    "1 round (loss only)": ["method.rounds=1"],
    "2 rounds": ["method.rounds=2"],
    "3 rounds": ["method.rounds=3"],
    "10 rounds": ["method.rounds=10"],
    "K = 2": ["method.evals=2"],
    "K = 3": ["method.evals=3"],
    "K = 10": ["method.evals=10"],
    "d = 8": ["adapter.dim=8"],
    "d = 16": ["adapter.dim=16"],
    "d = 32": ["adapter.dim=32"],
    "d = 64": ["adapter.dim=64"],
    "starts at phi = 0": {"start_std": 0.001},
    "starts of std 0.1": {"start_std": 0.1},
    "starts of std 0.4": {"start_std": 0.4},
    "300 queries": ["queries=300"],
    "600 queries": ["queries=600"],
    "1200 queries": ["queries=1200"],
    "2400 queries": ["queries=2400"],
    **BOTH,
}

# The same of Algorithm 1 as printed; Adam at its own rate.
PAPER: dict[str, Change] = {
    **PARTS,
    "Adam": {**PARTS["Adam"], "lr": ADAM_RATE},
    **LITERAL,
    **BOTH,
}

# Shares of the T steps at which the metric is evaluated, for as many tasks: the queries change (Fig. S4).
SHARES: dict[str, float] = {"K = 2.5% of T": 0.025, "K = 10% of T": 0.1, "K = 100% of T": 1.0}


@dataclass(frozen=True)
class Row:
    """One variant on one seed.

    Attributes:
        spearman: Held-out rank correlation of f where it is used; NaN-free, None if f is the default's.
        test: Test metric at MetricOpt's end.
        queries: Total metric queries of the variant.
        trivial: Held-out rank correlation of trivial predictors on the same points, by name; of the default alone.
    """

    spearman: float | None
    test: float
    queries: int
    trivial: dict[str, float] = field(default_factory=dict)


def main() -> None:
    """Parse the command line, run all variants, report."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=RUNS_CODE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--task", nargs="+", action="append", metavar="X", help="a config file, then key=value ...")
    parser.add_argument("--output-dir", required=True, type=Path, help="folder for all output files")
    parser.add_argument("--strategy", choices=("recipe", "paper"), default="recipe", help="what is changed")
    parser.add_argument("--changes", nargs="+", metavar="NAME", help="only these rows of the table, e.g. 'K = 2'")
    parser.add_argument("--seed", type=int, default=2000, help="first seed (2000: not used for reported results)")
    parser.add_argument("--seeds", type=int, default=4, help="number of seeds")
    parser.add_argument("--workers", type=int, default=2, help="seeds that run in parallel")
    arguments = parser.parse_args()
    if arguments.seeds < 1:
        parser.error(f"--seeds is {arguments.seeds}; it must be at least 1")
    known = [*FITS, *STEPS, *RUNS] if arguments.strategy == "recipe" else [*PAPER, *SHARES]
    for name in arguments.changes or ():
        if name not in known:
            parser.error(f"--changes: {name!r} is none of {', '.join(known)}")
    tasks = arguments.task or [["configs/classification/digits.yaml"]]
    with errors_in_one_line(keeps=arguments.output_dir):
        seeds = range(arguments.seed, arguments.seed + arguments.seeds)
        ablate(tasks, arguments.output_dir, seeds, arguments.workers, arguments.strategy, arguments.changes)


def ablate(
    tasks: Sequence[Sequence[str]],
    folder: Path,
    seeds: Sequence[int],
    workers: int,
    strategy: str = "recipe",
    changes: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Run every variant, or those named, on every seed of every task and write the report; returns it."""
    table: dict[str, Any] = {}
    for file, *overrides in tasks:
        overrides = [*overrides, f"method.name={strategy}"]
        config = load_config(ClassificationConfig, file, overrides)
        config.check()
        name, whole_runs = title(config), len(chosen(runs_of(config), changes))
        total = 1 + whole_runs + (len(chosen(FITS | STEPS, changes)) if strategy == "recipe" else 0)
        print(f"{name}: {total} variants on {counted(len(seeds), 'seed')} from {seeds[0]} on")
        own = folder / name.replace(" ", "-")
        run = partial(ablate_seed, file, overrides, own, changes)
        with sole_writer(own):
            computed_on = str(Machine.current(choose_device(config.device), threads=1))
            open_run(own, {**config.as_dict(), "computed_on": computed_on}, resume=True, files=config.data_files())
            rows = run_seeds(run, seeds, queries=whole_runs + 1, workers=workers, threads=1)
        variants = [variant for variant in rows[0] if all(variant in of_seed for of_seed in rows)]
        table[name] = {
            "maximize": ClassificationExperiment.describe(config).maximize,
            "variants": {variant: [asdict(of_seed[variant]) for of_seed in rows] for variant in variants},
        }
    content = {"strategy": strategy, "seeds": list(seeds), "computed_on": computed_on, "tasks": table}
    write_json(folder / "ablations.json", content)
    write_atomically(folder / "ablations.md", markdown(content).encode())
    plot(content, folder / "ablations.png")
    print(markdown(content))
    print("wrote", *(folder / f"ablations.{kind}" for kind in ("json", "md", "png")), sep="\n  ")
    return content


def title(config: ClassificationConfig) -> str:
    """Return a task's name in tables."""
    return f"{'' if config.shift.kind == 'none' else 'shifted '}{config.data.name} {config.metric.name}"


def chosen(variants: Mapping[str, Any], changes: Sequence[str] | None) -> dict[str, Any]:
    """Return those variants that are to be run: all, unless some are named."""
    return {name: variant for name, variant in variants.items() if changes is None or name in changes}


def ablate_seed(
    file: str, overrides: list[str], folder: Path, changes: Sequence[str] | None, seed: int, callback: Callback
) -> dict[str, Row]:
    """Run every variant on one seed; those already on file are not run again."""
    folder = folder / f"seed-{seed}"
    config = load_config(ClassificationConfig, file, overrides)
    record = folder / "rows.json"
    rows: dict[str, Row] = {}
    if record.exists():
        with content_of(record, "rows of an ablation"):
            rows = from_json(dict[str, Row], read_json(record))

    def remember(name: str, compute: Callable[[], Row]) -> None:
        if name not in rows:
            callback.stage(name)
            rows[name] = compute()
            write_json(record, {variant: asdict(row) for variant, row in rows.items()})

    callback.stage(DEFAULT)
    recipe = config.build_strategy()
    assert isinstance(recipe, Recipe)
    if config.method.name == "recipe":
        ready = ClassificationExperiment(config, folder, seed)
        result = run(ready, seed)
        assert result.fit is not None
        assert result.setting is not None
        spent = sum(result.queries.values())
        folds = recipe.folds_for(len(result.trajectories))
        trivial = trivial_predictors(result.trajectories, folds=folds, seed=seed)
        known = {name: quality.spearman for name, quality in trivial.items()}
        rows[DEFAULT] = Row(spearman(result.fit), test_metric(ready, result.ends["metricopt"]), spent, known)
        for name, change in chosen(FITS, changes).items():
            changed = replace(recipe, **change)
            remember(name, lambda changed=changed: fitted(ready, result, changed, seed))  # type: ignore[misc]
        for name, (rule, change, setting) in chosen(STEPS, changes).items():
            weight, metric_step = setting or result.setting
            policy = rule(result.fit.f, recipe.lr, metric_step, weight, recipe.steps, **change)
            remember(name, lambda policy=policy: Row(None, followed(ready, policy, recipe, seed), spent))  # type: ignore[misc]
    else:
        remember(DEFAULT, lambda: whole(file, overrides, folder, seed, []))
    for done, (name, change) in enumerate(chosen(runs_of(config), changes).items()):
        callback.stage(f"{name} (run {done + 1})")
        remember(name, lambda change=change: whole(file, overrides, folder, seed, change))  # type: ignore[misc]
    callback.done()
    return rows


def runs_of(config: ClassificationConfig) -> dict[str, Change]:
    """Return the whole runs of a config's method."""
    if config.method.name == "recipe":
        return RUNS
    observed = {name: observing(config, share) for name, share in SHARES.items()}
    return {**PAPER, **observed}


def observing(config: ClassificationConfig, share: float) -> list[str]:
    """Return the overrides that evaluate the metric at a share of the T steps of as many tasks."""
    steps, strategy = config.finetune.steps, config.build_strategy()
    assert isinstance(strategy, Recipe)
    evals = steps + 1 if share == 1 else max(2, round(share * steps))
    queries = strategy.start_queries + strategy.size(config.queries)["tasks"] * evals
    return [f"method.evals={evals}", f"queries={queries}"]


def run(ready: ClassificationExperiment, seed: int, strategy: Any = None) -> Result:
    """Run the whole strategy, by default the config's, on separately counted queries."""
    task = ready.task.judged_by(ready.task.metric.with_settings())
    strategy = strategy or ready.config.build_strategy()
    assert isinstance(strategy, Recipe)
    return optimize_metric(task, queries=ready.config.queries, strategy=strategy, seed=seed, callback=Callback())


def whole(file: str, overrides: list[str], folder: Path, seed: int, change: Change) -> Row:
    """Run a changed config from the start, with the same trained classifier."""
    config = load_config(ClassificationConfig, file, [*overrides, *(change if isinstance(change, list) else ())])
    strategy = config.build_strategy()
    if isinstance(change, dict):
        strategy = replace(strategy, **change)
    elif isinstance(strategy, Recipe) and strategy.evals > strategy.steps:  # no label is interpolated
        strategy = replace(strategy, **OBSERVED)
    ready = ClassificationExperiment(config, folder, seed)
    result = run(ready, seed, strategy)
    assert result.fit is not None
    return Row(spearman(result.fit), test_metric(ready, result.ends["metricopt"]), sum(result.queries.values()))


def fitted(ready: ClassificationExperiment, result: Result, recipe: Recipe, seed: int) -> Row:
    """Fit a value function to the default's trajectories in another way, and follow it whether trusted or not."""
    assert result.setting is not None
    fit = recipe.fit(result.trajectories, seed)
    policy = recipe.policy(fit.f, result.setting, even_untrusted=True)
    return Row(spearman(fit), followed(ready, policy, recipe, seed), sum(result.queries.values()))


def followed(ready: ClassificationExperiment, policy: Policy, recipe: Recipe, seed: int) -> float:
    """Return the test metric at the end of a step rule."""
    return test_metric(ready, finetune(ready.task, policy, recipe.steps, seed)[-1])


def test_metric(ready: ClassificationExperiment, phi: Tensor) -> float:
    """Return the test metric at phi, ``d``."""
    task = ready.task.judged_by(ready.test_metric)
    return task.evaluate(phi, "ablation").value


def spearman(fit: Fit) -> float:
    """Return f's held-out rank correlation."""
    assert fit.f.quality is not None
    return fit.f.quality.spearman


def compared(content: dict[str, Any], task: str, variant: str) -> tuple[list[float], list[float]]:
    """Return a variant's differences from the default, seed by seed: of Spearman, and of the gain on test."""
    of_task = content["tasks"][task]
    rows, default = of_task["variants"][variant], of_task["variants"][DEFAULT]
    sign = 1 if of_task["maximize"] else -1
    return (
        [r["spearman"] - d["spearman"] for r, d in zip(rows, default, strict=True) if r["spearman"] is not None],
        [sign * (r["test"] - d["test"]) for r, d in zip(rows, default, strict=True)],
    )


def markdown(content: dict[str, Any]) -> str:
    """Return the content of ablations.md."""
    lines = [
        "# Ablations of Algorithm 1 as printed"
        if content.get("strategy") == "paper"
        else "# Ablations of the default recipe",
        "",
        f"{counted(len(content['seeds']), 'seed')} from {content['seeds'][0]} on, each a fresh split and model."
        " Differences from the default are paired, with 95% intervals; positive is better. An"
        f" interval that includes 0 shows nothing. Computed on {content['computed_on']}; other processors"
        " give other digits.",
    ]
    for task, of_task in content["tasks"].items():
        default = of_task["variants"][DEFAULT]
        lines += [
            "",
            f"## {in_markdown(task)}",
            "",
            f"Default: held-out Spearman {spread([row['spearman'] for row in default])}{simplest(default)}, test"
            f" {spread([row['test'] for row in default])}, {default[0]['queries']} queries.",
            "",
            "| change | queries | Spearman | gain on test |",
            "|---|---|---|---|",
        ]
        for variant, rows in of_task["variants"].items():
            if variant != DEFAULT:
                ranks, gains = compared(content, task, variant)
                lines.append(
                    f"| {variant} | {rows[0]['queries']} | {interval(ranks) if ranks else ''} | {interval(gains, 4)} |"
                )
    return "\n".join([*lines, ""])


def simplest(default: Sequence[dict[str, Any]]) -> str:
    """Say which trivial predictor ranks held-out points best, on average over seeds; nothing if none was measured."""
    means = {name: float(np.mean([row["trivial"][name] for row in default])) for name in default[0].get("trivial", {})}
    best = max(means, key=means.__getitem__, default=None)
    return "" if best is None else f" (best trivial predictor, {best.replace('_', ' ')}: {means[best]:.4f})"


def interval(differences: Sequence[float], digits: int = 2) -> str:
    """Format a mean and its paired 95% interval, which a single seed does not have."""
    mean, low, high = paired_interval(differences)
    ends = "" if math.isnan(low) else f" [{low:+.{digits}f}, {high:+.{digits}f}]"
    return f"{mean:+.{digits}f}{ends}"


def plot(content: dict[str, Any], path: Path) -> None:
    """Draw each variant's difference from the default, with its interval, one colour per task."""
    found = {name for of_task in content["tasks"].values() for name in of_task["variants"]} - {DEFAULT}
    tables = [*FITS, *STEPS, *RUNS, *PAPER, *OBSERVED]
    variants = [name for name in dict.fromkeys(tables) if name in found]
    figure, panels = new_figure(10.0, 1.2 + 0.21 * len(variants), 1, 2, sharey=True)
    colours = ("#c02942", "#2f6fa3", "#4f8f8b", "#d98c3f", "#8a6fb0")
    height, several = 0.7 / len(content["tasks"]), len(content["seeds"]) > 1
    means: tuple[list[float], list[float]] = [], []
    for number, task in enumerate(content["tasks"]):
        colour = colours[number % len(colours)]
        tests = [row["test"] for row in content["tasks"][task]["variants"][DEFAULT]]
        scale = (np.std(tests, ddof=1) if several else 1.0) or 1.0
        for row, variant in enumerate(variants):
            if variant not in content["tasks"][task]["variants"]:
                continue
            y = -row - height * (number - (len(content["tasks"]) - 1) / 2)
            differences = zip(panels.flat, means, compared(content, task, variant), (1.0, scale), strict=True)
            for axes, of_panel, values, unit in differences:
                if values:
                    mean, low, high = (value / unit for value in paired_interval(values))
                    of_panel.append(mean)
                    axes.plot([low, high], [y, y], color=colour, linewidth=1.0, alpha=0.6)
                    axes.plot(mean, y, "o", color=colour, markersize=3.5, label=task if row == 0 else None)
    gain = ("gain on test / std over seeds", 6) if several else ("gain on test", None)
    for axes, of_panel, (label, limit) in zip(panels.flat, means, (("held-out Spearman", 0.6), gain), strict=True):
        axes.axvline(0, color="black", linewidth=0.8)
        axes.set_xlabel(f"{label}, less the default's; higher is better", fontsize=8)
        if limit:  # a long interval may leave the panel, a mean may not
            limit = max(limit, 1.1 * max(map(abs, of_panel), default=0.0))
            axes.set_xlim(-limit, limit)
        axes.grid(axis="x", alpha=0.25)
    panels[0, 0].set_yticks([-row for row in range(len(variants))], variants, fontsize=7)
    panels[0, 0].set_ylim(-len(variants) + 0.3, 0.7)
    panels[0, 0].legend(fontsize=7, loc="lower left")
    over = f"over {len(content['seeds'])} seeds" if several else "of one seed, which has no interval"
    figure.suptitle(f"one change at a time; mean and paired 95% interval {over}", fontsize=9)
    save_figure(figure, path)


if __name__ == "__main__":
    main()
