"""The metric of a batch: its costs, its ledger and what it refuses."""

import pytest
import torch

from helpers.refusals import assert_refused
from metricopt_ext.errors import BudgetError, MetricError
from metricopt_ext.tasks.batch_metric import BatchMetric
from metricopt_ext.tasks.ledger import Ledger

SCORES, LABELS = torch.tensor([0.5, -0.5, 2.0]), torch.tensor([1, 1, 0])


def test_costs_are_in_the_units_of_a_metric() -> None:
    values = {(True, (-1.0, 1.0)): 0.25, (False, (-1.0, 1.0)): 0.75, (True, None): -0.5, (False, None): 0.5}
    for (maximize, bounds), cost in values.items():
        metric = BatchMetric(lambda scores, labels: 0.5, maximize=maximize, bounds=bounds)
        assert metric.cost(SCORES, LABELS, "x") == cost
        assert metric.to_value(cost) == 0.5


def test_it_sees_detached_scores_and_every_call_counts_by_purpose() -> None:
    seen = []

    def share(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        seen.append((scores.requires_grad, labels))
        return (scores > 0).float().mean()

    metric = BatchMetric(share, maximize=False)
    for purpose in ("a", "b", "a"):
        assert metric.cost(SCORES.clone().requires_grad_(), LABELS, purpose) == pytest.approx(2 / 3)
    assert metric.ledger.spent_on == {"a": 2, "b": 1}
    assert [flag for flag, _ in seen] == [False] * 3
    assert metric.name == "share"
    assert metric.with_new_ledger().ledger.spent == 0
    assert metric.ledger.spent == 3


def test_a_spent_budget_is_refused_before_the_call() -> None:
    metric = BatchMetric(lambda scores, labels: 1 / 0, maximize=False, ledger=Ledger(0))
    assert_refused(lambda: metric.cost(SCORES, LABELS, "x"), BudgetError, "1", "0")


@pytest.mark.parametrize(
    ("value", "names"),
    [(float("nan"), ("mine", "nan")), (1.5, ("1.5", "bounds"))],
)
def test_what_is_no_value_is_refused_and_counts(value: float, names: tuple[str, ...]) -> None:
    metric = BatchMetric(lambda scores, labels: value, maximize=False, name="mine")
    assert_refused(lambda: metric.cost(SCORES, LABELS, "x"), MetricError, *names)
    assert metric.ledger.spent == 1


def test_what_the_function_raises_and_what_is_no_function_is_named() -> None:
    assert_refused(
        lambda: BatchMetric(lambda scores, labels: 1 / 0, maximize=False, name="mine").cost(SCORES, LABELS, "x"),
        MetricError,
        "mine",
    )
    assert_refused(lambda: BatchMetric(3, maximize=False), TypeError, "3")
