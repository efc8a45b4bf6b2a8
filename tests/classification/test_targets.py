"""What a network predicts: losses, decisions and probabilities of each kind, against their definitions."""

import math

import pytest
import torch
import torch.nn.functional as F

from helpers.refusals import assert_refused
from metricopt_ext.classification.targets import KINDS, Target, beyond, matching_offsets
from metricopt_ext.errors import DataError

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
    ranks = torch.arange(50) % 4
    passed = torch.tensor([[rank > cut for cut in range(3)] for rank in ranks.tolist()])
    each = -torch.where(passed, LOGITS.sigmoid(), (-LOGITS).sigmoid()).log()
    torch.testing.assert_close(Target("ordinal", 4).losses(LOGITS, ranks), each.mean(1))
    quantity = torch.linspace(0, 1e6, 50, dtype=torch.float64)
    each = ((LOGITS[:, 0] - quantity) / 1e5).square().float()
    for output in (LOGITS[:, 0], LOGITS[:, :1]):
        torch.testing.assert_close(Target("regression", 1, 1e5).losses(output, quantity), each)


def test_outputs_and_decisions() -> None:
    assert [Target(kind, 4).outputs for kind in KINDS[:3]] == [4, 4, 3]
    assert Target("ordinal", 4).decide(torch.tensor([[-1.0, -1, -1], [1, -1, -1], [2, 1, -1], [3, 2, 1]])).tolist() == [
        *(0, 1, 2, 3)
    ]
    assert Target("ordinal", 3).decide(torch.tensor([[-1.0, 1.0]])).tolist() == [1]  # passed once, out of order
    assert Target("multilabel", 2).decide(torch.tensor([[0.1, -0.1]])).tolist() == [[1, 0]]
    assert Target("classes", 2).decide(torch.tensor([0.1, -0.1])).tolist() == [1, 0]
    assert Target("regression", 1).decide(torch.tensor([[2.5]])).tolist() == [2.5]
    assert len({Target(kind, 3).loss_name for kind in KINDS}) == 4  # segmentation has that of classes


def test_probabilities_sum_to_one_and_never_fall_below_zero() -> None:
    for target in (Target("classes", 3), Target("ordinal", 4)):
        found = target.probabilities(LOGITS)
        assert found.dtype == torch.float64
        assert found.shape == (50, target.count)
        torch.testing.assert_close(found.sum(1), torch.ones(50, dtype=torch.float64))
        assert found.min() >= 0
    in_order = torch.tensor([[2.0, 0.0, -1.0]])
    sigma = [1 / (1 + math.exp(-x)) for x in (2.0, 0.0, -1.0)]
    expected = [1 - sigma[0], sigma[0] - sigma[1], sigma[1] - sigma[2], sigma[2]]
    assert Target("ordinal", 4).probabilities(in_order)[0].tolist() == pytest.approx(expected)
    assert Target("classes", 2).probabilities(torch.tensor([0.0]))[0].tolist() == [0.5, 0.5]
    assert_refused(lambda: Target("regression", 1).probabilities(LOGITS[:, 0]), DataError)


def test_thresholds_that_predict_as_many_as_there_are() -> None:
    labels = torch.stack([torch.arange(50) < each for each in (0, 13, 50)], 1).long()
    target = Target("multilabel", 3)
    moved = LOGITS + matching_offsets(LOGITS, target.shares(labels))
    assert target.decide(moved).sum(0).tolist() == [0, 13, 50]
    ranks = torch.arange(50) % 4
    ordinal = Target("ordinal", 4)
    cuts = LOGITS[:, :1] + matching_offsets(LOGITS[:, :1].expand(-1, 3), ordinal.shares(ranks))
    assert torch.bincount(ordinal.decide(cuts)).tolist() == torch.bincount(ranks).tolist()
    assert len(Target("classes", 3).shares(ranks)) == 0
    assert beyond(torch.tensor([0, 2]), 3).tolist() == [[False, False], [True, True]]
