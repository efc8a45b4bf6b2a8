"""The sibling methods in a task's tool: their settings, and each as a method of a comparison."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from metricopt_ext.errors import ConfigError
from metricopt_ext.experiment.brought_sections import either
from metricopt_ext.experiment.method import METHODS, SIBLINGS, Baseline, Reached, Started, now
from metricopt_ext.experiment.style import new_figure, save_figure
from metricopt_ext.runtime.progress import Callback
from metricopt_ext.siblings.ala.ala import AdaptiveLossAlignment
from metricopt_ext.siblings.ala.loss_policy import load_loss_policy
from metricopt_ext.siblings.kept import Measured, keep, load_trained
from metricopt_ext.siblings.reloss.relational_loss import load_relational_loss
from metricopt_ext.siblings.reloss.reloss import ReLoss
from metricopt_ext.siblings.sibling import Sibling
from metricopt_ext.siblings.sl.set_loss import load_set_loss
from metricopt_ext.siblings.sl.surrogate_learning import SurrogateLearning
from metricopt_ext.siblings.training import TrainingTask
from metricopt_ext.tasks.task import FinetuneTask
from metricopt_ext.utils.checks import check_integer
from metricopt_ext.utils.config import config_section
from metricopt_ext.utils.described import changed, read_shaped
from metricopt_ext.utils.extras import require

TRAINS = ("phi", "model", "scratch")


# By argument, the methods that alone read it of those that share a section.
READERS = {
    "begin": ("sl_u", "sl_r", "reloss", "reloss_only", "ala", "ala_mixture", "ala_focal"),
    "judged": ("sl_s", "sl_r"),
    "first": ("sl_s", "sl_r"),
    "link": ("ala",),
    "lowest": ("ala",),
    "controller": ("ala",),
    "offset": ("ala_focal",),
}
OWN = ("surrogate", "cross_entropy", "loss", "fresh_children")  # what tells the methods of a section apart


@dataclass
class EmbedderSiblingsConfig:
    """How the sibling methods among ``methods`` run that train embedders."""

    # What they train: phi (the model stays frozen), model (all weights, from the trained model on) or scratch (all
    # weights of an untrained one, as in their papers).
    trains: str = "phi"
    # Arguments of `AdaptiveLossAlignment`, e.g. {children: 4}; begin is a file, ala.safetensors of another run
    ala: dict[str, Any] = field(default_factory=dict)

    def build(self, name: str) -> Sibling:
        """Return a method of `SIBLINGS` with these settings.

        Raises:
            ConfigError: An argument is unknown, of another type or out of range.
            FileFormatError: A file can't be read.
        """
        method = SIBLINGS[name]
        section, load = _section_of(method)
        given = dict(getattr(self, section))
        if isinstance(method, ReLoss):
            require("diffsort")  # which ranks batches once a network is trained
        elif isinstance(method, AdaptiveLossAlignment):
            method = replace(method, fresh_children=self.trains == "scratch")
        with config_section(f"siblings.{section}"):
            begin = given.pop("begin", None)
            if begin and name in READERS["begin"]:
                given["begin"] = load(begin)
            return changed(method, given, OWN)

    def check(self, names: list[str]) -> None:
        """Reject what would only fail after work has been done.

        Args:
            names: The methods that run.

        Raises:
            ConfigError: A value is out of range, or set for a method that does not run.
            FileFormatError: A file can't be read.
        """
        if self.trains not in TRAINS:
            raise ConfigError(f"siblings.trains={self.trains!r}: it must be one of {', '.join(TRAINS)}")
        for section in (each.name for each in fields(self) if isinstance(getattr(self, each.name), dict)):
            sharing = [name for name, method in SIBLINGS.items() if _section_of(method)[0] == section]
            for key, value in getattr(self, section).items():
                readers = [name for name in sharing if name in READERS.get(key, sharing)]
                if not {*readers} & {*names}:
                    raise ConfigError(
                        f"siblings.{section}.{key}={value} is a key of {either(readers)} among methods; this run has"
                        f" methods=[{','.join(names)}]: leave it out"
                    )
        for name in names:
            self.build(name)


@dataclass
class SiblingsConfig(EmbedderSiblingsConfig):
    """How the sibling methods among ``methods`` run that train classifiers."""

    # Queries for the threshold on a single logit, once trained; 0: none, as for metrics of the order alone (auc, ...)
    threshold_evals: int = 101
    # Arguments of `SurrogateLearning` and of `ReLoss`, e.g. {iterations: 30000, universal: {steps: 300000}}
    sl: dict[str, Any] = field(default_factory=dict)
    reloss: dict[str, Any] = field(default_factory=dict)

    def check(self, names: list[str]) -> None:
        """Reject what would only fail after work has been done; see `EmbedderSiblingsConfig.check`."""
        with config_section("siblings"):
            check_integer(0, threshold_evals=self.threshold_evals)
        super().check(names)


def _section_of(method: Sibling) -> tuple[str, Callable[[Path | str], Any]]:
    """Return the section of a method's arguments, and what reads the file that it may begin with."""
    if isinstance(method, SurrogateLearning):
        return "sl", load_set_loss
    return ("reloss", load_relational_loss) if isinstance(method, ReLoss) else ("ala", load_loss_policy)


def training(
    name: str,
    method: Sibling,
    make: Callable[[FinetuneTask], TrainingTask],
    tune: Callable[[FinetuneTask, nn.Module], nn.Module | None] = lambda task, model: None,
    *,
    folder: Path,
    resume: bool = False,
    callback: Callback | None = None,
) -> Baseline:
    """Make a baseline of a sibling method: train, keep what came out in the folder, then tune the threshold.

    Its queries follow from its settings. It says where it stood before the threshold too.

    Args:
        name: Its name in `METHODS` and of its files.
        method: The sibling method.
        make: Makes its task of the comparison's.
        tune: Tunes what it trained by queries of the task's metric; returns None where that does not apply.
        folder: Receives its files.
        resume: Take what a finished training left there.
        callback: Notified of its progress.
    """
    callback = callback or Callback()

    def run(task: FinetuneTask, started: Started, budgets: Sequence[int], seed: int) -> Iterator[Reached]:
        with started.there(task) as there:
            training_task = make(there)
            trained = load_trained(training_task.copied().model, folder, name) if resume else None
            if trained is None:
                callback.say(f"{METHODS[name].title}: its training begins anew if it is stopped")
                trained = method.train(training_task, seed=seed, callback=callback)
                keep(trained, folder, name)
        queries, on_batches = sum(trained.queries.values()), sum(trained.batch_queries.values())
        yield Reached(trained.model, queries, queries, trained.seconds, batch_queries=on_batches)
        before, began = task.metric.ledger.spent, now()
        if (tuned := tune(task, trained.model)) is not None:
            queries += task.metric.ledger.spent - before
            yield Reached(tuned, queries, queries, trained.seconds + now() - began, batch_queries=on_batches)

    return Baseline(run)


def plot_histories(folder: Path, seeds: Sequence[int]) -> list[Path]:
    """Draw what the sibling methods of a run measured on the way, each quantity in its own axes, each seed a line.

    Args:
        folder: The run's folder, which holds ``seed-N/<method>.json``.
        seeds: The seeds.

    Returns:
        The picture, ``siblings.png``; nothing if no sibling method ran.
    """
    files = [(name, folder / f"seed-{seed}" / f"{name}.json") for name in SIBLINGS for seed in seeds]
    histories = []
    for name, file in files:
        if file.exists():
            history = read_shaped(file, Measured, "what a sibling method left")["history"]
            histories.append((name, {each: np.array(history[each], float).reshape(-1, 2) for each in history}))
    quantities = list(dict.fromkeys(quantity for _, history in histories for quantity in history))
    if not quantities:
        return []
    columns = min(4, len(quantities))
    rows = math.ceil(len(quantities) / columns)
    figure, panels = new_figure(4.0 * columns, 3.0 * rows + 0.6, rows, columns)
    for axes in panels.flat[len(quantities) :]:
        axes.remove()
    for axes, quantity in zip(panels.flat, quantities, strict=False):
        for name, history in histories:
            axes.plot(*history.get(quantity, np.empty((0, 2))).T, color=METHODS[name].colour, linewidth=0.9)
        axes.set_title(quantity, fontsize=9)
        axes.set_xlabel("iteration")
        axes.locator_params("x", nbins=4, integer=True)  # 300,000 is wide
        axes.xaxis.set_major_formatter("{x:,.0f}")
    for name in dict.fromkeys(name for name, _ in histories):
        panels[0, 0].plot([], [], color=METHODS[name].colour, label=METHODS[name].title)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    return [save_figure(figure, folder / "siblings.png")]
