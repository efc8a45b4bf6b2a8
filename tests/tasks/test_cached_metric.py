"""A remembered metric against the metric itself, over interruptions."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from helpers.refusals import assert_refused
from metricopt_ext.adapters.start import Start
from metricopt_ext.errors import MetricError
from metricopt_ext.tasks.cached_metric import CachedMetric
from metricopt_ext.tasks.evaluation import Evaluation
from metricopt_ext.tasks.ledger import Ledger
from metricopt_ext.tasks.metric import Metric, Query


def counting(stop: int = 99, halves: bool = False, **settings: int) -> Metric:
    """Return 0.0, 0.1, 0.2, ... and fail at the call of that number."""
    calls: list[float] = []

    def function() -> float | tuple[float, tuple[float, float]]:
        calls.append(len(calls) / 10)
        if len(calls) > stop:
            raise OSError("down")
        return (calls[-1], (calls[-1], calls[-1] + 0.05)) if halves else calls[-1]

    return Metric(function, maximize=False, ledger=Ledger(10), **settings)


def ask(metric: Metric, *points: float, purpose: str = "x") -> list[Evaluation]:
    """Evaluate a metric at points of one dimension."""
    items = [torch.tensor([point], dtype=torch.float64) for point in points]

    def judged(item: Tensor) -> Evaluation:
        return metric.judge(nn.Identity())

    return list(metric.each(judged, items, purpose))


@pytest.mark.parametrize("halves", [False, True])
def test_what_is_on_file_of_a_point_is_answered_and_booked_but_not_asked(tmp_path: Path, halves: bool) -> None:
    path = tmp_path / "evaluations.json"
    broken = CachedMetric(counting(3, halves), path)
    seen: list[Query] = []
    with broken.metric.calling(seen.append):
        told = ask(broken, 5, 6, 7)
    assert_refused(lambda: ask(broken, 8), MetricError, "down")
    metric = counting(halves=halves)
    again = CachedMetric(metric, path)
    assert again.on_file == 3
    metric.callbacks.append(seen.append)
    assert ask(again, 7, 5, purpose="first") == [told[2], told[0]]  # by the point, whatever the order
    assert ask(again, 8, 6, 9, purpose="second") == [
        *ask(counting(halves=halves), 8),
        told[1],
        Evaluation(0.1, told[1].halves),
    ]
    assert metric.ledger.spent_on == {"first": 2, "second": 3}
    assert [query.on_file for query in seen] == [False] * 3 + [True, True, False, True, False]
    assert [query.spent for query in seen] == [1, 2, 3, 1, 2, 3, 4, 5]
    kept = json.loads(path.read_text())["evaluations"]
    assert [(each["phi"], each["cost"], each["asked"]) for each in kept] == [
        ([5.0], 0.0, 1),
        ([6.0], 0.1, 1),
        ([7.0], 0.2, 1),
        ([8.0], 0.0, 1),
        ([9.0], 0.1, 1),
    ]


def test_a_point_that_has_moved_is_another(tmp_path: Path) -> None:
    path = tmp_path / "evaluations.json"
    ask(CachedMetric(counting(), path), 1.0)
    for point in (1 + 1e-9, 1 + 1e-3):
        ask(CachedMetric(counting(), path), point)
        asked = point > 1 + 1e-6
        assert len(json.loads(path.read_text())["evaluations"]) == 1 + asked


def test_other_tensors_are_another_model(tmp_path: Path) -> None:
    path = tmp_path / "evaluations.json"
    ask(CachedMetric(counting(), path), 1.0)
    start = Start(torch.zeros(1), {"mean": torch.ones(2)})
    ask(CachedMetric(counting(), path).of(start), 1.0)
    kept = json.loads(path.read_text())["evaluations"]
    assert [bool(each["replaced"]) for each in kept] == [False, True]


def test_a_point_asked_twice_is_kept_twice(tmp_path: Path) -> None:
    path = tmp_path / "evaluations.json"
    told = ask(CachedMetric(counting(), path), 1.0, 1.0)
    assert [each.cost for each in told] == [0.0, 0.1]
    assert ask(CachedMetric(counting(), path), 1.0, 1.0, 1.0) == [*told, Evaluation(0.0)]


def test_without_a_file_it_is_the_metric(tmp_path: Path) -> None:
    metric = counting()
    remembered = CachedMetric(metric, None)
    assert [remembered.cost(nn.Identity(), "x") for _ in range(3)] == [0.0, 0.1, 0.2]
    assert remembered.ledger is metric.ledger
    assert (remembered.name, remembered.to_value(0.3)) == (metric.name, metric.to_value(0.3))
    assert list(tmp_path.iterdir()) == []


def test_a_metric_with_an_ask_of_its_own_is_asked_by_it() -> None:
    class Doubled(Metric):
        def judge(self, model: nn.Module) -> Evaluation:
            return Evaluation(2 * super().judge(model).cost)

    metric = Doubled(lambda: 0.25, maximize=False)
    assert (
        CachedMetric(metric, None).evaluate(nn.Identity(), "x")
        == metric.evaluate(nn.Identity(), "x")
        == Evaluation(0.5)
    )
    assert metric.ledger.spent == 2
