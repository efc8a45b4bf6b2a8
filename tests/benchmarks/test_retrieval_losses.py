"""The recall loss, a rival, against loops over queries."""

import math

import pytest
import torch
from torch import Tensor, nn

from helpers.tensors import rand

pytest.importorskip("pytorch_metric_learning")

from retrieval_losses import RecallLoss

UNEQUAL = torch.tensor([3, 3, 7, 7, 7, 7, 1, 9, 9, 9])  # a single member, classes of 2, 3 and 4


def cosine(a: Tensor, b: Tensor) -> Tensor:
    return nn.functional.normalize(a) @ nn.functional.normalize(b).T


def true_ranks(scores: list[float]) -> list[int]:
    return [1 + sum(other > score for other in scores) for score in scores]


def naive_recall(
    scores: list[float], positives: list[int], lambda_val: float, weight: str
) -> tuple[float, list[float]]:
    """Loss and interpolated gradient of one query without its own item, in pure Python."""
    ranks, value, slope = true_ranks(scores), 0.0, [0.0] * len(scores)
    for i in positives:
        r = sum(scores[j] > scores[i] for j in range(len(scores)) if j not in positives)
        if weight == "log":
            value, slope[i] = value + math.log(1 + r), 1 / (1 + r)
        else:
            value, slope[i] = value + math.log(1 + math.log(1 + r)), 1 / (1 + r) / (1 + math.log(1 + r))
    slope = [number / len(positives) for number in slope]
    moved = true_ranks([score + lambda_val * number for score, number in zip(scores, slope, strict=True)])
    gradient = [(after - before) / lambda_val for after, before in zip(moved, ranks, strict=True)]
    return value / len(positives), gradient


@pytest.mark.parametrize("apart", [False, True], ids=["square", "references"])
@pytest.mark.parametrize(("margin", "weight"), [(0.0, "log"), (0.1, "loglog")])
@pytest.mark.parametrize("lambda_val", [4.0, 30.0])
def test_recall_loss_equals_a_loop_over_queries(apart: bool, lambda_val: float, margin: float, weight: str) -> None:
    x, y = rand(10, 4).requires_grad_(), UNEQUAL
    references = (rand(23, 4, seed=1), torch.arange(23) % 4 * 2 + 1) if apart else ()  # labels 1, 3, 5, 7
    options = {"weight": torch.log1p} if weight == "log" else {}
    loss = RecallLoss(lambda_val, margin, **options)(x, y, None, *references)
    (gradient,) = torch.autograd.grad(loss, x)

    items, item_labels = references or (x, y)
    scores, values, outer = cosine(x, items), [], torch.zeros(len(x), len(items), dtype=x.dtype)
    for q in range(len(x)):
        others = [j for j in range(len(items)) if references or j != q]
        positives = [place for place, j in enumerate(others) if item_labels[j] == y[q]]
        if positives:
            sides = [-margin / 2 if place in positives else margin / 2 for place in range(len(others))]
            shifted = [scores[q, j].item() + side for j, side in zip(others, sides, strict=True)]
            value, slopes = naive_recall(shifted, positives, lambda_val, weight)
            values.append(value)
            outer[q, others] = torch.tensor(slopes, dtype=x.dtype)
    assert 1 < len(values) < len(x)
    assert loss.item() == pytest.approx(sum(values) / len(values), abs=1e-12)
    assert outer.abs().max() > 0
    (wanted,) = torch.autograd.grad(scores, x, outer / len(values))
    torch.testing.assert_close(gradient, wanted, rtol=1e-10, atol=1e-12)
