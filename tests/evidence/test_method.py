"""What a method is to a comparison."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from metricopt_ext.errors import ConfigError
from metricopt_ext.evidence.method import METHODS, Meter, MethodResult, Reached, check_known, ending_at
from metricopt_ext.evidence.passes import Passes, noticing
from metricopt_ext.tasks.metric import Metric


def test_every_method_has_a_title_and_a_colour_of_its_own() -> None:
    for value in ("title", "colour"):
        assert len({getattr(entry, value) for entry in METHODS.values()}) == len(METHODS)
    assert all(len(entry.colour) == 7 and int(entry.colour[1:], 16) >= 0 for entry in METHODS.values())


def test_a_method_comes_after_one_that_there_is() -> None:
    names = list(METHODS)
    for name, entry in METHODS.items():
        assert not entry.after or names.index(entry.after) < names.index(name)


def test_unknown_methods_are_refused_by_name() -> None:
    check_known(METHODS)
    with pytest.raises(ConfigError, match="method 'tresholds' has no entry in METHODS; the choices are pretrained"):
        check_known(["metricopt", "tresholds"])


def test_a_meter_counts_from_where_it_was_made(quadratic: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [5.0]
    monkeypatch.setattr("metricopt_ext.evidence.method.now", lambda: clock[0])
    task, end = quadratic(), torch.ones(4, dtype=torch.float64)
    task.cost(end, "before")
    meter = Meter(task)
    task.costs_at(end[None].repeat(3, 1), "search")
    clock[0] = 7.0
    assert meter.reached(end) == Reached(end, 3, 3, 2.0)
    assert meter.reached(end).after(Reached(end, 100, 10, 1.5)) == Reached(end, 103, 13, 3.5)


def test_a_meter_forgets_what_it_is_told_to(quadratic: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [5.0]
    monkeypatch.setattr("metricopt_ext.evidence.method.now", lambda: clock[0])
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
    meter.forget_last_query()
    assert meter.reached(end) == Reached(end, 2, 2, 2.0, Passes(2, 2))


def test_a_method_that_does_not_apply_returns_nothing(quadratic: Callable[..., Any]) -> None:
    assert ending_at(lambda task: None)(quadratic(), {}) is None
    result = ending_at(lambda task: task.origin())(quadratic(), {})
    assert isinstance(result, MethodResult)
    assert torch.equal(result.reached[-1].end, torch.zeros(4, dtype=torch.float64))
