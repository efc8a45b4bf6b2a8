"""What a method is to a comparison: its entry in the registry, where it begins, and what it says of where it stands."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor, nn

from metricopt_ext.adapters.start import Start, StartLine
from metricopt_ext.errors import ConfigError
from metricopt_ext.experiment.method_config import FinetuneConfig
from metricopt_ext.experiment.passes import Passes, passes_of, queries_cost
from metricopt_ext.experiment.rivals import BoTorch, BoTorchComposite, Nevergrad, Optuna
from metricopt_ext.methods.result import Result
from metricopt_ext.search.direct import CMAES, GuidedES, RandomSearch
from metricopt_ext.search.strategy import SearchStrategy
from metricopt_ext.search.trust_region import GuidedTrustRegion
from metricopt_ext.siblings.ala.ala import AdaptiveLossAlignment
from metricopt_ext.siblings.reloss.reloss import ReLoss
from metricopt_ext.siblings.sibling import Sibling
from metricopt_ext.siblings.sl.surrogate_learning import SurrogateLearning
from metricopt_ext.tasks.evaluation import Evaluation
from metricopt_ext.tasks.task import FinetuneTask

Kind = Literal["free", "queries"]
Needs = Literal["scores", "inputs", "labels", "batch metric"]
End = Tensor | nn.Module | Start


@dataclass(frozen=True)
class Entry:
    """How a method is shown in tables and plots.

    Attributes:
        title: Its displayed name.
        colour: Its colour, ``#rrggbb``.
        kind: ``free`` spends no metric query of its own, ``queries`` does.
        needs: What it needs from the data that the metric sees: the metric's scores alone, the inputs, or the labels
            too; or the metric of any scores and labels, to ask on training batches.
        training: Whether it needs examples of the training too.
        standing: Whether it ends at the start of its name, of the model as it was trained, whatever else begins there.
        after: The method that it continues from: what that one spent counts as its own too.
        start: The start of MetricOpt's where it ends, whose query tells its metric.
        shared: Whether ranks share its work (`distributed`), by `optimize_metric`.
        trains: What it trains, of a sibling method: classifiers, or embedders for the distances between them.
        factory: Makes the search or the sibling method that it is, from the settings of finetuning; None of what a
            task makes. With it, an entry is all that a comparison needs.
    """

    title: str
    colour: str
    kind: Kind
    needs: Needs = "scores"
    training: bool = False
    standing: bool = False
    after: str = ""
    start: str = ""
    shared: bool = False
    trains: Literal["", "classifiers", "embedders"] = ""
    factory: Callable[[FinetuneConfig], SearchStrategy | Sibling] | None = None


def _sibling(
    title: str,
    colour: str,
    method: Sibling,
    needs: Needs = "batch metric",
    trains: Literal["classifiers", "embedders"] = "classifiers",
) -> Entry:
    return Entry(title, colour, "queries", needs, training=True, trains=trains, factory=lambda config: method)


def _start(title: str, colour: str, needs: Needs = "scores", *, training: bool = False, kind: Kind = "free") -> Entry:
    return Entry(title, colour, kind, needs, training=training, standing=True)


# Every method that a comparison can run, by name, in the order of tables.
METHODS: dict[str, Entry] = {
    "pretrained": Entry("pretrained", "#9a9a9a", "free", start="start"),
    "loss_finetune": Entry("loss finetune", "#d98c3f", "free", training=True, start="loss_finetune"),
    "loss_finetune_best": Entry("loss finetune, best step", "#b5651d", "queries", training=True, after="loss_finetune"),
    "threshold": Entry("tuned threshold", "#5b7db1", "queries", "inputs"),
    "class_offsets": Entry("tuned class offsets", "#34568b", "queries"),
    "raise_worst": Entry("worst class's offset raised", "#22577a", "queries"),
    "raise_worst_trained": Entry("worst class's offset raised, as trained", "#57a0c8", "queries"),
    "label_thresholds": Entry("a threshold per label", "#4a6fa5", "queries"),
    "logit_adjustment": Entry("logit adjustment", "#a3b8d9", "free"),
    "logit_adjustment_tuned": Entry("logit adjustment, tuned", "#7f95c4", "queries"),
    "batchnorm_validation": Entry("BatchNorm on validation", "#8a6fb0", "free", "inputs", start="batchnorm"),
    "loss_finetune_validation": Entry("loss on validation labels", "#4f8f8b", "free", "labels"),
    "loss_finetune_validation_best": Entry(
        "loss on validation labels, best step", "#2f6f6b", "queries", "labels", training=True
    ),
    "whole_network_labels": _start("whole network on labels", "#1f5f5b", "labels"),
    "em_prior": _start("EM prior", "#9fb6c9", "inputs"),
    "batchnorm_mixed": _start("BatchNorm, statistics mixed", "#6a4c93", "inputs"),
    "whitening": _start("PCA whitening", "#c9a0b8", "inputs"),
    "lda_whitening": _start("LDA whitening", "#a05a80", "labels"),
    "soup": _start("uniform soup", "#d9b08c", training=True),
    "soup_greedy": _start("greedy soup", "#bf8040", training=True, kind="queries"),
    "guided_es": Entry(
        "Guided ES on the metric",
        "#2f6fa3",
        "queries",
        training=True,
        factory=lambda config: GuidedES(lr=config.lr),
    ),
    "cma_es": Entry("CMA-ES on the metric", "#6aa3cf", "queries", factory=lambda config: CMAES()),
    "random_search": Entry("random search", "#b7b7b7", "queries", factory=lambda config: RandomSearch()),
    "ngopt": Entry("NGOpt on the metric", "#3b8f6b", "queries", factory=lambda config: Nevergrad()),
    "noisy_ei": Entry("BoTorch, noisy EI", "#5a9a8a", "queries", factory=lambda config: BoTorch()),
    "botorch_composite": Entry("BoTorch, composite", "#3f7a6c", "queries", factory=lambda config: BoTorchComposite()),
    "optuna_tpe": Entry("Optuna, TPE", "#b08fbf", "queries", factory=lambda config: Optuna()),
    "optuna_gp": Entry("Optuna, GP", "#8a6f9a", "queries", factory=lambda config: Optuna(name="GPSampler")),
    "best_start": Entry("best free start", "#555555", "queries"),
    "settings_free": Entry("free settings", "#d9c9a3", "free"),
    "settings_lines": Entry("settings, one by one", "#c2a878", "queries"),
    "settings": Entry("settings", "#a5854e", "queries"),
    "settings+phi": Entry("settings, then MetricOpt", "#8c1515", "queries", training=True),
    "metricopt": Entry(
        "MetricOpt",
        "#d7191c",
        "queries",
        training=True,
        shared=True,
        factory=lambda config: GuidedTrustRegion(),
    ),
    "metricopt_one": Entry("MetricOpt, f of one number", "#f4a582", "queries", training=True),
    "metricopt_paper": Entry("MetricOpt, Algorithm 1", "#e57fb0", "queries", training=True),
    "metricopt_learned": Entry("MetricOpt, learned", "#8e1b8e", "queries", training=True),
    "sl_u": _sibling("SL, universal surrogate", "#c9b458", SurrogateLearning("universal")),
    "sl_s": _sibling("SL, surrogate from scratch", "#a88f2a", SurrogateLearning("scratch")),
    "sl_r": _sibling("SL, refined surrogate", "#7d6608", SurrogateLearning("refined")),
    "reloss": _sibling("ReLoss and cross-entropy", "#1b7f79", ReLoss()),
    "reloss_only": _sibling("ReLoss alone", "#6fb7b0", ReLoss(cross_entropy=False)),
    "ala": _sibling("ALA, class correlations", "#3a7d44", AdaptiveLossAlignment("classes"), "labels"),
    "ala_mixture": _sibling(
        "ALA, distance mixture", "#5fa36a", AdaptiveLossAlignment("mixture"), "labels", "embedders"
    ),
    "ala_focal": _sibling("ALA, focal weighting", "#93c49b", AdaptiveLossAlignment("focal"), "labels", "embedders"),
}

# The methods whose ends have settings of inference.
TUNES_SETTINGS = tuple(name for name in METHODS if name.startswith("settings"))

# The methods that end at a start, which may begin the others too.
STANDING = tuple(name for name, entry in METHODS.items() if entry.standing)

# The sibling methods by name, with their papers' settings.
SIBLINGS: dict[str, Sibling] = {
    name: entry.factory(FinetuneConfig())  # type: ignore[misc]
    for name, entry in METHODS.items()
    if entry.trains and entry.factory is not None
}


def siblings_of(trains: str) -> tuple[str, ...]:
    """Return the names of the sibling methods that train ``"classifiers"``, or those that train ``"embedders"``."""
    return tuple(name for name in SIBLINGS if METHODS[name].trains == trains)


@dataclass(frozen=True)
class Started:
    """Where a method begins.

    Attributes:
        starts: What there was to choose from, by name: ``"start"``, phi = 0 of the model as it was trained, among them
            if any was asked.
        chosen: The one that it begins from.
        spent: Queries that were spent on the choice.
        asked: The metric's evaluations of the starts, for a search that learns from them too.
        lines: Lines of starts, by name, which `optimize_metric` looks along; the other methods do not.
    """

    starts: Mapping[str, Start]
    chosen: str
    spent: int = 0
    evaluated: Mapping[str, Evaluation] = field(default_factory=dict)
    lines: Mapping[str, StartLine] = field(default_factory=dict)

    @classmethod
    def at(cls, phi: Tensor) -> "Started":
        """Begin at a phi, ``d``, of the model as it was trained, without a choice."""
        return cls({"given": Start(phi)}, "given")

    @property
    def start(self) -> Start:
        """The chosen start."""
        return self.starts[self.chosen]

    @contextmanager
    def there(self, task: FinetuneTask) -> Iterator[FinetuneTask]:
        """Make the model be the chosen start for a while, and yield the task with the start's settings."""
        with task.adapter.applied(self.start):
            yield task.with_values(self.start.settings)

    def standing(self, end: End) -> End:
        """Return an end, a phi of the chosen start's model or else as it is, as the task itself can judge it."""
        return end_of(replace(self.start, phi=end)) if isinstance(end, Tensor) else end


def end_of(start: Start) -> End:
    """Return what can be judged of a start: its phi, ``d``, if it has nothing else."""
    return start if start.settings or start.tensors else start.phi


@dataclass(frozen=True)
class Reached:
    """Where a method stood after a number of metric queries.

    Attributes:
        end: phi, ``d``, of the task's model; or its own model, whose weights it may have trained; or a start, with
            other tensors or settings of inference.
        queries: Metric queries spent by then.
        queries_per_start: How many of these each further start costs again.
        seconds: Wall-clock seconds spent by then.
        passes: What that cost the model, if it was counted.
        batch_queries: Evaluations of the metric on batches of scores and labels, besides ``queries``.
        path: The visited phi, ``(T + 1) x d``, for a plot along finetuning; None if there is none.
        result: What `optimize_metric` returned, or would have, of what is guarded.
    """

    end: End
    queries: int
    queries_per_start: int
    seconds: float
    passes: Passes | None = None
    batch_queries: int = 0
    path: Tensor | None = None
    result: Result | None = None

    def after_choice(self, queries: int) -> "Reached":
        """Return the same with the queries counted that choosing the start took."""
        return replace(self, queries=self.queries + queries, queries_per_start=self.queries_per_start + queries)

    def after(self, before: "Reached") -> "Reached":
        """Return the same with what was spent before counted too."""
        return replace(
            self,
            queries=before.queries + self.queries,
            queries_per_start=before.queries_per_start + self.queries_per_start,
            seconds=before.seconds + self.seconds,
            batch_queries=before.batch_queries + self.batch_queries,
        )


# (task, where it begins, budgets in ascending order, seed) -> where it stood at each budget, in that order. What was
# spent on choosing the start has been taken off the budgets before. A method whose queries follow from its settings
# says where it stood whatever the budgets; one that does not apply, nothing. It may leave the model with any phi, but
# with its original weights.
Run = Callable[[FinetuneTask, Started, Sequence[int], int], Iterator[Reached]]


@dataclass(frozen=True)
class Baseline:
    """A method of a comparison: a baseline, a sibling or ours.

    Attributes:
        run: Runs it.
        least: The smallest budget that it can do with in d dimensions.
        anytime: Whether its queries are the same whatever the budget, so that one run serves all budgets.
        constrained: Whether its end respects the metric's constraints, if any point that it asks does.
    """

    run: Run
    least: Callable[[int], int] = lambda dim: 0
    anytime: bool = False
    constrained: bool = False


@dataclass(frozen=True)
class Planned:
    """A baseline as a tool runs it.

    Attributes:
        baseline: The baseline.
        budgets: Its budgets, without what was spent on choosing the start.
        seed: Its seed.
        started: Where it begins; None: at phi = 0 of the model as it was trained.
    """

    baseline: Baseline
    budgets: tuple[int, ...] = (0,)
    seed: int = 0
    started: Started | None = None

    def run(self, task: FinetuneTask) -> tuple[Reached, ...]:
        """Return where it stood, with what choosing the start took; nothing if it does not apply."""
        started = self.started or Started.at(task.origin())
        found = self.baseline.run(task, started, self.budgets, self.seed)
        return tuple(each.after_choice(started.spent) for each in found)


# Where the methods before stood, by name: what a method continues from.
Earlier = Mapping[str, tuple[Reached, ...]]
Method = Callable[[Earlier], Planned]


class Meter:
    """Counts what a method spends from now on: queries of its task's ledger, seconds, and passes if they are counted.

    Args:
        task: The method's task.
    """

    def __init__(self, task: FinetuneTask) -> None:
        self.task, self.spent, self.passes, self.began = task, task.metric.ledger.spent, passes_of(task), now()

    def reached(self, end: End) -> Reached:
        """Return where the method stands."""
        spent, seconds, passes = self.task.metric.ledger.spent - self.spent, now() - self.began, passes_of(self.task)
        if passes is not None and self.passes is not None:
            passes -= self.passes
        return Reached(end, spent, spent, seconds, passes)

    def forget_last_queries(self, queries: int) -> None:
        """Do not count the last queries, which a run that was to end elsewhere would not have made."""
        self.spent += queries
        if self.passes is not None:
            self.passes += queries_cost(self.task, queries)

    def forget_since(self, moment: float) -> None:
        """Do not count the seconds since then; see `now`."""
        self.began += now() - moment


def now() -> float:
    """Return seconds on a clock, once the GPU has finished its work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def check_known(names: Iterable[str]) -> None:
    """Reject methods that are not in `METHODS`, or run before those that they continue from, before anything runs.

    Raises:
        ConfigError: There is such a method; the message names it.
    """
    before: set[str] = set()
    for name in names:
        if name not in METHODS:
            raise ConfigError(f"method {name!r} has no entry in METHODS; the choices are {', '.join(METHODS)}")
        if (after := METHODS[name].after) and after not in before:
            raise ConfigError(f"method {name!r} continues from {after!r}, which must run before it")
        before.add(name)
