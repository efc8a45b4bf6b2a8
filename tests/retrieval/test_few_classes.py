"""What so few classes can tell: against the variance over all divisions of them, and said once."""

from itertools import combinations
from statistics import NormalDist

import pytest
import torch
from torch import nn

from metricopt_ext.retrieval.few_classes import FewClasses, error_over_classes
from metricopt_ext.tasks.evaluation import Evaluation
from metricopt_ext.tasks.metric import Metric


def divided(values: torch.Tensor) -> list[tuple[float, float]]:
    """A mean over classes on each division of them into halves."""
    count = len(values)
    halves = [set(first) for first in combinations(range(count), count // 2) if 0 in first]
    return [(float(values[list(a)].mean()), float(values[list(set(range(count)) - a)].mean())) for a in halves]


def test_over_all_divisions_it_is_the_standard_error_of_the_mean_over_classes() -> None:
    values = torch.randn(8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    start = Evaluation.of(float(values.mean()), divided(values))
    assert error_over_classes(start) == pytest.approx(float(values.std()) / 8**0.5, rel=1e-12)
    assert error_over_classes(start, 100.0) == pytest.approx(100 * float(values.std()) / 8**0.5, rel=1e-12)
    assert error_over_classes(Evaluation(0.5, (0.4, 0.6))) == pytest.approx(0.1)
    assert error_over_classes(Evaluation(0.5)) is None


@pytest.mark.parametrize("known", [8, 0])
def test_it_is_said_at_the_first_query_in_the_metrics_units(known: int) -> None:
    values = 50 + torch.randn(8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    lines: list[str] = []
    metric = Metric(
        lambda: (float(values.mean()), divided(values)), maximize=True, bounds=(0, 100), name="recall", new_classes=True
    )
    metric.callbacks.append(FewClasses(metric, lambda: known, lines.append, confidence=0.9))
    for _ in range(2):
        metric.evaluate(nn.Identity(), "x")
    error, needed = float(values.std()) / 8**0.5, NormalDist().inv_cdf(0.9)
    assert lines == [
        f"recall is {float(values.mean()):.4f} at first, with a standard error of {error:.4f} over"
        f" {'8 classes' if known else 'its classes'}; a gain that varies as much between classes must exceed"
        f" {needed * error:.4f} to be told from chance"
    ]


def test_without_halves_nothing_is_said() -> None:
    lines: list[str] = []
    metric = Metric(lambda: 0.5, maximize=True)
    metric.callbacks.append(FewClasses(metric, lambda: 8, lines.append))
    metric.evaluate(nn.Identity(), "x")
    assert lines == []
