"""The whole job under one budget, on tasks whose loss and metric are known in closed form."""

import copy
import math
import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers.quadratics import QuadraticLearner
from helpers.refusals import assert_named, assert_refused
from metricopt_ext import (
    Callback,
    FinetuneTask,
    Metric,
    Result,
    Setting,
    Settings,
    Start,
    TensorBatches,
    optimize_metric,
)
from metricopt_ext.adapters.attach import attach_film, attach_input_bias
from metricopt_ext.adapters.signature import Outputs
from metricopt_ext.errors import AdapterError, BudgetError, FileFormatError, MetricError, WeightsError
from metricopt_ext.methods.paper.joint import AlgorithmS1
from metricopt_ext.methods.paper.recipe import Algorithm1, Recipe
from metricopt_ext.search.direct import CMAES, GuidedES

# Two rounds of six tasks with three observations, six queries to choose and three for the guard; two more are planned
# for, which only metrics need that tell halves.
RECIPE = Recipe(steps=10, lr=0.1, evals=3, rounds=2, folds=2, trials=1, learner=QuadraticLearner())
QUERIES = 47


def go(task: Any, *, queries: int = QUERIES, recipe: Recipe = RECIPE, **arguments: Any) -> Result:
    return optimize_metric(task, queries=queries, strategy=recipe, **{"callback": Callback(), **arguments})


@pytest.mark.parametrize("strategy", [RECIPE, CMAES()], ids=["recipe", "search"])
def test_a_phi_that_the_model_held_before_counts_for_nothing(quadratic: Callable[..., Any], strategy: Any) -> None:
    plain, tuned = quadratic(), quadratic()
    tuned.adapter.set_phi(tuned.goal)
    for task in (plain, tuned):
        optimize_metric(task, queries=QUERIES, strategy=strategy, callback=Callback())
    assert torch.equal(tuned.adapter.phi, plain.adapter.phi)


@pytest.mark.parametrize("starts", [{}, {"moved": Start(torch.zeros(7), {"1.bias": torch.ones(4)})}])
def test_a_query_s_model_has_its_phi_in_its_own_tensors(starts: dict[str, Start]) -> None:
    """Whatever reads its state dict, as a program that is given a checkpoint, judges the same model."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 3))
    bare, x, y, seen = copy.deepcopy(model), torch.randn(30, 3), torch.arange(30) % 3, list[Tensor]()

    def metric(model: nn.Module) -> float:
        bare.load_state_dict({key: each for key, each in model.state_dict().items() if "metricopt" not in key})
        assert torch.equal(bare(x), model(x))
        seen.append(bare(x))
        return -float(nn.functional.cross_entropy(bare(x), y).detach())

    task = FinetuneTask(
        attach_film(model, dim=4, outputs=Outputs()),
        loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        batches=TensorBatches(x, y, 10),
        metric=Metric(metric, maximize=True, bounds=None),
    )
    optimize_metric(task, queries=12, starts=starts, callback=Callback())
    assert not any(torch.equal(first, second) for first, second in pairwise(seen))


# --- What it costs ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", [RECIPE, GuidedES(), None], ids=["recipe", "search", "guided"])
def test_a_loss_without_a_gradient_costs_no_query(quadratic: Callable[..., Any], strategy: Any) -> None:
    task = replace(quadratic(), loss=lambda model, batch: (model.metricopt.value() > 0).sum())
    assert_refused(
        lambda: optimize_metric(task, queries=QUERIES, strategy=strategy, callback=Callback()), AdapterError, "phi"
    )
    assert task.queries == 0


@pytest.mark.parametrize(
    "strategy",
    [RECIPE, None, pytest.param(AlgorithmS1(steps=4, evals=2, tasks=2, updates=2), marks=pytest.mark.slow)],
    ids=["recipe", "guided", "learned"],
)
def test_the_errors_of_f_are_in_the_metrics_own_unit(quadratic: Callable[..., Any], strategy: Any) -> None:
    """Of a metric in percent they are a hundred times those of the same in shares, in numbers and in words."""

    def run(whole: float) -> Result:
        task = quadratic()
        metric = Metric(lambda model: whole * math.exp(-task.distance(model)), maximize=True, bounds=(0, whole))
        return optimize_metric(task.judged_by(metric), queries=QUERIES, strategy=strategy, callback=Callback())

    share, percent = run(1.0), run(100.0)
    for one, other in zip(errors_of(share), errors_of(percent), strict=True):
        assert other == pytest.approx(100 * one, rel=1e-3, abs=0.006)


def errors_of(result: Result) -> list[float]:
    """What a run says of f after each correlation."""
    (line,) = (line for line in str(result).splitlines() if "Spearman" in line)
    said = [float(each) for each in re.findall(r"[\d.]+\d", line.partition("mean absolute error")[2])]
    assert len(said) >= 2
    return said


# --- Weights -----------------------------------------------------------------------------------------------------


def changing(at: int, entry: int) -> tuple[FinetuneTask, list[None]]:
    """A task whose metric changes an entry of a layer's weight at one query, without a trace; what was asked."""
    layer, asked = nn.Linear(100, 100), list[None]()

    def distance(model: Any) -> float:
        asked.append(None)
        if len(asked) == at:
            model.weight.data.view(-1)[entry] += 1
        return float((model.metricopt.phi.detach() - 1).square().sum())

    task = FinetuneTask(
        attach_input_bias(layer, dim=4),
        loss=lambda model, batch: (model.metricopt.value() - batch).square().sum(),
        batches=lambda seed, index, step: torch.full((4,), float(index % 3)),
        metric=Metric(distance, maximize=False, bounds=None, name="distance"),
    )
    return task, asked


@pytest.mark.parametrize(
    "strategy",
    [RECIPE, Algorithm1(steps=8, evals=3), CMAES(), None],
    ids=["recipe", "paper", "cma", "guided"],
)
def test_a_metric_that_changes_the_weights_ends_the_run(strategy: Any, tmp_path: Path) -> None:
    """At its query where the entry is among those that are looked at then, and at the end at the latest."""
    for entry in (0, 1):
        (task, asked), folder = changing(4, entry), tmp_path / str(entry)
        with pytest.raises(WeightsError):
            optimize_metric(task, queries=QUERIES, strategy=strategy, callback=Callback(), output_dir=folder)
        assert not (folder / "adapter.safetensors").exists()
        assert (len(asked) == 4) == (entry == 0)


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("trace", [False, True])
def test_a_loss_that_changes_the_weights_is_refused(
    quadratic: Callable[..., Any], trace: bool, kept: bool, tmp_path: Path
) -> None:
    task = quadratic(population=1)

    def loss(model: Any, batch: Any) -> Any:
        with torch.no_grad():
            (model.weight if trace else model.weight.data).clamp_(-0.1, 0.1)
        return task.problem.loss(model, batch)

    options = {"queries": 30, "callback": Callback(), "output_dir": tmp_path if kept else None}
    assert_refused(lambda: optimize_metric(replace(task, loss=loss), **options), WeightsError, "loss")


# --- Interrupted runs ------------------------------------------------------------------------------------------


def test_damaged_files_are_named(quadratic: Callable[..., Any], tmp_path: Path) -> None:
    go(quadratic(), output_dir=tmp_path)
    damaged = tmp_path / "trajectories" / "round-0-task-00002.safetensors"
    whole = damaged.read_bytes()
    for rubbish in (whole[: len(whole) // 2], b""):
        damaged.write_bytes(rubbish)
        assert_refused(lambda: go(quadratic(), output_dir=tmp_path, resume=True), FileFormatError, damaged)
    damaged.unlink()
    task = quadratic()
    go(task, output_dir=tmp_path, resume=True)
    assert task.queries == 0  # the log has its evaluations
    (tmp_path / "log.jsonl").write_text("[]\n")
    assert_refused(lambda: go(quadratic(), output_dir=tmp_path, resume=True), FileFormatError, "log.jsonl")


# --- What is left behind ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", [RECIPE, CMAES()], ids=["recipe", "search"])
def test_a_failed_run_is_charged_unless_its_work_is_kept(
    quadratic: Callable[..., Any], tmp_path: Path, strategy: Any
) -> None:
    for folder, charged in ((None, 31), (tmp_path, 0)):
        task = quadratic(budget=100)
        task.problem.fail_after = 30
        with pytest.raises(MetricError) as caught:
            optimize_metric(task, queries=QUERIES, strategy=strategy, output_dir=folder, callback=Callback())
        assert_named(caught, "server")
        assert task.queries == 31
        assert task.metric.ledger.spent == charged


# --- What is refused -------------------------------------------------------------------------------------------

WRONG_ARGUMENTS: list[tuple[dict[str, Any], type[Exception], tuple[Any, ...]]] = [
    *(({name: value}, ValueError, (name, value)) for name in ("queries", "seed") for value in (30.5, True, -5, None)),
    ({"strategy": CMAES}, ValueError, ("strategy", "CMAES")),
    ({"strategy": RECIPE, "starts": {"a": Start(torch.zeros(4))}}, ValueError, ("starts",)),
    ({"starts": {"a": Start(torch.zeros(3))}}, AdapterError, ("'a'", "phi", "(3,)")),
    ({"starts": {"search": Start(torch.zeros(4))}}, ValueError, ("search",)),
    ({"starts": []}, ValueError, ("starts", "[]")),
    ({"guard_confidence": 0.4}, ValueError, ("guard_confidence", "0.4", "0.5", "1")),
    ({"callback": print}, ValueError, ("callback", "Callback")),
    ({"queries": 6}, BudgetError, ("6", "queries", "7")),
    ({"queries": 7, "starts": {"a": Start(torch.zeros(4))}}, BudgetError, ("8",)),
    ({"strategy": RECIPE, "queries": 20}, BudgetError, ("20", "queries")),
]


@pytest.mark.parametrize(("arguments", "error", "names"), WRONG_ARGUMENTS)
def test_bad_arguments_cost_nothing_and_leave_nothing(
    quadratic: Callable[..., Any], tmp_path: Path, arguments: Any, error: Any, names: tuple[Any, ...]
) -> None:
    task = quadratic()
    given = {"queries": 60, "output_dir": tmp_path / "run", "callback": Callback(), **arguments}
    assert_refused(lambda: optimize_metric(task, **given), error, *names)
    assert task.queries == 0
    assert not (tmp_path / "run").exists()


# --- Gains beyond chance -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", [None, RECIPE], ids=["guided", "recipe"])
def test_repeats_share_the_budget_and_tell_chance(quadratic: Callable[..., Any], strategy: Any) -> None:
    task = quadratic()
    rng = torch.Generator().manual_seed(0)

    def noisy(model: Any) -> float:
        return task.distance(model) + 0.3 * float(torch.randn((), generator=rng))

    metric = Metric(noisy, maximize=False, bounds=None, repeats=2)
    result = optimize_metric(task.judged_by(metric), queries=2 * QUERIES, strategy=strategy, callback=Callback())
    assert task.problem.queries == metric.ledger.spent == sum(result.queries.values()) <= 2 * QUERIES
    if strategy is None:  # f and the guard know of the noise
        assert result.fit is not None
        assert result.fit.f.noise_std(result.points[0]) > 0.1
        assert result.chance > 0.1


def test_learners_refuse_what_they_do_not_heed(quadratic: Callable[..., Any]) -> None:
    """Constraints, and settings of inference to tune."""
    task = quadratic()
    bounded = task.judged_by(Metric(task.distance, maximize=False, bounds=None, subject_to={"b": ">= 0"}))
    settings = Settings([Setting("size", values=(1, 2), default=1)], lambda values: nullcontext())
    for strategy in (RECIPE, Algorithm1(), AlgorithmS1()):
        for each in (bounded, replace(task, settings=settings)):
            options = {"queries": 500, "strategy": strategy}
            assert_refused(lambda: optimize_metric(each, **options), ValueError, type(strategy).__name__)  # noqa: B023
    assert task.queries == 0
