"""How often each strategy changes a model whose metric is pure noise: what the guard is for."""

import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import metricopt_ext as mo
from helpers.refusals import assert_warned, having
from metricopt_ext.methods.algorithm1 import Algorithm1
from metricopt_ext.methods.algorithm_s1 import AlgorithmS1
from metricopt_ext.methods.recipe import Recipe
from metricopt_ext.runtime.progress import Callback
from metricopt_ext.search.direct import CMAES, GuidedES
from metricopt_ext.value.learners import RidgeLearner

SEEDS = 40
DEVIATION = 0.05  # of the metric, on [0, 1]
RECIPE = Recipe(steps=6, evals=3, rounds=2, folds=2, trials=1, learners=(RidgeLearner(),))

# Each with its number of evaluations.
STRATEGIES: dict[str, tuple[Any, int]] = {
    "guided search": (None, 60),
    "CMA-ES": (CMAES(), 60),
    "Guided ES": (GuidedES(), 60),
    "recipe": (RECIPE, 62),
    "Algorithm 1": (Algorithm1(steps=6, evals=3), 30),
    "Algorithm S1": (AlgorithmS1(steps=6, evals=3, tasks=2, pairs=2, hidden=4), 30),
}


def task_of(value: Callable[[], Any], **options: Any) -> mo.FinetuneTask:
    """A small classifier, whose metric has nothing to do with it."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        x = torch.randn(200, 6)
        model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)).eval()
    return mo.FinetuneTask(
        mo.attach_film(model, dim=4),
        loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        batches=mo.TensorBatches(x, (x[:, 0] > 0).long(), 32),
        metric=mo.Metric(lambda model: value(), maximize=True, name="noise", **options),
    )


def drawn(rng: random.Random) -> float:
    """A value of the metric on half of its data."""
    return min(1.0, max(0.0, 0.5 + DEVIATION * 2**0.5 * rng.gauss(0, 1)))


def changed(strategy: str, source: str, seed: int) -> bool:
    """Run a strategy on noise, and return whether it changed the model."""
    (method, evaluations), rng = STRATEGIES[strategy], random.Random(seed)

    def value() -> Any:
        halves = drawn(rng), drawn(rng)
        return (sum(halves) / 2, halves) if source == "halves" else sum(halves) / 2

    repeats = 3 if source == "repeats" else 1
    more = {"holdout": task_of(value).metric} if source == "held-out" else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # f is not to be trusted
        result: mo.Result = mo.optimize_metric(
            task_of(value, repeats=repeats),
            queries=repeats * evaluations,
            strategy=method,
            seed=seed,
            callback=Callback(),
            **more,
        )
    assert result.guard == source or (source == "held-out" and result.best == result.before)
    return result.chosen != "start"


@pytest.mark.outcome
@pytest.mark.slow
@pytest.mark.parametrize("source", ["repeats", "halves", "held-out"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_noise_changes_the_model_in_few_seeds(strategy: str, source: str) -> None:
    """Of 40 seeds repeats let 0 to 2 pass, halves 0 to 3.

    Data held out are two samples of a gain. The first was chosen to be above 0, so t lets 14% pass at most, of 40 seeds
    5.6 with a standard error of 2.2; it is 3 to 7. The better of both on the data held out, without t, would be 20.
    Half as many seeds do for strategies that fit networks, as the guard is the same.
    """
    few = strategy.startswith("Algorithm")
    most = {"held-out": 8 if few else 12}.get(source, 4 if few else 6)
    assert sum(changed(strategy, source, seed) for seed in range(SEEDS // 2 if few else SEEDS)) <= most


def run_with(halves: Callable[[float], Any], strategy: str, holdout: bool = False, **options: Any) -> mo.Result:
    """Run a strategy on noise that tells halves which can't be of two halves of data."""
    (method, evaluations), rng = STRATEGIES[strategy], random.Random(0)

    def value() -> Any:
        drew = drawn(rng)
        return drew, halves(drew)

    queries = options.get("repeats", 1) * evaluations
    more = {"holdout": task_of(lambda: drawn(rng)).metric} if holdout else {}
    task = task_of(value, **options)
    return mo.optimize_metric(task, queries=queries, strategy=method, callback=Callback(), **more)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_halves_that_are_none_are_said(strategy: str) -> None:
    with pytest.warns(UserWarning, match=having("halves")) as said:
        result = run_with(lambda value: (value, value), strategy)
    assert sum("the metric's halves " in str(each.message) for each in said) == 1
    assert (result.guard, result.chance, result.needed) == ("none", None, None)
    assert "unguarded" in str(result).splitlines()[0]
    assert "correlate" not in str(result)


def test_where_halves_are_none_chance_is_taken_from_elsewhere() -> None:
    repeated = assert_warned(lambda: run_with(lambda value: (value, value), "CMA-ES", repeats=3), "halves")
    assert repeated.guard == "repeats"
    aside = assert_warned(lambda: run_with(lambda value: (value, value), "CMA-ES", holdout=True), "halves")
    assert aside.best != aside.before
    assert aside.guard == "held-out"


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_number_is_unguarded(strategy: str) -> None:
    method, evaluations = STRATEGIES[strategy]
    rng = random.Random(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        result: mo.Result = mo.optimize_metric(
            task_of(lambda: drawn(rng)), queries=evaluations, strategy=method, callback=Callback()
        )
    assert (result.guard, result.chance, result.needed) == ("none", None, None)
    assert "unguarded" in str(result).splitlines()[0]
