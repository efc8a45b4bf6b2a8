"""Rank correlations of losses with a metric: closed cases, SciPy's, and what the report holds."""

import math

import pytest
import torch
import torch.nn.functional as F
from scipy.stats import kendalltau, spearmanr
from torch import Tensor

from correlation import CorrelationReport, correlation_report
from metricopt_ext.siblings.batch_metric import BatchMetric


def accuracy(scores: Tensor, labels: Tensor) -> float:
    return float((scores.argmax(1) == labels).double().mean())


def given(values: list[float]) -> list[tuple[Tensor, Tensor]]:
    """Return outputs that are a number each, for a metric and losses that read it."""
    return [(torch.tensor([value], dtype=torch.float64), torch.zeros(1)) for value in values]


def test_monotone_losses_correlate_fully_whatever_the_metrics_direction() -> None:
    outputs = given([0.1, 0.4, 0.2, 0.9])
    losses = {
        "falls": lambda scores, labels: -(scores[0] ** 3),
        "rises": lambda scores, labels: scores[0].exp(),
        "constant": lambda scores, labels: 1.0,
    }
    for maximize, signs in ((True, (1, -1)), (False, (-1, 1))):
        metric = BatchMetric(lambda scores, labels: float(scores[0]), maximize=maximize, name="first")
        found = correlation_report(losses, metric, outputs)
        assert found.values == pytest.approx([0.1, 0.4, 0.2, 0.9])
        assert [found.correlations[name].spearman for name in ("falls", "rises")] == pytest.approx(signs)
        assert [found.correlations[name].kendall for name in ("falls", "rises")] == pytest.approx(signs)
        assert all(map(math.isnan, found.correlations["constant"]))
        assert metric.ledger.spent_on == {"correlation": 4}
        assert found.to_json()["correlations"]["constant"] == {"spearman": None, "kendall": None}


def test_they_are_the_ones_of_the_definition() -> None:
    # Ranks 1 2 3 4 against 2 1 4 3: rho = 1 - 6 * 4 / (4 * 15) = 0.6; four of six pairs agree: tau = (4 - 2) / 6.
    found = CorrelationReport("cost", False, [1.0, 2.0, 3.0, 4.0], {"loss": [20.0, 10.0, 40.0, 30.0]})
    assert found.correlations["loss"] == pytest.approx((0.6, 1 / 3))


def test_with_ties_they_are_scipys() -> None:
    rng = torch.Generator().manual_seed(0)
    outputs = [(torch.randn(8, 3, generator=rng).double(), torch.randint(3, (8,), generator=rng)) for _ in range(30)]
    found = correlation_report({"ce": F.cross_entropy}, BatchMetric(accuracy, maximize=True), outputs)
    losses, values = [F.cross_entropy(*each).item() for each in outputs], [accuracy(*each) for each in outputs]
    assert len(set(values)) < 10
    expected = -spearmanr(losses, values).statistic, -kendalltau(losses, values).statistic
    assert found.correlations["ce"] == pytest.approx(expected, abs=1e-12)
    assert f"| ce | {expected[0]:.4f} | {expected[1]:.4f} |" in found.markdown().splitlines()
    assert found.to_json()["values"] == pytest.approx(values)
