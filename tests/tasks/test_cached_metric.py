"""A remembered metric against the metric itself, over interruptions."""

import json
import math
from pathlib import Path

import pytest
from torch import nn

from metricopt_ext.errors import FileFormatError, MetricError
from metricopt_ext.tasks.cached_metric import CachedMetric, _checksum
from metricopt_ext.tasks.metric import Evaluation, Ledger, Metric
from metricopt_ext.utils.files import write_json


def counting(stop: int = 99, halves: bool = False) -> Metric:
    """Return 0.0, 0.1, 0.2, ... and fail at the call of that number."""
    calls: list[float] = []

    def function() -> float | tuple[float, tuple[float, float]]:
        calls.append(len(calls) / 10)
        if len(calls) > stop:
            raise OSError("down")
        return (calls[-1], (calls[-1], calls[-1] + 0.05)) if halves else calls[-1]

    return Metric(function, maximize=False, ledger=Ledger(10))


@pytest.mark.parametrize("halves", [False, True])
def test_what_is_on_file_is_answered_and_booked_but_not_asked(tmp_path: Path, halves: bool) -> None:
    path, model = tmp_path / "evaluations.json", nn.Identity()
    broken = CachedMetric(counting(3, halves), path)
    for _ in range(3):
        broken.evaluate(model, "first")
    with pytest.raises(MetricError, match="down"):
        broken.evaluate(model, "first")
    metric = counting(halves=halves)
    again = CachedMetric(metric, path)
    told = [again.evaluate(model, "first" if i < 3 else "second") for i in range(5)]
    assert told[:3] == broken.evaluations
    assert [answer.cost for answer in told] == [0.0, 0.1, 0.2, 0.0, 0.1]  # the metric itself was first asked at the 4th
    assert all((answer.halves is not None) == halves for answer in told)
    assert metric.ledger.spent_on == {"first": 3, "second": 2}
    assert [
        Evaluation(cost, halves and tuple(halves)) for cost, halves, _ in json.loads(path.read_text())["evaluations"]
    ] == told


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


def test_a_changed_answer_is_not_believed(tmp_path: Path) -> None:
    path, model = tmp_path / "evaluations.json", nn.Identity()
    metric = CachedMetric(counting(), path)
    for _ in range(2):
        metric.cost(model, "x")
    content = json.loads(path.read_text())
    content["evaluations"][1][0] = 0.2
    path.write_text(json.dumps(content))
    with pytest.raises(FileFormatError, match="its checksum is another than when it was written"):
        CachedMetric(counting(), path)


@pytest.mark.parametrize(
    ("cost", "bounds", "believed"),
    [
        (0.5, (0.0, 1.0), True),
        (1.0, (0.1, 0.7), True),  # 0.7 - 1.0 * (0.7 - 0.1) is below 0.1
        (-7.0, (0.0, 1.0), False),
        (1.5, (0.0, 9.0), False),
        (-7.0, None, True),
        (float("nan"), (0.0, 1.0), False),
        (float("inf"), None, False),
    ],
)
def test_an_answer_outside_its_range_is_not_believed(
    tmp_path: Path, cost: float, bounds: tuple[float, float] | None, believed: bool
) -> None:
    path = tmp_path / "evaluations.json"
    kept = [Evaluation(cost)]
    write_json(path, {"checksum": _checksum(kept), "evaluations": kept})
    metric = Metric(lambda: 0.5, maximize=False, bounds=bounds)
    if believed:
        assert CachedMetric(metric, path).cost(nn.Identity(), "x") == cost
        return
    with pytest.raises(FileFormatError, match=rf"{cost} is no cost of a metric with bounds"):
        CachedMetric(metric, path)


@pytest.mark.parametrize("content", ['{"other": 1}', '{"evaluations": [1]}', '{"evaluations": [[0.5, [1]]]}'])
def test_a_foreign_file_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "evaluations.json"
    path.write_text(content)
    with pytest.raises(FileFormatError, match="holds no evaluations of the metric"):
        CachedMetric(counting(), path)


def test_a_resumed_run_skips_failures_as_before(tmp_path: Path) -> None:
    def run(values: list[float]) -> list[float]:
        left = iter(values)
        metric = Metric(lambda: next(left), maximize=False, repeats=2, failures=1)
        cached = CachedMetric(metric, tmp_path / "evaluations.json")
        costs = [cached.cost(nn.Identity(), "x") for _ in range(3)]
        assert metric.ledger.spent == 6
        return costs

    with pytest.warns(UserWarning, match="failure 1 of 1"):
        whole = run([0.6, 0.8, 0.1, 0.3, math.nan])
    assert whole == pytest.approx([0.7, 0.2, 0.7])
    kept = json.loads((tmp_path / "evaluations.json").read_text())["evaluations"][:2]
    (tmp_path / "evaluations.json").write_text(
        json.dumps({"checksum": _checksum([Evaluation(*each) for each in kept]), "evaluations": kept})
    )
    with pytest.warns(UserWarning, match="failure 1 of 1"):
        assert run([math.nan]) == whole  # the worst is on file
