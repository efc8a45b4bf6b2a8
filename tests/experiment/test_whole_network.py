"""A whole network finetuned on labels, where each of Adam's steps is known: its gradient is constant."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers.refusals import assert_refused
from metricopt_ext.adapters.attach import attach_input_bias
from metricopt_ext.experiment.passes import counting
from metricopt_ext.experiment.whole_network import LabelParts, held_third, whole_network_start
from metricopt_ext.tasks.metric import Metric
from metricopt_ext.tasks.task import FinetuneTask


def loss(model: Any, batch: float) -> Tensor:
    return -batch * model.weight.sum()  # the weight moves in the batch's direction


def parts(goal: float) -> LabelParts:
    """Labels by which the weight grows, but falls where all are there; the best is the one nearest to a goal."""
    judge = Metric(lambda model: float((model.weight - goal).abs()), maximize=False, bounds=None)
    return LabelParts(lambda *_: 1.0, judge, lambda *_: -2.0)


def task() -> FinetuneTask:
    layer = nn.Linear(1, 1).double()
    nn.init.zeros_(layer.weight)
    return counting(FinetuneTask(attach_input_bias(layer, dim=1), metric=Metric(lambda model: 0.0, maximize=True)))


@pytest.mark.parametrize(("goal", "rate", "steps"), [(0.106, 0.003, 35), (0.201, 0.01, 20), (9.0, 0.01, 60)])
def test_the_best_rate_and_number_of_steps_are_done_again_on_all_labels(goal: float, rate: float, steps: int) -> None:
    own, given = task(), parts(goal)
    before = {name: each.clone() for name, each in own.adapter.model.state_dict().items()}
    start = whole_network_start(own, loss, given, lr=0.01, seed=3)
    assert start.tensors.keys() == {"weight"}
    torch.testing.assert_close(start.tensors["weight"], torch.tensor([[-rate * steps]]).double(), rtol=1e-6, atol=0)
    assert own.losses.count == 2 * 60 + steps  # type: ignore[attr-defined]
    assert own.metric.ledger.spent == 0
    assert given.judge.ledger.spent == 1 + 2 * 12
    assert not start.phi.any()
    assert all(torch.equal(each, before[name]) for name, each in own.adapter.model.state_dict().items())


def test_the_model_stays_where_no_step_is_better() -> None:
    assert not whole_network_start(task(), loss, parts(-0.01), lr=0.01, seed=3).tensors


def test_what_can_t_be_trained_is_refused() -> None:
    layer = nn.Linear(1, 1).double().requires_grad_(False)
    frozen = FinetuneTask(attach_input_bias(layer, dim=1), metric=Metric(lambda model: 0.0, maximize=True))
    assert_refused(lambda: whole_network_start(frozen, loss, parts(1.0), lr=0.01, seed=3), ValueError, "Linear")


def test_a_third_of_each_group_is_held_out_and_none_of_a_single_example() -> None:
    groups = torch.tensor([4] * 9 + [7] * 2 + [0] + [2] * 5)
    held = held_third(groups, 3)
    assert {group: int(held[groups == group].sum()) for group in (4, 7, 0, 2)} == {4: 3, 7: 1, 0: 0, 2: 2}
    assert not torch.equal(held, held_third(groups, 4))
    assert torch.equal(held, held_third(groups, 3))
