"""Losses compared with their definitions, by name and of what is predicted."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from helpers.refusals import assert_refused
from metricopt_ext.classification.config import ClassificationConfig
from metricopt_ext.classification.losses import CostSensitive, classification_loss, cross_entropy, loss_of
from metricopt_ext.classification.named_loss import named_loss
from metricopt_ext.classification.targets import Target, matching_offsets
from metricopt_ext.errors import ConfigError
from metricopt_ext.utils.config import load_config

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


Y = torch.tensor([0, 1, 1, 0, 1, 0])


def test_cross_entropy_of_one_logit_is_that_of_the_two_it_stands_for() -> None:
    logit = X[:, 0]
    both = torch.stack([torch.zeros_like(logit), logit], 1)
    expected = -both.log_softmax(1)[torch.arange(6), Y].mean()
    torch.testing.assert_close(cross_entropy(logit, Y), expected)
    torch.testing.assert_close(cross_entropy(both, Y), expected)


def test_weights_are_those_of_classes_and_of_mean_1() -> None:
    logits, weights = X[:, :3], [1.0, 2.0, 6.0]
    labels = torch.tensor([0, 1, 2, 2, 1, 0])
    each = -logits.log_softmax(1)[torch.arange(6), labels]
    expected = (torch.tensor(weights, dtype=torch.float64)[labels] / 3 * each).mean()
    torch.testing.assert_close(CostSensitive(weights)(logits, labels), expected)
    both = torch.stack([torch.zeros(6, dtype=torch.float64), X[:, 0]], 1)
    torch.testing.assert_close(CostSensitive([1.0, 4.0])(X[:, 0], Y), CostSensitive([1.0, 4.0])(both, Y))


def test_weights_that_are_none_are_refused() -> None:
    assert_refused(lambda: CostSensitive([1.0, 0.0]), ValueError, "weights", "0.0")
    assert_refused(lambda: CostSensitive([1.0]), ValueError)
    assert_refused(lambda: CostSensitive([1.0, 1.0, 1.0])(X[:, 0], Y), ConfigError, "3", "2")


def test_the_loss_is_that_of_what_is_predicted() -> None:
    model = nn.Linear(4, 2).double()
    batch = (X, Y)
    assert loss_of(Target("classes", 2)) is classification_loss
    assert classification_loss(model, batch) == cross_entropy(model(X), Y)
    labels = torch.stack([Y, 1 - Y], 1)
    each = nn.functional.softplus(-(2 * labels - 1) * model(X))  # -log sigmoid of the logit towards its label
    torch.testing.assert_close(loss_of(Target("multilabel", 2))(model, (X, labels)), each.mean())


TARGET = Target("classes", 3)


INPUTS = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


LABELS = torch.tensor([0, 1, 2, 0, 1, 2])


NET = nn.Linear(4, 3)


def config_of(*overrides: str) -> ClassificationConfig:
    return load_config(ClassificationConfig, None, ["data.name=digits", "model.name=small_cnn", *overrides])


@pytest.mark.parametrize(
    ("name", "params", "loss"),
    [
        ("cross_entropy", "", cross_entropy),
        ("cost_sensitive", "{weights: [1.0, 2.0, 3.0]}", CostSensitive([1.0, 2.0, 3.0])),
    ],
)
def test_a_loss_by_name_is_that_loss_of_the_logits(name: str, params: str, loss: Any) -> None:
    config = config_of(f"loss.name={name}", *([f"loss.params={params}"] if params else []))
    assert named_loss(config, TARGET)(NET, (INPUTS, LABELS)) == loss(NET(INPUTS), LABELS)


RNG = torch.Generator().manual_seed(0)


LOGITS = torch.randn(50, 3, generator=RNG)


def test_losses_are_those_of_the_definitions() -> None:
    classes = torch.arange(50) % 3
    assert Target("classes", 3).loss(LOGITS, classes) == pytest.approx(float(F.cross_entropy(LOGITS, classes)))
    two = (classes > 0).long()
    probability = LOGITS[:, 0].sigmoid()
    expected = -torch.where(two == 1, probability, 1 - probability).log()
    torch.testing.assert_close(Target("classes", 2).losses(LOGITS[:, 0], two), expected)
    labels = torch.stack([two, 1 - two, two], 1)
    each = -torch.where(labels == 1, LOGITS.sigmoid(), (-LOGITS).sigmoid()).log()
    torch.testing.assert_close(Target("multilabel", 3).losses(LOGITS, labels), each.mean(1))


def test_thresholds_that_predict_as_many_as_there_are() -> None:
    labels = torch.stack([torch.arange(50) < each for each in (0, 13, 50)], 1).long()
    target = Target("multilabel", 3)
    moved = LOGITS + matching_offsets(LOGITS, target.shares(labels))
    assert target.decide(moved).sum(0).tolist() == [0, 13, 50]
    assert len(Target("classes", 3).shares(torch.arange(50) % 3)) == 0
