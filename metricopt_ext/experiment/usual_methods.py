"""The methods that every task's tool runs: MetricOpt, and what a user could do instead."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from metricopt_ext.adapters.start import Start, StartLine
from metricopt_ext.experiment.baselines import (
    along_path,
    at_each_budget,
    best_of_loss_finetune,
    ending_at,
    loss_path,
    notified,
    optimizing,
    usual_baselines,
)
from metricopt_ext.experiment.method import METHODS, Baseline, Earlier, Meter, Method, Planned, Reached, Started, end_of
from metricopt_ext.experiment.method_config import LearnedConfig, PaperSettings
from metricopt_ext.experiment.run_config import VARIANTS, RunConfig
from metricopt_ext.methods.result import Result
from metricopt_ext.methods.starts import reestimate_batchnorm
from metricopt_ext.runtime.progress import BeforeOthers, Callback, Within, told
from metricopt_ext.search.stages import SETTINGS
from metricopt_ext.search.strategy import SearchStrategy
from metricopt_ext.tasks.batches import Batches
from metricopt_ext.tasks.task import FinetuneTask


def usual_methods(
    config: RunConfig,
    seed: int,
    *,
    starts: Mapping[str, Start | StartLine] | None = None,
    inputs: Sequence[Any],
    batches: Batches,
    folder: Path | None = None,
    resume: bool = False,
    callback: Callback | None = None,
) -> dict[str, Method]:
    """Return what a run shows by name: what asks nothing beside MetricOpt's queries, and what the settings name.

    Args:
        config: The run's settings.
        seed: Seed of batches and searches.
        starts: What MetricOpt's search may begin from besides phi = 0.
        inputs: The validation data's inputs in parts of about equal size, to re-estimate BatchNorm on.
        batches: Batches of the labelled validation data, as the loss takes them.
        folder: Receives what MetricOpt keeps.
        resume: Let MetricOpt continue what an interrupted run left there.
        callback: Notified of its progress.
    """
    shown, strategy = callback or Callback(), config.build_strategy()
    metricopt = optimizing(
        strategy,
        starts=starts if isinstance(strategy, SearchStrategy) else None,
        confidence=config.guard.confidence,
        output_dir=folder,
        resume=resume,
        callback=BeforeOthers(shown),
    )

    def loss_finetune(task: FinetuneTask, start: Tensor, seed: int) -> Tensor:
        return loss_path(task, config.finetune, seed, start, shown)

    def on_labels(task: FinetuneTask, start: Tensor, seed: int) -> Tensor:
        return loss_finetune(replace(task, batches=batches), start, seed)

    def batchnorm(task: FinetuneTask) -> nn.Module | None:
        return reestimate_batchnorm(task.adapter.model, told(inputs, shown, METHODS["batchnorm_validation"].title))

    def loss_finetune_best(earlier: Earlier) -> Planned:
        path = earlier["loss_finetune"][-1].path
        assert path is not None
        best = at_each_budget(lambda task, start, queries, seed: best_of_loss_finetune(task, path, queries))
        return Planned(best, (config.rows["loss_finetune_best"],), seed)

    methods: dict[str, Method] = {
        "pretrained": planned(ending_at(lambda task: task.origin())),
        "metricopt": planned(metricopt, config.queries, seed),
        "loss_finetune": planned(along_path(loss_finetune), 0, seed),
        "loss_finetune_best": loss_finetune_best,
        "batchnorm_validation": planned(ending_at(batchnorm)),
        "loss_finetune_validation": planned(along_path(on_labels), 0, seed),
    }
    if config.settings is not None:
        methods["settings"] = where_metricopt_began(Baseline(_as_it_begins), None, seed)
    baselines = usual_baselines(config)
    for name in ("guided_es", "cma_es"):
        baseline = notified(baselines[name], METHODS[name].title, shown)
        methods[name] = where_metricopt_began(baseline, config.search_queries, seed)
    for name in (name for name in config.methods if name in VARIANTS):
        methods[name] = variant(name, config, seed, folder=folder, resume=resume, callback=shown)
    return asked_for(config, methods)


def asked_for(config: RunConfig, methods: dict[str, Method]) -> dict[str, Method]:
    """Return MetricOpt, the methods that ask no query of their own, and those that the settings name."""
    named = {"metricopt", *config.methods}
    return {name: method for name, method in methods.items() if METHODS[name].kind == "free" or name in named}


def _as_it_begins(task: FinetuneTask, started: Started, budgets: Sequence[int], seed: int) -> Iterator[Reached]:
    """Stay where MetricOpt's search of phi began: what is gained over that is phi's alone."""
    yield Meter(task).reached(end_of(started.start))


def planned(baseline: Baseline, queries: int = 0, seed: int = 0) -> Method:
    """Make a method of a baseline at one budget, from phi = 0; it continues from no other."""
    return lambda earlier: Planned(baseline, (queries,), seed)


def where_metricopt_began(baseline: Baseline, queries: int | None, seed: int) -> Method:
    """Make a method of a baseline from where MetricOpt's own search began, if it was one, and from phi = 0 else.

    What was spent on choosing the start counts as the method's own too.

    Args:
        baseline: The baseline.
        queries: Its budget, the choice of the start included; None for what MetricOpt spent.
        seed: Its seed.
    """

    def method(earlier: Earlier) -> Planned:
        ours: Reached = earlier["metricopt"][-1]
        budget = ours.queries if queries is None else queries
        if ours.result is None or ours.result.loss_finetune is not None:
            return Planned(baseline, (budget,), seed)
        candidates = ours.result.candidates
        settings = ours.result.settings  # the first of its values is a start's
        tried = 0 if settings is None else max(0, len(settings.tried) - 1)
        spent = sum(name != SETTINGS for name in candidates) + tried
        started = Started(candidates, ours.result.started_at, spent=spent)
        return Planned(baseline, (budget - started.spent,), seed, started)

    return method


def variant(
    name: str, config: RunConfig, seed: int, *, folder: Path | None = None, resume: bool = False, callback: Callback
) -> Method:
    """Make a method of one of `run_config.VARIANTS`, from phi = 0.

    Args:
        name: ``metricopt_paper``, Algorithm 1 with the settings under ``paper``; or ``metricopt_learned``, an optimizer
            that is learned by Algorithm S1, with those under ``learned``.
        config: The run's settings.
        seed: Seed of all draws.
        folder: The seed's folder; the method keeps its work in a folder of its own name there.
        resume: Continue what an interrupted run left there.
        callback: Told the stages, and of queries now and then: those counted are MetricOpt's.
    """
    settings = (config.learned or LearnedConfig()) if name == "metricopt_learned" else (config.paper or PaperSettings())
    title = METHODS[name].title
    baseline = optimizing(
        settings.build(config.finetune),
        confidence=config.guard.confidence,
        output_dir=None if folder is None else folder / name,
        resume=resume,
        callback=Within(callback, title, config.queries),
    )
    return planned(baseline, config.queries, seed)


def metricopt_result(earlier: Earlier) -> Result:
    """Return what MetricOpt's own run returned, for a method that continues from it."""
    result = earlier["metricopt"][-1].result
    assert result is not None
    return result
