"""The stage along lines of starts: how many queries it takes, where it asks, and what it finds."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.refusals import assert_refused
from metricopt_ext import Callback, Start, StartLine, optimize_metric
from metricopt_ext.errors import AdapterError
from metricopt_ext.methods.start_lines import (
    PlannedLine,
    Point,
    StartLinesState,
    line_between,
    line_queries,
    planned_lines,
)
from metricopt_ext.tasks.evaluation import Evaluation

E = torch.eye(4, dtype=torch.float64)


def along(axis: int = 0, low: float = -2.0, high: float = 2.0) -> StartLine:
    return StartLine(lambda t: Start(t * E[axis]), low, high)


@pytest.mark.parametrize(
    ("queries", "on_lines", "spare", "expected"),
    [
        (20, [0, 0, 0], 99, [3, 3, 0]),  # six, three each
        (60, [0, 0, 0], 99, [6, 6, 6]),
        (20, [2], 99, [4]),  # two starts lie on it
        (20, [2, 0], 99, [1, 3]),
        (8, [0], 99, [0]),
        (9, [0], 99, [3]),
        (60, [0, 0], 5, [5, 0]),  # the search needs the others
        (60, [0], 2, [0]),
    ],
)
def test_of_all_queries_a_third_at_most_goes_to_lines(
    queries: int, on_lines: list[int], spare: int, expected: list[int]
) -> None:
    assert line_queries(queries, on_lines, spare) == expected


def test_a_start_that_lies_on_a_line_counts_among_its_queries_once() -> None:
    fixed = {"start": Start(0 * E[0]), "on": Start(E[0]), "off": Start(E[1])}
    planned = planned_lines({"a": along(), "b": along(0, -4.0, 4.0)}, fixed, 60, 30, {})
    assert planned == {"a": PlannedLine(5, ("on",)), "b": PlannedLine(6, ())}


@pytest.mark.parametrize(
    ("end", "trained", "queries"), [(0.4, 0.5, 5), (0.5, 0.5, 0), (0.6, 0.5, 0), ((False, 9.0), (True, 0.0), 5)]
)
def test_a_line_to_a_start_is_looked_along_only_if_that_start_is_better(end: Any, trained: Any, queries: int) -> None:
    """The other line, in whose middle the model as trained lies, takes queries anyhow, and all if it is alone."""
    fixed = {"start": Start(0 * E[0]), "end": Start(2 * E[0]), "on": Start(E[1])}
    lines = {"to": along(0, 0.0), "other": along(1)}
    assert planned_lines(lines, fixed, 60, 30, {})["to"] == PlannedLine(5, ("end",), "end")  # at most
    ranks = {"start": trained, "end": end, "on": trained}
    planned = planned_lines(lines, fixed, 60, 30, {}, ranks)
    assert (planned["to"].queries, planned["to"].leads_to) == (queries, "end")
    assert planned["other"] == PlannedLine(5, ("on",))
    few = planned_lines(lines, fixed, 20, 30, {}, ranks)
    assert [few[name].queries for name in lines] == ([2, 2] if queries else [0, 5])


def test_a_line_without_a_start_at_its_end_is_looked_along() -> None:
    fixed = {"start": Start(0 * E[0]), "inside": Start(E[0])}
    for line in (along(0, 0.0), along(0, -2.0, 0.0)):
        planned = planned_lines({"a": line}, fixed, 60, 30, {}, {"start": 0.0, "inside": 1.0})
        assert planned["a"].queries
        assert planned["a"].leads_to == ""
    planned = planned_lines({"a": along(0, -1.0, 0.0)}, {"start": Start(0 * E[0]), "b": Start(-E[0])}, 60, 30, {})
    assert planned["a"].leads_to == "b"  # from high to low


def run(state: StartLinesState, cost: Callable[[Start], float], give_up: int | None = None) -> list[Start]:
    asked: list[Start] = []
    while (batch := state.ask())[1]:
        assert state.ask() is batch or state.ask() == batch
        for index, start in reversed(list(enumerate(batch[1]))):
            number = len(asked) + index
            state.tell(index, None if number == give_up else Evaluation(cost(start)))
        asked += batch[1]
    return asked


def state_of(lines: dict[str, StartLine], fixed: dict[str, Start], cost: Any, queries: int = 6) -> StartLinesState:
    known = [Point(name, start, Evaluation(cost(start))) for name, start in fixed.items()]
    return StartLinesState(lines, dict.fromkeys(lines, PlannedLine(queries, ())), known, {})


def bowl(*best: float) -> Callable[[Start], float]:
    goal = torch.tensor(best, dtype=torch.float64)
    return lambda start: float((start.phi - goal).square().sum())


@pytest.mark.parametrize("best", [-1.3, -0.2, 0.4, 1.6])
def test_the_least_of_a_line_is_found_by_six_queries(best: float) -> None:
    state = state_of({"a": along()}, {"start": Start(0 * E[0])}, bowl(best, 0, 0, 0))
    asked = run(state, bowl(best, 0, 0, 0))
    assert [float(each.phi[0]) for each in asked[:2]] == [-1.0, 1.0]  # the middle is known
    assert len(asked) == 6
    assert float(state.best["a"].start.phi[0]) == pytest.approx(best, abs=0.12)
    assert torch.equal(along().at(state.strengths["a"]).phi, state.best["a"].start.phi)
    assert [each.name for each in state.points] == ["start"] + ["a"] * 6


def test_a_line_through_the_trained_model_is_looked_along_from_the_best_so_far() -> None:
    """So two lines find what neither has; one without that model is taken as it is."""
    cost = bowl(0.6, -1.1, 0.0, 0.8)
    elsewhere = StartLine(lambda t: Start(E[2] + t * E[0]), 0.0, 1.0)
    fixed = {"start": Start(0 * E[0]), "near": Start(0.8 * E[3])}
    state = state_of({"a": along(0), "b": along(1), "c": elsewhere}, fixed, cost)
    asked = run(state, cost)
    assert all(float(each.phi[3]) == 0.8 for each in asked[:12])
    assert all(float(each.phi[2]) == 1 and not each.phi[3] for each in asked[12:])
    torch.testing.assert_close(state.best["b"].start.phi[:2], torch.tensor([0.6, -1.1]).double(), atol=0.15, rtol=0)


def test_what_violates_a_constraint_is_not_the_best_of_a_line() -> None:
    def rank(evaluation: Evaluation) -> tuple[bool, float]:
        return evaluation.cost < 0.3, evaluation.cost

    line, cost = replace(along(), first=(-1.0, 1.0, 1.6)), bowl(1.0, 0, 0, 0)
    known = [Point("start", Start(0 * E[0]), Evaluation(1.0))]
    state = StartLinesState({"a": line}, {"a": PlannedLine(3, ())}, known, {}, rank)
    run(state, cost)
    assert float(state.best["a"].start.phi[0]) == 1.6
    free = state_of({"a": line}, {"start": known[0].start}, cost, queries=3)
    run(free, cost)
    assert float(free.best["a"].start.phi[0]) == 1.0


# --- Between two starts ------------------------------------------------------------------------------------------


def test_between_two_starts_all_is_mixed_in_its_own_type() -> None:
    rng = torch.Generator().manual_seed(0)

    def drawn(dtype: torch.dtype) -> Tensor:
        return torch.randn(5, generator=rng).to(dtype)

    a, b = (
        Start(
            drawn(torch.float32),
            {"mean": drawn(torch.float64), "steps": torch.tensor(number)},
            {"weight": drawn(torch.bfloat16)},
            {"flip": True},
        )
        for number in (3, 900)
    )
    line = line_between(a, b)
    assert (line.low, line.high) == (0.0, 1.0)
    for t, end in ((0.0, a), (1.0, b)):
        assert torch.equal(line.at(t).phi, end.phi)
        for name in ("mean", "weight"):
            assert torch.equal(line.at(t).replaced[name], end.replaced[name])
    found = line.at(0.3)
    for name, value in found.replaced.items():
        assert value.dtype == a.replaced[name].dtype
        expected = 0.7 * a.replaced[name].double() + 0.3 * b.replaced[name].double()
        if name != "steps":
            torch.testing.assert_close(value, expected.to(value.dtype), rtol=0, atol=0)
    assert {int(line.at(t).buffers["steps"]) for t in (0.0, 0.3, 1.0)} == {3}  # integers are the first's
    assert dict(found.settings) == {"flip": True}
    line.check()
    kept = line.at(0.0).phi
    kept.zero_()
    assert a.phi.any()  # it gives copies


def test_what_one_start_leaves_is_the_models_own() -> None:
    a, b = Start(torch.zeros(2)), Start(torch.ones(2), {"mean": torch.full((3,), 4.0)})
    assert_refused(lambda: line_between(a, b), AdapterError, "only", "task.adapter.base_state_dict()")
    line = line_between(a, b, {"mean": torch.full((3,), 2.0), "var": torch.ones(3)})
    assert line.at(0.5).buffers["mean"].tolist() == [3.0] * 3
    assert line.at(0.5).buffers.keys() == {"mean"}
    assert_refused(
        lambda: line_between(b, Start(torch.ones(2), {"mean": torch.ones(2)})), AdapterError, "mean", "(3,)", "(2,)"
    )
    assert_refused(lambda: line_between(a, Start(torch.ones(2), {}, {}, {"flip": True})), AdapterError)
    assert_refused(lambda: line_between(a, None), AdapterError, "None")


# --- In a run ----------------------------------------------------------------------------------------------------


def test_what_a_line_finds_is_where_the_design_is(quadratic: Callable[..., Any]) -> None:
    """The search begins from the fixed start, and knows the line, so that the guard judges the whole way."""
    task = quadratic()
    goal = StartLine(lambda t: Start(t * task.goal), -1.0, 2.0)
    result = optimize_metric(task, queries=30, starts={"towards": goal}, callback=Callback())
    assert result.queries == task.metric.ledger.spent_on == {"starts": 7, "search": 23}
    assert result.started_at == "start"
    assert result.starts.keys() == {"start", "towards"}
    assert result.starts["towards"] < 0.1 * result.before
    assert torch.equal(result.points[0], task.origin())
    at = result.points[1:7] @ task.goal / task.goal.square().sum()
    torch.testing.assert_close(result.points[1:7], at[:, None] * task.goal)
    assert at[:3].tolist() == pytest.approx([0.5, -0.25, 1.25])
    assert torch.equal(result.start_of("towards").phi, result.ends["towards"])
    assert torch.equal(goal.at(result.strengths["towards"]).phi, result.ends["towards"])
    nearest = min(result.points[:7], key=lambda point: float((point - task.goal).norm()))
    torch.testing.assert_close(result.points[7:11].mean(0), nearest)  # of antithetic pairs


@pytest.mark.parametrize(("way", "starts"), [(0.5, 7), (-0.5, 2)])
def test_a_line_to_a_start_that_loses_costs_nothing(way: float, starts: int, quadratic: Callable[..., Any]) -> None:
    """Where it gains the line takes six, two ends among them; else the search is that without the line."""
    found = list[Any]()
    for lined in (True, False):
        task = quadratic()
        end = Start(way * task.goal)
        line = {"line": line_between(Start(task.origin()), end)} if lined else {}
        found.append(optimize_metric(task, queries=30, starts={"end": end, **line}, callback=Callback()))
    assert [result.queries["starts"] for result in found] == [starts, 2]
    if starts == 2:
        assert torch.equal(found[0].points, found[1].points)
        assert found[0].starts == found[1].starts


def test_a_line_keeps_what_its_starts_and_the_model_were() -> None:
    a, b = Start(torch.zeros(2)), Start(torch.ones(2), {"mean": torch.ones(3)})
    base = {"mean": torch.zeros(3)}
    line = line_between(a, b, base)
    before = [each.digest for each in line.ends]
    for tensor in (a.phi, b.phi, base["mean"], b.buffers["mean"]):
        tensor.add_(1)
    assert [each.digest for each in line.ends] == before
