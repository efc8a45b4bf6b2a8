"""What a method is to a comparison."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from metricopt_ext.adapters.start import Start
from metricopt_ext.experiment.method import (
    Baseline,
    Meter,
    Planned,
    Reached,
    Started,
)
from metricopt_ext.experiment.passes import Passes, noticing
from metricopt_ext.tasks.evaluation import Evaluation
from metricopt_ext.tasks.metric import Metric


def test_a_meter_counts_from_where_it_was_made(quadratic: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [5.0]
    monkeypatch.setattr("metricopt_ext.experiment.method.now", lambda: clock[0])
    task, end = quadratic(), torch.ones(4, dtype=torch.float64)
    task.evaluate(end, "before")
    meter = Meter(task)
    for _ in range(3):
        task.evaluate(end, "search")
    clock[0] = 7.0
    assert meter.reached(end) == Reached(end, 3, 3, 2.0)
    assert meter.reached(end).after(Reached(end, 100, 10, 1.5)) == Reached(end, 103, 13, 3.5)


def test_a_meter_forgets_what_it_is_told_to(quadratic: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [5.0]
    monkeypatch.setattr("metricopt_ext.experiment.method.now", lambda: clock[0])
    plain, end = quadratic(), torch.ones(4, dtype=torch.float64)
    runs = Metric(lambda model: float(model.linear(torch.ones(1)).sum()), maximize=False, bounds=None)
    model = nn.Module()
    model.linear = nn.Linear(1, 1)
    task = noticing(plain.judged_by(runs))
    task.metric.cost(model, "before")
    meter = Meter(task)
    for _ in range(3):
        task.metric.cost(model, "search")
    task.loss_and_gradient(end[None].repeat(2, 1), 0, [0, 1], 0)
    clock[0] = 7.0
    assert meter.reached(end) == Reached(end, 3, 3, 2.0, Passes(3, 2))
    clock[0] = 9.0
    meter.forget_since(7.0)
    meter.forget_last_queries(2)
    assert meter.reached(end) == Reached(end, 1, 1, 2.0, Passes(1, 2))


def test_a_planned_baseline_begins_where_it_is_told_and_pays_for_the_choice(quadratic: Callable[..., Any]) -> None:
    task = quadratic()
    starts = {"start": Start(task.origin()), "half": Start(task.goal / 2)}
    asked = {name: Evaluation(task.true_cost(start.phi)) for name, start in starts.items()}
    seen: list[Any] = []

    def run(task: Any, started: Started, budgets: Any, seed: int) -> Any:
        seen.append((started.chosen, tuple(budgets), seed))
        yield Reached(started.start.phi, 5, 3, 1.0)

    started = Started(starts, "half", len(starts), asked)
    (reached,) = Planned(Baseline(run), (40,), 7, started).run(task)
    assert (reached.queries, reached.queries_per_start) == (7, 5)
    assert torch.equal(reached.end, task.goal / 2)  # type: ignore[arg-type]
    (plain,) = Planned(Baseline(run)).run(task)
    assert (plain.queries, plain.queries_per_start) == (5, 3)
    assert torch.equal(plain.end, task.origin())  # type: ignore[arg-type]
    assert seen == [("half", (40,), 7), ("given", (0,), 0)]
    assert Planned(Baseline(lambda *_: iter(()))).run(task) == ()


def test_an_end_of_a_start_with_other_tensors_is_a_start(quadratic: Callable[..., Any]) -> None:
    task = quadratic()
    task.adapter.model.register_buffer("seen", torch.zeros(1))
    started = Started({"other": Start(task.goal / 2, {"seen": torch.ones(1)})}, "other")
    with started.there(task) as own:
        assert own.adapter.model is task.adapter.model
        assert torch.equal(task.adapter.model.seen, torch.ones(1))
    assert torch.equal(task.adapter.model.seen, torch.zeros(1))
    end = started.standing(task.goal)
    assert isinstance(end, Start)
    assert torch.equal(end.phi, task.goal)
    assert torch.equal(end.tensors["seen"], torch.ones(1))
    assert Started.at(task.origin()).standing(task.goal) is task.goal
    assert Started.at(task.origin()).standing(end) is end
