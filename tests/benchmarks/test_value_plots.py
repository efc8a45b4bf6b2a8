"""Pictures are looked at, not computed with: these tests hold the queries that go into them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib.image
import pytest
import torch

import value_plots
from metricopt_ext.methods.optimize import optimize_metric
from metricopt_ext.methods.paper.recipe import Recipe, finetune
from metricopt_ext.runtime.progress import Callback
from metricopt_ext.value.learning import NeuralLearner


@pytest.mark.slow
def test_draws_every_picture_that_the_value_function_has(quadratic: Callable[..., Any], tmp_path: Path) -> None:
    task = quadratic(dtype=torch.float32)
    recipe = Recipe(steps=8, evals=4, rounds=2, folds=2, trials=0, learner=NeuralLearner(iterations=30))
    result = optimize_metric(task, queries=80, strategy=recipe, callback=Callback())
    paths = {"metricopt": finetune(task, recipe.policy(result.fit.f, (0.3, 0.3)), 8, 0)}
    aside = task.judged_by(task.metric.with_settings())
    drawn = value_plots.draw_value_function(aside, result, paths, tmp_path, grid=5)
    assert {path.name for path in drawn} == {path.name for path in tmp_path.iterdir()}
    assert {path.name for path in drawn} == {"interpolation.png", "landscape.png", "embedding.png"}
    assert aside.metric.ledger.spent_on == {"picture": 25}
    for path in drawn:
        assert matplotlib.image.imread(path)[..., :3].std() > 0.01
