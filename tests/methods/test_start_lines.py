"""The stage along lines of starts: how many queries it takes, where it asks, and what it finds."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.refusals import assert_refused
from metricopt_ext import Callback, Metric, Result, Start, StartLine, optimize_metric
from metricopt_ext.errors import AdapterError
from metricopt_ext.methods.starts import line_between
from metricopt_ext.search.direct import RandomSearch
from metricopt_ext.search.stages import line_queries

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


def judged(task: Any, goal: Tensor, bound: str = "") -> tuple[Any, list[Tensor]]:
    """A task judged by the distance to a goal, bounded if told so, and the phi that it is asked for."""
    asked: list[Tensor] = []

    def metric(model: Any) -> dict[str, float]:
        asked.append(model.metricopt.phi.detach().clone())
        distance = float((asked[-1] - goal).square().sum())
        return {"distance": distance, "same": distance}

    limits = {"same": bound} if bound else None
    return task.judged_by(Metric(metric, maximize=False, bounds=None, name="distance", subject_to=limits)), asked


def searched(task: Any, queries: int, **starts: Any) -> Result:
    return optimize_metric(task, queries=queries, strategy=RandomSearch(), starts=starts, callback=Callback())


def test_a_line_through_the_trained_model_is_looked_along_from_the_best_so_far(quadratic: Callable[..., Any]) -> None:
    """So two lines find what neither has, by six queries each; one without that model is taken as it is."""
    task, asked = judged(quadratic(), torch.tensor([0.6, -1.1, 0.0, 0.8]).double())
    elsewhere = StartLine(lambda t: Start(E[2] + t * E[0]), 0.0, 1.0)
    result = searched(task, 60, near=Start(0.8 * E[3]), a=along(0), b=along(1), c=elsewhere)
    assert result.queries == {"starts": 20, "search": 40}
    on_lines = torch.stack(asked)[2:20]
    assert on_lines[:2, 0].tolist() == [-1.0, 1.0]  # the middle is known
    assert (on_lines[:12, 3] == 0.8).all()
    assert (on_lines[12:, 2] == 1).all()
    assert not on_lines[12:, 3].any()
    assert result.strengths == pytest.approx({"a": 0.6, "b": -1.1, "c": 0.6}, abs=0.15)


def test_what_violates_a_constraint_is_not_the_best_of_a_line(quadratic: Callable[..., Any]) -> None:
    free, bound = (searched(judged(quadratic(), E[0], each)[0], 30, a=along()) for each in ("", ">= 0.3"))
    assert free.strengths["a"] == pytest.approx(1, abs=0.12)
    assert 0.3 <= bound.starts["a"] < bound.before
    assert bound.starts["a"] == pytest.approx((bound.strengths["a"] - 1) ** 2)


# --- Between two starts ------------------------------------------------------------------------------------------


def test_between_two_starts_all_is_mixed_in_its_own_type() -> None:
    rng = torch.Generator().manual_seed(0)

    def drawn(dtype: torch.dtype) -> Tensor:
        return torch.randn(5, generator=rng).to(dtype)

    a, b = (
        Start(
            drawn(torch.float32),
            {"mean": drawn(torch.float64), "steps": torch.tensor(number), "weight": drawn(torch.bfloat16)},
            {"flip": True},
        )
        for number in (3, 900)
    )
    line = line_between(a, b)
    assert (line.low, line.high) == (0.0, 1.0)
    for t, end in ((0.0, a), (1.0, b)):
        assert torch.equal(line.at(t).phi, end.phi)
        for name in ("mean", "weight"):
            assert torch.equal(line.at(t).tensors[name], end.tensors[name])
    found = line.at(0.3)
    for name, value in found.tensors.items():
        assert value.dtype == a.tensors[name].dtype
        expected = 0.7 * a.tensors[name].double() + 0.3 * b.tensors[name].double()
        if name != "steps":
            torch.testing.assert_close(value, expected.to(value.dtype), rtol=0, atol=0)
    assert {int(line.at(t).tensors["steps"]) for t in (0.0, 0.3, 1.0)} == {3}  # integers are the first's
    assert dict(found.settings) == {"flip": True}
    line.check()
    kept = line.at(0.0).phi
    kept.zero_()
    assert a.phi.any()  # it gives copies


def test_what_one_start_leaves_is_the_models_own() -> None:
    a, b = Start(torch.zeros(2)), Start(torch.ones(2), {"mean": torch.full((3,), 4.0)})
    assert_refused(lambda: line_between(a, b), AdapterError, "only", "task.adapter.base_state_dict()")
    line = line_between(a, b, {"mean": torch.full((3,), 2.0), "var": torch.ones(3)})
    assert line.at(0.5).tensors["mean"].tolist() == [3.0] * 3
    assert line.at(0.5).tensors.keys() == {"mean"}
    assert_refused(
        lambda: line_between(b, Start(torch.ones(2), {"mean": torch.ones(2)})), AdapterError, "mean", "(3,)", "(2,)"
    )
    assert_refused(lambda: line_between(a, Start(torch.ones(2), {}, {"flip": True})), AdapterError)
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


@pytest.mark.parametrize(("way", "starts"), [(0.5, 7), (2.0, 2), (-0.5, 2)])
def test_a_line_to_a_start_that_loses_costs_nothing(way: float, starts: int, quadratic: Callable[..., Any]) -> None:
    """Where it gains the line takes six, two ends among them; else the search is that without the line.

    At twice the goal it is as good as the model as it was trained.
    """
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


@pytest.mark.parametrize(("way", "starts"), [(0.2, 3), (0.8, 8)])
def test_what_is_presumed_is_what_a_line_leads_from(way: float, starts: int, quadratic: Callable[..., Any]) -> None:
    """Its end is better than the model as it was trained, whichever way; but that is not what has to be bettered."""
    task = quadratic()
    half, end = Start(0.5 * task.goal, presumed=True), Start(way * task.goal)
    given = {"half": half, "end": end, "line": line_between(half, end)}
    result = optimize_metric(task, queries=30, starts=given, callback=Callback())
    assert result.queries["starts"] == starts
