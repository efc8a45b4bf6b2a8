"""One seed of evidence: MetricOpt beside what it has to beat, in the same process and on the same splits."""

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from metricopt_ext.errors import FileFormatError
from metricopt_ext.evidence.record import Outcome, SeedRecord
from metricopt_ext.evidence.rivals import Rival, best_of_loss_finetune
from metricopt_ext.evidence.trivial import trivial_predictors
from metricopt_ext.methods.pipeline import optimize_metric
from metricopt_ext.methods.recipe import Recipe
from metricopt_ext.methods.tuning import finetune, metric_policy
from metricopt_ext.search.optimizer import LossStep
from metricopt_ext.tasks.metric import Metric
from metricopt_ext.tasks.task import FinetuneTask
from metricopt_ext.utils.files import claim
from metricopt_ext.utils.progress import Watcher

# Settings that a resumed run may change: which seeds to run, and how.
RUN_AGAIN_KEYS = ("seed", "seeds", "workers", "device")


def compare(
    task: FinetuneTask,
    test_metric: Metric,
    rivals: Mapping[str, Rival],
    follow_ups: Mapping[str, Rival] | None = None,
    *,
    queries: int,
    recipe: Recipe,
    seed: int,
    folder: Path,
    best_evals: int,
    pictures: bool = False,
    resume: bool = False,
    watcher: Watcher | None = None,
) -> SeedRecord:
    """Run MetricOpt and its rivals from phi = 0, and judge each end point on the test data, once.

    Args:
        task: The task; its metric looks at the validation data.
        test_metric: The same metric on the test data.
        rivals: Further methods by name: each is given the task, with a ledger of its own, and MetricOpt's result, and
            returns the phi it visited, ``(T + 1) x d``, its end point alone, ``d``, or a model of its own, or
            None where it does not apply.
        follow_ups: Further methods that go on from MetricOpt's result; what it spent counts as theirs too.
        queries: Metric queries of MetricOpt in all.
        recipe: How MetricOpt works; loss-only finetuning shares its steps and rate.
        seed: The seed.
        folder: Receives what `optimize_metric` keeps.
        best_evals: Queries of the rival that keeps the best of evaluated steps of the loss finetune.
        pictures: Whether to draw the value function into ``folder``; its landscape evaluates the metric 169 times more,
            which no method sees.
        resume: Go on with what an interrupted run left in ``folder``.
        watcher: Is told of the progress.

    Returns:
        The record; the model is left with MetricOpt's phi.
    """
    clock = _Clock()
    result = optimize_metric(
        task, queries=queries, strategy=recipe, seed=seed, output_dir=folder, resume=resume, watcher=watcher
    )
    clock.lap("metricopt")
    tuned = task.adapter.phi.detach().clone()

    aside = task.judged_by(task.metric.with_new_ledger())  # what rivals and curves spend is not MetricOpt's expense
    paths = {"loss_finetune": finetune(aside, LossStep(recipe.lr), recipe.steps, seed)}
    clock.lap("loss_finetune")
    best = best_of_loss_finetune(aside, paths["loss_finetune"], best_evals)
    clock.lap("loss_finetune_best", "loss_finetune")
    spent = {
        "loss_finetune_best": (aside.metric.ledger.spent,) * 2,
        "metricopt": (sum(result.queries.values()), result.queries_per_start),
    }
    ends: dict[str, Tensor | nn.Module] = {
        "pretrained": task.origin(),
        "loss_finetune": paths["loss_finetune"][-1],
        "loss_finetune_best": best,
    }
    for name, rival in {**rivals, **(follow_ups or {})}.items():
        before = aside.metric.ledger.spent
        outcome = rival(aside, result)
        clock.lap(name)
        own, earlier = aside.metric.ledger.spent - before, (0, 0) if name in rivals else spent["metricopt"]
        spent[name] = (earlier[0] + own, earlier[1] + own)
        if isinstance(outcome, nn.Module) or (outcome is not None and outcome.dim() == 1):
            ends[name] = outcome
        elif outcome is not None:
            paths[name], ends[name] = outcome, outcome[-1]
    ends["metricopt"] = tuned
    paths["metricopt"] = finetune(aside, metric_policy(result.fit.f, recipe, result.setting), recipe.steps, seed)

    validation, test = task.judged_by(task.metric.with_new_ledger()), task.judged_by(test_metric)
    outcomes = {
        name: Outcome(
            _judge(validation, end), _judge(test, end), *spent.get(name, (0, 0)), clock.seconds.get(name, 0.0)
        )
        for name, end in ends.items()
    }
    if pictures:
        from metricopt_ext.evidence.value_plots import draw_value_function

        shown = {name: paths[name] for name in ("loss_finetune", "metricopt")}
        draw_value_function(validation, result, shown, folder)
    curves = {name: [_judge(validation, phi) for phi in path] for name, path in paths.items()}
    assert result.fit.f.quality is not None
    to_value = task.metric.to_value
    return SeedRecord(
        seed=seed,
        outcomes=outcomes,
        quality=result.fit.f.quality,
        candidates=result.fit.candidates,
        trivial=trivial_predictors(result.trajectories, folds=recipe.folds_for(len(result.trajectories)), seed=seed),
        kept=result.chosen,
        setting=result.setting,
        split_half=None if math.isnan(result.split_half) else result.split_half,
        chance=result.chance,
        curves=curves,
        true=[to_value(cost) for cost in result.fit.true.tolist()],
        predicted=[to_value(cost) for cost in result.fit.predicted.tolist()],
    )


def open_run(folder: Path, config: dict[str, Any], resume: bool) -> None:
    """Make a run's output folder its own; seeds may be added to a run, other settings may not change.

    A run that failed before it made anything, a ``seed-N`` folder that is, does not hold the folder.

    Raises:
        FileFormatError: The folder holds a run, and ``resume`` is False or its settings differ.
    """
    if not any(folder.glob("seed-*")):
        (folder / "run.json").unlink(missing_ok=True)
    if (folder / "run.json").exists() and not resume:
        raise FileFormatError(f"{folder} holds an earlier run: add --resume to go on with it, or use another folder")
    claim(folder / "run.json", {key: value for key, value in config.items() if key not in RUN_AGAIN_KEYS})


def _judge(task: FinetuneTask, end: Tensor | nn.Module) -> float:
    cost = task.metric.cost(end, "judge") if isinstance(end, nn.Module) else task.cost(end, "judge")
    return task.metric.to_value(cost)


class _Clock:
    """Seconds of consecutive stages."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str, on_top_of: str | None = None) -> None:
        """Book the time since the last lap; a stage that needs another's work first counts that as well."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.seconds[name] = now - self._last + (self.seconds[on_top_of] if on_top_of else 0.0)
        self._last = now
