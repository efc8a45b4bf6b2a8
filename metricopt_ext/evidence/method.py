"""What a method is to a comparison: its name and title, what it needs, and what it returns."""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from metricopt_ext.errors import ConfigError
from metricopt_ext.evidence.method_config import FinetuneConfig
from metricopt_ext.evidence.passes import Passes, last_query, passes_of
from metricopt_ext.methods.result import Result
from metricopt_ext.search.direct import CMAES, GuidedES
from metricopt_ext.search.ngopt import NGOpt
from metricopt_ext.search.random_search import RandomSearch
from metricopt_ext.search.strategy import SearchResult, SearchStrategy
from metricopt_ext.search.turbo import TuRBO
from metricopt_ext.tasks.task import FinetuneTask

Kind = Literal["free", "queries"]
Needs = Literal["scores", "inputs", "labels", "another f", "batch metric"]
End = Tensor | nn.Module


@dataclass(frozen=True)
class Entry:
    """How a method is shown in tables and plots.

    Attributes:
        title: Its displayed name.
        colour: Its colour, ``#rrggbb``.
        kind: ``free`` spends no metric query of its own, ``queries`` does.
        needs: What it needs from the data that the metric sees: the metric's scores alone, the inputs, or the labels
            too; or the value function of another run; or the metric of any scores and labels, to ask on training
            batches.
        after: The method that it continues from: what that one spent counts as its own too.
        shared: Whether ranks share its work (`ranks`), by `optimize_metric`.
        factory: Makes the search that it is, from the settings of finetuning; None of what is more than a search. With
            it, an entry is all that a comparison needs.
    """

    title: str
    colour: str
    kind: Kind
    needs: Needs = "scores"
    after: str = ""
    shared: bool = False
    factory: Callable[[FinetuneConfig], SearchStrategy] | None = None


# Every method that a comparison can run, by name, in the order of tables.
METHODS: dict[str, Entry] = {
    "pretrained": Entry("pretrained", "#9a9a9a", "free"),
    "loss_finetune": Entry("loss finetune", "#d98c3f", "free"),
    "loss_finetune_best": Entry("loss finetune, best step", "#b5651d", "queries", after="loss_finetune"),
    "threshold": Entry("tuned threshold", "#5b7db1", "queries", "inputs"),
    "class_offsets": Entry("tuned class offsets", "#34568b", "queries"),
    "label_thresholds": Entry("a threshold per label", "#4a6fa5", "queries"),
    "cut_points": Entry("tuned cut points", "#27406b", "queries"),
    "recalibration": Entry("tuned shift and scale", "#6d87b3", "queries"),
    "logit_adjustment": Entry("logit adjustment", "#a3b8d9", "free"),
    "logit_adjustment_tuned": Entry("logit adjustment, tuned", "#7f95c4", "queries"),
    "batchnorm_validation": Entry("BatchNorm on validation", "#8a6fb0", "free", "inputs"),
    "loss_finetune_validation": Entry("loss on validation labels", "#4f8f8b", "free", "labels"),
    "guided_es": Entry("Guided ES on the metric", "#2f6fa3", "queries", factory=lambda config: GuidedES(lr=config.lr)),
    "cma_es": Entry("CMA-ES on the metric", "#6aa3cf", "queries", factory=lambda config: CMAES()),
    "random_search": Entry("random search", "#b7b7b7", "queries", factory=lambda config: RandomSearch()),
    "ngopt": Entry("NGOpt on the metric", "#3b8f6b", "queries", factory=lambda config: NGOpt()),
    "turbo": Entry("TuRBO on the metric", "#8fbf8f", "queries", factory=lambda config: TuRBO()),
    "best_start": Entry("best free start", "#555555", "queries"),
    "ours": Entry("MetricOpt, guided search", "#d7191c", "queries"),
    "transferred": Entry("f of another run", "#7f9c3c", "free", "another f"),
    "placebo": Entry("the same f, turned", "#b9c58f", "free", "another f"),
    "metricopt": Entry("MetricOpt", "#c02942", "queries", shared=True),
    "metricopt_paper": Entry("MetricOpt, Algorithm 1", "#e57fb0", "queries", shared=True),
    "metricopt_learned": Entry("MetricOpt, learned", "#8e1b8e", "queries", shared=True),
    "refined": Entry("MetricOpt, then CMA-ES", "#e0607a", "queries", after="metricopt"),
    "second_round": Entry("MetricOpt, second round", "#7a1f3d", "queries", after="metricopt"),
    "sl_u": Entry("SL, universal surrogate", "#c9b458", "queries", "batch metric"),
    "sl_s": Entry("SL, surrogate from scratch", "#a88f2a", "queries", "batch metric"),
    "sl_r": Entry("SL, refined surrogate", "#7d6608", "queries", "batch metric"),
    "reloss": Entry("ReLoss and cross-entropy", "#1b7f79", "queries", "batch metric"),
    "reloss_only": Entry("ReLoss alone", "#6fb7b0", "queries", "batch metric"),
    "ala": Entry("ALA, class correlations", "#3a7d44", "queries", "labels"),
    "ala_mixture": Entry("ALA, distance mixture", "#5fa36a", "queries", "labels"),
    "ala_focal": Entry("ALA, focal weighting", "#93c49b", "queries", "labels"),
}


@dataclass(frozen=True)
class Reached:
    """Where a method stood after a number of metric queries.

    Attributes:
        end: phi, ``d``, of the task's model; or its own model, whose weights it may have trained.
        queries: Metric queries spent by then.
        queries_per_start: How many of these each further start costs again.
        seconds: Wall-clock seconds spent by then.
        passes: What that cost the model, if it was counted.
        search: Where its search ended, kept or not, if it has a guard.
        batch_queries: Evaluations of the metric on batches of scores and labels, besides ``queries``.
    """

    end: End
    queries: int
    queries_per_start: int
    seconds: float
    passes: Passes | None = None
    search: SearchResult | None = None
    batch_queries: int = 0

    def after(self, before: "Reached") -> "Reached":
        """Return the same with what was spent before counted too."""
        return replace(
            self,
            queries=before.queries + self.queries,
            queries_per_start=before.queries_per_start + self.queries_per_start,
            seconds=before.seconds + self.seconds,
            batch_queries=before.batch_queries + self.batch_queries,
        )


@dataclass(frozen=True)
class MethodResult:
    """What a method returns.

    Attributes:
        reached: Where it stood at each number of queries that it reports, in ascending order; at least one.
        path: The visited phi, ``(T + 1) x d``, for a plot along finetuning; None if there is none.
        result: What `optimize_metric` returned, for methods that continue from it.
    """

    reached: tuple[Reached, ...]
    path: Tensor | None = None
    result: Result[Any] | None = None


# A method runs on a task whose metric counts its queries alone, given the results of the methods before it; it returns
# what came out, with what it spent itself, or None where it does not apply. It may leave the model with any phi, but
# with its original weights.
Method = Callable[[FinetuneTask, Mapping[str, MethodResult]], MethodResult | None]


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

    def forget_last_query(self) -> None:
        """Do not count the last query, which a run that was to end elsewhere would not have made."""
        self.spent += 1
        if self.passes is not None:
            self.passes += last_query(self.task)

    def forget_since(self, moment: float) -> None:
        """Do not count the seconds since then; see `now`."""
        self.began += now() - moment


def now() -> float:
    """Return seconds on a clock, once the GPU has finished its work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def ending_at(run: Callable[[FinetuneTask], End | None]) -> Method:
    """Make a method from a function of the task that returns an end, or None if it does not apply."""

    def method(task: FinetuneTask, earlier: Mapping[str, MethodResult]) -> MethodResult | None:
        meter, end = Meter(task), run(task)
        return None if end is None else MethodResult((meter.reached(end),))

    return method


def ending_path(run: Callable[[FinetuneTask], Tensor]) -> Method:
    """Make a method from a function of the task that returns the visited phi, ``(T + 1) x d``."""

    def method(task: FinetuneTask, earlier: Mapping[str, MethodResult]) -> MethodResult:
        meter, path = Meter(task), run(task)
        return MethodResult((meter.reached(path[-1]),), path)

    return method


def following_metricopt(run: Callable[[FinetuneTask, Result[Any]], End]) -> Method:
    """Make a method from a function that continues from MetricOpt's result and returns an end."""

    def method(task: FinetuneTask, earlier: Mapping[str, MethodResult]) -> MethodResult:
        meter, result = Meter(task), earlier["metricopt"].result
        assert result is not None  # the settings are checked: it follows a recipe
        return MethodResult((meter.reached(run(task, result)),))

    return method


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
