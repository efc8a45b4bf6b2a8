"""Meta-training in rounds: collect trajectories, fit f to all of them, follow it in the next round."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

from metricopt_ext.errors import ValueFunctionError
from metricopt_ext.methods.paper.recipe_settings import RecipeSettings
from metricopt_ext.runtime.progress import Callback
from metricopt_ext.search.optimizer import LossStep, MetricOptStep
from metricopt_ext.tasks.split_half import evaluations_where_used, seen_on_half
from metricopt_ext.tasks.task import FinetuneTask
from metricopt_ext.tasks.trajectories import Policy, Trajectory, TrajectoryStore, collect
from metricopt_ext.tasks.undone import undone_if_cut_short
from metricopt_ext.utils.checks import check_integer
from metricopt_ext.value.fitting import Fit
from metricopt_ext.value.value_function import ValueFunction

# collect(round, indices, fit): collects the tasks of a round with any trainer that finetunes phi, under the previous
# round's fit, or under the loss alone for None; returns the trajectories of all rounds up to this one.
Collect = Callable[[int, Sequence[int], Fit | None], Sequence[Trajectory]]


@undone_if_cut_short
def meta_train(
    task: FinetuneTask,
    *,
    tasks: int,
    recipe: RecipeSettings | None = None,
    seed: int = 0,
    store: TrajectoryStore | None = None,
    callback: Callback | None = None,
) -> Fit:
    """Learn a value function from rounds of ``tasks`` trajectories (Algorithm 1, meta-training).

    The first round follows the loss alone; each later one follows the f fitted so far, with step lengths and loss
    weights drawn at random, so that f is corrected where it will be used.

    Args:
        task: Model, loss, batches and metric; ``rounds * tasks * evals`` queries are spent.
        tasks: Number of tasks per round.
        recipe: How f is learned.
        seed: Seed of all draws.
        store: Keeps the trajectories; those already in it are not collected again.
        callback: Notified of progress.

    Raises:
        ValueError: ``tasks`` is not an integer of at least 2.
    """
    recipe = recipe or RecipeSettings()
    store = TrajectoryStore() if store is None else store
    callback = callback or Callback()

    def collect_round(round: int, indices: Sequence[int], fit: Fit | None) -> list[Trajectory]:
        collect(
            task,
            store,
            partial(_collection_policy, fit, recipe, seed),
            round=round,
            indices=indices,
            start_std=recipe.start_std,
            steps=recipe.steps,
            evals=recipe.evals,
            seed=seed,
        )
        return [trajectory for trajectory in store if trajectory.round <= round]

    with task.metric.calling(callback.answered):
        return learn_in_rounds(
            collect_round, recipe, tasks=tasks, seed=seed, callback=callback, device=task.origin().device
        )


def _collection_policy(fit: Fit | None, recipe: RecipeSettings, seed: int, chunk: Sequence[int]) -> Policy:
    """Round 0 follows the loss; later rounds follow f, trusted or not: this is how it gets corrected."""
    if fit is None:
        return LossStep(recipe.lr)
    weight, metric_step = recipe.explored_settings(seed, chunk).to(fit.f.radius).split(1, 1)
    return MetricOptStep(fit.f, recipe.lr, metric_step, weight, recipe.steps, even_untrusted=True)


def learn_in_rounds(
    collect: Collect,
    recipe: RecipeSettings,
    *,
    tasks: int,
    seed: int,
    callback: Callback,
    device: torch.device | str = "cpu",
) -> Fit:
    """Learn f from rounds of ``tasks`` trajectories (Algorithm 1, meta-training).

    The first round follows the loss alone; each later one follows the f fitted so far, so that f is corrected where it
    will be used.

    Args:
        collect: Collects a round.
        recipe: Number of rounds, and how f is fitted.
        tasks: Number of tasks in a round.
        seed: Seed of the fits.
        callback: Notified of progress.
        device: Device that f is put on.

    Raises:
        ValueError: ``tasks`` is not an integer of at least 2: f is measured on trajectories that are held out.
    """
    check_integer(2, tasks=tasks)
    fit: Fit | None = None
    for round in range(recipe.rounds):
        skill = "loss only" if fit is None or fit.f.quality is None else f"f at {fit.f.quality.spearman:.2f}"
        callback.stage(f"round {round + 1}/{recipe.rounds}, {skill}")
        seen = collect(round, range(round * tasks, (round + 1) * tasks), fit)
        fit = recipe.fit(seen, seed)
        fit.f.to(device)
        assert fit.f.quality is not None  # the fit has measured it
        callback.quality(sum(len(trajectory.cost) for trajectory in seen), fit.f.quality.spearman)
    assert fit is not None
    half_fits = tuple(f.to(device) for f in _fit_halves(seen, recipe, seed))
    assert fit.f.quality is not None
    callback.say(f"value function ({fit.f.kind}): held-out Spearman {fit.f.quality.spearman:.2f}")
    return replace(fit, visited=evaluations_where_used(seen), half_fits=half_fits)


def _fit_halves(trajectories: Sequence[Trajectory], recipe: RecipeSettings, seed: int) -> tuple[ValueFunction, ...]:
    """Fit f to each half of the metric's data; none if the metric does not report halves, or one never varies."""
    if any(t.halves is None for t in trajectories):
        return ()
    try:
        return tuple(recipe.fit(seen_on_half(trajectories, half), seed).f for half in (0, 1))
    except ValueFunctionError:
        return ()
