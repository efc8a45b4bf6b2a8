"""Baselines on a quadratic: where each stood at each budget, and that no query goes uncounted."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.inference import put_into
from metricopt_ext.adapters.start import Start
from metricopt_ext.errors import BudgetError
from metricopt_ext.experiment.baselines import (
    along_path,
    at_each_budget,
    metricopt,
    searched,
    searching,
    told_one_number,
    usual_baselines,
)
from metricopt_ext.experiment.compare import judge
from metricopt_ext.experiment.method import Baseline, Reached, Started
from metricopt_ext.experiment.passes import Passes, noticing
from metricopt_ext.experiment.run_config import RunConfig
from metricopt_ext.methods.optimize import optimize_metric
from metricopt_ext.runtime.progress import Callback
from metricopt_ext.search.direct import GuidedES, RandomSearch
from metricopt_ext.tasks.metric import Metric
from metricopt_ext.tasks.settings import Setting, Settings

BUDGETS = [20, 35, 60]


def run(baseline: Baseline, task: Any, seed: int = 3) -> list[Any]:
    return list(baseline.run(task, Started.at(task.starts(0.3, 0, [0])[0]), BUDGETS, seed))


def test_one_run_of_an_anytime_search_serves_all_budgets(quadratic: Callable[..., Any]) -> None:
    once = quadratic()
    reached = run(searching(RandomSearch()), once)
    assert once.queries == 60
    anew = at_each_budget(
        lambda task, start, queries, seed: searched(task, RandomSearch(), start, queries, seed=seed).phi
    )
    each = run(anew, quadratic())
    for a, b, budget in zip(reached, each, BUDGETS, strict=True):
        assert torch.equal(a.end, b.end)
        assert a.queries == b.queries == budget
    assert [a.seconds for a in reached] == sorted(a.seconds for a in reached)
    assert once.metric.ledger.spent == 0  # each baseline counts in a ledger of its own


def test_other_searches_are_told_each_budget(quadratic: Callable[..., Any]) -> None:
    task = quadratic()
    reached = run(searching(GuidedES()), task)
    start = task.starts(0.3, 0, [0])[0]
    for each, budget in zip(reached, BUDGETS, strict=True):
        fresh = quadratic()
        assert torch.equal(each.end, searched(fresh, GuidedES(), start, budget, seed=3).phi)
    assert task.queries == sum(BUDGETS)


def started_at(task: Any, **phi: Tensor) -> Started:
    """Return a choice among phi = 0 and others, all of which were asked."""
    starts = {name: Start(each) for name, each in {"start": task.origin(), **phi}.items()}
    asked = {name: task.evaluate(start.phi, "starts") for name, start in starts.items()}
    return Started(starts, min(asked, key=lambda name: asked[name].cost), len(starts), asked)


@pytest.mark.slow
@pytest.mark.parametrize("accepted", [True, False])
def test_it_is_what_optimize_metric_does(quadratic: Callable[..., Any], accepted: bool) -> None:
    """The same points and the same end at each budget, though the starts were asked by somebody else."""
    task = quadratic()
    near = task.goal / 2 if accepted else task.goal
    started, asked = started_at(task, near=near, far=-near), task.queries
    own = [budget - 3 for budget in BUDGETS]
    for each, budget in zip(metricopt().run(task, started, own, 3), BUDGETS, strict=True):
        twin = quadratic()
        alone = optimize_metric(
            twin, queries=budget, starts={"near": Start(near), "far": Start(-near)}, seed=3, callback=Callback()
        )
        assert each.after_choice(3).queries == twin.queries == budget
        assert torch.equal(each.result.points, alone.points)
        assert each.result.costs == alone.costs
        assert each.result.chosen == alone.chosen == ("search" if accepted else "near")
        assert torch.equal(each.end, alone.ends[alone.chosen])
    assert task.queries - asked == BUDGETS[-1] - 3 + 2  # the ends of the smaller budgets are elsewhere


def worst_of_two(task: Any, **options: Any) -> Metric:
    """Two distances, with halves, and a size beside them."""

    def told(model: Any) -> Any:
        phi = model.metricopt.phi.detach()
        apart = (phi - task.goal).square()
        values = {"near": float(apart[::2].sum()), "far": float(apart[1::2].sum()), "size": float(phi.square().sum())}
        return values, tuple({name: each * share for name, each in values.items()} for share in (0.9, 1.1))

    return Metric(told, maximize=False, bounds=None, name="distance", combine="worst", **options)


def test_what_is_told_one_number_knows_nothing_of_what_it_is_made_of(quadratic: Callable[..., Any]) -> None:
    """As from a metric that returns its value alone; its queries, passes and constraints are the same."""
    task = quadratic()
    metric = worst_of_two(task, subject_to={"size": "<= 9"})
    phi = task.goal / 3
    evaluation = task.judged_by(metric).evaluate(phi, "here")
    told: list[Any] = []

    def spy(task: Any, started: Any, budgets: Any, seed: int) -> Any:
        told.extend((task.evaluate(phi, "there"), started.evaluated["start"], task.metric))
        yield Reached(phi, 1, 1, 0.0)

    started = Started({"start": Start(phi)}, "start", 1, {"start": evaluation})
    (reached,) = told_one_number(Baseline(spy)).run(noticing(task.judged_by(metric)), started, [20], 0)
    there, known, alone = told
    for each in (there, known):
        assert each == evaluation._replace(outcomes={"size": evaluation.outcomes["size"]})
    assert alone.combination is None
    assert alone.constraints == metric.constraints
    assert alone.ledger.spent == 1
    assert reached.result is None
    assert torch.equal(reached.end, phi)


@pytest.mark.slow
def test_f_of_one_number_searches_as_if_there_were_no_outcomes(quadratic: Callable[..., Any]) -> None:
    made, number = quadratic(), quadratic()
    metric = worst_of_two(made)

    def halved(model: Any) -> Any:
        evaluation = metric.judge(model)
        return evaluation.value, evaluation.pairs

    found = run(usual_baselines(RunConfig())["metricopt_one"], noticing(replace(made, metric=metric)))
    expected = run(metricopt(), noticing(replace(number, metric=Metric(halved, maximize=False, bounds=None))))
    for each, other in zip(found, expected, strict=True):
        assert torch.equal(each.end, other.end)
        assert (each.queries, each.passes) == (other.queries, other.passes)


@pytest.mark.slow
def test_a_share_of_the_way_is_kept_at_each_budget_where_classes_are_new(quadratic: Callable[..., Any]) -> None:
    """As `optimize_metric` does; what a smaller budget asks for itself alone is not counted for a larger one."""

    def made() -> Any:
        task = quadratic()
        goals = task.goal + 1.5 * torch.randn(12, task.dim, generator=torch.Generator().manual_seed(3)).double()

        def metric(model: Any) -> Any:
            costs = (model.metricopt.phi.detach() - goals).square().sum(1)
            return float(costs.mean()), (float(costs[::2].mean()), float(costs[1::2].mean()))

        return replace(task, metric=Metric(metric, maximize=False, bounds=None, name="distance", new_classes=True))

    task = made()
    started = started_at(task)
    for each, budget in zip(metricopt().run(task, started, [each - 1 for each in BUDGETS], 3), BUDGETS, strict=True):
        alone = optimize_metric(made(), queries=budget, seed=3, callback=Callback())
        assert each.result.chosen == alone.chosen == "part"
        assert each.result.kept_share == alone.kept_share
        assert torch.equal(each.end, alone.ends["part"])
        assert each.after_choice(1).queries == budget


@pytest.mark.slow
def test_passes_are_those_of_the_queries_and_of_the_losses(quadratic: Callable[..., Any]) -> None:
    """The metric runs the model; a check of the loss takes 2 batches or 1, the probe 64, Guided ES one a step."""
    config = RunConfig()
    config.finetune.steps = 30
    baselines = usual_baselines(config)
    expected = {
        "metricopt": [(20, 66), (35, 66), (60, 66)],  # phi = 0 is asked too
        "random_search": [(20, 0), (35, 0), (60, 0)],
        "cma_es": [(20, 0), (35, 0), (60, 0)],
        "guided_es": [(20, 1 + 1), (35, 1 + 2), (60, 1 + 4)],
        "loss_finetune_best": [(20, 30), (31, 30), (31, 30)],
    }
    for name, passes in expected.items():
        task = quadratic()
        x = torch.zeros(1, 2, dtype=torch.float64)
        metric = Metric(lambda model, task=task, x=x: (model(x), task.distance(model))[1], maximize=False, bounds=None)
        reached = run(baselines[name], noticing(task.judged_by(metric)))
        assert [(each.passes.metric, each.passes.loss) for each in reached] == passes, name
        assert [each.queries for each in reached] == [metric for metric, _ in passes]


@pytest.mark.slow
def test_a_metric_that_runs_no_model_takes_no_passes(quadratic: Callable[..., Any]) -> None:
    (*_, last) = run(metricopt(), noticing(quadratic()))
    assert (last.queries, last.passes) == (60, Passes(0, 66))
    assert run(metricopt(), quadratic())[-1].passes is None  # not counted


def test_a_path_is_walked_once_from_where_it_begins(quadratic: Callable[..., Any]) -> None:
    task = quadratic()
    path = along_path(lambda task, start, seed: torch.stack([start, start + seed, task.goal]))
    start = task.starts(0.3, 0, [0])[0]
    reached = run(path, task)
    assert [each.queries for each in reached] == [0, 0, 0]
    for each in reached:
        assert torch.equal(each.end, task.goal)
        assert torch.equal(each.path[:2], torch.stack([start, start + 3]))

    def asking(task: Any, start: Tensor, seed: int) -> Tensor:
        task.evaluate(start, "secretly")
        return start[None]

    with pytest.raises(BudgetError):
        run(along_path(asking), task)


def moved_by(quadratic: Callable[..., Any]) -> tuple[Any, Settings]:
    """A task whose metric an external number shifts: 2 is best, and each step away costs 0.3; and its settings."""
    task, now = quadratic(), {"k": 0}

    def distance(model: Any) -> Any:
        value = float(task.problem.distance(model)) + 0.3 * abs(now["k"] - 2)
        return value, (value + 1e-3, value - 1e-3)

    settings = Settings([Setting("k", values=(0, 1, 2, 3), default=0)], put_into(now))
    return task.judged_by(Metric(distance, maximize=False, bounds=None, name="distance")), settings


@pytest.mark.parametrize("name", ["settings_free", "settings_lines", "settings", "settings+phi"])
def test_settings_are_tuned_from_the_chosen_start(quadratic: Callable[..., Any], name: str) -> None:
    task, settings = moved_by(quadratic)
    baseline = usual_baselines(RunConfig(), lambda: settings)[name]
    reached = list(baseline.run(task, Started.at(task.origin()), [20, 40], 0))
    assert [each.queries for each in reached] == {"settings_free": [0, 0], "settings+phi": [20, 40]}.get(name, [4, 4])
    ends = [each.end for each in reached]
    assert all(isinstance(end, Start) for end in ends)
    assert [dict(end.settings) for end in ends] == [{"k": 0 if name == "settings_free" else 2}] * 2
    judged = [judge(task.with_settings(settings), end) for end in ends]
    plain = float(task.problem.distance(task.adapter.model))
    expected = plain + (0.6 if name == "settings_free" else 0.0)
    assert (
        all(value < expected for value in judged) if name == "settings+phi" else judged == pytest.approx([expected] * 2)
    )
