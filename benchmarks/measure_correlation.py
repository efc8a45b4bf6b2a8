r"""Measure how well losses rank a classifier's outputs as its metric does: a learned ReLoss, cross-entropy, 1 - p.

    python benchmarks/measure_correlation.py --config-file benchmarks/configs/siblings/reloss_digits.yaml \
        --output-dir out/digits
    python benchmarks/measure_correlation.py --config-file benchmarks/configs/siblings/reloss_cifar10.yaml \
        --output-dir out/cifar10 data.root=FOLDER seeds=5

Each seed learns a relational loss from random outputs and from a network's on train data, at checkpoints of its
training (siblings.reloss in the config). Then another network is trained, and its outputs on test data at its own
checkpoints, in batches of 100, are ranked by the losses and by the metric; 1 - p is the mean of the probabilities of
all classes but the true one. Neither that network nor that data had a part in learning the loss.
Writes correlation.json, correlation.md, and for each seed a plot and the loss; what is measured is one query of the
batch metric for each batch, none of the metric of a model. The same command goes on with an interrupted run, seed by
seed, and adds seeds to a finished one.
"""

import argparse
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from correlation import CorrelationReport, correlation_report
from kept import kept_json
from metricopt_ext.classification.classifier import untrained
from metricopt_ext.classification.config import ClassificationConfig
from metricopt_ext.classification.experiment import SIBLING_BATCH
from metricopt_ext.classification.losses import cross_entropy
from metricopt_ext.classification.named_loss import named_loss
from metricopt_ext.classification.named_metric import build_metric, try_metric
from metricopt_ext.classification.split_metric import batch_metric, model_metric
from metricopt_ext.classification.splits import load_splits
from metricopt_ext.classification.targets import Target
from metricopt_ext.errors import ConfigError
from metricopt_ext.experiment.cli import RUNS_CODE
from metricopt_ext.experiment.command import errors_in_one_line
from metricopt_ext.experiment.output_folder import open_run
from metricopt_ext.experiment.seeds import paired_interval, spread
from metricopt_ext.experiment.siblings import SiblingsConfig
from metricopt_ext.experiment.style import direction, markdown_table, new_figure, print_table, save_figure
from metricopt_ext.plain import in_markdown, plain
from metricopt_ext.runtime.identity import sole_writer
from metricopt_ext.runtime.parallel import run_seeds
from metricopt_ext.runtime.progress import Callback
from metricopt_ext.siblings.block_batches import BlockBatches
from metricopt_ext.siblings.reloss.ranked_batches import true_class_log_probability
from metricopt_ext.siblings.reloss.relational_loss import RelationalLoss
from metricopt_ext.siblings.reloss.reloss import ReLoss
from metricopt_ext.siblings.training import TrainingTask
from metricopt_ext.utils.config import load_config
from metricopt_ext.utils.device import choose_device
from metricopt_ext.utils.files import write_atomically, write_json
from metricopt_ext.utils.machine import Machine
from metricopt_ext.utils.seeding import generator, seeded_streams
from metricopt_ext.utils.versions import versions
from metricopt_ext.utils.words import counted

OTHER = 100_000  # what is added to a seed for the network whose outputs are judged
HEADER = ("loss", "Spearman", "Kendall")
KINDS = {"correlations": dict, "outputs": int, "batch_queries": int, "seconds": float}  # of a seed's file


def stratified_parts(y: Tensor, size: int, seed: int) -> list[Tensor]:
    """Divide examples at random into parts with about the same share of each class.

    Args:
        y: Labels, ``n``.
        size: Examples in a part, about; parts are larger where a class would be missing from some otherwise.
        seed: Seed of the division.

    Returns:
        The indices of each part.
    """
    order = torch.randperm(len(y), generator=generator(seed, "parts")).to(y.device)
    if y.dim() > 1:  # no classes
        return list(order.chunk(max(1, len(y) // size)))
    order = order[y[order].argsort(stable=True)]  # class by class, in random order within each
    parts = max(1, min(len(y) // size, int(y.unique(return_counts=True)[1].min())))
    return [order[i::parts] for i in range(parts)]


def main() -> None:
    """Parse the command line, run all seeds, report."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=RUNS_CODE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config-file", required=True, help="YAML file; its keys are those of ClassificationConfig")
    parser.add_argument("--output-dir", required=True, type=Path, help="folder for all output files")
    parser.add_argument("overrides", nargs="*", help="key=value, e.g. seeds=5 data.root=FOLDER")
    arguments = parser.parse_intermixed_args()
    with errors_in_one_line():
        config = load_config(ClassificationConfig, arguments.config_file, arguments.overrides)
        measure_correlation(config, arguments.output_dir)


def measure_correlation(config: ClassificationConfig, folder: Path) -> dict[str, Any]:
    """Run every seed and write the report; returns its content."""
    config.check()
    siblings, reloss = settings_of(config)
    siblings.check(["reloss"])
    spec, seeds = build_metric(config.metric), range(config.seed, config.seed + config.seeds)
    with sole_writer(folder):
        machine = Machine.current(choose_device(config.device), config.threads)
        open_run(folder, {**config.as_dict(), "computed_on": str(machine)}, resume=True, files=config.data_files())
        run = partial(run_seed, config, folder)
        most = reloss.source.training + reloss.source.heldout
        rows = run_seeds(run, seeds, queries=most, workers=config.workers, threads=config.threads, metric="Spearman")
    losses = list(rows[0]["correlations"])
    baselines = [name for name in losses if name != "ReLoss"]
    gains = {
        name: [row["correlations"]["ReLoss"]["spearman"] - row["correlations"][name]["spearman"] for row in rows]
        for name in baselines
    }
    intervals = {name: paired_interval(each) for name, each in gains.items()}
    content = {
        "metric": {"name": spec.name, "maximize": spec.maximize},
        "seeds": list(seeds),
        "per_seed": rows,
        "gains": {name: interval._asdict() for name, interval in intervals.items()},
        "machine": vars(machine),
        "versions": versions(),
        "config": config.as_dict(),
    }
    table = [
        [name, *(spread([row["correlations"][name][key] for row in rows]) for key in ("spearman", "kendall"))]
        for name in losses
    ]
    queries, seconds = (np.mean([row[key] for row in rows]) for key in ("batch_queries", "seconds"))
    notes = [
        *(gain_note(name, intervals[name], gains[name]) for name in baselines),
        f"Learning it took {queries:.0f} batch queries and {seconds:.1f} seconds a seed, its network's training"
        f" included; judged on {rows[0]['outputs']} batches of test data a seed. Computed on {machine}.",
    ]
    title = f"Losses against {spec.name} ({direction(spec.maximize)}): {config.model.name} on {config.data.name}"
    lines = [f"# {in_markdown(title)}", "", *markdown_table(HEADER, table), ""]
    lines += [*(f"- {in_markdown(note)}" for note in notes), ""]
    write_json(folder / "correlation.json", content)
    write_atomically(folder / "correlation.md", "\n".join(lines).encode())
    print_table(HEADER, table, title=title)
    print(*map(plain, notes), sep="\n")
    return content


def settings_of(config: ClassificationConfig) -> tuple[SiblingsConfig, ReLoss]:
    """Return how ReLoss learns.

    Raises:
        ConfigError: It is not among the config's methods, so that there are no settings of it.
    """
    if config.siblings is None or "reloss" not in config.methods:
        raise ConfigError(f"methods={config.methods}: it must name reloss, whose settings are read here")
    method = config.siblings.build("reloss")
    assert isinstance(method, ReLoss)
    return config.siblings, method


def gain_note(baseline: str, gain: Any, gains: list[float]) -> str:
    """Return a sentence about how far ReLoss's Spearman is above a baseline's, over seeds."""
    interval = f", 95% interval [{gain.low:+.4f}, {gain.high:+.4f}]" if len(gains) > 1 else ""
    return (
        f"ReLoss's Spearman above that of {baseline}: {gain.mean:+.4f}{interval}, over {counted(len(gains), 'seed')}"
        f" ({', '.join(f'{each:+.4f}' for each in gains)})."
    )


def run_seed(config: ClassificationConfig, folder: Path, seed: int, callback: Callback) -> dict[str, Any]:
    """Return what comes out for a seed, from its file if it is there."""
    file = folder / f"seed-{seed}.json"
    callback.stage("on file" if file.exists() else "random outputs")
    row = kept_json(file, KINDS, lambda: learn_and_judge(config, folder, seed, callback))
    callback.query(row["batch_queries"], row["correlations"]["ReLoss"]["spearman"])
    callback.done()
    return row


def learn_and_judge(config: ClassificationConfig, folder: Path, seed: int, callback: Callback) -> dict[str, Any]:
    """Learn a loss, judge it on another network's outputs, and return what came out."""
    device = choose_device(config.device)
    splits = load_splits(config, seed).to(device)
    try_metric(config.metric, splits.test, Target("classes", splits.num_classes))
    spec, (_, reloss) = build_metric(config.metric), settings_of(config)
    task = TrainingTask(
        untrained(config, splits, seed),
        trains="model",
        batches=BlockBatches(splits.train.x, splits.train.y, SIBLING_BATCH, balanced=True),
        predict=lambda model, batch: (model(batch[0]), batch[1]),
        batch_metric=batch_metric(spec),
        metric=model_metric(spec, splits.validation),
        loss=named_loss(config, Target("classes", splits.num_classes)),
        build=lambda number: untrained(config, splits, number),
    )
    began = time.perf_counter()
    with seeded_streams(seed, device):
        loss = RelationalLoss(spec.name, reloss.training.absolute).to(task.parameters()[0])
        training, heldout = reloss.source.draw(task, seed, callback)
        history = reloss.training.learn(loss, training, heldout, seed=seed, callback=callback)
    seconds = time.perf_counter() - began
    loss.save(folder / f"seed-{seed}.safetensors")
    callback.stage("another network")
    report = judged(config, task, loss, splits.test, seed)
    plot(report, folder / f"seed-{seed}.png")
    return {
        "correlations": report.to_json()["correlations"],
        "outputs": len(report.values),
        "batch_queries": task.batch_metric.ledger.spent,
        "seconds": seconds,
        "history": history,
    }


def plot(report: CorrelationReport, path: Path) -> None:
    """Draw the metric of each output over each loss of it, a panel for each loss."""
    figure, (row,) = new_figure(max(4.0, 3.4 * len(report.losses)), 3.6, columns=len(report.losses), sharey=True)
    for axes, (name, each) in zip(row, report.correlations.items(), strict=True):
        axes.plot(report.losses[name], report.values, ".", color="#1b7f79", alpha=0.4, markersize=4, markeredgewidth=0)
        axes.set_title(f"Spearman {each.spearman:.4f}, Kendall {each.kendall:.4f}", fontsize=9)
        axes.set_xlabel(name)
    row[0].set_ylabel(f"{report.metric} ({direction(report.maximize)})")
    figure.suptitle(f"{counted(len(report.values), 'batch')} of outputs", fontsize=9)
    save_figure(figure, path)


def judged(
    config: ClassificationConfig, task: TrainingTask, loss: RelationalLoss, test: Any, seed: int
) -> CorrelationReport:
    """Correlate the losses with the metric on test data, as another network predicts it while it is trained."""
    _, reloss = settings_of(config)
    rows, outputs = stratified_parts(test.y, SIBLING_BATCH, seed), []
    with seeded_streams(seed + OTHER, task.device):
        for model in reloss.source.checkpoints.models(task, seed + OTHER):
            with torch.no_grad():
                outputs += [(model(test.x[part]), test.y[part]) for part in rows]
    metric = task.batch_metric.with_new_ledger()
    return correlation_report(
        {"cross-entropy": cross_entropy, "1 - p": expected_error, "ReLoss": loss}, metric, outputs
    )


def expected_error(scores: Tensor, labels: Tensor) -> Tensor:
    """Return the mean probability that scores give to other classes than the true one: the smoothed error rate."""
    return 1 - true_class_log_probability(scores, labels).exp().mean()


if __name__ == "__main__":
    main()
