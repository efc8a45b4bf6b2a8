"""The paper's own forms of MetricOpt as methods of the tools, beside the one that ``method.name`` chooses."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from metricopt_ext.evidence.method import METHODS, Meter, Method, MethodResult
from metricopt_ext.evidence.method_config import LearnedConfig, PaperSettings
from metricopt_ext.evidence.run_config import RunConfig
from metricopt_ext.methods.pipeline import optimize_metric
from metricopt_ext.methods.result import Result
from metricopt_ext.tasks.task import FinetuneTask
from metricopt_ext.utils.progress import Watcher, Within


def variant_method(
    name: str,
    config: RunConfig,
    seed: int,
    *,
    folder: Path | None = None,
    resume: bool = False,
    watcher: Watcher | None = None,
) -> Method:
    """Return one of `run_config.VARIANTS`, from phi = 0.

    Args:
        name: ``metricopt_paper``, Algorithm 1 with the settings under ``paper``; or ``metricopt_learned``, an optimizer
            that is learned by Algorithm S1, with those under ``learned``.
        config: The run's settings.
        seed: Seed of all draws.
        folder: The seed's folder; the method keeps its work in a folder of its own name there.
        resume: Continue what an interrupted run left there.
        watcher: Told the stages, and of queries now and then: those counted are MetricOpt's.
    """
    output_dir, watcher = None if folder is None else folder / name, watcher or Watcher()
    settings = (config.learned or LearnedConfig()) if name == "metricopt_learned" else (config.paper or PaperSettings())
    strategy = settings.build(config.finetune)
    queries = (settings.queries if isinstance(settings, LearnedConfig) else 0) or config.queries

    def method(task: FinetuneTask, earlier: Mapping[str, MethodResult]) -> MethodResult:
        meter = Meter(task)
        watcher.stage(METHODS[name].title)
        result: Result[Any] = optimize_metric(
            task,
            queries=queries,
            strategy=strategy,
            guard_confidence=config.guard.confidence,
            seed=seed,
            output_dir=output_dir,
            resume=resume,
            watcher=Within(watcher, METHODS[name].title, queries),
        )
        reached = replace(meter.reached(result.ends[result.chosen]), queries_per_start=result.queries_per_start)
        return MethodResult((reached,), result.path)

    return method
