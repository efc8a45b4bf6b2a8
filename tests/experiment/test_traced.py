"""What was reached by each query is kept."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from metricopt_ext.errors import BudgetError
from metricopt_ext.experiment.traced import Trace, with_budget


def test_what_was_reached_is_traced(quadratic: Callable[..., Any]) -> None:
    task, told = quadratic(), []
    observed = task.metric.with_callbacks(lambda query: told.append(query.value))
    limited = with_budget(task.judged_by(observed), 3)
    trace = Trace(limited)
    points = [task.goal + 1, task.goal, task.goal]
    with limited.metric.calling(trace):
        costs = [limited.evaluate(point, "search").cost for point in points]
    costs_told = [point.evaluation.cost for point in trace.points]
    assert told == costs == costs_told == [task.true_cost(p) for p in points]
    best = [trace.best(queries) for queries in (1, 2, 3)]
    ends: list[Tensor] = [each.end for each in best]
    assert torch.equal(torch.stack(ends), torch.stack([points[0], points[1], points[1]]))
    assert [each.queries for each in best] == [1, 2, 3]
    with pytest.raises(BudgetError):
        limited.evaluate(task.goal, "search")
    assert task.metric.ledger.spent == 0
