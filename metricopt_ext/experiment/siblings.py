"""The sibling methods in a task's tool: their settings, and each as a method of a comparison."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

import numpy as np
from torch import nn

from metricopt_ext.errors import ConfigError
from metricopt_ext.experiment.brought_sections import brought_by, read_by, refuse_unread
from metricopt_ext.experiment.correlation import ScoreLoss
from metricopt_ext.experiment.method import METHODS, SIBLINGS, Baseline, Reached, Started, now, siblings_of
from metricopt_ext.experiment.style import new_figure, save_figure
from metricopt_ext.runtime.progress import Callback
from metricopt_ext.siblings.ala.ala import AdaptiveLossAlignment
from metricopt_ext.siblings.ala.loss_policy import load_loss_policy
from metricopt_ext.siblings.checkpoints import Checkpoints
from metricopt_ext.siblings.kept import Measured, keep, load_trained
from metricopt_ext.siblings.reloss.ranked_batches import BatchSource, RandomOutputs
from metricopt_ext.siblings.reloss.relational_loss import RelationalTraining, load_relational_loss
from metricopt_ext.siblings.reloss.reloss import ReLoss
from metricopt_ext.siblings.sibling import Sibling
from metricopt_ext.siblings.sl.set_loss import UniversalTraining, load_set_loss
from metricopt_ext.siblings.sl.surrogate_learning import SurrogateLearning
from metricopt_ext.siblings.training import TrainingTask
from metricopt_ext.tasks.task import FinetuneTask
from metricopt_ext.utils.checks import check_integer
from metricopt_ext.utils.config import config_section, is_optional_section
from metricopt_ext.utils.described import read_shaped
from metricopt_ext.utils.extras import require

TRAINS = ("phi", "model", "scratch")


@dataclass
class SLConfig:
    """The fields of `SurrogateLearning` that a run may set; see there. The defaults are the paper's."""

    iterations: int = SurrogateLearning.iterations
    model_steps: int = SurrogateLearning.model_steps  # K_alpha
    surrogate_steps: int = SurrogateLearning.surrogate_steps  # K_beta
    model_lr: float = SurrogateLearning.model_lr
    surrogate_lr: float = SurrogateLearning.surrogate_lr
    clip: float = UniversalTraining.clip or 0.0  # largest norm of a gradient; 0: no limit
    universal_steps: int = UniversalTraining.steps
    universal_lr: float = UniversalTraining.lr
    # sl_u, sl_r: a universal surrogate (sl_u.safetensors of another run) to begin with; what it cost is not counted
    begin: str = field(default="", metadata=read_by("sl_u", "sl_r"))
    network: str = SurrogateLearning.network  # plain, or published: the authors' code's, as are the other three's
    thresholds: int = SurrogateLearning.thresholds  # of a single logit: 0, or 100 percentiles of a batch, a query each
    # sl_s, sl_r: training, or evaluation: without dropout, while the surrogate learns
    judged: str = field(default=SurrogateLearning.judged, metadata=read_by("sl_s", "sl_r"))
    # sl_s, sl_r: model, or surrogate: whose steps come first in an iteration
    first: str = field(default=SurrogateLearning.first, metadata=read_by("sl_s", "sl_r"))
    evals: int = SurrogateLearning.evals  # validation queries for the history, which decide nothing

    def build(self, method: SurrogateLearning) -> SurrogateLearning:
        """Return a method with these settings.

        Raises:
            ValueError: A value is out of range.
            FileFormatError: The surrogate to begin with can't be read.
        """
        clip = self.clip or None
        return replace(
            method,
            iterations=self.iterations,
            model_steps=self.model_steps,
            surrogate_steps=self.surrogate_steps,
            model_lr=self.model_lr,
            surrogate_lr=self.surrogate_lr,
            clip=clip,
            universal=UniversalTraining(self.universal_steps, lr=self.universal_lr, clip=clip),
            begin=load_set_loss(self.begin) if self.begin and method.surrogate != "scratch" else None,
            network=self.network,  # type: ignore[arg-type]
            thresholds=self.thresholds,
            judged=self.judged,  # type: ignore[arg-type]
            first=self.first,  # type: ignore[arg-type]
            evals=self.evals,
        )


@dataclass
class ReLossConfig:
    """The fields of `ReLoss`, and of what it consists of, that a run may set; see there."""

    steps: int = ReLoss.steps  # of the model
    lr: float = ReLoss.lr
    training: int = BatchSource.training  # batches that the loss is learned from, one batch query each
    heldout: int = BatchSource.heldout  # batches that it is chosen by, likewise
    random: float = BatchSource.random  # p, the probability that a batch is random rather than a checkpoint's
    scale: float = RandomOutputs.scale  # random logits are uniform in [-scale, scale]
    checkpoints: int = Checkpoints.count
    checkpoint_steps: int = Checkpoints.steps  # of the network that the checkpoints are of
    checkpoint_lr: float = Checkpoints.lr
    loss_steps: int = RelationalTraining.steps  # of the learned loss
    loss_batches: int = RelationalTraining.batches  # N, batches that are ranked in a step
    loss_lr: float = RelationalTraining.lr
    weight_decay: float = RelationalTraining.weight_decay
    penalty: float = RelationalTraining.penalty  # lambda
    gradient: str = RelationalTraining.gradient  # whose norm it is of: probabilities (a batch's), logits (an example's)
    absolute: bool = RelationalTraining.absolute  # whether the loss is the mean of the network's absolute values
    steepness: float = RelationalTraining.steepness  # of the soft ranks
    # A learned loss (reloss.safetensors of another run) instead of learning one; what it cost is not counted
    begin: str = ""
    evals: int = ReLoss.evals  # validation queries for the history, which decide nothing

    def build(self, method: ReLoss) -> ReLoss:
        """Return a method with these settings.

        Raises:
            ValueError: A value is out of range.
            FileFormatError: The loss to begin with can't be read.
        """
        begin = load_relational_loss(self.begin) if self.begin else None
        if begin is not None and self.absolute and not begin.absolute:
            raise ValueError(
                f"absolute is {self.absolute}, but the loss in {self.begin}, which is not learned anew, has no absolute"
                " values; leave absolute or begin out"
            )
        return replace(
            method,
            source=self.source(),
            training=self.relational_training(),
            begin=begin,
            steps=self.steps,
            lr=self.lr,
            evals=self.evals,
        )

    def source(self) -> BatchSource:
        """Return where the batches come from."""
        checkpoints = Checkpoints(self.checkpoint_steps, self.checkpoint_lr, self.checkpoints)
        return BatchSource(self.training, self.heldout, self.random, RandomOutputs(self.scale), checkpoints)

    def relational_training(self) -> RelationalTraining:
        """Return how the loss is learned from them."""
        require("diffsort")  # which ranks batches once a network is trained
        return RelationalTraining(
            self.loss_steps,
            self.loss_batches,
            self.loss_lr,
            weight_decay=self.weight_decay,
            penalty=self.penalty,
            gradient=self.gradient,  # type: ignore[arg-type]
            absolute=self.absolute,
            steepness=self.steepness,
        )


@dataclass
class ALAConfig:
    """The fields of `AdaptiveLossAlignment` that a run may set; see there. The defaults are the paper's."""

    iterations: int = AdaptiveLossAlignment.iterations  # of each child, a multiple of action_steps
    action_steps: int = AdaptiveLossAlignment.action_steps  # K
    reward_evals: int = AdaptiveLossAlignment.reward_evals  # validation queries of each child for each action
    gamma: float = AdaptiveLossAlignment.gamma
    beta: float = AdaptiveLossAlignment.beta  # 0: the loss stays as it begins
    children: int = AdaptiveLossAlignment.children
    history: int = AdaptiveLossAlignment.history
    validation_batches: int = AdaptiveLossAlignment.validation_batches
    memory: int = AdaptiveLossAlignment.memory
    decay: float = AdaptiveLossAlignment.decay
    policy_lr: float = AdaptiveLossAlignment.policy_lr
    model_lr: float = AdaptiveLossAlignment.model_lr
    optimizer: str = AdaptiveLossAlignment.optimizer  # sgd or adam
    momentum: float = AdaptiveLossAlignment.momentum
    # ala: sigmoid, or none for the cross-entropy at Phi = I
    link: str = field(default=AdaptiveLossAlignment.link, metadata=read_by("ala"))
    # ala: smallest correlation of classes; 0 where a negative one lets the loss fall without the right class
    lowest: float = field(default=AdaptiveLossAlignment.lowest, metadata=read_by("ala"))
    offset: float = field(default=AdaptiveLossAlignment.offset, metadata=read_by("ala_focal"))  # ala_focal: alpha
    begin: str = ""  # a policy (ala.safetensors of another run) to begin with; what it cost is not counted
    learn: bool = AdaptiveLossAlignment.learn  # false: the policy stays as it is, with children=1 and no query
    # ala: policy, or confusion: Eq. 7's matrix for Phi, a baseline, with learn=false and children=1
    controller: str = field(default=AdaptiveLossAlignment.controller, metadata=read_by("ala"))
    # What the reward is of: validation_metric, validation_loss, train_metric (batch queries) or train_loss
    reward: str = AdaptiveLossAlignment.reward
    reward_batches: int = AdaptiveLossAlignment.reward_batches  # that the last three are of

    def build(self, method: AdaptiveLossAlignment, fresh_children: bool) -> AdaptiveLossAlignment:
        """Return a method with these settings.

        Args:
            method: The method.
            fresh_children: Whether all children begin with random weights of their own.

        Raises:
            ValueError: A value is out of range.
            FileFormatError: The policy to begin with can't be read.
        """
        begin = load_loss_policy(self.begin) if self.begin else None
        return replace(method, **{**vars(self), "begin": begin, "fresh_children": fresh_children})


@dataclass
class EmbedderSiblingsConfig:
    """How the sibling methods among ``methods`` run that train embedders; a section is there for those that read it."""

    # What they train: phi (the model stays frozen), model (all weights, from the trained model on) or scratch (all
    # weights of an untrained one, as in their papers).
    trains: str = "phi"
    ala: ALAConfig | None = field(default=None, metadata=brought_by("ala", *siblings_of("embedders")))

    def build(self, name: str) -> Sibling:
        """Return a method of `SIBLINGS` with these settings.

        Raises:
            ConfigError: A value is out of range.
            FileFormatError: A file can't be read.
        """
        method = SIBLINGS[name]
        if isinstance(method, AdaptiveLossAlignment):
            with config_section("siblings.ala"):
                return (self.ala or ALAConfig()).build(method, fresh_children=self.trains == "scratch")
        return method

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
        for section in fields(self):
            if is_optional_section(section.type):
                refuse_unread(getattr(self, section.name), f"siblings.{section.name}", names)
        for name in names:
            self.build(name)


@dataclass
class SiblingsConfig(EmbedderSiblingsConfig):
    """How the sibling methods among ``methods`` run that train classifiers."""

    batch_size: int = 100  # of batches with an equal share of each class
    # Queries for the threshold on a single logit, once trained; 0: none, as for metrics of the order alone (auc, ...)
    threshold_evals: int = 101
    sl: SLConfig | None = field(default=None, metadata=brought_by("sl_u", "sl_s", "sl_r"))
    reloss: ReLossConfig | None = field(default=None, metadata=brought_by("reloss", "reloss_only"))

    def build(self, name: str) -> Sibling:
        """Return a method of `SIBLINGS` with these settings; see `EmbedderSiblingsConfig.build`."""
        method = SIBLINGS[name]
        if isinstance(method, SurrogateLearning):
            with config_section("siblings.sl"):
                return (self.sl or SLConfig()).build(method)
        if isinstance(method, ReLoss):
            with config_section("siblings.reloss"):
                return (self.reloss or ReLossConfig()).build(method)
        return super().build(name)

    def check(self, names: list[str]) -> None:
        """Reject what would only fail after work has been done; see `EmbedderSiblingsConfig.check`."""
        with config_section("siblings"):
            check_integer(1, batch_size=self.batch_size)
            check_integer(0, threshold_evals=self.threshold_evals)
        super().check(names)


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
        callback.stage(METHODS[name].title)
        own, _ = started.of(task)
        training_task = make(own)
        trained = load_trained(training_task.copied().model, folder, name) if resume else None
        if trained is None:
            trained = method.train(training_task, seed=seed, callback=callback)
            keep(trained, folder, name)
        queries, on_batches = sum(trained.queries.values()), sum(trained.batch_queries.values())
        yield Reached(trained.model, queries, queries, trained.seconds, batch_queries=on_batches)
        before, began = task.metric.ledger.spent, now()
        if (tuned := tune(own, trained.model)) is not None:
            queries += task.metric.ledger.spent - before
            yield Reached(tuned, queries, queries, trained.seconds + now() - began, batch_queries=on_batches)

    return Baseline(run)


def learned_losses(folder: Path, names: Sequence[str]) -> dict[str, ScoreLoss]:
    """Return the losses that sibling methods learned, by their titles.

    Args:
        folder: Where `training` left them.
        names: The methods that ran.

    Raises:
        FileFormatError: A file can't be read.
    """
    losses: dict[str, ScoreLoss] = {}
    for name in names:
        method, file = SIBLINGS[name], folder / f"{name}.safetensors"
        if isinstance(method, SurrogateLearning):
            losses[METHODS[name].title] = _on_its_own(load_set_loss(file))
        elif isinstance(method, ReLoss):
            losses[METHODS[name].title] = _on_its_own(load_relational_loss(file))
    return losses


def _on_its_own(loss: nn.Module) -> ScoreLoss:
    """Return a learned loss as a function of scores and labels of any type and device."""
    like = next(loss.parameters())
    return lambda scores, labels: loss(scores.to(like), labels.to(like.device))


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
