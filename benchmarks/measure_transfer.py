r"""Measure what a value function is worth on another network, other data or another metric (paper, Table 4).

    python benchmarks/measure_transfer.py --task classification --config-file configs/classification/a9a.yaml \
        --output-dir out/a9a --from metric.name=mcr --to metric.name=f1 seeds=10 data.root=FOLDER

Each seed makes two tasks, of the same matrices where the layers are the same. On the first f is learned by --learners,
on the second a fresh one, by as many queries. On the second phi is finetuned from 0 under the loss alone, under the
fresh f, under the first one's (transferred), and under this one turned at random (placebo): without a query, without
a guard. Besides phi itself, f is learned of two descriptions of what phi does (--inputs;
`described_change`), on the trajectories of the recipe. Writes transfer.json: test metrics, and how well the first one's
f ranks the points that were observed on the second. A seed that is on file is not run again.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from described_change import DescribedValueFunction, Description, LayerChange, OutputChange
from kept import kept_json
from metricopt_ext.adapters.start import Start
from metricopt_ext.classification.models import SmallCNN
from metricopt_ext.errors import ConfigError
from metricopt_ext.experiment.baselines import loss_path
from metricopt_ext.experiment.cli import RUNS_CODE, TASKS, experiment_of
from metricopt_ext.experiment.command import errors_in_one_line
from metricopt_ext.experiment.compare import judge
from metricopt_ext.experiment.experiment import Experiment
from metricopt_ext.experiment.method_config import method_named
from metricopt_ext.experiment.output_folder import open_run
from metricopt_ext.experiment.run_config import RunConfig
from metricopt_ext.experiment.seeds import standard_error
from metricopt_ext.experiment.style import direction, print_table
from metricopt_ext.methods.paper.recipe import Recipe, finetune, meta_train
from metricopt_ext.runtime.identity import sole_writer
from metricopt_ext.search.optimizer import LOSS_WEIGHT, METRIC_STEP, MetricOptStep
from metricopt_ext.tasks.task import FinetuneTask
from metricopt_ext.tasks.trajectories import TrajectoryStore
from metricopt_ext.utils.config import load_config
from metricopt_ext.utils.files import write_json
from metricopt_ext.value.fitting import fit_value_function, measure
from metricopt_ext.value.observations import Observations
from metricopt_ext.value.value_function import ValueFunction
from rotated import RotatedValueFunction

BATCHNORM = "batchnorm"  # re-estimated on the deployment's inputs
SEEN = 256  # inputs of a description, at most
KINDS = {"seed": int, "test": dict, "ranks": dict, "queries": dict, "seconds": float}
DESCRIPTIONS: dict[str, Callable[[Experiment[Any]], Description]] = {
    "layers": lambda each: LayerChange(each.task, _inputs(each)),
    "outputs": lambda each: OutputChange(each.task, _inputs(each), embeds=each.describe(each.config).task[:3] == "ret"),
}


def main() -> None:
    """Parse the command line, run all seeds, report."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=RUNS_CODE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--task", choices=TASKS, required=True, help="whose config the next option names")
    parser.add_argument("--config-file", required=True, help="YAML file of a finetune tool")
    parser.add_argument("--output-dir", required=True, type=Path, help="folder for all output files")
    parser.add_argument("--from", dest="source", nargs="*", default=[], help="key=value, of the first task alone")
    parser.add_argument("--to", dest="target", nargs="*", default=[], help="key=value, of the second task alone")
    parser.add_argument("--learners", nargs="*", default=["recipe", "paper"], choices=["recipe", "paper"])
    parser.add_argument("--inputs", nargs="*", default=list(DESCRIPTIONS), choices=DESCRIPTIONS)
    parser.add_argument("--both", nargs="*", default=[], help="key=value, of both tasks, e.g. seeds=5")
    arguments = parser.parse_args()
    with errors_in_one_line(ValueError):
        kind = experiment_of(arguments.task)
        configs = [
            load_config(kind.config_type, arguments.config_file, ["method.name=recipe", *arguments.both, *own])
            for own in (arguments.source, arguments.target)
        ]
        measure_transfer(kind, configs[0], configs[1], arguments.learners, arguments.inputs, arguments.output_dir)


def measure_transfer(
    kind: type[Experiment[Any]],
    source: RunConfig,
    target: RunConfig,
    learners: list[str],
    inputs: list[str],
    folder: Path,
) -> dict[str, Any]:
    """Run every seed and write the report; returns its content."""
    for each in (source, target):
        each.check()
    if inputs and "recipe" not in learners:
        raise ConfigError("--inputs describe the recipe's trajectories; name recipe among --learners")
    subject, rows = kind.describe(target), []
    run = partial(run_seed, kind, (source, target), learners, inputs, folder)
    with sole_writer(folder):
        settings = {"from": source.as_dict(), "learners": learners, "inputs": inputs, **target.as_dict()}
        open_run(folder, settings, resume=True, files=[*source.data_files(), *target.data_files()])
        for seed in range(target.seed, target.seed + target.seeds):
            rows.append(kept_json(folder / f"seed-{seed}" / "row.json", KINDS, partial(run, seed)))
            print(f"seed {seed}: {rows[-1]['seconds']:.0f} s", flush=True)
    sign = 1 if subject.maximize else -1
    tests = {name: np.array([row["test"][name] for row in rows]) for name in rows[0]["test"]}
    gains = {}
    for name in tests:
        learner, _, what = name.partition(", ")
        if what == "transferred":
            free = [each for each in ("pretrained", "loss", BATCHNORM) if each in tests]
            for other in (*free, f"{learner}, fresh", f"{learner}, placebo"):
                gain = (sign * (tests[name] - tests[other])).tolist()
                gains[f"{name} over {other}"] = {"mean": float(np.mean(gain)), "error": standard_error(gain)}
    ranks = {name: float(np.mean([row["ranks"][name] for row in rows])) for name in rows[0]["ranks"]}
    content = {
        "task": subject.task,
        "metric": {"name": subject.metric, "maximize": subject.maximize},
        "test": {name: {"mean": float(values.mean())} for name, values in tests.items()},
        "gains": gains,
        "ranks": ranks,
        "per_seed": rows,
        "configs": [source.as_dict(), target.as_dict()],
    }
    write_json(folder / "transfer.json", content)
    title = f"{subject.title}: test {subject.metric} ({direction(subject.maximize)}), {len(rows)} seeds"
    print_table(["end", "test"], [[name, f"{values.mean():.4f}"] for name, values in tests.items()], title=title)
    table = [[name, f"{each['mean']:+.4f} ±{each['error']:.4f}"] for name, each in gains.items()]
    print_table(["gain, positive is better", "mean ±standard error"], table, title="paired by seed")
    print_table(["f", "Spearman"], [[k, f"{v:.2f}"] for k, v in ranks.items()], title="how f ranks points")
    return content


def run_seed(
    kind: type[Experiment[Any]],
    configs: tuple[RunConfig, RunConfig],
    learners: list[str],
    inputs: list[str],
    folder: Path,
    seed: int,
) -> dict[str, Any]:
    """Return what comes out for a seed."""
    began = time.perf_counter()
    sides = [
        kind(each, folder / f"seed-{seed}" / name, seed) for each, name in zip(configs, ("from", "to"), strict=True)
    ]
    first, second = sides
    if first.task.dim != second.task.dim:
        raise ConfigError(f"phi has dimension {first.task.dim} and {second.task.dim}; give both tasks one adapter.dim")
    target, config = second.task, second.config
    ends: dict[str, Tensor] = {"pretrained": target.origin(), "loss": loss_path(target, config.finetune, seed)[-1]}
    ranks: dict[str, float] = {}
    seen: list[Observations] = []
    for learner in learners:
        found = [learned(each, learner, seed) for each in sides]
        seen = [data for _, data in found] if learner == "recipe" else seen
        (moved, _), (fresh, data) = found
        moved.signature = fresh.signature = None
        own = with_method(config, learner)
        fs = {"fresh": fresh, "transferred": moved, "placebo": RotatedValueFunction(moved, seed)}
        for name, f in fs.items():
            ends[f"phi by {learner}, {name}"] = followed(own, f, target, target.origin(), seed)[-1]
            ranks[f"phi by {learner}, {name}"] = ranked(f, data) if name != "fresh" else _spearman_of(f)
    for name in inputs:
        for what, f in described(name, sides, seen, seed).items():
            steps, lr = config.finetune.steps, config.finetune.lr
            policy = MetricOptStep(f, lr, steps=steps, even_untrusted=True)
            ends[f"{name}, {what}"] = finetune(target, policy, steps, seed)[-1].detach()
            ranks[f"{name}, {what}"] = ranked(f, seen[1]) if what != "fresh" else _spearman_of(f)
    tested = target.judged_by(second.test_metric)
    test = {name: judge(tested, phi.detach()) for name, phi in ends.items()}
    if isinstance(start := second.start("batchnorm"), Start):  # which the inputs alone give, for nothing
        test[BATCHNORM] = judge(tested, start)
    return {
        "seed": seed,
        "test": test,
        "ranks": ranks,
        "queries": {name: each.task.metric.ledger.spent for name, each in zip(("from", "to"), sides, strict=True)},
        "seconds": time.perf_counter() - began,
    }


def with_method(config: RunConfig, name: str) -> RunConfig:
    """Return a recipe's config with this method in its place."""
    method = config.method if name == config.method.name else method_named(name)
    return replace(config, method=method)


def followed(config: RunConfig, f: ValueFunction, task: FinetuneTask, start: Tensor, seed: int) -> Tensor:
    """Finetune under f as the run's own method would; returns the visited phi, ``(T + 1) x d``. No query.

    Args:
        config: The run's settings.
        f: The value function, of no known adapter.
        task: What is finetuned.
        start: phi_0, ``d``.
        seed: Seed of batches and perturbations.
    """
    strategy = config.build_strategy()
    assert isinstance(strategy, Recipe)
    setting = (LOSS_WEIGHT, METRIC_STEP) if config.method.name == "recipe" else strategy.settings[0]
    return finetune(task, strategy.policy(f, setting, seed=seed, even_untrusted=True), strategy.steps, seed, start)


def learned(experiment: Experiment[Any], learner: str, seed: int) -> tuple[ValueFunction, Observations]:
    """Learn f on an experiment's task by the config's queries; returns it and the points that were observed."""
    config, store = experiment.config, TrajectoryStore()
    strategy = with_method(config, learner).build_strategy()
    assert isinstance(strategy, Recipe)
    tasks = strategy.size(config.queries)["tasks"]
    fit = meta_train(experiment.task, tasks=tasks, recipe=strategy, seed=seed, store=store)
    return fit.f, Observations.of(list(store))


def described(
    name: str, sides: list[Experiment[Any]], seen: list[Observations], seed: int
) -> dict[str, DescribedValueFunction]:
    """Learn f of a description on both tasks; returns it as followed on the second."""
    describes, recipe = [DESCRIPTIONS[name](each) for each in sides], sides[1].config.build_strategy()
    assert isinstance(recipe, Recipe)
    fits = []
    for describe, data in zip(describes, seen, strict=True):
        with torch.no_grad():
            points = describe(data.phi).float()
        scale = points.std(0).clamp(min=1e-6)
        folds = recipe.folds_for(int(data.trajectory.max()) + 1)
        scaled = replace(data, phi=points / scale, signature=None)
        f = fit_value_function(scaled, recipe.learner, folds=folds, seed=seed).f
        fits.append((f, scale, float(data.phi.norm(dim=1).quantile(0.95))))
    (moved, scale, radius), (fresh, own_scale, own_radius) = fits
    there = describes[1]
    return {
        "fresh": DescribedValueFunction(fresh, there, own_scale, own_radius),
        "transferred": DescribedValueFunction(moved, there, scale, radius),
        "placebo": DescribedValueFunction(RotatedValueFunction(moved, seed), there, scale, radius),
    }


@torch.no_grad()
def ranked(f: ValueFunction, data: Observations) -> float:
    """Return Spearman's rank correlation of f with the costs of the points that were observed where it is used."""
    used = data.where_used()
    return measure(f(data.phi[used]), data.cost[used], data.trajectory[used]).spearman


def wide_cnn(outputs: int, input_shape: Sequence[int]) -> nn.Module:
    """Build the small CNN twice as wide: ``model.name=measure_transfer:wide_cnn model.folder=benchmarks``."""
    return SmallCNN(input_shape[0], outputs, width=32)


def _spearman_of(f: ValueFunction) -> float:
    return float("nan") if f.quality is None else f.quality.spearman


def _inputs(experiment: Experiment[Any]) -> Tensor:
    x: Tensor = experiment.splits.validation.x  # type: ignore[attr-defined]
    return x[:SEEN]


if __name__ == "__main__":
    main()
