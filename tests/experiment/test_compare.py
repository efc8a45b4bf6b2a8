"""MetricOpt beside its baselines: outcomes against independent evaluation."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers.refusals import assert_refused
from metricopt_ext.errors import ConfigError
from metricopt_ext.experiment.baselines import at_each_budget, best_of_loss_finetune, ending_at
from metricopt_ext.experiment.compare import Comparison, compare
from metricopt_ext.experiment.method import METHODS, Baseline, Reached
from metricopt_ext.experiment.method_config import FinetuneConfig, RecipeConfig, SearchConfig
from metricopt_ext.experiment.run_config import RunConfig
from metricopt_ext.experiment.usual_methods import planned, usual_methods
from metricopt_ext.methods.optimize import optimize_metric
from metricopt_ext.methods.paper.recipe import Recipe, finetune
from metricopt_ext.runtime.progress import Callback
from metricopt_ext.search.optimizer import LossStep
from metricopt_ext.tasks.metric import Metric
from metricopt_ext.tasks.task import FinetuneTask

SPENT, QUERIES = 45, 47
CONFIG = RunConfig(
    finetune=FinetuneConfig(10, 0.1),
    method=RecipeConfig(evals=3, rounds=2, folds=2, trials=1),
    queries=QUERIES,
    methods=["loss_finetune_best"],
    best_evals=6,
)
RECIPE = CONFIG.build_strategy()
assert isinstance(RECIPE, Recipe)
USUAL = ["pretrained", "metricopt", "loss_finetune", "loss_finetune_best", "loss_finetune_validation"]


class Hidden:
    """The test metric: the distance to another goal, which counts how often it is called."""

    def __init__(self, goal: Tensor) -> None:
        self.goal, self.calls = goal, 0
        self.metric = Metric(self, maximize=False, bounds=None, name="distance")

    def at(self, phi: Tensor) -> float:
        return float(((phi - self.goal) ** 2).sum())

    def __call__(self, model: Any) -> float:
        self.calls += 1
        return self.at(model.metricopt.phi)


def beside(
    task: Any,
    folder: Path,
    more: Any = None,
    *,
    config: RunConfig = CONFIG,
    resume: bool = False,
    curves: bool = False,
) -> tuple[Comparison, Hidden]:
    hidden = Hidden(task.goal + 0.1)
    methods = usual_methods(config, 3, inputs=[], batches=task.batches, folder=folder, resume=resume)
    return compare(task, hidden.metric, {**methods, **(more or {})}, curves), hidden


def goes_on_from_metricopt(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setitem(METHODS, name, replace(METHODS[name], after="metricopt"))


def test_outcomes_are_what_the_ends_are_worth(quadratic: Callable[..., Any], tmp_path: Path) -> None:
    task, twin = quadratic(noise=2.0), quadratic(noise=2.0)
    comparison, hidden = beside(task, tmp_path, curves=True)
    alone = optimize_metric(twin, queries=QUERIES, strategy=RECIPE, seed=3, callback=Callback())
    path = finetune(twin, LossStep(0.1), 10, seed=3)
    best = min((path[step] for step in (0, 2, 4, 6, 8, 10)), key=twin.true_cost)  # 6 evenly spaced of 11 points
    ends = [torch.zeros(4, dtype=torch.float64), alone.ends[alone.chosen], path[-1], best, path[-1]]
    assert list(comparison.outcomes) == list(comparison.results) == USUAL
    for name, phi in zip(USUAL, ends, strict=True):
        (outcome,) = comparison.outcomes[name]
        asked = name != "loss_finetune_validation"
        assert outcome.validation == (pytest.approx(task.true_cost(phi), rel=1e-12) if asked else None)
        assert outcome.test == pytest.approx(hidden.at(phi), rel=1e-12)
    assert not torch.equal(best, path[-1])
    assert hidden.calls == hidden.metric.ledger.spent == len(ends)
    steered = finetune(twin, RECIPE.policy(alone.fit.f, alone.setting), 10, seed=3)
    on_loss = [twin.true_cost(phi) for phi in path]
    assert comparison.curves == {
        "loss_finetune": on_loss,
        "loss_finetune_validation": on_loss,  # here the labelled batches are those of the loss
        "metricopt": [twin.true_cost(phi) for phi in steered],
    }


def test_metrics_of_higher_is_better_keep_their_units(quadratic: Callable[..., Any], tmp_path: Path) -> None:
    lower, task = quadratic(), quadratic()
    higher = replace(task, metric=Metric(lambda model: 100 - task.distance(model), maximize=True, bounds=(0, 100)))
    a, b = beside(lower, tmp_path / "a")[0].outcomes, beside(higher, tmp_path / "b")[0].outcomes
    for name in ("pretrained", "loss_finetune", "loss_finetune_best"):
        assert b[name][0].validation == pytest.approx(100 - a[name][0].validation)
    assert b["metricopt"][0].validation >= max(b["pretrained"][0].validation, b["loss_finetune"][0].validation)


@pytest.mark.parametrize("best_evals", [1, 2, 4, 51])
def test_the_best_step_is_the_best_of_the_evaluated_ones(
    quadratic: Callable[..., Any], tmp_path: Path, best_evals: int
) -> None:
    task = quadratic(noise=2.0)
    comparison, _ = beside(task, tmp_path, config=replace(CONFIG, best_evals=best_evals))
    path = finetune(task, LossStep(0.1), 10, seed=3)
    evals = min(best_evals, 11)
    steps = [0] if evals == 1 else [round(i * 10 / (evals - 1)) for i in range(evals)]
    (outcome,) = comparison.outcomes["loss_finetune_best"]
    assert outcome.validation == min(task.true_cost(path[step]) for step in steps)
    assert (outcome.queries_total, outcome.queries_per_start) == (evals, evals)
    twin, asked = quadratic(noise=2.0), list[float]()
    twin.metric.callbacks.append(lambda query: asked.append(query.value))
    assert task.true_cost(best_of_loss_finetune(twin, path, best_evals)) == outcome.validation
    assert asked == [task.true_cost(path[step]) for step in steps]


def test_each_method_is_charged_with_what_it_spent(
    quadratic: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on_from_metricopt(monkeypatch, "guided_es")

    def search(task: FinetuneTask) -> Tensor:
        for phi in torch.randn(4, task.dim):
            task.evaluate(phi, "search")
        return task.origin()

    more = {
        "batchnorm_validation": planned(ending_at(lambda task: task.origin())),
        "cma_es": planned(at_each_budget(lambda task, *_: search(task)), 4),
        "guided_es": planned(at_each_budget(lambda task, *_: search(task)), 4),
    }
    task = quadratic()
    outcomes = beside(task, tmp_path, more)[0].outcomes
    assert {name: (o.queries_total, o.queries_per_start) for name, (o,) in outcomes.items()} == {
        "pretrained": (0, 0),
        "metricopt": (SPENT, 3),
        "loss_finetune": (0, 0),
        "loss_finetune_best": (6, 6),
        "loss_finetune_validation": (0, 0),
        "batchnorm_validation": (0, 0),
        "cma_es": (4, 4),
        "guided_es": (SPENT + 4, 3 + 4),
    }
    assert task.metric.ledger.spent == 0  # each had a ledger of its own


def test_methods_may_end_at_a_phi_a_model_or_not_at_all(quadratic: Callable[..., Any], tmp_path: Path) -> None:
    points = torch.randn(7, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def model(task: FinetuneTask) -> nn.Module:
        other = copy.deepcopy(task.adapter.model)
        other.metricopt.phi.data.copy_(points[3])
        return other

    def several(task: FinetuneTask, *_: Any) -> Iterator[Reached]:
        return (Reached(points[i], 10 * i, i, 0.5 * i, path=points) for i in (2, 5))

    task = quadratic()
    more = {
        "cma_es": planned(Baseline(several)),
        "guided_es": planned(ending_at(model)),
        "batchnorm_validation": planned(ending_at(lambda task: None)),
    }
    comparison, hidden = beside(task, tmp_path, more, curves=True)
    assert list(comparison.outcomes) == [*USUAL, "cma_es", "guided_es"]
    assert comparison.outcomes["guided_es"][0].validation == task.true_cost(points[3])
    for i, outcome in zip((2, 5), comparison.outcomes["cma_es"], strict=True):  # one for each number of queries
        assert (outcome.validation, outcome.test) == (task.true_cost(points[i]), hidden.at(points[i]))
        assert (outcome.queries_total, outcome.queries_per_start, outcome.seconds) == (10 * i, i, 0.5 * i)
    assert hidden.calls == len(USUAL) + 3
    assert comparison.curves["cma_es"] == [task.true_cost(phi) for phi in points]


def test_a_method_that_is_said_to_be_free_may_not_spend_queries(quadratic: Callable[..., Any], tmp_path: Path) -> None:
    def spending(task: FinetuneTask, *_: Any) -> Tensor:
        task.evaluate(task.origin(), "secretly")
        return task.origin()

    assert_refused(
        lambda: beside(quadratic(), tmp_path, {"batchnorm_validation": planned(at_each_budget(spending), 1)}),
        ConfigError,
        "batchnorm_validation",
        "1",
    )


def test_the_metric_is_asked_what_was_asked_for(quadratic: Callable[..., Any], tmp_path: Path) -> None:
    """MetricOpt's queries, of which the other ends of its own are known, and those of rows that are named."""
    config = replace(CONFIG, methods=[])
    for number, (methods, queries) in enumerate(((config, SPENT), (CONFIG, SPENT + 6 + 1))):
        task, calls = quadratic(), list[int]()
        task.metric.callbacks.append(lambda query, calls=calls: calls.append(query.spent))
        comparison, hidden = beside(task, tmp_path / str(number), config=methods)
        assert len(calls) == queries
        assert comparison.curves == {}
        assert hidden.calls == len(comparison.outcomes)
    assert "loss_finetune_best" in comparison.outcomes
    without = beside(quadratic(), tmp_path / "other", config=replace(config, starts=[], method=SearchConfig()))[0]
    assert without.outcomes["loss_finetune"][0].validation is None
    assert without.outcomes["pretrained"][0].validation == quadratic().true_cost(torch.zeros(4, dtype=torch.float64))
