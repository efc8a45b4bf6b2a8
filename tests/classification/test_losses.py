"""Losses compared with their definitions."""

import torch
from torch import nn

from metricopt_ext.classification.losses import classification_loss, cross_entropy, loss_of
from metricopt_ext.classification.targets import IGNORED, Target

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.tensor([0, 1, 1, 0, 1, 0])


def test_cross_entropy_of_one_logit_is_that_of_the_two_it_stands_for() -> None:
    logit = X[:, 0]
    both = torch.stack([torch.zeros_like(logit), logit], 1)
    expected = -both.log_softmax(1)[torch.arange(6), Y].mean()
    torch.testing.assert_close(cross_entropy(logit, Y), expected)
    torch.testing.assert_close(cross_entropy(both, Y), expected)


def test_the_loss_is_that_of_what_is_predicted() -> None:
    model = nn.Linear(4, 2).double()
    batch = (X, Y)
    assert loss_of(Target("classes", 2)) is classification_loss
    assert classification_loss(model, batch) == cross_entropy(model(X), Y)
    labels = torch.stack([Y, 1 - Y], 1)
    each = nn.functional.softplus(-(2 * labels - 1) * model(X))  # -log sigmoid of the logit towards its label
    torch.testing.assert_close(loss_of(Target("multilabel", 2))(model, (X, labels)), each.mean())


def test_pixels_that_do_not_count_add_nothing_to_the_loss() -> None:
    class Net(nn.Module):
        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"out": x, "aux": torch.zeros_like(x)}

    maps = X.view(1, 2, 3, 4)
    labels = torch.tensor([[[0, 1, 0, 1]] * 3])
    labels[0, 0] = IGNORED
    loss = loss_of(Target("segmentation", 2))
    chosen = maps.log_softmax(1).gather(1, labels.where(labels != IGNORED, 0)[:, None])[:, 0]
    torch.testing.assert_close(loss(Net(), (maps, labels)), -chosen[labels != IGNORED].mean())
