"""MetricOpt (learned) as a method of the tools."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from metricopt_ext.evidence.method import Meter, Method, MethodResult
from metricopt_ext.evidence.run_config import RunConfig
from metricopt_ext.methods.siblings.learned import metricopt_learned
from metricopt_ext.tasks.task import FinetuneTask
from metricopt_ext.utils.progress import Watcher


def learned_method(
    config: RunConfig,
    seed: int,
    *,
    folder: Path | None = None,
    resume: bool = False,
    watcher: Watcher | None = None,
) -> Method:
    """Return the method: an optimizer is learned by Algorithm S1, and phi finetuned with it from phi = 0.

    Args:
        config: The run's settings.
        seed: Seed of all draws.
        folder: The seed's folder; the method keeps its work and its optimizer in ``metricopt_learned`` there.
        resume: Continue what an interrupted run left there.
        watcher: Told the stages alone: queries shown are MetricOpt's.
    """
    recipe = config.recipe.build()
    settings = config.learned.build(recipe)

    def method(task: FinetuneTask, earlier: Mapping[str, MethodResult]) -> MethodResult:
        meter = Meter(task)
        (watcher or Watcher()).stage("learn an optimizer")
        result = metricopt_learned(
            task,
            queries=config.learned.queries or config.queries,
            settings=settings,
            lr=recipe.lr,
            guard_confidence=config.guard_confidence,
            seed=seed,
            output_dir=None if folder is None else folder / "metricopt_learned",
            resume=resume,
            watcher=Watcher(),
        )
        reached = replace(meter.reached(result.ends[result.chosen]), queries_per_start=result.queries_per_start)
        return MethodResult((reached,), result.path)

    return method
