"""What ALA's reward may be of, against the model's scores and losses taken by hand."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from helpers.refusals import assert_refused
from metricopt_ext.errors import ConfigError
from metricopt_ext.siblings.ala.loss_reward import APART, REWARDS, Reward, reward_cost
from metricopt_ext.siblings.training import TrainingTask


@pytest.mark.parametrize("reward", REWARDS)
def test_each_reward_is_of_what_it_says_and_of_the_same_batches(
    reward: Reward, training_task: Callable[..., TrainingTask], calls: Any
) -> None:
    task = training_task("model", 3)
    task.model.train()
    found = [reward_cost(task, reward, 3, seed=2) for _ in range(2)]
    assert found[0] == found[1]
    assert task.model.training
    assert (calls.metric, calls.batch_metric) == (2 * (reward == "validation_metric"), 2 * (reward == "train_metric"))
    assert task.metric.ledger.spent_on == ({"reward": 2} if calls.metric else {})
    assert task.batch_metric.ledger.spent_on == ({"reward": 2} if calls.batch_metric else {})

    model = task.model.eval()
    if reward == "validation_metric":
        assert found[0] == task.metric.cost(model, "test")
        return
    source = task.validation if reward == "validation_loss" else task.batches
    assert source is not None
    batches = [source(2, APART, i) for i in range(3)]
    with torch.no_grad():
        scores, labels = torch.cat([model(x) for x, _ in batches]), torch.cat([y for _, y in batches])
    # batches of one size: the mean over all examples is the mean of the batches' means
    losses = (
        F.cross_entropy(scores, labels) if reward.endswith("loss") else (scores.argmax(1) != labels).double().mean()
    )
    assert found[0] == pytest.approx(float(losses), abs=1e-12)


def test_a_validation_loss_needs_validation_batches(training_task: Callable[..., TrainingTask]) -> None:
    assert_refused(
        lambda: reward_cost(replace(training_task(), validation=None), "validation_loss", 2, seed=0),
        ConfigError,
        "reward=validation_loss",
    )
