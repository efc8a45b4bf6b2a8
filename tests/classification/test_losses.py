"""Losses compared with their definitions."""

from typing import Any

import pytest
import torch
from torch import nn

from helpers.refusals import assert_refused
from metricopt_ext.classification.losses import CostSensitive, classification_loss, cross_entropy, loss_of
from metricopt_ext.classification.targets import Target
from metricopt_ext.errors import ConfigError

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


def test_models_that_give_a_tuple_are_refused() -> None:
    class Several(nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            return super().forward(x), x

    model = Several(4, 2, dtype=torch.float64)
    for loss in (classification_loss, loss_of(Target("labels", 2))):
        with pytest.raises(ConfigError):
            loss(model, (X, Y))
