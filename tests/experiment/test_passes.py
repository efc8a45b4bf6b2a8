"""Passes: what counts as one, whichever model runs, and what does not."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from helpers.refusals import assert_refused
from metricopt_ext.errors import MetricError
from metricopt_ext.experiment.passes import Noticing, Passes, noticing, passes_of, queries_cost
from metricopt_ext.tasks.metric import Metric, takes_model
from metricopt_ext.tasks.task import FinetuneTask


@pytest.fixture
def running(quadratic: Callable[..., Any]) -> FinetuneTask:
    """A quadratic task whose metric runs the model first."""
    task = quadratic()

    def distance(model: nn.Module) -> float:
        model(torch.zeros(1, 2, dtype=torch.float64))
        return float(task.problem.distance(model))

    return noticing(task.judged_by(Metric(distance, maximize=False, bounds=None)))


def test_a_query_is_a_pass_if_the_model_runs(running: FinetuneTask, quadratic: Callable[..., Any]) -> None:
    points = torch.zeros(3, 4, dtype=torch.float64)
    for phi in points:
        running.evaluate(phi, "search")
    assert passes_of(running) == Passes(metric=3)
    assert queries_cost(running, 2) == Passes(metric=2)
    still = noticing(quadratic())  # it reads phi alone
    for phi in points:
        still.evaluate(phi, "search")
    assert still.metric.ledger.spent == 3
    assert passes_of(still) == queries_cost(still, 2) == Passes()


def test_it_does_not_matter_which_model_runs(running: FinetuneTask) -> None:
    """Nor how deep in the metric it is; only modules without parameters of their own are none."""
    part, wrapped = nn.Linear(2, 2), nn.Sequential(nn.ReLU(), nn.Softmax(dim=1))
    x = torch.zeros(1, 2)
    for model, passes in ((nn.Sequential(nn.ReLU(), part), 1), (wrapped, 0), (copy.deepcopy(part), 1)):
        function = Noticing(lambda model: model(x).sum())
        function(model)
        assert (function.runs, function.last) == (passes, bool(passes))
    running.copied().evaluate(running.origin(), "search")
    assert passes_of(running) == Passes(metric=1)


def test_only_what_runs_within_the_metric_counts(running: FinetuneTask) -> None:
    running.adapter.model(torch.zeros(1, 2, dtype=torch.float64))
    assert passes_of(running) == Passes()
    function = Noticing(lambda: 0.5)
    metric = Metric(function, maximize=True)
    assert not takes_model(metric.function)
    assert metric.evaluate(running.adapter.model, "judge").value == 0.5
    assert function.runs == 0


def test_a_pass_that_fails_is_one_and_leaves_no_hook(running: FinetuneTask) -> None:
    def failing(model: nn.Module) -> float:
        model(torch.zeros(1, 2, dtype=torch.float64))
        raise OSError("down")

    task = noticing(running.judged_by(Metric(failing, maximize=True)))
    assert_refused(lambda: task.evaluate(task.origin(), "search"), MetricError, "down")
    assert passes_of(task) == Passes(metric=1)
    task.adapter.model(torch.zeros(1, 2, dtype=torch.float64))
    assert passes_of(task) == Passes(metric=1)


@pytest.mark.parametrize("population", [1, 2, 32])
def test_losses_with_their_gradients_count_for_each_phi(quadratic: Callable[..., Any], population: int) -> None:
    """One for each phi, however many go together; tasks that are made of a task share its count."""
    task, phi = noticing(quadratic(population=population)), torch.zeros(5, 4, dtype=torch.float64)
    before = passes_of(task)
    task.loss_and_gradient(phi, 0, range(5), 0)
    task.copied().judged_by(task.metric.with_settings()).loss_and_gradient(phi[:2], 0, range(2), 0)
    task.evaluate(task.origin(), "judge")
    assert passes_of(task) == Passes(loss=7)
    assert before == Passes()
    assert passes_of(noticing(task)) == Passes()
