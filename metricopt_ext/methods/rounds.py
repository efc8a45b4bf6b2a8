"""Meta-training in rounds: collect trajectories, fit f to all of them, let the next round follow it."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch

from metricopt_ext.errors import ValueFunctionError
from metricopt_ext.methods.recipe import Recipe
from metricopt_ext.tasks.split_half import halves_where_used, seen_on_half
from metricopt_ext.tasks.trajectory import Trajectory
from metricopt_ext.utils.progress import Watcher
from metricopt_ext.value.fitting import Fit
from metricopt_ext.value.value_function import ValueFunction


class Collect(Protocol):
    """Collects the trajectories of a round, by whatever trainer finetunes phi."""

    def __call__(self, round: int, indices: Sequence[int], fit: Fit | None) -> Sequence[Trajectory]:
        """Return the trajectories of all rounds up to this one.

        Args:
            round: The round, from 0.
            indices: Its task indices.
            fit: What its tasks follow; None for the loss alone.
        """
        ...


def learn_in_rounds(
    collect: Collect,
    recipe: Recipe,
    *,
    tasks: int,
    seed: int,
    watcher: Watcher,
    device: torch.device | str = "cpu",
) -> Fit:
    """Learn f from rounds of ``tasks`` trajectories (Algorithm 1, meta-training).

    The first round follows the loss alone; each later one follows the f fitted so far, so that f is corrected where it
    is going to be used.

    Args:
        collect: Collects a round.
        recipe: Number of rounds, and how f is fitted.
        tasks: Number of tasks in a round.
        seed: Seed of the fits.
        watcher: Is told of the progress.
        device: Where f is put.
    """
    fit: Fit | None = None
    for round in range(recipe.rounds):
        skill = "loss only" if fit is None or fit.f.quality is None else f"f at {fit.f.quality.spearman:.2f}"
        watcher.stage(f"round {round + 1}/{recipe.rounds}, {skill}")
        seen = collect(round, range(round * tasks, (round + 1) * tasks), fit)
        fit = recipe.fit(seen, seed)
        fit.f.to(device)
    assert fit is not None
    half_fits = tuple(f.to(device) for f in _fit_halves(seen, recipe, seed))
    watcher.say(f"value function ({fit.f.kind}): {fit.f.quality}")
    return replace(fit, halves=halves_where_used(seen), half_fits=half_fits)


def _fit_halves(trajectories: Sequence[Trajectory], recipe: Recipe, seed: int) -> tuple[ValueFunction, ...]:
    """Fit f to each half of the metric's data; none if the metric does not report halves, or one never differs."""
    if any(t.halves is None for t in trajectories):
        return ()
    try:
        return tuple(recipe.fit(seen_on_half(trajectories, half), seed).f for half in (0, 1))
    except ValueFunctionError:
        return ()
