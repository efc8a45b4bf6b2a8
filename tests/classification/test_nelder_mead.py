"""Nelder-Mead within a number of evaluations, and the baselines that it makes."""

import pytest
import torch
from torch import Tensor, nn

from metricopt_ext.adapters.attach import attach_outputs
from metricopt_ext.adapters.signature import Outputs
from metricopt_ext.classification.nelder_mead import WithLine, nelder_mead, tune_cut_points, tune_line
from metricopt_ext.classification.targets import Target
from metricopt_ext.tasks.batches import TensorBatches
from metricopt_ext.tasks.metric import Metric
from metricopt_ext.tasks.task import FinetuneTask

RNG = torch.Generator().manual_seed(0)
X = torch.randn(200, 1, generator=RNG)


def bowl(point: list[float]) -> float:
    return (point[0] - 0.7) ** 2 + 3 * (point[1] + 0.4) ** 2


@pytest.mark.parametrize("budget", [1, 2, 5, 17, 100])
def test_it_spends_no_more_than_its_budget_and_returns_the_best(budget: int) -> None:
    asked: list[list[float]] = []

    def cost(point: list[float]) -> float:
        asked.append(point)
        return bowl(point)

    best = nelder_mead(cost, [1.0, 1.0], budget)
    assert asked[0] == [0, 0]
    assert len(asked) <= budget
    assert bowl(best) == min(map(bowl, asked))
    if budget == 100:
        assert best == pytest.approx([0.7, -0.4], abs=0.01)


def task_of(model: nn.Module, target: Target, y: Tensor, value: object, maximize: bool) -> FinetuneTask:
    def judged(model: nn.Module) -> float:
        return float(value(target.decide(model(X))))  # type: ignore[operator]

    return FinetuneTask(
        attach_outputs(model, Outputs()),
        loss=lambda model, batch: target.loss(model(batch[0]), batch[1]),
        batches=TensorBatches(X, y, 20),
        metric=Metric(judged, maximize=maximize, bounds=None),
    )


def test_cut_points_come_near_to_those_that_made_the_ranks() -> None:
    ranks = (torch.tensor([-0.8, 0.3, 0.9]) < X).sum(1)
    model = nn.Linear(1, 3)
    with torch.no_grad():
        model.weight.fill_(1.0)
        model.bias.fill_(0.0)
    target = Target("ordinal", 4)
    task = task_of(model, target, ranks, lambda found: (found == ranks).double().mean(), True)
    before = float((target.decide(model(X)) == ranks).double().mean())
    tuned = tune_cut_points(task, 60)
    after = float((target.decide(tuned(X)) == ranks).double().mean())
    assert before < 0.6
    assert after > 0.9
    assert task.metric.ledger.spent <= 60
    assert torch.equal(model.bias, torch.zeros(3))


def test_a_line_undoes_a_shift_and_a_scale() -> None:
    y = (3 * X[:, 0] + 50).double()
    model = nn.Linear(1, 1)
    with torch.no_grad():
        model.weight.fill_(2.0)
        model.bias.fill_(48.0)
    task = task_of(model, Target("regression", 1, 3.0), y, lambda found: (found - y).abs().mean(), False)
    tuned = tune_line(task, X, 80)
    assert float((tuned(X)[:, 0] - y).abs().mean()) < 0.1
    assert task.metric.ledger.spent <= 80


def test_a_line_scales_about_its_centre() -> None:
    line = WithLine(nn.Identity(), 10.0, 1.0, 2.0)
    assert line(torch.tensor([10.0, 12.0])).tolist() == [11, 15]
