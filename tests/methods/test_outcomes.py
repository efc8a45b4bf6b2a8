"""Runs on a metric that is made of outcomes: what is told of each, on file, and in the result."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers.refusals import assert_refused
from metricopt_ext import Adapter, FinetuneTask, Metric, Result, Search, optimize_metric
from metricopt_ext.adapters.attach import attach_input_bias
from metricopt_ext.errors import FileFormatError, MetricError

GOALS = {"zebra": 1.0, "ape": -0.5, "cat": 0.25}  # in no order that a file might sort them in


def distances(phi: Tensor, shift: float = 0.0) -> dict[str, float]:
    return {name: float((phi + shift - goal).square().mean()) for name, goal in GOALS.items()}


def halved(phi: Tensor) -> Any:
    return distances(phi), (distances(phi, -0.01), distances(phi, 0.01))


def adapted() -> Adapter:
    torch.manual_seed(0)
    return attach_input_bias(nn.Linear(2, 3).double(), dim=4)


class Asked:
    """A metric's function on an adapter, which counts its calls."""

    def __init__(self, adapter: Adapter) -> None:
        self.adapter, self.calls = adapter, 0

    def __call__(self) -> Any:
        self.calls += 1
        return halved(self.adapter.phi.detach())


def task_of(adapter: Adapter, function: Callable[..., Any], **settings: Any) -> FinetuneTask:
    made = {"maximize": False, "bounds": None, "name": "furthest", "combine": "worst", **settings}
    return FinetuneTask(adapter, metric=Metric(function, **made))


def searched(search: Search, told: Callable[[Tensor], Any] = halved) -> Result:
    while trials := search.ask(8):
        for trial in trials:
            values, halves = told(trial.phi)
            search.tell(trial.id, values, halves=halves)
    return search.result()


# --- Ask and tell --------------------------------------------------------------------------------------------------


def test_outcomes_that_are_told_are_those_that_a_metric_returns() -> None:
    adapter = adapted()
    own = optimize_metric(task_of(adapter, Asked(adapter)), queries=30)
    told = searched(Search(adapted(), 30, maximize=False, name="furthest", combine="worst"))
    assert torch.equal(own.points, told.points)
    assert own.costs == told.costs
    assert (own.before, own.after, own.chosen, own.guard) == (told.before, told.after, told.chosen, told.guard)
    assert own.before == max(distances(torch.zeros(4)).values())
    assert own.guard == "halves"


def test_what_makes_no_value_is_not_told(tmp_path: Path) -> None:
    search: Any = Search(
        adapted(), 30, maximize=False, combine="worst", subject_to={"ece": "<= 1"}, output_dir=tmp_path
    )
    (start,) = search.ask()
    before = (tmp_path / "log.jsonl").read_bytes()
    whole = {"b": 0.5, "a": 0.25, "ece": 0.1}
    for refused, names in (
        (lambda: search.tell(0, 0.5), ("0.5", "combine")),
        (lambda: search.tell(0, {"b": 0.5}, outcomes={"ece": 0.1}), ("ece",)),
        (lambda: search.tell(0, {"b": 0.5, "a": 0.25}), ("'ece'",)),
        (lambda: search.tell(0, {"ece": 0.1}), ("none",)),
        (lambda: search.tell(0, {**whole, "a": math.nan}), ("'a'", "nan")),
        (lambda: search.tell(0, {**whole, "metric": 0.5}), ("'metric'",)),
        (lambda: search.tell(0, whole, halves=(whole, {"b": 0.5})), ("halves", "'a'")),
        (lambda: search.tell(0, whole, halves=(0.5, 0.25)), ("halves", "0.25")),
        (lambda: search.tell(0, whole, noise=-1.0), ("noise", "-1.0")),
        (lambda: search.tell(7, {"c": 0.5, "ece": 0.1}), ("7",)),
    ):
        assert_refused(refused, ValueError, *names)
    assert (tmp_path / "log.jsonl").read_bytes() == before
    assert search.open() == [start]
    search.tell(0, {**whole, "a": (0.25, None, 0.01)}, noise=0.02)
    (trial,) = search.ask()
    for other in ({"a": 0.25, "b": 0.5, "ece": 0.1}, {**whole, "c": 0.5}, {"b": 0.5, "ece": 0.1}):
        assert_refused(lambda other=other: search.tell(trial.id, other), ValueError, "'b', 'a'")
    search.tell(trial.id, {"ece": 0.2, "b": 0.4, "a": 0.3})  # what is combined is in its order
    assert_refused(lambda: Search(adapted(), 30, maximize=True).tell(0, {"b": 0.5}), ValueError, "combine=")


def test_an_adapter_alone_may_say_what_is_combined() -> None:
    def first(x: Tensor) -> Tensor:
        return x[..., 0]

    search = Search(adapted(), 30, maximize=True, combine=first, combined=["cat"], directions={"cat": False})
    assert (search.task.metric.outcome_sign("cat"), search.task.metric.outcome_sign("ape")) == (1, None)
    run = searched(search, lambda phi: (distances(phi), None))
    assert run.before == distances(torch.zeros(4))["cat"]


# --- On file -------------------------------------------------------------------------------------------------------


def test_a_resumed_run_has_its_outcomes_in_their_order(tmp_path: Path) -> None:
    first = Search(adapted(), 30, maximize=False, combine="worst", output_dir=tmp_path)
    (start,) = first.ask()
    values, halves = halved(start.phi)
    first.tell(start.id, values, halves=halves)
    first.close()
    again = Search(adapted(), 30, maximize=False, combine="worst", output_dir=tmp_path, resume=True)
    trial = again.ask()[0]
    assert_refused(lambda: again.tell(trial.id, dict(sorted(GOALS.items()))), ValueError, "'zebra', 'ape', 'cat'")
    whole = searched(Search(adapted(), 30, maximize=False, combine="worst"))
    for open_trial in again.open():
        values, halves = halved(open_trial.phi)
        again.tell(open_trial.id, values, halves=halves)
    resumed = searched(again)
    assert torch.equal(resumed.points, whole.points)
    assert resumed.costs == whole.costs
    assert resumed.evaluations == whole.evaluations
    assert [*resumed.made_of] == [*GOALS]


@pytest.mark.parametrize("other", [{"combine": "mean"}, {"combined": ["ape"]}, {"combine": lambda x: x.mean(-1)}])
def test_a_run_is_not_resumed_with_another_combination(other: dict[str, Any], tmp_path: Path) -> None:
    made = {"maximize": False, "combine": "worst", "output_dir": tmp_path}
    with Search(adapted(), 30, **made) as search:
        search.ask()
    assert_refused(lambda: Search(adapted(), 30, resume=True, **{**made, **other}), FileFormatError, *other)


def test_a_value_on_file_that_its_outcomes_do_not_make_is_refused(tmp_path: Path) -> None:
    with Search(adapted(), 30, maximize=False, combine="worst", output_dir=tmp_path) as search:
        (start,) = search.ask()
        search.tell(start.id, {"a": 0.5, "b": 0.25})
    log = tmp_path / "log.jsonl"
    log.write_text(log.read_text().replace('"value": 0.5', '"value": 0.25', 1))
    made = {"maximize": False, "combine": "worst", "output_dir": tmp_path}
    assert_refused(lambda: Search(adapted(), 30, resume=True, **made), FileFormatError, "0.25", "0.5")


def test_names_that_change_end_a_run() -> None:
    adapter, calls = adapted(), list[int]()

    def function() -> dict[str, float]:
        calls.append(1)
        found = distances(adapter.phi.detach())
        return found if len(calls) < 5 else {"zebra": found["zebra"]}

    task = task_of(adapter, function)
    assert_refused(lambda: optimize_metric(task, queries=30), MetricError, "query 5", "'ape'")
    assert len(calls) == 5
    assert not adapter.phi.any()


# --- In the result -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("combine", ["worst", lambda x: x.amax(-1)])
def test_a_result_has_each_outcome_before_and_after_and_says_which_is_the_worst(combine: Any) -> None:
    adapter = adapted()
    told = {"directions": dict.fromkeys(GOALS, False)} if callable(combine) else {}
    run = optimize_metric(task_of(adapter, Asked(adapter), combine=combine, **told), queries=40)
    assert run.chosen == "search"
    before, after = distances(torch.zeros(4)), distances(adapter.phi.detach())
    assert run.made_of == {name: (before[name], after[name]) for name in GOALS}
    assert (run.before, run.after) == (max(before.values()), max(after.values()))
    (line,) = (each for each in run.lines() if "of 3" in each)
    assert f"{max(before.values()):.4f}" in line
    assert f"{max(after.values()):.4f}" in line
    assert line.index("zebra") < line.index("before") < line.index(max(after, key=lambda name: after[name]), 30)


def test_what_is_combined_is_not_told_as_something_besides() -> None:
    adapter = adapted()
    settings = {"subject_to": {"size": "<= 9"}, "also": {"ece": lambda: 0.5}, "maximize": True, "combine": "mean"}

    def function() -> dict[str, float]:
        phi = adapter.phi.detach()
        return {**{name: -value for name, value in distances(phi).items()}, "size": float(phi.norm())}

    run = optimize_metric(task_of(adapter, function, **settings), queries=40)
    assert [*run.also] == ["size", "ece"]
    assert [*run.made_of] == [*GOALS]
    assert run.higher
    number = task_of(adapter, lambda: 0.5, combine=None)
    assert not optimize_metric(number, queries=30).made_of


def test_nothing_is_said_of_the_worst_where_nothing_tells_which_is_worse() -> None:
    adapter = adapted()
    run = optimize_metric(task_of(adapter, Asked(adapter), combine=lambda x: x.amax(-1)), queries=30)
    assert not any("of 3" in line for line in run.lines())
