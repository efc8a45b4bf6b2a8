"""Recipes: their ranges, their budgets, and what on-policy tasks draw."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch

from helpers.refusals import assert_refused
from metricopt_ext.errors import BudgetError
from metricopt_ext.methods.recipe import Recipe
from metricopt_ext.methods.recipe_settings import LEAST_TASKS, StepWeights
from metricopt_ext.value.labels import LinearLabels
from metricopt_ext.value.learners import RidgeLearner

RECIPE = Recipe(steps=10, lr=0.1, evals=3, rounds=2, folds=2, trials=1, learners=(RidgeLearner(),))


@pytest.mark.parametrize(
    ("name", "value", "names"),
    [
        ("steps", 1, ("steps", "1", "2")),
        ("evals", 1, ("evals", "1", "2")),
        ("rounds", 0, ("rounds", "0", "1")),
        ("folds", 1, ("folds", "1", "2")),
        ("trials", -1, ("trials", "-1", "0")),
        ("lr", 0.0, ("lr", "0.0")),
        ("lr", math.nan, ("lr", "nan")),
        ("start_std", -0.5, ("start_std", "-0.5")),
        ("explored_step", 0.0, ("explored_step", "0.0")),
        ("evals", 12, ("12", "10", "11")),
        ("settings", (), ("settings",)),
        ("settings", (0.0, 0.1, 0.2), ("settings", "0.0")),
        ("settings", ((0.3, math.nan),), ("metric_step", "nan")),
        ("settings", ((-0.3, 0.1),), ("loss_weight", "-0.3")),
        ("settings", (("0.3", 0.1),), ("loss_weight", "0.3")),
        ("explored_step", math.inf, ("explored_step", "inf")),
        ("steps", 10.0, ("steps", "10.0")),
        ("trials", True, ("trials", "True")),
        ("rounds", None, ("rounds", "None")),
        ("learners", (), ("learners",)),
        ("learners", (RidgeLearner,), ("learners", "RidgeLearner")),
        ("learners", ("ridge", "neural"), ("ridge",)),
        ("learners", "ridge", ("learners", "ridge", "RidgeLearner()")),
        ("learners", RidgeLearner(groups=4), ("groups=4", "RidgeLearner()")),
        ("labels", None, ("labels", "None")),
        ("labels", "gp", ("'gp'",)),
        ("labels", LinearLabels, ("labels", "LinearLabels")),
    ],
)
def test_a_recipe_out_of_range_is_refused(name: str, value: Any, names: tuple[str, ...]) -> None:
    assert_refused(lambda: replace(RECIPE, **{name: value}), ValueError, *names)


def test_settings_may_be_given_as_pairs() -> None:
    recipe = replace(RECIPE, settings=[(0.5, 0.1), StepWeights(0.0, 0.2)])
    assert recipe.settings == (StepWeights(0.5, 0.1), StepWeights(0.0, 0.2))
    assert [setting.metric_step for setting in recipe.settings] == [0.1, 0.2]
    assert recipe == replace(RECIPE, settings=((0.5, 0.1), (0.0, 0.2)))


def test_explored_settings_are_uniform_weights_and_log_uniform_steps() -> None:
    n = 4000
    weight, step = RECIPE.explored_settings(3, range(n)).double().unbind(1)
    logs = (step / RECIPE.explored_step).log() / math.log(3)  # uniform in [-1, 1]
    for drawn, low, high in ((weight, 0, 1), (logs, -1, 1)):
        assert low <= float(drawn.min()) < low + 0.01
        assert high - 0.01 < float(drawn.max()) <= high
        assert scipy.stats.kstest(drawn.numpy(), scipy.stats.uniform(low, high - low).cdf).pvalue > 0.001
    assert abs(np.corrcoef(weight, logs)[0, 1]) < 4 / n**0.5


def test_explored_settings_belong_to_seed_and_index() -> None:
    drawn = RECIPE.explored_settings(3, range(20))
    assert torch.equal(RECIPE.explored_settings(3, [17, 2]), drawn[[17, 2]])
    assert not torch.isclose(RECIPE.explored_settings(4, range(20)), drawn).any()
    assert len(drawn.unique(dim=0)) == 20


@pytest.mark.parametrize(
    ("change", "choice"),
    [
        ({}, 6),
        ({"trials": 0}, 3),
        ({"trials": 4}, 15),
        ({"settings": ((0.0, 0.1),)}, 0),  # nothing to choose
    ],
)
def test_queries_that_are_planned_besides_collection(change: dict[str, Any], choice: int) -> None:
    recipe = replace(RECIPE, **change)
    assert recipe.choice_queries == choice
    fixed, per_task = choice + 5, 2 * 3  # two rounds of three observations
    for tasks in (4, 7, 50):
        assert recipe.tasks_per_round(fixed + tasks * per_task) == tasks
        assert recipe.tasks_per_round(fixed + (tasks + 1) * per_task - 1) == tasks
    least = fixed + LEAST_TASKS * per_task
    assert_refused(lambda: recipe.tasks_per_round(least - 1), BudgetError, least - 1, "queries", "2", least)


def test_every_part_has_two_trajectories_where_there_are_enough() -> None:
    recipe = replace(RECIPE, folds=4)
    assert [recipe.folds_for(n) for n in (3, 4, 6, 8, 99)] == [2, 2, 3, 4, 4]


@pytest.mark.parametrize("pair", [(0.1,), (0.1, 0.2, 0.3)])
def test_a_setting_is_a_pair(pair: tuple[float, ...]) -> None:
    assert_refused(lambda: Recipe(settings=(pair,)), ValueError, "settings", "0.1")
