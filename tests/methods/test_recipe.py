"""A recipe as a strategy: its size, what it depends on; its runs are those of tests/methods/test_pipeline.py."""

import json

from helpers.refusals import assert_refused
from metricopt_ext.errors import BudgetError
from metricopt_ext.methods.recipe import Recipe
from metricopt_ext.methods.recipe_settings import RecipeSettings
from metricopt_ext.value.learners import RidgeLearner

RECIPE = Recipe(steps=10, evals=3, rounds=2, trials=1, learners=(RidgeLearner(),))


def test_its_size_is_the_number_of_tasks_in_a_round() -> None:
    assert RECIPE.size(47, 4) == {"tasks": RECIPE.tasks_per_round(47)}
    assert_refused(lambda: RECIPE.size(20, 4), BudgetError, "20", "queries")


def test_its_identity_is_json_that_differs_where_a_setting_does() -> None:
    known = json.dumps(RECIPE.identity())
    assert json.dumps(Recipe(steps=10, evals=3, rounds=2, trials=1, learners=(RidgeLearner(),)).identity()) == known
    for other in (Recipe(steps=11), Recipe()):
        assert json.dumps(other.identity()) != known


def test_its_fields_are_those_of_its_settings() -> None:
    assert vars(Recipe()) == vars(RecipeSettings())
    assert repr(Recipe()).startswith("Recipe(steps=50")
