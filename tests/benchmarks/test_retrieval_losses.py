"""Smooth-AP and the recall loss against loops over queries, and what miners, references and reducers make of them."""

import doctest
import math
from collections.abc import Callable
from statistics import mean
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("pytorch_metric_learning")

from pytorch_metric_learning import losses, miners, reducers
from pytorch_metric_learning.distances import LpDistance

import retrieval_losses
from helpers.refusals import assert_refused
from helpers.tensors import rand
from retrieval_losses import RecallLoss, SmoothAPLoss

UNEQUAL = torch.tensor([3, 3, 7, 7, 7, 7, 1, 9, 9, 9])  # a single member, classes of 2, 3 and 4


def cosine(a: Tensor, b: Tensor) -> Tensor:
    return nn.functional.normalize(a) @ nn.functional.normalize(b).T


def naive_smooth_ap(x: Tensor, y: Tensor, items: Tensor, item_labels: Tensor, temperature: float) -> Tensor:
    """1 - AP by the definition, for each query with a positive besides itself; items may be the queries themselves."""
    scores, found = cosine(x, items), []
    for q in range(len(x)):
        positives = [j for j in range(len(items)) if item_labels[j] == y[q]]
        if not [j for j in positives if items is not x or j != q]:
            continue
        ap: Any = 0.0
        for i in positives:
            h = {j: torch.sigmoid((scores[q, j] - scores[q, i]) / temperature) for j in range(len(items)) if j != i}
            ap = ap + (1 + sum(h[j] for j in positives if j != i)) / (1 + sum(h.values()))
        found.append(1 - ap / len(positives))
    return torch.stack(found)


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


def queries_and_references(form: str) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor] | tuple[()]]:
    x = rand(10, 4).requires_grad_()
    if form == "square":
        return x, UNEQUAL, ()
    items = 6 if form == "fewer" else 23
    return x, UNEQUAL, (rand(items, 4, seed=1), torch.arange(items) % 4 * 2 + 1)  # labels 1, 3, 5, 7


forms = pytest.mark.parametrize("form", ["square", "fewer", "more"])


@forms
@pytest.mark.parametrize("temperature", [0.01, 0.2])
def test_smooth_ap_equals_a_loop_over_queries(form: str, temperature: float) -> None:
    x, y, references = queries_and_references(form)
    loss = SmoothAPLoss(temperature)(x, y, None, *references)
    expected = naive_smooth_ap(x, y, *(references or (x, y)), temperature).mean()
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    (gradient,), (wanted,) = torch.autograd.grad(loss, x), torch.autograd.grad(expected, x)
    assert gradient.abs().max() > 1e-6
    torch.testing.assert_close(gradient, wanted, rtol=1e-9, atol=1e-10)


@pytest.mark.skipif(not hasattr(losses, "SmoothAPLoss"), reason="this pytorch-metric-learning has no SmoothAPLoss")
def test_smooth_ap_equals_the_other_one_where_that_is_right() -> None:
    x, y = rand(9, 5), torch.arange(3).repeat_interleave(3)
    theirs = losses.SmoothAPLoss()(x.float(), y)  # it knows float32 only
    torch.testing.assert_close(SmoothAPLoss()(x, y).float(), theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("make", [SmoothAPLoss, RecallLoss])
def test_order_of_the_batch_does_not_matter(make: Callable[..., Any]) -> None:
    x, order = rand(10, 5), torch.randperm(10, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(make()(x[order], UNEQUAL[order]), make()(x, UNEQUAL), rtol=1e-12, atol=1e-12)


@pytest.mark.outcome
@pytest.mark.parametrize(("loss_fn", "d", "lr"), [(SmoothAPLoss(0.05), 16, 3.0), (RecallLoss(), 8, 10.0)])
def test_losses_descend(loss_fn: Any, d: int, lr: float) -> None:
    left = []  # in the mean at worst 0.41 ± 0.05
    for seed in range(3):
        x, y = rand(40, d, seed=seed).requires_grad_(), torch.arange(40) % 5
        optimizer = torch.optim.SGD([x], lr=lr)
        before = float(loss_fn(x, y).detach())
        for _ in range(100):
            optimizer.zero_grad()
            loss = loss_fn(x, y)
            loss.backward()
            assert x.grad is not None
            assert x.grad.isfinite().all()
            optimizer.step()
        left.append(float(loss.detach()) / before)
    assert mean(left) < 0.6


@forms
@pytest.mark.parametrize("lambda_val", [4.0, 30.0])
@pytest.mark.parametrize("margin", [0.0, 0.1])
@pytest.mark.parametrize("weight", ["log", "loglog"])
def test_recall_loss_equals_a_loop_over_queries(form: str, lambda_val: float, margin: float, weight: str) -> None:
    x, y, references = queries_and_references(form)
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


def test_recall_loss_is_zero_only_beyond_the_margin() -> None:
    x = torch.tensor([[1.0, 0.0], [0.99, 0.1], [0.0, 1.0], [0.1, 0.99]])
    apart = torch.tensor([0, 0, 1, 1])
    assert RecallLoss(margin=0.5)(x, apart) == 0
    assert RecallLoss(margin=1.9)(x, apart) > 0
    assert RecallLoss()(x, torch.tensor([0, 1, 0, 1])) == pytest.approx(
        (math.log(1 + math.log(2)) + math.log(1 + math.log(3))) / 2  # one negative before two of them, two before two
    )


def test_recall_loss_does_not_depend_on_the_scale_behind_it() -> None:
    x, y = rand(10, 4).requires_grad_(), UNEQUAL
    (one,) = torch.autograd.grad(RecallLoss()(x, y), x)
    (scaled,) = torch.autograd.grad(RecallLoss()(x, y) * 65536, x)  # as a GradScaler does
    torch.testing.assert_close(scaled / 65536, one)


@pytest.mark.parametrize("make", [SmoothAPLoss, RecallLoss])
def test_it_is_a_plain_loss_of_the_library(make: Callable[..., Any]) -> None:
    x, y = rand(10, 4), UNEQUAL
    whole = make(reducer=reducers.DoNothingReducer())(x, y)["loss"]
    assert whole["indices"].tolist() == [0, 1, 2, 3, 4, 5, 7, 8, 9]
    assert make()(x, y) == whole["losses"].mean()
    assert float(make()(x, y + 2**40)) == pytest.approx(float(make()(x, y)))

    mined = miners.MultiSimilarityMiner()(x, y)
    counts = torch.bincount(torch.cat(mined), minlength=len(x))
    weighted = make()(x, y, mined)
    kept = whole["indices"]
    assert float(weighted) == pytest.approx(float((whole["losses"] * counts[kept] / counts.max()).mean()))

    z, z_labels = rand(23, 4, seed=1), torch.arange(23) % 4 * 2 + 1
    alone = make(reducer=reducers.DoNothingReducer())(x, y, None, z, z_labels)["loss"]
    mined = miners.MultiSimilarityMiner()(x, y, z, z_labels)
    counts = torch.bincount(torch.cat([mined[0], mined[2]]), minlength=len(x))  # of the queries, not of the references
    weighted = make()(x, y, mined, z, z_labels)
    wanted = (alone["losses"] * counts[alone["indices"]] / counts.max()).mean()
    assert float(weighted) == pytest.approx(float(wanted))

    both = losses.MultipleLosses([make(), losses.TripletMarginLoss()])(x, y)
    assert float(both) == pytest.approx(float(make()(x, y) + losses.TripletMarginLoss()(x, y)))

    # With another distance, the least distant is the most similar: on the unit circle that is the same order.
    wide = {"temperature": 1.0} if make is SmoothAPLoss else {"margin": 0.0}
    squared = make(distance=LpDistance(power=2), **wide)(x, y)
    halved = make(**{name: value / 2 for name, value in wide.items()})(x, y)
    assert float(squared) == pytest.approx(float(halved))


@pytest.mark.parametrize("make", [SmoothAPLoss, RecallLoss])
def test_batches_without_anything_to_rank(make: Callable[..., Any]) -> None:
    x = rand(4, 3).requires_grad_()
    loss = make()(x, torch.arange(4))
    loss.backward()
    assert loss == 0
    assert (x.grad == 0).all()
    loss = make()(x, torch.zeros(4, dtype=torch.long))  # no negatives: nothing is out of place
    assert loss.item() == pytest.approx(0, abs=1e-12)
    same = torch.ones(6, 3, dtype=torch.float16).requires_grad_()  # all scores tie
    loss = make()(same, torch.arange(6) % 2)
    loss.backward()
    assert loss.isfinite()
    assert same.grad is not None
    assert same.grad.isfinite().all()


@pytest.mark.parametrize("make", [RecallLoss, SmoothAPLoss])
def test_the_loss_of_an_embedding_that_is_nan_is_nan(make: Callable[..., Any]) -> None:
    x = rand(10, 4)
    x[3, 1] = math.nan
    assert make()(x, UNEQUAL).isnan()


def test_refusals() -> None:
    assert_refused(lambda: SmoothAPLoss(temperature=0), ValueError, "temperature", "0")
    assert_refused(lambda: RecallLoss(lambda_val=-1), ValueError, "lambda_val", "-1", "0")
    assert_refused(lambda: RecallLoss(margin=-0.1), ValueError, "margin", "-0.1")
    assert_refused(lambda: RecallLoss(weight="log1p"), ValueError, "weight", "torch.log1p")
    assert_refused(
        lambda: RecallLoss()(rand(4, 2), None, (torch.tensor([0]), torch.tensor([1]), torch.tensor([2]))),
        ValueError,
        "labels",
    )
    assert_refused(lambda: SmoothAPLoss()(rand(4, 2), torch.arange(4) % 2, None, rand(3, 2)), ValueError, "labels")


def test_examples() -> None:
    failed, attempted = doctest.testmod(retrieval_losses)
    assert attempted > 0
    assert failed == 0
