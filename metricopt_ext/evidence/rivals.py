"""The methods that every task's tool runs: MetricOpt, and what a user could do instead."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from metricopt_ext.adapters.start import Start
from metricopt_ext.evidence.contenders import (
    Contender,
    Spent,
    best_of_loss_finetune,
    loss_path,
    usual_contenders,
)
from metricopt_ext.evidence.method import (
    METHODS,
    Meter,
    Method,
    MethodResult,
    Reached,
    ending_at,
    ending_path,
    following_metricopt,
)
from metricopt_ext.evidence.run_config import VARIANTS, RunConfig
from metricopt_ext.evidence.variants import variant_method
from metricopt_ext.methods.pipeline import optimize_metric
from metricopt_ext.methods.searched import runner_of
from metricopt_ext.methods.starts import reestimate_batchnorm, with_start
from metricopt_ext.search.direct import CMAES
from metricopt_ext.tasks.batches import Batches
from metricopt_ext.tasks.task import FinetuneTask
from metricopt_ext.utils.progress import Watcher, Within


def usual_methods(
    config: RunConfig,
    seed: int,
    *,
    starts: Mapping[str, Start] | None = None,
    inputs: Sequence[Any],
    batches: Batches,
    folder: Path | None = None,
    resume: bool = False,
    watcher: Watcher | None = None,
) -> dict[str, Method]:
    """Return the methods that the settings select, by name.

    Args:
        config: The run's settings.
        seed: Seed of batches and searches.
        starts: What MetricOpt's search may begin from besides phi = 0.
        inputs: The validation data's inputs in parts of about equal size, to re-estimate BatchNorm on.
        batches: Batches of the labelled validation data, as the loss takes them.
        folder: Receives what MetricOpt keeps.
        resume: Let MetricOpt continue what an interrupted run left there.
        watcher: Notified of its progress.
    """
    shown = watcher or Watcher()

    def metricopt(task: FinetuneTask, earlier: Mapping[str, MethodResult]) -> MethodResult:
        meter, strategy = Meter(task), config.build_strategy()
        result = optimize_metric(
            task,
            queries=config.queries,
            strategy=strategy,
            starts=starts if runner_of(strategy).takes_starts else None,
            guard_confidence=config.guard.confidence,
            seed=seed,
            output_dir=folder,
            resume=resume,
            watcher=shown,
        )
        shown.stage("other methods")
        phi = result.ends[result.chosen]
        end = task.copied().adapter.model if result.start_of(result.chosen).replaced else phi
        task.adapter.apply(Start(phi))  # the other methods begin from the base
        spent = replace(meter.reached(end), queries_per_start=result.queries_per_start)
        return MethodResult((spent,), result.path if result.details.finetunes else None, result)

    def loss_finetune(task: FinetuneTask) -> Tensor:
        return loss_path(task, config.finetune, seed)

    def loss_finetune_best(task: FinetuneTask, earlier: Mapping[str, MethodResult]) -> MethodResult:
        before = earlier["loss_finetune"]
        assert before.path is not None
        meter = Meter(task)
        return MethodResult((meter.reached(best_of_loss_finetune(task, before.path, config.best_evals)),))

    methods: dict[str, Method] = {
        "pretrained": lambda task, earlier: MethodResult((Reached(task.origin(), 0, 0, 0.0),)),
        "metricopt": metricopt,
        "loss_finetune": ending_path(loss_finetune),
        "loss_finetune_best": loss_finetune_best,
        "batchnorm_validation": ending_at(lambda task: reestimate_batchnorm(task.adapter.model, inputs)),
        "loss_finetune_validation": ending_path(lambda task: loss_finetune(replace(task, batches=batches))),
    }
    if config.search_queries:
        contenders = usual_contenders(config)
        for name in ("guided_es", "cma_es"):
            methods[name] = following_start(contenders[name], config.search_queries, seed, name, shown)
    for name in (name for name in config.methods if name in VARIANTS):
        methods[name] = variant_method(name, config, seed, folder=folder, resume=resume, watcher=watcher)
    if refined := config.refined:
        methods["refined"] = following_metricopt(
            lambda task, result: CMAES()(task, result.ends[result.chosen], refined.queries, seed=seed).phi
        )
    return methods


def at_budget(contender: Contender, queries: int, seed: int) -> Method:
    """Make a method of a contender, from phi = 0.

    Args:
        contender: The contender.
        queries: Its budget.
        seed: Its seed.
    """

    def method(task: FinetuneTask, earlier: Mapping[str, MethodResult]) -> MethodResult | None:
        reached = tuple(contender.run(task, task.origin(), [queries], seed))
        return MethodResult(reached) if reached else None

    return method


def following_start(contender: Contender, queries: int | str, seed: int, name: str, watcher: Watcher) -> Method:
    """Make a method of a search from where MetricOpt's own search began, if it was one, and from phi = 0 else.

    What was spent on choosing the start counts as the method's own too.

    Args:
        contender: The search.
        queries: Its budget, the choice of the start included; ``"same"`` for what MetricOpt spent.
        seed: Its seed.
        name: Its name in `METHODS`.
        watcher: Told of its queries now and then.
    """

    def method(task: FinetuneTask, earlier: Mapping[str, MethodResult]) -> MethodResult:
        before, start, asked = earlier["metricopt"], Start(task.origin()), 0
        if before.result is not None and not before.result.details.finetunes:
            start, asked = before.result.candidates[before.result.begun_at], len(before.result.candidates)
        budget = before.reached[-1].queries if isinstance(queries, str) else queries
        own, shown = with_start(task, start), Within(watcher, METHODS[name].title, budget)
        told = own.judged_by(own.metric.with_observers(Spent(shown, asked)))
        (reached,) = contender.run(told, start.phi, [budget - asked], seed)
        assert isinstance(reached.end, Tensor)
        own.adapter.set_phi(reached.end)
        end, total = reached.end if own.adapter is task.adapter else own.adapter.model, reached.queries + asked
        return MethodResult((replace(reached, end=end, queries=total, queries_per_start=total),))

    return method
