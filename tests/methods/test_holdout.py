"""What held-out data change about a run, on tasks known in closed form."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.quadratics import QuadraticLearner
from helpers.refusals import assert_named
from metricopt_ext import Callback, Metric, Result, Start, optimize_metric
from metricopt_ext.errors import BudgetError
from metricopt_ext.methods.guard import best_on_holdout
from metricopt_ext.methods.paper.recipe import Recipe
from metricopt_ext.search.direct import CMAES
from metricopt_ext.tasks.cost_scale import CostScale
from metricopt_ext.tasks.ledger import Ledger

RECIPE = Recipe(steps=10, lr=0.1, evals=3, rounds=2, folds=2, trials=1, learner=QuadraticLearner())


def away_from(point: Tensor) -> Metric:
    """The squared distance from a point, as a metric of held-out data."""
    return Metric(
        lambda model: float((model.metricopt.phi.detach() - point).square().sum()),
        maximize=False,
        bounds=None,
        name="aside",
        ledger=Ledger(3),
    )


def run(task: Any, *, queries: int = 30, **arguments: Any) -> Result:
    return optimize_metric(task, queries=queries, callback=Callback(), **arguments)


@pytest.mark.parametrize(("strategy", "queries"), [(None, 30), (CMAES(sigma0=0.3), 60), (RECIPE, 47)])
def test_what_is_worse_on_held_out_data_is_not_kept(quadratic: Callable[..., Any], strategy: Any, queries: int) -> None:
    task, without = quadratic(), quadratic()
    metric = away_from(task.origin())
    result = run(task, queries=queries, strategy=strategy, holdout=metric)
    expected = run(without, queries=queries, strategy=strategy)
    assert expected.chosen != "start"
    assert (result.chosen, result.after) == ("start", result.before)
    assert not task.adapter.phi.any()
    assert list(result.holdout) == ["start", expected.chosen]
    assert result.holdout["start"] == 0.0
    assert result.holdout[expected.chosen] == pytest.approx(
        float(without.adapter.phi.detach().square().sum()), rel=1e-12
    )
    assert metric.ledger.spent_on == {"holdout": 2}
    assert task.metric.ledger.spent_on == without.metric.ledger.spent_on


@pytest.mark.parametrize(("strategy", "queries"), [(None, 30), (CMAES(sigma0=0.3), 60), (RECIPE, 47)])
def test_what_is_better_there_too_is_kept(quadratic: Callable[..., Any], strategy: Any, queries: int) -> None:
    task, without = quadratic(), quadratic()
    result = run(task, queries=queries, strategy=strategy, holdout=away_from(task.goal))
    expected = run(without, queries=queries, strategy=strategy)
    assert torch.equal(task.adapter.phi, without.adapter.phi)
    assert (result.chosen, result.after) == (expected.chosen, expected.after)
    assert result.holdout[expected.chosen] == pytest.approx(expected.after, rel=1e-12)


def test_the_start_that_a_search_began_from_is_a_candidate(quadratic: Callable[..., Any]) -> None:
    task = quadratic()
    near = 0.8 * task.goal
    result = run(task, starts={"near": Start(near), "far": Start(-3 * task.goal)}, holdout=away_from(near))
    assert list(result.holdout) == ["start", "near", "search"]
    assert (result.chosen, result.after) == ("near", result.starts["near"])
    assert torch.equal(task.adapter.phi, near)


def test_what_can_not_judge_a_run_is_refused_before_any_query(quadratic: Callable[..., Any], tmp_path: Path) -> None:
    task = quadratic()

    def aside(function: Any = lambda model: 0.0, **options: Any) -> dict[str, Any]:
        given = {"maximize": False, "bounds": None, "name": "aside", **options}
        return {"holdout": Metric(function, **given)}

    task.metric.bounds = (0.0, 1.0)
    for arguments, error, names in (
        ({"holdout": lambda model: 0.0}, ValueError, ("Metric",)),
        ({"holdout": task.metric}, ValueError, ("distance",)),
        (aside(maximize=True), ValueError, ("aside", "distance")),
        (aside(subject_to={"b": ">= start"}), ValueError, ("aside", "subject_to", "distance")),
        (aside(bounds=(0, 100)), ValueError, ("bounds", "(0.0, 100.0)", "distance", "(0.0, 1.0)")),
        (aside(ledger=Ledger(2)), BudgetError, ("3", "queries", "2", "budget")),
    ):
        with pytest.raises(error) as caught:
            run(task, output_dir=tmp_path / "run", **arguments)
        assert_named(caught, *names)
    assert task.queries == 0
    assert not (tmp_path / "run").exists()


def test_held_out_data_are_a_guard_where_there_are_no_halves(quadratic: Callable[..., Any]) -> None:
    task, plain = quadratic(), quadratic()
    metric = task.metric
    result = run(task, holdout=away_from(task.goal))
    assert result.guard == "held-out"
    gains = [result.before - result.after, result.holdout["start"] - result.holdout[result.chosen]]
    assert result.chance == pytest.approx(abs(gains[0] - gains[1]) / 2, abs=1e-12)
    assert result.after == run(plain).after
    assert metric.ledger.spent == 30


SCORE = CostScale(maximize=True, bounds=(0.0, 1.0), name="score")


def test_where_chance_was_known_the_best_on_held_out_data_is_kept() -> None:
    values, aside = {"start": 0.5, "near": 0.6, "search": 0.9}, {"start": 0.5, "near": 0.7, "search": 0.6}
    assert best_on_holdout(values, aside, SCORE, "halves", 0.95) == ("near", None)
    assert best_on_holdout(values, {**aside, "start": 0.8}, SCORE, "repeats", 0.95) == ("start", None)
    chosen, verdict = best_on_holdout(values, aside, SCORE, "none", 0.7)
    assert chosen == "near"
    assert verdict is not None
    assert (verdict.gain, verdict.chance) == pytest.approx((0.15, 0.05))
