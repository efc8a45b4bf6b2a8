"""What a network predicts: losses, decisions and probabilities of both kinds, against their definitions."""

import pytest
import torch
import torch.nn.functional as F

from metricopt_ext.classification.targets import Target, matching_offsets

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


def test_decisions() -> None:
    assert Target("multilabel", 2).decide(torch.tensor([[0.1, -0.1]])).tolist() == [[1, 0]]
    assert Target("classes", 2).decide(torch.tensor([0.1, -0.1])).tolist() == [1, 0]


def test_probabilities_are_in_double_precision() -> None:
    found = Target("classes", 3).probabilities(LOGITS)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, LOGITS.double().softmax(1))
    assert Target("classes", 2).probabilities(torch.tensor([0.0]))[0].tolist() == [0.5, 0.5]


def test_thresholds_that_predict_as_many_as_there_are() -> None:
    labels = torch.stack([torch.arange(50) < each for each in (0, 13, 50)], 1).long()
    target = Target("multilabel", 3)
    moved = LOGITS + matching_offsets(LOGITS, target.shares(labels))
    assert target.decide(moved).sum(0).tolist() == [0, 13, 50]
    assert len(Target("classes", 3).shares(torch.arange(50) % 3)) == 0
