"""One start: finetune it under a value function, and keep the change only if the metric agrees beyond chance."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from metricopt_ext.methods.guard import CONFIDENCE, Verdict, decide_among
from metricopt_ext.methods.paper.recipe_settings import RecipeSettings, StepWeights, checked_weights
from metricopt_ext.methods.strategy import check_constraints
from metricopt_ext.runtime.progress import Callback
from metricopt_ext.search.optimizer import LossStep, MetricOptStep
from metricopt_ext.tasks.evaluation import Evaluation
from metricopt_ext.tasks.split_half import optimism_of_gain
from metricopt_ext.tasks.task import FinetuneTask
from metricopt_ext.tasks.trajectories import Policy, rollout
from metricopt_ext.tasks.undone import undone_if_cut_short
from metricopt_ext.utils.checks import check_integer
from metricopt_ext.value.fitting import Fit
from metricopt_ext.value.value_function import ValueFunction

# Task indices from here on are never used in collection, so finetuning gets fresh starts and batches.
FRESH = 1_000_000


@dataclass(frozen=True)
class Tuned:
    """The outcome of tuning a start.

    Attributes:
        ends: End point phi, ``d``, of each candidate: ``"start"`` itself, ``"loss_finetune"`` and ``"metricopt"``.
        evaluations: The metric's evaluation of each of them.
        chosen: The candidate to keep.
        verdict: What the guard thinks of the best of the others than the start.
        path: The phi visited from the start to MetricOpt's end, ``(T + 1) x d``.
    """

    ends: dict[str, Tensor]
    evaluations: dict[str, Evaluation]
    chosen: str
    verdict: Verdict
    path: Tensor

    @property
    def best(self) -> str:
        """The candidate with the best metric, by chance or not."""
        return min(self.evaluations, key=lambda name: self.evaluations[name].cost)


@undone_if_cut_short
def tune_start(
    task: FinetuneTask,
    fit: Fit,
    *,
    recipe: RecipeSettings | None = None,
    setting: StepWeights | None = None,
    start: Tensor | None = None,
    index: int = FRESH,
    guard_confidence: float = CONFIDENCE,
    seed: int = 0,
    callback: Callback | None = None,
) -> Tuned:
    """Finetune one start under a value function learned earlier; at most `START_QUERIES` queries.

    The metric judges the start, the end of a loss-only finetune and MetricOpt's end, and, if it reports halves, two
    ends that show how optimistic MetricOpt's gain is. The start is kept unless another end is better by more
    than chance and optimism (`guard.decide_among`).

    Args:
        task: Model, loss, batches and metric. The model is left unchanged: set the phi of ``ends[chosen]`` yourself.
        fit: The value function with its held-out quality; without skill it is not followed. For one from a file,
            ``Fit(load_value_function(path))``, on phi's device, the ends alone show how large chance is.
        recipe: How the start is tuned.
        setting: How boldly f is followed; by default the recipe's first.
        start: phi_0, ``d``; by default 0, the model as it was trained.
        index: The task index, for the batches; a different one for each start.
        guard_confidence: How sure the guard must be that a gain is not chance, at least 0.5 and below 1.
        seed: Seed of batches and search.
        callback: Notified of progress.

    Raises:
        ValueFunctionError: f was fitted for another adapter.
        ValueError: ``setting``, ``index`` or ``seed`` is out of range, or the metric is subject to constraints.
    """
    check_constraints(task.metric, "tune_start")
    fit.f.check_fits(task.adapter.signature)
    recipe, callback = recipe or RecipeSettings(), callback or Callback()
    start = task.origin() if start is None else start
    setting = recipe.settings[0] if setting is None else checked_weights(setting)
    check_integer(0, index=index, seed=seed)

    with task.metric.calling(callback.answered):
        return _tuned(task, fit, recipe, setting, start, index, guard_confidence, seed, callback)


def _tuned(
    task: FinetuneTask,
    fit: Fit,
    recipe: RecipeSettings,
    setting: StepWeights,
    start: Tensor,
    index: int,
    guard_confidence: float,
    seed: int,
    callback: Callback,
) -> Tuned:
    def follow(policy: Policy) -> Tensor:
        return finetune(task, policy, recipe.steps, seed, start, index)

    callback.stage("finetune")
    loss_only = follow(LossStep(recipe.lr))
    path = follow(metric_policy(fit.f, recipe, setting)) if fit.f.trusted else loss_only
    ends = {"start": start, "loss_finetune": loss_only[-1], "metricopt": path[-1]}

    callback.stage("guard")
    evaluations: dict[str, Evaluation] = {}
    for name, phi in ends.items():
        same = next((other for other in evaluations if torch.equal(ends[other], phi)), None)
        evaluations[name] = evaluations[same] if same else task.evaluate(phi, "guard", f"end guard, {name}")

    crossed = []
    if fit.f.trusted:
        for half, f in enumerate(fit.half_fits):
            # With half the data f may look untrusted; not following it here would show no optimism at all.
            end = follow(replace(metric_policy(f, recipe, setting), even_untrusted=True))[-1]
            crossed.append(task.evaluate(end, "guard", f"cross-check, half {half}"))
    led = optimism_of_gain(crossed)
    decision = decide_among(evaluations, list(fit.visited), guard_confidence, {"metricopt": led})
    return Tuned(ends, evaluations, decision.kept, decision.verdict, path)


def evaluate_ends(task: FinetuneTask, ends: Mapping[str, Tensor]) -> dict[str, Evaluation]:
    """Evaluate the metric at each end, ``d``, one query each."""
    return {name: task.evaluate(phi, "guard", f"end guard, {name}") for name, phi in ends.items()}


def choose_setting(task: FinetuneTask, fit: Fit, recipe: RecipeSettings, seed: int) -> StepWeights:
    """Try each setting from phi = 0 and a few random starts; the lowest mean cost wins."""
    if len(recipe.settings) == 1 or not fit.f.trusted:
        return recipe.settings[0]
    indices = range(FRESH + 1, FRESH + 1 + recipe.trials)
    starts = task.origin()[None]
    if recipe.trials:
        starts = torch.cat([starts, task.starts(recipe.start_std, seed, indices)])
    n, m = len(starts), len(recipe.settings)
    settings = torch.tensor(recipe.settings, dtype=starts.dtype, device=starts.device)
    weight, metric_step = settings.repeat_interleave(n, dim=0).split(1, 1)
    policy = MetricOptStep(fit.f, recipe.lr, metric_step, weight, recipe.steps)
    trial_tasks = [FRESH + 1 + recipe.trials, *indices] * m
    points, _ = rollout(task, starts.repeat(m, 1), policy, steps=recipe.steps, seed=seed, indices=trial_tasks)
    ends = enumerate(points[:, -1])
    costs = [task.evaluate(phi, "choose", f"choosing settings, trial {trial}").cost for trial, phi in ends]
    return recipe.settings[int(torch.tensor(costs).view(m, n).mean(1).argmin())]


def finetune(
    task: FinetuneTask,
    policy: Policy,
    steps: int,
    seed: int,
    start: Tensor | None = None,
    index: int = FRESH,
    callback: Callback | None = None,
) -> Tensor:
    """Finetune one start, by default phi = 0, without any query; returns the visited phi, ``(steps + 1) x d``."""
    phi = task.origin() if start is None else start
    points, _ = rollout(task, phi[None], policy, steps=steps, seed=seed, indices=[index], callback=callback)
    return points[0]


def metric_policy(f: ValueFunction, recipe: RecipeSettings, setting: StepWeights) -> MetricOptStep:
    """Return the step rule of finetuning under a setting."""
    loss_weight, metric_step = setting
    return MetricOptStep(f, recipe.lr, metric_step, loss_weight, recipe.steps)
