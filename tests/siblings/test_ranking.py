"""Losses of rankings: ranks against scipy, positives by counting, and the interpolated gradient by its formula."""

import numpy as np
import pytest
import scipy.stats
import torch
from torch import Tensor

from helpers.tensors import rand
from metricopt_ext.siblings.ranking import positives_up_to, ranking_losses, ranks


def naive_ranks(scores: list[float]) -> list[int]:
    """1 for the highest; the first of equal ones ranks higher."""
    return [1 + sum(o > s or (o == s and j < i) for j, o in enumerate(scores)) for i, s in enumerate(scores)]


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ranks_are_scipys(dtype: torch.dtype, ties: bool) -> None:
    scores = rand(6, 50)
    scores = (scores.round() if ties else scores).to(dtype)
    expected = [scipy.stats.rankdata(-row, method="ordinal") for row in scores.numpy()]
    found = ranks(scores)
    assert found.dtype == dtype
    assert found.tolist() == np.stack(expected).tolist()


def test_positives_are_counted_up_to_each_rank() -> None:
    scores, positive = rand(5, 12).round(), rand(5, 12, seed=1) > 0
    positive[3] = False
    order = ranks(scores)
    expected = [
        [sum(bool(positive[row, j]) for j in range(12) if order[row, j] <= order[row, i]) for i in range(12)]
        for row in range(5)
    ]
    assert positives_up_to(order, positive).tolist() == expected
    assert not positives_up_to(order.requires_grad_(), positive).requires_grad


def mean_of_logs(found: Tensor) -> Tensor:
    """A loss whose slope differs from rank to rank: the mean logarithm of the first three columns' ranks."""
    return found[:, :3].log().mean(dim=1)


def test_a_row_with_a_nan_has_no_loss_and_the_others_keep_theirs() -> None:
    scores = rand(3, 6)
    scores[1, 4] = torch.nan
    losses = ranking_losses(scores, mean_of_logs, 1.0)
    assert losses.isnan().tolist() == [False, True, False]
    assert torch.equal(losses[[0, 2]], mean_of_logs(ranks(scores[[0, 2]])))


@pytest.mark.parametrize("lambda_val", [0.5, 5.0, 50.0])
def test_the_gradient_is_the_interpolation_row_by_row(lambda_val: float) -> None:
    scores = rand(4, 9).requires_grad_()
    losses = ranking_losses(scores, mean_of_logs, lambda_val)
    weights = torch.tensor([1.0, -2.0, 0.0, 7.0]).double()  # what comes after scales rows, and moves no score
    (gradient,) = torch.autograd.grad((weights * losses).sum(), scores)
    moved = 0
    for row in range(4):
        before = naive_ranks(scores[row].tolist())
        assert losses[row].item() == pytest.approx(sum(np.log(before[:3])) / 3)
        slope = [1 / rank / 3 if i < 3 else 0.0 for i, rank in enumerate(before)]
        after = naive_ranks([s + lambda_val * d for s, d in zip(scores[row].tolist(), slope, strict=True)])
        expected = [float(weights[row]) * (a - b) / lambda_val for a, b in zip(after, before, strict=True)]
        assert gradient[row].tolist() == pytest.approx(expected)
        moved += after != before
    assert moved > 0
