"""ReLoss: the model's steps against a plain loop, and the loss that it takes from elsewhere."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from metricopt_ext.runtime.progress import Callback
from metricopt_ext.siblings.reloss.relational_loss import RelationalLoss
from metricopt_ext.siblings.reloss.reloss import ReLoss
from metricopt_ext.siblings.training import TrainingTask


def made() -> RelationalLoss:
    torch.manual_seed(4)
    return RelationalLoss("mcr").double()


@pytest.mark.parametrize("cross_entropy", [True, False])
@pytest.mark.parametrize("trains", ["phi", "model"])
def test_the_model_descends_the_learned_loss_with_or_without_cross_entropy(
    cross_entropy: bool, trains: Any, training_task: Callable[..., TrainingTask]
) -> None:
    task, loss = training_task(trains, 3, dropout=0.0), made()
    plain = task.copied()
    kept = {name: value.clone() for name, value in loss.state_dict().items()}
    for each in (task, plain):
        each.model.train()
    history = ReLoss(cross_entropy, steps=3, lr=0.05).descend(task, loss, 6, Callback())

    optimizer = torch.optim.Adam(plain.parameters(), 0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=3)
    expected = []
    for step in range(3):
        x, y = plain.batches(6, 0, step)
        scores = plain.model(x)
        value = loss(scores, y) + (F.cross_entropy(scores, y) if cross_entropy else 0)
        expected.append((step, pytest.approx(value.item(), abs=1e-12)))
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        schedule.step()
    assert history["loss"] == expected
    for (name, a), b in zip(plain.model.state_dict().items(), task.model.state_dict().values(), strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-9), name
    assert all(torch.equal(kept[name], value) for name, value in loss.state_dict().items())
    assert all(parameter.requires_grad for parameter in loss.parameters())


def test_a_loss_that_was_learned_before_costs_nothing_and_stays(training_task: Callable[..., TrainingTask]) -> None:
    begin = made()
    method = ReLoss(begin=begin, steps=2)
    for outputs in (1, 3):  # of another number of classes, too
        result = method.train(training_task("model", outputs))
        assert result.batch_queries == result.queries == {}
        assert isinstance(result.product, RelationalLoss)
        assert result.product is not begin
        for (name, a), b in zip(begin.state_dict().items(), result.product.state_dict().values(), strict=True):
            assert torch.equal(a, b), name
