"""Pictures are looked at, not computed with: these tests hold the numbers that go into them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib.image
import pytest
import torch

import value_plots
from metricopt_ext.methods.pipeline import optimize_metric
from metricopt_ext.methods.recipe import Recipe
from metricopt_ext.methods.result import RecipeDetails, Result
from metricopt_ext.methods.tuning import finetune, metric_policy
from metricopt_ext.runtime.progress import Callback
from metricopt_ext.value.learners import NeuralLearner, RidgeLearner


def run(task: Any, learner: Any) -> tuple[Result[RecipeDetails], dict[str, torch.Tensor]]:
    recipe = Recipe(steps=8, evals=4, rounds=2, folds=2, trials=0, learners=(learner,))
    result = optimize_metric(task, queries=80, strategy=recipe, callback=Callback())
    return result, {"metricopt": finetune(task, metric_policy(result.fit.f, recipe, (0.3, 0.3)), 8, 0)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("learner", "names"),
    [
        (NeuralLearner(iterations=30), {"interpolation.png", "landscape.png", "embedding.png"}),
        (RidgeLearner(), {"interpolation.png", "landscape.png"}),
    ],
)
def test_draws_every_picture_that_the_value_function_has(
    quadratic: Callable[..., Any], tmp_path: Path, learner: Any, names: set[str]
) -> None:
    task = quadratic(dtype=torch.float32)
    result, paths = run(task, learner)
    aside = task.judged_by(task.metric.with_new_ledger())
    drawn = value_plots.draw_value_function(aside, result, paths, tmp_path, grid=5)
    assert {path.name for path in drawn} == {path.name for path in tmp_path.iterdir()} == names
    assert aside.metric.ledger.spent_on == {"picture": 25}
    for path in drawn:
        assert matplotlib.image.imread(path)[..., :3].std() > 0.01


def test_landscape_shows_f_and_the_metric_at_the_same_points(
    quadratic: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = quadratic(dtype=torch.float32)
    result, paths = run(task, RidgeLearner())
    drawn: dict[str, Any] = {}

    def keep(figure: Any, path: Path) -> Path:
        drawn["panels"] = [axes for axes in figure.axes if axes.get_title()]
        return path

    monkeypatch.setattr(value_plots, "save_figure", keep)
    asked = []
    judge = task.metric.judge
    monkeypatch.setattr(task.metric, "judge", lambda model: asked.append(model.metricopt.phi.clone()) or judge(model))
    value_plots.plot_landscape(task, result.fit.f, paths, tmp_path / "x.png", grid=4)
    points = torch.stack(asked)
    assert [axes.get_title() for axes in drawn["panels"]] == ["value function", "true metric"]
    assert torch.linalg.matrix_rank(points, atol=1e-5) == 2  # a plane through phi = 0

    plane = torch.linalg.svd(paths["metricopt"].double(), full_matrices=False)[2][:2].float()
    line = drawn["panels"][1].lines[0].get_xydata()
    assert torch.allclose(torch.tensor(line).float(), paths["metricopt"] @ plane.T, atol=1e-5)
    corners = points.view(4, 4, -1)[[0, -1], [0, -1]] @ plane.T
    assert (corners[0] < torch.tensor(line).float().amin(0)).all()
    assert (corners[1] > torch.tensor(line).float().amax(0)).all()
