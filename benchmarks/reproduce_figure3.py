r"""Run Algorithm 1 as printed at the paper's size, and without parts of it: the three panels of the paper's Fig. 3.

    python benchmarks/reproduce_figure3.py --output-dir out/figure3 data.root=FOLDER

The config is a9a's with class-balanced batches and 16 dynamic biases, as in the paper, and ``metric.name=f1``; T = 100
and K = 5, which is 5% of T. Each seed trains a model and collects the largest of --tasks loss-only trajectories. All
value functions but the one with ends at random are fitted to the same ones, or to the first of them. Each is then
followed from --starts new phi_0, with the loss's subspace (Algorithm 1) and without it ("metric only"); "loss only" is
SGD from there. The paper doesn't give alpha_t: each of `RATES` is tried, and the one whose ends have the best mean on
validation data is chosen. Prediction error and rank correlation are those on --held-out further loss-only trajectories.
Nothing is guarded: ends are judged as they are, on test data. Writes figure3.json, figure3.md and figure3.png; an
interrupted run goes on, seed by seed.
"""

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import spearmanr
from torch import Generator, Tensor

from as_printed import LITERAL, PARTS
from metricopt_ext.classification.config import ClassificationConfig
from metricopt_ext.classification.experiment import ClassificationExperiment
from metricopt_ext.errors import ValueFunctionError
from metricopt_ext.experiment.cli import RUNS_CODE
from metricopt_ext.experiment.command import errors_in_one_line
from metricopt_ext.experiment.output_folder import open_run
from metricopt_ext.experiment.seeds import paired_interval
from metricopt_ext.experiment.style import new_figure, save_figure
from metricopt_ext.methods.paper.recipe import FRESH, Algorithm1, GuidedESSteps
from metricopt_ext.runtime.identity import sole_writer
from metricopt_ext.search.guided_es import es_direction
from metricopt_ext.tasks.trajectories import Policy, Trajectory, TrajectoryStore, collect, rollout
from metricopt_ext.utils.config import load_config
from metricopt_ext.utils.device import choose_device
from metricopt_ext.utils.files import read_json, write_atomically, write_json
from metricopt_ext.utils.machine import Machine
from metricopt_ext.utils.seeding import generator
from metricopt_ext.utils.words import counted
from metricopt_ext.value.value_function import ValueFunction

CONFIG = "configs/classification/a9a.yaml"
PAPER = [
    *("metric.name=f1", "model.balanced=true", "balanced=true", "adapter.outputs=false", "finetune.lr=0.1"),
    *("seed=3000", "seeds=4", "method.name=paper", "finetune.steps=100", "method.evals=5", "queries=30000"),
]
PRINTED = "as printed"
# What Fig. 3 changes, at every number of tasks; the literal alternatives are for the smallest number of them.
SHOWN: dict[str, dict[str, Any]] = {
    PRINTED: {},
    "no ordinal term (3a)": PARTS["no ordinal term"],
    "no sigma (3b)": PARTS["no sigma"],
    "f trained offline, without Reptile (3b)": PARTS["f trained offline"],
    "Reptile, mixed batches": PARTS["Reptile, mixed batches"],
}
LOSS_ONLY = "loss only (3c)"
RATES = (0.01, 0.1, 1.0)  # alpha_t


def main() -> None:
    """Parse the command line, run all seeds, report."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=RUNS_CODE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output-dir", required=True, type=Path, help="folder for all output files")
    parser.add_argument("--tasks", type=int, nargs="+", default=[119, 1000], help="tasks to learn f from")
    parser.add_argument("--held-out", type=int, default=50, help="further trajectories, to judge f by")
    parser.add_argument("--starts", type=int, default=10, help="new phi_0 that follow each f")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings, after those of the paper")
    arguments = parser.parse_intermixed_args()
    for name in ("held_out", "starts"):
        if getattr(arguments, name) < 2:
            parser.error(f"--{name.replace('_', '-')} is {getattr(arguments, name)}; it must be at least 2")
    with errors_in_one_line(ValueError, keeps=arguments.output_dir):
        content = reproduce(
            arguments.overrides, arguments.output_dir, sorted(arguments.tasks), arguments.held_out, arguments.starts
        )
        print(markdown(content))


def reproduce(
    overrides: Sequence[str], folder: Path, sizes: Sequence[int], held_out: int, starts: int
) -> dict[str, Any]:
    """Run every seed that is not on file and write the report; returns its content."""
    config = load_config(ClassificationConfig, CONFIG, [*PAPER, *overrides])
    config.check()
    with sole_writer(folder):
        machine = str(Machine.current(choose_device(config.device), threads=1))
        asked = {"tasks": list(sizes), "held_out": held_out, "starts": starts}
        open_run(folder, {**config.as_dict(), **asked, "computed_on": machine}, resume=True, files=config.data_files())
        records = []
        for seed in range(config.seed, config.seed + config.seeds):
            file = folder / f"seed-{seed}" / "figure3.json"
            if not file.exists():
                write_json(file, run_seed(overrides, folder, seed, sizes, held_out, starts))
            records.append(read_json(file))
            print(f"seed {seed}: {records[-1]['seconds']:.0f} s", flush=True)
    content = {"machine": machine, "sizes": sizes, "starts": starts, "records": records}
    write_json(folder / "figure3.json", content)
    write_atomically(folder / "figure3.md", markdown(content).encode())
    plot(content, folder / "figure3.png")
    return content


class MetricOnly(GuidedESSteps):
    """Lines 10-15 without the loss: no gradient spans a subspace, so Sigma = I/d (Fig. 3c)."""

    def __call__(self, f: ValueFunction, recipe: Any, setting: Any, rng: Generator, even_untrusted: bool) -> Policy:
        """Return the step rule of one rollout, of the metric step alone."""

        def moved(phi: Tensor, history: Tensor, step: int) -> Tensor:
            none = history[..., :0, :]
            u = es_direction(f, phi, none, generator=rng, count=self.count, variance=self.variance)
            after: Tensor = phi - setting[1] * u
            return after

        return moved


def run_seed(
    overrides: Sequence[str], folder: Path, seed: int, sizes: Sequence[int], held_out: int, starts: int
) -> dict[str, Any]:
    """Return what a seed measures: of each variant and size f's error and rank correlation, and its ends."""
    began = time.perf_counter()
    config = load_config(ClassificationConfig, CONFIG, [*PAPER, *overrides])
    ready = ClassificationExperiment(config, folder / f"seed-{seed}", seed)
    settings = algorithm(overrides, {})
    phi = ready.task.starts(settings.start_std, seed, range(FRESH, FRESH + starts))

    def ends(policy: Policy, by_loss: bool = True) -> dict[str, list[float]]:
        if not by_loss:
            end = phi
            for step in range(settings.steps):
                end = policy(end, phi[:, None], step)
        else:
            own = range(FRESH, FRESH + starts)
            end = rollout(ready.task, phi, policy, steps=settings.steps, seed=seed, indices=own)[0][:, -1]
        return {name: values(judge, end) for name, judge in judges.items()}

    def values(judge: Any, points: Tensor) -> list[float]:
        return [judge.evaluate(point, "figure 3").value for point in points]

    judges = {"validation": ready.task, "test": ready.task.judged_by(ready.test_metric)}
    new = observed(ready, settings, range(FRESH, FRESH + held_out), seed)
    collected = {
        "observed": observed(ready, settings, range(sizes[-1]), seed),
        "random": observed(ready, algorithm(overrides, LITERAL["ends at random"]), range(sizes[0]), seed),
    }
    record: dict[str, Any] = {
        "trained": values(judges["test"], ready.task.origin()[None])[0],
        "starts": mean(values(judges["test"], phi)),
        LOSS_ONLY: {name: mean(each) for name, each in ends(settings.loss_only()).items()},
        "collected": time.perf_counter() - began,
        "variants": {},
    }
    sign = 1 if ready.test_metric.maximize else -1
    for size in sizes:
        for name, change in (SHOWN | (LITERAL if size == sizes[0] else {})).items():
            changed = algorithm(overrides, change)
            f = learned(changed, collected[changed.ends][:size], seed)
            row: dict[str, Any] = dict(zip(("error", "spearman"), judged(f, new), strict=True))
            assert isinstance(changed.follow, GuidedESSteps)
            for scheme, follow in (("guided", changed.follow), ("metric only", MetricOnly(**vars(changed.follow)))):
                found = {}
                for rate in RATES:
                    policy = follow(f, changed, (0.0, rate), generator(seed, "figure 3"), True)
                    reached = ends(policy, by_loss=follow is changed.follow)
                    found[rate] = {kind: mean(each) for kind, each in reached.items()}
                best = max(RATES, key=lambda rate: sign * found[rate]["validation"])
                row[scheme] = {"rate": best, "test": found[best]["test"], "boldest": found[max(RATES)]["test"]}
            record["variants"][f"{size} {name}"] = row
            print(f"  {size} {name}: {row}, {time.perf_counter() - began:.0f} s", flush=True)
    record["queries"] = {size: size * settings.evals for size in sizes}
    record["seconds"] = time.perf_counter() - began
    return record


def learned(settings: Algorithm1, trajectories: Sequence[Trajectory], seed: int) -> ValueFunction:
    """Return the f of `Algorithm1`, without the further networks that measure its quality.

    Raises:
        ValueFunctionError: All costs are equal.
    """
    data = settings.labels(trajectories)
    if data.cost.min() == data.cost.max():
        raise ValueFunctionError(
            f"all costs are {float(data.cost[0]):.6g}: train the model better, or start farther off"
        )
    return settings.learner(data, torch.full_like(data.trajectory, -1), 1, seed)


def algorithm(overrides: Sequence[str], change: Mapping[str, Any]) -> Algorithm1:
    """Return Algorithm 1 with other fields."""
    built = load_config(ClassificationConfig, CONFIG, [*PAPER, *overrides]).build_strategy()
    assert isinstance(built, Algorithm1)
    return replace(built, **change)


def observed(
    ready: ClassificationExperiment, settings: Algorithm1, indices: Sequence[int], seed: int
) -> list[Trajectory]:
    """Return loss-only trajectories with K observations each (Algorithm 1, line 3)."""
    return collect(
        ready.task,
        TrajectoryStore(),
        lambda chunk: settings.loss_only(),
        round=0,
        indices=indices,
        start_std=settings.start_std,
        steps=settings.steps,
        evals=settings.evals,
        seed=seed,
        ends=settings.ends,
    )


def judged(f: ValueFunction, trajectories: Sequence[Trajectory]) -> tuple[float, float]:
    """Return f's mean absolute error and its rank correlation at the observed points of trajectories."""
    phi = torch.cat([trajectory.observed_phi for trajectory in trajectories])
    cost = torch.cat([trajectory.cost for trajectory in trajectories])
    with torch.no_grad():
        predicted = f(phi).double()
    return float((predicted - cost).abs().mean()), float(spearmanr(predicted, cost).statistic)


def mean(values: Sequence[float]) -> float:
    """Return the mean."""
    return float(np.mean(values))


def of_seeds(content: dict[str, Any], variant: str, kind: str, scheme: str = "") -> list[float]:
    """Return a number of each seed."""
    rows = [record["variants"][variant] for record in content["records"]]
    return [(row[scheme] if scheme else row)[kind] for row in rows]


def with_error(values: Sequence[float], digits: int = 4) -> str:
    """Return the mean with its standard error over the seeds, which a single one doesn't have."""
    error = f" ±{np.std(values, ddof=1) / len(values) ** 0.5:.{digits}f}" if len(values) > 1 else ""
    return f"{np.mean(values):.{digits}f}{error}"


def markdown(content: dict[str, Any]) -> str:
    """Return the content of figure3.md."""
    records = content["records"]
    whole = {name: with_error([record[name] for record in records]) for name in ("trained", "starts")}
    loss = [record[LOSS_ONLY]["test"] for record in records]
    seconds = {kind: ", ".join(f"{record[kind]:.0f}" for record in records) for kind in ("seconds", "collected")}
    lines = [
        f"{counted(len(records), 'seed')}, {counted(content['starts'], 'start')} each; mean and standard error over"
        f" seeds. Test: trained {whole['trained']}, starts {whole['starts']}, {LOSS_ONLY} {with_error(loss)}."
        f" Seconds a seed: {seconds['seconds']}, of which {seconds['collected']} to train the model and collect."
        f" Computed on {content['machine']}.",
        "",
        f"| tasks, f | prediction error | Spearman | test at alpha_t = {max(RATES):g} | test, alpha_t chosen"
        " | less loss only | metric only (3c) |",
        "|---|---|---|---|---|---|---|",
    ]
    for variant in records[0]["variants"]:
        error, spearman = (of_seeds(content, variant, kind) for kind in ("error", "spearman"))
        test, boldest = (of_seeds(content, variant, kind, "guided") for kind in ("test", "boldest"))
        alone = of_seeds(content, variant, "test", "metric only")
        gain, low, high = paired_interval([a - b for a, b in zip(test, loss, strict=True)])
        interval = f" [{low:+.4f}, {high:+.4f}]" if len(loss) > 1 else ""
        lines.append(
            f"| {variant} | {with_error(error, 3)} | {with_error(spearman, 2)} | {with_error(boldest)}"
            f" | {with_error(test)} | {gain:+.4f}{interval} | {with_error(alone)} |"
        )
    variants = records[0]["variants"]
    errors = [value for variant in variants for value in of_seeds(content, variant, "error")]
    with_tests = [
        spearmanr(errors, [value for variant in variants for value in of_seeds(content, variant, kind, "guided")])[0]
        for kind in ("boldest", "test")
    ]
    lines += [
        "",
        f"Spearman of prediction error and test over all rows and seeds: {with_tests[0]:+.2f} at alpha_t ="
        f" {max(RATES):g},"
        f" {with_tests[1]:+.2f} where it is chosen.",
    ]
    return "\n".join([*lines, ""])


def plot(content: dict[str, Any], path: Path) -> None:
    """Draw the test metric against f's prediction error, a point for each f and seed (Fig. 3b)."""
    figure, panels = new_figure(6.0, 4.0, 1, 1)
    axes = panels[0, 0]
    for size, marker in zip(content["sizes"], "osv^", strict=False):
        for number, name in enumerate(PARTS | LITERAL):
            if (variant := f"{size} {name}") in content["records"][0]["variants"]:
                x, y = of_seeds(content, variant, "error"), of_seeds(content, variant, "boldest", "guided")
                axes.plot(x, y, marker, color=f"C{number}", markersize=4, label=variant)
    axes.set_xscale("log")
    axes.set_xlabel("f's mean absolute error on new trajectories")
    axes.set_ylabel(f"test metric at the end, alpha_t = {max(RATES):g}")
    axes.legend(fontsize=5)
    save_figure(figure, path)


if __name__ == "__main__":
    main()
